"""The key of a cache entry: what makes another one, and what doesn't."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tvm_ffi
from answer import BLACKWELL, HOPPER, answer_kernel, entries, leftovers, load

from jit_kernels.jit import errors, source
from jit_kernels.jit.loader import kernel

pytestmark = pytest.mark.compiler


def edit(name: str):
    def change(tree: Path) -> dict:
        path = tree / name
        path.write_text(path.read_text() + "// changed\n")
        return {}

    return change


CHANGES = {
    "template argument": lambda tree: {"args": ("toy", 65)},
    "name": lambda tree: {"args": ("boy", 64)},
    "export": lambda tree: {"cuda_wrappers": [("walk", "toy::run<64>")]},
    "kernel": lambda tree: {"cuda_wrappers": [("run", "toy::run<65>")]},
    "source": edit("src/toy.cuh"),
    "second source of the same name": edit("other/toy.cuh"),
    "sibling header": edit("src/sibling.cuh"),
    "sibling header of the second source": edit("other/sibling.cuh"),
    "header in extra_include_paths": edit("include/shared/outer.cuh"),
    "nested header": edit("include/shared/detail/inner.cuh"),
    "conditional header": edit("include/conditional.h"),
    "header above": edit("common.h"),
    "cuda flags": lambda tree: {"extra_cuda_cflags": ["--use_fast_math"]},
    "host flags": lambda tree: {"extra_cflags": ["-g"]},
    "linker flags": lambda tree: {"extra_ldflags": ["-lm"]},
    "arch": lambda tree: {"target": BLACKWELL},
    "header_only": lambda tree: {"header_only": False},
}


@pytest.fixture
def tree(tmp_path):
    def plant(root: Path) -> Path:
        for name, text in {
            "src/toy.cuh": '#include "sibling.cuh"\n#include <shared/outer.cuh>\n#include "../common.h"\n',
            "src/sibling.cuh": "\n",
            "other/toy.cuh": '#include "sibling.cuh"\n',
            "other/sibling.cuh": "// another\n",
            "include/shared/outer.cuh": ' # include "detail/inner.cuh"\n#if 0\n#include <conditional.h>\n#endif\n',
            "include/shared/detail/inner.cuh": "#include <shared/outer.cuh>\n",
            "include/conditional.h": "\n",
            "include/unrelated.h": "\n",
            "common.h": "\n",
        }.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root

    plant(tmp_path / "tree")
    return plant


def key(root: Path, args=("toy", 64), target=HOPPER, **options) -> str:
    options = {
        "cuda_files": [root / "src/toy.cuh", root / "other/toy.cuh"],
        "cuda_wrappers": [("run", "toy::run<64>")],
        "extra_include_paths": [root / "include"],
        **options,
    }
    return kernel(*args, target=target, **options).source.key(target)


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_gives_another_key(tree, tmp_path, what):
    root = tmp_path / "tree"
    before = key(root)
    assert key(root) == before
    assert key(root, **CHANGES[what](root)) != before


def test_location_and_unrelated_files_give_the_same_key(tree, tmp_path):
    before = key(tmp_path / "tree")
    (tmp_path / "tree/include/unrelated.h").write_text("changed")
    assert key(tmp_path / "tree") == before
    assert key(tree(tmp_path / "some/where 'else'")) == before
    os.symlink(tmp_path / "tree", tmp_path / "link")
    assert key(tmp_path / "link") == before


def test_a_header_that_comes_to_shadow_another_gives_another_key(tree, tmp_path):
    before = key(tmp_path / "tree")
    (tmp_path / "tree/src/shared").mkdir()
    (tmp_path / "tree/src/conditional.h").write_text("\n")  # <…> does not look beside the source
    assert key(tmp_path / "tree") == before
    (tmp_path / "first/shared").mkdir(parents=True)
    (tmp_path / "first/shared/outer.cuh").write_text("// shadows\n")
    after = key(tmp_path / "tree", extra_include_paths=[tmp_path / "first", tmp_path / "tree/include"])
    assert after != before


def test_other_versions_of_tvm_ffi_and_of_the_package_give_another_key(tree, tmp_path, monkeypatch):
    before = key(tmp_path / "tree")
    with monkeypatch.context() as patch:
        patch.setattr(tvm_ffi, "__version__", "9.9.9")
        assert key(tmp_path / "tree") != before
    with monkeypatch.context() as patch:
        patch.setattr(source, "__version__", "9.9.9")
        assert key(tmp_path / "tree") != before
    assert key(tmp_path / "tree") == before


def test_an_edited_header_is_compiled_in(isolated_cache, tmp_path, answer_source):
    header = tmp_path / "include/deep/value.h"
    header.parent.mkdir(parents=True)
    path = answer_source(tmp_path / "src", "VALUE", head="#include <deep/value.h>\n")
    for value in (7, 8):
        header.write_text(f"#define VALUE {value}\n")
        assert load(answer_kernel(path, extra_include_paths=[tmp_path / "include"])).answer() == value
    assert len(entries(isolated_cache)) == 2


@pytest.mark.parametrize(
    "flags",
    [("-I{0}",), ("-I", "{0}"), ("-isystem{0}",), ("-iquote", "{0}"), ("-include{0}/value.h",), ("-Wp,-I{0}",)],
    ids=lambda flags: flags[0].partition("{")[0],
)
def test_a_header_reached_through_flags_is_in_the_key_or_refused(isolated_cache, tmp_path, answer_source, flags):
    header = tmp_path / "elsewhere/value.h"
    header.parent.mkdir()
    head = "" if "/value.h" in flags[0] else '#include "value.h"\n'
    path = answer_source(tmp_path / "src", "VALUE", head=head)
    answers = []
    for value in (7, 8):
        header.write_text(f"#define VALUE {value}\n")
        try:
            answers.append(
                load(answer_kernel(path, extra_cflags=[flag.format(header.parent) for flag in flags])).answer()
            )
        except (ValueError, errors.CompileError) as error:
            answers.append("extra_include_paths" in str(error) or "the cache key can't see" in str(error))
    assert answers in ([7, 8], [True, True])


@pytest.mark.parametrize(
    ("name", "value"), [("NVCC_APPEND_FLAGS", "-lineinfo"), ("NVCC_PREPEND_FLAGS", "-G"), ("CPATH", "/opt/include")]
)
def test_variables_that_the_compilers_read_count_as_another_compiler(copied, monkeypatch, name, value):
    path, entry = copied
    found = answer_kernel(path).find()
    assert found is not None
    assert found.folder == entry
    monkeypatch.setenv(name, value)
    assert answer_kernel(path).find() is None


@pytest.mark.parametrize("folder", ["plain", "odd 'folder'", "dollar $HOME #1"])
@pytest.mark.parametrize("head", ["#define NAME <value.h>\n#include NAME\n", "#include \\\n<value.h>\n"])
def test_an_include_that_the_key_cannot_see_is_refused(isolated_cache, tmp_path, answer_source, folder, head):
    include = tmp_path / folder / "include"
    include.mkdir(parents=True)
    (include / "value.h").write_text("#define VALUE 7\n")
    path = answer_source(tmp_path / folder, "VALUE", head=head)
    with pytest.raises(errors.CompileError, match=r"value\.h.* the cache key can't see"):
        load(answer_kernel(path, extra_include_paths=[include]))
    assert not entries(isolated_cache)
    assert not leftovers(isolated_cache)


def test_another_compiler_gives_another_entry_and_each_keeps_its_own(isolated_cache, compiler, tmp_path, answer_source):
    wanted = answer_kernel(answer_source(tmp_path))
    for version in ("1.0", "2.10", "1.0"):
        compiler.release(version)
        assert load(wanted).answer() == 42
    assert len(entries(isolated_cache)) == len(compiler.compiled) == 2


def test_two_targets_live_side_by_side(isolated_cache, compiler, tmp_path, answer_source):
    path = answer_source(tmp_path)
    for _ in range(2):
        for target in (HOPPER, BLACKWELL):
            load(answer_kernel(path, target=target))
    assert len(compiler.compiled) == 2
    assert {folder.parent.name for folder in entries(isolated_cache)} == {"sm_90a", "sm_100a"}
