"""The cache: who is served from it, what mends it, whom it trusts, and what a build that ends badly leaves."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pwd
import re
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
from answer import BLACKWELL, ROOT_ONLY, SOMEBODY, answer_kernel, entries, fresh, leftovers, load

from jit_kernels.jit import cache, errors, store

pytestmark = pytest.mark.compiler


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


# Keeping house


def test_listing_and_clean_leave_prebuilt_folders_alone(copied, built, tmp_path, monkeypatch):
    _, entry = copied
    shutil.copytree(built[1], tmp_path / "overlay")
    monkeypatch.setenv("JIT_KERNELS_PREBUILT_DIR", str(tmp_path / "overlay"))
    assert [each.prebuilt for each in store.listing()] == [True, False]
    assert [each.folder for each in store.remove(store.listing())] == [entry]
    assert [each.prebuilt for each in store.listing()] == [True]
    assert not leftovers(entry.parents[2])
