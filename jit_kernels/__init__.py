"""CUDA kernels compiled on first call, with a torch fallback for every other shape and device."""

from pathlib import Path as _Path

if not (_Path(__file__).parent / "fallbacks").is_dir():  # a checkout: csrc and fallbacks stand beside the package
    __path__.append(str(_Path(__file__).resolve().parent.parent))

from jit_kernels._version import __version__
from jit_kernels.dispatch import Explanation, Operator, Support, UnsupportedError, backend, explain, use_backend
from jit_kernels.jit.errors import JitError
from jit_kernels.jit.loader import load_jit
from jit_kernels.ops.mhc_pre_h_aggregate import mhc_pre_h_aggregate
from jit_kernels.ops.vdn_delta_factors import vdn_delta_factors
from jit_kernels.warmup import warm_up

__all__ = [
    "Explanation",
    "JitError",
    "Operator",
    "Support",
    "UnsupportedError",
    "__version__",
    "backend",
    "explain",
    "load_jit",
    "mhc_pre_h_aggregate",
    "use_backend",
    "vdn_delta_factors",
    "warm_up",
]
