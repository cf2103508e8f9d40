"""Arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import torch

from jit_kernels.dispatch import OPERATORS, Operator
from jit_kernels.jit.arch import Target


class OperatorName(click.ParamType):
    name = "operator"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Operator:
        if value not in OPERATORS:
            self.fail(f"{value!r} is no operator: expected {', '.join(OPERATORS)}", param, ctx)
        return OPERATORS[value]

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in OPERATORS if name.startswith(incomplete)]


class Targets(click.ParamType):
    name = "arch"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Target, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(Target.parse(part) for part in value.split(",") if part.strip())
        except ValueError as error:
            self.fail(str(error), param, ctx)


operators_argument: Callable[..., Any] = click.argument(
    "operators",
    metavar="[OPERATOR]...",
    type=OperatorName(),
    nargs=-1,
    callback=lambda context, parameter, value: value or tuple(OPERATORS.values()),
)


def device_of(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise click.UsageError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device
