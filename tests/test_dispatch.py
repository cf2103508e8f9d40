"""Which implementation a call runs, what it says about it, and what it refuses."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import math
import re
import subprocess
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

import jit_kernels
from jit_kernels import (
    Support,
    UnsupportedError,
    explain,
    mhc_pre_h_aggregate,
    torch_op,
    use_backend,
    vdn_delta_factors,
)
from jit_kernels.dispatch import MOST_SHORTCUTS, OPERATORS, Operator
from jit_kernels.jit import cache
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import CaptureError, CompileError, ToolchainError
from jit_kernels.jit.loader import Kernel, kernel
from jit_kernels.jit.source import CSRC, PACKAGE, Source
from jit_kernels.jit.store import JitWarning
from jit_kernels.messages import require_tensors

BACKENDS = ("auto", "fused", "torch")
OPS = sorted(path.stem for path in (PACKAGE / "ops").glob("*.py") if path.stem != "__init__")


def collapse_arguments(tokens: int = 3, hidden: int = 16, dtype=torch.bfloat16):
    return torch.randn(tokens, 4, hidden).to(dtype), torch.rand(tokens, 4)


def factor_arguments(count: int = 2, d: int = 8, dtype=torch.float32):
    root = torch.randn(count, d, d, dtype=dtype)
    return root @ root.mT / d, torch.randn(count, d, d, dtype=dtype), torch.rand(count, d, dtype=dtype)


# The choice


@pytest.mark.parametrize("op", [mhc_pre_h_aggregate, vdn_delta_factors])
def test_the_argument_chooses_the_backend(op):
    arguments = collapse_arguments() if op is mhc_pre_h_aggregate else factor_arguments()
    expected = op(*arguments, backend="torch")
    torch.testing.assert_close(op(*arguments, backend="auto"), expected, rtol=0, atol=0)
    torch.testing.assert_close(op(*arguments, backend=None), expected, rtol=0, atol=0)
    torch.testing.assert_close(op(*arguments), expected, rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match=r"'fused' was asked for, but (head_dim 8|the tensors are on cpu)"):
        op(*arguments, backend="fused")


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_context_manager_sets_what_calls_do_not_say(requires_grad):
    residual, pre = collapse_arguments()
    pre.requires_grad_(requires_grad)
    assert jit_kernels.backend() == "auto"
    with use_backend("fused"):
        assert jit_kernels.backend() == "fused"
        with pytest.raises(UnsupportedError):
            mhc_pre_h_aggregate(residual, pre)
        mhc_pre_h_aggregate(residual, pre, backend="torch")
        with use_backend("torch"):
            mhc_pre_h_aggregate(residual, pre)
        assert jit_kernels.backend() == "fused"
    assert jit_kernels.backend() == "auto"


def test_the_context_manager_ends_with_an_exception_and_stays_in_its_thread():
    seen = []

    def fail():
        with use_backend("torch"):
            thread = threading.Thread(target=lambda: seen.append(jit_kernels.backend()))
            thread.start()
            thread.join()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == ["auto"]
    assert jit_kernels.backend() == "auto"


@pytest.mark.parametrize("name", ["cuda", "", "FUSED", "Auto "])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_bad_backend_is_an_error_that_lists_the_good_ones(name, requires_grad):
    residual, pre = collapse_arguments()
    pre.requires_grad_(requires_grad)
    words = re.escape(f"backend {name!r}: expected one of auto, fused, torch")
    with pytest.raises(ValueError, match=words):
        mhc_pre_h_aggregate(residual, pre, backend=name)
    with pytest.raises(ValueError, match=words):
        explain(mhc_pre_h_aggregate, residual, pre, backend=name)
    with pytest.raises(ValueError, match=words), use_backend(name):
        pass
    with pytest.raises(ValueError, match=words):
        torch.ops.jit_kernels.mhc_pre_h_aggregate(residual, pre, backend=name)
    assert jit_kernels.backend() == "auto"


@pytest.mark.parametrize("value", ["torch", "FUSED", ""])
def test_the_variable_sets_the_backend_of_the_process(run_python, value):
    code = """
import torch, jit_kernels
print(jit_kernels.backend())
try:
    jit_kernels.mhc_pre_h_aggregate(torch.ones(1, 4, 2).bfloat16(), torch.ones(1, 4))
    print("ran")
except jit_kernels.UnsupportedError as error:
    print("refused")
