"""What mhc_pre_h_aggregate is checked and measured on."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from jit_kernels.checks.workload import Sample, Workload

HIDDEN_SIZES = (4096, 7168)
TOKENS = (1, 8, 32, 128, 129, 512, 1024)


def make(hidden_size: int, generator: torch.Generator, tokens: int) -> tuple[Tensor, Tensor]:
    """Residual streams of unit size, and weights between 0 and 1 as the model's sigmoid gives them."""
    device = generator.device
    residual = torch.randn(tokens, 4, hidden_size, device=device, generator=generator).bfloat16()
    return residual, torch.sigmoid(torch.randn(tokens, 4, device=device, generator=generator))


def eager(residual: Tensor, pre: Tensor) -> Tensor:
    """What Hugging Face transformers' DeepSeek-V4 runs."""
    return (pre.unsqueeze(-1) * residual).sum(dim=-2).to(residual.dtype)


WORKLOAD = Workload(
    samples=tuple(
        Sample(
            f"T={tokens} H={hidden_size}",
            partial(make, hidden_size),
            count=tokens,
            cpu_count=min(tokens, 129),
        )
        for hidden_size in HIDDEN_SIZES
        for tokens in TOKENS
    ),
    output_names=("out",),
    gold=lambda residual, pre: (eager(residual, pre),),
    baseline=eager,
    baseline_name="torch eager",
    bound=2**-8,
    bound_reason="one bfloat16 rounding is at most 2^-9; the float32 sum before it adds far less than another",
    gradient_bound=2**-8,
    gradient_reason="grad_residual is rounded to bfloat16 once, as out is; grad_pre stays float32",
    bitwise_fallback=True,
)
