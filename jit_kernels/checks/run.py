"""Holds one operator to its promises on one sample: the four checks, and its time beside that of what it replaces."""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jit_kernels.checks.accuracy import EDGE_ROWS, hold_to_fallback, hold_to_gold, with_edges
from jit_kernels.checks.compare import relative_error
from jit_kernels.checks.invariance import hold_to_packed, place_names
from jit_kernels.checks.layouts import lengths
from jit_kernels.checks.result import Check, Result
from jit_kernels.checks.stage import as_tuple, forward, gradient, random_upstream
from jit_kernels.checks.workload import Sample
from jit_kernels.dispatch import Operator, Support
from jit_kernels.jit.errors import JitError


def check(operator: Operator, sample: Sample, device: torch.device, backend: str, repeats: int) -> Result:
    """Forward accuracy, forward invariance, gradient accuracy, gradient invariance; and time.

    Args:
        backend: ``auto``, ``fused`` or ``torch``. Which implementation that comes to is found out first, and it is
            then named in every call: ``fused`` raises where it would have to fall back, so what the result says ran
            is what ran.
        repeats: Calls whose bytes are compared with the first one's.
    """
    workload = operator.workload
    count = sample.count if device.type == "cuda" else sample.cpu_count
    sizes = lengths(count)
    result = Result(operator.name, sample.label, str(device), count, sample.count, sizes)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{operator.name} {sample.label}".encode()))
    inputs, edges = sample.make(generator, count), sample.make(generator, EDGE_ROWS)
    result.inputs = {name: _described(tensor) for name, tensor in zip(operator.arguments, inputs, strict=False)}
    result.ran, result.reason = choose(operator, inputs, backend)
    if result.ran == "error":
        return result

    upstream, edge_upstream = (random_upstream(operator, rows, generator) for rows in (inputs, edges))
    place = place_names(workload, sizes)
    for stage, arguments, hard in (
        (forward(operator, result.ran), inputs, edges),
        (gradient(operator, result.ran, len(inputs)), (*inputs, *upstream), (*edges, *edge_upstream)),
    ):
        accuracy, invariance = Check(f"{stage.name} accuracy"), Check(f"{stage.name} invariance")
        result.checks += [accuracy, invariance]
        try:
            packed = stage(*arguments)
        except Exception as error:
            accuracy.fail("the packed batch", error)
            invariance.fail("the packed batch", error)
            continue
        with accuracy.failing("against float64"):
            hold_to_gold(accuracy, stage, arguments, packed)
        if not workload.bitwise_fallback:
            accuracy.details["fallback_bytes"] = "no, since they are not promised"
        elif (result.ran, device.type) == ("torch", "cpu"):
            accuracy.details["fallback_bytes"] = "no, since it is the fallback that ran"
        else:
            with accuracy.failing("against the fallback"):
                hold_to_fallback(accuracy, stage, arguments, packed, with_edges(hard))
        with invariance.failing("repeats"):
            hold_to_packed(invariance, stage, arguments, packed, sizes, place, repeats)

    theirs, exact = workload.baseline(*inputs), workload.gold(*(tensor.double() for tensor in inputs))
    result.baseline = workload.baseline_name
    result.baseline_error = dict(zip(workload.outputs, map(relative_error, as_tuple(theirs), exact), strict=True))
    result.baseline_milliseconds = milliseconds(lambda: workload.baseline(*inputs), device)
    if result.measured("forward accuracy"):
        result.milliseconds = milliseconds(lambda: operator(*inputs, backend=result.ran), device)
    return result


def choose(operator: Operator, inputs: tuple[Any, ...], backend: str) -> tuple[str, str]:
    """(fused, torch or error; why): what a call runs, the compile tried out."""
    if backend == "torch":
        return "torch", "the torch backend was asked for"
    inputs = operator.complete(inputs)
    support = operator.supports(*inputs)
    reason = support.reason
    if support:
        try:
            operator.run(inputs, "fused")
        except JitError as error:
            support, reason = Support(False), str(error)
        except Exception:
            pass  # it is the fused kernel that fails: the checks say how
    return "fused" if support else "error" if backend == "fused" else "torch", reason


def milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    """The median time of one call, as a caller sees it: device events on CUDA, a clock elsewhere."""
    times = []
    if device.type == "cuda":
        for _ in range(5):
            function()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(30)]
        for start, end in events:
            start.record()
            function()
            end.record()
        torch.cuda.synchronize(device)
        times = [start.elapsed_time(end) for start, end in events]
    else:
        function()
        for _ in range(5):
            began = time.perf_counter()
            function()
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
