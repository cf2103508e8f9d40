"""Invariance: the same rows have the same bytes, again and wherever they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from jit_kernels.checks.compare import differing_rows
from jit_kernels.checks.layouts import arrange, collect, layouts
from jit_kernels.checks.result import Check
from jit_kernels.checks.stage import Rows, Stage
from jit_kernels.checks.workload import Workload

Place = Callable[[int], str]


def hold_to_packed(
    check: Check, stage: Stage, arguments: Rows, packed: Rows, sizes: Sequence[int], place: Place, repeats: int
) -> None:
    """Compares each repeat and each layout with ``packed``, what came of the packed batch, byte for byte.

    Args:
        sizes: Lengths of the sequences.
        place: Says where a row of the packed batch stands.
    """
    for repeat in range(1, repeats + 1):
        different = _differences(stage, stage(*arguments), packed, place)
        if different:
            check.failures.append(f"bytes differ between repeats, the first time in repeat {repeat}: {different}")
            break
    arrangements = layouts(sizes)
    for layout in arrangements[1:]:
        with check.failing(layout.name):
            results = [stage(*(arrange(tensor, places) for tensor in arguments)) for places in layout.calls]
            found = tuple(collect(layout, parts) for parts in zip(*results, strict=True))
            expected = tuple(whole[: len(layout.rows)] for whole in packed)
            different = _differences(stage, found, expected, place)
            if different:
                check.failures.append(f"{layout.name}: bytes differ from the packed batch's: {different}")
    check.details["repeats"] = repeats
    check.details["layouts"] = {layout.name: len(layout.calls) for layout in arrangements}


def place_names(workload: Workload, sizes: Sequence[int]) -> Place:
    """Words for a row of the packed batch, such as ``token 3 of sequence 1``."""
    ends = list(accumulate(sizes))

    def place(row: int) -> str:
        sequence = next(index for index, end in enumerate(ends) if row < end)
        return f"{workload.row} {row - ends[sequence] + sizes[sequence]} of {workload.sequence} {sequence}"

    return place


def _differences(stage: Stage, found: Rows, expected: Rows, place: Place) -> str:
    parts = []
    for name, mine, right in zip(stage.tolerances, found, expected, strict=True):
        rows = differing_rows(mine, right)
        if rows:
            parts.append(f"{name} in {len(rows)} of {len(right)} rows, the first of them {place(rows[0])}")
    return "; ".join(parts)
