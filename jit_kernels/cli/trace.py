"""``jit-kernels trace``: the operators as a data set for FlashInfer-Bench, and as a request for a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from rich.text import Text

from jit_kernels.checks.provenance import provenance
from jit_kernels.cli.arguments import OperatorName, Targets
from jit_kernels.cli.output import emit, json_option, progress, rows
from jit_kernels.dispatch import Operator
from jit_kernels.integrations import flashinfer_bench, kda
from jit_kernels.jit.arch import Target

folder_argument: Callable[..., Any] = click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
operators_argument: Callable[..., Any] = click.argument(
    "operators",
    metavar="[OPERATOR]...",
    type=OperatorName(),
    nargs=-1,
    callback=lambda context, parameter, value: value or flashinfer_bench.traced(),
)


@click.group()
def trace() -> None:
    """Publish the operators for FlashInfer-Bench, and read what it found."""


@trace.command()
@folder_argument
@operators_argument
@click.option("--layout", type=click.Choice(["flashinfer", "kda"]), default="flashinfer", help="Data set, or requests.")
@click.option(
    "--arch",
    type=Targets(),
    default="sm_90a,sm_100a",
    show_default=True,
    help="What a data set's CUDA solutions are for.",
)
@click.option(
    "--no-inputs", is_flag=True, help="A data set without its input tensors; `trace inputs` draws them later."
)
@click.option("--force", is_flag=True, help="Write into a folder that isn't empty; its other files stay.")
@json_option
def export(
    folder: Path,
    operators: tuple[Operator, ...],
    layout: str,
    arch: tuple[Target, ...],
    no_inputs: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write definitions, workloads, solutions and inputs into FOLDER.

    The layout `flashinfer` is a FlashInfer-Trace data set, as `flashinfer-bench run --local FOLDER` reads it; `kda` is
    one request folder a definition, with README, definition, workloads, baseline and benchmark. Needs no GPU.
    """
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise click.UsageError(f"{folder} is not empty: name another folder, or give --force to write into it")
    found = [case for operator in operators for case in flashinfer_bench.cases(operator)]
    if layout == "kda":
        files, commands = kda.export(folder, found), kda.commands(folder, found)
    else:
        files, commands = flashinfer_bench.export(folder, found, arch), flashinfer_bench.commands(folder, found)
        if not no_inputs:
            files += _draw(folder, found)
    definitions = {
        case.definition: {
            "workloads": sum(other.definition == case.definition for other in found),
            "rtol": case.trace.rtol,
            "atol": case.trace.atol,
            "reason": case.trace.tolerance_reason,
        }
        for case in found
    }
    emit(
        {"schema": 1, "definitions": definitions, "commands": commands, "files": _relative(files, folder)},
        as_json,
        lambda: [
            rows(
                f"{len(files)} files in {folder}",
                ("definition", "workloads", "rtol", "atol"),
                ((name, one["workloads"], one["rtol"], one["atol"]) for name, one in definitions.items()),
            ),
            Text("\nRun on a GPU:\n" + "\n".join(commands)),
        ],
    )


@trace.command()
@folder_argument
@operators_argument
@json_option
def inputs(folder: Path, operators: tuple[Operator, ...], as_json: bool) -> None:
    """Draw the input tensors that an exported data set lacks, on the CPU, each from its seed."""
    if not (folder / "definitions").is_dir():
        raise click.UsageError(f"{folder} is no exported data set: it has no definitions/")
    found = [case for operator in operators for case in flashinfer_bench.cases(operator)]
    files = _relative(_draw(folder, flashinfer_bench.lacking(folder, found)), folder)
    emit({"schema": 1, "files": files}, as_json, lambda: [Text("\n".join(files) or "nothing is lacking")])


@trace.command()
@folder_argument
@json_option
@click.pass_context
def report(context: click.Context, folder: Path, as_json: bool) -> None:
    """Show what `flashinfer-bench run --local FOLDER` found, on the machine it ran on. Exits 1 unless all passed."""
    found = flashinfer_bench.results(folder)
    if not found:
        raise click.UsageError(f"{folder} has no evaluations: run `flashinfer-bench run --local {folder}` first")
    failed = [one for one in found if not flashinfer_bench.passed(one)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    document = {"schema": 1, "provenance": provenance(device), "ok": not failed, "evaluations": found}
    emit(document, as_json, lambda: _tables(found, failed))
    if failed:
        context.exit(1)


def _draw(folder: Path, found: list[flashinfer_bench.Case]) -> list[Path]:
    with progress() as bar:
        drawn = (flashinfer_bench.write_inputs(folder, case) for case in bar.track(found, description="drawing inputs"))
        return [path for path in drawn if path is not None]


def _relative(files: list[Path], folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in files)


def _tables(found: list[dict[str, Any]], failed: list[dict[str, Any]]) -> Iterator[Any]:
    lines = []
    for one in found:
        evaluation = one["evaluation"]
        speed, errors = evaluation["performance"] or {}, evaluation["correctness"] or {}
        lines.append(
            (
                one["solution"],
                ", ".join(f"{axis} {size}" for axis, size in one["workload"]["axes"].items()),
                evaluation["status"],
                _number(speed.get("latency_ms"), ".4f"),
                _number(speed.get("reference_latency_ms"), ".4f"),
                _number(errors.get("max_absolute_error"), ".1e"),
                _number(errors.get("max_relative_error"), ".1e"),
            )
        )
    hardware = ", ".join(sorted({one["evaluation"]["environment"]["hardware"] for one in found}))
    columns = ("solution", "workload", "status", "ms", "reference ms", "absolute error", "relative error")
    yield rows(f"FlashInfer-Bench on {hardware}", columns, lines)
    for one in failed:
        evaluation = one["evaluation"]
        yield Text(f"{evaluation['status']} {one['solution']} {one['workload']['uuid']}:\n{evaluation['log']}")


def _number(value: float | str | None, form: str) -> str:
    return "" if value is None else format(float(value), form)
