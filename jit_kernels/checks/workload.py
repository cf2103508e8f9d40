"""What an operator's record says about checking it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One input that users run. ``make(generator, count)`` draws it on the generator's device.

    Every tensor is floating-point, and its first dimension counts rows that don't depend on each other: tokens,
    matrices. The operator takes any number of dimensions in that one's place.
    """

    label: str
    make: Callable[[torch.Generator, int], tuple[Tensor, ...]]
    count: int  # rows in it
    cpu_count: int  # rows of it that a machine without a GPU is asked to compute


@dataclass(frozen=True)
class Tolerance:
    """How far an output or a gradient may be from the float64 result, and why so far.

    ``norm`` bounds the relative Frobenius error of each row. With ``rtol``, each element is held to
    ``atol + rtol * |exact|`` too.
    """

    norm: float
    reason: str
    rtol: float | None = None
    atol: float = 0.0


@dataclass(frozen=True)
class Workload:
    """The inputs an operator is checked on, and what is right for them."""

    samples: tuple[Sample, ...]
    gold: Callable[..., tuple[Tensor, ...]]  # float64 inputs → float64 outputs, by a way of its own; differentiable
    baseline: Callable[..., Any]  # what users run today
    baseline_name: str
    outputs: Mapping[str, Tolerance]  # one an output, in their order
    gradients: Mapping[str, Tolerance]  # one a tensor argument, by its name in the schema
    bitwise_fallback: bool  # fused and fallback promise the same bytes
    row: str = "row"  # what the first dimension counts
    sequence: str = "sequence"  # what rows come in
