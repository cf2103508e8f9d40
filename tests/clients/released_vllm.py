"""vLLM as released, beyond what stands in for it elsewhere: its models, its published shapes, its TileLang kernels.

Run by ``.ci/clients``, where the package is: pytest does not collect this file by itself.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest
import torch

import jit_kernels
from jit_kernels.checks.compare import same_bytes
from jit_kernels.integrations import vllm
from jit_kernels.integrations.vllm import KERNELS, OP

# Of vLLM's tests of its collapse: tokens, streams, hidden_size.
PUBLISHED = [(0, 4, 5120), (33, 4, 5137), (2, 1, 513), (7, 8, 5137), (65537, 4, 65)]
HOLDERS = ("nvidia.model", "nvidia.dspark", "nvidia.specialized_decode.runtime.decode")


@pytest.fixture
def triton():
    yield importlib.import_module(f"{KERNELS}.triton")
    vllm.uninstall()


@pytest.mark.parametrize(("tokens", "streams", "hidden"), PUBLISHED)
def test_its_published_shapes(triton, monkeypatch, generator, tokens, streams, hidden):
    """Strided streams and column-major weights, as there. Other stream counts than four stay vLLM's."""
    theirs = []
    monkeypatch.setattr(triton, OP, lambda x, pre_mix: theirs.append(x.shape) or x[:, 0])
    vllm.install()
    x = torch.randn(tokens, streams, 2 * hidden, generator=generator).to(torch.bfloat16)[..., ::2]
    pre = torch.rand(streams, tokens, generator=generator).t()
    found = [triton.hc_collapse_triton(x, pre), torch.ops.vllm.hc_collapse_triton(x, pre)]
    if streams == 4:
        assert same_bytes(found, [jit_kernels.mhc_pre_h_aggregate(x, pre)] * 2)
        assert not theirs
    else:
        assert theirs == [x.shape] * 2
    vllm.uninstall()


def test_every_model_of_v41_holds_ours_and_then_its_own_again(triton):
    own = triton.hc_collapse_triton
    models = [importlib.import_module(f"vllm.models.deepseek_v41.{name}") for name in HOLDERS]
    vllm.install()
    assert triton.hc_collapse_triton is not own
    for module in models:
        assert module.hc_collapse_triton is triton.hc_collapse_triton
    vllm.uninstall()
    for module in models:
        assert module.hc_collapse_triton is own


def test_the_layer_of_v4_goes_through_the_reference_path(triton, generator):
    """``MHCPreOp.forward_native`` finds the function through the package, not by a name of its own."""
    layer = importlib.import_module("vllm.model_executor.layers.mhc").MHCPreOp
    residual = torch.randn(7, 4, 64, generator=generator).to(torch.bfloat16)
    fn = torch.randn(24, 256, generator=generator) / 16
    args = (
        residual,
        fn,
        torch.rand(3, generator=generator),
        torch.randn(24, generator=generator),
        1e-6,
        1e-3,
        1e-3,
        2.0,
        3,
    )
    pre = importlib.import_module(f"{KERNELS}.torch").mhc_pre_delayed_torch(*args)[3]
    vllm.install()
    found = layer.forward_native(None, *args)[2]
    assert same_bytes([found], [jit_kernels.mhc_pre_h_aggregate(residual, pre)])


