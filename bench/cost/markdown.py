"""The tables of docs/cost.md, made from a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jit_kernels.bench.cost.delta_factors import Fp32, Fp64Tensor
from jit_kernels.bench.cost.machine import Machine
from jit_kernels.bench.cost.report import Model, Report, cells

BEGIN, END = "<!-- predicted -->\n", "<!-- end -->\n"


def rewrite(page: Path, report: Report) -> None:
    """Puts the report between the page's markers.

    Raises:
        ValueError: it has none.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for the tables: expected the lines {BEGIN.strip()} and {END.strip()}")
    page.write_text(before + BEGIN + section(report) + END + after)


def section(report: Report) -> str:
    run, here, there = report.run, report.here, report.there
    text = (
        f"Measured on {run['created'][:10]} on one {here.name} (driver {run['driver']}, torch {run['torch']}), sources "
        f"`{run['csrc']}`. Microseconds; *calibrated* rows gave the model its latencies, all others are predictions. "
        f"*x floor*: measured over the floor. The {there.name} columns are predictions: nothing here ran on one.\n"
    )
    for title, lines in report.tables():
        shown = [cells(line, there.name) for line in lines]
        text += f"\n### `{title}`\n\n"
        text += table(list(shown[0]), [list(one.values()) for one in shown])
        text += f"\nCalibrated: {lines[0].model}.\n"
    return text + "\n### Machine code and machines\n\n" + machine_code(here, there, report.models)


def machine_code(here: Machine, there: Machine, models: Sequence[Model]) -> str:
    """What the predictions for both chips rest on."""
    found = [[quantity, *(text(machine) for machine in (here, there))] for quantity, text in MACHINE]
    for model in models:
        if not isinstance(model, Fp64Tensor | Fp32):
            continue
        for d in (128, 64):
            codes = [model.code(machine, d) for machine in (here, there)]
            name = f"`{model.candidate.split()[-1]}`, d = {d}"
            if isinstance(model, Fp64Tensor):
                loops = [code.hottest("tensor_flop") for code in codes]
                texts = [f"{loop.count('DMMA')} DMMA of {len(loop)} instructions" for loop in loops]
                found.append([f"{name}: loop of J, {loops[0].tensor_flop} FLOP a warp and turn", *texts])
            else:
                texts = [f"{model.instructions_a_multiply_add(machine, d):.2f}" for machine in (here, there)]
                found.append([f"{name}: instructions a multiply-add, largest loop", *texts])
            busy = [sum(model.busy(machine, d)) for machine in (here, there)]
            found.append([f"{name}: cycles that a matrix keeps the busiest resource", *(f"{one:.0f}" for one in busy)])
    return table(["", here.name, there.name], found)


MACHINE = (
    ("multiprocessors", lambda machine: str(machine.multiprocessors)),
    ("clock, GHz", lambda machine: f"{machine.ghz:.3g}"),
    ("memory, GB/s read and written", lambda machine: f"{machine.read:.0f}, {machine.write:.0f}"),
    ("fp32 multiply-adds, TFLOP/s", lambda machine: f"{machine.ffma:.3g}"),
    ("fp64 tensor cores, TFLOP/s", lambda machine: f"{machine.fp64_tensor:.3g}"),
)


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
