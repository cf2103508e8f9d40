"""The delta factors' backward: the fused kernel for the inverse, and the closed form of the gradients in torch.

Torch runs four batched fp64 products (cuBLAS) and elementwise kernels over fp64 tensors of the matrices' size. Each
kernel waits for its launch and a trip to memory, then moves its bytes; nothing overlaps. A product takes the larger of
its bytes and its FLOP over the share of the tensor rate that cuBLAS reaches on matrices of 128 x 128, and no less than
one tile takes one multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass

from jit_kernels.bench.cost.delta_factors import FULL, OPERATOR, TRIP, Fp32, Fp64Tensor, lower_lines
from jit_kernels.bench.cost.machine import Machine, Prediction, Rows

PRODUCTS = 4
TILE = 64  # rows and columns of a product that cuBLAS gives to one block: inferred from N = 7, not read from a profile
KERNELS = 21  # those, and 17 more: as the profiler counts them, less the fused one
# Bytes an element of the kernels that pass over whole matrices: four casts to fp64, diag(alpha) grad_T, b_scale B, two
# sums, two scalings, grad_T * P and its row sums, two casts back.
READ = 4 * 4 + 8 + 8 + 2 * 16 + 2 * 8 + 16 + 8 + 2 * 8
WRITTEN = 4 * 8 + 8 + 8 + 2 * 8 + 2 * 8 + 8 + 2 * 4


@dataclass(frozen=True)
class Backward:
    """``cublas``: the share of the fp64 tensor rate that its products reach."""

    fp64_tensor: Fp64Tensor
    fp32: Fp32
    cublas: float

    operator, direction, candidate = OPERATOR, "backward", "jit_kernels"
    anchors = (FULL,)

    def __str__(self) -> str:
        return f"cublas {self.cublas:.0%} of the tensor rate; the fused kernel as forward"

    @classmethod
    def calibrated(cls, machine: Machine, measured: Rows) -> Backward:
        fused = Fp64Tensor.calibrated(machine, measured), Fp32.calibrated(machine, measured)
        time = measured(OPERATOR, "backward", FULL, "jit_kernels")
        left = time - cls(*fused, cublas=1.0)._beside_products(machine, FULL).time
        if left <= 0:
            raise ValueError(f"vdn_delta_factors backward {FULL}: {time:.1f} us leave no time for its products")
        return cls(*fused, cublas=cls._at_peak(machine, FULL) / left)

    def predict(self, machine: Machine, parameters: dict[str, int]) -> Prediction:
        bytes_ = PRODUCTS * self._passes(machine, parameters, 16, 8)
        products = self._at_peak(machine, parameters) / self.cublas
        pipe = min(products, self._at_peak(machine, parameters))
        return self._beside_products(machine, parameters) + Prediction(
            memory=max(0.0, bytes_ - products), pipe=pipe, chain=products - pipe
        )

    def waves(self, machine: Machine, parameters: dict[str, int]) -> int:
        return self._fused(machine).waves(machine, parameters)

    @staticmethod
    def traffic(parameters: dict[str, int]) -> tuple[int, int]:
        count, d = parameters["count"], parameters["head_dim"]
        return count * (lower_lines(d) + 12 * d * d + 4 * d), count * (8 * d * d + 4 * d)

    def _fused(self, machine: Machine) -> Fp64Tensor | Fp32:
        """By the operator's default precision."""
        return self.fp64_tensor if machine.target.major == 9 else self.fp32

    def _beside_products(self, machine: Machine, parameters: dict[str, int]) -> Prediction:
        return self._fused(machine).predict(machine, parameters) + Prediction(
            launch=KERNELS * machine.launch,
            memory=self._passes(machine, parameters, READ, WRITTEN),
            chain=KERNELS * TRIP,
        )

    @staticmethod
    def _passes(machine: Machine, parameters: dict[str, int], read: int, written: int) -> float:
        elements = parameters["count"] * parameters["head_dim"] ** 2
        return machine.transfer(elements * read, elements * written)

    @staticmethod
    def _at_peak(machine: Machine, parameters: dict[str, int]) -> float:
        count, d = parameters["count"], parameters["head_dim"]
        # Few matrices: as long as one tile takes its multiprocessor, so as if all of them had one.
        tiles = max(count * (d / TILE) ** 2, machine.multiprocessors)
        return PRODUCTS * tiles * 2 * TILE**2 * d / machine.fp64_tensor * 1e-6
