"""How far results are from what is right, and whether two of them are the same to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jit_kernels.messages import describe


def same_bytes(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether two sequences of tensors hold the same bits: -0.0 is not +0.0, and a NaN equals itself."""
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(first, second, strict=True)
    )


def differing_rows(first: Tensor, second: Tensor) -> list[int]:
    """The rows, along the first dimension, that don't hold the same bits.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        raise ValueError(f"{describe(first)} where {describe(second)} was expected")
    if same_bytes([first], [second]):
        return []
    rows = len(first)
    return (_bytes(first).view(rows, -1) != _bytes(second).view(rows, -1)).any(1).nonzero().flatten().tolist()


def relative_error(out: Tensor, exact: Tensor) -> float:
    """The largest relative Frobenius error of one row; NaN and Inf count as infinite."""
    out, exact = _rows(out, exact)
    return largest_ratio((out - exact).norm(dim=1), exact.norm(dim=1))


def element_error(out: Tensor, exact: Tensor, rtol: float, atol: float) -> float:
    """The largest error of one element, in units of ``atol + rtol * |exact|``; NaN and Inf count as infinite."""
    out, exact = _rows(out, exact)
    return largest_ratio((out - exact).abs(), atol + rtol * exact.abs())


def largest_ratio(error: Tensor, scale: Tensor) -> float:
    """The largest ``error / scale``, where no error needs no scale; NaN and Inf count as infinite."""
    ratio = (error / scale).masked_fill(error == 0, 0.0)
    return float(ratio.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if ratio.numel() else 0.0


def _rows(out: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    if out.shape != exact.shape:
        raise ValueError(f"{describe(out)} where {describe(exact)} was expected")
    # A row may be a single number.
    return out.double().unsqueeze(-1).flatten(1), exact.double().unsqueeze(-1).flatten(1)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
