"""``jit-kernels bench``: how fast the operators and their peers are on this machine; and whether that got worse."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from jit_kernels.cli.arguments import device_of, operators_argument
from jit_kernels.cli.output import emit, json_option, rows
from jit_kernels.dispatch import Operator

if TYPE_CHECKING:
    from jit_kernels.bench.compare import Difference
    from jit_kernels.bench.record import Document, Row, Timing


class _RunByDefault(click.Group):
    """A group whose first argument may be left out: ``bench`` and ``bench OP`` mean ``bench run``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_RunByDefault)
def bench() -> None:
    """Measure operators beside their peers. `bench [OPERATOR]...` is `bench run [OPERATOR]...`."""
    try:
        from jit_kernels.bench import record  # noqa: F401
    except ImportError as error:
        raise click.ClickException(str(error)) from None


@bench.command()
@operators_argument
@click.option("--rows", "rows_set", type=click.Choice(["full", "quick"]), default="full", help="Which input sizes.")
@click.option("--device", default=None, help="cuda, cuda:1, cpu … (default: cuda where there is one).")
@click.option(
    "--sglang",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="SGLang's kernels/jit folder [default: SGLANG_KERNELS_JIT, or the installed package's].",
)
@click.option(
    "--compile-seconds", type=click.FloatRange(0), default=60, show_default=True, help="torch.compile may take in all."
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON there, row by row.")
@json_option
@click.pass_context
def run(
    context: click.Context,
    operators: tuple[Operator, ...],
    rows_set: str,
    device: str | None,
    sglang: Path | None,
    compile_seconds: float,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure operators and the peers that can be had here, after each has shown that its results are right.

    Exits 1 if one has not: it is not timed then. Peers that can't be had are listed with the reason. On a CPU the
    inputs are small, the fallback is measured, and the output says so.
    """
    from jit_kernels.bench.run import Bench
    from jit_kernels.bench.suite import Budget, Setting

    setting = Setting(device_of(device), sglang=sglang, compiling=Budget(compile_seconds))

    def keep(document: Document) -> None:
        if output is not None:
            document.write(output)

    work = Bench(operators, setting, rows_set=rows_set, report=lambda line: click.echo(line, err=True), keep=keep)
    found = work.run()
    emit(json.loads(found.json_text()), as_json, lambda: _tables(found))
    if not found.ok:
        context.exit(1)


@bench.command()
@click.argument("old", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
@click.pass_context
def compare(context: click.Context, old: Path, new: Path, as_json: bool) -> None:
    """Compare two result files: exits 1 where a figure of ours got worse, measured by its own run's ceiling.

    Figures that only one of the runs has are told, and don't count.
    """
    from jit_kernels.bench.compare import compare as differences_of
    from jit_kernels.bench.record import Document

    first, second = Document.read(old), Document.read(new)
    found = differences_of(first, second)
    lack = ""
    if not any(one.old is not None and one.new is not None for one in found):
        lack = "there is nothing to compare: no figure of ours stands against a ceiling in both"
    elif not second.complete:
        lack = f"{new} broke off: what it lacks could have got worse"
    ok = not lack and not any(one.verdict in ("worse", "failed") for one in found)
    document = {"schema": 1, "ok": ok, "lack": lack, "differences": [asdict(one) for one in found]}
    emit(document, as_json, lambda: _differences(found, first, second))
    if lack:
        raise click.ClickException(lack)
    if not ok:
        context.exit(1)


@bench.command()
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Folder [default: the file's own].")
@json_option
def report(result: Path, output: Path | None, as_json: bool) -> None:
    """Make one HTML page, which needs no other file, and its pictures as PNGs from a result file."""
    try:
        from jit_kernels.bench.report import write
    except ImportError as error:
        raise click.ClickException(str(error)) from None
    files = [str(path) for path in write(result, output or result.parent)]
    emit({"schema": 1, "files": files}, as_json, lambda: files)


def _differences(found: Iterable[Difference], old: Document, new: Document) -> Iterator[Any]:
    def times(ratio: float | None) -> str:
        return "" if ratio is None else f"{ratio:.3f}"

    if old.provenance.get("device") != new.provenance.get("device"):
        yield f"different devices: {old.provenance.get('device')}, then {new.provenance.get('device')}"
    yield rows(
        "time over the floor of the same run",
        ("operator", "direction", "input", "candidate", "old", "new", "noise", "verdict", "note"),
        (
            (
                one.operator,
                one.direction,
                one.label,
                one.candidate,
                times(one.old),
                times(one.new),
                "" if one.noise is None else f"{one.noise:.1%}",
                one.verdict.upper() if one.verdict in ("worse", "failed") else one.verdict,
                one.note,
            )
            for one in found
        ),
    )


def _tables(document: Document) -> Iterator[Any]:
    where = document.provenance["device"]
    for note in document.notes:
        yield Text(note)
    if document.ceilings:
        yield rows(
            f"ceilings of this run on {where}",
            ("what", "median", "spread"),
            (
                (one.name, f"{one.value.median:.4g} {one.unit}", f"{one.value.spread:.1%}{_shaky(one.value.stable)}")
                for one in document.ceilings
            ),
        )
    for operator, direction in dict.fromkeys((row.operator, row.direction) for row in document.rows):
        mine = [row for row in document.rows if (row.operator, row.direction) == (operator, direction)]
        names = [timing.candidate for timing in mine[0].timings]
        yield ""
        yield rows(
            f"{operator} {direction} on {where}, us (~ unstable)",
            ("input", "floor", *names, "floor / ours", "peer / ours"),
            ((row.label, _floor(row), *(_time(row.timing(name)) for name in names), *_ratios(row)) for row in mine),
        )
    absent: dict[tuple[str, ...], list[str]] = {}
    for one in document.candidates:
        if not one.present:
            absent.setdefault((one.operator, one.name, one.reason.splitlines()[0], one.how), []).append(one.direction)
    if absent:
        yield ""
        yield rows(
            "absent",
            ("operator", "candidate", "why", "how to have it", "for"),
            ((*key, ", ".join(directions)) for key, directions in absent.items()),
        )
    for row in document.rows:
        for timing in row.timings:
            if timing.gate == "failed":
                yield Text(f"FAILED {row.operator} {row.direction} {row.label} {timing.candidate}: {timing.reason}")


def _floor(row: Row) -> str:
    return "" if row.floor is None else f"{row.floor:.3g} {row.floor_by}"


def _ratios(row: Row) -> tuple[str, ...]:
    """The floor, and the fastest peer, over the fastest of ours."""
    best = {
        ours: min((t.time.median for t in row.timings if t.time and t.ours == ours), default=None)
        for ours in (True, False)
    }
    if best[True] is None:
        return "", ""
    return tuple("" if other is None else f"{other / best[True]:.2f}" for other in (row.floor, best[False]))


def _time(timing: Timing | None) -> str:
    if timing is None:
        return ""
    if timing.time is None:
        return "FAILED" if timing.gate == "failed" else timing.gate
    return f"{timing.time.median:.4g}{_shaky(timing.time.stable)}{'' if timing.graph else ' eager'}"


def _shaky(stable: bool) -> str:
    return "" if stable else "~"