"""
    expected = {"torch": ["torch", "ran"], "FUSED": ["fused", "refused"], "": ["auto", "ran"]}[value]
    assert run_python(code, env={"JIT_KERNELS_BACKEND": value}).split() == expected


def test_a_bad_variable_is_an_error_that_lists_the_good_ones(start_python):
    _, err = start_python("import jit_kernels", env={"JIT_KERNELS_BACKEND": "gpu"}).communicate(timeout=60)
    assert "ValueError: JIT_KERNELS_BACKEND='gpu': expected one of auto, fused, torch" in err


@pytest.mark.gpu
@pytest.mark.compiler
def test_a_gpu_runs_the_fused_kernel(shared_cache):
    residual, pre = (tensor.cuda() for tensor in collapse_arguments(hidden=4096))
    found = explain(mhc_pre_h_aggregate, residual, pre)
    assert found.runs == "fused"
    mhc_pre_h_aggregate(residual, pre, backend="fused")


# explain


@pytest.mark.parametrize(
    ("op", "arguments", "options", "reason"),
    [
        (mhc_pre_h_aggregate, collapse_arguments(), {}, "the tensors are on cpu: the fused kernel runs on CUDA"),
        (mhc_pre_h_aggregate, collapse_arguments(dtype=torch.float16), {}, "float16: the fused kernel covers"),
        ("mhc_pre_h_aggregate", collapse_arguments(), {}, "on cpu"),
        (vdn_delta_factors, factor_arguments(d=96), {}, "head_dim 96: the fused kernel covers 64 and 128"),
        (vdn_delta_factors, factor_arguments(d=64), {"a_scale": 0.5, "precision": "fp32"}, "on cpu"),
        (vdn_delta_factors, factor_arguments(d=64, dtype=torch.float64), {}, "float64: the fused kernel covers"),
    ],
)
def test_explain_says_what_would_run_and_why(capsys, op, arguments, options, reason):
    for backend, runs in (("auto", "torch"), ("fused", "error"), (None, "torch")):
        found = explain(op, *arguments, backend=backend, **options)
        assert (found.runs, found.backend) == (runs, backend or "auto")
        assert reason in found.reason
        assert capsys.readouterr().out.strip() == str(found)
        assert found.operator in str(found)
        assert reason in str(found)
    assert "torch backend was asked for" in explain(op, *arguments, backend="torch", **options).reason
    with use_backend("fused"):
        assert explain(op, *arguments, **options).runs == "error"


def test_explain_refuses_what_the_op_refuses():
    residual, pre = collapse_arguments()
    with pytest.raises(ValueError, match="pre must have residual's shape"):
        explain(mhc_pre_h_aggregate, residual, pre[:1])
    with pytest.raises(TypeError, match=r"pre must be a torch\.Tensor; got NoneType|missing"):
        explain(mhc_pre_h_aggregate, residual)
    with pytest.raises(TypeError, match="nonsense"):
        explain(mhc_pre_h_aggregate, residual, pre, nonsense=1)
    with pytest.raises(ValueError, match=r"'softmax' is no operator: expected one of .*mhc_pre_h_aggregate"):
        explain("softmax", residual)
    with pytest.raises(ValueError, match="is no operator"):
        explain(torch.add, residual, residual)


# Wrong input: the same error in the same words from every way in

SPD, FACTOR, ALPHA = factor_arguments()
RESIDUAL, PRE = collapse_arguments()

WRONG_COLLAPSES = {
    "residual no tensor": (([[1.0]], PRE), TypeError, r"residual must be a torch.Tensor; got list: \[\[1\.0\]\]"),
    "pre no tensor": ((RESIDUAL, 1.0), TypeError, "pre must be a torch.Tensor; got float: 1.0"),
    "pre none": ((RESIDUAL, None), TypeError, "pre must be a torch.Tensor; got NoneType"),
    "integer residual": ((RESIDUAL.int(), PRE), TypeError, r"residual must be .*; got int32\[3, 4, 16\] on cpu"),
    "bfloat16 pre": ((RESIDUAL, PRE.bfloat16()), TypeError, r"pre must be float32 .*; got bfloat16\[3, 4\] on cpu"),
    "float64 pre": ((RESIDUAL, PRE.double()), TypeError, r"got float64\[3, 4\] on cpu beside bfloat16"),
    "float32 pre of float64": ((RESIDUAL.double(), PRE), TypeError, r"got float32\[3, 4\] on cpu beside float64"),
    "three streams": ((RESIDUAL[:, :3], PRE[:, :3]), ValueError, r"4, hidden_size\]; got bfloat16\[3, 3, 16\]"),
    "eight streams": ((torch.cat([RESIDUAL] * 2, 1), torch.cat([PRE] * 2, 1)), ValueError, r"got bfloat16\[3, 8, 16\]"),
    "one dimension": ((RESIDUAL[0, 0], PRE[0]), ValueError, r"got bfloat16\[16\]"),
    "no hidden": ((RESIDUAL[..., :0], PRE), ValueError, r"hidden_size must be at least 1; got bfloat16\[3, 4, 0\]"),
    "other tokens": ((RESIDUAL, PRE[:2]), ValueError, r"pre must have .* \[3, 4\]; got float32\[2, 4\]"),
    "broadcast pre": ((RESIDUAL, PRE[:1]), ValueError, r"got float32\[1, 4\]"),
    "pre with hidden": ((RESIDUAL, PRE[..., None]), ValueError, r"got float32\[3, 4, 1\]"),
    "two devices": ((RESIDUAL, PRE.to("meta")), ValueError, r"on one device; got bfloat16.* on cpu and .* on meta"),
    "sparse residual": ((RESIDUAL.float().to_sparse(), PRE), TypeError, "residual must be a dense tensor; got layout"),
    "sparse pre": ((RESIDUAL, PRE.to_sparse()), TypeError, "pre must be a dense tensor; got layout"),
}
WRONG_FACTORS = {
    "A no tensor": ((None, FACTOR, ALPHA), TypeError, "A must be a torch.Tensor; got NoneType"),
    "alpha no tensor": ((SPD, FACTOR, 0.5), TypeError, "alpha must be a torch.Tensor; got float: 0.5"),
    "bfloat16": ((SPD.bfloat16(), FACTOR.bfloat16(), ALPHA.bfloat16()), TypeError, r"got bfloat16\[2, 8, 8\]"),
    "integers": ((SPD.int(), FACTOR.int(), ALPHA.int()), TypeError, r"got int32\[2, 8, 8\]"),
    "B of another dtype": ((SPD, FACTOR.double(), ALPHA), TypeError, "one dtype; got float32.*, float64.*, float32"),
    "alpha of another dtype": ((SPD, FACTOR, ALPHA.half()), TypeError, r"one dtype; got .*, float16\[2, 8\]"),
    "not square": ((SPD[..., :7], FACTOR[..., :7], ALPHA), ValueError, r"\[\.\.\., d, d\]; got float32\[2, 8, 7\]"),
    "one dimension": ((ALPHA[0], ALPHA[0], ALPHA[0]), ValueError, r"got float32\[8\]"),
    "no head": ((SPD[:, :0, :0], FACTOR[:, :0, :0], ALPHA[:, :0]), ValueError, r"got float32\[2, 0, 0\]"),
    "other batch of B": ((SPD, FACTOR[:1], ALPHA), ValueError, r"B must .*\[2, 8, 8\]; got float32\[1, 8, 8\]"),
    "other alpha": ((SPD, FACTOR, ALPHA[:, :7]), ValueError, r"alpha .*\[2, 8\]; got float32\[2, 7\]"),
    "scalar alpha": ((SPD, FACTOR, ALPHA[:, 0]), ValueError, r"alpha .*got float32\[2\]"),
    "two devices": ((SPD, FACTOR.to("meta"), ALPHA), ValueError, "on one device; got .*cpu, .*meta, .*cpu"),
    "precision": ((SPD, FACTOR, ALPHA, 1.0, 1.0, False, "tf32"), ValueError, "one of fp64_tensor, fp32; got 'tf32'"),
    "sparse B": ((SPD, FACTOR.to_sparse(), ALPHA), TypeError, "B must be a dense tensor; got layout"),
}
WRONG = [
    pytest.param(name, *case, id=f"{name}-{what}")
    for name, cases in (("mhc_pre_h_aggregate", WRONG_COLLAPSES), ("vdn_delta_factors", WRONG_FACTORS))
    for what, case in cases.items()
]


def refusal(call, *args, **options) -> tuple[type, str]:
    with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError)) as raised:
        call(*args, **options)
    return raised.type, str(raised.value)


@pytest.mark.parametrize(("name", "args", "kind", "words"), WRONG)
def test_wrong_input_is_refused_alike_by_every_backend(name, args, kind, words):
    op = getattr(jit_kernels, name)
    options = {}
    if len(args) > 3:
        args, options = args[:3], dict(zip(("a_scale", "b_scale", "check_errors", "precision"), args[3:], strict=True))
    expected = refusal(op, *args, backend="torch", **options)
    assert expected[0] is kind
    assert re.search(words, expected[1])
    assert refusal(op, *args, backend="auto", **options) == expected
    assert refusal(op, *args, backend="fused", **options) == expected
    assert refusal(explain, op, *args, **options) == expected
    for grad in (False, True):
        given = tuple(
            arg.detach().requires_grad_()
            if grad and isinstance(arg, torch.Tensor) and arg.is_floating_point() and not arg.is_meta
            else arg
            for arg in args
        )
        assert refusal(op, *given, **options) == expected
        if all(isinstance(arg, torch.Tensor) for arg in args):
            assert refusal(getattr(torch.ops.jit_kernels, name), *given, **options) == expected


@pytest.mark.gpu
@pytest.mark.compiler
@pytest.mark.parametrize(("name", "args", "kind", "words"), WRONG)
def test_a_loaded_kernel_refuses_in_the_same_words(shared_cache, name, args, kind, words):
    op = getattr(jit_kernels, name)
    right = collapse_arguments() if name == "mhc_pre_h_aggregate" else factor_arguments(d=64)
    op(*(argument.cuda() for argument in right), backend="fused")
    on_gpu = [arg.cuda() if isinstance(arg, torch.Tensor) and not arg.is_meta else arg for arg in args]
    options = dict(zip(("a_scale", "b_scale", "check_errors", "precision"), on_gpu[3:], strict=False))
    expected = refusal(op, *on_gpu[:3], backend="torch", **options)
    assert expected[0] is kind
    assert refusal(op, *on_gpu[:3], **options) == expected
    assert refusal(op, *on_gpu[:3], backend="fused", **options) == expected


OUT = torch.empty(2, 8, 8)
WRONG_OUTPUTS = {
    "shape": ((OUT[:1], OUT.clone()), ValueError, r"out T must be like A, .*; got float32\[1, 8, 8\]"),
    "dtype": ((OUT.double(), OUT.clone()), ValueError, r"out T must be like A, .*; got float64"),
    "device": ((OUT, OUT.to("meta")), ValueError, "out J must be like A, .*; got .* on meta"),
    "no tensor": ((OUT, None), TypeError, "J must be a torch.Tensor; got NoneType"),
    "transposed": ((OUT.mT, OUT.clone()), ValueError, r"out T must have contiguous matrices.*strides \(64, 1, 8\)"),
    "expanded": ((OUT[:1].expand(2, 8, 8), OUT.clone()), ValueError, r"out T must have .*strides \(0,"),
    "one for both": ((OUT, OUT), ValueError, "out T overlaps J in memory"),
    "an input": ((OUT, FACTOR), ValueError, "out J overlaps B in memory"),
    "part of an input": ((SPD.view(-1)[:].view(2, 8, 8), OUT), ValueError, "out T overlaps A in memory"),
}


@pytest.mark.parametrize("what", WRONG_OUTPUTS)
def test_outputs_that_cannot_be_written_are_refused(what):
    out, kind, words = WRONG_OUTPUTS[what]
    before = [tensor.clone() for tensor in (SPD, FACTOR, ALPHA)]
    for backend in ("auto", "torch"):
        with pytest.raises(kind, match=words):
            vdn_delta_factors(SPD, FACTOR, ALPHA, out=out, backend=backend)
    for tensor, kept in zip((SPD, FACTOR, ALPHA), before, strict=True):
        assert torch.equal(tensor, kept)


# A compiler that isn't there, an operator that isn't there yet

_numbers = itertools.count()


@pytest.fixture
def make_toy():
    """Registers an operator ``x → 2x``; what is given replaces its parts."""
    made = []

    def make(**parts) -> Operator:
        toy = Operator(
            **{
                "name": f"toy_{next(_numbers)}",
                "schema": "(Tensor x) -> Tensor",
                "validate": lambda x: require_tensors(x=x),
                "supports": lambda x: Support(True, "toys run everywhere"),
                "outputs": torch.empty_like,
                "build": lambda target: pytest.fail("nobody asked for a build"),
                "fused": lambda x: x + x,
                "fallback": lambda x: 2 * x,
                **parts,
            }
        )
        made.append(toy)
        return toy

    yield make
    for toy in made:
        OPERATORS.pop(toy.name, None)


def raising(error: Exception):
    def fused(x):
        raise error

    return fused


# Shortcuts: an eager call that nobody watches leaves one for its like, once its kernel is loaded


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


def test_a_schema_must_name_the_tensors_first(make_toy):
    with pytest.raises(ValueError, match=r"must name the tensors first; got \(float f, Tensor x\)"):
        make_toy(schema="(float f, Tensor x) -> Tensor")


def test_without_a_compiler_auto_falls_back_with_one_warning(make_toy):
    toy = make_toy(fused=raising(ToolchainError("no usable CUDA compiler was found", "pip install jit-kernels[nvcc]")))
    x = torch.ones(3)
    with pytest.warns(JitWarning) as seen:
        results = [toy(x) for _ in range(3)]
    assert all(torch.equal(result, 2 * x) for result in results)
    assert len(seen) == 1
    text = str(seen[0].message)
    for words in (toy.name, "fallback", "no usable CUDA compiler was found", "pip install jit-kernels[nvcc]"):
        assert words in text
    with pytest.raises(ToolchainError, match="no usable CUDA compiler"):
        toy(x, backend="fused")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(toy(x), 2 * x)
        assert torch.equal(toy(x, backend="torch"), 2 * x)


def test_another_fault_warns_again(make_toy):
    x = torch.ones(3)
    for error in (CompileError("syntax", "mend it"), ToolchainError("none", "install one")):
        toy = make_toy(fused=raising(error))
        with pytest.warns(JitWarning, match=error.cure):
            toy(x)


def test_auto_hides_nothing_but_jit_errors(make_toy):
    for error in (CaptureError("not loaded", "call it once before"), RuntimeError("illegal access"), MemoryError()):
        toy = make_toy(fused=raising(error))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(type(error)):
                toy(torch.ones(3))


def test_what_the_kernel_does_not_cover_never_reaches_it(make_toy):
    toy = make_toy(fused=raising(AssertionError("reached")), supports=lambda x: Support(False, "x is too long: 9 of 8"))
    assert torch.equal(toy(torch.ones(9)), torch.full((9,), 2.0))
    with pytest.raises(UnsupportedError, match=r"toy_\d+: backend 'fused' was asked for, but x is too long: 9 of 8"):
        toy(torch.ones(9), backend="fused")


def test_support_is_as_true_as_its_ok():
    assert Support(True)
    assert not Support(False, "why")


@pytest.fixture
def everywhere(monkeypatch):
    """Lets a module stand for a kernel on any machine: the CPU gets an arch target too."""
    monkeypatch.setattr(Target, "of", classmethod(lambda cls, device: cls.parse("sm_90a")))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.compiler
def test_under_auto_a_build_that_failed_is_not_tried_at_every_call(
    make_toy, everywhere, isolated_cache, tmp_path, answer_source, monkeypatch
):
    path = answer_source(tmp_path, head="int broken( { }\n")
    tried = []
    load = cache.load
    monkeypatch.setattr(cache, "load", lambda *arguments: tried.append(arguments) or load(*arguments))

    def build(target) -> Kernel:
        return kernel("broken_toy", cpp_files=[path], header_only=False, target=target)

    toy = make_toy(build=build, fused=lambda x: toy.launcher("answer", x.device)(x))
    with pytest.warns(JitWarning, match="expected") as seen:
        assert [len(toy(torch.ones(2))) for _ in range(3)] == [2, 2, 2]
    assert len(tried) == len(seen) == 1


def test_a_kernel_that_is_not_loaded_is_an_error_inside_a_capture(
    make_toy, everywhere, monkeypatch, answer_source, tmp_path
):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    never = Source(("never",), cpp_files=(answer_source(tmp_path),), header_only=False)
    toy = make_toy(build=lambda target: Kernel(never, target), fused=lambda x: toy.launcher("answer", x.device)(x))
    with pytest.raises(CaptureError, match=r"toy_\d+: its kernel is not loaded yet[\s\S]*cure: call the op once"):
        toy(torch.ones(2))


def test_a_capture_after_a_warm_up_that_fell_back_falls_back_too(make_toy, everywhere, monkeypatch):
    """The warning has been given, and another warm-up would change nothing."""

    def build(target) -> Kernel:
        raise ToolchainError("no usable CUDA compiler was found", "install one")

    toy = make_toy(build=build, fused=lambda x: toy.launcher("answer", x.device)(x))
    with pytest.warns(JitWarning, match="install one"):
        toy(torch.ones(2))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(toy(torch.ones(2)), torch.full((2,), 2.0))


TOY = '''
"""A toy operator: twice x."""

from pathlib import Path

import torch
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

from jit_kernels.dispatch import Operator, Support
from jit_kernels.jit.loader import kernel
from jit_kernels.messages import require_tensors


def validate(x):
    require_tensors(x=x)
    if x.dtype != torch.float32:
        raise TypeError(f"x must be float32; got {x.dtype}")


def supports(x):
    return Support(x.is_contiguous(), "x must be contiguous")


def build(target):
    source = Path(__file__).parent / "toy_twice.h"
    return kernel("toy_twice", cpp_files=[source], cpp_wrappers=[("run", "toy::twice")], target=target)


def fused(x):
    out = torch.empty_like(x)
    OPERATOR.launcher("run", x.device)(out, x)
    return out


OPERATOR = Operator(
    name="toy_twice",
    schema="(Tensor x) -> Tensor",
    validate=validate,
    supports=supports,
    outputs=torch.empty_like,
    build=build,
    fused=fused,
    fallback=lambda x: 2 * x,
    gradient=lambda ctx, grad: (OPERATOR(grad.contiguous()),),
    warmup=({},),
)


def toy_twice(x, *, backend=None):
    return OPERATOR(x, backend=backend)
'''
TOY_SOURCE = """
namespace toy {
void twice(tvm::ffi::TensorView out, tvm::ffi::TensorView x) {
  const float* from = static_cast<const float*>(x.data_ptr());
  float* to = static_cast<float*>(out.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] + from[i];
}
}
"""


@pytest.mark.compiler
def test_a_third_operator_is_one_record(everywhere, shared_cache, tmp_path, capsys):
    (tmp_path / "toy_twice.py").write_text(TOY)
    (tmp_path / "toy_twice.h").write_text(TOY_SOURCE)
    spec = importlib.util.spec_from_file_location("toy_twice", tmp_path / "toy_twice.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        x = torch.randn(5, 3)
        assert torch.equal(module.toy_twice(x, backend="fused"), 2 * x)
        assert torch.equal(module.toy_twice(x.mT), 2 * x.mT)
        with pytest.raises(UnsupportedError, match="x must be contiguous"):
            module.toy_twice(x.mT, backend="fused")
        with pytest.raises(TypeError, match=r"x must be float32; got torch\.float64"):
            module.toy_twice(x.double())
        found = explain(module.toy_twice, x)
        assert found.runs == "fused"
        assert "toy_twice (backend auto): fused" in capsys.readouterr().out
        torch.library.opcheck(torch.ops.jit_kernels.toy_twice.default, (x.requires_grad_(),))
        (gradient,) = torch.autograd.grad(module.toy_twice(x, backend="fused").sum(), x)
        assert torch.equal(gradient, torch.full_like(x, 2))
        compiled = torch.compile(module.toy_twice, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), 2 * x)
    finally:
        OPERATORS.pop("toy_twice", None)


# One operator, one name, the same in every folder


@pytest.mark.parametrize("name", OPS)
def test_an_operator_has_one_name_in_every_folder(name):
    assert name in jit_kernels.__all__
    assert callable(getattr(jit_kernels, name))
    assert OPERATORS[name].name == name
    assert hasattr(torch.ops.jit_kernels, name)
    assert importlib.util.find_spec(f"jit_kernels.fallbacks.{name}")
    assert (CSRC / f"{name}.cuh").is_file()
    assert importlib.util.find_spec(f"jit_kernels.bench.{name}")
    assert (Path(__file__).parent / f"test_{name}.py").is_file()


def test_the_registry_holds_the_operators_files_and_nothing_else():
    assert sorted(OPERATORS) == OPS


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", OPS)
def test_a_build_takes_no_tensors_and_does_nothing(name, arch, monkeypatch):
    def nothing(*args, **options):
        pytest.fail(f"a process was started: {args}")

    monkeypatch.setattr(subprocess, "Popen", nothing)
    operator = OPERATORS[name]
    assert operator.warmup
    for parameters in operator.warmup:
        made = operator.build(Target.parse(arch), **parameters)
        assert isinstance(made, Kernel)
        assert str(made.target) == arch
        assert made.source.cuda_files == (CSRC / f"{name}.cuh",)


@pytest.mark.parametrize("name", OPS)
def test_an_operator_documents_itself(name):
    text = getattr(jit_kernels, name).__doc__
    for words in ("Args:", "Returns:", "Raises:", "Source:", "backend:"):
        assert words in text
