"""The delta-rule factors in plain torch: the fallback, and the meaning of the operator.

    P = (I + a_scale A)^-1        A's lower triangle alone is read
    T = diag(alpha) P             P rounded to the dtype first: T with alpha is alpha times T without, to the bit
    J = b_scale B P

Inverse and products are computed in float64 and rounded once: more accurate than the float32 chain it replaces on
every input, out of reach of TF32 and of autocast settings, and on a CPU independent of the batch a matrix is in.

Shapes: A, B, T, J ``[..., d, d]``, alpha ``[..., d]``; float32 or float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def forward(
    A: Tensor, B: Tensor, alpha: Tensor, a_scale: float = 1.0, b_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """T, J, and info as ``torch.linalg.cholesky_ex`` gives it: 0, or the order of the first non-positive leading minor.

    A matrix that is not positive definite has NaN in all of its own T and J.
    """
    inverse, info = _inverse(A, a_scale)
    T = alpha.unsqueeze(-1) * inverse.to(A.dtype)
    J = ((b_scale * B.double()) @ inverse).to(A.dtype)
    return T, J, info


def backward(
    grad_T: Tensor,
    grad_J: Tensor,
    A: Tensor,
    B: Tensor,
    alpha: Tensor,
    a_scale: float = 1.0,
    b_scale: float = 1.0,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for A, B and alpha; those not wanted have shape ``[0]``. The inverse is computed again from A."""
    inverse, _ = _inverse(A, a_scale)
    return gradients(inverse, grad_T, grad_J, B, alpha, a_scale, b_scale, output_mask)


def gradients(
    inverse: Tensor,
    grad_T: Tensor,
    grad_J: Tensor,
    B: Tensor,
    alpha: Tensor,
    a_scale: float,
    b_scale: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The closed form, in float64, from P = ``inverse``.

    grad_P     = diag(alpha) grad_T + b_scale B^T grad_J
    grad_A     = -a_scale P sym(grad_P) P, symmetric, as torch.linalg.cholesky's own backward gives it
    grad_B     = b_scale grad_J P
    grad_alpha = the row sums of grad_T * P
    """
    want_A, want_B, want_alpha = output_mask
    P, grad_T, grad_J = inverse.double(), grad_T.double(), grad_J.double()
    grad_A, grad_B, grad_alpha = (alpha.new_empty(0) for _ in range(3))
    if want_A:
        grad_P = alpha.double().unsqueeze(-1) * grad_T + (b_scale * B.double()).mT @ grad_J
        half = P @ (grad_P + grad_P.mT) @ P
        grad_A = (-a_scale / 4 * (half + half.mT)).to(B.dtype)
    if want_B:
        grad_B = (b_scale * (grad_J @ P)).to(B.dtype)
    if want_alpha:
        grad_alpha = (grad_T * P).sum(-1).to(B.dtype)
    return grad_A, grad_B, grad_alpha


def _inverse(A: Tensor, a_scale: float) -> tuple[Tensor, Tensor]:
    """(I + a_scale A)^-1 in float64, symmetric to the bit, and info."""
    M = A.tril().double() * a_scale
    M.diagonal(dim1=-2, dim2=-1).add_(1.0)
    root, info = torch.linalg.cholesky_ex(M)
    if A.is_cuda:  # cholesky_inverse runs matrix by matrix there
        eye = torch.eye(A.shape[-1], dtype=torch.float64, device=A.device)
        half = torch.linalg.solve_triangular(root, eye.expand_as(root), upper=False)
        lower = (half.mT @ half).tril()
    else:
        lower = torch.cholesky_inverse(root).tril()
    inverse = lower + lower.tril(-1).mT
    failed = (info != 0) | root.diagonal(dim1=-2, dim2=-1).isnan().any(-1)
    return inverse.masked_fill(failed[..., None, None], float("nan")), info
