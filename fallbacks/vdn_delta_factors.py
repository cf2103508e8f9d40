"""The delta-rule factors in plain torch: the fallback, and the meaning of the operator.

    P = (I + a_scale A)^-1        A is given by its lower triangle; what stands above is not read
    T = diag(alpha) P             P rounded to the dtype first: T is alpha times the T of alpha = 1, to the bit
    J = b_scale B P

Inverse and products are computed in float64 and rounded once: more accurate than the float32 chain on every input, and
out of reach of whatever the process allows float32 products to be. A matrix that is not positive definite, or has a NaN
in its lower triangle, has NaN in all of its own T and J.

On a CPU a matrix's bytes depend on that matrix alone: batched routines treat each as if alone, if its rows are aligned
and its products small; larger matrices go one by one.
On a GPU cuSOLVER and cuBLAS may choose their code by the batch's size, which the rounding to float32 hides but for rare
last bits; nothing waits for the device. A GPU with few float64 units must be expected to take several times the float32
chain's time (not measured).

Shapes: A, B, T, J ``[..., d, d]``, alpha ``[..., d]``; float32 or float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

# On a CPU LAPACK factors blocks of this size and products do the rest, at several times the rate: on two cores, at
# d = 128, 0.9 of the float32 chain's time for N = 101, 1.1 for 7, and twice it for a single matrix, where calls count.
# On a GPU launches count: an H200 took 1394 us for N = 101 by blocks and 782 without (N = 707: 1455 and 1667).
BLOCK = 64
PART = 2**18  # elements of a tensor that a CPU takes at a time: 2 MiB of float64, which its caches hold
TOGETHER = 128  # the largest d of which it takes several: larger products a BLAS splits among threads, if they are few


def forward(
    A: Tensor, B: Tensor, alpha: Tensor, a_scale: float = 1.0, b_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """T, J, and info as ``torch.linalg.cholesky_ex`` gives it: 0, or the order of the first bad leading minor."""
    T, J, info = A.new_empty(A.shape), A.new_empty(A.shape), A.new_empty(A.shape[:-2], dtype=torch.int32)
    for part in _parts(A.ndim - 2, A, B, alpha, T, J, info):
        _forward(a_scale, b_scale, *part)
    return T, J, info


def _forward(
    a_scale: float, b_scale: float, A: Tensor, B: Tensor, alpha: Tensor, T: Tensor, J: Tensor, info: Tensor
) -> None:
    d = A.shape[-1]
    P, bad = _inverse(A, a_scale)
    info.copy_(bad)
    torch.mul(P[:, :d, :d].to(A.dtype), alpha.unsqueeze(-1), out=T)
    J.copy_((_double(B, 2, b_scale) @ P)[:, :d, :d])


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
    like = zip((A, B, alpha), output_mask, strict=True)
    grads = [tensor.new_empty(tensor.shape if want else (0,)) for tensor, want in like]
    wanted = [grad for grad, want in zip(grads, output_mask, strict=True) if want]
    for part in _parts(A.ndim - 2, grad_T, grad_J, A, B, alpha, *wanted):
        of_T, of_J, of_A, of_B, of_alpha, *out = part
        made = gradients(_inverse(of_A, a_scale)[0], of_T, of_J, of_B, of_alpha, a_scale, b_scale, output_mask)
        for grad, value in zip(out, (value for value in made if value.numel()), strict=True):
            grad.copy_(value)
    return grads[0], grads[1], grads[2]


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
    """The closed form from P = ``inverse``, in float64. ``inverse`` is as `_inverse` pads it, or needs no padding.

    grad_P     = diag(alpha) grad_T + b_scale B^T grad_J
    grad_A     = -a_scale sym(P grad_P P), with sym(X) = (X + X^T) / 2, as torch.linalg.cholesky's own backward gives it
    grad_B     = b_scale grad_J P
    grad_alpha = the row sums of grad_T * P
    """
    want_A, want_B, want_alpha = output_mask
    d, none = B.shape[-1], B.new_empty(0)
    P, grad_T, grad_J = inverse.double(), _double(grad_T, 2), _double(grad_J, 2)
    grad_A, grad_B, grad_alpha = none, none, none
    if want_A:
        grad_P = (_double(B, 2, b_scale).mT @ grad_J).addcmul_(_double(alpha, 1).unsqueeze(-1), grad_T)
        product = P @ grad_P @ P
        grad_A = ((product + product.mT) * (-0.5 * a_scale))[..., :d, :d].to(B.dtype)
    if want_B:
        grad_B = (grad_J @ P).mul_(b_scale)[..., :d, :d].to(B.dtype)
    if want_alpha:
        grad_alpha = (grad_T * P).sum(-1)[..., :d].to(B.dtype)
    return grad_A, grad_B, grad_alpha


def _inverse(A: Tensor, a_scale: float) -> tuple[Tensor, Tensor]:
    """P of ``[N, d, d]``, padded as `_double` does, symmetric to the bit, NaN where there is none; and info."""
    P = _double(A, 2, a_scale)
    P.diagonal(dim1=-2, dim2=-1).add_(1.0)
    # The inverses of blocks cost the last digit of float64, which float32 doesn't see.
    in_blocks = A.device.type == "cpu" and A.dtype == torch.float32
    pivots: list[Tensor] = []
    _invert(P, BLOCK if in_blocks else P.shape[-1], False, pivots)
    bad = torch.cat(pivots, -1).isnan()
    return P, torch.where(bad.any(-1), bad.int().argmax(-1) + 1, 0)


def _invert(M: Tensor, block: int, root: bool, pivots: list[Tensor]) -> None:
    """Turns M = L L^T into P = M^-1, or into R = L^-1 if ``root``; adds L's diagonal, NaN from a bad pivot on.

    In blocks: R11 comes from M11, L21 = M21 R11^T, then R22 or P22 from M22 - L21 L21^T, and with G = L21 R11

        R = [ R11          ]    P = [ R11^T R11 + G^T P22 G    -G^T P22 ]
            [ -R22 G   R22 ]        [ -P22 G                   P22      ]
    """
    n = M.shape[-1]
    if n <= block:
        L, info = torch.linalg.cholesky_ex(M)
        # cuSOLVER's info overlooks a NaN; the diagonal doesn't, and from there a NaN reaches all of P.
        diagonal, info = L.diagonal(dim1=-2, dim2=-1), info.unsqueeze(-1)
        order = torch.arange(1, n + 1, device=M.device)
        pivots.append(diagonal.masked_fill_((info > 0) & (order >= info), torch.nan))
        eye = torch.eye(n, dtype=M.dtype, device=M.device)
        R = torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False)
        if root:
            M.copy_(R)
        else:
            half = torch.baddbmm(R, R.mT, R, beta=0.0, alpha=0.5)
            torch.add(half, half.mT, out=M)
        return
    size = -(-n // block) // 2 * block
    (M11, M12), (M21, M22) = (rows.split((size, n - size), -1) for rows in M.split((size, n - size), -2))
    _invert(M11, block, True, pivots)
    L21 = torch.bmm(M21, M11.mT)
    M22 -= torch.bmm(L21, L21.mT)
    _invert(M22, block, root, pivots)
    G = torch.bmm(L21, M11)
    torch.neg(torch.bmm(M22, G), out=M21)
    if root:
        M12.zero_()
    else:
        M12.copy_(M21.mT)
        half = torch.bmm(M11.mT, M11).baddbmm_(G.mT, M21, beta=0.5, alpha=-0.5)
        torch.add(half, half.mT, out=M11)


def _double(x: Tensor, dims: int, scale: float = 1.0) -> Tensor:
    """``scale * x`` in float64, in memory of its own, its last ``dims`` dimensions padded with zeros to multiples of 8:
    every row starts at a multiple of 64 bytes, by which a BLAS may choose its code."""
    copy = x.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    if short := -x.shape[-1] % 8:
        copy = pad(copy, (0, short) * dims)
    return copy if scale == 1 else copy.mul_(scale)


def _parts(batch_ndim: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """``[N, ...]`` views of the tensors: all at once on a GPU, on a CPU as many matrices as may go together."""
    first = tensors[0]
    if first.numel():
        d, count = first.shape[-1], first.numel()
        if first.device.type == "cpu":
            count = PART // max(8, d) ** 2 if d <= TOGETHER else 1
        flat = (tensor.reshape(-1, *tensor.shape[batch_ndim:]).split(count) for tensor in tensors)
        yield from zip(*flat, strict=True)
