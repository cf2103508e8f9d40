"""load_jit and the cache: what is built, when it is built again, and whom the cache trusts.

Most modules here export ``answer()`` from a few lines of C++, so that a test may compile where it needs to.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pwd
import re
import shutil
import signal
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import tvm_ffi

import jit_kernels
from jit_kernels.jit import cache, errors, source, store
from jit_kernels.jit.arch import Target
from jit_kernels.jit.loader import Kernel, kernel, load_jit

pytestmark = pytest.mark.compiler

HOPPER = Target.parse("sm_90a")
BLACKWELL = Target.parse("sm_100a")
SOMEBODY = 54321


def can_give_away() -> bool:
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.chown(file.name, SOMEBODY, SOMEBODY)
        except OSError:
            return False
        return True


ROOT_ONLY = pytest.mark.skipif(not can_give_away(), reason="only root can give a file to another user")

# What a fresh process runs; it reports in JSON.
FRESH = """
import json, subprocess, sys, time, warnings
import torch, tvm_ffi
import jit_kernels
from jit_kernels.jit.loader import kernel

commands, seen = [], []
class Popen(subprocess.Popen):
    def __init__(self, args, *rest, **options):
        commands.append(str(args))
        super().__init__(args, *rest, **options)
subprocess.Popen = Popen
warnings.simplefilter("always")
warnings.showwarning = lambda message, *rest: seen.append(str(message))
begin = time.perf_counter()
try:
    result = jit_kernels.load_jit({name!r}, cpp_files=[{path!r}], header_only=False, target="sm_90a").answer()
except Exception as error:
    result = f"{{type(error).__name__}}: {{error}}"
print(json.dumps(dict(result=result, seconds=time.perf_counter() - begin, commands=commands, warnings=seen)))
"""


def fresh(path: Path, name: str = "answer") -> str:
    return FRESH.format(name=name, path=str(path))


def answer_kernel(path: Path, *args: object, **options) -> Kernel:
    return kernel(*(args or ("answer",)), cpp_files=[path], header_only=False, **{"target": HOPPER, **options})


def load(wanted: Kernel):
    """Loads as a new process would: past the modules that this one remembers."""
    return cache.load(wanted.source, wanted.target)


def entries(root: Path) -> list[Path]:
    return sorted(meta.parent for meta in root.glob("*/*/[!.]*/meta.json"))


def leftovers(root: Path) -> list[str]:
    """Whatever lies beside the entries, but for their locks."""
    return [path.name for path in root.glob("*/*/.*") if not path.name.endswith(".lock")]


class Compiler:
    """A host compiler that logs each compilation, and waits as long as a file named ``slow`` lies beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.program = folder / "logging-c++"
        self.release("1.0")
        self.program.chmod(0o755)

    def release(self, version: str) -> None:
        self.program.write_text(
            f"""#!/bin/sh
case " $* " in
  *" --version "*) echo 'logging-c++ {version}'; exit ;;
  *" -c "*) echo $$ >> '{self.folder}/compiled' ;;
esac
while [ -e '{self.folder}/slow' ]; do sleep 0.05; done
exec {shutil.which("c++")} "$@"
"""
        )

    @property
    def slow(self) -> Path:
        return self.folder / "slow"

    @property
    def compiled(self) -> list[int]:
        """The process id of each compilation so far."""
        log = self.folder / "compiled"
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while not self.compiled:
            assert time.monotonic() < deadline, "the build did not begin"
            time.sleep(0.02)


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    made = Compiler(tmp_path / "compiler")
    monkeypatch.setenv("CXX", str(made.program))
    yield made
    made.slow.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory, answer_source):
    """A source and a cache root that holds it. The library in it is never loaded from there: copy it, don't use it."""
    folder = tmp_path_factory.mktemp("built")
    path = answer_source(folder)
    answer_kernel(path).compile(folder / "cache")
    return path, folder / "cache"


@pytest.fixture
def copied(built, isolated_cache):
    """The source, and its entry in a cache of the test's own."""
    path, root = built
    shutil.copytree(root, isolated_cache, copy_function=shutil.copy2)
    return path, entries(isolated_cache)[0]


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


# A hit


def test_a_hit_needs_no_compiler_no_ninja_and_no_time(copied, run_python):
    path, _ = copied
    for _ in range(3):  # a busy machine only adds to the time
        report = json.loads(run_python(fresh(path), env={"PATH": "", "CUDA_HOME": None, "CUDA_PATH": None}))
        assert report["result"] == 42
        assert not [command for command in report["commands"] if "ninja" in command or "-c" in command]
        assert not report["warnings"]
        if report["seconds"] < 0.05:
            return
    pytest.fail(f"a hit took {report['seconds']:.3f} s")


