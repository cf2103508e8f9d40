"""What the model knows of a GPU, and what a prediction consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median

from jit_kernels.bench.record import Document

from jit_kernels.jit.arch import Target

SCHEDULERS = 4  # of a multiprocessor; each issues one instruction of a warp a cycle
LANES = 32
REGISTERS, WARPS, BLOCKS = 16384, 64, 32  # of a scheduler, and of a multiprocessor, from sm_90 to sm_100


@dataclass(frozen=True)
class Machine:
    """One GPU. Rates are what its programs reach, not what its data sheet says."""

    name: str
    target: Target
    multiprocessors: int
    ghz: float
    read: float  # GB/s from device memory, of a kernel that only reads
    write: float  # GB/s to it
    ffma: float  # TFLOP/s of fp32 multiply-adds
    fp64_tensor: float  # TFLOP/s
    launch: float  # us of an empty kernel among others in a CUDA graph

    def cycles(self, microseconds: float) -> float:
        return microseconds * self.ghz * 1e3

    def microseconds(self, cycles: float) -> float:
        return cycles / (self.ghz * 1e3)

    def transfer(self, read: float, written: float) -> float:
        """Microseconds for so many bytes. A copy reads as much as it writes, which gives the rate of writing."""
        return (read / self.read + written / self.write) * 1e-3

    def tensor_cycles(self, flop: float) -> float:
        """Cycles in which one multiprocessor's fp64 tensor cores do that."""
        return self.cycles(flop / self.fp64_tensor * 1e-6) * self.multiprocessors

    def ffma_cycles(self, multiply_adds: float) -> float:
        """Cycles in which one multiprocessor's fp32 pipes do that."""
        return self.cycles(2 * multiply_adds / self.ffma * 1e-6) * self.multiprocessors

    def resident(self, registers: int, threads: int) -> int:
        """Blocks that a multiprocessor holds at a time, by their registers, warps and number."""
        room = min(SCHEDULERS * (REGISTERS // (-(-registers // 8) * 8 * LANES)), WARPS)
        return min(room // -(-threads // LANES), BLOCKS)

    @classmethod
    def of(cls, document: Document) -> Machine:
        """The GPU of a benchmark run, by the ceilings and the clock of that run.

        Raises:
            ValueError: the run was on a CPU, or lacks a ceiling.
        """
        names = ("copy", "read", "ffma", "fp64_tensor", "empty_kernel")
        rate = {one.name: one.value.median for one in document.ceilings}
        lacking = [name for name in names if name not in rate] + ([] if document.clocks else ["clocks"])
        if document.timer != "cuda" or lacking:
            lack = "this one ran on a CPU" if document.timer != "cuda" else f"this one lacks {', '.join(lacking)}"
            raise ValueError(f"the cost model needs a run on a GPU, with its ceilings and clocks: {lack}")
        return cls(
            name=document.provenance["device"],
            target=Target.parse(document.provenance["arch"]),
            multiprocessors=document.provenance["multiprocessors"],
            ghz=median(clock.sm_mhz for clock in document.clocks) * 1e-3,
            read=rate["read"],
            write=1 / (2 / rate["copy"] - 1 / rate["read"]),
            ffma=rate["ffma"],
            fp64_tensor=rate["fp64_tensor"],
            launch=rate["empty_kernel"],
        )


@dataclass(frozen=True)
class DataSheet:
    """A GPU as its maker describes it."""

    name: str
    target: str
    multiprocessors: int
    ghz: float
    memory: float  # GB/s
    fp64_tensor: float  # TFLOP/s

    @property
    def ffma(self) -> float:
        """TFLOP/s: 128 multiply-adds a multiprocessor and cycle."""
        return self.multiprocessors * 128 * 2 * self.ghz * 1e-3


H200 = DataSheet("NVIDIA H200", "sm_90a", 132, 1.98, 4800, 67)
# One of the eight GPUs of an HGX B200: 62 TB/s and 296 TFLOP/s of fp64 for all of them.
B200 = DataSheet("NVIDIA B200", "sm_100a", 148, 1.965, 7750, 37)


def expected(sheet: DataSheet, measured: Machine, its_sheet: DataSheet = H200) -> Machine:
    """A GPU that nobody measured, if it reaches the same share of its data sheet as the measured one."""
    memory = sheet.memory / its_sheet.memory
    return replace(
        measured,
        name=sheet.name,
        target=Target.parse(sheet.target),
        multiprocessors=sheet.multiprocessors,
        ghz=sheet.ghz,
        read=measured.read * memory,
        write=measured.write * memory,
        ffma=measured.ffma * sheet.ffma / its_sheet.ffma,
        fp64_tensor=measured.fp64_tensor * sheet.fp64_tensor / its_sheet.fp64_tensor,
    )


@dataclass(frozen=True)
class Prediction:
    """Microseconds of one call by where they go; they add up."""

    launch: float = 0.0  # an empty kernel's
    memory: float = 0.0  # bytes over the rate, as far as nothing else goes on meanwhile
    pipe: float = 0.0  # arithmetic at the rate of its pipes, spread evenly over the chip
    issue: float = 0.0  # instructions beyond what those pipes take
    chain: float = 0.0  # waiting for a result: dependent instructions, trips to memory, barriers
    tail: float = 0.0  # multiprocessors idle because the work doesn't divide evenly

    @property
    def time(self) -> float:
        return sum(asdict(self).values())

    @property
    def most(self) -> str:
        """Where most of it goes."""
        parts = asdict(self)
        return max(parts, key=parts.__getitem__)

    def __add__(self, other: Prediction) -> Prediction:
        return Prediction(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


# measured(operator, direction, parameters, candidate): a row's time in us, for calibration.
Rows = Callable[[str, str, dict[str, int], str], float]


def rows_of(document: Document) -> Rows:
    """Looks up measured times.

    Raises (when called):
        ValueError: the run has no such row; the message names it.
    """

    def measured(operator: str, direction: str, parameters: dict[str, int], candidate: str) -> float:
        for row in document.rows:
            if (row.operator, row.direction, row.parameters) == (operator, direction, parameters):
                timing = row.timing(candidate)
                if timing is not None and timing.graph is not None:
                    return timing.graph.median
        raise ValueError(
            f"the model is calibrated on {operator} {direction} {parameters} of {candidate}, "
            "which this run did not time in a CUDA graph"
        )

    return measured
