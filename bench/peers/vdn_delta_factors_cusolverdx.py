"""The delta factors by cuSOLVERDx: libmathdx generates POTRF and TRSM, and cuBLASDx's products; a kernel of ours is
linked around them.

libmathdx, NVRTC and nvJitLink are called through ctypes; the last two come with torch. Before the cubin is loaded no
GPU is needed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import CompileError, LinkError, ToolchainError
from jit_kernels.jit.loader import Kernel, kernel

Operators = Mapping[int, int | tuple[int, ...]]


class Solver(IntEnum):
    """What libcusolverdx.h lets one set."""

    SIZE, TYPE, PRECISION, SM, EXECUTION, BLOCK_DIM, API, FUNCTION, ARRANGEMENT, FILL_MODE = range(10)
    SIDE, DIAG, TRANSPOSE_MODE, LEADING_DIMENSION = range(10, 14)


class Blas(IntEnum):
    """What libcublasdx.h lets one set."""

    FUNCTION, SIZE, TYPE, PRECISION, SM, EXECUTION, BLOCK_DIM, LEADING_DIMENSION = range(8)
    API, ARRANGEMENT, ALIGNMENT = range(9, 12)


# Values of theirs, of libcommondx.h's and of nvJitLink.h's enumerators.
REAL, FLOAT32, BLOCK, SHARED_MEMORY, COLUMN_MAJOR, ROW_MAJOR = 0, 5, 1, 0, 0, 1
POTRF, TRSM, LOWER, LEFT, NON_UNIT, NON_TRANSPOSED, PRODUCT = 2, 4, 1, 0, 1, 0, 0
SYMBOL_NAME, TARGET_SM = 0, 1
LTO_IR, FATBIN = 3, 4

ALIGNMENT = 16  # bytes, of each row and column in shared memory


@dataclass(frozen=True)
class Plan:
    """How one block goes about its matrix."""

    dim: int
    threads: int
    lead: int  # floats from one row or column to the next in shared memory

    @property
    def shared_bytes(self) -> int:
        return 4 * 3 * self.dim * self.lead


# On an H200, 26 ways were tried for a dim of 128 and 13 for 64, POTRS with and without a product among them. These took
# the least time for one matrix and for 707; for 132 and 264 matrices they are within 2 % of the least.
PLANS = {128: Plan(128, threads=512, lead=132), 64: Plan(64, threads=256, lead=68)}


@dataclass(frozen=True)
class Linked:
    """The kernel of a plan with the vendor's functions in it."""

    plan: Plan
    target: Target

    def compile(self) -> bytes:
        """The cubin.

        Raises:
            JitError: a library is missing, or refuses.
        """
        return cubin(self.plan, self.target)


_generating = threading.Lock()  # nothing says that libmathdx may be called by several threads


@cache
def cubin(plan: Plan, target: Target) -> bytes:
    with _generating:
        pieces = generated(plan, target)
    return link([(LTO_IR, compiled(plan, target)), *pieces], target)


def build_host(target: Target) -> Kernel:
    return kernel(
        "cusolverdx_host",
        cuda_files=[Path(__file__).with_suffix(".cuh")],
        cuda_wrappers=[(name, f"jit_kernels::cusolverdx::{name}") for name in ("load", "forward")],
        target=target,
    )


