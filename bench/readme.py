"""Writes the README's figures from the result files: ``python3 -m bench.readme``; with ``--check`` it only compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from jit_kernels.checks.provenance import sources_hash

REPO = Path(__file__).resolve().parent.parent
README = REPO / "README.md"
RESULTS = REPO / "bench" / "results"
SHOWN = (1, 128, 1024, 707)  # of the checked batch sizes, those that the table has room for
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"


def table(columns: list[str], lines: list[list[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def stated(errors: dict[str, float]) -> str:
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


def measured() -> str:
    """The section's text, from ``h200-check.json`` and ``h200-gpu.json``."""
    check = json.loads((RESULTS / "h200-check.json").read_text())
    gpu = json.loads((RESULTS / "h200-gpu.json").read_text())
    where = check["provenance"]
    text = (
        f"On one {where['device']} (driver {where['driver']}, torch {where['torch']}, CUDA {where['cuda']}), by "
        f"`python3 -m bench.gpu`; files in [bench/results](bench/results). "
    )
    if {check["provenance"]["csrc"], gpu["provenance"]["csrc"]} != {sources_hash()}:
        text += "**The kernels have changed since; these figures describe an earlier state.** "
    text += "Every row ran the fused kernel, 100 repeats and all batch splits with the same bytes:\n\n"
    text += table(
        [
            "operator",
            "input",
            "error against float64",
            "of what it replaces",
            "eager call, ms",
            "of what it replaces, ms",
        ],
        [
            [
                f"`{row['operator']}`",
                row["sample"],
                stated(row["error"]),
                stated(row["baseline_error"]),
                f"{row['milliseconds']:.3f}",
                f"{row['baseline_milliseconds']:.3f} ({row['baseline']})",
            ]
            for row in check["results"]
            if row["ok"] and row["ran"] == "fused" and row["count"] in SHOWN
        ],
    )
    return text + "\n" + details(gpu["steps"])


def details(steps: dict[str, Any]) -> str:
    peers = steps["sglang"]["microseconds at N=707 d=128"]
    warm = steps["warm start"]["milliseconds"].values()
    host = {name: value for name, value in steps["host time"].items() if name not in ("ok", "seconds")}
    return (
        f"`vdn_delta_factors` at N=707, d=128, in a CUDA graph: {peers['fp64_tensor']:.0f} µs (`fp64_tensor`), "
        f"{peers['fp32']:.0f} µs (`fp32`), SGLang's fused kernel in the same process {peers['sglang']:.0f} µs. "
        f"A load from the cache without nvcc and ninja takes {min(warm):.0f} to {max(warm):.0f} ms. Host time of an "
        "eager call without gradients: " + ", ".join(f"{name} {value:.1f} µs" for name, value in host.items()) + ".\n"
    )


@click.command()
@click.option("--check", is_flag=True, help="Exit 1 if the README differs from the result files.")
def main(check: bool) -> None:
    """Make the README's figures from the result files."""
    before, rest = README.read_text().split(BEGIN)
    _, after = rest.split(END)
    made = before + BEGIN + measured() + END + after
    if check:
        sys.exit(
            0 if made == README.read_text() else "README.md differs from the result files: python3 -m bench.readme"
        )
    README.write_text(made)


if __name__ == "__main__":
    main()
