"""The boundary to torch: registration of operators, and the test for calls that may pass it by.

A call through the torch dispatcher costs several microseconds of host time; the launch itself costs about one. So
an eager call that nobody watches (no autograd, tracing, mode, transform or tensor subclass) goes straight to the
kernel, and every other call goes through the registered op. This file is the only one that knows torch's internals.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from jit_kernels.dispatch import Operator

F = TypeVar("F", bound=Callable[..., Any])
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]  # of a shape and strides

NAMESPACE = "jit_kernels"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._is_tracing
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_dynamo_compiling
# What torch.compile knows its inputs again by.
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_PLAIN = (torch.Tensor, torch.nn.Parameter)

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # of CUDA: its index


def empty_on(device: torch.device) -> Allocate:
    """``torch.empty_strided`` on this device."""
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


# On the current CUDA device, as code that torch.compile made allocates: half the host time.
empty_here: Allocate = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", empty_on(torch.device("cuda")))


def undisturbed(*tensors: Any) -> bool:
    """The part of `unwatched` that `likeness` doesn't test: modes that torch's guards overlook, as they do those of
    fake tensors and of selective checkpoints; and nested tensors, over which its guards end the process."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.is_nested:
            return False
    return not (
        _compiling()
        or _function_modes()
        or _dispatch_modes()
        or _transform() is not None
        or forward_ad._current_level >= 0
    )


def unwatched(*tensors: Any) -> bool:
    """True where a direct kernel launch can't be told from a call of the registered op.

    The kernel sees memory alone: not who records or changes the call, and not a sign that torch keeps beside it.
    """
    if not undisturbed(*tensors) or _tracing():
        return False
    grad = _grad_enabled()
    return not any(tensor.is_neg() or (grad and tensor.requires_grad) for tensor in tensors)


def likeness(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """A test, in one step, whether other tensors are like these: in all that torch's dispatcher goes by here and now
    (type, keys, device, dtype, gradient), in the number of dimensions and in the size of the last one.

    So where these are `unwatched`, tensors like them are too, if they leave the call `undisturbed`. None where torch
    makes no such test, or one that doesn't know these again, such as one tensor given twice.
    """
    sizes = [[None] * (tensor.ndim - 1) + [tensor.shape[-1]] for tensor in tensors]
    strides = [[None] * tensor.ndim for tensor in tensors]
    try:
        like = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        if not like(*tensors):
            return None
        if any(tensor.requires_grad for tensor in tensors):  # which is watched again once gradients are on
            return lambda *given: not _grad_enabled() and like(*given)
        return like
    except Exception:  # nobody promised that it stays as it is
        return None


def require_no_tangent(name: str, tensors: Iterable[Any]) -> None:
    """Forward-mode derivatives would be lost in silence, so they are refused.

    Raises:
        NotImplementedError: one of the tensors carries a tangent.
    """
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(f"{name} has no forward-mode derivative (jvp); use the reverse mode (vjp)")


def untraced(function: F) -> F:
    """As ``torch.compiler.disable``, whose import of all of torch._dynamo, a second, waits until something traces."""

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return torch.compiler.disable(function)(*args, **options)
        return function(*args, **options)

    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


_sharded: set[str] = set()


def prepare_dtensors(operator: Operator, tensors: Iterable[Any]) -> None:
    """Tells torch how the op is sharded, at the first DTensor: importing torch.distributed.tensor takes its time.

    Every sample stands alone, so any batch dimension may be sharded; nothing is gathered.
    """
    if operator.core_ndim is None or operator.name in _sharded or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return
    _sharded.add(operator.name)
    core, returns = operator.core_ndim, len(operator.torch_op._schema.returns)  # type: ignore[attr-defined]

    @register_sharding(operator.torch_op)  # type: ignore[arg-type]
    def strategies(*args: Any, **options: Any) -> list[tuple[list[Any], list[Any]]]:
        batch = args[0].ndim - core
        # An output that is not wanted is empty, and has no batch to shard.
        wanted = next((arg for arg in args if isinstance(arg, (list, tuple))), [True] * returns)
        return [
            (
                [place if want else Replicate() for want in wanted],
                [place if hasattr(arg, "ndim") else None for arg in args],
            )
            for place in (Replicate(), *(Shard(dim) for dim in range(batch)))
        ]


def output_mask(ctx: Any, count: int, grads: Iterable[Any]) -> list[bool]:
    """Which gradients a backward op is asked for: those needed; of DTensors all, since torch remembers their shapes."""
    needed = list(ctx.needs_input_grad[:count])
    return [True] * count if any(type(grad).__name__ == "DTensor" for grad in grads) else needed


def register(operator: Operator) -> Callable[..., Any]:
    """Makes ``torch.ops.jit_kernels.<name>`` of an operator, and returns it.

    The op's last argument, ``backend``, is the one that the call named, or None for the ambient one.
    """
    parameters, returns = operator.schema.split(" -> ")
    _library.define(
        f"{operator.name}{parameters[:-1]}, str? backend=None) -> {returns}",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    qualified = f"{NAMESPACE}::{operator.name}"

    # The dispatcher drops trailing arguments that equal their defaults, and may pass the backend by place.
    def implementation(*args: Any, backend: str | None = None) -> Any:
        if len(args) == count:
            args, backend = args[:-1], args[-1]
        require_no_tangent(operator.name, (arg for arg in args if isinstance(arg, torch.Tensor)))
        return operator.run(operator.complete(args), backend)

    def fake(*args: Any, backend: str | None = None) -> Any:
        args = operator.complete(args[: count - 1])
        operator.validate(*args)
        return operator.outputs(*args)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *args, ctx.backend = inputs
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, torch.Tensor)))
        ctx.options = tuple(arg for arg in args if not isinstance(arg, torch.Tensor))

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        assert operator.gradient is not None
        given = operator.gradient(ctx, *grads)
        return (*given, *(None for _ in range(count - len(given))))

    _library.impl(operator.name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), operator.name).default
    count = len(op._schema.arguments)
    if operator.gradient is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    return op