def test_a_second_start_runs_no_program(isolated_cache, tmp_path, answer_source, run_python):
    path = answer_source(tmp_path)
    cold, warm = (json.loads(run_python(fresh(path))) for _ in range(2))
    assert cold["result"] == warm["result"] == 42
    assert cold["commands"]
    assert not warm["commands"]


def test_a_read_only_cache_serves_hits_and_a_miss_goes_elsewhere(copied, tmp_path, answer_source, run_python):
    path, entry = copied
    root = entry.parents[2]
    other = answer_source(tmp_path, 43)
    everything = [root, *root.rglob("*")]
    for each in everything:
        each.chmod(each.stat().st_mode & ~0o222)
    try:
        report = json.loads(run_python(fresh(path), bound=True))
        assert report["result"] == 42
        assert not report["warnings"]
        report = json.loads(run_python(fresh(other, "other"), bound=True))
        assert report["result"] == 43
        (warning,) = report["warnings"]
        assert str(root) in warning
        assert "JIT_KERNELS_CACHE_DIR" in warning
        report = json.loads(run_python(fresh(other, "other"), bound=True))
        assert report["result"] == 43
        assert not [command for command in report["commands"] if "ninja" in command]
    finally:
        for each in everything:
            each.chmod(each.stat().st_mode | 0o200)


def test_a_cache_in_a_folder_that_cannot_be_searched_is_as_good_as_none(built, tmp_path, run_python):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o600)
    report = json.loads(
        run_python(fresh(built[0]), bound=True, env={"JIT_KERNELS_CACHE_DIR": closed / "x", "TMPDIR": tmp_path})
    )
    assert report["result"] == 42
    assert any(str(closed) in warning for warning in report["warnings"])


def test_a_user_without_home_gets_a_temporary_cache(isolated_cache, built, monkeypatch):
    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "JIT_KERNELS_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert load(answer_kernel(built[0])).answer() == 42
    (root,) = cache.roots()
    assert len(entries(root)) == 1


