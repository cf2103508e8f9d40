"""The mHC collapse: memory decides, and for few tokens the trips to it.

Bytes. Forward reads four bf16 streams and writes one; backward reads five and writes four; ``pre`` and its gradient are
16 bytes a token. They move at the rates of this run's reads and writes: large grids reach just that.

What a small grid waits for beyond its launch and its bytes, in microseconds:

  forward    ``start``, and of a ``trip`` to memory what shows. Few tokens are prefetched while the grid ahead drains:
             what moves within a launch's time has made its trip by then. Of more bytes so much of the trip shows as
             they take longer, up to all of it; grids of 4096 segments (256 elements of a token) or more don't prefetch.
  backward   ``start``: the trip, and the way of the sums to the cluster's first block and on to memory.

Issue. A warp runs through the kernel once, a segment each. All of its code, the repair of NaNs included, is an upper
bound for its instructions, and it stays below the time of the bytes on both chips.
"""

from __future__ import annotations

from dataclasses import dataclass

from jit_kernels.bench.cost.machine import LANES, SCHEDULERS, Machine, Prediction, Rows
from jit_kernels.bench.cost.machine_code import KernelCode, kernel

OPERATOR = "mhc_pre_h_aggregate"
SEGMENT = 256  # elements of a token that a warp owns
FEW = 4096  # segments below which forward has blocks of two warps, and prefetches
WARPS = 4
CLUSTER = 8  # most blocks of a token, backward
SMALL = {"tokens": 1, "hidden_size": 4096}
MEDIUM = {"tokens": 128, "hidden_size": 7168}


def segments(hidden_size: int) -> int:
    return -(-hidden_size // SEGMENT)


def _sizes(parameters: dict[str, int]) -> tuple[int, int]:
    tokens, hidden = parameters["tokens"], parameters["hidden_size"]
    if hidden % 8:
        raise ValueError(f"hidden_size {hidden}: the model covers the path of 16-byte accesses, multiples of 8")
    return tokens, hidden


@dataclass(frozen=True)
class Forward:
    start: float  # us
    trip: float  # us

    operator, direction, candidate = OPERATOR, "forward", "jit_kernels"
    anchors = (SMALL, MEDIUM)

    def __str__(self) -> str:
        return f"start {self.start:.3g} us, trip {self.trip:.3g} us"

    @classmethod
    def calibrated(cls, machine: Machine, measured: Rows) -> Forward:
        bare = cls(0, 0)
        small, medium = (
            measured(OPERATOR, "forward", row, "jit_kernels") - bare.predict(machine, row).time for row in cls.anchors
        )
        return cls(start=small, trip=max(0.0, medium - small))

    def predict(self, machine: Machine, parameters: dict[str, int]) -> Prediction:
        memory = machine.transfer(*self.traffic(parameters))
        return Prediction(
            launch=machine.launch,
            memory=memory,
            issue=_beyond(memory, machine, parameters, self.code(machine)),
            chain=self.start + min(self.trip, max(0.0, memory - machine.launch)),
        )

    @staticmethod
    def traffic(parameters: dict[str, int]) -> tuple[int, int]:
        tokens, hidden = _sizes(parameters)
        return tokens * (8 * hidden + 16), tokens * 2 * hidden

    @staticmethod
    def code(machine: Machine) -> KernelCode:
        return kernel(OPERATOR, (), machine.target, "forward_kernelILb1E")

    def waves(self, machine: Machine, parameters: dict[str, int]) -> int:
        tokens, per_token = parameters["tokens"], segments(parameters["hidden_size"])
        warps = min(per_token, 2 if tokens * per_token < FEW else WARPS)
        resident = machine.resident(self.code(machine).registers, warps * LANES)
        return -(-tokens * -(-per_token // warps) // (resident * machine.multiprocessors))


@dataclass(frozen=True)
class Backward:
    start: float  # us

    operator, direction, candidate = OPERATOR, "backward", "jit_kernels"
    anchors = (SMALL,)

    def __str__(self) -> str:
        return f"start {self.start:.3g} us"

    @classmethod
    def calibrated(cls, machine: Machine, measured: Rows) -> Backward:
        return cls(measured(OPERATOR, "backward", SMALL, "jit_kernels") - cls(0).predict(machine, SMALL).time)

    def predict(self, machine: Machine, parameters: dict[str, int]) -> Prediction:
        memory = machine.transfer(*self.traffic(parameters))
        return Prediction(
            launch=machine.launch,
            memory=memory,
            issue=_beyond(memory, machine, parameters, self.code(machine)),
            chain=self.start,
        )

    @staticmethod
    def traffic(parameters: dict[str, int]) -> tuple[int, int]:
        tokens, hidden = _sizes(parameters)
        return tokens * (10 * hidden + 16), tokens * (8 * hidden + 16)

    @staticmethod
    def code(machine: Machine) -> KernelCode:
        return kernel(OPERATOR, (), machine.target, "backward_kernelILb1EtLb1ELb1E")

    def waves(self, machine: Machine, parameters: dict[str, int]) -> int:
        per_token = segments(parameters["hidden_size"])
        warps = min(per_token, WARPS)
        blocks = parameters["tokens"] * min(-(-per_token // warps), CLUSTER)
        return -(-blocks // (machine.resident(self.code(machine).registers, warps * LANES) * machine.multiprocessors))


def _beyond(memory: float, machine: Machine, parameters: dict[str, int], code: KernelCode) -> float:
    """What the instructions take longer than the bytes."""
    tokens, hidden = _sizes(parameters)
    warps = tokens * segments(hidden)
    cycles = warps * len(code) / (SCHEDULERS * machine.multiprocessors)
    return max(0.0, machine.microseconds(cycles) - memory)
