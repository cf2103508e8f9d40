"""vdn_delta_factors at d = 64, where a warp of the fp64 kernel owns a matrix, or several own one of a few."""

from __future__ import annotations

import pytest
import torch
from jit_kernels.bench.vdn_delta_factors import reference, spectrum

from jit_kernels import vdn_delta_factors
from jit_kernels.checks.compare import same_bytes

pytestmark = pytest.mark.parametrize("precision", ["fp64_tensor", "fp32"])


@pytest.fixture
def inputs(cuda, generator):
    return [tensor.to(cuda) for tensor in spectrum(generator, 1414, 64, 50.0)]


def test_shared_or_alone(inputs, precision):
    """Either side of every number at which matrices get fewer warps each, or a round more (132 multiprocessors)."""
    whole = vdn_delta_factors(*inputs, precision=precision, backend="fused")
    for count in (1, 2, 33, 132, 133, 264, 265, 528, 529, 1056, 1057):
        part = vdn_delta_factors(*(tensor[:count] for tensor in inputs), precision=precision, backend="fused")
        assert same_bytes(part, [tensor[:count] for tensor in whole]), count


def test_repeats(inputs, precision):
    first = vdn_delta_factors(*inputs, precision=precision, backend="fused")
    for _ in range(100):
        assert same_bytes(vdn_delta_factors(*inputs, precision=precision, backend="fused"), first)


def test_symmetric_to_the_bit(cuda, generator, precision):
    A, B, alpha = (tensor.to(cuda) for tensor in reference(generator, 300, 64))
    T, _ = vdn_delta_factors(A, B, torch.ones_like(alpha), precision=precision, backend="fused")
    assert same_bytes([T], [T.mT])
    scaled, _ = vdn_delta_factors(A, B, alpha, precision=precision, backend="fused")
    assert same_bytes([scaled], [alpha.unsqueeze(-1) * T])


@pytest.mark.parametrize("count", [1, 133, 300])  # four warps a matrix, two, one
def test_every_minor_is_named(inputs, precision, count):
    A, B, alpha = (tensor[:count] for tensor in inputs)
    for row in range(64):
        bad = A.clone()
        bad[-1, row, row] = -1e3
        with pytest.raises(torch.linalg.LinAlgError, match=rf"matrix {count - 1}: .*order {row + 1} "):
            vdn_delta_factors(bad, B, alpha, precision=precision, backend="fused", check_errors=True)
