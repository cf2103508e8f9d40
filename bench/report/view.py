"""What the pictures, the page and the README make of a result file: which rows they show, and in which words."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jit_kernels.bench.record import Accuracy, Candidate, Document, Estimate, Row, Timing

from jit_kernels.checks.provenance import sources_hash

# Okabe and Ito's palette, which the colour-blind tell apart: the blues are ours.
OURS, PEERS = ("#0072B2", "#56B4E9"), ("#D55E00", "#009E73", "#E69F00", "#CC79A7", "#777777", "#000000")
OUR_MARKERS, PEER_MARKERS = "oD", "s^vPX<"


@dataclass(frozen=True)
class Style:
    color: str
    marker: str


@dataclass(frozen=True)
class Group:
    """One operator in one direction: its rows, and the candidates that were to be measured on them."""

    operator: str
    direction: str
    rows: tuple[Row, ...]
    accuracy: tuple[Accuracy, ...]
    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        return f"{self.operator} {self.direction}"

    @property
    def measured(self) -> bool:
        return any(timing.time for row in self.rows for timing in row.timings)

    @property
    def failed(self) -> dict[str, list[str]]:
        """Candidates that a gate stopped, and why on each row."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            for timing in row.timings:
                if timing.gate == "failed":
                    found.setdefault(timing.candidate, []).append(timing.reason)
        return found

    @property
    def shown(self) -> list[Row]:
        """The rows that a short table has: those whose launches were counted, which the quick set is too; else all."""
        counted = [row for row in self.rows if any(timing.launches is not None for timing in row.timings)]
        return counted or list(self.rows)

    @property
    def headline(self) -> Row:
        """Of the shown rows with the most candidates the largest one: there the device counts, and not the launch."""
        return max(self.shown, key=lambda row: (sum(timing.time is not None for timing in row.timings), row.bytes))

    @property
    def series(self) -> list[Row]:
        """The rows that differ from the headline in their count alone, tokens or matrices, by size."""
        along, *fixed = self.headline.parameters
        same = [row for row in self.rows if all(row.parameters.get(k) == self.headline.parameters[k] for k in fixed)]
        return sorted(same, key=lambda row: row.parameters[along])

    @property
    def absent(self) -> list[Candidate]:
        """Peers that could not be had, and ours where none of it could."""
        ours = any(one.ours and one.present for one in self.candidates)
        return [one for one in self.candidates if not one.present and not (one.ours and ours)]


@dataclass(frozen=True)
class Result:
    """A result file that was read, and what stands in it by group."""

    path: Path
    document: Document
    digest: str

    @classmethod
    def read(cls, path: Path) -> Result:
        """Reads a file that ``jit-kernels bench --output`` wrote.

        Raises:
            ValueError: it is none, of another schema, cut off, or without a row. The message names the file, what is
                wrong and what is expected.
        """
        document = Document.read(path)
        if not any(timing.time for row in document.rows for timing in row.timings):
            raise ValueError(
                f"{path} has no row with a time: nothing to report. "
                "Expected the file of a `jit-kernels bench --output FILE` that measured at least one input size"
            )
        listed = {(one.operator, one.direction, one.name) for one in document.candidates}
        for row in document.rows:
            for timing in row.timings:
                if (row.operator, row.direction, timing.candidate) not in listed:
                    raise ValueError(
                        f"{path}: {row.operator} {row.direction} {row.label} has a figure of {timing.candidate}, "
                        "which its list of candidates lacks. Every candidate of a row must be listed"
                    )
        return cls(path, document, hashlib.sha256(path.read_bytes()).hexdigest())

    @cached_property
    def groups(self) -> list[Group]:
        document = self.document
        keys = dict.fromkeys((row.operator, row.direction) for row in document.rows)
        return [
            Group(
                operator,
                direction,
                *(
                    tuple(one for one in found if (one.operator, one.direction) == (operator, direction))
                    for found in (document.rows, document.accuracy, document.candidates)
                ),
            )
            for operator, direction in keys
        ]

    @property
    def operators(self) -> dict[str, list[Group]]:
        """The measured groups of each operator."""
        found: dict[str, list[Group]] = {}
        for group in self.groups:
            if group.measured:
                found.setdefault(group.operator, []).append(group)
        return found

    @property
    def device(self) -> str:
        return str(self.document.provenance.get("device", "an unnamed device"))

    def style(self, operator: str, candidate: str) -> Style:
        """The same for a candidate in both directions: by its place in the list."""
        listed = [one for one in self.document.candidates if one.operator == operator]
        for ours, colors, markers in ((True, OURS, OUR_MARKERS), (False, PEERS, PEER_MARKERS)):
            # Of ours only those that are there: a fallback that the fused kernel replaces needs no colour.
            names = list(dict.fromkeys(one.name for one in listed if one.ours == ours and (one.present or not ours)))
            if candidate in names:
                place = names.index(candidate)
                return Style(colors[place % len(colors)], markers[place % len(markers)])
        raise KeyError(candidate)

    @cached_property
    def warnings(self) -> list[str]:
        """What a reader must know before any figure."""
        document, found = self.document, []
        if document.provenance.get("csrc") != sources_hash():
            found.append("The kernels have changed since; these figures describe an earlier state.")
        if not document.complete:
            found.append("The run broke off; this is what it measured until then.")
        for group in self.groups:
            for candidate, reasons in group.failed.items():
                found.append(
                    f"{group.name}: {candidate} failed its gate on {len(reasons)} of {len(group.rows)} input sizes "
                    f"and was not timed there ({reasons[0]})."
                )
        return found + [f"{note[:1].upper()}{note[1:]}." for note in document.notes]

    @property
    def clocks(self) -> str:
        """The range of the SM clock while the run went on, and what held it back."""
        read = self.document.clocks
        if not read:
            return "clocks not read"
        reasons = sorted({reason for one in read for reason in one.reasons})
        held = f"held back by {', '.join(reasons)}" if reasons else "nothing held the clocks back"
        return f"SM clock {span(one.sm_mhz for one in read)} MHz, {held}"


