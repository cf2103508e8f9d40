"""How far results are from what is right, and whether two of them are the same to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jit_kernels.messages import describe

_AT_A_TIME = 1 << 28  # elements that are held in float64 together


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


def row_errors(out: Tensor, exact: Tensor) -> Tensor:
    """The relative Frobenius error of each row; NaN and Inf count as infinite."""
    if out.shape != exact.shape:
        raise ValueError(f"{describe(out)} where {describe(exact)} was expected")
    step = max(1, _AT_A_TIME // max(1, exact.shape[1:].numel()))
    return torch.cat(
        [_ratios((o - e).norm(dim=1), e.norm(dim=1)) for o, e in map(_rows, out.split(step), exact.split(step))]
    )


def relative_error(out: Tensor, exact: Tensor) -> float:
    """The largest of `row_errors`."""
    return _largest(row_errors(out, exact))


def element_error(out: Tensor, exact: Tensor, rtol: float, atol: float) -> float:
    """The largest error of one element, in units of ``atol + rtol * |exact|``; NaN and Inf count as infinite."""
    if out.shape != exact.shape:
        raise ValueError(f"{describe(out)} where {describe(exact)} was expected")
    out, exact = _rows(out, exact)
    return largest_ratio((out - exact).abs(), atol + rtol * exact.abs())


def largest_ratio(error: Tensor, scale: Tensor) -> float:
    """The largest ``error / scale``, where no error needs no scale; NaN and Inf count as infinite."""
    return _largest(_ratios(error, scale))


def _ratios(error: Tensor, scale: Tensor) -> Tensor:
    return (error / scale).masked_fill(error == 0, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _largest(ratios: Tensor) -> float:
    return float(ratios.max()) if ratios.numel() else 0.0


def _rows(out: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    # A row may be a single number.
    return out.double().unsqueeze(-1).flatten(1), exact.double().unsqueeze(-1).flatten(1)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
