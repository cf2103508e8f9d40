"""Which implementation a call runs, and what it says about it."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import threading
import warnings
from pathlib import Path

import pytest
import torch
from arguments import OPS, collapse_arguments, factor_arguments

import jit_kernels
from jit_kernels import (
    Support,
    UnsupportedError,
    explain,
    mhc_pre_h_aggregate,
    use_backend,
    vdn_delta_factors,
)
from jit_kernels.dispatch import OPERATORS, Operator
from jit_kernels.jit import cache
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import CaptureError, CompileError, ToolchainError
from jit_kernels.jit.loader import Kernel, kernel
from jit_kernels.jit.source import CSRC, Source
from jit_kernels.jit.store import JitWarning
from jit_kernels.messages import require_tensors

BACKENDS = ("auto", "fused", "torch")

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
