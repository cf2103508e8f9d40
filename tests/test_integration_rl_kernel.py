"""RL-Kernel's four checks, by a stand-in for its tool: written to what the tool documents, sharing no code with it.

Every value is a function of (sample, position) alone, so a layout changes nothing but the shape of the calls.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import types
import zlib
from collections.abc import Iterator
from dataclasses import make_dataclass

import pytest
import torch
from torch import Tensor

from jit_kernels.checks.compare import same_bytes
from jit_kernels.integrations import IntegrationError, rl_kernel
from jit_kernels.ops.mhc_pre_h_aggregate import mhc_pre_h_aggregate

Key = tuple[str, int]
HIDDEN = 4096
SAMPLES = {"prompt": 7, "long": 37, "one": 1, "answer": 20}  # tokens of each
CHUNK = 5
# The tool's (atol, rtol) for a reduction.
FORWARD = {torch.bfloat16: (5e-2, 2e-2), torch.float32: (1e-4, 1e-4)}
GRADIENT = {torch.bfloat16: (1e-1, 2e-2), torch.float32: (1e-4, 1e-4)}


def active(key: Key) -> bool:
    return key[1] % 4 != 3


def keys(sample: str) -> list[Key]:
    return [(sample, position) for position in range(SAMPLES[sample])]


def chunks(rows: list[Key]) -> list[list[Key]]:
    return [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]


def padded(left: bool) -> list[Key | None]:
    width = max(SAMPLES.values()) + 2
    rows: list[Key | None] = []
    for sample in SAMPLES:
        filling: list[Key | None] = [None] * (width - SAMPLES[sample])
        rows += filling + keys(sample) if left else keys(sample) + filling
    return rows


def layouts() -> dict[str, list[list[Key | None]]]:
    """The seven layouts: for each the calls, and for each call its rows, None where it is padded."""
    packed = [key for sample in SAMPLES for key in keys(sample)]
    return {
        "packed": [packed],
        "chunked": chunks(packed),
        "each sample": [keys(sample) for sample in SAMPLES],
        "each sample chunked": [piece for sample in SAMPLES for piece in chunks(keys(sample))],
        "permuted": [[key for sample in reversed(SAMPLES) for key in keys(sample)]],
        "padded left": [padded(left=True)],
        "padded right": [padded(left=False)],
    }


@functools.cache
def draw(what: str, key: Key, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{what} {key}".encode())))


def fill(rows: list[Key | None], *shape: int, what: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One seeded normal tensor for each logical position; zeros for padding."""
    nothing = torch.zeros(shape)
    return torch.stack([nothing if key is None else draw(what, key, shape) for key in rows]).to(device, dtype)


class Tool:
    """Judges a candidate provider against a gold one, on a device and in a dtype of residual."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16, hidden: int = HIDDEN):
        self.device, self.dtype, self.hidden = device, dtype, hidden
        self.registration = rl_kernel.registration()

    def inputs(self, rows: list[Key | None]) -> dict[str, Tensor]:
        return {
            "residual": fill(rows, 4, self.hidden, what="residual", dtype=self.dtype, device=self.device),
            "pre": fill(rows, 4, what="pre", dtype=torch.float32, device=self.device),
        }

    def upstream(self, rows: list[Key | None]) -> Tensor:
        """Random, and zero for what doesn't take part in the loss."""
        filled = fill(rows, self.hidden, what="upstream", dtype=self.dtype, device=self.device)
        taking_part = [key is not None and active(key) for key in rows]
        return filled * torch.tensor(taking_part, device=self.device).unsqueeze(-1)

    def forward(self, provider, calls) -> dict[Key, Tensor]:
        return self.aligned(calls, ([provider.forward(**self.inputs(rows))] for rows in calls))

    def backward(self, provider, calls) -> dict[Key, Tensor]:
        def results() -> Iterator[list[Tensor]]:
            for rows in calls:
                found = self.registration.gradients(provider, self.upstream(rows), **self.inputs(rows))
                yield [found[tensor.name] for tensor in self.registration.adapter.tensors]

        return self.aligned(calls, results())

    def aligned(self, calls, results) -> dict[Key, Tensor]:
        """The active tokens' results by (sample, position), each as one vector."""
        found = {}
        for rows, tensors in zip(calls, results, strict=True):
            for row, key in enumerate(rows):
                if key is not None and active(key):
                    found[key] = torch.cat([tensor[row].flatten() for tensor in tensors])
        assert found.keys() == {key for sample in SAMPLES for key in keys(sample) if active(key)}
        return found

    def judge(self, candidate, gold) -> list[str]:
        """The checks that failed, of the four."""
        inputs = self.inputs(layouts()["packed"][0])
        failed = []
        out, right = candidate.forward(**inputs), gold.forward_fp32(**inputs)
        if not (right.dtype == torch.float32 and self.near(out, right, *FORWARD[self.dtype])):
            failed.append("forward accuracy")
        if not self.invariant(self.forward, candidate):
            failed.append("forward invariance")
        try:
            found, wanted = self.by_autograd(candidate.forward), self.by_autograd(gold.forward_fp32)
            explicit = self.registration.gradients(candidate, self.upstream(layouts()["packed"][0]), **inputs).values()
            tolerance = GRADIENT[self.dtype]
            for these in (found, explicit):
                if not all(self.near(a, b, *tolerance) for a, b in zip(these, wanted, strict=True)):
                    failed.append("gradient accuracy")
            if not self.invariant(self.backward, candidate):
                failed.append("gradient invariance")
        except (RuntimeError, IntegrationError):  # a missing backward counts as both
            failed += ["gradient accuracy", "gradient invariance"]
        return list(dict.fromkeys(failed))

    def by_autograd(self, function) -> tuple[Tensor, ...]:
        rows = layouts()["packed"][0]
        leaves = {name: tensor.requires_grad_() for name, tensor in self.inputs(rows).items()}
        out = function(**leaves)
        names = self.registration.spec.grad_input_names
        return torch.autograd.grad(out, [leaves[name] for name in names], self.upstream(rows).to(out.dtype))

    def invariant(self, run, provider) -> bool:
        found = {name: run(provider, calls) for name, calls in layouts().items()}
        canonical = found.pop("packed")
        return all(same_bytes(canonical.values(), [other[key] for key in canonical]) for other in found.values())

    @staticmethod
    def near(found: Tensor, right: Tensor, atol: float, rtol: float) -> bool:
        return found.shape == right.shape and torch.allclose(found.float(), right.float(), atol=atol, rtol=rtol)


