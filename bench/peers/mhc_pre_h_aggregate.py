"""The collapse's sizes and peers, forward and backward."""

from __future__ import annotations

import importlib
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jit_kernels.bench.mhc_pre_h_aggregate import WORKLOAD, eager, gold, make
from jit_kernels.bench.peers.mhc_pre_h_aggregate_tile_kernels import Tried, operator
from jit_kernels.bench.suite import (
    AbsentError,
    Case,
    Entrant,
    Prepare,
    Setting,
    Suite,
    autograd,
    fallback,
    function,
    fused,
    gradient_gold,
)
from torch import Tensor

from jit_kernels import mhc_pre_h_aggregate
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import JitError
from jit_kernels.jit.loader import Kernel, kernel
from jit_kernels.messages import first_line
from jit_kernels.ops.mhc_pre_h_aggregate import BACKWARD, OPERATOR, STREAMS

# The table of RL-Kernel's pull request, and 8192 tokens, where memory is all that counts.
TOKENS = (1, 8, 32, 128, 512, 1024, 8192)
HIDDEN_SIZES = (4096, 5120, 7168)
QUICK = {(1, 4096), (128, 7168), (1024, 7168), (8192, 7168)}
ON_A_CPU = {(1, 4096), (8, 4096), (32, 4096), (32, 7168)}

OUT = tuple(tolerance.norm for tolerance in WORKLOAD.outputs.values())
GRADIENTS = tuple(tolerance.norm for tolerance in WORKLOAD.gradients.values())


def inputs(hidden_size: int, generator: torch.Generator, tokens: int) -> tuple[Tensor, Tensor]:
    """As the workload's, drawn in bfloat16 at once: gigabytes of it are needed."""
    if generator.device.type == "cpu":
        return make(hidden_size, generator, tokens)
    residual = torch.empty(tokens, STREAMS, hidden_size, dtype=torch.bfloat16, device=generator.device)
    residual.normal_(generator=generator)
    return residual, torch.sigmoid(torch.randn(tokens, STREAMS, device=generator.device, generator=generator))


