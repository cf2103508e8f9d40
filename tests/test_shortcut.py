"""Shortcuts: an eager call that nobody watches leaves one for its like, once its kernel is loaded."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from arguments import OPS, collapse_arguments, factor_arguments
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

import jit_kernels
from jit_kernels import (
    mhc_pre_h_aggregate,
    torch_op,
    use_backend,
    vdn_delta_factors,
)
from jit_kernels.dispatch import MOST_SHORTCUTS, OPERATORS, Operator


@pytest.fixture
def launches(monkeypatch) -> list[tuple]:
    """What is launched. The kernels are stubs on the CPU that write 7 everywhere, and refuse a batch of 5."""
    seen = []

    def launch(*args):
        seen.append(args)
        if args[0].shape[0] == 5:
            raise ValueError("expected something else")
        for written in args[: 1 + len(args) // 8]:
            written.fill_(7)

    kernels = {"mhc_pre_h_aggregate": [("forward", -1)], "vdn_delta_factors": [("run", -1, d, None) for d in (64, 128)]}
    for name, keys in kernels.items():
        module = importlib.import_module(f"jit_kernels.ops.{name}")
        for key in keys:
            monkeypatch.setitem(module.OPERATOR.launchers, key, launch)
        monkeypatch.setitem(module.OPERATOR.__dict__, "shortcuts", {})
        monkeypatch.setattr(module, "current_device", lambda: -1)
        monkeypatch.setattr(module, "empty_here", torch_op.empty_on(torch.device("cpu")))
    return seen


def serving_arguments(name: str, *batch: int, size: int = 64) -> tuple[torch.Tensor, ...]:
    count = math.prod(batch)
    arguments = collapse_arguments(count, size) if name == "mhc_pre_h_aggregate" else factor_arguments(count, size)
    return tuple(argument.reshape(*batch, *argument.shape[1:]) for argument in arguments)


def made_by(name: str, *args, **options) -> tuple[torch.Tensor, ...]:
    made = getattr(jit_kernels, name)(*args, **options)
    return made if isinstance(made, tuple) else (made,)


def leave_shortcut(name: str, *arguments: torch.Tensor, count: int = 1) -> None:
    getattr(jit_kernels, name)(*arguments)
    assert sum(len(some) for some in OPERATORS[name].shortcuts.values()) == count


@pytest.mark.parametrize("batch", [(6,), (2, 3), (1,), (0,), (2, 0), (0, 2)])
@pytest.mark.parametrize("backend", [None, "auto", "fused"])
@pytest.mark.parametrize("name", OPS)
def test_a_call_takes_the_shortcut_that_its_like_left(launches, name, backend, batch):
    leave_shortcut(name, *serving_arguments(name, *(7 for _ in batch)))  # the batch may differ, and its strides
    assert not launches
    arguments = serving_arguments(name, *batch)
    made = made_by(name, *arguments, backend=backend)
    like = OPERATORS[name].outputs(*arguments)
    for one, other in zip(made, like if isinstance(like, tuple) else (like,), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert (one == 7).all()
    (given,) = launches
    assert all(one is other for one, other in zip(given, (*made, *arguments), strict=False))
    if name == "vdn_delta_factors":
        assert given[5:] == (1.0, 1.0, None)
        vdn_delta_factors(*arguments, a_scale=0.5, b_scale=0.25)
        assert launches[1][5:] == (0.5, 0.25, None)
    strided = [t.repeat_interleave(2, dim=-2)[..., ::2, :] for t in arguments]
    made_by(name, *strided)
    assert all(one is other for one, other in zip(launches[-1][len(made) :], strided, strict=False))


@pytest.mark.parametrize("name", OPS)
def test_each_kind_of_call_has_a_shortcut_of_its_own(launches, name):
    kinds = [serving_arguments(name, *batch, size=size) for batch in ((2,), (2, 2)) for size in (64, 128)]
    for count, arguments in enumerate(kinds, 1):
        leave_shortcut(name, *arguments, count=count)
    with torch.inference_mode():
        leave_shortcut(name, *kinds[0], count=5)
    with torch.autocast("cpu"):
        leave_shortcut(name, *kinds[0], count=6)
    assert not launches
    for arguments in kinds:
        made_by(name, *arguments)
    assert len(launches) == 4
    for one, other in zip(launches, kinds, strict=True):
        assert one[0].shape[-1] == other[0].shape[-1]
    with torch.inference_mode():
        assert all(one.is_inference() for one in made_by(name, *kinds[0]))
    assert len(launches) == 5


@pytest.mark.parametrize("name", OPS)
def test_shortcuts_are_few_and_the_latest(launches, name):
    with torch.inference_mode():
        inference = {ndim: serving_arguments(name, *[2] * ndim) for ndim in (1, 2)}
    kinds = []
    for ndim in (1, 2):
        plain = serving_arguments(name, *[2] * ndim)
        parameters = [torch.nn.Parameter(t) for t in plain]
        kinds += itertools.product(*zip(plain, parameters, inference[ndim], strict=True))
    with torch.no_grad():
        for arguments in kinds:
            made_by(name, *arguments)
        assert not launches
        assert len(OPERATORS[name].shortcuts[None]) == MOST_SHORTCUTS < len(kinds)
        for arguments in reversed(kinds):
            made_by(name, *arguments)
    assert len(launches) == MOST_SHORTCUTS


@pytest.mark.parametrize("name", OPS)
def test_outputs_lie_where_the_inputs_do_whatever_the_current_device(launches, monkeypatch, name):
    arguments = serving_arguments(name, 2)
    leave_shortcut(name, *arguments)
    module = importlib.import_module(f"jit_kernels.ops.{name}")
    monkeypatch.setattr(module, "current_device", lambda: 1)
    monkeypatch.setattr(module, "empty_here", lambda *args: pytest.fail("it would lie on the current device"))
    assert all((one == 7).all() and one.device == arguments[0].device for one in made_by(name, *arguments))
    assert len(launches) == 1


@pytest.mark.parametrize("test", [None, lambda *tensors: None, lambda *tensors, **options: None])
@pytest.mark.parametrize("name", OPS)
def test_where_torch_has_no_such_test_of_likeness_there_are_no_shortcuts(launches, name, monkeypatch, test):
    monkeypatch.setattr(torch_op, "_TensorGuards", test)
    arguments = serving_arguments(name, 2)
    for _ in range(2):
        leave_shortcut(name, *arguments, count=0)
    assert not launches


def test_one_tensor_given_twice_leaves_no_shortcut(launches):
    """Torch's test refuses it, so that a shortcut would be left at every call, and never taken."""
    A, _, alpha = serving_arguments("vdn_delta_factors", 2)
    for _ in range(2):
        leave_shortcut("vdn_delta_factors", A, A, alpha, count=0)
    assert not launches


