"""The pictures, from a result file alone. The same file gives the same bytes: fixed sizes and fonts, no dates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jit_kernels.bench.record import Estimate, Row, Timing
from jit_kernels.bench.report.drawing import FRAME, PLAIN, SMALL, dark, decades, labels, look, new, png
from jit_kernels.bench.report.view import Group, Result, Style, figure, percent, share, time, words
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

CUT = 4.0  # times ours at which a bar is cut off, so that the short ones can be told apart
FLOAT32 = 2.0**-24  # rounding to float32 costs up to this share of a value
Value = Callable[[Timing], "Estimate | None"]


def pictures(result: Result) -> dict[str, bytes]:
    """PNGs by name."""
    with look():
        return {name: png(draw(), result.digest) for name, draw in plan(result).items()}


def plan(result: Result) -> dict[str, Callable[[], Figure]]:
    """What draws each picture. One for which the file has nothing, e.g. no ceiling for a roofline, is left out."""
    found: dict[str, Callable[[], Figure]] = {
        operator: partial(speed, result, operator, groups) for operator, groups in result.operators.items()
    }
    for group in result.groups:
        if group.accuracy:
            found[f"{group.operator}-{group.direction}-accuracy"] = partial(accuracy, result, group)
    groups = [group for group in result.groups if group.measured]
    roofs = [group for group in groups if group.headline.flops]
    if roofs and {"copy", "ffma"} <= {one.name for one in result.document.ceilings}:
        found["roofline"] = partial(roofline, result, roofs)
    called = [(group, row) for group in groups for row in group.rows if _timed(row, _host)]
    if called:
        found["host"] = partial(host, result, called)
    return found


def speed(result: Result, operator: str, groups: Sequence[Group]) -> Figure:
    """For each direction: bars at its headline row, whose colours name the curves of time against size beside them."""
    bars = [len(_timed(group.headline, _time)) + len(_without(group, group.headline)) for group in groups]
    heights = [1.15 + 0.26 * max(count, 4) for count in bars]
    drawn = new(f"{operator} on {result.device}", sum(heights))
    axes = drawn.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
    for group, (left, right) in zip(groups, axes, strict=True):
        row = group.headline
        _bars(result, group, row, left, _time, cut=True)
        left.set(title=f"{group.direction}, {row.label}", xlabel="time of a call, µs (times ours)")
        if row.floor:
            left.axvline(row.floor, color="black", lw=1, ls=(0, (4, 2)))
            bottom, _ = left.get_ylim()
            left.text(row.floor, bottom, f" floor {figure(row.floor)}", va="bottom", fontsize=SMALL)
        _curves(result, group, right)
    return drawn


def _curves(result: Result, group: Group, axes: Axes) -> None:
    along, *fixed = group.headline.parameters
    rows = group.series
    xs = [row.parameters[along] for row in rows]
    for name in dict.fromkeys(timing.candidate for row in rows for timing in row.timings):
        timings = [(x, timing) for x, row in zip(xs, rows, strict=True) if (timing := row.timing(name))]
        found = [(x, timing.time, timing.graph is None) for x, timing in timings if timing.time]
        if not found:
            continue
        style = result.style(group.operator, name)
        ours = any(timing.ours for _, timing in timings)
        times = [estimate.median for _, estimate, _ in found]
        line = "--" if any(eager for *_, eager in found) else "-"
        above = 3 if ours else 2
        axes.plot([x for x, *_ in found], times, color=style.color, lw=2 if ours else 1.1, ls=line, zorder=above)
        for x, estimate, _ in found:
            face = style.color if estimate.stable else "white"
            axes.plot(x, estimate.median, style.marker, color=style.color, mfc=face, ms=5, zorder=above)
    axes.set(xscale="log", yscale="log", title=f"{group.direction}, {words(group.headline, fixed)}".rstrip(", "))
    axes.set(xlabel=_axis(along), ylabel="time of a call, µs")
    low, high = axes.get_ylim()
    floors = [row.floor for row in rows if row.floor]
    if len(floors) == len(rows):
        low = min(low, min(floors) / 1.6)
        axes.fill_between(xs, floors, low, color="#DDDDDD", lw=0, zorder=1)
        axes.plot(xs, floors, color="black", lw=1, ls=(0, (4, 2)), zorder=1)
        axes.text(xs[-1], low, "floor ", va="bottom", ha="right", fontsize=SMALL)
    axes.set_ylim(low, high)
    axes.grid(True)
    decades(axes)
    # The sizes that were measured, as far as their names don't touch.
    kept: list[int] = []
    for x in reversed(xs):
        if not kept or kept[-1] >= 2.4 * x:
            kept.append(x)
    axes.set_xticks(kept)
    axes.xaxis.set_minor_locator(NullLocator())


def _bars(result: Result, group: Group, row: Row, axes: Axes, value: Value, cut: bool = False) -> None:
    """The candidates of a row, the fastest first. With ``cut`` also how many times ours each takes."""
    timed = _timed(row, value)
    mine = min((found.median for timing, found in timed if timing.ours), default=timed[0][1].median)
    longest = timed[-1][1].median
    end = min(longest, CUT * mine) if cut else longest
    for place, (timing, found) in enumerate(timed):
        style = result.style(group.operator, timing.candidate)
        shade = "white" if dark(style.color) else "black"
        axes.barh(place, min(found.median, end), 0.7, color=style.color)
        if cut:  # the sign that its curve has
            axes.plot(end * 0.04, place, style.marker, color=shade, ms=5)
        said = time(found)
        if cut and found.median != mine:
            said += f" ({figure(found.median / mine)}\N{MULTIPLICATION SIGN})"
        if cut and timing.graph is None and any(timing.graph for timing, _ in timed):
            said += ", eager"
        if found.median > end:
            for shift in (0.955, 0.98):  # two strokes: the bar goes on
                axes.plot([end * shift, end * (shift + 0.02)], [place + 0.4, place - 0.4], color="white", lw=1.8)
            axes.text(end * 0.94, place, said, va="center", ha="right", fontsize=SMALL, color=shade)
        else:
            axes.text(min(found.median, end) + end * 0.02, place, said, va="center", fontsize=SMALL, bbox=FRAME)
    axes.set_xlim(0, end * (1.02 if longest > end else 1.5 if cut else 1.25))
    names = [timing.candidate for timing, _ in timed]
    without = _without(group, row) if cut else {}
    for place, why in enumerate(without.values(), len(names)):
        axes.text(end * 0.02, place, why, va="center", fontsize=SMALL, color="#666666", style="italic", bbox=FRAME)
    names += without
    axes.set_ylim(max(len(names), 4) - (0.1 if cut else 0.5), -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    for (timing, _), label in zip(timed, axes.get_yticklabels(), strict=False):
        label.set_fontweight("bold" if timing.ours else "normal")
    axes.grid(axis="x")
    axes.xaxis.set_major_formatter(PLAIN)


def _without(group: Group, row: Row) -> dict[str, str]:
    """Candidates that have no bar, and why."""
    untimed = [timing for timing in row.timings if timing.time is None]
    found = {one.candidate: "failed its gate" if one.gate == "failed" else "not run" for one in untimed}
    return found | {one.name: "absent" for one in group.absent}


def accuracy(result: Result, group: Group) -> Figure:
    """Error against condition number, a panel for each output; candidates with the same errors share a line."""
    _, *others = group.accuracy[0].parameters
    size = {name: group.accuracy[0].parameters[name] for name in others}
    shown = [one for one in group.accuracy if size.items() <= one.parameters.items()]
    title = f"{group.name}: error against float64, {words(group.accuracy[0], others)}"
    drawn = new(title.rstrip(", "), 3.3)
    outputs = list(shown[0].worst)
    panels = drawn.subplots(1, len(outputs), squeeze=False, sharey=True)[0]
    drawn_as: dict[str, Style] = {}  # by what is drawn
    styles: dict[str, Style] = {}  # by candidate
    for name in dict.fromkeys(one.candidate for one in shown):
        mine = sorted((one for one in shown if one.candidate == name), key=lambda one: one.cond)
        points = {output: [(one.cond, one.worst[output]) for one in mine] for output in outputs}
        styles[name] = style = drawn_as.setdefault(str(points), result.style(group.operator, name))
        for output, axes in zip(outputs, panels, strict=True):
            finite = [point for point in points[output] if all(map(math.isfinite, point))]
            axes.plot(
                [x for x, _ in finite], [y for _, y in finite], style.marker, color=style.color, ms=5, ls="-", lw=1
            )
    for output, axes in zip(outputs, panels, strict=True):
        axes.axhline(FLOAT32, color="black", lw=1, ls=(0, (1, 2)))
        axes.set(title=f"of {output}", xlabel="condition number", xscale="log", yscale="log")
        axes.grid(True)
        decades(axes)
    panels[0].set_ylabel("worst relative error of a family")
    ends: list[tuple[float, str, Style | None]] = [(FLOAT32, "float32 rounding", None)]
    for name, style in styles.items():
        last = [one for one in shown if one.candidate == name and math.isfinite(one.worst[outputs[-1]])]
        if last:
            ends.append((max(last, key=lambda one: one.cond).worst[outputs[-1]], name, style))
    labels(panels[-1], 1.0, ends, inches=(5.5 / len(outputs), 2.2))
    return drawn


def roofline(result: Result, groups: Sequence[Group]) -> Figure:
    """A panel for each group: the roofs of this run, every candidate at the headline row, ours at the other sizes."""
    lines = -(-len(groups) // 2)
    drawn = new(f"Roofline of {result.device}: share of the ceilings of the same run", 2.9 * lines)
    low = 0.5 * min(
        timing.tflop_per_s
        for group in groups
        for row in group.series
        for timing in row.timings
        if timing.tflop_per_s and (timing.ours or row == group.headline)
    )
    axes = list(drawn.subplots(lines, 2, squeeze=False, sharey=True).flat)
    for group, one in zip(groups, axes, strict=False):
        _roof(result, group, one, low)
    for unused in axes[len(groups) :]:
        unused.set_axis_off()
    return drawn


def _roof(result: Result, group: Group, axes: Axes, low: float) -> None:
    row, ceiling = group.headline, result.document.ceiling
    copy = (ceiling("copy") or math.nan) * 1e-3  # TB/s
    peaks = {said: ceiling(name) for name, said in (("ffma", "fp32"), ("fp64_tensor", "fp64 tensor"))}
    rates = {said: rate for said, rate in peaks.items() if rate}
    intensity = row.flops / row.bytes
    ridge = max(rates.values()) / copy
    left, right = min(intensity, ridge) / 8, intensity * 400
    for rate in rates.values():
        axes.plot([left, rate / copy, right], [left * copy, rate, rate], color="black", lw=1)
    top = max(rates.values())
    said = ", ".join(f"{name} {figure(rate)}" for name, rate in rates.items())
    axes.text(right, top * 1.12, f"{said} TFLOP/s", ha="right", fontsize=8)
    x, y = ridge * 0.8, ridge * 0.8 * copy / 1.2  # just below the slope, along it
    turned: dict[str, Any] = {
        "rotation": math.degrees(math.atan2(y, x)),
        "rotation_mode": "anchor",
        "transform_rotates_text": True,
    }
    axes.text(x, y, f"copy {figure(copy)} TB/s", ha="right", va="top", fontsize=8, **turned)
    for other in group.series:
        for timing in other.timings:
            if timing.ours and timing.tflop_per_s and timing.bytes:
                color = result.style(group.operator, timing.candidate).color
                axes.plot(other.flops / timing.bytes, timing.tflop_per_s, ".", color=color, ms=4)
    points = []
    for timing in row.timings:
        if timing.tflop_per_s and timing.bytes:
            style = result.style(group.operator, timing.candidate)
            axes.plot(row.flops / timing.bytes, timing.tflop_per_s, style.marker, color=style.color, ms=6, zorder=4)
            points.append((timing.tflop_per_s, f"{timing.candidate}  {percent(share(timing))}", style))
    axes.set(xscale="log", yscale="log", xlim=(left, right), title=f"{group.name}\n{row.label}")
    axes.set(xlabel="FLOP / byte", ylabel="TFLOP/s", ylim=(low, top * 2))
    beside = intensity * 1.4
    place = math.log(beside / left) / math.log(right / left)
    labels(axes, place, points, inches=(3.4, 2.0), below=min(beside * copy, *rates.values()) / 1.3)
    axes.grid(True)
    decades(axes)


def host(result: Result, called: Sequence[tuple[Group, Row]]) -> Figure:
    """What one eager call costs the host, for each row where it was measured."""
    lines = -(-len(called) // 2)
    bars = max(len(_timed(row, _host)) for _, row in called)
    drawn = new("Host time of one eager call", lines * (1.0 + 0.24 * bars))
    axes = list(drawn.subplots(lines, 2, squeeze=False).flat)
    for (group, row), one in zip(called, axes, strict=False):
        _bars(result, group, row, one, _host)
        one.set(title=f"{group.name}\n{row.label}", xlabel="host time of a call, µs")
    for unused in axes[len(called) :]:
        unused.set_axis_off()
    return drawn


def _time(timing: Timing) -> Estimate | None:
    return timing.time


def _host(timing: Timing) -> Estimate | None:
    return timing.host


def _timed(row: Row, value: Value) -> list[tuple[Timing, Estimate]]:
    found = [(timing, estimate) for timing in row.timings if (estimate := value(timing))]
    return sorted(found, key=lambda pair: pair[1].median)


def _axis(parameter: str) -> str:
    return {"count": "matrices"}.get(parameter, parameter.replace("_", " "))
