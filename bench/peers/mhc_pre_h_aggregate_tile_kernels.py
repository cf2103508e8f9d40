"""TileKernels' collapse. Releases of tilelang and tvm-ffi that don't fit each other abort what imports them: processes
of their own try it first, and what TileLang compiles for them stays in its cache.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from jit_kernels.jit.errors import CompileError
from jit_kernels.ops.mhc_pre_h_aggregate import STREAMS

MOST_SECONDS = 300  # several times what its compiling takes
MODULE = "tile_kernels.modeling.mhc.ops"
TRY = f"""
import sys
import torch
from {MODULE} import mhc_pre_apply_mix
hidden_size = int(sys.argv[1])
residual = torch.zeros(1, {STREAMS}, hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
pre = torch.zeros(1, {STREAMS}, 1, device="cuda", requires_grad=True)
mhc_pre_apply_mix(residual, pre).backward(torch.zeros(1, hidden_size, dtype=torch.bfloat16, device="cuda"))
torch.cuda.synchronize()
"""


@dataclass(frozen=True)
class Tried:
    """Forward and backward for one hidden size, compiled and run in a process of their own."""

    hidden_size: int

    def compile(self) -> None:
        """Raises CompileError, with what that process said last."""
        if lack := _lack(self.hidden_size):
            raise CompileError(lack)


@cache
def _lack(hidden_size: int) -> str:
    command = [sys.executable, "-c", TRY, str(hidden_size)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return f"its trial took more than {MOST_SECONDS} s"
    said = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
    return said[-1].strip() if done.returncode else ""


def operator() -> Callable[[Tensor, Tensor], Tensor]:
    """The collapse of residual ``[T, 4, H]`` and pre ``[T, 4]``, which has a gradient. To be tried first."""
    run = importlib.import_module(MODULE).mhc_pre_apply_mix

    def collapse(residual: Tensor, pre: Tensor) -> Tensor:
        found: Tensor = run(residual, pre.unsqueeze(-1))
        return found

    return collapse
