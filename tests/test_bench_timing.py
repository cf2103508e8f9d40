"""The benchmark's samples, estimates and clocks."""

from __future__ import annotations

import os
import statistics
from functools import partial

import pytest
import torch
from jit_kernels.bench import clocks
from jit_kernels.bench.record import Estimate
from jit_kernels.bench.timing import (
    MOST_BLOCKS,
    CpuTimer,
    CudaTimer,
    NoGraphError,
    graph_calls,
    in_turn,
    interleave,
)


def estimate(median: float, spread: float = 0.0, stable: bool = True) -> Estimate:
    half = median * spread / 2
    return Estimate(median=median, low=median - half, high=median + half, samples=30, stable=stable)


# Samples and estimates


def test_an_estimate_is_the_median_and_the_quartiles_of_all_blocks():
    found = Estimate.of([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    assert (found.low, found.median, found.high, found.samples) == (3.0, 5.0, 7.0, 9)
    assert found.spread == pytest.approx(4 / 5)
    assert not found.stable


@pytest.mark.parametrize(
    ("medians", "stable"),
    [
        ((10, 10, 10), True),
        ((10, 10.15, 10.1), True),
        ((10, 10.3, 10), False),
        ((10, 10), False),
        ((99, 5, 5, 5), True),
    ],
)
def test_stable_is_what_the_last_three_blocks_agree_on(medians, stable):
    assert Estimate.of([[median] * 5 for median in medians]).stable == stable


class ScriptedTimer(CpuTimer):
    """Its shots give the samples that a test wrote down, and are noted in their order."""

    block = 2

    def __init__(self) -> None:
        self.order: list[str] = []

    def scripted(self, name, samples):
        values = iter(samples)

        def shot():
            self.order.append(name)
            value = next(values)
            return lambda: value

        return shot


def test_candidates_take_turns_until_each_is_stable():
    timer = ScriptedTimer()
    wild = [float(i * i % 7 + 1) for i in range(100)]
    found = interleave({"a": timer.scripted("a", [5.0] * 100), "b": timer.scripted("b", wild)}, timer)
    assert timer.order[:2] == ["a", "b"]  # to warm up
    assert timer.order[2:14] == ["a", "b"] * 6
    assert set(timer.order[14:]) == {"b"}
    assert found["a"] == Estimate(median=5.0, low=5.0, high=5.0, samples=6, stable=True)
    counted = wild[1 : 1 + 2 * MOST_BLOCKS]
    assert (found["b"].samples, found["b"].median) == (len(counted), statistics.median(counted))
    assert not found["b"].stable


def test_a_graph_holds_more_of_the_shorter_calls():
    assert (graph_calls(1e6), graph_calls(200), graph_calls(0.0)) == (4, 15, 128)
    assert in_turn(["a", "b", "c"], 7) == ["a", "b", "c", "a", "b", "c", "a"]


def test_the_cpu_timer_times_the_call_it_is_given():
    timer = CpuTimer()
    short, long = (interleave({0: timer.eager([partial(sum, range(n))])}, timer)[0].median for n in (10, 100_000))
    assert long > 100 * short > 0  # ten thousand times the numbers; the rest is for the call itself
    with pytest.raises(NoGraphError, match="CPU"):
        timer.graph([list])


# The clocks


def test_clocks_are_read_and_reasons_named():
    lines = ["1980, 3201, 41, 351.62, 0x0000000000000000", "345, 3201, 30, 75.1, 0x0000000000000001"]
    lines += ["1500, 3201, 60, 700.0, 0x0000000000000024", "1980, 3201, [N/A], 1, 0x0", "19"]
    busy, idle, held = clocks.parse(lines, started=2.0)
    assert (busy.sm_mhz, busy.memory_mhz, busy.celsius, busy.watts, busy.reasons) == (1980, 3201, 41, 351.62, [])
    assert idle.reasons == []
    assert held.reasons == ["software power cap", "software thermal slowdown"]
    assert [reading.seconds for reading in (busy, idle, held)] == [2.0, 3.0, 4.0]


def test_the_log_runs_beside_and_ends_with_the_run(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$*" in *clocks_event_reasons*) exit 2;; esac\n'  # an older driver
        'echo "1980, 3201, 41, 351.62, 0x4"\n'
        f'case "$*" in *--loop-ms*) echo $$ > {tmp_path}/pid; exec sleep 60;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(clocks, "_identity", lambda device: "GPU-0")
    log = clocks.ClockLog(torch.device("cuda"))
    with log.running():
        for _ in range(200):
            if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
                break
            clocks.time.sleep(0.05)
    assert [reading.reasons for reading in log.readings] == [["software power cap"]]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.gpu
def test_a_graph_of_known_work_takes_its_known_time(cuda):
    timer = CudaTimer(cuda)
    with timer.running():
        one, four = (torch.ones(n << 26, device=cuda) for n in (1, 4))
        shots = {n: timer.graph([partial(torch.neg, x)] * 4)[0] for n, x in ((1, one), (4, four))}
        found = interleave(shots, timer)
    assert 3 < found[4].median / found[1].median < 5  # 2 GiB against 512 MiB through memory, launches aside
    with timer.running(), pytest.raises(NoGraphError):
        timer.graph([one.sum().item])
