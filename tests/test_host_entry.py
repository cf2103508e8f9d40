"""What the host entries refuse: they are the only check behind a shortcut, and of whoever calls a module itself.

The tensors are made up: a device, an address and no memory behind it, so no GPU is needed. Nothing may be launched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answer import HOPPER

from jit_kernels.jit.loader import load_jit
from jit_kernels.ops import mhc_pre_h_aggregate, vdn_delta_factors

pytestmark = pytest.mark.compiler

MADE_UP = """
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <vector>

using tvm::ffi::Array;

struct MadeUp {
  DLManagedTensorVersioned managed{};
  std::vector<int64_t> shape, strides;
};

tvm::ffi::Tensor make(Array<int64_t> shape, Array<int64_t> strides, int code, int bits, int kind, int device,
                      int64_t address, int64_t byte_offset) {
  auto* made = new MadeUp;
  made->shape.assign(shape.begin(), shape.end());
  made->strides.assign(strides.begin(), strides.end());
  auto& managed = made->managed;
  managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  managed.manager_ctx = made;
  managed.deleter = [](DLManagedTensorVersioned* self) { delete static_cast<MadeUp*>(self->manager_ctx); };
  managed.dl_tensor = {reinterpret_cast<void*>(address),
                       {static_cast<DLDeviceType>(kind), device},
                       static_cast<int>(made->shape.size()),
                       {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1},
                       made->shape.data(),
                       made->strides.data(),
                       static_cast<uint64_t>(byte_offset)};
  return tvm::ffi::Tensor::FromDLPackVersioned(&managed);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make, make);
"""
CODES = {torch.int32: (0, 32), torch.float32: (2, 32), torch.float64: (2, 64), torch.bfloat16: (4, 16)}  # of DLPack
CPU, CUDA = 1, 2


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


@dataclass(frozen=True)
class MadeUp:
    """A tensor in words. Every one of a call has an address of its own, far from the others'."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    strides: tuple[int, ...] | None = None
    address: int = field(default=0)
    device: int = 0
    kind: int = CUDA
    byte_offset: int = 0

    def made(self, make: Callable[..., Any]) -> Any:
        strides = contiguous(self.shape) if self.strides is None else self.strides
        return make(self.shape, strides, *CODES[self.dtype], self.kind, self.device, self.address, self.byte_offset)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    path = tmp_path_factory.mktemp("made_up") / "made_up.cpp"
    path.write_text(MADE_UP)
    return load_jit("made_up", cpp_files=[path], header_only=False, target=HOPPER).make


def placed(**tensors: MadeUp) -> dict[str, MadeUp]:
    return {name: replace(t, address=(1 + i) << 32) for i, (name, t) in enumerate(tensors.items())}


def collapse(*batch: int, hidden: int = 16) -> dict[str, MadeUp]:
    return placed(
        out=MadeUp((*batch, hidden), torch.bfloat16),
        residual=MadeUp((*batch, 4, hidden), torch.bfloat16),
        pre=MadeUp((*batch, 4)),
    )


def collapse_backward(tokens: int = 6, hidden: int = 16) -> dict[str, MadeUp]:
    return placed(
        grad_residual=MadeUp((tokens, 4, hidden), torch.bfloat16),
        grad_pre=MadeUp((tokens, 4)),
        grad=MadeUp((tokens, hidden), torch.bfloat16),
        residual=MadeUp((tokens, 4, hidden), torch.bfloat16),
        pre=MadeUp((tokens, 4)),
    )


D = 128


def factors(*batch: int) -> dict[str, MadeUp]:
    matrices = MadeUp((*batch, D, D))
    return placed(
        T=matrices, J=matrices, A=matrices, B=matrices, alpha=MadeUp((*batch, D)), info=MadeUp(batch, torch.int32)
    )


@pytest.fixture(scope="module")
def entries(shared_cache) -> dict[str, Callable[..., None]]:
    collapse_module = mhc_pre_h_aggregate.build(HOPPER).load()
    factors_module = vdn_delta_factors.build(HOPPER, D).load()
    return {
        "forward": collapse_module.forward,
        "backward": collapse_module.backward,
        "run": lambda T, J, A, B, alpha, info: factors_module.run(T, J, A, B, alpha, 1.0, 1.0, info),
    }


