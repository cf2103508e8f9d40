"""The mHC collapse: four residual streams into one hidden state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jit_kernels import torch_op
from jit_kernels.dispatch import FUSING, Operator, Support, ambient, cuda_support
from jit_kernels.fallbacks import mhc_pre_h_aggregate as fallback
from jit_kernels.jit.arch import Target
from jit_kernels.jit.loader import Kernel, kernel
from jit_kernels.messages import describe, require_tensors
from jit_kernels.torch_op import current_device, empty_here, empty_on, undisturbed

STREAMS = 4
MOST_HIDDEN, MOST_BLOCKS = 716_800, 2**31 - 1  # shared memory of the backward; one grid
FUSED_DTYPE = torch.bfloat16
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def validate(residual: Tensor, pre: Tensor) -> None:
    require_tensors(residual=residual, pre=pre)
    if residual.dtype not in DTYPES:
        raise TypeError(f"residual must be bfloat16, float16, float32 or float64; got {describe(residual)}")
    if pre.dtype != (torch.float64 if residual.dtype == torch.float64 else torch.float32):
        raise TypeError(
            f"pre must be float32 (float64 beside a float64 residual); got {describe(pre)} beside {describe(residual)}"
        )
    if residual.ndim < 2 or residual.shape[-2] != STREAMS:
        raise ValueError(f"residual must have shape [..., {STREAMS}, hidden_size]; got {describe(residual)}")
    if residual.shape[-1] == 0:
        raise ValueError(f"hidden_size must be at least 1; got {describe(residual)}")
    if pre.shape != residual.shape[:-1]:
        raise ValueError(
            f"pre must have residual's shape without hidden_size, {list(residual.shape[:-1])}; got {describe(pre)}"
        )
    if pre.device != residual.device:
        raise ValueError(f"residual and pre must be on one device; got {describe(residual)} and {describe(pre)}")


def supports(residual: Tensor, pre: Tensor) -> Support:
    if residual.dtype != FUSED_DTYPE:
        return Support(False, f"residual is {residual.dtype}: the fused kernel covers {FUSED_DTYPE}")
    hidden, tokens = residual.shape[-1], pre.numel() // STREAMS
    if hidden > MOST_HIDDEN:
        return Support(False, f"hidden_size {hidden}: the fused kernel covers up to {MOST_HIDDEN}")
    most = MOST_BLOCKS // max(8, -(-hidden // 512))  # blocks a token: backward's cluster, forward's chunks
    if tokens > most:
        return Support(False, f"{tokens} tokens of hidden_size {hidden}: the fused kernel covers up to {most}")
    return cuda_support(residual)


def outputs(residual: Tensor, pre: Tensor) -> Tensor:
    *batch, _, hidden = residual.shape
    return torch.empty((*batch, hidden), dtype=residual.dtype, device=residual.device)


def build(target: Target) -> Kernel:
    namespace = "jit_kernels::mhc_pre_h_aggregate"
    return kernel(
        "mhc_pre_h_aggregate",
        cuda_files=["mhc_pre_h_aggregate.cuh"],
        cuda_wrappers=[("forward", f"{namespace}::forward"), ("backward", f"{namespace}::backward")],
        target=target,
    )


def fused(residual: Tensor, pre: Tensor) -> Tensor:
    out = outputs(residual, pre)
    if out.numel():
        hidden = residual.shape[-1]
        run = OPERATOR.launcher("forward", residual.device)
        run(out.view(-1, hidden), residual.reshape(-1, STREAMS, hidden), pre.reshape(-1, STREAMS))
    return out


def shortcut(residual: Tensor, pre: Tensor) -> tuple[None, Callable[..., Tensor | None]] | None:
    hidden, index = residual.shape[-1], residual.get_device()
    run = OPERATOR.launchers.get(("forward", index))
    if run is None or residual.ndim not in (3, 4) or residual.dtype != FUSED_DTYPE:
        return None
    batched, elsewhere = residual.ndim == 4, empty_on(residual.device)

    def launch(residual: Tensor, pre: Tensor) -> Tensor | None:
        sizes, empty = residual.shape, empty_here if index == current_device() else elsewhere
        if batched:
            tokens = sizes[1]
            out = empty((sizes[0], tokens, hidden), ((tokens or 1) * hidden, hidden, 1), FUSED_DTYPE)
        else:
            out = empty((sizes[0], hidden), (hidden, 1), FUSED_DTYPE)
        try:
            run(out, residual, pre)
        except (TypeError, ValueError):  # what the entry refuses, the careful way serves, or says why not
            return None
        return out

    return None, launch


def gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    residual, pre = ctx.saved_tensors
    wanted = torch_op.output_mask(ctx, 2, (grad,))
    grads = BACKWARD(grad, residual, pre, wanted, None, backend=ctx.backend)
    return tuple(grad if want else None for grad, want in zip(grads, ctx.needs_input_grad[:2], strict=True))


OPERATOR = Operator(
    name="mhc_pre_h_aggregate",
    schema="(Tensor residual, Tensor pre) -> Tensor",
    validate=validate,
    supports=supports,
    outputs=outputs,
    build=build,
    fused=fused,
    shortcut=shortcut,
    fallback=fallback.forward,
    gradient=gradient,
    warmup=({},),
    core_ndim=2,
)


def mhc_pre_h_aggregate(residual: Tensor, pre: Tensor, *, backend: str | None = None) -> Tensor:
    """Collapses the four residual streams of mHC into one hidden state.

    ``out = (pre0*residual0 + pre1*residual1) + (pre2*residual2 + pre3*residual3)``, every product and every sum
    rounded by itself in float32, the result rounded once to residual's dtype. The bytes are the same on every
    device and for every way of splitting the batch, forward and backward, fused or not.

    Args:
        residual: ``[..., 4, hidden_size]``, any strides. The fused kernel covers bfloat16; float16, float32 and
            float64 run the fallback.
        pre: ``[..., 4]`` float32 (float64 beside a float64 residual), any strides: each stream's weight.
        backend: ``auto``, ``fused`` or ``torch``; None takes the ambient one (`use_backend`).

    Returns:
        ``[..., hidden_size]`` in residual's dtype, contiguous.

    Differentiable once: grad_residual has residual's dtype, grad_pre is reduced in float32 by a fixed tree.

    Raises:
        TypeError: a dtype is none of these, or an argument is no dense tensor.
        ValueError: shapes or devices don't fit each other.
        UnsupportedError, JitError: under ``fused``, where the kernel doesn't cover the call or can't be had.

    Source: the hidden-state aggregation of manifold-constrained hyper-connections ("mHC", arXiv 2512.24880), as in
    DeepSeek-V4's ``HyperConnection`` and ``HyperHead``.
    """
    if undisturbed(residual, pre) and (ambient() if backend is None else backend) in FUSING:
        for like, launch in OPERATOR.shortcuts.get(None, ()):
            if like(residual, pre):
                made = launch(residual, pre)
                if made is not None:
                    return made
                break
    return OPERATOR(residual, pre, backend=backend)


def validate_backward(
    grad: Tensor, residual: Tensor, pre: Tensor, output_mask: list[bool], grad_residual_dtype: torch.dtype | None
) -> None:
    require_tensors(grad=grad)
    validate(residual, pre)
    if grad.dtype != residual.dtype or grad.device != residual.device or grad.shape != _collapsed(residual):
        raise ValueError(
            f"grad must be {residual.dtype}{list(_collapsed(residual))} on {residual.device}; got {describe(grad)}"
        )
    if grad_residual_dtype not in (None, residual.dtype, torch.float32):
        raise TypeError(
            f"grad_residual_dtype must be None, {residual.dtype} or torch.float32; got {grad_residual_dtype}"
        )


def supports_backward(
    grad: Tensor, residual: Tensor, pre: Tensor, output_mask: list[bool], grad_residual_dtype: torch.dtype | None
) -> Support:
    return supports(residual, pre)


def outputs_backward(
    grad: Tensor, residual: Tensor, pre: Tensor, output_mask: list[bool], grad_residual_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    return (
        residual.new_empty(residual.shape if output_mask[0] else (0,), dtype=grad_residual_dtype or residual.dtype),
        pre.new_empty(pre.shape if output_mask[1] else (0,)),
    )


def fused_backward(
    grad: Tensor, residual: Tensor, pre: Tensor, output_mask: list[bool], grad_residual_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    grad_residual, grad_pre = outputs_backward(grad, residual, pre, output_mask, grad_residual_dtype)
    if not (grad_residual.numel() or grad_pre.numel()):
        return grad_residual, grad_pre
    hidden = residual.shape[-1]
    run = OPERATOR.launcher("backward", residual.device)
    run(
        grad_residual.view(-1, STREAMS, hidden) if output_mask[0] else grad_residual,
        grad_pre.view(-1, STREAMS) if output_mask[1] else grad_pre,
        grad.reshape(-1, hidden),
        residual.reshape(-1, STREAMS, hidden),
        pre.reshape(-1, STREAMS),
    )
    return grad_residual, grad_pre


def no_double_backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    raise NotImplementedError("mhc_pre_h_aggregate can be differentiated once: it has no double backward")


def _collapsed(residual: Tensor) -> torch.Size:
    return residual.shape[:-2] + residual.shape[-1:]


BACKWARD = Operator(
    name="mhc_pre_h_aggregate_backward",
    schema="(Tensor grad, Tensor residual, Tensor pre, bool[] output_mask, ScalarType? grad_residual_dtype=None)"
    " -> (Tensor, Tensor)",
    validate=validate_backward,
    supports=supports_backward,
    outputs=outputs_backward,
    build=build,
    fused=fused_backward,
    fallback=fallback.backward,
    gradient=no_double_backward,
    core_ndim=1,
    public=False,
)
