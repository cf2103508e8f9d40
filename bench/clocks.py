"""The GPU's clocks, temperature and throttle reasons while a run goes on: read through nvidia-smi, never set."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from jit_kernels.bench.record import Clock

# Bits of clocks_event_reasons.active, from nvml.h. An idle GPU (bit 0) is none that holds a kernel back.
_REASONS = {
    0x2: "applications clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks setting",
}
_FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
_REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # newer and older drivers' name


class ClockLog:
    """Readings once a second while inside ``running()``; empty where there is no nvidia-smi."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = _identity(device) if device.type == "cuda" and shutil.which("nvidia-smi") else None
        self._began = time.monotonic()
        self.readings: list[Clock] = []

    @property
    def seconds(self) -> float:
        """Since the log was made."""
        return time.monotonic() - self._began

    @contextmanager
    def running(self) -> Iterator[None]:
        field = next(filter(self._answers, _REASON_FIELDS), None) if self._gpu else None
        if field is None:
            yield
            return
        started = self.seconds
        process = subprocess.Popen(
            [*self._query(field), "--loop-ms=1000"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            yield
        finally:
            process.terminate()
            output, _ = process.communicate()
            self.readings += parse(output.splitlines(), started)

    def _query(self, field: str) -> list[str]:
        query = ",".join((*_FIELDS, field))
        return ["nvidia-smi", f"--id={self._gpu}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]

    def _answers(self, field: str) -> bool:
        done = subprocess.run(self._query(field), capture_output=True, text=True)
        return done.returncode == 0 and bool(parse(done.stdout.splitlines(), 0.0))


def parse(lines: Iterable[str], started: float) -> list[Clock]:
    """nvidia-smi's lines, one a second; those it left unfinished or could not fill are passed over."""
    found = []
    for index, line in enumerate(lines):
        with suppress(ValueError):
            sm, memory, celsius, watts, reasons = (part.strip() for part in line.split(","))
            active = int(reasons, 16)
            found.append(
                Clock(
                    seconds=started + index,
                    sm_mhz=int(sm),
                    memory_mhz=int(memory),
                    celsius=int(celsius),
                    watts=float(watts),
                    reasons=[name for bit, name in _REASONS.items() if active & bit],
                )
            )
    return found


def _identity(device: torch.device) -> str:
    """What nvidia-smi calls the device: its index there need not be torch's."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
