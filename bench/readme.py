"""Writes what the README says was measured, and the pages it leads to: ``python -m bench.readme``.

All of it comes from the files in ``bench/results``; one that isn't there is not spoken of. With ``--check`` nothing is
written: exit 1 if anything differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from jit_kernels.bench.compare import changes
from jit_kernels.bench.record import Document
from jit_kernels.bench.report import outdated, page_at, picture_at, plan, write
from jit_kernels.bench.report.view import Result, error, figure, in_short, summary

from jit_kernels.checks.provenance import sources_hash

REPO = Path(__file__).resolve().parent.parent
BENCH, AGAIN = "h200-bench.json", "h200-bench-again.json"
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
STALE = "**Of earlier kernels.**"
WHOLE = {"complete": True, "timer": "cuda", "rows_set": "full"}
Found = Mapping[str, Any]


def section(results: Path, at: str) -> str:
    """The section's text, from the files in ``results``, which the README calls ``at``.

    Raises:
        ValueError: a file is cut off, of another schema, or lacks what its command writes; or none is there.
    """
    parts = [bench(results / BENCH, at)] if (results / BENCH).exists() else []
    lines = [again(results, at)] if parts and (results / AGAIN).exists() else []
    lines += [told(results / name, write_line, at) for name, write_line in LINES.items() if (results / name).exists()]
    if not parts and not lines:
        raise ValueError(f"{results} has none of {', '.join((BENCH, *LINES))}: nothing was measured")
    listed = ["Runs on a GPU, each line from its file:\n", *(f"- {line}" for line in lines), ""] if lines else []
    return "\n".join([*parts, *listed])


def bench(path: Path, at: str) -> str:
    """Tables and pictures of a whole benchmark run on a GPU."""
    result = Result.read(path)
    document, where = result.document, result.document.provenance
    state = {name: getattr(document, name) for name in WHOLE}
    if state != WHOLE:
        raise ValueError(f"{path}: the README shows a whole run on a GPU: expected {WHOLE}, got {state}")
    ours = {one.name for one in document.candidates if one.ours}
    if red := [f"{group.name} {name}" for group in result.groups for name in group.failed if name in ours]:
        raise ValueError(f"{path}: a gate of ours failed: {', '.join(red)}")
    pictures = plan(result)

    def picture(name: str, words: str) -> str:
        return f"![{words}]({at}/{picture_at(path, Path(), name)})\n\n"

    page = f"{at}/{page_at(path, Path())}"
    text = (
        f"On one {result.device} (driver {where.get('driver')}, torch {where.get('torch')}, CUDA {where.get('cuda')}, "
        f"commit {str(where.get('commit'))[:12]}; {result.clocks}), by `jit-kernels bench`: each candidate first shows "
        "that its results are right; then all take turns in one process, calls in a CUDA graph, on inputs that come "
        "from device memory. Times are medians; ~ marks one that did not settle. The floor is the largest of bytes "
        "over the copy rate, FLOP over the arithmetic rate and an empty kernel, all measured in the same run. Errors "
        f"are relative, against float64. [Every figure]({page}) stands on one page for a browser, made from "
        f"[the data]({at}/{path.name}); [docs/benchmark.md](docs/benchmark.md) says more of the method.\n\n"
        "In the pictures, left: one size, in parentheses how many times ours; right: all sizes, in the same colours, "
        "dashed where calls are eager, hollow where a time did not settle.\n\n"
    )
    text += "".join(f"**{warning}**\n\n" for warning in result.warnings)
    for operator, groups in result.operators.items():
        text += f"### `{operator}`\n\n{in_short(groups)}\n\n"
        text += picture(operator, f"{operator}: bars of time beside the peers', and time against size over the floor")
        for group in groups:
            name = f"{operator}-{group.direction}-accuracy"
            if name in pictures and group is groups[0]:
                text += picture(name, f"{group.name}: error against condition number, for all candidates")
        text += table(*summary(groups)) + "\n"
    text += "### Limits, and what a call costs the host\n\n" if {"roofline", "host"} & pictures.keys() else ""
    if "roofline" in pictures:
        text += picture("roofline", "roofline: every candidate under the ceilings of the same run")
    if "host" in pictures:
        text += picture("host", "bars of the host's time for one eager call")
    absent = {one.name: one.reason.partition("\n")[0] for group in result.groups for one in group.absent}
    if absent:
        text += f"Not there to be measured: {', '.join(f'{name} ({why})' for name, why in absent.items())}.\n"
    return text


def again(results: Path, at: str) -> str:
    """How far a second run of the same kernels lies from the first."""
    first, second = Document.read(results / BENCH), Document.read(results / AGAIN)
    if first.provenance.get("csrc") != second.provenance.get("csrc"):
        raise ValueError(f"{results / AGAIN} is no second run of {BENCH}'s kernels: their sources differ")
    apart: dict[bool, float] = {True: 0.0, False: 0.0}
    for _, timing, ratio in changes(first, second):
        apart[timing.ours] = max(apart[timing.ours], abs(ratio - 1))
    return (
        f"[{AGAIN}]({at}/{AGAIN}): the whole benchmark once more. Medians in a graph differ by at most "
        f"{apart[True]:.1%} for our candidates, {apart[False]:.1%} for peers."
    )


def told(path: Path, write_line: Callable[[Found], str], at: str) -> str:
    """A file's line, behind a link to it; says so where it is of other kernels."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as failure:
        raise ValueError(f"{path} is no JSON document, or cut off: {failure}") from None
    if not isinstance(found, dict) or found.get("schema") != 1:
        came = found.get("schema") if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{path}: expected a JSON object of schema 1, got {came}")
    try:
        stale = "" if found["provenance"]["csrc"] == sources_hash() else f" {STALE}"
        return f"[{path.name}]({at}/{path.name}): {write_line(found)}{stale}"
    except (KeyError, TypeError, IndexError, StopIteration) as failure:
        what = f"field {failure}" if isinstance(failure, KeyError) else str(failure)
        raise ValueError(f"{path} lacks what the README says of it: {what}") from None


