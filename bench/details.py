"""What is not a time of a row: launches, accuracy over families of hard inputs, first calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jit_kernels.bench.gate import exactly
from jit_kernels.bench.record import Accuracy, FirstCall
from jit_kernels.bench.suite import Case, Prepare, Suite, outputs_of
from jit_kernels.bench.timing import CudaTimer
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from jit_kernels.checks.compare import row_errors
from jit_kernels.dispatch import Operator
from jit_kernels.jit.arch import Target

WARM = """
import json, sys, time, torch
from jit_kernels.dispatch import OPERATORS
from jit_kernels.jit.arch import Target
torch.zeros(1, device="cuda")
target = Target.of(torch.device("cuda", 0))
began = time.perf_counter()
import tvm_ffi
print(json.dumps((time.perf_counter() - began) * 1e3))
for name in sys.argv[1:]:
    for build in OPERATORS[name].warmup:
        began = time.perf_counter()
        OPERATORS[name].build(target, **build).load()
        print(json.dumps([name, build, (time.perf_counter() - began) * 1e3]))
"""


class LaunchCounter:
    """Counts kernels, copies and memsets of calls, and sums their time, by CUPTI through torch.profiler.

    Once it is there, launches cost the host more: nothing is timed after it. With a timer, L2 is flushed before each
    call, and what the flush launches is left out.
    """

    def __init__(self, timer: CudaTimer | None = None) -> None:
        self._flush = timer.flush if timer else lambda: None
        self._profile([self._flush])  # the first profile of a process may miss what runs while CUPTI starts
        self._own = len(self._profile([self._flush]))

    def count(self, calls: Sequence[Callable[[], Any]]) -> dict[str, Any]:
        """Launches and microseconds of one of these calls, which all do the same; empty where nothing is seen."""
        for call in calls:
            call()
        seen = self._profile([step for call in calls for step in (self._flush, call)])
        each, rest = divmod(len(seen), len(calls))
        if rest or each <= self._own:
            return {}
        times = [time for i in range(len(calls)) for time in seen[i * each + self._own : (i + 1) * each]]
        return {"launches": each - self._own, "kernel": sum(times) / len(calls)}

    def _profile(self, steps: Sequence[Callable[[], Any]]) -> list[float]:
        """The microseconds of everything that the device did, in its order."""
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            for step in steps:
                step()
            torch.cuda.synchronize()
        events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
        return [event.time_range.elapsed_us() for event in sorted(events, key=lambda event: event.time_range.start)]


def accuracy(suite: Suite, family: Case, ready: Mapping[str, Prepare], generator: torch.Generator) -> list[Accuracy]:
    """Every candidate's errors on one family of inputs, each sample against float64."""
    inputs = family.make(generator, family.count)
    exact = exactly(suite.gold, inputs)
    cond = condition(suite.inverted(*inputs)) if suite.inverted else float("nan")
    ours = {entrant.name: entrant.ours for entrant in suite.entrants}
    found = []
    for name, prepare in ready.items():
        try:
            outputs = outputs_of(prepare(*inputs)())
        except Exception:  # absent for such inputs, or refused: a peer's own affair
            if ours[name]:
                raise
            continue
        errors = {
            output: row_errors(out, right) for output, out, right in zip(suite.outputs, outputs, exact, strict=True)
        }
        found.append(
            Accuracy(
                operator=suite.operator,
                direction=suite.direction,
                family=family.label,
                parameters=family.parameters,
                samples=family.count,
                cond=cond,
                candidate=name,
                ours=ours[name],
                worst={output: float(error.max()) for output, error in errors.items()},
                median={output: float(error.median()) for output, error in errors.items()},
            )
        )
    return found


def condition(matrices: Tensor) -> float:
    """The median condition number of I plus these symmetric matrices."""
    eigenvalues = torch.linalg.eigvalsh(matrices.double().cpu()) + 1
    return float((eigenvalues[:, -1] / eigenvalues[:, 0]).median())


def first_calls(operators: Sequence[Operator], target: Target) -> list[FirstCall]:
    """What each build that users need took to compile, and takes to load in a fresh process without compilers."""
    environment = {**os.environ, "PATH": "/nonexistent", "CUDA_HOME": "/nonexistent"}
    names = [operator.name for operator in operators]
    done = subprocess.run(
        [sys.executable, "-c", WARM, *names], env=environment, capture_output=True, text=True, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    loads = {(name, _label(build)): milliseconds for name, build, milliseconds in lines[1:]}
    reason = done.stderr.strip().splitlines()[-1] if done.returncode and done.stderr.strip() else ""
    found = []
    for operator in operators:
        for build in operator.warmup:
            entry = operator.build(target, **build).find()
            found.append(
                FirstCall(
                    operator=operator.name,
                    build=_label(build),
                    cold_seconds=entry.meta["compile_seconds"] if entry else None,
                    warm_milliseconds=loads.get((operator.name, _label(build))),
                    import_milliseconds=lines[0] if lines else None,
                    reason=reason,
                )
            )
    return found


def _label(build: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in build.items()) or "one for all sizes"
