"""The page: everything that a result file holds, in one HTML file that needs no other."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jit_kernels.bench.record import Estimate
from jit_kernels.bench.report.view import Group, Result, error, figure, in_short, percent, span, summary, time

TEMPLATE = "page.html"
MIB = 2.0**20
NUMBER = re.compile(r"(~?[\d,.]+%?|∞)?")


@dataclass(frozen=True)
class Table:
    """Cells are text; ``ours`` are the lines to be set off."""

    columns: Sequence[str]
    lines: Sequence[Sequence[str]]
    ours: Sequence[bool] = ()

    def __post_init__(self) -> None:
        if self.ours and len(self.ours) != len(self.lines):
            raise ValueError(f"{len(self.lines)} lines, of which {len(self.ours)} are told from others")

    @property
    def kinds(self) -> list[str]:
        """A class for each column: numbers are set to the right."""
        cells = zip(*self.lines, strict=True) if self.lines else ((),) * len(self.columns)
        return ["number" if all(map(NUMBER.fullmatch, column)) and any(column) else "text" for column in cells]


def render(result: Result, pictures: Mapping[str, bytes]) -> str:
    """The page of a result, with its pictures in it.

    Raises:
        KeyError: a picture that the page shows is not among them.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["data"] = lambda picture: b64encode(picture).decode()
    return environment.get_template(TEMPLATE).render(
        result=result,
        document=result.document,
        where=result.document.provenance,
        pictures=pictures,
        operators=[
            (name, groups, Table(*summary(groups)), in_short(groups)) for name, groups in result.operators.items()
        ],
        absent=absent(result),
        ceilings=ceilings(result),
        groups=[(group, rows(group), accuracy(group)) for group in result.groups],
        growth=growth(result),
        first_calls=first_calls(result),
        candidates=candidates(result),
        clocks=clocks(result),
    )


def absent(result: Result) -> Table:
    return Table(
        ("operator", "candidate", "why", "how to have it"),
        [(group.name, one.name, one.reason, one.how) for group in result.groups for one in group.absent],
    )


def ceilings(result: Result) -> Table:
    return Table(
        ("ceiling", "median", "unit", "quartiles"),
        [
            (one.name, time(one.value, 4), one.unit.replace("us", "µs"), quartiles(one.value, 4))
            for one in result.document.ceilings
        ],
    )


def rows(group: Group) -> Table:
    """Each candidate on each input size."""
    columns = (
        *("input", "candidate", "gate", "graph, µs", "quartiles", "eager, µs", "host, µs", "device, µs", "launches"),
        *("peak, MiB", "GB/s", "TFLOP/s", "of copy", "of arithmetic", "floor, µs", "time / floor", "error", "note"),
    )
    lines, ours = [], []
    for row in group.rows:
        for timing in row.timings:
            spent = timing.time
            lines.append(
                (
                    *(row.label, timing.candidate, timing.gate),
                    *(time(timing.graph), quartiles(timing.graph), time(timing.eager), time(timing.host)),
                    *(figure(timing.kernel), "" if timing.launches is None else str(timing.launches)),
                    figure(None if timing.peak_bytes is None else timing.peak_bytes / MIB),
                    *(figure(timing.gb_per_s, 4), figure(timing.tflop_per_s)),
                    percent(timing.share.get("copy")),
                    percent(next((share for name, share in timing.share.items() if name != "copy"), None)),
                    *(figure(row.floor), figure(spent.median / row.floor if spent and row.floor else None)),
                    errors(timing.errors),
                    timing.reason,
                )
            )
            ours.append(timing.ours)
    return Table(columns, lines, ours)


def accuracy(group: Group) -> Table:
    return Table(
        ("inputs", "size", "condition", "candidate", "worst", "median"),
        [
            (
                one.family,
                ", ".join(f"{name} {value}" for name, value in one.parameters.items()),
                figure(one.cond),
                one.candidate,
                errors(one.worst),
                errors(one.median),
            )
            for one in group.accuracy
        ],
        [one.ours for one in group.accuracy],
    )


def growth(result: Result) -> Table:
    return Table(
        ("operator", "candidate", "one more of", "at", "sizes", "costs, µs"),
        [
            (
                f"{one.operator} {one.direction}",
                one.candidate,
                one.along,
                ", ".join(f"{name} {value}" for name, value in one.fixed.items()),
                f"{one.sizes[0]} to {one.sizes[-1]}",
                figure(one.per_unit),
            )
            for one in result.document.growth
        ],
        [any(c.ours for c in result.document.candidates if c.name == one.candidate) for one in result.document.growth],
    )


def first_calls(result: Result) -> Table:
    return Table(
        ("operator", "build", "compiling, s", "loading from the cache, ms", "importing tvm_ffi before, ms", "note"),
        [
            (
                *(one.operator, one.build, figure(one.cold_seconds), figure(one.warm_milliseconds)),
                *(figure(one.import_milliseconds), one.reason),
            )
            for one in result.document.first_calls
        ],
    )


def candidates(result: Result) -> Table:
    return Table(
        ("operator", "candidate", "what it is", "how to have it", "here"),
        [
            (
                f"{one.operator} {one.direction}",
                one.name,
                one.what,
                one.how,
                "yes" if one.present else f"no: {one.reason}",
            )
            for one in result.document.candidates
        ],
        [one.ours for one in result.document.candidates],
    )


def clocks(result: Result) -> Table:
    read = result.document.clocks
    if not read:
        return Table((), [])
    held = sorted({reason for one in read for reason in one.reasons})
    return Table(
        ("readings", "SM clock, MHz", "memory clock, MHz", "temperature, °C", "power, W", "held back by"),
        [
            (
                str(len(read)),
                *(span(getattr(one, name) for one in read) for name in ("sm_mhz", "memory_mhz", "celsius")),
                *(span(round(one.watts) for one in read), ", ".join(held) or "nothing"),
            )
        ],
    )


def quartiles(estimate: Estimate | None, digits: int = 3) -> str:
    return "" if estimate is None else f"{figure(estimate.low, digits)} to {figure(estimate.high, digits)}"


def errors(found: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {error(value)}" for name, value in found.items())
