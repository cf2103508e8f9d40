"""What vdn_delta_factors is checked and measured on: the workload it was asked for, and families of hard inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from jit_kernels.checks.workload import Sample, Workload

TOKENS = 1008  # keys of one frame
Inputs = tuple[Tensor, Tensor, Tensor]


def reference(
    generator: torch.Generator, count: int, d: int = 128, beta_scale: float = 1.0, silu_values: bool = False
) -> Inputs:
    """SiLU-normalised keys, sigmoid betas, randn values: what SGLang's VDN-H3 feeds the op."""
    A: list[Tensor] = []
    B: list[Tensor] = []
    for some in _chunks(count):
        keys = torch.nn.functional.silu(_randn(generator, some, TOKENS, d))
        values = _randn(generator, some, TOKENS, d)
        values = torch.nn.functional.silu(values) if silu_values else values
        beta = beta_scale * torch.sigmoid(_randn(generator, some, TOKENS, 1))
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
    output_names=("T", "J"),
    gold=gold,
    baseline=chain,
    baseline_name="torch chain",
    bound=1e-6,
    bound_reason="what the operator was asked for: 1e-6 Frobenius against float64, about 8 float32 roundings",
    gradient_bound=5e-6,
    gradient_reason="three products with a float32 inverse, each within the forward's bound, and their sum",
    bitwise_fallback=False,
)
