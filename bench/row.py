"""One row: each entrant's way through the gate to what is timed; and what its times come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from jit_kernels.bench.gate import judge, poisoned
from jit_kernels.bench.record import Ceiling, CeilingName, Row, Timing
from jit_kernels.bench.suite import AbsentError, Entrant, Prepare, Setting, Suite, outputs_of
from jit_kernels.bench.timing import NoGraphError, Shot, Timer, graph_calls, in_turn, quick_estimate
from torch import Tensor

from jit_kernels.messages import first_line


class Runner:
    """One entrant on one row."""

    def __init__(self, entrant: Entrant, prepare: Prepare) -> None:
        self.entrant, self.prepare = entrant, prepare
        self.gate: Literal["passed", "failed", "not run"] = "not run"
        self.graph_shot: Shot | None = None
        self.calls: list[Callable[[], Any]] = []
        self.measured: dict[str, Any] = {}

    def pass_gate(
        self,
        suite: Suite,
        sets: Sequence[tuple[Tensor, ...]],
        exact: tuple[Tensor, ...],
        setting: Setting,
        timer: Timer,
    ) -> None:
        """Holds the outputs to float64, eager and from the graph, and makes ready what is timed."""
        entrant = self.entrant
        try:
            first = self.prepare(*sets[0])
            outputs = poisoned(first)
            same = entrant.same_bytes_as(setting)(*sets[0])() if entrant.same_bytes_as else None
            verdict = judge(outputs, exact, suite.outputs, entrant.bounds, same)
            self.measured |= {
                "errors": verdict.errors,
                "bounds": dict(zip(suite.outputs, entrant.bounds, strict=True)),
                "bytes": sum(tensor.nbytes for tensor in (*sets[0], *outputs)),
                "peak_bytes": timer.peak_bytes(first),
            }
            if not verdict.failure:
                self.calls = [first, *(self.prepare(*some) for some in sets[1:])]
                verdict.failure = self._capture(suite, exact, timer)
        except AbsentError as absent:
            self.measured["reason"] = str(absent)
            return
        except Exception as error:  # a peer's own, or no memory for it: it is out, the others go on
            self.gate = "failed"
            self.measured["reason"] = first_line(error)
            return
        self.gate = "failed" if verdict.failure else "passed"
        if verdict.failure:
            self.measured["reason"] = verdict.failure

    def _capture(self, suite: Suite, exact: tuple[Tensor, ...], timer: Timer) -> str:
        """Why the graph's outputs are wrong; empty where they are right, or where there is no graph."""
        if self.entrant.waits:
            self.measured["reason"] = "not in a CUDA graph: its calls wait for the device"
            return ""
        count = graph_calls(quick_estimate(self.calls[0], timer))
        try:
            shot, outputs = timer.graph(in_turn(self.calls, count))
        except NoGraphError as error:
            if timer.kind == "cuda":
                self.measured["reason"] = f"not in a CUDA graph: {error}"
            return ""
        for some in outputs:
            for tensor in outputs_of(some):
                tensor.fill_(torch.nan)
        shot()
        verdict = judge(outputs[0], exact, suite.outputs, self.entrant.bounds)
        self.graph_shot, self.measured["graph_calls"] = shot, count
        return f"in a CUDA graph: {verdict.failure}" if verdict.failure else ""

    def timing(self) -> Timing:
        return Timing(candidate=self.entrant.name, ours=self.entrant.ours, gate=self.gate, **self.measured)


def with_rates(row: Row, found: Sequence[Ceiling], units: Mapping[str, CeilingName]) -> Row:
    """The row with its floor, and its timings with GB/s, TFLOP/s and shares of the ceilings."""
    ceiling = {one.name: one.value.median for one in found}
    floors: dict[CeilingName, float] = {}
    if "copy" in ceiling:
        floors["copy"] = row.bytes / ceiling["copy"] * 1e-3
    arithmetic: list[CeilingName] = [name for name in ("ffma", "fp64_tensor") if name in ceiling]
    if arithmetic:
        best = max(arithmetic, key=ceiling.__getitem__)
        floors[best] = row.flops / ceiling[best] * 1e-6
    if "empty_kernel" in ceiling:
        floors["empty_kernel"] = ceiling["empty_kernel"]
    timings = []
    for timing in row.timings:
        if timing.time is None or not timing.bytes:
            timings.append(timing)
            continue
        gb, tflop = timing.bytes / timing.time.median * 1e-3, row.flops / timing.time.median * 1e-6
        unit = units[timing.candidate]
        share = {name: rate / ceiling[name] for name, rate in (("copy", gb), (unit, tflop)) if name in ceiling}
        timings.append(timing.model_copy(update={"gb_per_s": gb, "tflop_per_s": tflop, "share": share}))
    by = max(floors, key=floors.__getitem__, default=None)
    return row.model_copy(update={"floor": floors[by] if by else None, "floor_by": by, "timings": timings})


def line(row: Row) -> str:
    def shown(timing: Timing) -> str:
        return f"{timing.time.median:.4g}" if timing.time else timing.gate

    return f"{row.operator} {row.direction} {row.label}: " + ", ".join(
        f"{timing.candidate} {shown(timing)}" for timing in row.timings
    )