def load(path: str):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)()


def provider_of(device: torch.device):
    spec = rl_kernel.registration().spec
    return load(spec.candidate_paths["cuda" if device.type == "cuda" else "pytorch"])


@pytest.mark.parametrize("hidden", [HIDDEN, 7168, 65])
def test_the_four_checks(device, hidden):
    spec = rl_kernel.registration().spec
    gold = load(spec.gold_path)
    assert spec.gold_method == "forward_fp32"
    assert Tool(device, hidden=hidden).judge(provider_of(device), gold) == []


def test_the_four_checks_in_float32():
    provider = rl_kernel.MhcPreHAggregate()
    assert Tool(torch.device("cpu"), torch.float32, hidden=513).judge(provider, rl_kernel.MhcPreHAggregateTorch()) == []


class Wrong(rl_kernel.MhcPreHAggregateTorch):
    """A provider with one fault."""

    def __init__(self, fault: str):
        self.fault = fault

    def forward(self, residual, pre):
        if self.fault == "streams in another order":
            pre = pre.flip(-1)
        if self.fault == "no autograd":
            residual, pre = residual.detach(), pre.detach()
        out = super().forward(residual, pre)
        # As a sum whose order depends on the number of rows would do.
        return torch.nextafter(out, out + 1) if self.fault == "depends on the batch" and len(out) < 10 else out

    def backward_fp32(self, grad_output, residual, pre):
        grad_residual, grad_pre = super().backward_fp32(grad_output, residual, pre)
        if self.fault == "gradient depends on the batch" and len(pre) < 10:
            grad_pre = torch.nextafter(grad_pre, grad_pre + 1)
        if self.fault == "wrong gradient":
            grad_pre = grad_pre * 1.5
        return grad_residual, grad_pre


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ("none", []),
        ("streams in another order", ["forward accuracy", "gradient accuracy"]),
        ("depends on the batch", ["forward invariance"]),
        ("wrong gradient", ["gradient accuracy"]),
        ("gradient depends on the batch", ["gradient invariance"]),
        ("no autograd", ["gradient accuracy", "gradient invariance"]),
    ],
)
def test_the_stand_in_finds_each_fault(fault, failed):
    tool = Tool(torch.device("cpu"), hidden=64)
    assert tool.judge(Wrong(fault), rl_kernel.MhcPreHAggregateTorch()) == failed


def test_a_missing_backward_is_a_failure():
    class Forward:
        forward = staticmethod(mhc_pre_h_aggregate)

    failed = Tool(torch.device("cpu"), hidden=64).judge(Forward(), rl_kernel.MhcPreHAggregateTorch())
    assert failed == ["gradient accuracy", "gradient invariance"]
    with pytest.raises(IntegrationError, match="Forward has no backward_fp32"):
        rl_kernel.gradients(Forward(), *torch.zeros(3))


def test_backward_fp32_keeps_the_products_unrounded(device, generator):
    residual = torch.randn(5, 4, 65, generator=generator).bfloat16().to(device)
    pre, grad = torch.randn(5, 4, generator=generator).to(device), torch.randn(5, 65, generator=generator)
    grad = grad.bfloat16().to(device)
    grad_residual, grad_pre = provider_of(device).backward_fp32(grad, residual, pre)
    assert grad_residual.dtype == grad_pre.dtype == torch.float32
    assert same_bytes([grad_residual], [grad.float().unsqueeze(-2) * pre.unsqueeze(-1)])
    leaves = [tensor.clone().requires_grad_() for tensor in (residual, pre)]
    rounded, by_autograd = torch.autograd.grad(provider_of(device)(*leaves), leaves, grad)
    assert same_bytes([grad_residual.bfloat16(), grad_pre], [rounded, by_autograd])


