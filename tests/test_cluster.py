"""What a cluster does to the cache: killed builds, cold starts by the dozen, ranks, hosts whose locks don't meet.

Real processes and real kills. Each harness runs in a fresh process, forks its ranks there (see herd.py) and returns
its counts; the tests print them (``pytest -s``).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import herd
import pytest
from answer import HOPPER, entries, leftovers

import jit_kernels
from jit_kernels.jit import cache, store, toolchain
from jit_kernels.jit.loader import kernel

pytestmark = pytest.mark.compiler

LOCK_TIMEOUT = 60.0  # of the processes below: far above any wait that is right, far below the default


@pytest.fixture
def harness(run_python, isolated_cache):
    """Runs a function of this module in a fresh process with the test's cache."""

    def run(function, *args: Any, env: dict[str, object] | None = None, timeout: float = 200) -> Any:
        here, package = Path(__file__).parent, Path(jit_kernels.__file__).parent.parent
        code = f"import json, test_cluster\nprint(json.dumps(test_cluster.{function.__name__}(*{args!r})))"
        variables = {"PYTHONPATH": f"{here}{os.pathsep}{package}", "JIT_KERNELS_BUILD_TIMEOUT": LOCK_TIMEOUT}
        return json.loads(run_python(code, env={**variables, **(env or {})}, timeout=timeout).splitlines()[-1])

    return run


def counting(program: Path, log: Path, real: str | Path, then: str = "") -> Path:
    """A compiler that writes a line for each compilation, does what ``then`` says, and is the real one."""
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(
        f"""#!/bin/sh
case " $* " in *" -c "*)
  echo $$ >> '{log}'
  {then}
esac
exec '{real}' "$@"
"""
    )
    program.chmod(0o755)
    return program


def lines(log: Path) -> int:
    return len(log.read_text().split()) if log.exists() else 0


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    """Says how often the host compiler has compiled so far."""
    log = tmp_path / "compilations"
    monkeypatch.setenv("CXX", str(counting(tmp_path / "bin/counting-c++", log, shutil.which("c++"))))
    return lambda: lines(log)


def answer(path: str, name: str) -> int:
    return jit_kernels.load_jit(name, cpp_files=[path], header_only=False, target="sm_90a").answer()


def wanted(path: str | Path, name: str) -> store.Entry:
    """Where the entry of `answer` will lie."""
    source = kernel(name, cpp_files=[path], header_only=False, target=HOPPER).source
    tools = toolchain.find(HOPPER, toolchain.Probe())
    folder = store.shelf(store.roots()[0], HOPPER)
    return store.Entry(folder / f"{source.name}-{source.key(HOPPER)}-{cache._fingerprint(tools)}")


# Kills

KILLS, RANKS, KILLS_A_ROUND = 200, 6, 4


def crash(paths: list[str], seed: int) -> dict[str, Any]:
    """Kills whichever rank builds, again and again, while the others wait for the same build."""
    chance = random.Random(seed)
    phases: Counter[str] = Counter()
    kills = hits = wrong = 0
    faults, longest = [], 0.0
    root = store.roots()[0]
    span = 0.2  # seconds within which a builder is killed: grows and shrinks to what a build takes here
    for number, path in enumerate(paths):
        name, entry = f"answer{number}", wanted(path, f"answer{number}")
        ranks = [herd.Child(answer, path, name) for _ in range(RANKS)]
        for _ in range(KILLS_A_ROUND):
            if (builder := _builder(ranks, entry)) is None:
                break
            time.sleep(chance.uniform(0, chance.choice((span / 5, span))))  # early and late phases alike
            if entry.folder.exists() or not builder.freeze():  # it was faster
                span *= 0.7
                continue
            span *= 1.1
            held = herd.lock_holder(str(entry.lock)) == builder.pid
            phases[_phase(entry, builder.pid) if held else "published, waiting to load"] += 1
            builder.kill()
            ranks.remove(builder)
            kills += 1
            hits += held
        for rank in ranks:
            report = rank.join(LOCK_TIMEOUT)
            longest = max(longest, time.monotonic() - rank.begin)
            if "error" in report:
                faults.append(report["error"])
            elif report["result"] != number:
                wrong += 1
        if hits >= KILLS:
            break
    time.sleep(0.5)  # compilers whose builder was killed have gone by now
    return {
        "kills": kills,
        "hits": hits,
        "phases": phases,
        "wrong": wrong,
        "faults": faults,
        "longest": round(longest, 2),
        "span": round(span, 2),
        "rounds": number + 1,
        "entries": len(entries(root)),
        "staged": leftovers(root),
    }


