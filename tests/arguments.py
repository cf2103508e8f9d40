"""The public operators' names, and what to call them with."""

from __future__ import annotations

import torch

from jit_kernels.jit.source import PACKAGE

OPS = sorted(path.stem for path in (PACKAGE / "ops").glob("*.py") if path.stem != "__init__")


def collapse_arguments(tokens: int = 3, hidden: int = 16, dtype=torch.bfloat16):
    return torch.randn(tokens, 4, hidden).to(dtype), torch.rand(tokens, 4)


def factor_arguments(count: int = 2, d: int = 8, dtype=torch.float32):
    root = torch.randn(count, d, d, dtype=dtype)
    return root @ root.mT / d, torch.randn(count, d, d, dtype=dtype), torch.rand(count, d, dtype=dtype)
