"""The delta-rule factors of video diffusion (VDN): an SPD inverse and its two products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jit_kernels import env, torch_op
from jit_kernels.dispatch import FUSING, Operator, Support, ambient, cuda_support
from jit_kernels.fallbacks import vdn_delta_factors as fallback
from jit_kernels.jit.arch import Target
from jit_kernels.jit.loader import Kernel, kernel
from jit_kernels.messages import describe, require_tensors
from jit_kernels.torch_op import current_device, empty_here, empty_on, undisturbed

FUSED_DTYPE = torch.float32
HEAD_DIMS = (64, 128)
PRECISIONS = {"fp64_tensor": "kFp64Tensor", "fp32": "kFp32"}  # as the kernel calls them

_PRECISION = env.VDN_PRECISION.get()


def validate(
    A: Tensor, B: Tensor, alpha: Tensor, a_scale: float, b_scale: float, check_errors: bool, precision: str | None
) -> None:
    require_tensors(A=A, B=B, alpha=alpha)
    if A.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"A must be float32 or float64; got {describe(A)}")
    if B.dtype != A.dtype or alpha.dtype != A.dtype:
        raise TypeError(f"A, B and alpha must have one dtype; got {describe(A)}, {describe(B)}, {describe(alpha)}")
    if A.ndim < 2 or A.shape[-1] != A.shape[-2] or A.shape[-1] == 0:
        raise ValueError(f"A must have shape [..., d, d]; got {describe(A)}")
    if B.shape != A.shape:
        raise ValueError(f"B must have A's shape, {list(A.shape)}; got {describe(B)}")
    if alpha.shape != A.shape[:-1]:
        raise ValueError(
            f"alpha must have A's shape less its last dimension, {list(A.shape[:-1])}; got {describe(alpha)}"
        )
    if B.device != A.device or alpha.device != A.device:
        raise ValueError(f"A, B and alpha must be on one device; got {describe(A)}, {describe(B)}, {describe(alpha)}")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be None or one of {', '.join(PRECISIONS)}; got {precision!r}")


def supports(A: Tensor, B: Tensor, alpha: Tensor, *options: Any) -> Support:
    if A.dtype != FUSED_DTYPE:
        return Support(False, f"the matrices are {A.dtype}: the fused kernel covers {FUSED_DTYPE}")
    if A.shape[-1] not in HEAD_DIMS:
        return Support(False, f"head_dim {A.shape[-1]}: the fused kernel covers 64 and 128")
    return cuda_support(A)


def outputs(A: Tensor, B: Tensor, alpha: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    shape, dtype, device = A.shape, A.dtype, A.device
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)


def build(target: Target, head_dim: int, precision: str | None = None) -> Kernel:
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim}: the fused kernel covers {', '.join(map(str, HEAD_DIMS))}")
    # Hopper's fp64 tensor cores are as fast as its fp32 pipes; on later chips they are far slower.
    precision = precision or _PRECISION or ("fp64_tensor" if target.major == 9 else "fp32")
    namespace = "jit_kernels::vdn_delta_factors"
    template = f"{head_dim}, {namespace}::Precision::{PRECISIONS[precision]}"
    return kernel(
        "vdn_delta_factors",
        head_dim,
        precision,
        cuda_files=["vdn_delta_factors.cuh"],
        cuda_wrappers=[("run", f"{namespace}::VdnDeltaFactors<{template}>::run")],
        target=target,
    )


def fused(A: Tensor, B: Tensor, alpha: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    T, J = outputs(A, B, alpha)
    _launch(A, B, alpha, T, J, *options)
    return T, J


def shortcut(
    A: Tensor, B: Tensor, alpha: Tensor, a_scale: float, b_scale: float, check_errors: bool, precision: str | None
) -> tuple[str | None, Callable[..., tuple[Tensor, Tensor] | None]] | None:
    d, index = A.shape[-1], A.get_device()
    run = OPERATOR.launchers.get(("run", index, d, precision))
    if run is None or A.ndim not in (3, 4) or A.dtype != FUSED_DTYPE:
        return None
    batched, elsewhere = A.ndim == 4, empty_on(A.device)

    def launch(A: Tensor, B: Tensor, alpha: Tensor, a_scale: float, b_scale: float) -> tuple[Tensor, Tensor] | None:
        sizes, empty = A.shape, empty_here if index == current_device() else elsewhere
        shape: tuple[int, ...]
        strides: tuple[int, ...]
        if batched:
            count = sizes[1]
            shape, strides = (sizes[0], count, d, d), ((count or 1) * d * d, d * d, d, 1)
        else:
            shape, strides = (sizes[0], d, d), (d * d, d, 1)
        T, J = empty(shape, strides, FUSED_DTYPE), empty(shape, strides, FUSED_DTYPE)
        try:
            run(T, J, A, B, alpha, a_scale, b_scale, None)
        except (TypeError, ValueError):  # what the entry refuses, the careful way serves, or says why not
            return None
        return T, J

    return precision, launch


def fallback_forward(
    A: Tensor, B: Tensor, alpha: Tensor, a_scale: float, b_scale: float, check_errors: bool, precision: str | None
) -> tuple[Tensor, Tensor]:
    T, J, info = fallback.forward(A, B, alpha, a_scale, b_scale)
    if check_errors:
        _require_positive(info)
    return T, J


def gradient(ctx: Any, grad_T: Tensor, grad_J: Tensor) -> tuple[Tensor | None, ...]:
    wanted = torch_op.output_mask(ctx, 3, (grad_T, grad_J))
    a_scale, b_scale, _, precision = ctx.options
    grads = BACKWARD(grad_T, grad_J, *ctx.saved_tensors, a_scale, b_scale, wanted, precision, backend=ctx.backend)
    return tuple(grad if want else None for grad, want in zip(grads, ctx.needs_input_grad[:3], strict=True))


def _launch(
    A: Tensor,
    B: Tensor,
    alpha: Tensor,
    T: Tensor,
    J: Tensor,
    a_scale: float,
    b_scale: float,
    check_errors: bool,
    precision: str | None,
) -> None:
    if T.numel() == 0:
        return
    d = A.shape[-1]
    info = A.new_empty(A.shape[:-2], dtype=torch.int32) if check_errors else None
    run = OPERATOR.launcher("run", A.device, d, precision)
    run(
        _matrices(T),
        _matrices(J),
        _matrices(A),
        _matrices(B),
        alpha if alpha.ndim == 2 else alpha.reshape(-1, d),
        a_scale,
        b_scale,
        None if info is None else info.view(-1),
    )
    if info is not None:
        _require_positive(info)


def _matrices(matrices: Tensor) -> Tensor:
    """``[N, d, d]`` with rows of stride 1; the tensor itself or a view where one exists."""
    if matrices.stride(-1) != 1:
        matrices = matrices.contiguous()
    return matrices if matrices.ndim == 3 else matrices.reshape(-1, *matrices.shape[-2:])


def _require_positive(info: Tensor) -> None:
    failing = info.nonzero()
    if not len(failing):
        return
    index = tuple(failing[0].tolist())
    where = {0: "the matrix", 1: f"matrix {index[0] if index else ''}"}.get(len(index), f"matrix {index}")
    more = f", and in {len(failing) - 1} more" if len(failing) > 1 else ""
    raise torch.linalg.LinAlgError(
        f"vdn_delta_factors: I + a_scale*A is not positive definite in {where}: "
        f"its leading minor of order {int(info[index])} is not positive{more}"
    )


OPERATOR = Operator(
    name="vdn_delta_factors",
    schema="(Tensor A, Tensor B, Tensor alpha, float a_scale=1.0, float b_scale=1.0, bool check_errors=False, "
    "str? precision=None) -> (Tensor, Tensor)",
    validate=validate,
    supports=supports,
    outputs=outputs,
    build=build,
    fused=fused,
    shortcut=shortcut,
    fallback=fallback_forward,
    parameters=lambda A, B, alpha, a_scale, b_scale, check_errors, precision: (A.shape[-1], precision),
    gradient=gradient,
    warmup=({"head_dim": 128}, {"head_dim": 64}),
    core_ndim=2,
)


def vdn_delta_factors(
    A: Tensor,
    B: Tensor,
    alpha: Tensor,
    *,
    a_scale: float = 1.0,
    b_scale: float = 1.0,
    check_errors: bool = False,
    precision: str | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The transition and injection of the delta rule: ``T = diag(alpha) P`` and ``J = b_scale B P``, with
    ``P = (I + a_scale A)^-1``.

    Arithmetic is float32 or better throughout (float64 for float64 inputs). Each matrix's result depends on that
    matrix alone. With alpha = 1, T is symmetric to the bit.

    Args:
        A: ``[..., d, d]`` float32 or float64, I + a_scale A symmetric positive definite; only its lower triangle
            is read. Any strides. The fused kernel covers float32 with d = 64 and 128; the rest runs the fallback.
        B: ``[..., d, d]``, as A.
        alpha: ``[..., d]``, any real numbers, any strides.
        a_scale, b_scale: Factors of A and of B, such as 1/S and 1/sqrt(S) of the ``vdn_scaled`` rule.
        check_errors: Raises where a matrix is not positive definite, which waits for the GPU. By default such a
            matrix has NaN in its own T and J, and touches no other.
        precision: Arithmetic of the fused kernel: ``fp64_tensor`` (float64 tensor cores, the default on sm_90) or
            ``fp32`` (the default elsewhere). The fallback has one arithmetic.
        out: (T, J) to write to, of A's shape and dtype, rows contiguous; they may not overlap an input or each other.
        backend: ``auto``, ``fused`` or ``torch``; None takes the ambient one (`use_backend`).

    Returns:
        T and J, each of A's shape and dtype.

    Differentiable once, without ``out``; grad_A is symmetric, as through ``torch.linalg.cholesky``.

    Raises:
        TypeError: a dtype is none of these, or an argument is no dense tensor.
        ValueError: shapes, devices or options don't fit; ``out`` overlaps.
        torch.linalg.LinAlgError: with ``check_errors``, names the first matrix that is not positive definite.
        UnsupportedError, JitError: under ``fused``, where the kernel doesn't cover the call or can't be had.

    Source: ``delta_factor_apply`` of SGLang's MiniMax-H3 VDN branch, rules ``vdn_solve`` and ``vdn_scaled``.
    """
    if out is None:
        if not check_errors and undisturbed(A, B, alpha) and (ambient() if backend is None else backend) in FUSING:
            for like, launch in OPERATOR.shortcuts.get(precision, ()):
                if like(A, B, alpha):
                    made = launch(A, B, alpha, a_scale, b_scale)
                    if made is not None:
                        return made
                    break
        return OPERATOR(A, B, alpha, a_scale, b_scale, check_errors, precision, backend=backend)
    T, J = out
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (A, B, alpha, T, J)):
        raise RuntimeError("vdn_delta_factors: out=... has no gradient, and an argument requires one")
    OUT(A, B, alpha, T, J, a_scale, b_scale, check_errors, precision, backend=backend)
    return T, J


