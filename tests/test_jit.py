"""load_jit: what it builds, which errors it shows, and where its sources may lie.

Most modules here export ``answer()`` from a few lines of C++, so that a test may compile where it needs to.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
import tvm_ffi
from answer import HOPPER, answer_kernel, entries, leftovers, load

import jit_kernels
from jit_kernels.jit import errors, source
from jit_kernels.jit.loader import load_jit

pytestmark = pytest.mark.compiler

# What it builds


def test_cuda_and_cpp_sources_build_one_module(shared_cache, tmp_path):
    (tmp_path / "toy.cuh").write_text(
        """#include "arithmetic.h"
namespace toy {
template <int kFactor> __global__ void scale(int* value) { *value *= kFactor; }
template <int kFactor> int times(int value) {
  if (value < 0) scale<kFactor><<<1, 1>>>(nullptr);
  return times_host<kFactor>(value);
}
}
"""
    )
    (tmp_path / "arithmetic.h").write_text("template <int kFactor> int times_host(int x) { return kFactor * x; }\n")
    (tmp_path / "host.h").write_text("namespace host { inline int next(int value) { return value + 1; } }\n")
    module = load_jit(
        "toy",
        3,
        cuda_files=[tmp_path / "toy.cuh"],
        cuda_wrappers=[("times", "toy::times<3>")],
        cpp_files=[str(tmp_path / "host.h")],
        cpp_wrappers=[("next", "host::next")],
        target=HOPPER,
    )
    assert module.times(14) == 42
    assert module.next(41) == 42
    (folder,) = [path for path in entries(shared_cache) if path.name.startswith("toy_3-")]
    meta = json.loads((folder / "meta.json").read_text())
    assert folder.parent.name == meta["target"] == "sm_90a"
    assert folder.parent.parent.name == meta["version"] == jit_kernels.__version__
    assert meta["compile_seconds"] <= 60
    (usage,) = meta["kernels"].values()
    assert 0 < usage["registers"] <= 255
    assert usage["spill_stores"] == usage["spill_loads"] == 0


def test_load_jit_returns_the_module_it_has(isolated_cache, compiler, tmp_path, answer_source):
    path = answer_source(tmp_path)
    first = load_jit("once", cpp_files=[path], header_only=False, target="sm_90a")
    assert load_jit("once", cpp_files=[str(path)], header_only=False, target=HOPPER) is first
    assert first.answer() == 42
    assert len(compiler.compiled) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((), {"cpp_files": ["x.h"]}, ValueError, "needs a name"),
        (("bad",), {}, ValueError, "bad: no source"),
        (("bad",), {"cpp_files": [__file__]}, ValueError, "nothing to export"),
        (("bad",), {"cuda_files": ["no/such.cuh"], "header_only": False}, FileNotFoundError, r"csrc/no/such\.cuh"),
        (("bad",), {"cpp_files": [__file__], "header_only": False, "target": "fast"}, ValueError, "'fast' is no arch"),
    ],
)
def test_arguments_that_name_no_module(arguments, options, error, words):
    with pytest.raises(error, match=words):
        load_jit(*arguments, **{"target": HOPPER, **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device to take the target from")
def test_without_a_gpu_the_target_must_be_named(tmp_path, answer_source):
    with pytest.raises((ValueError, errors.JitError), match="target"):
        load_jit("anywhere", cpp_files=[answer_source(tmp_path)], header_only=False)


def test_threads_share_one_build(isolated_cache, compiler, tmp_path, answer_source):
    path = answer_source(tmp_path)
    modules = []
    threads = [
        threading.Thread(
            target=lambda: modules.append(load_jit("shared", cpp_files=[path], header_only=False, target=HOPPER))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(modules) == 4
    assert len({id(module) for module in modules}) == 1
    assert len(compiler.compiled) == 1


def test_torch_compile_does_not_trace_into_the_loader(shared_cache, tmp_path, answer_source, monkeypatch):
    path = answer_source(tmp_path, 47)
    traced = []
    convert = torch._dynamo.convert_frame.ConvertFrame.__call__

    def watch(self, frame, *args, **options):
        traced.append(Path(frame.f_code.co_filename))
        return convert(self, frame, *args, **options)

    def function(x):
        return x + load_jit("traced", cpp_files=[path], header_only=False, target="sm_90a").answer()

    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.convert_frame.ConvertFrame, "__call__", watch)
    assert torch.compile(function, backend="eager")(torch.ones(2)).tolist() == [48, 48]
    assert Path(__file__) in traced
    assert not [file for file in traced if file.is_relative_to(source.PACKAGE / "jit")]


# Errors a person can act on


FAULTS = {
    "type": ("int broken( { }\n", {}, errors.CompileError, r"answer\.cpp:1:\d+: error: ", "see the compiler's output"),
    "warning first": (
        '#warning "no error in sight"\nint broken( { }\n',
        {},
        errors.CompileError,
        r"failed: \S*answer\.cpp:2:\d+: error: ",
        "see",
    ),
    "missing header": (
        "#include <no/such/header.h>\n",
        {},
        errors.HeaderNotFoundError,
        r"fatal error: no/such/header\.h: No such file",
        "extra_include_paths",
    ),
    "missing library": ("", {"extra_ldflags": ["-lnosuch"]}, errors.LinkError, "cannot find -lnosuch", "extra_ldflags"),
    "missing symbol": (
        'extern "C" int absent(); int use() { return absent(); }\n',
        {"extra_ldflags": ["-Wl,--no-undefined"]},
        errors.LinkError,
        "undefined reference to .absent",
        "no definition",
    ),
    "missing symbol, noticed at load": (
        'extern "C" int absent(); int use = absent();\n',
        {"extra_ldflags": ["-Wl,-z,now"]},
        errors.AbiMismatchError,
        "undefined symbol: absent",
        "",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_build_shows_the_first_error_the_command_and_a_hint(isolated_cache, tmp_path, answer_source, fault):
    head, options, kind, words, hint = FAULTS[fault]
    path = answer_source(tmp_path, head=head)
    with pytest.raises(errors.JitError) as raised:
        load(answer_kernel(path, **options))
    assert type(raised.value) is kind
    text = str(raised.value)
    first = next(line for line in text.splitlines() if re.search(words, line))
    assert hint in raised.value.cure
    if kind is not errors.AbiMismatchError:
        assert first == text.splitlines()[0]  # what people read, and what a log line keeps
        assert re.search(r"^  command: .*(-c .*answer\.cpp|-shared)", text, re.M)
    assert not entries(isolated_cache)
    assert not leftovers(isolated_cache)


def test_an_error_in_cuda_is_shown_in_nvccs_words(isolated_cache, tmp_path, answer_source):
    path = answer_source(tmp_path, name="broken.cu", head="__global__ int wrong() { return 1; }\n")
    with pytest.raises(errors.CompileError, match=r"broken\.cu\(1\): error: ") as raised:
        load_jit("broken", cuda_files=[path], header_only=False, target=HOPPER)
    assert "sm_90a" in str(raised.value)
    assert "nvcc" in str(raised.value)


def test_a_failed_build_is_tried_again_when_asked_again(isolated_cache, tmp_path, answer_source):
    path = answer_source(tmp_path, head="int broken( { }\n")
    with pytest.raises(errors.CompileError):
        load_jit("mended", cpp_files=[path], header_only=False, target=HOPPER)
    answer_source(tmp_path)
    assert load_jit("mended", cpp_files=[path], header_only=False, target=HOPPER).answer() == 42


def test_compiling_can_be_forbidden(copied, tmp_path, answer_source, monkeypatch):
    monkeypatch.setenv("JIT_KERNELS_COMPILE", "never")
    path, _ = copied
    assert load(answer_kernel(path)).answer() == 42
    with pytest.raises(errors.CompileForbiddenError, match="other for sm_90a is not built") as raised:
        load(answer_kernel(answer_source(tmp_path, 43), "other"))
    assert "jit-kernels warmup --arch sm_90a --output DIR" in raised.value.cure
    assert "JIT_KERNELS_PREBUILT_DIR=DIR" in raised.value.cure


def test_a_forbidden_compile_takes_any_compilers_entry(copied, compiler, monkeypatch):
    path, _ = copied
    assert answer_kernel(path).find() is None  # built by another host compiler
    monkeypatch.setenv("JIT_KERNELS_COMPILE", "never")
    assert load(answer_kernel(path)).answer() == 42


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("JIT_KERNELS_COMPILE", "sometimes", "JIT_KERNELS_COMPILE='sometimes': expected one of auto, never"),
        ("JIT_KERNELS_BUILD_TIMEOUT", "soon", "JIT_KERNELS_BUILD_TIMEOUT='soon': expected a number of seconds"),
        ("JIT_KERNELS_BUILD_TIMEOUT", "-1", "JIT_KERNELS_BUILD_TIMEOUT='-1': .*greater than 0"),
    ],
)
def test_a_wrong_variable_is_shown(isolated_cache, tmp_path, answer_source, monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        load(answer_kernel(answer_source(tmp_path)))


# Odd places


def test_paths_with_blanks_and_quotes_work(tmp_path, answer_source, monkeypatch):
    odd = tmp_path / "odd 'folder'"
    include = odd / "in clude's"
    include.mkdir(parents=True)
    (include / "value.h").write_text("#define VALUE 45\n")
    path = answer_source(odd, "VALUE", "an 'answer'.cu", head="#include <value.h>\n__global__ void nothing() {}\n")
    monkeypatch.setenv("JIT_KERNELS_CACHE_DIR", str(odd / "ca che"))
    options = {"header_only": False, "extra_include_paths": [include], "target": HOPPER}
    assert load_jit("odd name's", "<x>", cuda_files=[path], **options).answer() == 45
    assert len(entries(odd / "ca che")) == 1


@pytest.mark.parametrize("odd", ['quo"te', "dol$lar", "per%cent", "colon:", "hash#", "back\\slash", "ünï"])
def test_host_sources_may_lie_anywhere(tmp_path, answer_source, monkeypatch, odd):
    folder = tmp_path / odd
    folder.mkdir()
    (folder / "value.h").write_text("#define VALUE 46\n")
    path = answer_source(folder, "VALUE", head="#include <value.h>\n")
    monkeypatch.setenv("JIT_KERNELS_CACHE_DIR", str(folder / "cache"))
    assert load(answer_kernel(path, extra_include_paths=[folder])).answer() == 46


def test_a_virtual_environment_beside_the_source_is_no_part_of_it(isolated_cache, tmp_path, monkeypatch):
    """A kernel at a project's root, with the headers of tvm-ffi in the project's .venv."""
    for name in ("find_include_path", "find_dlpack_include_path"):
        installed = Path(getattr(tvm_ffi.libinfo, name)())
        moved = tmp_path / ".venv" / name
        shutil.copytree(installed, moved)
        monkeypatch.setattr(tvm_ffi.libinfo, name, lambda moved=moved: str(moved))
    (tmp_path / "toy.h").write_text("namespace toy { inline int next(int value) { return value + 1; } }\n")
    module = load_jit("venv", cpp_files=[tmp_path / "toy.h"], cpp_wrappers=[("next", "toy::next")], target=HOPPER)
    assert module.next(41) == 42


def test_symlinked_sources_and_caches_work(tmp_path, answer_source, monkeypatch):
    path = answer_source(tmp_path / "real")
    (tmp_path / "real-cache").mkdir(mode=0o700)
    (tmp_path / "sources").symlink_to(path.parent)
    (tmp_path / "cache").symlink_to(tmp_path / "real-cache")
    monkeypatch.setenv("JIT_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    assert load(answer_kernel(tmp_path / "sources/answer.cpp")).answer() == 42
    assert len(entries(tmp_path / "real-cache")) == 1
    assert load(answer_kernel(path)).answer() == 42
    assert len(entries(tmp_path / "real-cache")) == 1
