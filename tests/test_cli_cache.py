"""``jit-kernels cache …``, ``list`` and ``completion``: what scripts rely on, and that cleaning harms nobody."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import herd
import pytest
from answer import BLACKWELL, HOPPER, ROOT_ONLY, SOMEBODY, answer_kernel
from cli import run
from click.testing import CliRunner

import jit_kernels
from jit_kernels.cli import commands
from jit_kernels.dispatch import OPERATORS
from jit_kernels.jit import cache, store

ENTRY = {"name", "target", "version", "place", "size", "created", "folder"}


def document(*arguments: str, code: int = 0) -> dict[str, Any]:
    found = json.loads(run(*arguments, "--json", code=code).stdout)
    assert found.pop("schema") == 1
    return found


@pytest.fixture(scope="module")
def stock(tmp_path_factory, answer_source) -> Path:
    """A cache of two modules for two targets. Copy it: what is loaded from it stays mapped."""
    folder = tmp_path_factory.mktemp("stock")
    for name, value in (("alpha", 1), ("beta", 2)):
        for target in (HOPPER, BLACKWELL):
            answer_kernel(answer_source(folder / name, value), name, 64, target=target).compile(folder / "cache")
    return folder / "cache"


@pytest.fixture
def stocked(stock, isolated_cache) -> Path:
    """That stock as this test's cache; besides, alpha for sm_90a as of another version, and as built a week ago."""
    shutil.copytree(stock, isolated_cache, copy_function=shutil.copy2)
    (entry,) = (isolated_cache / jit_kernels.__version__ / "sm_90a").glob("alpha*")
    week_ago = (datetime.now(timezone.utc) - timedelta(days=7)).isoformat(timespec="seconds")
    for version, created in (("0.0.9", None), ("0.0.8", week_ago)):
        folder = isolated_cache / version / "sm_90a" / entry.name
        shutil.copytree(entry, folder)
        meta = json.loads((folder / "meta.json").read_text()) | {"version": version}
        (folder / "meta.json").write_text(json.dumps(meta | ({"created": created} if created else {})))
        for made in (folder.parent, folder.parent.parent):
            made.chmod(0o700)
    return isolated_cache