def check(found: Found) -> str:
    rows = found["results"]
    if not rows or any(row["ran"] != "fused" for row in rows):
        raise TypeError("inputs that the fused kernels ran, all of them")
    held = sum(row["ok"] for row in rows)
    worst: dict[str, dict[str, tuple[float, float]]] = {}
    for row in rows:
        for name, value in row["error"].items():
            pair = worst.setdefault(row["operator"], {}).setdefault(name, (0.0, 0.0))
            worst[row["operator"]][name] = (max(pair[0], value), max(pair[1], row["baseline_error"][name]))
    errors = "; ".join(
        f"`{operator}` "
        + ", ".join(f"{name} {error(ours)} (what it replaces: {error(theirs)})" for name, (ours, theirs) in of.items())
        for operator, of in worst.items()
    )
    return (
        f"`jit-kernels check` on {found['provenance']['device']}: {held} of {len(rows)} inputs hold, all by the fused "
        f"kernels. Largest errors against float64: {errors}."
    )


def gpu(found: Found) -> str:
    steps = found["steps"]
    loads = steps["warm start"]["milliseconds"].values()
    if not loads:
        raise TypeError("a warm start that worked")
    text = f"a load from the cache without nvcc and ninja takes {figure(min(loads))} to {figure(max(loads))} ms"
    if "sanitizer" in steps:
        runs = {name: one for name, one in steps["sanitizer"].items() if isinstance(one, dict)}
        clean = sum(one["ok"] for one in runs.values())
        tools = ", ".join(dict.fromkeys(name.split()[-1] for name in runs))
        text += f"; compute-sanitizer ({tools}) found nothing in {clean} of {len(runs)} runs over all kernels"
    return f"{text}."


def model(found: Found) -> str:
    of, forward, backward = found["model"], found["forward"], found["backward"]
    apart = forward["logits_against_shipped"]
    sites = forward["batch_against_samples"]["collapse"]
    same = sum(site["same_bytes_given_same_inputs"] for site in sites)
    repeats = "the same bytes" if forward["repeats_have_same_bytes"] else "other bytes"
    return (
        f"`{of['class']}` of transformers {of['transformers']} ({of['parameters'] / 1e9:.1f} B parameters, "
        f"{len(of['layer_types'])} layer) with all its collapses replaced, {forward['collapses_in_all']} calls. "
        f"Repeats have {repeats}; {same} of {len(sites)} collapses give a sample the same bytes alone. "
        f"Logits are at most {figure(apart['max_abs'])} from the shipped model's; {backward['tensors']} gradients "
        f"differ from its own by at most {backward['largest_share_of_bound']:.0%} of what bfloat16 costs them."
    )


def sglang(found: Found) -> str:
    rows = found["acceptance"]
    held = sum(not row["broken"] for row in rows)
    timed = next(row for row in found["timing"] if row["rule"] == "vdn_solve" and row["matrices"] == 707)
    times = {name: figure(one["median"]) for name, one in timed["microseconds"].items()}
    theirs = f", {times['theirs']} µs with SGLang's kernel" if "theirs" in times else ""
    return (
        f"SGLang {found['provenance']['sglang']}'s own model module with our kernel in it: {held} of {len(rows)} of "
        f"its acceptance rows hold; an eager `delta_factor_apply` of 707 matrices takes {times['ours']} µs{theirs}, "
        f"{times['chain']} µs with the torch chain."
    )


def flashinfer_bench(found: Found) -> str:
    statuses = [one["evaluation"]["status"] for one in found["evaluations"]]
    passed = statuses.count("PASSED")
    solutions = len({one["solution"] for one in found["evaluations"]})
    return f"FlashInfer-Bench: {passed} of {len(statuses)} evaluations of {solutions} solutions pass."


LINES: dict[str, Callable[[Found], str]] = {
    "h200-check.json": check,
    "h200-gpu.json": gpu,
    "h200-model.json": model,
    "h200-sglang.json": sglang,
    "h200-flashinfer-bench.json": flashinfer_bench,
}


def table(columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    rows = [columns, ("---",) * len(columns), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


@click.command()
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit 1 if README, page or pictures differ.")
@click.option(
    "--root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=REPO, help="Another checkout."
)
def main(only_check: bool, root: Path) -> None:
    """Make the README's measured section, and the benchmark's page and pictures, from the files in bench/results."""
    if not (root / "README.md").exists():
        raise click.ClickException(f"{root} has no README.md: this command is for a checkout")
    readme, results = root / "README.md", root / "bench" / "results"
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise click.ClickException(f"{readme} has no section between {BEGIN.strip()} and {END.strip()}")
    source = results / BENCH
    try:
        text = before + BEGIN + section(results, "bench/results") + END + after
        if only_check:
            lacks = outdated(source, results) if source.exists() else []
            if text != readme.read_text(encoding="utf-8"):
                lacks.append("README.md differs from the files in bench/results")
            sys.exit("; ".join([*lacks, "run: python -m bench.readme"]) if lacks else 0)
        if source.exists():
            write(source, results)
    except ValueError as failure:
        raise click.ClickException(str(failure)) from None
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
