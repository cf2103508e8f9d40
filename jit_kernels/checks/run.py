"""Runs one operator on one sample and holds it to its promises."""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from jit_kernels.checks.workload import Sample
from jit_kernels.dispatch import Operator
from jit_kernels.jit.errors import JitError

ONE_BY_ONE = 129  # samples that are computed alone and compared with the whole batch


@dataclass
class Result:
    """One row of a check. ``failures`` is empty where all promises held."""

    operator: str
    sample: str
    device: str
    count: int
    full_count: int
    ran: str = ""
    reason: str = ""
    error: dict[str, float] = field(default_factory=dict)
    baseline_error: dict[str, float] = field(default_factory=dict)
    bound: float = 0.0
    gradient_error: dict[str, float] = field(default_factory=dict)
    gradient_bound: float = 0.0
    repeats: int = 0
    splits: int = 0
    bytes_compared_with_fallback: bool = False
    milliseconds: float = 0.0
    baseline_milliseconds: float = 0.0
    baseline: str = ""
    failures: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": not self.failures}


def check(operator: Operator, sample: Sample, device: torch.device, backend: str, repeats: int) -> Result:
    """Holds the operator to its record on one sample.

    In this order: which implementation covers it; error against float64 of every output and gradient; the same
    bytes over repeats, over splits of the batch, and (where promised) as the CPU fallback; time beside the baseline.

    Args:
        backend: ``auto``, ``fused`` or ``torch``; what then really ran stands in the result.
        repeats: Calls whose bytes are compared with the first one's.
    """
    workload = operator.workload
    count = sample.count if device.type == "cuda" else sample.cpu_count
    result = Result(operator.name, sample.label, str(device), count, sample.count)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{operator.name} {sample.label}".encode()))
    inputs = sample.make(generator, count)
    result.ran, result.reason = choose(operator, inputs, backend)
    if result.ran == "error":
        result.failures.append(result.reason)
        return result

    def call(*args: Tensor) -> tuple[Tensor, ...]:
        return _tuple(operator(*args, backend=result.ran))

    def call_backward(*args: Tensor) -> tuple[Tensor, ...]:
        leaves, upstream = args[: len(inputs)], args[len(inputs) :]
        return _gradients(call, leaves, upstream)

    out = call(*inputs)
    exact = workload.gold(*(tensor.double() for tensor in inputs))
    result.bound, result.baseline = workload.bound, workload.baseline_name
    result.error = _errors(workload.output_names, out, exact)
    result.baseline_error = _errors(workload.output_names, _tuple(workload.baseline(*inputs)), exact)
    _hold(result, result.error, workload.bound, workload.bound_reason)

    upstream = tuple(torch.randn(o.shape, generator=generator, device=device).to(o.dtype) for o in out)
    names = operator.arguments[: len(inputs)]
    stages = [("out", call, inputs, out)]
    if operator.gradient is not None:
        arguments = (*inputs, *upstream)
        gradients = call_backward(*arguments)
        doubles = [tensor.double() for tensor in arguments]
        exact = _gradients(workload.gold, doubles[: len(inputs)], doubles[len(inputs) :])
        result.gradient_bound = workload.gradient_bound
        result.gradient_error = _errors([f"grad_{name}" for name in names], gradients, exact)
        _hold(result, result.gradient_error, workload.gradient_bound, workload.gradient_reason)
        stages.append(("gradients", call_backward, arguments, gradients))
    del exact

    result.repeats = repeats
    result.bytes_compared_with_fallback = workload.bitwise_fallback
    for what, function, arguments, whole in stages:
        if not all(same_bytes(whole, function(*arguments)) for _ in range(repeats)):
            result.failures.append(f"{what}: bytes differ between repeats")
        pieces = list(_pieces(count))
        result.splits = len(pieces)
        for piece in pieces:
            if not same_bytes([w[piece] for w in whole], function(*(a[piece] for a in arguments))):
                result.failures.append(f"{what}: samples {piece.start} to {piece.stop} have other bytes alone")
                break
        if workload.bitwise_fallback:
            on_cpu = [argument.cpu() for argument in arguments]
            by_fallback = (
                _tuple(operator(*on_cpu, backend="torch"))
                if what == "out"
                else _gradients(
                    lambda *args: _tuple(operator(*args, backend="torch")), on_cpu[: len(inputs)], on_cpu[len(inputs) :]
                )
            )
            if not same_bytes([w.cpu() for w in whole], by_fallback):
                result.failures.append(f"{what}: bytes differ from the CPU fallback's")

    result.milliseconds = milliseconds(lambda: call(*inputs), device)
    result.baseline_milliseconds = milliseconds(lambda: workload.baseline(*inputs), device)
    return result


def choose(operator: Operator, inputs: tuple[Any, ...], backend: str) -> tuple[str, str]:
    """(fused, torch or error; why): what a call runs, the compile tried out."""
    if backend == "torch":
        return "torch", "the torch backend was asked for"
    inputs = operator.complete(inputs)
    support = operator.supports(*inputs)
    if support:
        try:
            operator.run(inputs, "fused")
            return "fused", support.reason
        except JitError as error:
            reason = str(error)
    else:
        reason = support.reason
    return ("error" if backend == "fused" else "torch"), reason


def same_bytes(first: Any, second: Any) -> bool:
    """Whether two sequences of tensors hold the same bits: -0.0 is not +0.0, and a NaN equals itself."""
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(first, second, strict=True)
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """The largest relative Frobenius error of one sample; NaN and Inf count as infinite."""
    out, exact = out.double().flatten(1), exact.double().flatten(1)
    ratio = (out - exact).norm(dim=1) / exact.norm(dim=1)
    return float(ratio.nan_to_num(nan=float("inf")).max()) if len(ratio) else 0.0


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


def _hold(result: Result, errors: dict[str, float], bound: float, reason: str) -> None:
    for name, error in errors.items():
        if not error <= bound:
            result.failures.append(f"{name}: error {error:.2e} exceeds {bound:.2e} ({reason})")


def _errors(names: Any, out: Any, exact: Any) -> dict[str, float]:
    return {name: relative_error(o, e) for name, o, e in zip(names, out, exact, strict=True)}


def _pieces(count: int) -> Iterator[slice]:
    for third in range(3):
        start, stop = count * third // 3, count * (third + 1) // 3
        if stop > start:
            yield slice(start, stop)
    for index in range(min(count, ONE_BY_ONE)):
        yield slice(index, index + 1)


def _gradients(function: Callable[..., Any], leaves: Any, upstream: Any) -> tuple[Tensor, ...]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves), leaves, upstream)


def _tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)
