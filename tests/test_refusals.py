"""Wrong input: the same error in the same words from every way in."""

from __future__ import annotations

import re

import pytest
import torch
from arguments import collapse_arguments, factor_arguments

import jit_kernels
from jit_kernels import (
    explain,
    vdn_delta_factors,
)

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