def test_the_split_calls_its_kernels_as_they_are_declared(triton, monkeypatch, generator):
    """Without a GPU TileLang compiles nothing: what is tried is that each argument arrives under its own name."""
    kernels, warmup = (importlib.import_module(f"{KERNELS}.{name}") for name in ("tilelang_kernels", "warmup"))
    own = kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL
    gates = type(warmup.MHC_PRE_NORM_KERNEL)
    declared = inspect.signature(gates.kernel.func if hasattr(gates.kernel, "func") else gates.kernel)
    assert [*declared.parameters][:12] == [
        "gemm_out_mul",
        "gemm_out_sqrsum",
        "hc_scale",
        "hc_base",
        "residual",
        "post_mix",
        "comb_mix",
        "layer_input",
        "norm_weight",
        "pre_mix_in",
        "pre_mix_out",
        "aux_out",
    ]
    tokens, streams, hidden, splits = 5, 4, 64, 3
    residual = torch.randn(tokens, streams, hidden, generator=generator).to(torch.bfloat16)
    weights = torch.rand(tokens, streams, generator=generator)
    calls = []

    def gates_kernel(*tensors, **fields):
        calls.append(declared.bind(*tensors, **fields).arguments)
        calls[-1]["pre_mix_out"].copy_(weights)

    def norm(out, x, weight, epsilon):
        calls.append(epsilon)
        out.copy_(x)

    monkeypatch.setattr(gates, "kernel", staticmethod(gates_kernel))
    monkeypatch.setattr(importlib.import_module("vllm._custom_ops"), "rms_norm", norm)
    vllm.install(split=True)
    split = kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL
    assert split.register_warmup == own.register_warmup
    layer_input = torch.full((tokens, hidden), torch.nan, dtype=torch.bfloat16)
    arguments = inspect.signature(type(own).__call__).bind(
        own,
        torch.rand(splits, tokens, 24),
        torch.rand(splits, tokens),
        torch.rand(3),
        torch.rand(24),
        residual,
        torch.empty(tokens, streams),
        torch.empty(tokens, streams * streams),
        layer_input,
        rms_eps=1e-6,
        hc_pre_eps=1e-3,
        hc_sinkhorn_eps=1e-4,
        hc_post_mult_value=2.0,
        sinkhorn_repeat=3,
        norm_weight=torch.ones(hidden, dtype=torch.bfloat16),
        norm_eps=1e-5,
    )
    split(*arguments.args[1:], **arguments.kwargs)
    given, epsilon = calls
    fields = {field.name for field in dataclasses.fields(gates.CompileKey)}
    assert {name for name in given if name in fields} == fields
    assert given["split_mode"] == "stats"
    assert given["save_pre_mix"] is True
    assert given["use_pre_mix_in"] is False
    assert (given["n_splits"], given["hc_mult"], given["hidden_size"]) == (splits, streams, hidden)
    assert given["rms_numel"] == streams * hidden
    assert (given["rms_eps"], given["hc_pre_eps"], given["hc_sinkhorn_eps"]) == (1e-6, 1e-3, 1e-4)
    assert (given["hc_post_mult_value"], given["sinkhorn_repeat"], given["norm_eps"]) == (2.0, 3, 1e-5)
    assert given["residual"] is residual
    assert given["layer_input"] is layer_input
    assert epsilon == 1e-5
    assert same_bytes([layer_input], [jit_kernels.mhc_pre_h_aggregate(residual, weights)])
    vllm.uninstall()
    assert kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL is own


def test_the_split_waits_for_the_worker(run_python):
    """In a process that loads plug-ins as vLLM's do: the kernels' module is not imported, for that asks for the GPU."""
    code = """
import sys, importlib
from vllm.plugins import load_general_plugins
load_general_plugins()
name = "vllm.model_executor.kernels.mhc.tilelang_kernels"
print(name in sys.modules, type(importlib.import_module(name)._MHC_PRE_BIG_FUSE_TILELANG_KERNEL).__name__)
"""
    said = run_python(code, env={"JIT_KERNELS_INTEGRATIONS": "vllm", "JIT_KERNELS_VLLM_SPLIT": "on"})
    assert said.splitlines()[-1] == "False SplitKernel"


def test_v4_asks_for_its_fused_kernel_at_each_call(triton):
    """The split stands on that: a function that had kept the kernel would not see ours."""
    source = inspect.getsource(importlib.import_module(f"{KERNELS}.tilelang"))
    tree = source.split("\ndef ")
    users = [part.partition("(")[0] for part in tree if "_MHC_PRE_BIG_FUSE_TILELANG_KERNEL(" in part]
    assert users == ["mhc_pre_tilelang", "mhc_pre_broadcast_tilelang", "mhc_fused_post_pre_tilelang"]
    for part in tree:
        if "_MHC_PRE_BIG_FUSE_TILELANG_KERNEL(" in part:
            assert "from vllm.model_executor.kernels.mhc.tilelang_kernels import" in part
