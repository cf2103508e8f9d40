"""What vdn_delta_factors is checked and measured on: the workload it was asked for, and families of hard inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from jit_kernels.checks.workload import Sample, Tolerance, Workload
from jit_kernels.integrations.flashinfer_bench import Trace

TOKENS = 1008  # keys of one frame
Inputs = tuple[Tensor, Tensor, Tensor]


def reference(
    generator: torch.Generator,
    count: int,
    d: int = 128,
    beta_scale: float = 1.0,
    silu_values: bool = False,
    tokens: int = TOKENS,
) -> Inputs:
    """SiLU-normalised keys, sigmoid betas, randn values: what SGLang's VDN-H3 feeds the op."""
    A: list[Tensor] = []
    B: list[Tensor] = []
    for some in _chunks(count):
        keys = torch.nn.functional.silu(_randn(generator, some, tokens, d))
        values = _randn(generator, some, tokens, d)
        values = torch.nn.functional.silu(values) if silu_values else values
        beta = beta_scale * torch.sigmoid(_randn(generator, some, tokens, 1))
        _add_factors(A, B, keys, values, beta)
    return torch.cat(A), torch.cat(B), torch.sigmoid(_randn(generator, count, d))


def correlated(
    generator: torch.Generator, count: int, d: int = 128, weight: float = 0.9, beta_scale: float = 1.0
) -> Inputs:
    """Keys that share a direction, ``weight`` of it, and a rank-16 mix; values that share it too."""
    A: list[Tensor] = []
    B: list[Tensor] = []
    for some in _chunks(count):
        mean = _randn(generator, some, 1, d)
        mix = _randn(generator, some, TOKENS, 16) @ _randn(generator, some, 16, d) / 4
        noise = _randn(generator, some, TOKENS, d)
        keys = torch.nn.functional.silu(weight**0.5 * mean + 0.5 * weight * mix + 0.5 * (1 - weight) ** 0.5 * noise)
        values = torch.nn.functional.silu(_randn(generator, some, TOKENS, d) + mean)
        _add_factors(A, B, keys, values, beta_scale * torch.sigmoid(_randn(generator, some, TOKENS, 1)))
    return torch.cat(A), torch.cat(B), torch.sigmoid(_randn(generator, count, d))


def spectrum(generator: torch.Generator, count: int, d: int = 128, cond: float = 1e3) -> Inputs:
    """I + A with a random eigenbasis and eigenvalues log-spaced from 1 to ``cond``; B randn."""
    basis = torch.linalg.qr(_randn(generator, count, d, d).double()).Q
    eigenvalues = torch.logspace(0, torch.log10(torch.tensor(cond)).item(), d, dtype=torch.float64, device=basis.device)
    A = (basis * (eigenvalues - 1)) @ basis.mT
    return ((A + A.mT) / 2).float(), _randn(generator, count, d, d), torch.sigmoid(_randn(generator, count, d))


FAMILIES: dict[str, Callable[[torch.Generator, int, int], Inputs]] = {
    "randn values, beta 1": lambda g, n, d: reference(g, n, d, 1),
    "randn values, beta 50": lambda g, n, d: reference(g, n, d, 50),
    "randn values, beta 100": lambda g, n, d: reference(g, n, d, 100),
    "SiLU values, beta 1": lambda g, n, d: reference(g, n, d, 1, True),
    "SiLU values, beta 50": lambda g, n, d: reference(g, n, d, 50, True),
    "SiLU values, beta 100": lambda g, n, d: reference(g, n, d, 100, True),
    "spectrum 1e2": lambda g, n, d: spectrum(g, n, d, 1e2),
    "spectrum 1e3": lambda g, n, d: spectrum(g, n, d, 1e3),
    "spectrum 1e5": lambda g, n, d: spectrum(g, n, d, 1e5),
    "correlated 0.9, beta 1": lambda g, n, d: correlated(g, n, d, 0.9, 1),
    "correlated 0.9, beta 50": lambda g, n, d: correlated(g, n, d, 0.9, 50),
    "correlated 0.98, beta 100": lambda g, n, d: correlated(g, n, d, 0.98, 100),
}


