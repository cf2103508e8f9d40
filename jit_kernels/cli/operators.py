"""``jit-kernels list``: the operators, the builds they need, and what of it is there."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click

from jit_kernels.cli.arguments import Targets, operators_argument
from jit_kernels.cli.output import emit, json_option, rows
from jit_kernels.dispatch import Operator
from jit_kernels.jit import store
from jit_kernels.jit.arch import Target


@click.command("list")
@operators_argument
@click.option("--arch", type=Targets(), default=(), help="Arch targets [default: this machine's GPUs and the cache's].")
@json_option
def list_operators(operators: tuple[Operator, ...], arch: tuple[Target, ...], as_json: bool) -> None:
    """List the operators, the builds that users need of them, and for which arch targets they are built."""
    targets = arch or _targets()
    found: list[dict[str, Any]] = []
    for operator in operators:
        for parameters in operator.warmup:
            entries = {target: operator.build(target, **parameters).find() for target in targets}
            found.append(
                {
                    "operator": operator.name,
                    "schema": operator.schema,
                    "parameters": parameters,
                    "built": {str(target): str(entry.folder) for target, entry in entries.items() if entry},
                    "missing": [str(target) for target, entry in entries.items() if not entry],
                }
            )
    emit(
        {"schema": 1, "builds": found},
        as_json,
        lambda: [
            rows(
                None,
                ("operator", "parameters", "built for", "not built for"),
                (
                    (
                        one["operator"],
                        ", ".join(f"{name} {value}" for name, value in one["parameters"].items()),
                        ", ".join(one["built"]),
                        ", ".join(one["missing"]),
                    )
                    for one in found
                ),
            )
        ],
    )


def _targets() -> tuple[Target, ...]:
    found = set(Target.of_all_devices())
    for entry in store.listing():
        with suppress(ValueError):  # a folder of somebody else's making
            found.add(Target.parse(entry.folder.parent.name))
    return tuple(sorted(found))