@pytest.mark.parametrize("name", OPS)
def test_a_shortcut_holds_no_tensor(launches, name):
    arguments = serving_arguments(name, 2)
    gone = [weakref.ref(t.untyped_storage()) for t in arguments]
    leave_shortcut(name, *arguments)
    del arguments
    gc.collect()
    assert not any(ref() for ref in gone)


class Subclass(torch.Tensor):
    pass


class Overlooked(BaseTorchDispatchMode):
    """As those of fake tensors and of selective checkpoints."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def traced(name: str, args: tuple) -> tuple[torch.Tensor, ...]:
    return torch.jit.trace(lambda *given: made_by(name, *given), args, check_trace=False)(*args)


def compiled(name: str, args: tuple) -> tuple[torch.Tensor, ...]:
    torch._dynamo.reset()
    return torch.compile(lambda *given: made_by(name, *given), fullgraph=True, backend="eager")(*args)


def inside(context: Callable[[], Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
    def call(name, args):
        with context():
            return made_by(name, *args)

    return call


CAREFUL = {
    "the torch backend": lambda name, args: made_by(name, *args, backend="torch"),
    "the ambient torch backend": inside(lambda: use_backend("torch")),
    "one sample": lambda name, args: made_by(name, *(t[0] for t in args)),
    "three batch dimensions": lambda name, args: made_by(name, *(t[None, None] for t in args)),
    "another dtype": lambda name, args: made_by(name, *(t.double() for t in args)),
    "a subclass": lambda name, args: made_by(name, *args[:-1], args[-1].as_subclass(Subclass)),
    "a sign beside the memory": lambda name, args: made_by(name, torch._neg_view(-args[0]), *args[1:]),
    "a gradient": lambda name, args: made_by(name, *args[:-1], args[-1].clone().requires_grad_()),
    "a dispatch mode": inside(BaseTorchDispatchMode),
    "a dispatch mode that torch's guards overlook": inside(Overlooked),
    "a function mode": inside(BaseTorchFunctionMode),
    "a dual level": inside(forward_ad.dual_level),
    "a transform": lambda name, args: torch.func.functionalize(lambda *given: made_by(name, *given))(*args),
    "a trace": traced,
    "a compiled graph": compiled,
    "what the entry refuses": lambda name, args: made_by(name, *(t.expand(5, *t.shape[1:]) for t in args)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("what", CAREFUL)
@pytest.mark.parametrize("name", OPS)
def test_everything_else_goes_the_careful_way(launches, name, what):
    arguments = serving_arguments(name, 1)
    with use_backend("torch"):
        expected = CAREFUL[what](name, arguments)
    OPERATORS[name].shortcuts.clear()
    leave_shortcut(name, *arguments)
    assert not launches
    for _ in range(2):  # the first leaves no shortcut to a second
        made = CAREFUL[what](name, arguments)
    assert len(launches) == 2 * (what == "what the entry refuses")
    for one, other in zip(made, expected, strict=True):
        assert type(one) is type(other)
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", OPS)
def test_a_shortcut_left_without_gradients_is_not_taken_with_them(launches, name):
    arguments = [torch.nn.Parameter(t) for t in serving_arguments(name, 2)]
    with torch.no_grad():
        leave_shortcut(name, *arguments)
        made_by(name, *arguments)
    assert len(launches) == 1
    assert all(one.requires_grad for one in made_by(name, *arguments))
    assert len(launches) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("name", OPS)
def test_a_nested_tensor_is_refused_beside_a_loaded_kernel(launches, name):
    """Torch's guards would end the process over its strides."""
    arguments = serving_arguments(name, 2)
    leave_shortcut(name, *arguments)
    for i, argument in enumerate(arguments):
        nested = torch.nested.nested_tensor(list(argument))
        with pytest.raises(RuntimeError, match="NestedTensorImpl"):
            made_by(name, *arguments[:i], nested, *arguments[i + 1 :])
    assert not launches