def span(values: Iterable[float], say: Callable[[float], str] = str) -> str:
    """The least and the greatest in words; one of them where both read the same."""
    found = list(values)
    low, high = say(min(found)), say(max(found))
    return low if low == high else f"{low} to {high}"


def best(row: Row, ours: bool) -> Timing | None:
    """The fastest of ours, or of the peers."""
    timed = [timing for timing in row.timings if timing.ours == ours and timing.time is not None]
    return min(timed, key=median, default=None)


def median(timing: Timing) -> float:
    if timing.time is None:
        raise ValueError(f"{timing.candidate} has no time")
    return timing.time.median


def worst(errors: dict[str, float]) -> float | None:
    return max(errors.values(), default=None)


def figure(value: float | None, digits: int = 3) -> str:
    """A number as people write it: that many digits, no exponent, grouped by thousands; empty for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}")))))
    return f"{value:,.{decimals}f}"


def time(estimate: Estimate | None, digits: int = 3) -> str:
    """Microseconds; ~ before one that is not stable."""
    return "" if estimate is None else ("" if estimate.stable else "~") + figure(estimate.median, digits)


def error(value: float | None) -> str:
    """A relative error; what a candidate that gave NaN or infinity has is infinite."""
    return "" if value is None else f"{value:.1e}".replace("e-0", "e-") if math.isfinite(value) else "∞"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def share(timing: Timing) -> float | None:
    """Of the roof over it: of the copy rate or of its arithmetic rate, whichever is nearer."""
    return max(timing.share.values(), default=None)


def words(sized: Row | Accuracy, names: Sequence[str]) -> str:
    """Parameters as people say them: ``hidden size 4096``."""
    return ", ".join(f"{name.replace('_', ' ')} {sized.parameters[name]}" for name in names)


def summary(groups: Sequence[Group]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and lines of a short table: on each shown row the fastest of ours, beside the floor and the fastest peer.

    An error is the largest of the outputs', relative, against float64.
    """
    columns = ("input", "ours, µs", "floor / ours", "fastest peer, µs", "peer / ours", "error", "peer's error")
    lines = []
    for group in groups:
        several = len({one.name for one in group.candidates if one.ours and one.present}) > 1
        for row in group.shown:
            ours, peer = best(row, ours=True), best(row, ours=False)
            named = f" {ours.candidate.removeprefix('jit_kernels ')}" if ours and several else ""
            lines.append(
                (
                    f"{group.direction}, {row.label}",
                    f"{time(ours.time)}{named}" if ours else "",
                    percent(row.floor / median(ours)) if ours and row.floor else "",
                    f"{time(peer.time)} {peer.candidate}" if peer else "",
                    f"{median(peer) / median(ours):.2f}" if ours and peer else "",
                    *(error(worst(one.errors)) if one else "" for one in (ours, peer)),
                )
            )
    return columns, lines


def in_short(groups: Sequence[Group]) -> str:
    """A sentence over all rows of an operator: how fast beside the fastest peer, and how near to the floor."""
    said = []
    for group in groups:
        pairs = [(row, ours, best(row, ours=False)) for row in group.rows if (ours := best(row, ours=True))]
        beside = [median(peer) / median(ours) for _, ours, peer in pairs if peer]
        reached = [row.floor / median(ours) for row, ours, _ in pairs if row.floor]
        parts = []
        if beside:
            parts.append(f"is {span(beside, '{:.2f}'.format)} times as fast as the fastest peer")
        if reached:
            parts.append(f"reaches {span(reached, percent)} of the floor's rate")
        if parts:
            count = f"{len(pairs)} sizes" if len(pairs) > 1 else "one size"
            said.append(f"{group.direction}, over {count}, it {' and '.join(parts)}")
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}." if text else ""
