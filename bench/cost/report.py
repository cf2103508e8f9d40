"""Predictions beside a run's figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from jit_kernels.bench.cost import collapse, delta_factors, delta_factors_backward
from jit_kernels.bench.cost.machine import B200, Machine, Prediction, Rows, expected, rows_of
from jit_kernels.bench.record import Document, Row, Timing

from jit_kernels.jit.arch import Target

WITHIN = 0.15  # what the model promises


class Model(Protocol):
    """One candidate of ours. ``anchors``: the rows it is calibrated on; all others it predicts."""

    operator: str
    direction: str
    candidate: str
    anchors: tuple[dict[str, int], ...]

    @classmethod
    def calibrated(cls, machine: Machine, measured: Rows) -> Model: ...
    def predict(self, machine: Machine, parameters: dict[str, int]) -> Prediction: ...
    def waves(self, machine: Machine, parameters: dict[str, int]) -> int: ...
    @staticmethod
    def traffic(parameters: dict[str, int]) -> tuple[int, int]: ...  # the fewest bytes read and written


MODELS: tuple[type[Any], ...] = (
    collapse.Forward,
    collapse.Backward,
    delta_factors.Fp64Tensor,
    delta_factors.Fp32,
    delta_factors_backward.Backward,
)


def floor(machine: Machine, model: Model, row: Row) -> float:
    """The fewest microseconds: a launch, the bytes at their rates, or the FLOP at the better rate."""
    flop = row.flops / max(machine.ffma, machine.fp64_tensor) * 1e-6
    return max(machine.launch, machine.transfer(*model.traffic(row.parameters)), flop)


@dataclass(frozen=True)
class Estimated:
    """One row on one GPU."""

    prediction: Prediction
    waves: int
    floor: float

    @classmethod
    def of(cls, machine: Machine, model: Model, row: Row) -> Estimated:
        parameters = row.parameters
        return cls(model.predict(machine, parameters), model.waves(machine, parameters), floor(machine, model, row))

    def document(self) -> dict[str, Any]:
        found = self.prediction
        return {"us": found.time, "parts": asdict(found), "waves": self.waves, "floor": self.floor}


@dataclass(frozen=True)
class Line:
    """One of our candidates on one row: on the GPU that was measured, and on the other one."""

    row: Row
    timing: Timing
    model: Model
    here: Estimated
    there: Estimated

    @property
    def measured(self) -> float | None:
        return self.timing.graph.median if self.timing.graph else None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return self.here.prediction.time / self.measured if self.measured else None

    @property
    def calibrated(self) -> bool:
        return self.row.parameters in self.model.anchors

    @property
    def off(self) -> bool:
        return self.ratio is not None and abs(self.ratio - 1) > WITHIN

    def __str__(self) -> str:
        return f"{self.row.operator} {self.row.direction} {self.row.label} {self.timing.candidate}"

    def document(self) -> dict[str, Any]:
        return {
            "operator": self.row.operator,
            "direction": self.row.direction,
            "label": self.row.label,
            "parameters": self.row.parameters,
            "candidate": self.timing.candidate,
            "measured": self.measured,
            "ratio": self.ratio,
            "calibrated": self.calibrated,
            "here": self.here.document(),
            "there": self.there.document(),
        }


@dataclass(frozen=True)
class Report:
    here: Machine
    there: Machine
    models: tuple[Model, ...]
    lines: tuple[Line, ...]
    run: dict[str, Any]  # where the figures are from: the result's provenance

    @property
    def off(self) -> list[Line]:
        return [line for line in self.lines if line.off]

    def tables(self) -> Iterator[tuple[str, list[Line]]]:
        """The lines of each model under a title."""
        for model in self.models:
            key = model.operator, model.direction, model.candidate
            yield ", ".join(key), [line for line in self.lines if line.model is model]

    def document(self) -> dict[str, Any]:
        """As JSON; microseconds, GB/s, TFLOP/s, and what each model calls its own."""
        return {
            "schema": 1,
            "kind": "jit-kernels cost",
            "provenance": self.run,
            "within": WITHIN,
            "here": _plain(self.here),
            "there": _plain(self.there),
            "latencies": {
                title: {"values": _plain(lines[0].model), "calibrated_on": list(lines[0].model.anchors)}
                for title, lines in self.tables()
            },
            "rows": [line.document() for line in self.lines],
        }


def report(document: Document) -> Report:
    """Every row of a run on which one of ours was timed.

    Raises:
        ValueError: no model covers a row of ours, or a row that one is calibrated on is missing.
        JitError, FileNotFoundError: the machine code can't be had.
    """
    here = Machine.of(document)
    there = expected(B200, here)
    known = {(model.operator, model.direction, model.candidate): model for model in MODELS}
    ready: dict[type[Any], Model] = {}
    lines = []
    for row in document.rows:
        for timing in row.timings:
            if not timing.ours or timing.gate != "passed":
                continue
            key = (row.operator, row.direction, timing.candidate)
            if key not in known:
                raise ValueError(f"no cost model covers {' '.join(key)}; those there are: {sorted(known)}")
            kind = known[key]
            if kind not in ready:
                ready[kind] = kind.calibrated(here, rows_of(document))
            model = ready[kind]
            lines.append(Line(row, timing, model, Estimated.of(here, model, row), Estimated.of(there, model, row)))
    return Report(here, there, tuple(ready.values()), tuple(lines), document.provenance)


def cells(line: Line, other: str) -> dict[str, str]:
    """A line of a table by its columns; times in microseconds."""
    here, there, measured = line.here, line.there, line.measured
    ratio = "-" if line.ratio is None else f"{line.ratio:.2f}" + (" calibrated" if line.calibrated else "")
    return {
        "": line.row.label,
        "waves": str(here.waves),
        "predicted": _us(here.prediction.time),
        "measured": "-" if measured is None else _us(measured),
        "ratio": ratio + (" OFF" if line.off else ""),
        **{name: _us(value) if value else "" for name, value in asdict(here.prediction).items()},
        "floor": _us(here.floor),
        "x floor": f"{(measured or here.prediction.time) / here.floor:.2f}",
        f"{other}, predicted": f"{_us(there.prediction.time)} ({there.prediction.most})",
        "its floor": _us(there.floor),
    }


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _plain(record: Any) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Target) else value for key, value in asdict(record).items()}