def test_the_default_place_follows_xdg_and_home(monkeypatch, tmp_path):
    monkeypatch.delenv("JIT_KERNELS_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.roots()[0] == tmp_path / ".cache/jit-kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.roots()[0] == tmp_path / "xdg/jit-kernels"


def test_where_nothing_can_be_written_the_error_names_the_places(tmp_path, built, run_python):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    code = fresh(built[0]).replace("begin =", f"import tempfile; tempfile.tempdir = {str(locked)!r}\nbegin =", 1)
    report = json.loads(run_python(code, bound=True, env={"JIT_KERNELS_CACHE_DIR": locked / "cache"}))
    assert report["result"].startswith("CacheError")
    assert str(locked / "cache") in report["result"]
    assert "set JIT_KERNELS_CACHE_DIR" in report["result"]


@ROOT_ONLY
def test_a_full_disk_is_a_clear_error_and_leaves_nothing(built, tmp_path, run_python):
    mount = tmp_path / "small"
    mount.mkdir()
    code = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None) or libc.mount(
    b"tmpfs", {str(mount)!r}.encode(), b"tmpfs", 0, b"size=24k,mode=700"):
    print("null"); raise SystemExit
{fresh(built[0])}
print(json.dumps([name for _, folders, files in os.walk({str(mount)!r}) for name in folders + files]))
"""
    out = run_python(code, env={"JIT_KERNELS_CACHE_DIR": mount}).splitlines()
    if out == ["null"]:
        pytest.skip("this machine lets nobody mount a small disk")
    report, left = map(json.loads, out)
    assert re.match("DiskFullError: ", report["result"])
    assert re.search("no space", report["result"], re.I)
    assert "free some" in report["result"]
    assert not [name for name in left if "staging" in name or name.endswith(".so")]


# The key


def change_nothing(tree: Path) -> dict:
    return {}


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


# Damage


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def corrupt(entry: Path) -> None:
    content = bytearray((entry / "answer.so").read_bytes())
    content[len(content) // 2] ^= 0xFF
    replace(entry / "answer.so", bytes(content))


def unloadable(entry: Path) -> None:
    """As one built against a newer libc: whole by its hash, and refused by the loader."""
    content = b"\x7fELF of another machine"
    replace(entry / "answer.so", content)
    meta = json.loads((entry / "meta.json").read_text())
    meta |= {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    replace(entry / "meta.json", json.dumps(meta).encode())


def no_folder(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("")


DAMAGES = {
    "corrupt library": corrupt,
    "truncated library": lambda entry: replace(entry / "answer.so", (entry / "answer.so").read_bytes()[:1000]),
    "empty library": lambda entry: replace(entry / "answer.so", b""),
    "no library": lambda entry: (entry / "answer.so").unlink(),
    "unloadable library": unloadable,
    "no meta": lambda entry: (entry / "meta.json").unlink(),
    "truncated meta": lambda entry: replace(entry / "meta.json", b'{"name": "ans'),
    "other meta": lambda entry: replace(entry / "meta.json", b"[]"),
    "binary meta": lambda entry: replace(entry / "meta.json", b"\xff\x00"),
    "empty folder": lambda entry: [path.unlink() for path in entry.iterdir()],
    "a file in its place": no_folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_built_again_once_with_a_warning(copied, damage):
    path, entry = copied
    wanted = answer_kernel(path)
    DAMAGES[damage](entry)
    with pytest.warns(store.JitWarning, match="building it again") as seen:
        assert load(wanted).answer() == 42
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(wanted).answer() == 42
    assert entries(entry.parents[2]) == [entry]
    assert not leftovers(entry.parents[2])


def test_compile_mends_a_damaged_entry_too(copied):
    path, entry = copied
    corrupt(entry)
    with pytest.warns(store.JitWarning, match="building it again"):
        assert answer_kernel(path).compile().folder == entry
    assert load(answer_kernel(path)).answer() == 42


# Trust


def test_what_is_created_is_nobody_elses_to_write(isolated_cache, tmp_path, answer_source):
    before = os.umask(0)
    try:
        load(answer_kernel(answer_source(tmp_path)))
    finally:
        os.umask(before)
    for path in (isolated_cache, *isolated_cache.rglob("*")):
        mode = path.stat().st_mode & 0o777
        if path.is_dir():
            assert mode == 0o700, path
        elif not path.name.endswith(".lock"):
            assert not mode & 0o022, path


PARTS = {
    "root": lambda entry: entry.parents[2],
    "version": lambda entry: entry.parents[1],
    "shelf": lambda entry: entry.parents[0],
    "entry": lambda entry: entry,
    "library": lambda entry: entry / "answer.so",
}


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("part", ["root", "entry", "library"])
def test_what_others_can_write_is_refused(copied, part, mode):
    path, entry = copied
    suspect = PARTS[part](entry)
    suspect.chmod(suspect.stat().st_mode | mode)
    with pytest.raises(errors.UntrustedCacheError, match="can be written by others") as raised:
        load(answer_kernel(path))
    assert str(suspect) in str(raised.value)
    assert "chmod go-w" in raised.value.cure
    suspect.chmod(suspect.stat().st_mode & ~mode)
    assert load(answer_kernel(path)).answer() == 42


@ROOT_ONLY
@pytest.mark.parametrize("part", ["root", "entry", "library"])
def test_what_belongs_to_somebody_else_is_refused(copied, part):
    path, entry = copied
    suspect = PARTS[part](entry)
    os.chown(suspect, SOMEBODY, SOMEBODY)
    with pytest.raises(errors.UntrustedCacheError, match=f"belongs to user {SOMEBODY}") as raised:
        load(answer_kernel(path))
    assert str(suspect) in str(raised.value)


@pytest.mark.parametrize("part", ["root", "version", "shelf"])
def test_nothing_is_built_where_others_can_write(copied, tmp_path, answer_source, part):
    suspect = PARTS[part](copied[1])
    suspect.chmod(0o777)
    with pytest.raises(errors.UntrustedCacheError, match="can be written by others"):
        load(answer_kernel(answer_source(tmp_path, 43), "other"))


@ROOT_ONLY
def test_a_strangers_temporary_folder_blocks_nobody(isolated_cache, tmp_path, answer_source):
    elsewhere = cache.roots()[1]
    elsewhere.mkdir()
    os.chown(elsewhere, SOMEBODY, SOMEBODY)
    assert load(answer_kernel(answer_source(tmp_path))).answer() == 42


# Builds that end badly


def test_a_killed_build_blocks_nobody(isolated_cache, compiler, tmp_path, answer_source, start_python, monkeypatch):
    path = answer_source(tmp_path)
    compiler.slow.touch()
    process = start_python(fresh(path))
    compiler.wait()
    assert leftovers(isolated_cache)

    # As long as it lives, it holds the lock.
    monkeypatch.setenv("JIT_KERNELS_BUILD_TIMEOUT", "0.3")
    with pytest.raises(errors.LockTimeoutError, match=rf"locked for 0\.3 s by process {process.pid} on ") as raised:
        load(answer_kernel(path))
    assert "JIT_KERNELS_BUILD_TIMEOUT" in raised.value.cure
    monkeypatch.delenv("JIT_KERNELS_BUILD_TIMEOUT")

    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    compiler.slow.unlink()
    begin = time.monotonic()
    assert load(answer_kernel(path)).answer() == 42
    assert time.monotonic() - begin < 20
    assert not leftovers(isolated_cache)
    assert len(entries(isolated_cache)) == 1


def test_a_build_that_takes_too_long_is_stopped(isolated_cache, compiler, tmp_path, answer_source, monkeypatch):
    path = answer_source(tmp_path)
    compiler.slow.touch()
    monkeypatch.setenv("JIT_KERNELS_BUILD_TIMEOUT", "0.5")
    with pytest.raises(errors.CompileError, match=r"took more than 0\.5 s") as raised:
        load(answer_kernel(path))
    assert "JIT_KERNELS_BUILD_TIMEOUT" in raised.value.cure
    assert not leftovers(isolated_cache)
    (compilation,) = compiler.compiled
    deadline = time.monotonic() + 5
    while alive(compilation) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(compilation)


def alive(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_processes_that_start_cold_compile_once(isolated_cache, compiler, tmp_path, answer_source, start_python):
    path = answer_source(tmp_path)
    compiler.slow.touch()
    processes = [start_python(fresh(path)) for _ in range(4)]
    compiler.wait()
    time.sleep(2)  # the others arrive while the first one builds
    compiler.slow.unlink()
    reports = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert [report["result"] for report in reports] == [42] * 4
    assert len(compiler.compiled) == 1
    assert not [warning for report in reports for warning in report["warnings"]]


def test_the_loser_of_a_rename_takes_the_winners(isolated_cache, compiler, tmp_path, answer_source, monkeypatch):
    """Where locks don't reach, two builds of one entry publish it: the second finds it there."""
    path = answer_source(tmp_path)

    def unsupported(*arguments):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    compiler.slow.touch()
    results = []
    threads = [threading.Thread(target=lambda: results.append(load(answer_kernel(path)).answer())) for _ in range(2)]
    threads[0].start()
    compiler.wait()
    threads[1].start()
    while len(compiler.compiled) < 2 and threads[0].is_alive() and threads[1].is_alive():
        time.sleep(0.02)
    compiler.slow.unlink()
    for thread in threads:
        thread.join()
    assert results == [42, 42]
    assert len(entries(isolated_cache)) == 1
    assert not leftovers(isolated_cache)


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


