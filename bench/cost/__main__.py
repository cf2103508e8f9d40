"""``python -m bench.cost``: what each of our kernels should cost, beside what it does cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from jit_kernels.bench.cost.markdown import rewrite
from jit_kernels.bench.cost.report import WITHIN, cells, report
from jit_kernels.bench.record import Document
from rich.console import Console

from jit_kernels.checks.provenance import sources_hash
from jit_kernels.cli.output import rows
from jit_kernels.jit.errors import JitError

RESULTS = Path(__file__).resolve().parent.parent / "results" / "h200-bench.json"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--results",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=RESULTS,
    show_default="bench/results/h200-bench.json",
    help="A file of `jit-kernels bench`.",
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Also write it to this file.")
@click.option(
    "--docs",
    "page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Also put the tables between the markers of this page: docs/cost.md.",
)
@click.option("--check", is_flag=True, help=f"Exit 1 where a prediction is off by more than {WITHIN:.0%}.")
def main(results: Path, output: Path | None, page: Path | None, check: bool) -> None:
    """Predict the time of every row of ours in a benchmark's result, there and on a B200.

    Counts come from the machine code of the present sources, ceilings and a few latencies from the result file: rows
    that gave a latency are marked as calibrated, all others are predicted. Needs a CUDA compiler, cuobjdump and
    nvdisasm; no GPU.
    """
    try:
        found = report(Document.read(results))
        if page is not None:
            rewrite(page, found)
    except (ValueError, JitError, FileNotFoundError) as error:
        raise click.ClickException(str(error)) from error
    if output is not None:
        output.write_text(json.dumps(found.document(), indent=1) + "\n")
    console = Console() if sys.stdout.isatty() else Console(width=200)
    for title, lines in found.tables():
        shown = [cells(line, found.there.name) for line in lines]
        console.print(
            rows(f"\n{title} on {found.here.name}, us", list(shown[0]), [list(one.values()) for one in shown])
        )
        console.print(f"calibrated: {lines[0].model}", highlight=False)
    if found.run.get("csrc") != sources_hash():
        click.echo(f"{results.name} was measured with other kernels than those of csrc/ now", err=True)
    for line in found.off:
        click.echo(f"off by more than {WITHIN:.0%}: {line}: {line.ratio:.2f}", err=True)
    if check and found.off:
        sys.exit(1)


if __name__ == "__main__":
    main()