def validate_out(A: Tensor, B: Tensor, alpha: Tensor, T: Tensor, J: Tensor, *options: Any) -> None:
    validate(A, B, alpha, *options)
    require_tensors(T=T, J=J)
    d = A.shape[-1]
    for name, out in (("T", T), ("J", J)):
        if out.shape != A.shape or out.dtype != A.dtype or out.device != A.device:
            raise ValueError(f"out {name} must be like A, {describe(A)}; got {describe(out)}")
        if out.numel() and (out.stride(-1) != 1 or out.stride(-2) != d or not _evenly_spaced(out)):
            raise ValueError(
                f"out {name} must have contiguous matrices, evenly spaced in memory; got strides {out.stride()} "
                f"for shape {list(out.shape)}"
            )


def _evenly_spaced(out: Tensor) -> bool:
    """Whether the batch flattens without a copy, into matrices that don't overlap."""
    try:
        flat = out.view(-1, *out.shape[-2:])
    except RuntimeError:
        return False
    return flat.shape[0] <= 1 or flat.stride(0) >= flat.shape[-1] * flat.shape[-2]


def _require_disjoint(A: Tensor, B: Tensor, alpha: Tensor, T: Tensor, J: Tensor) -> None:
    spans = {}
    for name, tensor in (("A", A), ("B", B), ("alpha", alpha), ("T", T), ("J", J)):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans[name] = (tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())
    for name, others in (("T", ("A", "B", "alpha", "J")), ("J", ("A", "B", "alpha"))):
        for other in others:
            if spans[name][0] < spans[other][1] and spans[other][0] < spans[name][1]:
                raise ValueError(f"out {name} overlaps {other} in memory; it needs memory of its own")