# Prebuilt folders


def test_prebuilt_folders_come_first_in_their_order(isolated_cache, built, tmp_path, monkeypatch):
    path, root = built
    shutil.copytree(root, tmp_path / "second")
    shutil.copytree(root, tmp_path / "third")
    shutil.copytree(root, isolated_cache)
    places = [tmp_path / "absent", tmp_path / "second", tmp_path / "third"]
    monkeypatch.setenv("JIT_KERNELS_PREBUILT_DIR", os.pathsep.join(map(str, places)))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("JIT_KERNELS_COMPILE", "never")
    found = answer_kernel(path).find()
    assert found is not None
    assert found.folder.is_relative_to(tmp_path / "second")
    assert load(answer_kernel(path)).answer() == 42


def test_a_damaged_prebuilt_entry_is_passed_over_and_left_as_it_is(isolated_cache, built, tmp_path, monkeypatch):
    path, root = built
    overlay = tmp_path / "overlay"
    shutil.copytree(root, overlay)
    corrupt(entries(overlay)[0])
    before = {each: each.read_bytes() for each in overlay.rglob("*") if each.is_file()}
    shutil.copytree(root, isolated_cache)
    monkeypatch.setenv("JIT_KERNELS_PREBUILT_DIR", str(overlay))
    monkeypatch.setenv("JIT_KERNELS_COMPILE", "never")  # the cache has a good one
    with pytest.warns(store.JitWarning, match=re.escape(str(overlay))):
        assert load(answer_kernel(path)).answer() == 42
    assert {each: each.read_bytes() for each in overlay.rglob("*") if each.is_file()} == before


def test_a_cache_built_for_an_image_is_a_prebuilt_folder(isolated_cache, tmp_path, answer_source, monkeypatch):
    path = answer_source(tmp_path, 44)
    entry = answer_kernel(path, "image", target=BLACKWELL).compile(tmp_path / "image")
    assert entry.folder.is_relative_to(tmp_path / "image")
    assert not isolated_cache.exists() or not entries(isolated_cache)
    monkeypatch.setenv("JIT_KERNELS_PREBUILT_DIR", str(tmp_path / "image"))
    monkeypatch.setenv("JIT_KERNELS_COMPILE", "never")
    assert load(answer_kernel(path, "image", target=BLACKWELL)).answer() == 44


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


# Keeping house


def test_listing_and_clean_leave_prebuilt_folders_alone(copied, built, tmp_path, monkeypatch):
    _, entry = copied
    shutil.copytree(built[1], tmp_path / "overlay")
    monkeypatch.setenv("JIT_KERNELS_PREBUILT_DIR", str(tmp_path / "overlay"))
    assert [each.prebuilt for each in store.listing()] == [True, False]
    assert [each.folder for each in store.remove(store.listing())] == [entry]
    assert [each.prebuilt for each in store.listing()] == [True]
    assert not leftovers(entry.parents[2])


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
