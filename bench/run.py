"""One benchmark run: gates, then times, then counts and accuracy; all candidates in one process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jit_kernels.bench import ceilings, details
from jit_kernels.bench.clocks import ClockLog
from jit_kernels.bench.gate import exactly
from jit_kernels.bench.record import (
    Accuracy,
    Candidate,
    Ceiling,
    Document,
    Estimate,
    FirstCall,
    Row,
    growths,
)
from jit_kernels.bench.row import Runner, line, with_rates
from jit_kernels.bench.suite import AbsentError, Build, Case, Prepare, Setting, Suite, suites
from jit_kernels.bench.timing import (
    GRAPH_CALLS,
    CpuTimer,
    CudaTimer,
    interleave,
    timer_of,
)
from torch import Tensor

from jit_kernels.checks.provenance import provenance
from jit_kernels.dispatch import Operator
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import JitError

COLD = 4  # times the size of L2 that passes before an input is used again
LARGE = 1 << 28  # bytes of one call from which memory is given back between rows

YARDSTICK = "torch.add"  # whose host time says how fast the host is

Report = Callable[[str], None]
Keep = Callable[[Document], None]


@dataclass
class Bench:
    """A run in the making. ``run()`` does all of it; ``document()`` is what there is so far."""

    operators: Sequence[Operator]
    setting: Setting
    rows_set: str = "full"
    report: Report = lambda line: None
    keep: Keep = lambda document: None
    notes: list[str] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    ceilings: list[Ceiling] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    accuracy: list[Accuracy] = field(default_factory=list)
    first_calls: list[FirstCall] = field(default_factory=list)
    complete: bool = False

    def __post_init__(self) -> None:
        on_gpu = self.setting.on_gpu
        self.timer: CudaTimer | CpuTimer = timer_of(self.setting.device)
        self.clock = ClockLog(self.setting.device)
        self.origin = provenance(self.setting.device)
        every = [suite for operator in self.operators for suite in suites(operator)]
        self.suites = [suite.of(self.rows_set, on_gpu) for suite in every]
        if not on_gpu:
            left_out = sum(len(suite.of(self.rows_set, True).cases) for suite in every) - sum(
                len(suite.cases) for suite in self.suites
            )
            self.notes.append(
                f"no GPU: times by a clock on a CPU, of the fallback; {left_out} larger rows are left out, "
                "and nothing here says how fast the fused kernels are"
            )

    def run(self) -> Document:
        if isinstance(self.timer, CudaTimer):
            self._compile()
        with self.clock.running(), self.timer.running():
            fields = [(suite, self._field(suite)) for suite in self.suites]
            self._measure_ceilings()
            for suite, ready in fields:
                for case in suite.cases:
                    self.rows.append(self._row(suite, case, ready))
                    self._give_back(self.rows[-1].bytes)
                    self.keep(self.document())
            self._measure_ceilings()
            for suite, ready in fields:
                for case in suite.families:
                    self.accuracy += details.accuracy(suite, case, ready, self._generator(suite, case))
                if suite.families:
                    self.report(f"{self.clock.seconds:5.0f} s  accuracy of {suite.operator} {suite.direction}")
            self.keep(self.document())
            if isinstance(self.timer, CudaTimer):
                counter = details.LaunchCounter(self.timer)
                for suite, ready in fields:
                    self._count_launches(suite, ready, counter)
        if self.setting.on_gpu:
            self.first_calls = details.first_calls(self.operators, Target.of(self.setting.device))
        self._note_clocks()
        self.complete = True
        found = self.document()
        self.keep(found)
        return found

    def document(self) -> Document:
        units = {(s.operator, s.direction): {e.name: e.unit for e in s.entrants} for s in self.suites}
        rows = [with_rates(row, self.ceilings, units[row.operator, row.direction]) for row in self.rows]
        return Document(
            provenance=self.origin,
            rows_set=self.rows_set,
            timer=self.timer.kind,
            notes=self.notes,
            ok=all(timing.gate != "failed" for row in rows for timing in row.timings),
            complete=self.complete,
            seconds=self.clock.seconds,
            ceilings=self.ceilings,
            candidates=self.candidates,
            rows=rows,
            accuracy=self.accuracy,
            first_calls=self.first_calls,
            growth=growths(rows),
            clocks=self.clock.readings,
        )

    def _compile(self) -> None:
        """Every kernel that isn't built yet, side by side. One that fails says why where it is needed."""
        target = Target.of(self.setting.device)
        kernels: dict[Build, None] = {ceilings.build(target): None}
        for operator in self.operators:
            kernels |= {operator.build(target, **build): None for build in operator.warmup}
        for suite in self.suites:
            if suite.builds is not None:
                kernels |= dict.fromkeys(suite.builds(self.setting, target))

        def compile(kernel: Build) -> None:
            with suppress(JitError, OSError):  # a peer's sources may not be where they were said to be
                kernel.compile()

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile, kernels))
        self.report(f"{self.clock.seconds:5.0f} s  {len(kernels)} kernels are built")

    def _field(self, suite: Suite) -> dict[str, Prepare]:
        """Those entrants that can be had; every one is listed."""
        ready: dict[str, Prepare] = {}
        for entrant in suite.entrants:
            reason = ""
            try:
                ready[entrant.name] = entrant.have(self.setting)
            except AbsentError as absent:
                reason = str(absent)
            self.candidates.append(
                Candidate(
                    operator=suite.operator,
                    direction=suite.direction,
                    name=entrant.name,
                    what=entrant.what,
                    how=entrant.how,
                    versions=entrant.versions(),
                    ours=entrant.ours,
                    present=not reason,
                    reason=reason,
                )
            )
        return ready

    def _measure_ceilings(self) -> None:
        if not isinstance(self.timer, CudaTimer):
            return
        found, lack = ceilings.measure(self.timer)
        if lack and lack not in self.notes:
            self.notes.append(lack)
        self.ceilings = ceilings.again(self.ceilings, found) if self.ceilings else found
        self._give_back(LARGE)
        shown = ", ".join(f"{one.name} {one.value.median:.4g} {one.unit}" for one in found)
        self.report(f"{self.clock.seconds:5.0f} s  ceilings: {shown}")

    def _row(self, suite: Suite, case: Case, ready: dict[str, Prepare]) -> Row:
        began = self.clock.seconds
        sets = self._sets(suite, case)
        runners = [Runner(entrant, ready[entrant.name]) for entrant in suite.entrants if entrant.name in ready]
        exact = exactly(suite.gold, sets[0])
        for runner in runners:
            runner.pass_gate(suite, sets, exact, self.setting, self.timer)
        del exact
        racing = {runner.entrant.name: runner for runner in runners if runner.gate == "passed"}
        graphs = interleave({name: one.graph_shot for name, one in racing.items() if one.graph_shot}, self.timer)
        eager = interleave({name: self.timer.eager(one.calls) for name, one in racing.items()}, self.timer)
        host: dict[str, Estimate] = {}
        if case.host and self.setting.on_gpu:
            small = torch.ones(8, device=self.setting.device)
            timed = {name: self.timer.host(one.calls) for name, one in racing.items()}
            host = interleave(timed | {YARDSTICK: self.timer.host([partial(torch.add, small, small)])}, self.timer)
        for name, one in racing.items():
            one.measured |= {"graph": graphs.get(name), "eager": eager[name], "host": host.get(name)}
        timings = [one.timing() for one in runners]
        smallest = min((t.bytes for t in timings if t.bytes and t.ours), default=0)
        row = Row(
            operator=suite.operator,
            direction=suite.direction,
            label=case.label,
            parameters=case.parameters,
            bytes=smallest or sum(tensor.nbytes for tensor in sets[0]),
            flops=case.flops,
            floor=None,
            floor_by=None,
            began=began,
            host_add=host.get(YARDSTICK),
            timings=timings,
        )
        self.report(f"{self.clock.seconds:5.0f} s  {line(row)}")
        return row

    def _give_back(self, size: int) -> None:
        """Memory that a row of that many bytes left behind, so that pieces of it don't crowd the next one."""
        if self.setting.on_gpu and size >= LARGE:
            with suppress(RuntimeError):  # after a capture that failed torch refuses to
                torch.cuda.empty_cache()

    def _sets(self, suite: Suite, case: Case) -> list[tuple[Tensor, ...]]:
        """As many inputs as pass L2 by several times, up to as many as a graph has calls."""
        generator = self._generator(suite, case)
        if not self.setting.on_gpu:
            return case.sets(generator, 2)
        size = sum(tensor.nbytes for tensor in case.sets(generator, 1)[0])
        l2 = torch.cuda.get_device_properties(self.setting.device).L2_cache_size
        return case.sets(generator, max(2, min(GRAPH_CALLS[1], 1 + -(-COLD * l2 // size))))

    def _generator(self, suite: Suite, case: Case) -> torch.Generator:
        seed = zlib.crc32(f"{suite.operator} {suite.direction} {case.label}".encode())
        return torch.Generator(self.setting.device).manual_seed(seed)

    def _count_launches(self, suite: Suite, ready: dict[str, Prepare], counter: details.LaunchCounter) -> None:
        for case in filter(lambda case: case.detail, suite.cases):
            index = next(
                i
                for i, row in enumerate(self.rows)
                if (row.operator, row.direction, row.label) == (suite.operator, suite.direction, case.label)
            )
            sets = case.sets(self._generator(suite, case), 2)
            counted = []
            for timing in self.rows[index].timings:
                found: dict[str, Any] = {}
                if timing.gate == "passed":
                    found = counter.count([ready[timing.candidate](*some) for some in sets])
                counted.append(timing.model_copy(update=found))
            self.rows[index] = self.rows[index].model_copy(update={"timings": counted})
            del sets
            self._give_back(self.rows[index].bytes)

    def _note_clocks(self) -> None:
        held = sorted({reason for reading in self.clock.readings for reason in reading.reasons})
        if held:
            seen = sum(bool(reading.reasons) for reading in self.clock.readings)
            self.notes.append(
                f"clocks were held back in {seen} of {len(self.clock.readings)} readings: {', '.join(held)}"
            )
