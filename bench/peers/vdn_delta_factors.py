"""The delta factors' sizes and peers, forward and backward."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jit_kernels.bench.peers.vdn_delta_factors_cusolverdx import PLANS, Launcher, Linked, build_host, libmathdx
from jit_kernels.bench.suite import (
    AbsentError,
    Build,
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
from jit_kernels.bench.vdn_delta_factors import FAMILIES, WORKLOAD, Inputs, chain, gold, reference
from torch import Tensor

from jit_kernels import vdn_delta_factors
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import JitError
from jit_kernels.jit.loader import Kernel, kernel
from jit_kernels.ops.vdn_delta_factors import BACKWARD, HEAD_DIMS, OPERATOR, PRECISIONS

# (matrices, head_dim): one, SGLang's text state, half a round of an H200's 132 SMs, one, two, and videos of 101 frames
# with 1, 7, 14 and 28 heads.
SIZES = (
    *((count, 128) for count in (1, 7, 66, 101, 132, 264, 707, 1414, 2828)),
    *((count, 64) for count in (707, 1414)),
)
BACKWARD_SIZES = ((7, 128), (132, 128), (707, 128))
QUICK = {(1, 128), (132, 128), (707, 128), (1414, 64)}
ON_A_CPU = {1, 7, 101}
FAMILY_SIZE = 64
QUICK_FAMILIES = {("randn values, beta 1", 128), ("correlated 0.98, beta 100", 128)}
Family = Callable[[torch.Generator, int, int], Inputs]

ASKED = tuple(tolerance.norm for tolerance in WORKLOAD.outputs.values())
GRADIENTS = tuple(tolerance.norm for tolerance in WORKLOAD.gradients.values())
THEIRS = (1e-5, 3e-5)  # SGLang's own limits for T and J
THEIR_GRADIENTS = (1e-4,) * 3  # autograd through a float32 factorisation: no limit of anybody's, only a gross check


def draw(family: Family, head_dim: int, generator: torch.Generator, count: int) -> Inputs:
    return family(generator, count, head_dim)


def draw_backward(family: Family, head_dim: int, generator: torch.Generator, count: int) -> tuple[Tensor, ...]:
    """The same, behind random gradients of T and J."""
    A, B, alpha = family(generator, count, head_dim)
    grad_T, grad_J = (torch.randn(A.shape, device=A.device, generator=generator) for _ in "TJ")
    return grad_T, grad_J, A, B, alpha


def cases(sizes: tuple[tuple[int, int], ...], draw: Callable[..., Any], flops: int) -> tuple[Case, ...]:
    return tuple(
        Case(
            label=f"N={count} d={d}",
            parameters={"count": count, "head_dim": d},
            make=partial(draw, reference, d),
            flops=flops * count * d**3,
            quick=(count, d) in QUICK,
            cpu=count in ON_A_CPU,
            detail=(count, d) in QUICK,
            host=count == 1,
        )
        for count, d in sizes
    )


def families(draw: Callable[..., Any], head_dims: tuple[int, ...]) -> tuple[Case, ...]:
    return tuple(
        Case(
            name,
            {"count": FAMILY_SIZE, "head_dim": d},
            partial(draw, family, d),
            flops=0,
            quick=(name, d) in QUICK_FAMILIES,
        )
        for d in head_dims
        for name, family in FAMILIES.items()
    )


def chain_ex(A: Tensor, B: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The chain as a graph can capture it: cholesky_ex does not look at its result."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    root, _ = torch.linalg.cholesky_ex(eye + A)
    half = torch.linalg.solve_triangular(root, eye.expand_as(A), upper=False)
    inverse = half.mT @ half
    return alpha.unsqueeze(-1) * inverse, B @ inverse


def sglang_folder(setting: Setting) -> Path:
    """SGLang's kernels/jit: --sglang, SGLANG_KERNELS_JIT, or the installed package's."""
    if setting.sglang is not None:
        return setting.sglang
    if named := os.environ.get("SGLANG_KERNELS_JIT"):
        return Path(named)
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise AbsentError("sglang is not installed, and neither --sglang nor SGLANG_KERNELS_JIT names its kernels/jit")
    return Path(next(iter(spec.submodule_search_locations))) / "kernels" / "jit"


def build_sglang(folder: Path, target: Target) -> Kernel:
    return kernel(
        "sglang_vdn_delta_factors",
        cuda_files=[folder / "csrc/diffusion/vdn_delta_factors.cuh"],
        cuda_wrappers=[("vdn_delta_factors", "sglang::vdn_delta_factors::VdnDeltaFactorsKernel::run")],
        extra_include_paths=[folder / "include"],
        target=target,
    )


def sglang(setting: Setting) -> Prepare:
    folder = sglang_folder(setting)
    if not setting.on_gpu:
        raise AbsentError(f"it runs on CUDA devices; this run is on {setting.device}")
    try:
        run = build_sglang(folder, Target.of(setting.device)).load().vdn_delta_factors
    except (JitError, OSError) as error:
        raise AbsentError(str(error)) from error

    def call(A: Tensor, B: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        T, J = torch.empty_like(A), torch.empty_like(A)
        run(T, J, A, B, alpha)
        return T, J

    def prepare(A: Tensor, B: Tensor, alpha: Tensor) -> Any:
        if A.shape[-1] != 128:
            raise AbsentError(f"it covers head_dim 128 only; this is {A.shape[-1]}")
        return partial(call, A, B, alpha)

    return prepare


def cusolverdx(setting: Setting) -> Prepare:
    try:
        libmathdx()
        if not setting.on_gpu:
            raise AbsentError(f"it runs on CUDA devices; this run is on {setting.device}")
        return partial(partial, Launcher(setting.device))
    except JitError as error:
        raise AbsentError(str(error)) from error


def builds(setting: Setting, target: Target) -> list[Build]:
    found: list[Build] = [OPERATOR.build(target, d, precision) for d in HEAD_DIMS for precision in PRECISIONS]
    with suppress(AbsentError):
        found.append(build_sglang(sglang_folder(setting), target))
    with suppress(JitError):
        libmathdx()
        found += [build_host(target), *(Linked(plan, target) for plan in PLANS.values())]
    return found


def run_backward(*args: Any, backend: str) -> tuple[Tensor, ...]:
    return BACKWARD(*args, 1.0, 1.0, [True] * 3, None, backend=backend)


SGLANG = "pip install sglang, or --sglang DIR with the kernels/jit folder of its wheel"

SUITES = (
    Suite(
        operator=OPERATOR.name,
        direction="forward",
        cases=cases(SIZES, draw, flops=3),
        entrants=(
            *(
                fused(
                    partial(vdn_delta_factors, precision=precision),
                    name=f"jit_kernels {precision}",
                    what=f"the fused kernel, precision {precision}",
                    bounds=ASKED,
                    unit="fp64_tensor" if precision == "fp64_tensor" else "ffma",
                )
                for precision in PRECISIONS
            ),
            fallback(vdn_delta_factors, bounds=ASKED),
            Entrant(
                "torch chain",
                "cholesky, solve_triangular, two products, a row scale: SGLang without a fused kernel",
                "torch",
                function(chain),
                THEIRS,
                waits=True,
            ),
            Entrant(
                "torch chain, cholesky_ex",
                "the same without the look at the result that a CUDA graph can't capture",
                "torch",
                function(chain_ex),
                THEIRS,
            ),
            Entrant(
                "SGLang fused",
                "its own vdn_delta_factors.cuh through load_jit",
                SGLANG,
                sglang,
                THEIRS,
                packages=("sglang",),
            ),
            Entrant(
                "cuSOLVERDx",
                "its POTRF and TRSM and two products of cuBLASDx, in one kernel",
                "pip install nvidia-libmathdx-cu13",
                cusolverdx,
                THEIRS,
                packages=("nvidia-libmathdx-cu13",),
            ),
        ),
        gold=gold,
        outputs=("T", "J"),
        families=families(draw, (128, 64)),
        inverted=lambda A, B, alpha: A,
        builds=builds,
    ),
    Suite(
        operator=OPERATOR.name,
        direction="backward",
        cases=cases(BACKWARD_SIZES, draw_backward, flops=9),
        entrants=(
            fused(run_backward, what="the fused inverse and torch's products", bounds=GRADIENTS, unit="fp64_tensor"),
            fallback(run_backward, bounds=GRADIENTS),
            Entrant("torch chain", "autograd through the chain", "torch", autograd(chain, 2), THEIR_GRADIENTS),
        ),
        gold=gradient_gold(gold, 2),
        outputs=("grad_A", "grad_B", "grad_alpha"),
        families=families(draw_backward, (128,)),
        inverted=lambda grad_T, grad_J, A, B, alpha: A,
    ),
)
