"""``jit-kernels check``: do the operators keep their promises on this machine?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from jit_kernels.checks.provenance import provenance
from jit_kernels.checks.result import CHECKS, Result
from jit_kernels.checks.run import check as run_check
from jit_kernels.cli.arguments import device_of, operators_argument
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
    """Hold operators to four checks, on the workloads they were made for.

    Forward accuracy and gradient accuracy: against float64, and the fallback's bytes where they are promised. Forward
    invariance and gradient invariance: the same bytes over repeats and however the rows are laid out. Also which
    implementation ran and why, and time and error beside those of what it replaces. Exits 1 if a check fails. On a CPU
    the workloads are smaller, and the table says so.
    """
    where = device_of(device)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)  # now, rather than lose the results
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


def _tables(results: list[Result], where: dict[str, Any]) -> Iterator[Any]:
    for operator in dict.fromkeys(result.operator for result in results):
        mine = [result for result in results if result.operator == operator]
        yield rows(
            f"{operator} on {where['device']}",
            (
                *("input", "rows", "ran", "error", "of the\nbaseline", "gradient error"),
                *(name.replace(" ", "\n") for name in CHECKS),
                *("ms", "baseline ms"),
            ),
            (
                (
                    result.sample,
                    result.count if result.count == result.full_count else f"{result.count} of {result.full_count}",
                    result.ran,
                    _errors(result.measured("forward accuracy")),
                    _errors(result.baseline_error),
                    _errors(result.measured("gradient accuracy")),
                    *_verdicts(result),
                    _time(result.milliseconds),
                    f"{_time(result.baseline_milliseconds)} ({result.baseline})",
                )
                for result in mine
            ),
        )
        yield from _notes(operator, mine)
        yield ""


def _notes(operator: str, results: list[Result]) -> Iterator[str]:
    for reason in dict.fromkeys(f"{result.ran}: {result.reason}" for result in results):
        yield escape(f"ran {reason}")
    details = [check.details for result in results for check in result.checks]
    for found in [found for found in details if "layouts" in found][:1]:
        repeats = f"{found['repeats']} repeat{'s' * (found['repeats'] != 1)}"
        yield f"bytes compared: {repeats}; layouts {', '.join(found['layouts'])}"
    for state in dict.fromkeys(found["fallback_bytes"] for found in details if "fallback_bytes" in found):
        yield f"bytes compared with the CPU fallback's: {state}"
    if any(result.count < result.full_count for result in results):
        yield "no GPU: smaller workloads than users run"
    for result in results:
        for failure in result.failures:
            yield escape(f"FAILED {operator} {result.sample}: {failure}")


def _verdicts(result: Result) -> Iterator[str]:
    found = {check.name: "FAILED" if check.failures else "ok" for check in result.checks}
    return (found.get(name, "not run") for name in CHECKS)


def _errors(errors: dict[str, float]) -> str:
    return "  ".join(f"{name} {error:.1e}" for name, error in errors.items())


def _time(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.4f}"
