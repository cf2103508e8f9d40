"""SGLang's own vdn_delta_factors.cuh, as its package has it, through our load_jit."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from jit_kernels.bench.vdn_delta_factors import gold, reference

from jit_kernels import load_jit
from jit_kernels.checks.compare import relative_error


@pytest.fixture(scope="module")
def folder() -> Path:
    """``kernels/jit`` of an unpacked or installed sglang package."""
    named = os.environ.get("SGLANG_KERNELS_JIT")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed, and SGLANG_KERNELS_JIT names no unpacked copy of its kernels/jit")
    return Path(next(iter(spec.submodule_search_locations))) / "kernels" / "jit"


@pytest.mark.compiler
def test_compiles_unmodified_and_runs(folder, target, generator):
    module = load_jit(
        "sglang_vdn_delta_factors",
        cuda_files=[folder / "csrc" / "diffusion" / "vdn_delta_factors.cuh"],
        cuda_wrappers=[("vdn_delta_factors", "sglang::vdn_delta_factors::VdnDeltaFactorsKernel::run")],
        extra_include_paths=[folder / "include"],
        target=target,
    )
    inputs = reference(generator, 5)
    if not torch.cuda.is_available():
        # Their own check of the device answers: the function is there and can be called.
        with pytest.raises(Exception, match=r"(?i)device"):
            module.vdn_delta_factors(torch.empty_like(inputs[0]), torch.empty_like(inputs[1]), *inputs)
        return
    on = [tensor.cuda() for tensor in inputs]
    out = torch.empty_like(on[0]), torch.empty_like(on[1])
    module.vdn_delta_factors(*out, *on)
    for theirs, right in zip(out, gold(*(tensor.double() for tensor in inputs)), strict=True):
        assert relative_error(theirs.cpu(), right) < 1e-5  # their own limit for T
