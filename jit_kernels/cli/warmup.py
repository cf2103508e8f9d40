"""``jit-kernels warmup``: compiles before the first call, for this machine or for another one."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click

from jit_kernels.cli.arguments import Targets, operators_argument
from jit_kernels.cli.output import emit, json_option, progress, rows, size
from jit_kernels.dispatch import OPERATORS, Operator
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import JitError
from jit_kernels.jit.loader import Kernel

# Every parameter that some operator's builds take, each an option: head_dim gives --head-dim.
PARAMETERS = sorted({name for operator in OPERATORS.values() for build in operator.warmup for name in build})


def parameter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name in reversed(PARAMETERS):
        command = click.option(
            f"--{name.replace('_', '-')}",
            name,
            type=int,
            multiple=True,
            help=f"Build for this {name}, again for more [default: those that users run].",
        )(command)
    return command


@click.command()
@operators_argument
@click.option(
    "--arch", type=Targets(), default=(), help="Arch targets such as sm_90a,sm_100a [default: this machine's GPUs]."
)
@parameter_options
@click.option(
    "-j", "--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True, help="Builds at a time."
)
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), help="Build there, for JIT_KERNELS_PREBUILT_DIR."
)
@click.option("--dry-run", is_flag=True, help="Say what would be built, and build nothing.")
@json_option
@click.pass_context
def warmup(
    context: click.Context,
    operators: tuple[Operator, ...],
    arch: tuple[Target, ...],
    jobs: int,
    output: Path | None,
    dry_run: bool,
    as_json: bool,
    **parameters: tuple[int, ...],
) -> None:
    """Compile operators' kernels ahead of their first call. Needs no GPU where --arch names the targets."""
    targets = arch or tuple(Target.of_all_devices())
    if not targets:
        raise click.UsageError("this machine has no GPU: name what to build for, such as --arch sm_90a")
    kernels: dict[Kernel, tuple[str, str]] = {}
    for operator in operators:
        for target in targets:
            for build in _builds(operator, parameters):
                label = ", ".join(f"{name} {value}" for name, value in build.items())
                try:
                    kernels[operator.build(target, **build)] = (operator.name, label)
                except ValueError as error:
                    raise click.UsageError(f"{operator.name}: {error}") from None
    reports = []
    with progress() as bar, ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task("compiling", total=len(kernels))
        work = {pool.submit(_compile, kernel, output, dry_run): kernel for kernel in kernels}
        for done in as_completed(work):
            operator_name, label = kernels[work[done]]
            reports.append({"operator": operator_name, "parameters": label, **done.result()})
            bar.advance(task)
    reports.sort(key=lambda report: (report["operator"], report["target"], report["parameters"]))
    emit({"schema": 1, "kernels": reports}, as_json, lambda: _table(reports))
    if any(report["state"] == "failed" for report in reports):
        context.exit(1)


def _builds(operator: Operator, parameters: dict[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """The operator's warm-up builds, with the values that the command line named in place of its own."""
    builds: dict[tuple[Any, ...], dict[str, Any]] = {}
    for build in operator.warmup:
        combined = [build]
        for name in build:
            if parameters.get(name):
                combined = [{**one, name: value} for one in combined for value in parameters[name]]
        for one in combined:
            builds[tuple(sorted(one.items()))] = one
    return list(builds.values())


def _compile(kernel: Kernel, root: Path | None, dry_run: bool) -> dict[str, Any]:
    report: dict[str, Any] = {"target": str(kernel.target), "state": "built"}
    try:
        present = kernel.find() if root is None else None
        if present is not None:
            report["state"] = "present"
        elif dry_run:
            return report | {"state": "would build"}
        entry = present or kernel.compile(root)
        meta = entry.meta
    except JitError as error:
        return report | {"state": "failed", "error": str(error)}
    uses = meta["kernels"].values()
    return report | {
        "folder": str(entry.folder),
        "compile_seconds": meta["compile_seconds"],
        "size": meta["size"],
        "registers": max((use["registers"] for use in uses), default=0),
        "spills": sum(use["spill_stores"] + use["spill_loads"] for use in uses),
    }


def _table(reports: list[dict[str, Any]]) -> Any:
    yield rows(
        None,
        ("operator", "parameters", "arch", "state", "compile s", "registers", "spilled bytes", "size"),
        (
            (
                report["operator"],
                report["parameters"],
                report["target"],
                report["state"],
                report.get("compile_seconds", ""),
                report.get("registers", ""),
                report.get("spills", ""),
                size(report["size"]) if "size" in report else "",
            )
            for report in reports
        ),
    )
    for report in reports:
        if "error" in report:
            yield f"\n{report['operator']} for {report['target']}: {report['error']}"
