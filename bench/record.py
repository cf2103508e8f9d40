"""What a benchmark run writes: one JSON document, and its meaning. Times are microseconds unless a name says otherwise.

``Document.read(path)`` reads and checks one; ``document.write(path)`` writes it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

try:
    from pydantic import BaseModel, ConfigDict, Field, ValidationError
except ImportError:
    raise ImportError("the benchmark needs pydantic: pip install 'jit-kernels[bench]'") from None

SCHEMA: Literal[2] = 2
AGREE = 0.02  # medians of blocks that differ by no more are called stable

Direction = Literal["forward", "backward"]
CeilingName = Literal["copy", "read", "ffma", "fp64_tensor", "empty_kernel"]


class Record(BaseModel):
    # An infinite error, of a candidate that gave NaN, is written as a string: JSON has no number for it.
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, ser_json_inf_nan="strings")


class Estimate(Record):
    """A repeated measurement."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    samples: int
    stable: bool  # the last three blocks of samples had medians within 2 % of each other

    @property
    def spread(self) -> float:
        """The interquartile range as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    @classmethod
    def of(cls, blocks: Sequence[Sequence[float]]) -> Estimate:
        """From blocks of samples, in the order they were taken."""
        samples = [sample for block in blocks for sample in block]
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        return cls(median=median, low=low, high=high, samples=len(samples), stable=agree(blocks))


def agree(blocks: Sequence[Sequence[float]]) -> bool:
    """Whether the last three blocks have medians within `AGREE` of each other."""
    if len(blocks) < 3:
        return False
    medians = [statistics.median(block) for block in blocks[-3:]]
    return max(medians) <= (1 + AGREE) * min(medians)


class Ceiling(Record):
    """What this machine reaches in this run, by a program that does nothing else.

    copy: device-to-device copy, bytes read + written. read: a kernel that only reads. ffma, fp64_tensor: kernels of
    multiply-adds from registers (2 FLOP each). empty_kernel: one of many in a CUDA graph.
    """

    name: CeilingName
    unit: Literal["GB/s", "TFLOP/s", "us"]
    value: Estimate


class Candidate(Record):
    """One implementation, and whether it could be had here."""

    operator: str
    direction: Direction
    name: str
    what: str  # what it is, in a line
    how: str  # how to have it
    versions: dict[str, str] = {}  # of others' packages that it is made of, where they are installed
    ours: bool
    present: bool
    reason: str = ""  # why it is absent


class Timing(Record):
    """One candidate on one row. What was not measured is null."""

    candidate: str
    ours: bool
    gate: Literal["passed", "failed", "not run"]
    reason: str = ""  # why the gate failed, or why something was left out
    errors: dict[str, float] = {}  # of the gate: largest relative Frobenius error of a sample against float64
    bounds: dict[str, float] = {}
    graph: Estimate | None = None  # per call, in a CUDA graph over rotated inputs that L2 does not hold
    graph_calls: int | None = None  # calls in that graph
    eager: Estimate | None = None  # events around each of some eager calls in a row; on a CPU, a clock
    host: Estimate | None = None  # host time of one eager call, the launch queue never full
    kernel: float | None = None  # device time of one eager call's kernels, cold, by CUPTI through torch.profiler
    launches: int | None = None  # kernels, copies and memsets of one call, by the same
    peak_bytes: int | None = None  # allocated during one call beyond its inputs, outputs included
    bytes: int | None = None  # inputs read once and outputs written once, in this candidate's dtypes
    gb_per_s: float | None = None  # bytes over the time: graph, else eager
    tflop_per_s: float | None = None  # the row's flops over the same time
    share: dict[CeilingName, float] = {}  # of this run's ceilings: copy, and ffma or fp64_tensor; 1 is at the ceiling

    @property
    def time(self) -> Estimate | None:
        """The graph's time, or the eager one where there is none."""
        return self.graph or self.eager


class Row(Record):
    """One input size, all candidates interleaved."""

    operator: str
    direction: Direction
    label: str  # "T=128 H=4096", "N=707 d=128"
    parameters: dict[str, int]  # tokens and hidden_size, or count and head_dim
    bytes: int  # the fewest: inputs read once, outputs written once
    flops: int  # the fewest that are known: an SPD inverse of d^3 FLOP and a product of 2 d^3
    floor: float | None  # us: the larger of bytes over the copy rate, flops over the best arithmetic rate, empty kernel
    floor_by: CeilingName | None  # which of them
    began: float  # seconds since the run began: to match with `clocks`
    host_add: Estimate | None = None  # host time of torch.add, taking turns with the candidates': how fast this host is
    timings: list[Timing]

    def timing(self, candidate: str) -> Timing | None:
        return next((timing for timing in self.timings if timing.candidate == candidate), None)


