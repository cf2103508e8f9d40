"""RL-Kernel's operator test tool: providers of the collapse, and what an entry in the tool's tables consists of.

The tool loads a provider by its path, calls ``forward(residual=…, pre=…)`` and, for gradients, ``backward_fp32``. Its
tables are plain Python in RL-Kernel's sources; `registration` gives the entries, in the tool's own types where it is
installed.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from jit_kernels.integrations import IntegrationError
from jit_kernels.ops.mhc_pre_h_aggregate import BACKWARD, STREAMS, mhc_pre_h_aggregate

NAME = "mhc_pre_h_aggregate"
TOOL = "rl_engine.kernels.gtest"
HIDDEN_SIZE, BATCH, LENGTH, SEED = 4096, 2, 16, 123  # what the tool takes where its command line names none


class MhcPreHAggregate:
    """The collapse as RL-Kernel calls it, with the implementation of the ambient backend.

    Shapes: residual ``[..., 4, hidden_size]``, pre ``[..., 4]`` float32, as `jit_kernels.mhc_pre_h_aggregate` has
    them; it also names the errors.
    """

    op_class: ClassVar[str] = "reduction"
    is_batch_invariant: ClassVar[bool] = True
    backend: ClassVar[str | None] = None

    def __call__(self, residual: Tensor, pre: Tensor) -> Tensor:
        return self.forward(residual, pre)

    def forward(self, residual: Tensor, pre: Tensor) -> Tensor:
        """``[..., hidden_size]`` in residual's dtype; differentiable."""
        return mhc_pre_h_aggregate(residual, pre, backend=self.backend)

    def forward_fp32(self, residual: Tensor, pre: Tensor) -> Tensor:
        """The gold: the same tree on residual widened to float32, not rounded to residual's dtype; differentiable.

        Always plain torch, whatever the provider's backend is.
        """
        return mhc_pre_h_aggregate(residual.float(), pre, backend="torch")

    def backward_fp32(self, grad_output: Tensor, residual: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        """grad_residual, its products not rounded to residual's dtype, and grad_pre: both float32.

        Args:
            grad_output: ``[..., hidden_size]`` in residual's dtype.
        """
        return BACKWARD(grad_output, residual, pre, [True, True], torch.float32, backend=self.backend)


class MhcPreHAggregateCuda(MhcPreHAggregate):
    """The fused kernel or an error, never a fallback: what the tool's provenance says ran is what ran."""

    backend = "fused"


class MhcPreHAggregateTorch(MhcPreHAggregate):
    """The fallback in plain torch, on any device."""

    backend = "torch"


@dataclass(frozen=True)
class OperatorSpec:
    """As the tool's own ``OperatorSpec``, where it isn't installed."""

    name: str
    op_class: str
    gold_path: str
    gold_method: str
    candidate_paths: dict[str, str]
    grad_input_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class GradientTensorSpec:
    """As the tool's own: a gradient's name, what its first dimension counts, and the input it belongs to."""

    name: str
    kind: str
    source_input: str


@dataclass(frozen=True)
class GradientAdapterSpec:
    """As the tool's own."""

    op_name: str
    chain_node: str
    op_class: str
    spec_name: str | None
    tensors: tuple[Any, ...]
    requirement: str
    source_files: tuple[str, ...]
    shape_dependent_bwd_accum: str = "forbidden"
    atomic_add: str = "forbidden"


@dataclass(frozen=True)
class Registration:
    """One operator for the tool's tables."""

    spec: Any  # for OP_SPECS
    make_inputs: Callable[[argparse.Namespace, torch.dtype, torch.device], dict[str, Tensor]]  # an input builder
    shape_name: Callable[[argparse.Namespace], str]
    adapter: Any  # for GRADIENT_ADAPTERS
    gradients: Callable[..., dict[str, Tensor]]  # what the adapter does: (provider, grad_output, residual, pre)


def registration() -> Registration:
    """What the tool needs to know of the collapse, in its own types if RL-Kernel is installed and in ours if not.

    Raises:
        IntegrationError: RL-Kernel is installed, and a type of its tool is missing or takes other fields.
    """
    here = f"{__name__}."
    spec = {
        "name": NAME,
        "op_class": MhcPreHAggregate.op_class,
        "gold_path": here + MhcPreHAggregateTorch.__name__,
        "gold_method": "forward_fp32",
        "candidate_paths": {
            "pytorch": here + MhcPreHAggregateTorch.__name__,
            "cuda": here + MhcPreHAggregateCuda.__name__,
        },
        "grad_input_names": ("residual", "pre"),
    }
    tensors = [
        _make(GradientTensorSpec, "gradient_invariance", name=name, kind="token", source_input=source)
        for name, source in GRADIENTS.items()
    ]
    adapter = {
        "op_name": NAME,
        "chain_node": NAME,
        "op_class": MhcPreHAggregate.op_class,
        "spec_name": NAME,
        "tensors": tuple(tensors),
        "requirement": "optional_fused",
        "source_files": (),  # the tool reads those of its own repository
    }
    return Registration(
        spec=_make(OperatorSpec, "operator_specs", **spec),
        make_inputs=make_inputs,
        shape_name=shape_name,
        adapter=_make(GradientAdapterSpec, "gradient_adapters", **adapter),
        gradients=gradients,
    )


GRADIENTS = {"dresidual": "residual", "dpre": "pre"}  # the tool's names of the gradients, and their inputs


def make_inputs(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """``residual [tokens, 4, hidden_size]`` and ``pre [tokens, 4]`` for the tool's command line.

    Args:
        args: ``batch``, ``seq``, ``normalized_dim`` (the hidden size), ``seed``, and ``input_mode``: ``random``
            (normal) or ``constant`` (``constant_value``; pre a hundredth more). What is missing takes the tool's
            defaults.

    Raises:
        ValueError: the input mode is neither.
    """
    tokens, hidden = _sizes(args)
    shapes = {"residual": ((tokens, STREAMS, hidden), dtype), "pre": ((tokens, STREAMS), torch.float32)}
    mode = getattr(args, "input_mode", "random")
    if mode == "constant":
        value = getattr(args, "constant_value", 0.25)
        return {
            name: torch.full(shape, value + place / 100, dtype=kind, device=device)
            for place, (name, (shape, kind)) in enumerate(shapes.items())
        }
    if mode != "random":
        raise ValueError(f"input_mode must be random or constant; got {mode!r}")
    seed = getattr(args, "seed", SEED)
    return {
        name: torch.randn(shape, generator=torch.Generator(device).manual_seed(seed + place), dtype=kind, device=device)
        for place, (name, (shape, kind)) in enumerate(shapes.items())
    }


def shape_name(args: argparse.Namespace) -> str:
    """A case's name, ``32x4x4096``: tokens, streams, hidden size."""
    tokens, hidden = _sizes(args)
    return f"{tokens}x{STREAMS}x{hidden}"


def gradients(provider: Any, grad_output: Tensor, residual: Tensor, pre: Tensor) -> dict[str, Tensor]:
    """The provider's gradients by the tool's names, both float32.

    Raises:
        IntegrationError: the provider has no ``backward_fp32``: the tool counts that as a failure.
    """
    backward = getattr(provider, "backward_fp32", None)
    if backward is None:
        raise IntegrationError(f"{type(provider).__name__} has no backward_fp32(grad_output, residual, pre)")
    return dict(zip(GRADIENTS, backward(grad_output, residual, pre), strict=True))


def _sizes(args: argparse.Namespace) -> tuple[int, int]:
    tokens = getattr(args, "batch", BATCH) * getattr(args, "seq", LENGTH)
    return tokens, getattr(args, "normalized_dim", HIDDEN_SIZE)


def _make(ours: type, module: str, **fields: Any) -> Any:
    """The tool's own type of the same name, filled; ours where RL-Kernel is not installed."""
    if find_spec("rl_engine") is None:
        return ours(**fields)
    try:
        theirs = getattr(importlib.import_module(f"{TOOL}.{module}"), ours.__name__)
        return theirs(**fields)
    except (ImportError, AttributeError, TypeError) as error:
        raise IntegrationError(
            f"RL-Kernel: {TOOL}.{module}.{ours.__name__} is not the type that jit_kernels was written for, with the "
            f"fields {', '.join(fields)}: {error}"
        ) from error
