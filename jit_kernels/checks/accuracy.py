"""Accuracy: near enough to float64; and, where the operator promises it, the fallback's own bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from jit_kernels.checks.compare import differing_rows, element_error, relative_error
from jit_kernels.checks.result import Check
from jit_kernels.checks.stage import Rows, Stage

EDGE_ROWS = 8


def hold_to_gold(check: Check, stage: Stage, arguments: Rows, out: Rows) -> None:
    """Compares ``out`` with the float64 result."""
    norms: dict[str, float] = {}
    elements: dict[str, float] = {}
    exact = stage.gold(*(tensor.double() for tensor in arguments))
    for (name, limit), found, right in zip(stage.tolerances.items(), out, exact, strict=True):
        norms[name] = relative_error(found, right)
        if not norms[name] <= limit.norm:
            check.failures.append(
                f"{name} is off by {norms[name]:.2e} of a row's norm; allowed {limit.norm:.2e}: {limit.reason}"
            )
        if limit.rtol is not None:
            elements[name] = element_error(found, right, limit.rtol, limit.atol)
            if not elements[name] <= 1:
                check.failures.append(
                    f"an element of {name} is off by {elements[name]:.2f} times what is allowed, "
                    f"{limit.atol:.2e} + {limit.rtol:.2e} * |exact|: {limit.reason}"
                )
    check.details["tolerance"] = {name: asdict(limit) for name, limit in stage.tolerances.items()}
    check.details["error"] = norms
    check.details["element_error"] = elements


def hold_to_fallback(check: Check, stage: Stage, arguments: Rows, out: Rows, edges: Rows) -> None:
    """Compares bytes with the fallback on the CPU: those of ``out``, and those for ``edges`` as arguments."""
    check.details["fallback_bytes"] = "yes, edge values too"
    for what, given, mine in (("the input", arguments, out), ("edge values", edges, stage(*edges))):
        for name, found, right in zip(stage.tolerances, mine, stage.fallback(*given), strict=True):
            rows = differing_rows(found.cpu(), right)
            if rows:
                check.failures.append(
                    f"{name} of {what} has other bytes than the CPU fallback in {len(rows)} of {len(found)} rows, "
                    f"the first of them row {rows[0]}"
                )


def with_edges(tensors: Sequence[Tensor]) -> Rows:
    """EDGE_ROWS random rows, with the values in them that random numbers never take: a kind for each row."""
    made = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors)
    for place, tensor in enumerate(made):
        rows, limits = tensor.view(EDGE_ROWS, -1), torch.finfo(tensor.dtype)
        rows[0] = -0.0
        if place == 0:
            rows[1] = -0.0
        rows[2] *= limits.tiny  # most become subnormal
        rows[3, 0] = float("inf")
        rows[4, 0] = float("nan")
        rows[5, 0], rows[5, -1] = float("inf"), float("-inf")
        rows[6, ::2] = -0.0
        rows[7, 1::2] = limits.max
    return made