GOOD = {
    "forward": [collapse(6), collapse(2, 3), collapse(1), collapse(6, hidden=3)],
    "backward": [collapse_backward()],
    "run": [factors(6), factors(2, 3), factors(1), factors()],
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run the kernel, on memory that isn't there")
@pytest.mark.parametrize(("entry", "tensors"), [(entry, good) for entry, some in GOOD.items() for good in some])
def test_the_sound_ones_pass_every_check(entries, make, entry, tensors):
    """So each refusal below is for the one thing that it changes. The device is the first thing after the checks."""
    with pytest.raises(RuntimeError, match="cudaGetDevice"):
        entries[entry](*(tensor.made(make) for tensor in tensors.values()))


def changed(tensors: dict[str, MadeUp], name: str, **changes: Any) -> dict[str, MadeUp]:
    return {**tensors, name: replace(tensors[name], **changes)}


def refused(entries, make, entry: str, tensors: dict[str, MadeUp], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        entries[entry](*(tensor.made(make) for tensor in tensors.values()))


EACH = [(entry, name) for entry, (first, *_) in GOOD.items() for name in first]
each = pytest.mark.parametrize(("entry", "name"), EACH)


@each
def test_a_tensor_without_memory_is_refused(entries, make, entry, name):
    """The null pointer would reach the kernel. Torch has such tensors: `torch._efficientzerotensor`."""
    tensors = changed(GOOD[entry][0], name, address=0)
    refused(entries, make, entry, tensors, f"{name}: expected a tensor with memory, not the null pointer, got")


@each
def test_a_byte_offset_is_refused(entries, make, entry, name):
    """DLPack may have the data begin behind its pointer. No kernel here adds it."""
    tensors = changed(GOOD[entry][0], name, byte_offset=64)
    refused(entries, make, entry, tensors, f"{name}: expected a tensor that begins at its data pointer")


@each
def test_memory_of_another_device_is_refused(entries, make, entry, name):
    first = {"forward": "residual", "backward": "residual", "run": "A"}[entry]  # the others belong where this one is
    if name != first:
        refused(entries, make, entry, changed(GOOD[entry][0], name, device=1), f"{name}: expected a tensor on cuda:0")
    on_the_cpu = changed(GOOD[entry][0], name, kind=CPU)
    refused(entries, make, entry, on_the_cpu, f"{name}: expected a CUDA tensor")


@each
def test_another_dtype_is_refused(entries, make, entry, name):
    good = GOOD[entry][0]
    tensors = changed(good, name, dtype=torch.float64)
    expected = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32"}[good[name].dtype]
    refused(entries, make, entry, tensors, f"{name}: expected {expected}, got float64[")


@pytest.mark.parametrize("name", ["out", "pre"])
@pytest.mark.parametrize("batch", [(6,), (3, 2), (1, 6), (2, 3, 1)])
def test_a_collapse_of_other_batch_dimensions_is_refused(entries, make, name, batch):
    """As many samples, but not the same dimensions: taken as one they would fit."""
    tensors = {**collapse(2, 3), name: collapse(*batch)[name]}
    refused(entries, make, "forward", tensors, f"{name}: expected leading dimensions [2, 3], got")


@pytest.mark.parametrize("name", ["T", "J", "B", "alpha", "info"])
@pytest.mark.parametrize("batch", [(6,), (3, 2), (1, 6), (2, 3, 1)])
def test_factors_of_other_batch_dimensions_are_refused(entries, make, name, batch):
    tensors = {**factors(2, 3), name: factors(*batch)[name]}
    refused(entries, make, "run", tensors, f"{name}: expected leading dimensions [2, 3], got")


UNEVEN = {"run": {"A": (D * D * 4, D * D, D, 1), "alpha": (D * 4, D, 1)}, "forward": {"pre": (16, 4, 1)}}
SHAPES = {
    "forward": [("residual", (6, 3, 16), None, "shape [*, 4, *]"), ("residual", (16,), None, "at least 2 dimensions")],
    "run": [
        ("A", (6, D, 64), None, "shape [6, 128, 128]"),
        ("A", (D,), None, "at least 2 dimensions"),
        ("A", (6, D, D), (D * D, 1, D), "strides [*, *, 1]"),
        ("T", (6, D, D), (D * D * 2, D * 2, 1), "strides [*, 128, 1]"),
        ("J", (6, D, D), (D * D - 4, D, 1), "matrices that don't overlap, a batch stride of at least 16384"),
        ("alpha", (6, 64), None, "shape [6, 128]"),
        ("info", (6,), (2,), "strides [1]"),
    ],
}


@pytest.mark.parametrize(
    ("entry", "name", "strides"), [(e, n, s) for e, some in UNEVEN.items() for n, s in some.items()]
)
def test_a_batch_that_lies_unevenly_is_refused(entries, make, entry, name, strides):
    tensors = changed(GOOD[entry][1], name, strides=strides)
    refused(entries, make, entry, tensors, f"{name}: expected leading dimensions that lie evenly in memory, got")


@pytest.mark.parametrize(
    ("entry", "name", "shape", "strides", "words"), [(entry, *case) for entry, some in SHAPES.items() for case in some]
)
def test_other_shapes_and_strides_are_refused(entries, make, entry, name, shape, strides, words):
    tensors = changed(GOOD[entry][0], name, shape=shape, strides=strides)
    refused(entries, make, entry, tensors, f"{name}: expected {words}, got")


@each
def test_half_an_element_is_no_address(entries, make, entry, name):
    good = GOOD[entry][0]
    size = good[name].dtype.itemsize
    tensors = changed(good, name, address=good[name].address + size // 2)
    refused(entries, make, entry, tensors, f"{name}: expected data aligned to {size} bytes, got")


PAIRS = [(a, b) for a in ("T", "J", "info") for b in ("T", "J", "A", "B", "alpha") if a != b and (a, b) != ("J", "T")]


@pytest.mark.parametrize("where", [0, 1, -1])
@pytest.mark.parametrize(("written", "other"), PAIRS)
def test_memory_that_is_written_belongs_to_one_tensor(entries, make, written, other, where):
    """At the same address, and with one last or first element in common."""
    tensors = factors(6)
    elements = {name: 6 * D * (1 if name == "alpha" else D) for name in tensors} | {"info": 6}
    shift = {0: 0, 1: 4 * (elements[other] - 1), -1: -4 * (elements[written] - 1)}[where]
    address = tensors[other].address + shift
    refused(entries, make, "run", changed(tensors, written, address=address), f"{written} overlaps {other} in memory")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run the kernel, on memory that isn't there")
@pytest.mark.parametrize("order", [("T", "J"), ("J", "T")])
def test_outputs_may_take_turns_in_one_buffer(entries, make, order):
    """As `buffer[:, 0]` and `buffer[:, 1]` of shape [N, 2, d, d]; a matrix less between them, and they overlap."""
    one, other = order
    strides = (2 * D * D, D, 1)
    tensors = changed(changed(factors(6), one, strides=strides), other, strides=strides)
    beside = changed(tensors, other, address=tensors[one].address + 4 * D * D)
    with pytest.raises(RuntimeError, match="cudaGetDevice"):
        entries["run"](*(tensor.made(make) for tensor in beside.values()))
    within = changed(tensors, other, address=tensors[one].address + 4 * D * (D - 1))
    refused(entries, make, "run", within, "T overlaps J in memory")


@pytest.mark.parametrize("entry", GOOD)
def test_of_nothing_there_is_nothing_to_check_or_launch(entries, make, entry):
    """No samples: torch has no memory for them either."""
    nothing = {"forward": collapse(0), "backward": collapse_backward(0), "run": factors(0)}[entry]
    entries[entry](*(replace(tensor, address=0).made(make) for tensor in nothing.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["A", "B", "alpha"])
def test_torchs_own_tensors_without_memory_are_refused(name):
    tensors = {"A": torch.zeros(2, D, D), "B": torch.ones(2, D, D), "alpha": torch.ones(2, D)}
    on_gpu = {key: tensor.cuda() for key, tensor in tensors.items()}
    on_gpu[name] = torch._efficientzerotensor(tensors[name].shape, device="cuda")
    for _ in range(2):  # not loaded yet, and loaded
        with pytest.raises(ValueError, match=f"{name}: expected a tensor with memory"):
            vdn_delta_factors.vdn_delta_factors(**on_gpu)


def test_the_test_makes_up_what_it_says(make, tmp_path: Path):
    tensor = MadeUp((2, 3), torch.bfloat16, address=256).made(make)
    assert (tuple(tensor.shape), tuple(tensor.strides), str(tensor.dtype)) == ((2, 3), (3, 1), "bfloat16")
    assert str(tensor.device) == "cuda:0"