def fused_out(A: Tensor, B: Tensor, alpha: Tensor, T: Tensor, J: Tensor, *options: Any) -> None:
    if T.numel():
        _require_disjoint(A, B, alpha, T, J)
        _launch(A, B, alpha, T, J, *options)


def fallback_out(A: Tensor, B: Tensor, alpha: Tensor, T: Tensor, J: Tensor, *options: Any) -> None:
    if T.numel():
        _require_disjoint(A, B, alpha, T, J)
        for out, made in zip((T, J), fallback_forward(A, B, alpha, *options), strict=True):
            out.copy_(made)


OUT = Operator(
    name="vdn_delta_factors_out",
    schema="(Tensor A, Tensor B, Tensor alpha, Tensor(a!) T, Tensor(b!) J, float a_scale=1.0, float b_scale=1.0, "
    "bool check_errors=False, str? precision=None) -> ()",
    validate=validate_out,
    supports=supports,
    outputs=lambda *args: None,
    build=build,
    fused=fused_out,
    fallback=fallback_out,
    public=False,
)


def validate_backward(
    grad_T: Tensor, grad_J: Tensor, A: Tensor, B: Tensor, alpha: Tensor, a_scale: float, b_scale: float, *options: Any
) -> None:
    require_tensors(grad_T=grad_T, grad_J=grad_J)
    validate(A, B, alpha, a_scale, b_scale, False, options[-1])
    for name, grad in (("grad_T", grad_T), ("grad_J", grad_J)):
        if grad.shape != A.shape or grad.dtype != A.dtype or grad.device != A.device:
            raise ValueError(f"{name} must be like A, {describe(A)}; got {describe(grad)}")