def test_the_gold_is_the_tree_before_its_last_rounding(device, generator):
    residual = torch.randn(5, 4, 65, generator=generator).bfloat16().to(device)
    pre = torch.randn(5, 4, generator=generator).to(device)
    gold = provider_of(device).forward_fp32(residual=residual, pre=pre)
    assert gold.dtype == torch.float32
    assert same_bytes([gold.bfloat16()], [provider_of(device).forward(residual=residual, pre=pre)])
    exact = (residual.double() * pre.double().unsqueeze(-1)).sum(-2)
    # Three float32 roundings, of a product and of two levels of sums: of nothing larger than the sum of the sizes.
    size = (residual.double() * pre.double().unsqueeze(-1)).abs().sum(-2)
    assert ((gold - exact).abs() <= ((1 + 2**-24) ** 3 - 1) * size).all()


def test_the_cuda_candidate_never_falls_back():
    with pytest.raises(RuntimeError, match="'fused' was asked for"):
        rl_kernel.MhcPreHAggregateCuda()(torch.ones(1, 4, 8).bfloat16(), torch.ones(1, 4))


# What goes into the tool's tables.


def test_inputs_follow_the_command_line():
    args = argparse.Namespace(batch=3, seq=5, normalized_dim=65, seed=7)
    made = rl_kernel.make_inputs(args, torch.bfloat16, torch.device("cpu"))
    assert {name: (tuple(t.shape), t.dtype) for name, t in made.items()} == {
        "residual": ((15, 4, 65), torch.bfloat16),
        "pre": ((15, 4), torch.float32),
    }
    assert rl_kernel.shape_name(args) == "15x4x65"
    again = rl_kernel.make_inputs(args, torch.bfloat16, torch.device("cpu"))
    assert same_bytes(list(made.values()), list(again.values()))
    other = rl_kernel.make_inputs(argparse.Namespace(**vars(args) | {"seed": 8}), torch.bfloat16, torch.device("cpu"))
    assert not torch.equal(made["pre"], other["pre"])
    assert rl_kernel.shape_name(argparse.Namespace()) == "32x4x4096"


def test_constant_inputs_and_another_mode():
    constant = argparse.Namespace(batch=1, seq=1, normalized_dim=8, input_mode="constant", constant_value=0.5)
    made = rl_kernel.make_inputs(constant, torch.float32, torch.device("cpu"))
    assert (made["residual"].unique().tolist(), made["pre"].unique().tolist()) == ([0.5], [pytest.approx(0.51)])
    with pytest.raises(ValueError, match="random or constant; got 'ramp'"):
        rl_kernel.make_inputs(argparse.Namespace(input_mode="ramp"), torch.float32, torch.device("cpu"))


@pytest.fixture
def tool(monkeypatch):
    """A package in RL-Kernel's place, whose types have the given fields."""

    def put(**modules: tuple[str, str]) -> None:
        package = types.ModuleType("rl_engine")
        package.__spec__ = importlib.machinery.ModuleSpec("rl_engine", None)
        for name in ("rl_engine", "rl_engine.kernels", rl_kernel.TOOL):
            monkeypatch.setitem(sys.modules, name, package if name == "rl_engine" else types.ModuleType(name))
        for name, (record, fields) in modules.items():
            module = types.ModuleType(f"{rl_kernel.TOOL}.{name}")
            setattr(module, record, make_dataclass(record, fields.split(), frozen=True))
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return put


SPEC = "name op_class gold_path gold_method candidate_paths grad_input_names"
TYPES = {
    "operator_specs": ("OperatorSpec", SPEC),
    "gradient_invariance": ("GradientTensorSpec", "name kind source_input"),
    "gradient_adapters": (
        "GradientAdapterSpec",
        "op_name chain_node op_class spec_name tensors requirement source_files",
    ),
}


def test_the_registration_comes_in_the_tools_own_types(tool):
    ours = rl_kernel.registration()
    assert isinstance(ours.spec, rl_kernel.OperatorSpec)
    tool(**TYPES)
    theirs = rl_kernel.registration()
    for mine, its in ((ours.spec, theirs.spec), (ours.adapter, theirs.adapter)):
        assert type(its) is not type(mine)
        assert {**vars(its), "tensors": None} == {name: vars(mine)[name] for name in vars(its)} | {"tensors": None}
    assert [vars(tensor) for tensor in theirs.adapter.tensors] == [vars(tensor) for tensor in ours.adapter.tensors]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"operator_specs": ("OperatorSpec", SPEC + " tolerance_class")}, "operator_specs.OperatorSpec"),
        ({"gradient_adapters": ("AdapterSpec", "op_name")}, "gradient_adapters.GradientAdapterSpec"),
    ],
)
def test_another_form_of_the_tool_is_refused_by_name(tool, changed, named):
    tool(**(TYPES | changed))
    with pytest.raises(IntegrationError, match=named):
        rl_kernel.registration()


def test_importing_the_integration_imports_no_rl_kernel(run_python):
    run_python(
        "import sys, jit_kernels.integrations.rl_kernel as r; r.registration(); assert 'rl_engine' not in sys.modules"
    )
