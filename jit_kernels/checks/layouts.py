"""The ways in which the same rows reach an operator: packed, in pieces, in another order, padded.

The rows of a batch belong to sequences: the tokens of a prompt, the matrices of a video. The *packed* batch holds the
rows of one sequence after the other, and is what every other layout is held to. A layout says call by call which row of
the packed batch stands where, so whatever comes out is compared row by row, by (sequence, position).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise

import torch
from torch import Tensor

from jit_kernels.messages import describe

PADDING = -1
CHUNKS = (1, 2, 7, 32, 33, 127)  # rows of a piece: one, few, and around the counts at which kernels change their grid
ALONE = 129  # rows that are computed one by one
EXTRA = 3  # positions by which even the longest sequence is padded


@dataclass(frozen=True)
class Layout:
    """``calls`` has, for each call, the packed batch's row at each place of its batch dimensions, or PADDING."""

    name: str
    calls: tuple[Tensor, ...]

    @property
    def rows(self) -> Tensor:
        """The rows that stand in the calls, in the order in which they come out."""
        found = torch.cat([call.flatten() for call in self.calls])
        return found[found != PADDING]


def lengths(count: int) -> list[int]:
    """``count`` rows in six sequences, all as unlike as they can be: the first is empty, as on an idle rank."""
    ends = [0, *(count * end // 15 for end in accumulate(range(6)))]
    return [end - start for start, end in pairwise(ends)]


def layouts(sizes: Sequence[int]) -> list[Layout]:
    """The seven layouts of sequences of these lengths, the packed one first; and single rows."""
    packed = torch.arange(sum(sizes))
    sequences = packed.split(list(sizes))
    width = max(sizes, default=0) + EXTRA
    padded = torch.full((len(sizes), width), PADDING)
    left, right = padded.clone(), padded.clone()
    for row, sequence in enumerate(sequences):
        left[row, width - len(sequence) :] = sequence
        right[row, : len(sequence)] = sequence
    return [
        Layout("packed", (packed,)),
        Layout("packed in chunks", tuple(_chunks(packed))),
        Layout("each sequence whole", tuple(sequences)),
        Layout("each sequence in chunks", tuple(chunk for sequence in sequences for chunk in _chunks(sequence))),
        Layout("sequences permuted", (torch.cat(sequences[::-1]),)),
        Layout("left-padded", (left,)),
        Layout("right-padded", (right,)),
        Layout("each row alone", tuple(packed[:ALONE].split(1))),
    ]


def arrange(tensor: Tensor, places: Tensor) -> Tensor:
    """One call's tensor: the rows of the packed ``tensor`` at their places, garbage at the padding (NaN first).

    A piece of the packed batch is a view of it, as whoever slices a batch has it.
    """
    if places.ndim == 1 and len(places) and torch.equal(places, torch.arange(len(places)) + places[0]):
        return tensor[places[0] : places[-1] + 1]
    made = tensor[places.clamp(min=0).to(tensor.device)]
    padding = (places == PADDING).nonzero(as_tuple=True)
    inf, largest = float("inf"), torch.finfo(tensor.dtype).max
    values = torch.tensor([float("nan"), inf, -inf, largest, 1.0], dtype=tensor.dtype, device=tensor.device)
    garbage = values[torch.arange(len(padding[0])) % len(values)]
    made[padding] = garbage.view(-1, *[1] * (tensor.ndim - 1)).expand(-1, *tensor.shape[1:])
    return made


def collect(layout: Layout, results: Sequence[Tensor]) -> Tensor:
    """The calls' results in the order of the packed batch, without the padding's."""
    rows = []
    for places, result in zip(layout.calls, results, strict=True):
        if result.shape[: places.ndim] != places.shape:
            raise ValueError(f"{describe(result)} for a batch of shape {list(places.shape)}")
        active = places != PADDING  # a mask costs more than many an operator: only where it is needed
        rows.append(result if active.all() else result[active.to(result.device)])
    together, order = torch.cat(rows), layout.rows.argsort()
    return together if torch.equal(order, torch.arange(len(order))) else together[order.to(together.device)]


def _chunks(rows: Tensor) -> Iterator[Tensor]:
    sizes, start = cycle(CHUNKS), 0
    while start < len(rows):
        size = next(sizes)
        yield rows[start : start + size]
        start += size
