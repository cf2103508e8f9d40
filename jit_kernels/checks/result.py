"""What was found: a `Result` for each input, with the four checks in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jit_kernels.messages import first_line

CHECKS = ("forward accuracy", "forward invariance", "gradient accuracy", "gradient invariance")


@dataclass
class Check:
    """One of the four checks on one input: it holds where ``failures`` is empty."""

    name: str
    failures: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)  # what was compared, for the JSON document

    def fail(self, during: str, error: Exception) -> None:
        self.failures.append(f"{during}: {first_line(error)}")

    @contextmanager
    def failing(self, during: str) -> Iterator[None]:
        """Whatever the operator raises in the block is a failure of this check, and not of the tool."""
        try:
            yield
        except Exception as error:
            self.fail(during, error)


@dataclass
class Result:
    """One input of one operator. Where nothing could run, ``ran`` is ``error`` and there are no checks."""

    operator: str
    sample: str
    device: str
    count: int  # rows that were computed …
    full_count: int  # … of those that users run
    sequences: list[int]  # how many rows each has
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)  # dtype and shape
    ran: str = ""
    reason: str = ""
    checks: list[Check] = field(default_factory=list)
    baseline: str = ""
    baseline_error: dict[str, float] = field(default_factory=dict)
    milliseconds: float | None = None
    baseline_milliseconds: float | None = None

    @property
    def failures(self) -> list[str]:
        """Those of all checks, each after its check's name."""
        if self.ran == "error":
            return [f"nothing ran: {self.reason}"]
        return [f"{check.name}: {failure}" for check in self.checks for failure in check.failures]

    def measured(self, check: str) -> dict[str, float]:
        """The relative Frobenius errors that the check of this name found, by output or gradient."""
        return next((one.details.get("error", {}) for one in self.checks if one.name == check), {})

    def as_dict(self) -> dict[str, Any]:
        """For JSON: an error that is no finite number is None."""
        found = {name: value for name, value in vars(self).items() if name != "checks"}
        found["error"] = self.measured("forward accuracy")
        found["gradient_error"] = self.measured("gradient accuracy")
        found["checks"] = {
            one.name: {"ok": not one.failures, "failures": one.failures, **one.details} for one in self.checks
        }
        return _finite(found | {"failures": self.failures, "ok": not self.failures})


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