def inputs_backward(hidden_size: int, generator: torch.Generator, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    residual, pre = inputs(hidden_size, generator, tokens)
    grad = torch.empty(tokens, hidden_size, dtype=torch.bfloat16, device=generator.device)
    return grad.normal_(generator=generator), residual, pre


def cases(make: Callable[..., Any], flops: int) -> tuple[Case, ...]:
    return tuple(
        Case(
            label=f"T={tokens} H={hidden}",
            parameters={"tokens": tokens, "hidden_size": hidden},
            make=partial(make, hidden),
            flops=flops * tokens * hidden,
            quick=(tokens, hidden) in QUICK,
            cpu=(tokens, hidden) in ON_A_CPU,
            detail=(tokens, hidden) in QUICK,
            host=(tokens, hidden) == (1, 4096),
        )
        for hidden in HIDDEN_SIZES
        for tokens in TOKENS
    )


def build_one_block(target: Target) -> Kernel:
    return kernel(
        "one_block_a_token",
        cuda_files=[Path(__file__).with_suffix(".cuh")],
        cuda_wrappers=[("forward", "jit_kernels::one_block_a_token::forward")],
        target=target,
    )


def one_block_a_token(setting: Setting) -> Prepare:
    require_gpu(setting)
    try:
        run = build_one_block(Target.of(setting.device)).load().forward
    except JitError as error:
        raise AbsentError(str(error)) from error

    def call(residual: Tensor, pre: Tensor) -> Tensor:
        out = torch.empty((residual.shape[0], residual.shape[2]), dtype=residual.dtype, device=residual.device)
        run(out, residual, pre)
        return out

    return partial(partial, call)


def triton_twin(setting: Setting) -> Prepare:
    require_gpu(setting)
    module = imported("jit_kernels.bench.peers.mhc_pre_h_aggregate_triton")
    return partial(partial, module.collapse)


def closed_form(grad: Tensor, residual: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    """What autograd computes for the eager formula."""
    upstream = grad.unsqueeze(-2).float()
    return (upstream * pre.unsqueeze(-1)).to(residual.dtype), (upstream * residual).sum(-1)


def compiled(function: Callable[..., Any]) -> Callable[[Setting], Prepare]:
    """torch.compile for static shapes: one graph a shape, while the setting's budget for it lasts."""
    calls: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}

    def have(setting: Setting) -> Prepare:
        if not setting.on_gpu:
            raise AbsentError("measured on a GPU only: on a CPU each shape would compile C++ for a while")

        def prepare(*args: Tensor) -> Callable[[], Any]:
            budget = setting.compiling
            shapes = tuple(tensor.shape for tensor in args)
            if shapes not in calls:
                if budget.spent > budget.seconds:
                    raise AbsentError(f"torch.compile had its {budget.seconds:g} s (--compile-seconds)")
                began = time.monotonic()
                # Code of its own for each shape: otherwise dynamo would count recompilations, and guard them all.
                code = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
                calls[shapes] = torch.compile(code, dynamic=False, fullgraph=True)
                calls[shapes](*args)
                budget.spent += time.monotonic() - began
            return partial(calls[shapes], *args)

        return prepare

    return have


def liger_forward(setting: Setting) -> Prepare:
    require_gpu(setting)
    return partial(partial, imported("liger_kernel.ops.mhc").mhc_pre_fwd)


def liger_backward(setting: Setting) -> Prepare:
    require_gpu(setting)
    run = imported("liger_kernel.ops.mhc").mhc_pre_bwd
    return lambda grad, residual, pre: partial(run, residual, pre, grad)


def tile_kernels(setting: Setting) -> Callable[[Tensor, Tensor], Tensor]:
    require_gpu(setting)
    try:
        for one in TRIED:
            one.compile()
    except JitError as error:
        raise AbsentError(str(error)) from error
    return operator()


def tile_kernels_forward(setting: Setting) -> Prepare:
    return partial(partial, tile_kernels(setting))


def tile_kernels_backward(setting: Setting) -> Prepare:
    return autograd(tile_kernels(setting), 1)(setting)


def require_gpu(setting: Setting) -> None:
    if not setting.on_gpu:
        raise AbsentError(f"it runs on CUDA devices; this run is on {setting.device}")


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # not installed, or what it needs isn't, or it doesn't like this machine
        raise AbsentError(first_line(error)) from error


def run_backward(grad: Tensor, residual: Tensor, pre: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return BACKWARD(grad, residual, pre, [True, True], None, backend=backend)


def fallback_bytes(call: Callable[..., Any]) -> Callable[[Setting], Prepare]:
    return lambda setting: partial(partial, call, backend="torch")


LIGER, LIGER_PACKAGES = "pip install liger-kernel", ("liger-kernel",)
TRIED = tuple(Tried(hidden_size) for hidden_size in HIDDEN_SIZES)
# tile-kernels 1.0.0 imports what tilelang 0.1.12 has no more, and tilelang 0.1.11 aborts beside a later tvm-ffi.
TILE_KERNELS = "pip install tile-kernels tilelang==0.1.11 apache-tvm-ffi==0.1.11"
TILE_KERNELS_PACKAGES = ("tile-kernels", "tilelang", "apache-tvm-ffi")

SUITES = (
    Suite(
        operator=OPERATOR.name,
        direction="forward",
        cases=cases(inputs, flops=7),
        entrants=(
            fused(mhc_pre_h_aggregate, bounds=OUT, same_bytes_as=fallback_bytes(mhc_pre_h_aggregate)),
            fallback(mhc_pre_h_aggregate, bounds=OUT),
            Entrant("torch eager", "transformers' DeepSeek-V4: multiply, sum, round", "torch", function(eager), OUT),
            Entrant(
                "torch.compile",
                "the same, compiled for each shape",
                "torch with triton",
                compiled(eager),
                OUT,
                packages=("triton",),
            ),
            Entrant(
                "Triton twin",
                "vLLM's hc_collapse_triton written anew: left fold, no fusion of multiply and add",
                "pip install triton",
                triton_twin,
                OUT,
                packages=("triton",),
            ),
            Entrant(
                "one block a token",
                "RL-Kernel's scheme written anew in CUDA: 512 threads a token, two bfloat16 a load",
                "this package and a CUDA compiler",
                one_block_a_token,
                OUT,
            ),
            Entrant(
                "Liger",
                "liger_kernel mhc_pre_fwd; its output is float32",
                LIGER,
                liger_forward,
                OUT,
                packages=LIGER_PACKAGES,
            ),
            Entrant(
                "TileKernels",
                "tile_kernels mhc_pre_apply_mix",
                TILE_KERNELS,
                tile_kernels_forward,
                OUT,
                packages=TILE_KERNELS_PACKAGES,
            ),
        ),
        gold=gold,
        outputs=("out",),
        builds=lambda setting, target: [build_one_block(target), *TRIED],
    ),
    Suite(
        operator=OPERATOR.name,
        direction="backward",
        cases=cases(inputs_backward, flops=12),
        entrants=(
            fused(
                run_backward,
                what="the fused backward operator",
                bounds=GRADIENTS,
                same_bytes_as=fallback_bytes(run_backward),
            ),
            fallback(run_backward, bounds=GRADIENTS),
            Entrant("torch eager", "autograd through the eager formula", "torch", autograd(eager, 1), GRADIENTS),
            Entrant(
                "torch.compile",
                "the closed form of the gradients, compiled for each shape; no autograd on the host",
                "torch with triton",
                compiled(closed_form),
                GRADIENTS,
                packages=("triton",),
            ),
            Entrant(
                "Liger",
                "liger_kernel mhc_pre_bwd: atomics; its grad_residual is float32",
                LIGER,
                liger_backward,
                GRADIENTS,
                packages=LIGER_PACKAGES,
            ),
            Entrant(
                "TileKernels",
                "autograd through tile_kernels mhc_pre_apply_mix",
                TILE_KERNELS,
                tile_kernels_backward,
                GRADIENTS,
                packages=TILE_KERNELS_PACKAGES,
            ),
        ),
        gold=gradient_gold(gold, 1),
        outputs=("grad_residual", "grad_pre"),
    ),
)
