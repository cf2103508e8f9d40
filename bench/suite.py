"""What a benchmark is made of: input sizes, and the candidates that take turns on them.

An operator's suites stand in ``bench/peers/<operator>.py`` as ``SUITES``. One that has none is measured on the samples
of its workload, beside the workload's baseline.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from jit_kernels.bench.record import CeilingName, Direction
from torch import Tensor

from jit_kernels.dispatch import Operator, cuda_support
from jit_kernels.jit.arch import Target

Call = Callable[[], Any]
Prepare = Callable[..., Call]  # from one set of inputs to a call without arguments that returns a tensor or a tuple


class Build(Protocol):
    """What can be compiled ahead of a run, side by side with others: a `Kernel`, or a peer's own."""

    def compile(self) -> Any: ...


class AbsentError(Exception):
    """A candidate can't be had here; the message says why, and how it could."""


@dataclass
class Budget:
    """Seconds that torch.compile may take in a run, all shapes together."""

    seconds: float = 60.0
    spent: float = 0.0


@dataclass(frozen=True)
class Setting:
    """Where a run happens, and what it was given."""

    device: torch.device
    sglang: Path | None = None  # SGLang's kernels/jit folder
    compiling: Budget = field(default_factory=Budget)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Entrant:
    """A candidate as a suite lists it.

    ``have(setting)`` gives what prepares its calls, or raises `AbsentError`. The bounds are the largest relative
    Frobenius errors of a sample that its gate lets pass, one for each output.
    """

    name: str
    what: str
    how: str
    have: Callable[[Setting], Prepare]
    bounds: tuple[float, ...]
    ours: bool = False
    unit: CeilingName = "ffma"  # whose arithmetic rate it is held against
    waits: bool = False  # its calls wait for the device, which a CUDA graph can't capture
    same_bytes_as: Callable[[Setting], Prepare] | None = None  # the gate also compares bytes with this
    packages: tuple[str, ...] = ()  # what it is made of, where that is others'

    def versions(self) -> dict[str, str]:
        """Of those of its packages that are installed."""
        found = {}
        for package in self.packages:
            with suppress(metadata.PackageNotFoundError):
                found[package] = metadata.version(package)
        return found


@dataclass(frozen=True)
class Case:
    """One input size. ``make(generator, count)`` draws ``count`` samples: tokens, matrices."""

    label: str
    parameters: dict[str, int]  # the first one counts samples
    make: Callable[[torch.Generator, int], tuple[Tensor, ...]]
    flops: int
    quick: bool = False  # part of the short run
    cpu: bool = False  # small enough for a CPU
    detail: bool = False  # its kernels are counted by the profiler
    host: bool = False  # its host time is measured: the device must be the faster one

    @property
    def count(self) -> int:
        return next(iter(self.parameters.values()))

    def sets(self, generator: torch.Generator, sets: int) -> list[tuple[Tensor, ...]]:
        """Inputs ``sets`` times over, all different, contiguous, drawn at once."""
        drawn = self.make(generator, sets * self.count)
        return list(zip(*(tensor.split(self.count) for tensor in drawn), strict=True))


@dataclass(frozen=True)
class Suite:
    """One operator in one direction."""

    operator: str
    direction: Direction
    cases: tuple[Case, ...]
    entrants: tuple[Entrant, ...]
    gold: Callable[..., tuple[Tensor, ...]]  # the inputs in float64 → the outputs
    outputs: tuple[str, ...]
    families: tuple[Case, ...] = ()  # inputs of all kinds of hardness, for accuracy alone
    inverted: Callable[..., Tensor] | None = None  # I plus these matrices is inverted: its condition says how hard
    builds: Callable[[Setting, Target], Sequence[Build]] | None = None  # further kernels, to be compiled side by side

    def of(self, rows: str, on_gpu: bool) -> Suite:
        """With those cases alone that a set of rows holds, on a CPU those that it can bear."""
        cases = [case for case in self.cases if (rows == "full" or case.quick) and (on_gpu or case.cpu)]
        families = [case for case in self.families if rows == "full" or case.quick]
        return replace(self, cases=tuple(cases), families=tuple(families))


def suites(operator: Operator) -> Sequence[Suite]:
    name = f"jit_kernels.bench.peers.{operator.name}"
    if importlib.util.find_spec(name) is not None:
        return importlib.import_module(name).SUITES
    return [_of_workload(operator)]


def outputs_of(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def gradients_of(
    forward: Callable[..., Any], upstream: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    """The forward runs now; what comes back runs autograd's backward, as often as it is called."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        made = outputs_of(forward(*leaves))
    return partial(torch.autograd.grad, made, leaves, tuple(upstream), retain_graph=True)


def gradient_gold(gold: Callable[..., Any], outputs: int) -> Callable[..., tuple[Tensor, ...]]:
    """Gradients by autograd through a forward's gold; the first ``outputs`` arguments come from upstream."""
    return lambda *args: gradients_of(gold, args[:outputs], args[outputs:])()


def fused(
    call: Callable[..., Any], name: str = "jit_kernels", what: str = "the fused kernel", **fields: Any
) -> Entrant:
    """Ours where the device has a fused kernel: ``call(*inputs, backend="fused")``."""

    def have(setting: Setting) -> Prepare:
        support = cuda_support(torch.empty(0, device=setting.device))
        if not support:
            raise AbsentError(support.reason)
        return partial(partial, call, backend="fused")

    return Entrant(name=name, what=what, how="this package, on an NVIDIA GPU", have=have, ours=True, **fields)


def fallback(call: Callable[..., Any], **fields: Any) -> Entrant:
    """Ours on every other device: ``call(*inputs, backend="torch")``."""

    def have(setting: Setting) -> Prepare:
        if cuda_support(torch.empty(0, device=setting.device)):
            raise AbsentError(f"on {setting.device} the fused kernel takes its place")
        return partial(partial, call, backend="torch")

    return Entrant(name="jit_kernels fallback", what="plain torch", how="this package", have=have, ours=True, **fields)


def function(call: Callable[..., Any]) -> Callable[[Setting], Prepare]:
    """How to have a candidate that is a function and always there."""
    return lambda setting: partial(partial, call)


def autograd(forward: Callable[..., Any], outputs: int) -> Callable[[Setting], Prepare]:
    """How to have a backward that is autograd's through a forward; the first ``outputs`` inputs come from upstream."""
    return lambda setting: lambda *inputs: gradients_of(forward, inputs[:outputs], inputs[outputs:])


def _of_workload(operator: Operator) -> Suite:
    workload = operator.workload
    bounds = tuple(tolerance.norm for tolerance in workload.outputs.values())
    return Suite(
        operator=operator.name,
        direction="forward",
        cases=tuple(
            Case(
                sample.label,
                {"count": sample.count},
                sample.make,
                flops=0,
                quick=True,
                cpu=sample.count <= sample.cpu_count,
            )
            for sample in workload.samples
        ),
        entrants=(
            fused(operator, bounds=bounds),
            fallback(operator, bounds=bounds),
            Entrant(workload.baseline_name, "what users run today", "torch", function(workload.baseline), bounds),
        ),
        gold=workload.gold,
        outputs=tuple(workload.outputs),
    )