class Launcher:
    def __init__(self, device: torch.device) -> None:
        target = Target.of(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        host = build_host(target).load()
        self._run = host.forward
        self._kernels = {dim: host.load(cubin(plan, target), plan.shared_bytes, index) for dim, plan in PLANS.items()}

    def __call__(self, A: Tensor, B: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        plan = PLANS[A.shape[-1]]
        T, J = torch.empty_like(A), torch.empty_like(A)
        self._run(self._kernels[plan.dim], plan.dim, plan.threads, plan.shared_bytes, T, J, A, B, alpha)
        return T, J


def generated(plan: Plan, target: Target) -> list[tuple[int, bytes]]:
    """The functions that the kernel declares, as libmathdx generates them, and what they call."""
    sm = target.major * 100 + target.minor * 10
    solver: Operators = {
        Solver.TYPE: REAL,
        Solver.PRECISION: FLOAT32,
        Solver.SM: sm,
        Solver.EXECUTION: BLOCK,
        Solver.API: SHARED_MEMORY,
        Solver.FILL_MODE: LOWER,
        Solver.SIZE: (plan.dim, plan.dim),
        Solver.BLOCK_DIM: (plan.threads, 1, 1),
    }
    factor: Operators = {
        Solver.FUNCTION: POTRF,
        Solver.ARRANGEMENT: (COLUMN_MAJOR,),
        Solver.LEADING_DIMENSION: (plan.lead,),
    }
    solve: Operators = {
        Solver.FUNCTION: TRSM,
        Solver.SIDE: LEFT,
        Solver.DIAG: NON_UNIT,
        Solver.TRANSPOSE_MODE: NON_TRANSPOSED,
        Solver.ARRANGEMENT: (COLUMN_MAJOR,) * 2,
        Solver.LEADING_DIMENSION: (plan.lead,) * 2,
    }
    product: Operators = {
        Blas.FUNCTION: PRODUCT,
        Blas.TYPE: REAL,
        Blas.PRECISION: (FLOAT32,) * 3,
        Blas.SM: sm,
        Blas.EXECUTION: BLOCK,
        Blas.API: SHARED_MEMORY,
        Blas.SIZE: (plan.dim,) * 3,
        Blas.BLOCK_DIM: (plan.threads, 1, 1),
        Blas.LEADING_DIMENSION: (plan.lead,) * 3,
        Blas.ALIGNMENT: (ALIGNMENT,) * 3,
    }
    # What TRSM leaves column after column is its own transpose row after row.
    square: Operators = {Blas.ARRANGEMENT: (ROW_MAJOR, COLUMN_MAJOR, ROW_MAJOR)}
    multiply: Operators = {Blas.ARRANGEMENT: (ROW_MAJOR,) * 3}
    return [
        *finalized("cusolverdx", sm, {"factor": {**solver, **factor}, "solve": {**solver, **solve}}),
        *finalized("cublasdx", sm, {"square": {**product, **square}, "multiply": {**product, **multiply}}),
    ]


def finalized(prefix: str, sm: int, functions: Mapping[str, Operators]) -> list[tuple[int, bytes]]:
    """The functions of one of the vendor's libraries, by the names they get, and what they call."""
    mathdx = libmathdx()

    def describe(symbol: str, operators: Operators) -> ctypes.c_longlong:
        handle = ctypes.c_longlong()
        check(mathdx[f"{prefix}CreateDescriptor"], ctypes.byref(handle))
        for operator, value in operators.items():
            if isinstance(value, tuple):
                check(mathdx[f"{prefix}SetOperatorInt64s"], handle, operator, *array_of(value))
            else:
                check(mathdx[f"{prefix}SetOperatorInt64"], handle, operator, ctypes.c_longlong(value))
        check(mathdx[f"{prefix}SetOptionStr"], handle, SYMBOL_NAME, symbol.encode())
        return handle

    handles = [describe(symbol, operators) for symbol, operators in functions.items()]
    code = ctypes.c_longlong()
    check(mathdx.commondxCreateCode, ctypes.byref(code))
    check(mathdx.commondxSetCodeOptionInt64, code, TARGET_SM, ctypes.c_longlong(sm))
    check(mathdx[f"{prefix}FinalizeCodes"], code, *array_of([handle.value for handle in handles]))
    generated = fetched(mathdx, "commondxGetCodeLTOIR", code, sized=True)
    called = fetched(mathdx, f"{prefix}GetUniversalFATBIN", handles[0], sized=True)
    check(mathdx.commondxDestroyCode, code)
    for handle in handles:
        check(mathdx[f"{prefix}DestroyDescriptor"], handle)
    return [(LTO_IR, generated), (FATBIN, called)]


def compiled(plan: Plan, target: Target) -> bytes:
    """The kernel around them, in LTO-IR."""
    nvrtc = library("libnvrtc.so.*", needs=("libnvrtc-builtins.so.*",))
    source = Path(__file__).with_suffix(".cu")
    options = [f"-arch=compute_{virtual(target)}", "-dlto", "-rdc=true", "-std=c++17"]
    options += [f"-DkDim={plan.dim}", f"-DkThreads={plan.threads}", f"-DkLead={plan.lead}"]
    program = ctypes.c_void_p()
    text, name = source.read_bytes(), source.name.encode()
    check(nvrtc.nvrtcCreateProgram, ctypes.byref(program), text, name, 0, None, None)
    if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))):
        log = fetched(nvrtc, "nvrtcGetProgramLog", program)
        raise CompileError(f"NVRTC refused {source.name}: {log.decode(errors='replace')}")
    found = fetched(nvrtc, "nvrtcGetLTOIR", program)
    check(nvrtc.nvrtcDestroyProgram, ctypes.byref(program))
    return found


