"""What all pictures share: their look, their PNGs, and labels that don't touch each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import matplotlib
from jit_kernels.bench.report.view import Style
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

WIDTH = 8.3  # inches, of 100 px each where a README shows it; drawn at twice that
DPI = 200
SMALL = 8.5  # points
FRAME: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#444444",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
}
PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}")


@contextmanager
def look() -> Iterator[None]:
    """Whatever the user's own settings are: matplotlib's defaults, and the above."""
    settings: Any = {**matplotlib.rcParamsDefault, "backend": "agg", **SETTINGS}
    with matplotlib.rc_context(settings):
        yield


def new(title: str, height: float) -> Figure:
    """An empty figure as wide as a README, so many inches high under its title."""
    drawn = Figure(figsize=(WIDTH, 0.4 + height))
    drawn.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return drawn


def png(drawn: Figure, digest: str) -> bytes:
    """The figure's PNG, which names the result file that it was drawn from."""
    full, out = BytesIO(), BytesIO()
    drawn.savefig(full, format="png", dpi=DPI)
    # A palette makes a third of the size; each colour of a bar is in it as it is.
    few = Image.open(full).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    origin = PngInfo()
    origin.add_text("Source", f"sha256:{digest}")  # the file that it was drawn from; no date, no program's release
    few.save(out, "png", optimize=True, pnginfo=origin)
    return out.getvalue()


def origin(picture: bytes) -> str | None:
    """The digest of the result file that a picture was drawn from."""
    try:
        return Image.open(BytesIO(picture)).info.get("Source")
    except UnidentifiedImageError:
        return None


def dark(color: str) -> bool:
    """Whether white reads better on it than black, by its relative luminance (WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) < 0.179


def decades(axes: Axes) -> None:
    """Plain numbers where they are short, powers of ten where not; no ticks between."""
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(LogLocator(numticks=99))
        axis.set_minor_locator(NullLocator())
        if low > 1e-3 and high < 1e5:
            axis.set_major_formatter(PLAIN)


def labels(
    axes: Axes,
    x: float,
    found: Iterable[tuple[float, str, Style | None]],
    inches: tuple[float, float],
    below: float = math.inf,
) -> None:
    """Texts with their signs to the right of x, at the heights of their y; moved apart where they would touch.

    x is a share of the axes, which are about so many inches wide and high; y is below a value of the axes' scale.
    """
    low, high = (math.log(y) for y in axes.get_ylim())
    ordered = sorted(found, key=lambda one: one[0])
    wanted = [(math.log(y) - low) / (high - low) for y, *_ in ordered]
    gap = 0.15 / inches[1]
    highest = (math.log(below) - low) / (high - low)
    for place, (height, (_, said, style)) in enumerate(zip(apart(wanted, gap), ordered, strict=True)):
        height = min(height, highest - gap * (len(ordered) - 1 - place))
        if style is not None:
            sign: dict[str, Any] = {"color": style.color, "marker": style.marker, "ms": 4, "clip_on": False}
            axes.plot(x + 0.1 / inches[0], height, transform=axes.transAxes, **sign)
        axes.text(x + 0.18 / inches[0], height, said, va="center", fontsize=8, transform=axes.transAxes)


def apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Rising positions, moved as little as possible (least squares) so that neighbours are at least ``gap`` apart."""
    blocks: list[tuple[float, int]] = []  # mean and length of runs that touch
    for place, position in enumerate(wanted):
        mean, length = position - place * gap, 1
        while blocks and blocks[-1][0] >= mean:
            before, more = blocks.pop()
            mean, length = (before * more + mean * length) / (more + length), more + length
        blocks.append((mean, length))
    means = [mean for mean, length in blocks for _ in range(length)]
    return [mean + place * gap for place, mean in enumerate(means)]
