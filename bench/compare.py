"""Whether a run is worse than an earlier one: each figure of ours against its own run's ceiling, so that two machines,
or two clocks, may be compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jit_kernels.bench.record import Document, Row, Timing

Verdict = Literal["worse", "better", "same", "missing", "new", "failed"]
NOISE = 0.03  # two runs of the same program on the same machine agree to this, beyond their own spread


@dataclass(frozen=True)
class Difference:
    """One of our figures in both runs. ``verdict``: what it comes to.

    A ratio is the time over the row's floor in the same run: 1 is at the ceiling.
    """

    operator: str
    direction: str
    label: str
    candidate: str
    verdict: Verdict
    old: float | None = None
    new: float | None = None
    noise: float | None = None  # the change of the ratio that could be chance
    note: str = ""


def compare(old: Document, new: Document) -> list[Difference]:
    """Every figure of ours that either run has.

    Worse is a ratio to the ceiling that grew beyond its noise: `NOISE`, or the two interquartile ranges together where
    they are wider. Failed is a gate that passed in the old run and does not in the new one.
    """
    before, after = dict(_ours(old)), dict(_ours(new))
    found = []
    for key in before | after:
        if key not in after:
            found.append(Difference(*key, "missing", note="the new run has no such figure"))
        elif key not in before:
            found.append(Difference(*key, "new", note="the old run has no such figure"))
        else:
            found.append(_difference(key, before[key], after[key]))
    return found


def changes(old: Document, new: Document) -> Iterator[tuple[Row, Timing, float]]:
    """Each graph time that both runs have, ours and peers', with the new median over the old one."""
    after = {(*key, timing.candidate): timing for key, row in _rows(new) for timing in row.timings}
    for key, row in _rows(old):
        for timing in row.timings:
            again = after.get((*key, timing.candidate))
            if timing.graph and again and again.graph:
                yield row, timing, again.graph.median / timing.graph.median


def _rows(document: Document) -> Iterator[tuple[tuple[str, str, str], Row]]:
    for row in document.rows:
        yield (row.operator, row.direction, row.label), row


def _ours(document: Document) -> Iterator[tuple[tuple[str, str, str, str], tuple[Row, Timing]]]:
    for key, row in _rows(document):
        for timing in row.timings:
            if timing.ours and timing.gate != "not run":
                yield (*key, timing.candidate), (row, timing)


def _difference(key: tuple[str, str, str, str], old: tuple[Row, Timing], new: tuple[Row, Timing]) -> Difference:
    if new[1].gate == "failed":
        was = "failed in the old run too" if old[1].gate == "failed" else new[1].reason
        return Difference(*key, "failed", note=was)
    if old[1].gate == "failed":
        return Difference(*key, "new", note="its gate failed in the old run")
    before, after = _ratio(*old), _ratio(*new)
    if before is None or after is None:
        lacking = "neither" if before is after else "only one"
        note = f"{lacking} of the runs has a time and a ceiling for it"
        return Difference(*key, "missing", old=before, new=after, note=note)
    times = [timing.time for _, timing in (old, new)]
    noise = max(NOISE, sum(time.spread for time in times if time is not None))
    change = after / before - 1
    verdict: Verdict = "worse" if change > noise else "better" if change < -noise else "same"
    unstable = [which for which, time in zip(("old", "new"), times, strict=True) if time and not time.stable]
    note = f"unstable in the {' and the '.join(unstable)} run" if unstable else ""
    return Difference(*key, verdict, old=before, new=after, noise=noise, note=note)


def _ratio(row: Row, timing: Timing) -> float | None:
    if timing.time is None or not row.floor:
        return None
    return timing.time.median / row.floor
