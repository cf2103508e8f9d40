"""``jit-kernels check``: do the operators keep their promises on this machine?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch

from jit_kernels.checks.provenance import provenance
from jit_kernels.checks.run import Result
from jit_kernels.checks.run import check as run_check
from jit_kernels.cli.arguments import operators_argument
from jit_kernels.cli.output import emit, json_option, progress, rows
from jit_kernels.dispatch import BACKENDS, Operator


@click.command()
@operators_argument
@click.option(
    "--backend", type=click.Choice(BACKENDS), default="auto", help="What to check; auto takes what a call would."
)
@click.option("--device", default=None, help="cuda, cuda:1, cpu … (default: cuda where there is one).")
@click.option(
    "--repeats", type=click.IntRange(1), default=None, help="Calls to compare [default: 100 on a GPU, 3 on a CPU]."
)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write the JSON document to this file."
)
@json_option
@click.pass_context
def check(
    context: click.Context,
    operators: tuple[Operator, ...],
    backend: str,
    device: str | None,
    repeats: int | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Check operators on the workloads they were made for.

    For each: which implementation ran and why; error against float64, beside that of what it replaces; the same
    bytes over repeats, batch splits and the CPU fallback; time. Exits 1 if a promise is broken. On a CPU the
    workloads are smaller, and the table says so.
    """
    where = _device(device)
    repeats = repeats or (100 if where.type == "cuda" else 3)
    work = [(operator, sample) for operator in operators for sample in operator.workload.samples]
    results = []
    with progress() as bar:
        task = bar.add_task("checking", total=len(work))
        for operator, sample in work:
            bar.update(task, description=f"{operator.name} {sample.label}")
            results.append(run_check(operator, sample, where, backend, repeats))
            bar.advance(task)
    failed = [result for result in results if result.failures]
    origin = provenance(where)
    document = {
        "schema": 1,
        "provenance": origin,
        "ok": not failed,
        "results": [result.as_dict() for result in results],
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    emit(document, as_json, lambda: _tables(results, origin))
    if failed:
        context.exit(1)


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise click.UsageError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def _tables(results: list[Result], where: dict[str, Any]) -> Iterator[Any]:
    for operator in dict.fromkeys(result.operator for result in results):
        mine = [result for result in results if result.operator == operator]
        yield rows(
            f"{operator} on {where['device']}",
            (
                "input",
                "samples",
                "ran",
                "error",
                "of the baseline",
                "gradient error",
                "bytes",
                "ms",
                "baseline ms",
                "verdict",
            ),
            (
                (
                    result.sample,
                    result.count if result.count == result.full_count else f"{result.count} of {result.full_count}",
                    result.ran,
                    _errors(result.error),
                    _errors(result.baseline_error),
                    _errors(result.gradient_error),
                    f"{result.repeats} repeats, {result.splits} splits"
                    + (", fallback" * result.bytes_compared_with_fallback),
                    f"{result.milliseconds:.4f}",
                    f"{result.baseline_milliseconds:.4f} ({result.baseline})",
                    "FAILED" if result.failures else "ok",
                )
                for result in mine
            ),
        )
        for reason in dict.fromkeys(f"{result.ran}: {result.reason}" for result in mine):
            yield f"ran {reason}"
        if any(result.count < result.full_count for result in mine):
            yield "no GPU: smaller workloads than users run"
        for result in mine:
            for failure in result.failures:
                yield f"FAILED {operator} {result.sample}: {failure}"
        yield ""


def _errors(errors: dict[str, float]) -> str:
    return "  ".join(f"{name} {error:.1e}" for name, error in errors.items())
