"""What a candidate must show before it is timed: right results, on the very inputs that are timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jit_kernels.bench.suite import outputs_of
from torch import Tensor

from jit_kernels.checks.compare import relative_error, same_bytes


@dataclass
class Verdict:
    """``failure`` is empty where the gate is passed."""

    errors: dict[str, float] = field(default_factory=dict)
    failure: str = ""


def judge(
    outputs: Any,
    gold: Sequence[Tensor],
    names: Sequence[str],
    bounds: Sequence[float],
    same_as: Any = None,
) -> Verdict:
    """Holds outputs to float64 and, where ``same_as`` is given, to the bytes of another implementation."""
    outputs = outputs_of(outputs)
    found = Verdict()
    for name, out, exact, bound in zip(names, outputs, gold, bounds, strict=True):
        if out.shape != exact.shape:
            found.failure = f"{name} has shape {list(out.shape)}, not {list(exact.shape)}"
            return found
        found.errors[name] = worst = relative_error(out, exact)
        if not worst <= bound:
            found.failure = found.failure or f"{name}: error {worst:.1e} against float64 exceeds {bound:.1e}"
    if same_as is not None and not same_bytes(outputs, outputs_of(same_as)):
        found.failure = found.failure or "its bytes differ from the fallback's"
    return found


def exactly(gold: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return gold(*(tensor.double() for tensor in inputs))


def poisoned(call: Callable[[], Any]) -> tuple[Tensor, ...]:
    """What a call returns when the memory its outputs come to lie in holds NaN: what it leaves unwritten is seen."""
    _fill_with_nan(call())  # the allocator gives the next call the same blocks
    return outputs_of(call())


def _fill_with_nan(outputs: Any) -> None:
    for tensor in outputs_of(outputs):
        tensor.fill_(torch.nan)
