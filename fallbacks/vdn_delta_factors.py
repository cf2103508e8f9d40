"""The delta-rule factors in plain torch: the fallback, and the meaning of the operator.

    P = (I + a_scale A)^-1        A is given by its lower triangle; what stands above is not read
    T = diag(alpha) P             P rounded to the dtype first: T is alpha times the T of alpha = 1, to the bit
    J = b_scale B P

Inverse and products are computed in float64 and rounded once: more accurate than the float32 chain on every input, and
out of reach of whatever the process allows float32 products to be. A matrix that is not positive definite, or has a NaN
in its lower triangle, has NaN in all of its own T and J.

On a CPU the matrices are taken one by one, each from memory of its own, so that a matrix's bytes depend on that matrix
alone. On a GPU they go through the batched routines of cuSOLVER and cuBLAS, without a synchronisation; those may choose
their code by the batch's size, which the rounding to float32 hides but for rare last bits.

Shapes: A, B, T, J ``[..., d, d]``, alpha ``[..., d]``; float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def forward(
    A: Tensor, B: Tensor, alpha: Tensor, a_scale: float = 1.0, b_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """T, J, and info as ``torch.linalg.cholesky_ex`` gives it: 0, or the order of the first bad leading minor."""
    if A.device.type == "cpu":
        return _forward_one_by_one(A, B, alpha, a_scale, b_scale)
    inverse, info = _inverse(A, a_scale)
    injection = (_copy(B, b_scale) @ inverse).to(A.dtype)
    # Rounded before it is mirrored: half the bytes. J takes the product as it came, a last bit of float64 away.
    rounded = inverse.to(A.dtype).tril_()
    rounded += rounded.tril(-1).mT
    return rounded.mul_(alpha.unsqueeze(-1)), injection, info


def _forward_one_by_one(
    A: Tensor, B: Tensor, alpha: Tensor, a_scale: float, b_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    T, J, info = A.new_empty(A.shape), A.new_empty(A.shape), A.new_empty(A.shape[:-2], dtype=torch.int32)
    if info.numel():
        batch = A.ndim - 2
        each = zip(*(_flat(tensor, batch).unbind() for tensor in (A, B, alpha, T, J, info)), strict=True)
        for matrix, B_of, alpha_of, T_of, J_of, info_of in each:
            inverse, bad = _inverse_of_one(matrix, a_scale)
            torch.mul(alpha_of.unsqueeze(-1), inverse.to(A.dtype), out=T_of)
            J_of.copy_(_copy(B_of, b_scale) @ inverse)
            info_of.fill_(bad)
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
    if A.device.type == "cpu":
        like = [A.new_empty(A.shape, dtype=torch.float64)]
        (inverse,) = _each(lambda A: _inverse_of_one(A, a_scale)[:1], A.ndim - 2, (A,), like)
    else:
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
    """The closed form from P = ``inverse``, in float64.

    grad_P     = diag(alpha) grad_T + b_scale B^T grad_J
    grad_A     = -a_scale sym(P grad_P P), with sym(X) = (X + X^T) / 2, as torch.linalg.cholesky's own backward gives it
    grad_B     = b_scale grad_J P
    grad_alpha = the row sums of grad_T * P
    """
    want_A, want_B, want_alpha = output_mask

    def compute(P: Tensor, grad_T: Tensor, grad_J: Tensor, B: Tensor, alpha: Tensor) -> tuple[Tensor, ...]:
        P, grad_T, grad_J = P.double(), grad_T.double(), grad_J.double()
        found = []
        if want_A:
            grad_P = alpha.double().unsqueeze(-1) * grad_T + (b_scale * B.double()).mT @ grad_J
            product = P @ grad_P @ P
            found.append(-0.5 * a_scale * (product + product.mT))
        if want_B:
            found.append(b_scale * (grad_J @ P))
        if want_alpha:
            found.append((grad_T * P).sum(-1))
        return tuple(grad.to(B.dtype) for grad in found)

    like = [tensor.new_empty(tensor.shape) for tensor, want in zip((B, B, alpha), output_mask, strict=True) if want]
    found = iter(_each(compute, B.ndim - 2, (inverse, grad_T, grad_J, B, alpha), like))
    grad_A, grad_B, grad_alpha = (next(found) if want else alpha.new_empty(0) for want in output_mask)
    return grad_A, grad_B, grad_alpha


def _inverse(A: Tensor, a_scale: float) -> tuple[Tensor, Tensor]:
    """P of every matrix in float64, NaN where there is none; and info. Of what lies above the diagonal the last bit may
    differ from what lies below."""
    matrix = _copy(A, a_scale)
    matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
    root, info = torch.linalg.cholesky_ex(matrix)
    # cuSOLVER's info overlooks a NaN; the factor's diagonal doesn't.
    diagonal = root.diagonal(dim1=-2, dim2=-1)
    nan = diagonal.isnan()
    info = torch.where((info == 0) & nan.any(-1), nan.int().argmax(-1).int() + 1, info)
    diagonal.masked_fill_((info != 0).unsqueeze(-1), torch.nan)  # makes all of the inverse NaN
    # cholesky_inverse would go matrix by matrix here.
    eye = torch.eye(A.shape[-1], dtype=root.dtype, device=A.device)
    half = torch.linalg.solve_triangular(root, eye.expand_as(root), upper=False)
    return half.mT @ half, info


def _inverse_of_one(A: Tensor, a_scale: float) -> tuple[Tensor, int]:
    """The same of a single matrix on a CPU, symmetric to the bit."""
    matrix = _copy(A, a_scale)
    matrix.diagonal().add_(1.0)
    root, info = torch.linalg.cholesky_ex(matrix)
    bad, diagonal = int(info), root.diagonal()
    if not bad and diagonal.sum().isnan():
        bad = int(diagonal.isnan().int().argmax()) + 1
    if bad:
        return matrix.fill_(torch.nan), bad
    return torch.cholesky_inverse(root), 0


def _copy(x: Tensor, scale: float) -> Tensor:
    """``scale * x`` in float64, in memory of its own: a BLAS may choose its code by where it is aligned."""
    copy = x.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    return copy if scale == 1 else copy.mul_(scale)


def _flat(tensor: Tensor, batch_ndim: int) -> Tensor:
    return tensor.reshape(-1, *tensor.shape[batch_ndim:])


def _each(
    compute: Callable[..., tuple[Tensor, ...]], batch_ndim: int, tensors: Sequence[Tensor], like: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """``compute(*tensors)``: at once on a GPU; on a CPU for one matrix after the other, into ``like``."""
    if tensors[0].device.type != "cpu":
        return compute(*tensors)
    flat = [_flat(tensor, batch_ndim) for tensor in tensors]
    outputs = [tensor.view(-1, *tensor.shape[batch_ndim:]) if tensor.numel() else tensor[:0] for tensor in like]
    for index in range(flat[0].shape[0] if like and like[0].numel() else 0):
        # Copies lie where the allocator aligns them: a BLAS may choose its code by that.
        for output, value in zip(outputs, compute(*(tensor[index].clone() for tensor in flat)), strict=True):
            output[index] = value
    return tuple(like)