def _builder(ranks: list[herd.Child], entry: store.Entry) -> herd.Child | None:
    """The rank that holds the lock, as soon as one does; None once the entry is published."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while not entry.folder.exists():
        holder = herd.lock_holder(str(entry.lock)) if entry.lock.exists() else None
        for rank in ranks:
            if rank.pid == holder:
                return rank
        assert time.monotonic() < deadline, "nobody builds"
        time.sleep(0.001)
    return None


def _phase(entry: store.Entry, pid: int) -> str:
    if entry.folder.exists():
        return "published, lock still held"
    names = {path.name for left in entry.folder.parent.glob(f".staging-*-{pid}-*") for path in left.glob("*")}
    if "meta.json" in names:
        return "meta written"
    if any(name.endswith(".so") for name in names):
        return "linked"
    return "compiling" if "build.ninja" in names else "before compiling"


def test_200_killed_builds_harm_nobody(harness, isolated_cache, tmp_path, answer_source, seed):
    paths = [str(answer_source(tmp_path / str(number), number)) for number in range(KILLS)]
    begin = time.monotonic()
    counts = harness(crash, paths, seed)
    print(f"\n{json.dumps(counts)} in {time.monotonic() - begin:.0f} s")
    assert counts["hits"] >= KILLS, "builds that were killed while they held the lock"
    assert counts["wrong"] == 0
    assert counts["faults"] == [], "hangs, timeouts and errors of those who waited"
    assert counts["longest"] < LOCK_TIMEOUT
    assert counts["staged"] == []
    assert counts["entries"] == counts["rounds"]


# Cold starts


def cold(paths: list[str], processes: int, threads: int) -> dict[str, Any]:
    """Every thread of every process asks for one of the kernels at the same moment."""
    gate = herd.Gate()
    ranks = [herd.Child(_ask, gate, paths, rank, threads) for rank in range(processes)]
    gate.open()
    reports = [rank.join(LOCK_TIMEOUT) for rank in ranks]
    return {
        "faults": [report["error"] for report in reports if "error" in report],
        "answers": sum(len(report["result"]) for report in reports if "result" in report),
        "wrong": sum(value != number for r in reports for number, value in r.get("result", ())),
        "longest": round(max(time.monotonic() - rank.begin for rank in ranks), 2),
    }


def _ask(gate: herd.Gate, paths: list[str], rank: int, threads: int) -> list[tuple[int, int]]:
    results: list[tuple[int, int]] = []

    def ask(number: int) -> None:
        together.wait()
        results.append((number, answer(paths[number], f"answer{number}")))

    together = threading.Barrier(threads)
    pool = [threading.Thread(target=ask, args=((rank + i) % len(paths),)) for i in range(threads)]
    gate.wait()
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return results


@pytest.mark.parametrize("kernels", [1, 8], ids=["same", "different"])
def test_16_processes_of_32_threads_compile_each_kernel_once(
    harness, isolated_cache, tmp_path, answer_source, compilations, kernels
):
    paths = [str(answer_source(tmp_path / str(number), number)) for number in range(kernels)]
    counts = harness(cold, paths, 16, 32)
    print(f"\n{json.dumps(counts)}, {compilations()} compilations")
    assert counts["faults"] == []
    assert (counts["answers"], counts["wrong"]) == (16 * 32, 0)
    assert compilations() == len(entries(isolated_cache)) == kernels
    assert leftovers(isolated_cache) == []


CUDA_HEAD = """\
#include <cuda_runtime.h>
#include "scale.cuh"
void launch(int* value) { scale<<<1, 1>>>(value); }
"""
CUDA_HEADER = "static __global__ void scale(int* value) { *value *= 3; }\n"


def cold_cuda(path: str, processes: int) -> dict[str, Any]:
    gate = herd.Gate()
    ranks = [herd.Child(_ask_cuda, gate, path) for _ in range(processes)]
    gate.open()
    reports = [rank.join(LOCK_TIMEOUT) for rank in ranks]
    return {"results": [report.get("result", report.get("error")) for report in reports]}


def _ask_cuda(gate: herd.Gate, path: str) -> list[int]:
    results: list[int] = []

    def ask() -> None:
        module = jit_kernels.load_jit("scale", cuda_files=[path], header_only=False, target="sm_90a")
        results.append(module.answer())

    pool = [threading.Thread(target=ask) for _ in range(8)]
    gate.wait()
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return results


def test_nvcc_runs_once_for_all(harness, isolated_cache, tmp_path, answer_source):
    """A toolkit merged from links, as Nix and Spack make them, in which nvcc is a script: here, one that counts."""
    real = toolchain.find(HOPPER, toolchain.Probe())
    merged = tmp_path / "cuda"
    (merged / "bin").mkdir(parents=True)
    for path in real.root.iterdir():
        if path.name != "bin":
            (merged / path.name).symlink_to(path)
    for path in (real.root / "bin").iterdir():
        if path.name != "nvcc":
            (merged / "bin" / path.name).symlink_to(path)
    counting(merged / "bin/nvcc", tmp_path / "nvcc-runs", real.nvcc)
    path = answer_source(tmp_path, 3, "scale.cu", head=CUDA_HEAD)
    (tmp_path / "scale.cuh").write_text(CUDA_HEADER)
    counts = harness(cold_cuda, str(path), 16, env={"CUDA_HOME": merged})
    assert counts["results"] == [[3] * 8] * 16
    assert lines(tmp_path / "nvcc-runs") == 1
    assert leftovers(isolated_cache) == []


# Ranks of torch.distributed


def toy_operator(path: str) -> jit_kernels.Operator:
    """An operator whose kernel is the C++ of ``path``; public, so that `warm_up` finds it by name."""
    return jit_kernels.Operator(
        name="cluster_toy",
        schema="(Tensor x) -> Tensor",
        validate=lambda x: None,
        supports=lambda x: jit_kernels.Support(True, "a toy"),
        outputs=lambda x: x.new_empty(x.shape),
        build=lambda target: kernel("cluster_toy", cpp_files=[path], header_only=False, target=target),
        fused=lambda x: x,
        fallback=lambda x: x,
        warmup=({},),
    )


def world(body: str, ranks: int, path: str, meeting: str) -> list[Any]:
    """Forks the ranks of a gloo group; each runs the function of this module that ``body`` names."""
    children = [herd.Child(_rank, body, rank, ranks, path, meeting) for rank in range(ranks)]
    return [child.join(LOCK_TIMEOUT) for child in children]


def _rank(body: str, rank: int, ranks: int, path: str, meeting: str) -> Any:
    from datetime import timedelta

    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
    )
    try:
        return globals()[body](rank, path)
    finally:
        distributed.destroy_process_group()


def cold_rank(rank: int, path: str) -> int:
    return answer(path, "ranks")


def warm_rank(rank: int, path: str) -> dict[str, Any]:
    toy = toy_operator(path)
    if rank:
        os.environ["CXX"] = os.environ["CXX_OF_OTHERS"]  # it can't compile
    try:
        jit_kernels.warm_up("cluster_toy", target="sm_90a")
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    made = toy.build(HOPPER)
    return {"loaded": made.loaded, "answer": made.load().answer()}


def warm_subgroup(rank: int, path: str) -> dict[str, Any]:
    """Rank 2 leads a group of its own, and the ranks outside of it do not take part."""
    from torch import distributed

    toy = toy_operator(path)
    group = distributed.new_group([2, 3])
    if rank in (2, 3):
        jit_kernels.warm_up("cluster_toy", target="sm_90a", group=group)
    return {"loaded": toy.build(HOPPER).loaded}


def warm_mistaken(rank: int, path: str) -> dict[str, Any]:
    if rank == 0:
        os.environ["JIT_KERNELS_COMPILE"] = "sometimes"
    return warm_rank(rank, path)


@pytest.fixture
def ranks(harness, tmp_path):
    broken = counting(tmp_path / "broken-c++", tmp_path / "vain", shutil.which("c++"), "exit 1")

    def run(body, count: int, path: Path) -> list[Any]:
        meeting = str(tmp_path / "meeting")
        reports = harness(world, body.__name__, count, str(path), meeting, env={"CXX_OF_OTHERS": broken})
        assert [report["error"] for report in reports if "error" in report] == []
        return [report["result"] for report in reports]

    return run


def test_8_ranks_that_start_cold_compile_once(ranks, tmp_path, answer_source, compilations):
    assert ranks(cold_rank, 8, answer_source(tmp_path, 8)) == [8] * 8
    assert compilations() == 1


def test_warm_up_compiles_on_rank_0_and_loads_on_each(ranks, tmp_path, answer_source, compilations):
    results = ranks(warm_rank, 8, answer_source(tmp_path, 9))
    assert results == [{"loaded": True, "answer": 9}] * 8
    assert compilations() == 1


def test_a_failure_of_rank_0_is_every_ranks_in_the_same_words(ranks, tmp_path, answer_source, compilations):
    results = ranks(warm_rank, 8, answer_source(tmp_path, head="int broken( { }\n"))
    assert len({json.dumps(result) for result in results}) == 1
    assert results[0]["error"] == "CompileError"
    assert "answer.cpp:1:" in results[0]["text"]
    assert compilations() == 1


def test_a_mistake_on_rank_0_is_told_to_the_others(ranks, tmp_path, answer_source, compilations):
    """Whatever is raised there: the others would wait in the broadcast for half an hour."""
    first, *others = ranks(warm_mistaken, 3, answer_source(tmp_path))
    assert first["error"] == "ValueError"
    for other in others:
        assert "JIT_KERNELS_COMPILE='sometimes'" in other["text"]
    assert compilations() == 0


def test_warm_up_of_a_group_is_led_by_its_own_first_rank(ranks, tmp_path, answer_source, compilations):
    results = ranks(warm_subgroup, 4, answer_source(tmp_path))
    assert [result["loaded"] for result in results] == [False, False, True, True]
    assert compilations() == 1


def warm_alone(path: str) -> dict[str, Any]:
    return warm_rank(0, path)


def test_warm_up_without_distributed_builds_and_loads(harness, tmp_path, answer_source, compilations):
    found = harness(warm_alone, str(answer_source(tmp_path, 10)))
    assert found == {"loaded": True, "answer": 10}
    assert compilations() == 1


# Hosts that share a folder, and whose locks don't meet


def hosts(path: str, names: list[str], ranks: int) -> list[Any]:
    """Each host is a process with mounts and a name of its own, in which the lock is another file; it forks its ranks.

    Returns None where this machine lets nobody unshare.
    """
    entry = wanted(path, "shared")
    entry.folder.parent.mkdir(parents=True, mode=0o700)
    entry.lock.touch()
    leaders = []
    for name in names:
        leaders.append(herd.Child(_host, path, name, str(entry.lock), ranks))
        time.sleep(0.4)  # the second comes while the first one builds
    return [leader.join(LOCK_TIMEOUT) for leader in leaders]


def _host(path: str, name: str, lock: str, ranks: int) -> list[Any] | None:
    libc = ctypes.CDLL(None, use_errno=True)
    own = tempfile.mkstemp()[1].encode()
    new_mounts, new_name, private, bind = 0x20000, 0x4000000, 1 << 18 | 1 << 14, 1 << 12
    if (
        libc.unshare(new_mounts | new_name)
        or libc.sethostname(name.encode(), len(name))
        or libc.mount(b"none", b"/", None, private, None)
        or libc.mount(own, lock.encode(), None, bind, None)
    ):
        return None
    children = [herd.Child(answer, path, "shared") for _ in range(ranks)]
    return [child.join(LOCK_TIMEOUT) for child in children]


@pytest.mark.parametrize(
    "names",
    [["a", "b"], ["node", "node"], ["node", "node-a"], ["node-a", "node"]],
    ids=["of two names", "of one name", "whose names begin alike", "whose names begin alike, the other first"],
)
def test_two_hosts_whose_locks_do_not_meet(harness, isolated_cache, tmp_path, answer_source, compilations, names):
    """As NFS without a lock daemon. Needs the right to unshare mounts (root)."""
    counting(Path(os.environ["CXX"]), tmp_path / "compilations", shutil.which("c++"), "sleep 1")
    path = str(answer_source(tmp_path, 12))
    reports = harness(hosts, path, names, 4)
    if {"result": None} in reports:
        pytest.skip("this machine lets nobody unshare mounts")
    assert [report["result"] for report in reports] == [[{"result": 12}] * 4] * 2
    assert compilations() == 2, "once for each host: more means that its own lock failed, fewer that theirs met"
    assert len(entries(isolated_cache)) == 1
    assert leftovers(isolated_cache) == []


def unlockable(path: str, hosts: int, ranks: int) -> list[Any]:
    """Processes on a file system that has no locks at all."""
    return [child.join(LOCK_TIMEOUT) for child in [herd.Child(_unlockable, path) for _ in range(hosts * ranks)]]


def _unlockable(path: str) -> int:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = refuse
    return answer(path, "unlockable")


def test_where_no_lock_can_be_had_all_still_succeed(harness, isolated_cache, tmp_path, answer_source, compilations):
    path = str(answer_source(tmp_path, 13))
    assert harness(unlockable, path, 2, 4) == [{"result": 13}] * 8
    assert 1 <= compilations() <= 8
    assert len(entries(isolated_cache)) == 1
    assert leftovers(isolated_cache) == []


# Forks: data loaders and launchers fork while another thread builds


def fork_during_build(path: str, signal_file: str, kill: bool) -> dict[str, Any]:
    """A rank whose second thread builds forks a worker that lives on; then the rank ends, or is killed."""
    rank = herd.Child(_build_and_fork, path, signal_file)
    entry = wanted(path, "forked")
    while not Path(signal_file).exists():
        time.sleep(0.01)
    worker = int(Path(signal_file).read_text())
    try:
        if kill:
            rank.kill()
            Path(os.environ["SLOW"]).unlink()
        else:
            Path(os.environ["SLOW"]).unlink()
            assert rank.join(LOCK_TIMEOUT) == {"result": 14}
            store.discard(entry)
        begin = time.monotonic()
        report = herd.Child(answer, path, "forked").join(20)
        return report | {"seconds": round(time.monotonic() - begin, 2)}
    finally:
        os.kill(worker, signal.SIGKILL)


def _build_and_fork(path: str, signal_file: str) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(answer(path, "forked")))
    thread.start()
    _wait_for_compiler()
    worker = os.fork()
    if worker == 0:
        time.sleep(120)
        os._exit(0)
    Path(signal_file + "~").write_text(str(worker))
    os.rename(signal_file + "~", signal_file)
    thread.join()
    return results[0]


def _wait_for_compiler() -> None:
    deadline = time.monotonic() + 20
    while not lines(Path(os.environ["COMPILED"])):
        assert time.monotonic() < deadline, "the build did not begin"
        time.sleep(0.01)


@pytest.fixture
def slow(tmp_path, compilations):
    """A compiler that waits as long as a file lies there; returns what tells the harness where."""
    file, log = tmp_path / "slow", tmp_path / "compilations"
    counting(Path(os.environ["CXX"]), log, shutil.which("c++"), f"while [ -e '{file}' ]; do sleep 0.05; done")
    file.touch()
    yield {"SLOW": file, "COMPILED": log}
    file.unlink(missing_ok=True)


@pytest.mark.parametrize("kill", [False, True], ids=["that ends", "that is killed"])
def test_a_worker_forked_during_a_build_does_not_keep_its_lock(harness, tmp_path, answer_source, slow, kill):
    path = str(answer_source(tmp_path, 14))
    found = harness(fork_during_build, path, str(tmp_path / "forked"), kill, env=slow, timeout=60)
    assert found.get("result") == 14, found
    assert found["seconds"] < 10


def load_in_forked(path: str, other: str) -> dict[str, Any]:
    """A worker that is forked while another thread builds loads a kernel itself."""
    thread = threading.Thread(target=answer, args=(path, "slow"), daemon=True)
    thread.start()
    _wait_for_compiler()
    os.environ["CXX"] = os.environ["FAST"]
    report = herd.Child(answer, other, "other").join(20)
    Path(os.environ["SLOW"]).unlink()
    thread.join()
    return report


def test_a_worker_forked_during_a_build_can_load(harness, tmp_path, answer_source, slow):
    path, other = (str(answer_source(tmp_path / str(value), value)) for value in (15, 16))
    found = harness(load_in_forked, path, other, env={**slow, "FAST": shutil.which("c++")}, timeout=60)
    assert found == {"result": 16}
