"""What the compiler made of a kernel: its instructions and innermost loops, read back from the library."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path

from jit_kernels.dispatch import OPERATORS
from jit_kernels.jit.arch import Target

# /*04a0*/ @!P0 FFMA R1, R2, R3, R4 ;
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.M)
_SHAPE = re.compile(r"DMMA\.(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True)
class Code:
    """Opcodes in the order they lie in, without their operands."""

    opcodes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.opcodes)

    def count(self, name: str) -> int:
        """Instructions of that name, whatever their modifiers."""
        return sum(opcode.split(".")[0] == name for opcode in self.opcodes)

    @cached_property
    def multiply_adds(self) -> int:
        """fp32 multiply-adds of a lane. FFMA2 does two."""
        return self.count("FFMA") + 2 * self.count("FFMA2")

    @cached_property
    def tensor_flop(self) -> int:
        """fp64 tensor-core FLOP of a warp."""
        return sum(
            _flop(opcode) * times for opcode, times in Counter(self.opcodes).items() if opcode.startswith("DMMA")
        )


@dataclass(frozen=True)
class KernelCode(Code):
    registers: int
    loops: tuple[Code, ...]  # the innermost ones

    def hottest(self, weight: str) -> Code:
        """The innermost loop with most of ``multiply_adds`` or ``tensor_flop``."""
        return max(self.loops, key=lambda loop: getattr(loop, weight))


def _flop(opcode: str) -> int:
    shape = _SHAPE.match(opcode)
    if shape is None:
        raise ValueError(f"{opcode}: a tensor-core instruction of unknown shape")
    return 2 * prod(map(int, shape.groups()))


def parse(listing: str) -> tuple[Code, tuple[Code, ...]]:
    """One function's listing: all of it up to the filling at its end, and its innermost loops."""
    found = [(int(address, 16), opcode, rest) for address, opcode, rest in _INSTRUCTION.findall(listing)]
    spans = set()
    for address, opcode, rest in found:
        target = re.search(r"0x([0-9a-f]+)", rest) if opcode.startswith("BRA") else None
        if target is not None and int(target[1], 16) < address:
            spans.add((int(target[1], 16), address))
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    loops = tuple(Code(tuple(op for address, op, _ in found if a <= address <= b)) for a, b in sorted(inner))
    body = [opcode for _, opcode, _ in found]
    while body and body[-1].split(".")[0] in ("NOP", "BRA"):
        body.pop()
    return Code(tuple(body)), loops


@cache
def kernels(operator: str, parameters: tuple[object, ...], target: Target) -> dict[str, KernelCode]:
    """The kernels of one build by their mangled names. Compiled where the cache doesn't hold it; needs no GPU.

    Raises:
        JitError: it can't be compiled; the message says why.
        FileNotFoundError: cuobjdump or nvdisasm is missing.
    """
    entry = OPERATORS[operator].build(target, *parameters).compile()
    found = {}
    for part in disassemble(entry.folder / entry.meta["library"]).split("Function : ")[1:]:
        name, listing = part.split("\n", 1)
        code, loops = parse(listing)
        found[name.strip()] = KernelCode(code.opcodes, entry.meta["kernels"][name.strip()]["registers"], loops)
    return found


def kernel(operator: str, parameters: tuple[object, ...], target: Target, name: str) -> KernelCode:
    """The one kernel whose mangled name contains ``name``."""
    found = {full: code for full, code in kernels(operator, parameters, target).items() if name in full}
    if len(found) != 1:
        raise ValueError(f"{operator}: expected one kernel with {name!r} in its name, found {list(found) or 'none'}")
    return next(iter(found.values()))


def _tool(name: str) -> str:
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for program in Path(location).glob(f"cu*/bin/{name}"):
            return str(program)
    found = shutil.which(name)
    if not found:
        raise FileNotFoundError(f"{name} was not found: pip install nvidia-cuda-{name} brings it, or a CUDA toolkit")
    return found


def disassemble(library: Path) -> str:
    """Every kernel of a library as cuobjdump lists it.

    Raises:
        FileNotFoundError: cuobjdump or nvdisasm is missing.
    """
    path = os.pathsep.join([str(Path(_tool("nvdisasm")).parent), os.environ["PATH"]])  # cuobjdump calls it by name
    done = subprocess.run(
        [_tool("cuobjdump"), "--dump-sass", str(library)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
