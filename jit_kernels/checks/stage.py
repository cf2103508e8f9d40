"""An operator's forward and its gradient, each as one function of rows: what all four checks work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jit_kernels.checks.workload import Tolerance
from jit_kernels.dispatch import Operator

Rows = tuple[Tensor, ...]


class MissingBackwardError(Exception):
    """A tensor argument of an operator has no gradient, or none that is held to anything."""


@dataclass(frozen=True)
class Stage:
    """``run(*arguments, backend=...)`` gives a tensor for each name in ``tolerances``; ``gold(*arguments)`` does too.

    The gradient's arguments are the operator's own, and then the upstream gradient of each output.
    """

    name: str  # forward or gradient
    tolerances: Mapping[str, Tolerance]
    run: Callable[..., Rows]
    gold: Callable[..., Rows]
    backend: str

    def __call__(self, *arguments: Tensor) -> Rows:
        return self.run(*arguments, backend=self.backend)

    def fallback(self, *arguments: Tensor) -> Rows:
        """What the fallback gives on the CPU."""
        return self.run(*(tensor.cpu() for tensor in arguments), backend="torch")


def forward(operator: Operator, backend: str) -> Stage:
    workload = operator.workload

    def run(*inputs: Tensor, backend: str) -> Rows:
        return as_tuple(operator(*inputs, backend=backend))

    return Stage("forward", workload.outputs, run, workload.gold, backend)


def gradient(operator: Operator, backend: str, count: int) -> Stage:
    """Of an operator with ``count`` tensor arguments."""
    workload = operator.workload
    names = operator.arguments[:count]
    unstated = [name for name in names if name not in workload.gradients]

    def through(function: Callable[..., Rows], rows: Rows) -> Rows:
        leaves = [tensor.detach().requires_grad_() for tensor in rows[:count]]
        with torch.enable_grad():
            grads = torch.autograd.grad(function(*leaves), leaves, rows[count:], allow_unused=True)
        missing = [name for name, grad in zip(names, grads, strict=True) if grad is None]
        if missing:
            raise MissingBackwardError(f"no gradient reaches {', '.join(missing)}")
        return grads

    def run(*rows: Tensor, backend: str) -> Rows:
        if operator.gradient is None:
            raise MissingBackwardError("the operator has no backward")
        if unstated:
            raise MissingBackwardError(f"the workload states no tolerance for the gradient of {', '.join(unstated)}")
        return through(lambda *leaves: as_tuple(operator(*leaves, backend=backend)), rows)

    def gold(*rows: Tensor) -> Rows:
        return through(workload.gold, rows)

    tolerances = {f"grad_{name}": workload.gradients[name] for name in names if name not in unstated}
    return Stage("gradient", tolerances, run, gold, backend)


def random_upstream(operator: Operator, inputs: Rows, generator: torch.Generator) -> Rows:
    """A random gradient of each output. Drawn for the packed rows, and so the same for a row wherever it stands."""
    outputs = as_tuple(operator.outputs(*operator.complete(inputs)))
    return tuple(torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype) for out in outputs)


def as_tuple(out: Tensor | Rows) -> Rows:
    return out if isinstance(out, tuple) else (out,)