def link(pieces: Sequence[tuple[int, bytes]], target: Target) -> bytes:
    linker = library("libnvJitLink.so.*")
    options = (ctypes.c_char_p * 2)(f"-arch=sm_{virtual(target)}".encode(), b"-lto")
    handle = ctypes.c_void_p()
    check(linker.nvJitLinkCreate, ctypes.byref(handle), len(options), options)
    for kind, piece in pieces:
        check(linker.nvJitLinkAddData, handle, kind, piece, ctypes.c_size_t(len(piece)), None)
    if linker.nvJitLinkComplete(handle):
        log = fetched(linker, "nvJitLinkGetErrorLog", handle)
        raise LinkError(f"nvJitLink could not link the cuSOLVERDx peer: {log.decode(errors='replace')}")
    found = fetched(linker, "nvJitLinkGetLinkedCubin", handle)
    check(linker.nvJitLinkDestroy, ctypes.byref(handle))
    return found


def virtual(target: Target) -> str:
    return f"{target.major}{target.minor}"  # nothing here is specific to one arch


def array_of(values: Sequence[int]) -> tuple[ctypes.c_size_t, ctypes.Array[ctypes.c_longlong]]:
    return ctypes.c_size_t(len(values)), (ctypes.c_longlong * len(values))(*values)


def fetched(library: ctypes.CDLL, function: str, handle: Any, sized: bool = False) -> bytes:
    """What a C function writes into a buffer of the size that its twin, ``<function>Size``, tells.

    ``sized``: it wants to be told that size again, as libmathdx's do.
    """
    size = ctypes.c_size_t()
    check(getattr(library, f"{function}Size"), handle, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    check(getattr(library, function), handle, *([size] if sized else []), buffer)
    return buffer.raw


def check(function: Callable[..., int], *args: Any) -> None:
    if status := function(*args):
        raise LinkError(f"{function.__name__} failed with status {status}")


def libmathdx() -> ctypes.CDLL:
    return library("libmathdx.so.*", needs=("libnvrtc-builtins.so.*", "libnvrtc.so.*"))


@cache
def library(pattern: str, needs: tuple[str, ...] = ()) -> ctypes.CDLL:
    """A library of NVIDIA's packages for CUDA 13, behind those that it needs: they may lie in another folder."""
    for need in needs:
        library(need)
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).glob(f"cu13/lib/{pattern}"):
            return ctypes.CDLL(str(path))
    raise ToolchainError(
        f"{pattern.removesuffix('.so.*')} for CUDA 13 is not installed", "pip install nvidia-libmathdx-cu13"
    )
