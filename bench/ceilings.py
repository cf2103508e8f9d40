"""What this machine reaches in this run: the copy rate, the arithmetic rates, and the cost of a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jit_kernels.bench.record import Ceiling, CeilingName, Estimate
from jit_kernels.bench.timing import CudaTimer, Shot, graph_calls, in_turn, interleave

from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import JitError
from jit_kernels.jit.loader import Kernel, kernel

COPIED = 1 << 30  # bytes read, and as many written: 20 times L2
THREADS, CHAINS = 256, 16  # as ceilings.cuh has them
BLOCKS_PER_MULTIPROCESSOR = 8
ROUNDS = {"ffma": 1000, "fp64_tensor": 300}  # loops of a kernel: about a millisecond on an H200
# FLOP of one thread and round: chains of 8 fused multiply-adds; 8 warp-wide products of 16 x 8 x 16.
FLOP = {"ffma": 2 * 8 * CHAINS, "fp64_tensor": 2 * 8 * 16 * 8 * 16 // 32}
EXPORTS = ("empty", "multiply_add", "multiply_add_tensor", "read")


def build(target: Target) -> Kernel:
    return kernel(
        "ceilings",
        cuda_files=[Path(__file__).with_name("ceilings.cuh")],
        cuda_wrappers=[(name, f"jit_kernels::ceilings::{name}") for name in EXPORTS],
        target=target,
    )


def measure(timer: CudaTimer) -> tuple[list[Ceiling], str]:
    """The ceilings, and why some of them are missing: the text is empty where none is."""
    device = timer.device
    # A generator of its own: a capture that failed leaves torch's default one unusable.
    source = torch.rand(COPIED // 4, device=device, generator=torch.Generator(device))
    destination = torch.empty_like(source)
    shots: dict[CeilingName, Shot] = {"copy": timer.queued(lambda: destination.copy_(source))}
    try:
        module = build(Target.of(device)).load()
    except JitError as error:
        lack = f"only the copy rate was measured: {error}"
    else:
        lack = ""
        shots |= _kernels(timer, module, source)
    measured = interleave(shots, timer)
    amounts = {"copy": 2.0 * COPIED, "read": 1.0 * COPIED}
    threads = _blocks(device) * THREADS
    amounts |= {name: float(FLOP[name] * ROUNDS[name] * threads) for name in FLOP}
    found = []
    for name, time in measured.items():
        if name in amounts:
            unit = "TFLOP/s" if name in FLOP else "GB/s"
            scale = 1e-6 if name in FLOP else 1e-3  # from FLOP or bytes a microsecond
            found.append(Ceiling(name=name, unit=unit, value=_rate(time, amounts[name] * scale)))
        else:
            found.append(Ceiling(name=name, unit="us", value=time))
    return found, lack


def _kernels(timer: CudaTimer, module: Any, operands: torch.Tensor) -> Mapping[CeilingName, Shot]:
    out = torch.empty(_blocks(timer.device), THREADS, device=timer.device)
    empty = partial(module.empty, out)
    run: Callable[..., Any] = module.multiply_add
    run_tensor: Callable[..., Any] = module.multiply_add_tensor
    return {
        "read": timer.queued(lambda: module.read(out, operands)),
        "ffma": timer.queued(lambda: run(out, operands, ROUNDS["ffma"])),
        "fp64_tensor": timer.queued(lambda: run_tensor(out, operands, ROUNDS["fp64_tensor"])),
        "empty_kernel": timer.graph(in_turn([empty], graph_calls(0)))[0],
    }


def _blocks(device: torch.device) -> int:
    return BLOCKS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _rate(time: Estimate, amount: float) -> Estimate:
    return Estimate(
        median=amount / time.median,
        low=amount / time.high,
        high=amount / time.low,
        samples=time.samples,
        stable=time.stable,
    )


def again(before: list[Ceiling], after: list[Ceiling]) -> list[Ceiling]:
    """The ceilings of the whole run from those of its beginning and its end: their mean, stable where both agree."""
    late = {ceiling.name: ceiling.value for ceiling in after}
    return [one.model_copy(update={"value": _both(one.value, late.get(one.name, one.value))}) for one in before]


def _both(first: Estimate, second: Estimate) -> Estimate:
    near = abs(first.median - second.median) <= 0.02 * min(first.median, second.median)
    return Estimate(
        median=(first.median + second.median) / 2,
        low=min(first.low, second.low),
        high=max(first.high, second.high),
        samples=first.samples + second.samples,
        stable=first.stable and second.stable and near,
    )
