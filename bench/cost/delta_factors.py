"""The delta factors: rounds of matrices on each multiprocessor, in which a sweep's chain hides or shows.

A multiprocessor holds some matrices at a time. One alone takes ``alone`` cycles: a sweep, whose steps wait for each
other, and the product J, of which it makes its share. Another one beside it adds the cycles for which it keeps the
busiest resource ``busy`` (tensor or fp32 pipe, or the issue of instructions): the rest of it fills waits. So a round of
b matrices costs

  alone + (b - 1) busy

and a call is as long as the rounds of its fullest multiprocessor. Where a warp owns a matrix it has one of the four
schedulers and its pipes: four such run side by side, and only every fourth adds to the first one's cycles. Few
matrices, or the last of many, are shared by several blocks, which all sweep and share J.

At the beginning every multiprocessor waits for its first inputs at once, at the end for its last outputs: their bytes
over the rates of memory. In between the traffic hides; all of it over the rates is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from jit_kernels.bench.cost.machine import LANES, SCHEDULERS, Machine, Prediction, Rows
from jit_kernels.bench.cost.machine_code import KernelCode, kernel

OPERATOR = "vdn_delta_factors"
LINE = 32  # floats that memory is read by
TRIP = 0.75  # us to the first element of A in an idle chip: about what the collapse's `trip` comes to
ONE, FULL = {"count": 1, "head_dim": 128}, {"count": 132, "head_dim": 128}

Round = tuple[float, ...]  # the blocks of the fullest multiprocessor: which share of J each makes


def lower_lines(d: int) -> int:
    """Bytes of the lines that A's lower triangle touches."""
    return 4 * LINE * sum(row // LINE + 1 for row in range(d))


def fullest(whole: int, parts: int, share: float, multiprocessors: int, empty: bool) -> Round:
    """How so many blocks lie on the fullest multiprocessor, whole matrices dealt out before parts of some.

    An empty chip is dealt to evenly. Later on the places of a multiprocessor come free together.
    """
    blocks = -(-(whole + parts) // multiprocessors)
    wholes = min(blocks, -(-whole // multiprocessors) if empty else whole)
    return (1.0,) * wholes + (share,) * (blocks - wholes)


class DeltaFactors:
    """What both precisions have in common."""

    operator, direction = OPERATOR, "forward"
    anchors = (ONE, FULL)
    step: float
    product: float

    def __str__(self) -> str:
        return f"step {self.step:.0f} cycles, product {self.product:.0f} cycles"

    def rounds(self, count: int, d: int, multiprocessors: int) -> list[tuple[Round, int]]:
        """Each with how often it comes. As the host entry splits and the scheduler deals out."""
        raise NotImplementedError

    def busy(self, machine: Machine, d: int) -> tuple[float, float]:
        """Cycles of a multiprocessor's busiest resource for one matrix: sweep, and J."""
        raise NotImplementedError

    def pipe(self, machine: Machine, d: int) -> tuple[float, float]:
        """The same of its arithmetic pipe, which is the busiest one or less."""
        raise NotImplementedError

    def abreast(self, d: int) -> int:
        """Blocks of a multiprocessor that share no resource, each with that part of it."""
        return 1

    def alone(self, machine: Machine, d: int, share: float) -> float:
        """Cycles of one block with nothing beside it."""
        raise NotImplementedError

    def edges(self, d: int) -> tuple[int, int]:
        """Bytes of a matrix that the first round waits for, and the last one leaves to be written."""
        raise NotImplementedError

    @staticmethod
    def traffic(parameters: dict[str, int]) -> tuple[int, int]:
        count, d = parameters["count"], parameters["head_dim"]
        return count * (lower_lines(d) + 4 * (d * d + d)), count * 8 * d * d

    def waves(self, machine: Machine, parameters: dict[str, int]) -> int:
        return sum(times for _, times in self._rounds(machine, parameters))

    def _rounds(self, machine: Machine, parameters: dict[str, int]) -> list[tuple[Round, int]]:
        return self.rounds(parameters["count"], parameters["head_dim"], machine.multiprocessors)

    def predict(self, machine: Machine, parameters: dict[str, int]) -> Prediction:
        count, d = parameters["count"], parameters["head_dim"]
        rounds = self._rounds(machine, parameters)
        sweep, product = self.busy(machine, d)
        abreast = self.abreast(d)
        cycles = filled = 0.0
        for blocks, times in rounds:
            first, *others = (abreast * (sweep + share * product) for share in blocks[::abreast])
            cycles += times * (self.alone(machine, d, blocks[0]) + sum(others))
            filled += times * (first + sum(others))
        slots = len(rounds[0][0]) * machine.multiprocessors
        ahead, behind = self.edges(d)
        last = count % slots or min(count, slots)
        edges = machine.transfer(min(count, slots) * ahead, 0) + machine.transfer(0, last * behind)
        balanced = (sweep + product) * count / machine.multiprocessors
        pipe = sum(self.pipe(machine, d)) * count / machine.multiprocessors
        every = machine.transfer(*self.traffic(parameters))
        return Prediction(
            launch=machine.launch,
            memory=edges + max(0.0, every - edges - machine.microseconds(cycles)),
            pipe=machine.microseconds(pipe),
            issue=machine.microseconds(balanced - pipe),
            chain=machine.microseconds(cycles - filled) + TRIP,
            tail=max(0.0, machine.microseconds(filled - balanced)),
        )


@dataclass(frozen=True)
class Fp64Tensor(DeltaFactors):
    """The 16-wide sweep on fp64 tensor cores; a matrix has a block of eight warps at d = 128, a warp at d = 64.

    ``step``: cycles of a step's chain beside its products: hand-over, 16 x 16 inverse, barrier. ``product``: cycles
    that one block alone takes for J beyond the pipe's. Both of d = 128.

    J's FLOP are the tensor instructions of its loop times its turns. Of the sweep's, a step has two products of tiles
    for each other row block (W, the diagonal), at d = 128 a third (the pivot's own row), and one for each tile between
    them; two refine the inverse. At d = 128 four of these follow one another on the chain: W, the diagonal, and the
    two. A warp of its own does all of them one after the other.
    """

    step: float
    product: float

    candidate = "jit_kernels fp64_tensor"
    TILE = 16
    PRODUCT_FLOP = 2 * TILE**3
    ON_CHAIN = 4
    # Cycles round the sweep at d = 128: A through shared memory to the registers, the inverse to shared memory. Chosen
    # so that `step` agrees with clock64 in the kernel: 3.3 K with its products (NOTES.md).
    AROUND = 3200
    # The same of a warp that owns a matrix, from clock64 in the kernel (NOTES.md): a step beside its products; A to the
    # registers and the inverse to shared memory; J beyond the pipe.
    WARP_STEP, WARP_AROUND, WARP_PRODUCT = 1490, 3470, 6900

    @classmethod
    def calibrated(cls, machine: Machine, measured: Rows) -> Fp64Tensor:
        return cls(*_two_latencies(cls, machine, measured, steps=9))

    def rounds(self, count: int, d: int, multiprocessors: int) -> list[tuple[Round, int]]:
        few = (multiprocessors // 4, multiprocessors // 2) if d == 128 else (multiprocessors, 2 * multiprocessors)
        for parts, most in zip((4, 2), few, strict=True):
            if count <= most:
                return [((1 / parts,) * -(-parts * count // multiprocessors), 1)]
        resident = 2 if d == 128 else 8
        slots = resident * multiprocessors
        full, rest = divmod(count, slots)
        found: list[tuple[Round, int]] = [((1.0,) * resident, full)] if full else []
        if rest:
            split = min(rest, slots - rest) if d == 128 and rest > multiprocessors else 0
            found.append((fullest(rest - split, 2 * split, 0.5, multiprocessors, empty=not full), 1))
        return found

    def abreast(self, d: int) -> int:
        return 1 if d == 128 else SCHEDULERS

    def code(self, machine: Machine, d: int) -> KernelCode:
        return kernel(OPERATOR, (d, "fp64_tensor"), machine.target, f"ILi{d}ELb1E")

    def flop(self, machine: Machine, d: int) -> tuple[int, int]:
        """Of the sweep, and of J."""
        n = d // self.TILE
        tiles = (3 if d == 128 else 2) * (n - 1) + (n - 1) * (n - 2) // 2 + 2
        # Of the loop in which a block of d = 128 makes 16 x 64 pieces, tile by tile, and a warp of d = 64 whole rows.
        turns = n * n * 2 if d == 128 else n
        return n * tiles * self.PRODUCT_FLOP, turns * self.code(machine, d).hottest("tensor_flop").tensor_flop

    def busy(self, machine: Machine, d: int) -> tuple[float, float]:
        loop = self.code(machine, d).hottest("tensor_flop")
        issued = len(loop) / loop.tensor_flop / SCHEDULERS  # cycles a FLOP; the sweep's code is no leaner
        sweep, product = self.pipe(machine, d)
        return max(sweep, self.flop(machine, d)[0] * issued), max(product, self.flop(machine, d)[1] * issued)

    def pipe(self, machine: Machine, d: int) -> tuple[float, float]:
        sweep, product = self.flop(machine, d)
        return machine.tensor_cycles(sweep), machine.tensor_cycles(product)

    def alone(self, machine: Machine, d: int, share: float) -> float:
        on_chain = SCHEDULERS * machine.tensor_cycles(self.ON_CHAIN * self.PRODUCT_FLOP)  # a warp has one of the pipes
        sweep, product = self.busy(machine, d)
        steps = d // self.TILE
        if self.abreast(d) > 1:
            alone = steps * self.WARP_STEP + SCHEDULERS * sweep + self.WARP_AROUND
            return alone + share * (SCHEDULERS * product + self.WARP_PRODUCT)
        return (steps + 1) * (self.step + on_chain) + self.AROUND + share * (product + self.product)

    def edges(self, d: int) -> tuple[int, int]:
        return lower_lines(d), 4 * d * d * 4 * self.TILE // d  # J leaves by pieces of four tile columns


@dataclass(frozen=True)
class Fp32(DeltaFactors):
    """The 8-wide sweep and the product J in fp32; a block of (d / 8)^2 threads a matrix, 512 of a multiprocessor.

    ``step``: cycles that a block alone waits in a step of the sweep, beyond the issue of its instructions. A thread
    does the same in a step of d = 64 as of d = 128: the blocks differ in size. ``product``: the same of J with T and
    the stores, d = 128; it grows with the elements.

    Multiply-adds: the sweep's with symmetry, whose sums of 8 products are added apart, 9 operations for 8; J's. They
    take the instructions that the machine code has for each in the largest loop. The others were counted by ncu.
    """

    step: float
    product: float

    candidate = "jit_kernels fp32"
    WIDTH = 8
    # Warp instructions of a matrix beside those, d = 128, sm_90a: all are 158.7 K (NOTES-fp32.md).
    OTHERS = 37_600

    @classmethod
    def calibrated(cls, machine: Machine, measured: Rows) -> Fp32:
        return cls(*_two_latencies(cls, machine, measured, steps=16))

    def rounds(self, count: int, d: int, multiprocessors: int) -> list[tuple[Round, int]]:
        resident = 2 if d == 128 else 8
        slots, few = resident * multiprocessors, multiprocessors * max(1, resident // 4)
        full, rest = divmod(count, slots)
        found: list[tuple[Round, int]] = [((1.0,) * resident, full)] if full else []
        if rest:
            parts = 4 if 4 * rest <= few else 2
            split = rest if parts * rest <= few else slots - rest if 2 * rest > slots else 0
            found.append((fullest(rest - split, parts * split, 1 / parts, multiprocessors, empty=not full), 1))
        return found

    def code(self, machine: Machine, d: int) -> KernelCode:
        return kernel(OPERATOR, (d, "fp32"), machine.target, f"ILi{d}ELb1E")

    def multiply_adds(self, d: int) -> tuple[float, float]:
        """Of the sweep, lower triangle by tiles of 8, and of J."""
        groups = d // self.WIDTH
        return (1 + 1 / self.WIDTH) * d * groups * (groups + 1) / 2 * self.WIDTH**2, d**3

    def instructions_a_multiply_add(self, machine: Machine, d: int) -> float:
        loop = self.code(machine, d).hottest("multiply_adds")
        return len(loop) / loop.multiply_adds

    def busy(self, machine: Machine, d: int) -> tuple[float, float]:
        ratio = self.instructions_a_multiply_add(machine, d)
        others = self.OTHERS * (d / 128) ** 2
        sweep, product = (ratio * some / LANES for some in self.multiply_adds(d))
        pipes = self.pipe(machine, d)
        return max((sweep + others) / SCHEDULERS, pipes[0]), max(product / SCHEDULERS, pipes[1])

    def pipe(self, machine: Machine, d: int) -> tuple[float, float]:
        sweep, product = self.multiply_adds(d)
        return machine.ffma_cycles(sweep), machine.ffma_cycles(product)

    def alone(self, machine: Machine, d: int, share: float) -> float:
        groups = d // self.WIDTH
        sweep, _ = self.busy(machine, 128)
        _, product = self.busy(machine, d)
        idle = max(1, SCHEDULERS * LANES / groups**2)  # a block of two warps uses half of the schedulers
        return groups * (self.step + sweep * self.WIDTH / 128) + share * (
            product * idle + self.product * (d / 128) ** 2
        )

    def edges(self, d: int) -> tuple[int, int]:
        return lower_lines(d), 4 * d * d  # A; J, while T leaves beside the product


def _two_latencies(
    model: type[Fp64Tensor] | type[Fp32], machine: Machine, measured: Rows, steps: int
) -> tuple[float, float]:
    """``step`` and ``product`` from the two anchors. Blocks of the first make a quarter of J, of the second all."""
    bare = model(0, 0)
    one, full = (
        machine.cycles(measured(OPERATOR, "forward", row, model.candidate) - bare.predict(machine, row).time)
        for row in model.anchors
    )
    product = (full - one) / 0.75
    return (one - product / 4) / steps, product