class Accuracy(Record):
    """One candidate on one family of inputs, against float64."""

    operator: str
    direction: Direction
    family: str
    parameters: dict[str, int]
    samples: int
    cond: float  # median condition number of what is inverted
    candidate: str
    ours: bool
    worst: dict[str, float]  # largest relative Frobenius error of a sample, for each output or gradient
    median: dict[str, float]


class FirstCall(Record):
    """What a first call waits for, for one build."""

    operator: str
    build: str  # "head_dim 128"
    cold_seconds: float | None  # compiling, as noted in the cache entry when it was built
    warm_milliseconds: float | None  # loading from the cache, in a fresh process that finds no compiler
    import_milliseconds: float | None  # before the first of them, once a process: importing tvm_ffi
    reason: str = ""


class Growth(Record):
    """How a candidate's time grows with tokens or matrices, the other parameter fixed."""

    operator: str
    direction: Direction
    candidate: str
    along: str  # "tokens", "count"
    fixed: dict[str, int]
    sizes: list[int]
    times: list[float]  # medians of `Timing.time`
    per_unit: float  # between the two largest sizes: what one more token or matrix costs


class Clock(Record):
    """The GPU's state while the run went on; read, never set."""

    seconds: float  # since the run began
    sm_mhz: int
    memory_mhz: int
    celsius: int
    watts: float
    reasons: list[str]  # what holds the clocks back; empty where nothing does


class Document(Record):
    """One run."""

    schema_version: Literal[2] = Field(SCHEMA, alias="schema")
    kind: Literal["jit-kernels bench"] = "jit-kernels bench"
    provenance: dict[str, Any]  # device, driver, versions, commit, hash of csrc, command
    rows_set: str  # "full", "quick"
    timer: Literal["cuda", "cpu"]  # cpu: a clock around calls on a CPU; nothing there speaks of a GPU
    notes: list[str] = []  # what a reader must know: smaller inputs, rows left out, throttling seen
    ok: bool  # no gate failed
    complete: bool  # the run came to its end; a document of one that broke off holds what was measured until then
    seconds: float
    ceilings: list[Ceiling] = []
    candidates: list[Candidate] = []
    rows: list[Row] = []
    accuracy: list[Accuracy] = []
    first_calls: list[FirstCall] = []
    growth: list[Growth] = []
    clocks: list[Clock] = []

    def ceiling(self, name: str) -> float | None:
        """The median of a ceiling in its own unit; None where it could not be measured."""
        return next((ceiling.value.median for ceiling in self.ceilings if ceiling.name == name), None)

    def row(self, operator: str, direction: str, label: str) -> Row | None:
        wanted = (operator, direction, label)
        return next((row for row in self.rows if (row.operator, row.direction, row.label) == wanted), None)

    def write(self, path: Path) -> None:
        """Writes the JSON, whole or not at all; figures with six digits, which is more than they hold."""
        part = path.with_name(f".{path.name}.part")
        part.write_text(self.json_text() + "\n")
        part.replace(path)

    def json_text(self) -> str:
        return _rounded(self).model_dump_json(indent=1, by_alias=True)

    @classmethod
    def read(cls, path: Path) -> Document:
        """Reads and checks a result file.

        Raises:
            ValueError: it is none; the message names the file and the first field that is wrong.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ValueError(
                f"{path} is no result file of `jit-kernels bench` (schema {SCHEMA}): {where}: {first['msg']}"
            ) from None


def _rounded(document: Document) -> Document:
    return Document.model_validate(_six_digits(document.model_dump()))


def _six_digits(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _six_digits(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_six_digits(one) for one in value]
    return value


def growths(rows: Iterable[Row]) -> list[Growth]:
    """From rows that differ in their size alone, for each candidate that was timed on at least two."""
    found: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for row in rows:
        along = next(iter(row.parameters))
        fixed = {name: value for name, value in row.parameters.items() if name != along}
        for timing in row.timings:
            if timing.time is not None:
                key = (row.operator, row.direction, timing.candidate, along, *fixed.items())
                found.setdefault(key, []).append((row.parameters[along], timing.time.median))
    grown = []
    for (operator, direction, candidate, along, *rest), points in found.items():
        points.sort()
        if len(points) < 2 or len(points) > len({size for size, _ in points}):
            continue  # rows of one size differ in something that is no parameter
        (before, shorter), (last, longer) = points[-2:]
        grown.append(
            Growth(
                operator=operator,
                direction=direction,
                candidate=candidate,
                along=along,
                fixed=dict(rest),
                sizes=[size for size, _ in points],
                times=[time for _, time in points],
                per_unit=(longer - shorter) / (last - before),
            )
        )
    return grown