def names(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    return sorted((entry["name"], entry["target"], entry["version"]) for entry in found["entries"])


NOW = jit_kernels.__version__
ALL = [
    ("alpha 64", "sm_100a", NOW),
    ("alpha 64", "sm_90a", "0.0.8"),
    ("alpha 64", "sm_90a", "0.0.9"),
    ("alpha 64", "sm_90a", NOW),
    ("beta 64", "sm_100a", NOW),
    ("beta 64", "sm_90a", NOW),
]
FILTERS = {
    "": ALL,
    "--op alpha": ALL[:4],
    "--op alpha --op beta": ALL,
    "--op gamma": [],
    "--arch sm_100a": [ALL[0], ALL[4]],
    "--arch sm_90a,sm_100a": ALL,
    "--arch 10.0": [ALL[0], ALL[4]],
    "--version 0.0.9": [ALL[2]],
    "--version 0.0.9 --version 0.0.8": ALL[1:3],
    "--older-than 6d": [ALL[1]],
    "--older-than 8d": [],
    "--op alpha --arch sm_90a": ALL[1:4],
    f"--op alpha --arch sm_90a --version {NOW}": [ALL[3]],
    "--op beta --older-than 6d": [],
    "--arch sm_90a --older-than 1h": [ALL[1]],
}


@pytest.mark.compiler
@pytest.mark.parametrize("options", FILTERS)
def test_filters_combine_and_mean_the_same_to_each_verb(stocked, options):
    expected, words = FILTERS[options], options.split()
    found = document("cache", "list", *words)
    assert set(found) == {"entries"}
    assert names(found) == expected
    for entry in found["entries"]:
        assert set(entry) == ENTRY
        assert entry["place"] == "cache"
        assert Path(entry["folder"]).is_relative_to(stocked)
        assert datetime.fromisoformat(entry["created"]).tzinfo
        assert entry["size"] == sum(path.stat().st_size for path in Path(entry["folder"]).glob("*.so"))

    sizes = document("cache", "size", *words)
    assert set(sizes) == {"targets", "bytes"}
    assert all(set(one) == {"target", "entries", "bytes"} for one in sizes["targets"])
    assert sum(one["entries"] for one in sizes["targets"]) == len(expected)
    assert sizes["bytes"] == sum(one["bytes"] for one in sizes["targets"]) == sum(e["size"] for e in found["entries"])

    verified = document("cache", "verify", *words)
    assert set(verified) == {"entries", "ok"}
    assert verified["ok"]
    assert [{**entry, "fault": ""} for entry in found["entries"]] == verified["entries"]

    cleaned = document("cache", "clean", *words)
    assert set(cleaned) == {"removed", "bytes"}
    assert sorted(cleaned["removed"]) == sorted(entry["folder"] for entry in found["entries"])
    assert cleaned["bytes"] == sizes["bytes"]
    assert names(document("cache", "list")) == [entry for entry in ALL if entry not in expected]


@pytest.mark.compiler
def test_verify_finds_the_damaged_entries_and_exits_1(stocked):
    shelf = stocked / NOW / "sm_90a"
    (alpha,), (beta,) = shelf.glob("alpha*"), shelf.glob("beta*")
    content = bytearray((alpha / "alpha_64.so").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (alpha / "alpha_64.so").write_bytes(content)
    beta.chmod(0o770)
    found = document("cache", "verify", code=1)
    assert not found["ok"]
    faults = {entry["folder"]: entry["fault"] for entry in found["entries"] if entry["fault"]}
    assert set(faults) == {str(alpha), str(beta)}
    assert "does not match its recorded hash" in faults[str(alpha)]
    assert "can be written by others" in faults[str(beta)]
    said = run("cache", "verify", code=1).stdout
    assert "6 compiled kernels, 2 faulty" in said
    assert document("cache", "verify", "--arch", "sm_100a")["ok"]

    beta.chmod(0o700)
    assert document("cache", "clean", "--op", "alpha", "--version", NOW, "--arch", "sm_90a")["removed"] == [str(alpha)]
    assert document("cache", "verify")["ok"]


@pytest.mark.compiler
@pytest.mark.parametrize("damage", ["no meta", "truncated meta", "no library"])
def test_what_is_damaged_is_found_verified_and_cleaned_by_its_name(stocked, damage):
    (alpha,) = (stocked / NOW / "sm_90a").glob("alpha*")
    if damage == "truncated meta":
        (alpha / "meta.json").write_text('{"name": "al')
    else:
        (alpha / {"no meta": "meta.json", "no library": "alpha_64.so"}[damage]).unlink()
    found = document("cache", "verify", "--version", NOW, "--arch", "sm_90a", code=1)
    (fault,) = (entry["fault"] for entry in found["entries"] if entry["folder"] == str(alpha))
    assert "damaged" in fault
    choice = ("--op", "alpha", "--version", NOW, "--arch", "sm_90a")
    if damage != "no library":  # of the name, only the start stands in the folder's
        choice = ("--op", "alpha_64", *choice[2:])
    assert document("cache", "clean", *choice)["removed"] == [str(alpha)]
    assert not alpha.exists()
    assert document("cache", "verify")["ok"]


def test_verify_of_an_empty_cache_is_fine(isolated_cache):
    assert document("cache", "verify") == {"entries": [], "ok": True}
    assert document("cache", "size") == {"targets": [], "bytes": 0}
    assert not isolated_cache.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cache", "list", "--older-than", "soon"), "90m, 12h or 7d"),
        (("cache", "clean", "--arch", "hopper"), "sm_90a"),
        (("completion", "tcsh"), "bash"),
    ],
)
def test_usage_errors_exit_2(arguments, words):
    result = run(*arguments, code=2)
    assert words in result.stderr
    assert not result.stdout


