"""What the compilers made of the kernels, read back from the libraries: no GPU is needed for that."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from jit_kernels.bench.cost.machine_code import disassemble

from jit_kernels.dispatch import OPERATORS
from jit_kernels.jit.arch import Target
from jit_kernels.jit.loader import Kernel

TARGETS = ("sm_90a", "sm_100a")
BUILDS = [
    *(("mhc_pre_h_aggregate", (), target) for target in TARGETS),
    *(
        ("vdn_delta_factors", (head_dim, precision), target)
        for head_dim in (128, 64)
        for precision in ("fp64_tensor", "fp32")
        for target in TARGETS
    ),
]

# Tensor cores of every kind but fp64, through Blackwell's names for them.
LOW_PRECISION = re.compile(r"\b(HMMA|HGMMA|QMMA|QGMMA|OMMA|IMMA|IGMMA|BMMA|UTC\w*MMA)\b")
ATOMICS = re.compile(r"\b(ATOM|ATOMS|ATOMG|RED|REDG|REDAS|SUATOM|SURED)\b")


def instructions(sass: str) -> set[str]:
    """The opcodes in a listing, without their modifiers."""
    return set(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", sass, re.M))


@pytest.fixture(scope="module")
def entries(shared_cache):
    """All builds, two at a time; those that TEST_PREBUILT_KERNELS names a folder of are taken from there."""
    prebuilt = os.environ.get("TEST_PREBUILT_KERNELS", "")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("JIT_KERNELS_PREBUILT_DIR", prebuilt)
        kernels = [OPERATORS[name].build(Target.parse(target), *parameters) for name, parameters, target in BUILDS]
        return dict(zip(BUILDS, pool.map(Kernel.compile, kernels), strict=True))


@pytest.fixture(scope="module", params=BUILDS, ids=lambda build: "-".join([build[0], *map(str, build[1]), build[2]]))
def build(request, entries):
    name, parameters, target = request.param
    entry = entries[request.param]
    meta = entry.meta
    return name, parameters, target, meta, instructions(disassemble(entry.folder / meta["library"]))


def test_listing_is_read(build):
    *_, found = build
    assert {"EXIT", "S2R"} <= found or {"EXIT", "S2UR"} <= found


def test_no_low_precision_tensor_cores(build):
    *_, found = build
    assert not [opcode for opcode in found if LOW_PRECISION.match(opcode)]


def test_no_atomics(build):
    *_, found = build
    assert not [opcode for opcode in found if ATOMICS.match(opcode)]


def test_arithmetic_is_the_promised_one(build):
    name, parameters, target, _, found = build
    if name == "mhc_pre_h_aggregate":
        assert not found & {"FFMA", "FFMA2", "HFMA2_BF16", "DFMA"}
        assert found & {"FMUL", "FMUL2"}
        assert found & {"FADD", "FADD2"}
    elif "fp64_tensor" in parameters:
        assert "DMMA" in found
    else:
        assert not found & {"DMMA", "DFMA", "DADD", "DMUL"}
        # Blackwell's packed FMA does two of Hopper's.
        assert "FFMA2" in found if target == "sm_100a" else "FFMA" in found


def test_compiles_in_time(build):
    # 20 s is what is promised of two idle cores (warmup's table shows the figure); a busy machine may take twice that.
    name, parameters, target, meta, _ = build
    assert meta["compile_seconds"] <= 40, (name, parameters, target)


# Bytes that a thread of one kernel stores and loads for want of registers. The notes beside the kernels say where: none
# of it lies in a hot loop. A build that isn't named here spills nothing.
SPILLS = {
    ("vdn_delta_factors", (128, "fp64_tensor"), "sm_90a"): 104,
    ("vdn_delta_factors", (128, "fp64_tensor"), "sm_100a"): 348,
    ("vdn_delta_factors", (128, "fp32"), "sm_100a"): 300,
    ("vdn_delta_factors", (64, "fp32"), "sm_100a"): 176,
}


def test_spills(build):
    name, parameters, target, meta, _ = build
    kernels = meta["kernels"]
    assert kernels
    for kernel, use in kernels.items():
        assert set(use) == {"registers", "shared", "stack", "spill_stores", "spill_loads"}
        assert use["spill_stores"] + use["spill_loads"] <= SPILLS.get((name, parameters, target), 0), kernel


@pytest.mark.parametrize(("head_dim", "precision"), [(128, "fp64_tensor"), (128, "fp32"), (64, "fp32")])
def test_two_blocks_fit_a_multiprocessor(head_dim, precision, entries):
    """512 threads of a multiprocessor fill each other's waits: 65,536 registers for them."""
    meta = entries["vdn_delta_factors", (head_dim, precision), "sm_90a"].meta
    assert all(use["registers"] <= 128 for use in meta["kernels"].values())
