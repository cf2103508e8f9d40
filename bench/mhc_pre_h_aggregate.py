"""What mhc_pre_h_aggregate is checked and measured on."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from jit_kernels.checks.workload import Sample, Tolerance, Workload
from jit_kernels.integrations.flashinfer_bench import Trace

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


def gold(residual: Tensor, pre: Tensor) -> tuple[Tensor]:
    return ((pre.unsqueeze(-1) * residual).sum(dim=-2),)


WORKLOAD = Workload(
    samples=tuple(
        Sample(
            f"T={tokens} H={hidden_size}",
            partial(make, hidden_size),
            count=tokens,
            cpu_count=min(tokens, 33),
        )
        for hidden_size in HIDDEN_SIZES
        for tokens in TOKENS
    ),
    gold=gold,
    baseline=eager,
    baseline_name="torch eager",
    outputs={
        "out": Tolerance(
            norm=2**-8,
            rtol=2**-8,
            atol=2**-17,
            reason="one rounding to bfloat16 is at most 2^-8 of the value; the float32 roundings before it at most "
            "3 * 2^-24 of the sum of the |products|, which is below 40",
        )
    },
    gradients={
        "residual": Tolerance(
            norm=2**-8,
            rtol=2**-8,
            reason="one product, rounded to float32 and to bfloat16: together less than 2^-8 of the value",
        ),
        "pre": Tolerance(
            norm=2**-14,
            reason="a float32 tree of at most 13 levels is off by at most 14 * 2^-24 of the sum of the |products|, "
            "which for random gradients is some 60 times the sum itself",
        ),
    },
    bitwise_fallback=True,
    row="token",
)

TRACE = Trace(
    definition="mhc_pre_h_aggregate_h{hidden_size}",
    op_type="mhc",
    description="The mHC collapse of DeepSeek-V4, four residual streams into one hidden state: out[t, h] is the sum "
    "over s of pre[t, s] * residual[t, s, h], in float32 or better, rounded to bfloat16 once.",
    axes={"num_tokens": "tokens of the batch", "num_streams": "residual streams", "hidden_size": "hidden size"},
    inputs={"residual": ("num_tokens", "num_streams", "hidden_size"), "pre": ("num_tokens", "num_streams")},
    outputs={"out": ("num_tokens", "hidden_size")},
    entry="forward(out, residual, pre)",
    rtol=2**-7,
    atol=2**-17,
    tolerance_reason="a result in bfloat16 and the reference's may round to different neighbours, at most 2^-7 of the "
    "value apart; where streams cancel, float32 roundings of products below 40 add up to less than 2^-17",
    purpose="DeepSeek-V4 models call it before every attention and every MLP: in vLLM, in Hugging Face transformers, "
    "and in training with RL-Kernel. Memory traffic bounds it: 10 bytes an output element.",
    baseline_source="the expression in Hugging Face transformers' DeepseekV4HyperConnection.forward (Apache-2.0)",
    normal=("residual",),
    tags=("model:deepseek-v4",),
)