# Cleaning beside others


@pytest.mark.compiler
def test_clean_spares_what_is_locked_by_a_build_or_a_load(stocked):
    (alpha,), (beta,) = ((stocked / NOW / "sm_90a").glob(f"{name}*") for name in ("alpha", "beta"))
    code = (
        "import fcntl, os, sys\n"
        f"files = [open(path, 'a+') for path in {[str(store.Entry(folder).lock) for folder in (alpha, beta)]!r}]\n"
        "fcntl.flock(files[0], fcntl.LOCK_EX); fcntl.flock(files[1], fcntl.LOCK_SH)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        removed = document("cache", "clean")["removed"]
        assert len(removed) == len(ALL) - 2
        assert alpha.exists()
        assert beta.exists()
        other.stdin.close()
    assert sorted(document("cache", "clean")["removed"]) == sorted([str(alpha), str(beta)])


@pytest.mark.compiler
def test_clean_spares_what_is_being_loaded(isolated_cache, tmp_path, answer_source, start_python):
    """A library that takes its time to start up, as long as a file lies there."""
    slow = tmp_path / "slow"
    head = f"""#include <unistd.h>
__attribute__((constructor)) static void start_up() {{ while (!access("{slow}", F_OK)) usleep(10000); }}
"""
    path = answer_source(tmp_path, 42, head=head)
    entry = answer_kernel(path, "slow").compile()
    slow.touch()
    options = f"cpp_files=[{str(path)!r}], header_only=False, target='sm_90a'"
    process = start_python(f"import jit_kernels\nprint(jit_kernels.load_jit('slow', {options}).answer())")
    try:
        maps, deadline = Path(f"/proc/{process.pid}/maps"), time.monotonic() + 30
        while "slow.so" not in maps.read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert document("cache", "clean")["removed"] == []
        assert entry.folder.exists()
    finally:
        slow.unlink()
    out, err = process.communicate(timeout=30)
    assert out == "42\n", err
    assert document("cache", "clean")["removed"] == [str(entry.folder)]


CLEAN_FOR, RANKS = 8.0, 3


def beside_clean(paths: list[str]) -> dict[str, Any]:
    """Ranks load cold and warm, again and again, while another process cleans without pause."""
    deadline = time.monotonic() + CLEAN_FOR
    cleaner = herd.Child(_clean, deadline)
    ranks = [herd.Child(_load, paths, rank, deadline) for rank in range(RANKS)]
    reports = [rank.join(60) for rank in ranks]
    removed = cleaner.join(60)
    time.sleep(0.5)
    left = [path.name for path in store.roots()[0].glob("*/*/.*") if not path.name.endswith(".lock")]
    return {"reports": reports, "removed": removed, "left": left}


def _clean(deadline: float) -> int:
    removed = 0
    while time.monotonic() < deadline:
        removed += len(store.remove(store.listing()))
        time.sleep(0.01)
    return removed


def _load(paths: list[str], rank: int, deadline: float) -> dict[str, Any]:
    loads, faults = 0, []
    while time.monotonic() < deadline:
        number = (loads // 3 + rank) % len(paths)
        wanted = answer_kernel(paths[number], f"answer{number}")
        try:
            found = cache.load(wanted.source, wanted.target).answer()
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}")
        else:
            if found != number:
                faults.append(f"wrong: {found} for {number}")
        loads += 1
    return {"loads": loads, "faults": faults}


@pytest.mark.compiler
def test_loads_beside_a_clean_all_succeed(isolated_cache, tmp_path, answer_source, run_python):
    paths = [str(answer_source(tmp_path / str(number), number)) for number in range(3)]
    code = f"import json, test_cli_cache\nprint(json.dumps(test_cli_cache.beside_clean({paths!r})))"
    where = f"{Path(__file__).parent}{os.pathsep}{Path(jit_kernels.__file__).parent.parent}"
    found = json.loads(run_python(code, env={"PYTHONPATH": where}).splitlines()[-1])
    reports = [report.get("result", report) for report in found["reports"]]
    print(f"\n{[report.get('loads') for report in reports]} loads beside {found['removed']} removals")
    assert [report["faults"] for report in reports] == [[]] * RANKS
    assert all(report["loads"] > 5 for report in reports)
    assert found["removed"]["result"] > 5
    assert found["left"] == []


@ROOT_ONLY
def test_clean_does_nothing_in_a_strangers_folder(isolated_cache, tmp_path):
    """Anybody can make the temporary cache's folder first, and lay traps in it: here, links to files of ours."""
    ours = tmp_path / "ours"
    (ours / "entry").mkdir(parents=True)
    for name in ("lock", "entry/meta.json", "entry/precious"):
        (ours / name).write_text("precious")
    planted = store.roots()[1]
    shelf = planted / NOW / "sm_90a"
    (shelf / "trap-1-2").mkdir(parents=True)
    (shelf / "trap-1-2/meta.json").write_text("{}")
    (shelf / ".trap-1-2.lock").symlink_to(ours / "lock")
    (shelf / "linked-1-2").symlink_to(ours / "entry")
    for path in (planted, *planted.rglob("*")):
        os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    run("cache", "clean", code=0)
    assert (ours / "lock").read_text() == "precious"
    assert (ours / "entry/precious").read_text() == "precious"
    assert document("cache", "list") == {"entries": []}


@pytest.mark.compiler
def test_a_lock_that_is_a_link_is_not_followed(stocked, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (alpha,) = (stocked / NOW / "sm_90a").glob("alpha*")
    lock = store.Entry(alpha).lock
    lock.unlink(missing_ok=True)
    lock.symlink_to(precious)
    CliRunner().invoke(commands, ["cache", "clean"])
    assert precious.read_text() == "precious"


# list and completion


def test_list_says_what_is_built_where(isolated_cache):
    found = document("list", "--arch", "sm_90a,sm_100a")
    assert set(found) == {"builds"}
    assert {build["operator"] for build in found["builds"]} == set(OPERATORS)
    for build in found["builds"]:
        assert set(build) == {"operator", "schema", "parameters", "built", "missing"}
        assert build["schema"] == OPERATORS[build["operator"]].schema
        assert build["parameters"] in OPERATORS[build["operator"]].warmup
        assert build["built"] == {}
        assert build["missing"] == ["sm_90a", "sm_100a"]
    table = run("list", "--arch", "sm_90a").stdout
    assert all(name in table for name in OPERATORS)


@pytest.mark.compiler
def test_list_shows_a_build_and_the_targets_of_the_cache(shared_cache):
    name = "mhc_pre_h_aggregate"
    entry = OPERATORS[name].build(HOPPER).compile()
    (build,) = document("list", name)["builds"]
    assert build["built"]["sm_90a"] == str(entry.folder)
    assert "sm_90a" not in build["missing"]


def test_list_passes_over_folders_that_are_no_shelves(isolated_cache):
    folder = isolated_cache / "notes" / "misc" / "x"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text("{}")
    for made in (isolated_cache, *isolated_cache.rglob("*")):
        if made.is_dir():
            made.chmod(0o700)
    assert {build["operator"] for build in document("list")["builds"]} == set(OPERATORS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell):
    assert "_JIT_KERNELS_COMPLETE" in run("completion", shell).stdout


def test_the_script_completes_verbs_and_operators(run_python):
    def completions(*words: str) -> list[str]:
        code = "import sys; sys.argv = ['jit-kernels']; from jit_kernels.cli import main; main()"
        env = {
            "_JIT_KERNELS_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["jit-kernels", *words]),
            "COMP_CWORD": str(len(words)),
        }
        return [line.partition(",")[2] for line in run_python(code, env=env).splitlines()]

    assert completions("cache", "ve") == ["verify"]
    assert completions("warmup", "mhc") == ["mhc_pre_h_aggregate"]