def gold(A: Tensor, B: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    inverse = torch.linalg.inv(eye + (A + A.mT) / 2)
    return alpha.unsqueeze(-1) * inverse, B @ inverse


def chain(A: Tensor, B: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """What SGLang runs without a fused kernel: cholesky, solve_triangular, two GEMMs, a row scale."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    root = torch.linalg.solve_triangular(torch.linalg.cholesky(eye + A), eye.expand_as(A), upper=False)
    inverse = root.mT @ root
    return alpha.unsqueeze(-1) * inverse, B @ inverse


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _chunks(count: int) -> list[int]:
    """Frames drawn at a time: bounds the keys in memory."""
    return [min(64, count - start) for start in range(0, count, 64)]


def _add_factors(A: list[Tensor], B: list[Tensor], keys: Tensor, values: Tensor, beta: Tensor) -> None:
    keys = torch.nn.functional.normalize(keys, dim=-1)
    gram = (keys * beta).mT @ keys
    A.append((gram + gram.mT) / 2)
    B.append((values * beta).mT @ keys)


WORKLOAD = Workload(
    samples=tuple(
        Sample(
            f"N=707 d=128 beta-scale {scale}",
            partial(reference, d=128, beta_scale=scale),
            count=707,
            cpu_count=28,
        )
        for scale in (1, 50, 100)
    ),
    gold=gold,
    baseline=chain,
    baseline_name="torch chain",
    outputs=dict.fromkeys(
        "TJ",
        Tolerance(
            norm=1e-6,
            reason="what the operator was asked for: 1e-6 Frobenius against float64, about 8 float32 roundings; no "
            "bound on single elements, since the inverse's small ones have no relative accuracy in float32",
        ),
    ),
    gradients=dict.fromkeys(
        ("A", "B", "alpha"),
        Tolerance(
            norm=5e-6,
            reason="three products with a float32 inverse, each within the forward's bound, and their sum",
        ),
    ),
    bitwise_fallback=False,
    row="matrix",
    sequence="video",
)

TRACE = Trace(
    definition="vdn_delta_factors_d{head_dim}",
    op_type="delta_rule",
    description="The transition and the injection of the Video Delta rule: T = diag(alpha) (I + A)^-1 and "
    "J = B (I + A)^-1, A symmetric and positive semi-definite up to rounding, in float32 or better: no TF32.",
    axes={"num_matrices": "frames times heads", "head_dim": "head dimension"},
    inputs={
        "A": ("num_matrices", "head_dim", "head_dim"),
        "B": ("num_matrices", "head_dim", "head_dim"),
        "alpha": ("num_matrices", "head_dim"),
    },
    outputs={"T": ("num_matrices", "head_dim", "head_dim"), "J": ("num_matrices", "head_dim", "head_dim")},
    entry="run(T, J, A, B, alpha, 1.0, 1.0, {})",
    rtol=1e-5,
    atol=1e-5,
    tolerance_reason="1e-6 of a matrix's Frobenius norm, which is about 60 here, is 5e-7 an element where 128 x 128 of "
    "them share it evenly: a twentieth of the tolerance. Inputs rounded to TF32 fail it in nine of ten elements of J",
    purpose="The linear-attention branch of VDN-H3 / MiniMax-H3 video generation in SGLang calls it in every block, 50 "
    "times a forward and 8 forwards a clip: with N=707, 101 frames of 7 heads, and with others from N=7 on.",
    baseline_source="the chain in SGLang 0.5.23's delta_factor_apply without a fused kernel (Apache-2.0)",
    samples=tuple(
        Sample(f"N={count} d=128 beta-scale 1", partial(reference, d=128, beta_scale=1), count=count, cpu_count=7)
        for count in (7, 1414)
    ),
    tags=("model:minimax-h3",),
)

if __name__ == "__main__":
    from jit_kernels.bench.vdn_script import main

    main()
