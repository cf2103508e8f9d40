"""The mHC collapse in plain torch: the fallback, and the meaning of the operator.

    forward    out           = (p0*r0 + p1*r1) + (p2*r2 + p3*r3)
    backward   grad_residual = grad * p_i
               grad_pre_i    = tree sum over h of grad[h] * r_i[h]

Every product and every sum is rounded by itself in float32 (float64 for a float64 residual), in the order
written here; an output is rounded once more to its own dtype. The CUDA kernels walk the same order, so their
bytes are these bytes. A NaN comes out with torch's bit pattern (bfloat16 0x7FC0, float32 0x7FC00000),
because the hardware's own patterns differ between processors.

Shapes: residual ``[..., 4, H]``, pre ``[..., 4]``, out and grad ``[..., H]``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Products held at a time, in elements: bounds the float32 temporaries to a few times 64 MiB.
_CHUNK_ELEMENTS = 1 << 24


def forward(residual: Tensor, pre: Tensor) -> Tensor:
    """Collapse the four streams: residual ``[..., 4, H]``, pre ``[..., 4]`` to ``[..., H]`` in residual's dtype."""
    compute = _compute_dtype(residual)
    hidden = residual.shape[-1]
    out = torch.empty((*residual.shape[:-2], hidden), dtype=residual.dtype, device=residual.device)
    rows = (residual.reshape(-1, 4, hidden), pre.reshape(-1, 4), out.view(-1, hidden))
    for r, p, o in _chunks(hidden, *rows):
        r0, r1, r2, r3 = r.to(compute).unbind(-2)
        p0, p1, p2, p3 = p.to(compute).unsqueeze(-1).unbind(-2)
        o.copy_((p0 * r0 + p1 * r1) + (p2 * r2 + p3 * r3))
        _canonical_nan_(o)
    return out


def backward(
    grad: Tensor,
    residual: Tensor,
    pre: Tensor,
    output_mask: tuple[bool, bool] = (True, True),
    grad_residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients for residual ``[..., 4, H]`` and pre ``[..., 4]`` from grad ``[..., H]``.

    ``output_mask`` says which of the two are wanted; the other comes back with shape ``[0]``.
    ``grad_residual_dtype`` defaults to residual's dtype; float32 keeps the products unrounded.
    """
    compute = _compute_dtype(residual)
    hidden = residual.shape[-1]
    want_residual, want_pre = output_mask
    grad_residual = torch.empty(
        residual.shape if want_residual else (0,), dtype=grad_residual_dtype or residual.dtype, device=residual.device
    )
    grad_pre = torch.empty(pre.shape if want_pre else (0,), dtype=compute, device=residual.device)
    rows = (
        grad.reshape(-1, hidden),
        residual.reshape(-1, 4, hidden),
        pre.reshape(-1, 4),
        grad_residual.view(-1, 4, hidden) if want_residual else None,
        grad_pre.view(-1, 4) if want_pre else None,
    )
    for g, r, p, out_residual, out_pre in _chunks(hidden, *rows):
        g = g.to(compute).unsqueeze(-2)
        if out_residual is not None:
            out_residual.copy_(g * p.to(compute).unsqueeze(-1))
            _canonical_nan_(out_residual)
        if out_pre is not None:
            out_pre.copy_(_tree_sum(g * r.to(compute)))
            _canonical_nan_(out_pre)
    return grad_residual, grad_pre


def _tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by neighbours: (x0 + x1), (x2 + x3), ..., then the pairs of pairs, up to one.

    An odd one at the end of a level moves up as it is, which is also what adding -0.0 to it would give: so any
    implementation may pad with -0.0, and a row of -0.0 sums to -0.0. The order depends on the length alone.
    """
    while x.shape[-1] > 1:
        paired = x.shape[-1] // 2 * 2
        sums = x[..., 0:paired:2] + x[..., 1:paired:2]
        x = sums if paired == x.shape[-1] else torch.cat((sums, x[..., paired:]), dim=-1)
    return x[..., 0]


def _compute_dtype(residual: Tensor) -> torch.dtype:
    return torch.float64 if residual.dtype == torch.float64 else torch.float32


def _canonical_nan_(x: Tensor) -> None:
    x.masked_fill_(x.isnan(), float("nan"))


def _chunks(hidden: int, *rows: Tensor | None) -> Iterator[Any]:
    """Walk the operands together, a bounded number of tokens at a time; an absent operand stays None."""
    tokens = next(r.shape[0] for r in rows if r is not None)
    step = max(1, _CHUNK_ELEMENTS // (4 * max(hidden, 1)))
    for start in range(0, tokens, step):
        yield tuple(None if r is None else r[start : start + step] for r in rows)