def outputs_backward(
    grad_T: Tensor,
    grad_J: Tensor,
    A: Tensor,
    B: Tensor,
    alpha: Tensor,
    a_scale: float,
    b_scale: float,
    output_mask: list[bool],
    precision: str | None,
) -> tuple[Tensor, ...]:
    wanted = zip((A, B, alpha), output_mask, strict=True)
    return tuple(tensor.new_empty(tensor.shape if want else (0,)) for tensor, want in wanted)


def fused_backward(
    grad_T: Tensor,
    grad_J: Tensor,
    A: Tensor,
    B: Tensor,
    alpha: Tensor,
    a_scale: float,
    b_scale: float,
    output_mask: list[bool],
    precision: str | None,
) -> tuple[Tensor, ...]:
    """The inverse by the kernel (with alpha = 1 it is T), the products of the closed form by torch."""
    ones = alpha.new_ones(()).expand(alpha.shape)
    inverse, _ = fused(A, B, ones, a_scale, b_scale, False, precision)
    return fallback.gradients(inverse, grad_T, grad_J, B, alpha, a_scale, b_scale, output_mask)


def no_double_backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    raise NotImplementedError("vdn_delta_factors can be differentiated once: it has no double backward")


BACKWARD = Operator(
    name="vdn_delta_factors_backward",
    schema="(Tensor grad_T, Tensor grad_J, Tensor A, Tensor B, Tensor alpha, float a_scale, float b_scale, "
    "bool[] output_mask, str? precision=None) -> (Tensor, Tensor, Tensor)",
    validate=validate_backward,
    supports=lambda grad_T, grad_J, *args: supports(*args),
    outputs=outputs_backward,
    build=build,
    fused=fused_backward,
    fallback=lambda *args: fallback.backward(*args[:-1]),  # which has one arithmetic, whatever the precision
    gradient=no_double_backward,
    core_ndim=2,
    public=False,
)
