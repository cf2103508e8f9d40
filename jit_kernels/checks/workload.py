"""What an operator's record says about checking it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One input that users run. ``make(generator, count)`` draws it on the generator's device.

    The first dimension of every tensor counts independent samples: tokens, matrices.
    """

    label: str
    make: Callable[[torch.Generator, int], tuple[Any, ...]]
    count: int  # samples in it
    cpu_count: int  # samples of it that a machine without a GPU is asked to compute


@dataclass(frozen=True)
class Workload:
    """The inputs an operator is checked on, and what is right for them."""

    samples: tuple[Sample, ...]
    output_names: tuple[str, ...]
    gold: Callable[..., tuple[Tensor, ...]]  # float64 inputs → float64 outputs, by a way of its own
    baseline: Callable[..., Any]  # what users run today
    baseline_name: str
    bound: float  # largest relative Frobenius error of one sample against gold
    bound_reason: str
    gradient_bound: float  # the same for the gradients, against autograd through gold
    gradient_reason: str
    bitwise_fallback: bool  # fused and fallback promise the same bytes