def test_a_call_that_finds_its_shortcut_of_no_use_leaves_no_second(launches):
    arguments = serving_arguments("vdn_delta_factors", 5)
    for _ in range(3):
        leave_shortcut("vdn_delta_factors", *arguments, count=1)
    assert len(launches) == 2  # each refused
    for _ in range(3):
        vdn_delta_factors(*arguments, check_errors=True)
        leave_shortcut("vdn_delta_factors", *arguments, count=1)


def test_each_precision_of_the_factors_has_shortcuts_of_its_own(launches, monkeypatch):
    arguments = serving_arguments("vdn_delta_factors", 6)
    leave_shortcut("vdn_delta_factors", *arguments)
    vdn_delta_factors(*arguments, precision="fp32")
    assert not launches
    other = []
    monkeypatch.setitem(
        OPERATORS["vdn_delta_factors"].launchers, ("run", -1, 64, "fp32"), lambda *args: other.append(args)
    )
    for count in (0, 1, 2):
        vdn_delta_factors(*arguments, precision="fp32")
        assert (len(launches), len(other)) == (0, count)
    vdn_delta_factors(*arguments)
    assert (len(launches), len(other)) == (1, 2)


def test_factors_whose_errors_are_checked_take_no_shortcut(launches):
    arguments = serving_arguments("vdn_delta_factors", 6)
    for _ in range(2):
        vdn_delta_factors(*arguments, check_errors=True)
    assert not launches


@pytest.mark.parametrize("name", OPS)
def test_wrong_input_is_refused_beside_a_loaded_kernel_as_it_is_without_one(launches, name):
    first, *others = serving_arguments(name, 5)
    leave_shortcut(name, first, *others)
    with pytest.raises(ValueError, match=r"must have .* got float32\[5"):
        made_by(name, first, *(other[..., :1] for other in others))
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
        made_by(name, first.tolist(), *others)
    with pytest.raises(ValueError, match="expected one of auto, fused, torch"):
        made_by(name, first, *others, backend="FUSED")
    if name == "vdn_delta_factors":
        with pytest.raises((TypeError, ValueError), match=r"unhashable|precision must be"):
            made_by(name, first, *others, precision=["fp32"])


@pytest.mark.gpu
@pytest.mark.compiler
@pytest.mark.parametrize("batch", [(6,), (2, 3)])
@pytest.mark.parametrize("name", OPS)
def test_serving_calls_take_the_shortcut(shared_cache, monkeypatch, name, batch):
    op = getattr(jit_kernels, name)
    arguments = [argument.cuda() for argument in serving_arguments(name, *batch)]
    careful = OPERATORS[name].run(OPERATORS[name].complete(tuple(arguments)), "fused")
    op(*arguments)
    monkeypatch.setattr(Operator, "__call__", lambda *args, **options: pytest.fail("the careful way was taken"))
    for backend in (None, "auto", "fused"):
        torch.testing.assert_close(op(*arguments, backend=backend), careful, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.compiler
@pytest.mark.parametrize("name", OPS)
def test_the_shortcut_lets_the_entry_see_that_batches_differ(shared_cache, name):
    arguments = [argument.cuda() for argument in serving_arguments(name, 2, 3)]
    getattr(jit_kernels, name)(*arguments)
    wrong = arguments[-1].transpose(0, 1)
    with pytest.raises(ValueError, match=r"must have"):
        getattr(jit_kernels, name)(*arguments[:-1], wrong)


@pytest.mark.gpu
@pytest.mark.compiler
def test_a_batch_that_lies_unevenly_is_served_too(shared_cache):
    residual, pre = collapse_arguments(6)
    wide = torch.zeros(2, 5, 4, 16).bfloat16()
    wide[:, :3] = residual.unflatten(0, (2, 3))
    expected = mhc_pre_h_aggregate(residual, pre).unflatten(0, (2, 3))
    uneven = wide.cuda()[:, :3]
    torch.testing.assert_close(
        mhc_pre_h_aggregate(uneven, pre.cuda().unflatten(0, (2, 3)), backend="fused").cpu(), expected, rtol=0, atol=0
    )
    A, B, alpha = (tensor.cuda() for tensor in factor_arguments(6, d=64))
    alpha = alpha[:2].unsqueeze(1).expand(2, 3, 64)
    found = vdn_delta_factors(A.unflatten(0, (2, 3)), B.unflatten(0, (2, 3)), alpha, backend="fused")
    same = vdn_delta_factors(A, B, alpha.reshape(6, 64), backend="fused")
    for one, other in zip(found, same, strict=True):
        assert torch.equal(one.flatten(0, 1), other)
