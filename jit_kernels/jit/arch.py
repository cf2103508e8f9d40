"""Arch targets: what a kernel is compiled for, taken from a device or named."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

# The first nvcc release that knows each arch (major, minor): from the CUDA release notes.
_FIRST_NVCC = {
    (8, 9): (11, 8),
    (9, 0): (12, 0),
    (10, 0): (12, 8),
    (10, 3): (12, 9),
    (11, 0): (13, 0),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}


@dataclass(frozen=True, order=True)
class Target:
    """An arch target such as ``sm_90a``. Str gives that name."""

    major: int
    minor: int
    suffix: str = ""

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Reads ``sm_90a``, ``90a`` or ``9.0a``; from 9.0 on, a missing suffix means ``a``, as `of` gives it.

        Raises:
            ValueError: the text names no arch target.
        """
        match = re.fullmatch(r"(?:sm_)?(\d{1,2})\.?(\d)([af]?)", text.strip().lower())
        if not match:
            raise ValueError(f"{text!r} is no arch target: expected a name such as sm_90a or sm_100a")
        major, minor, suffix = int(match[1]), int(match[2]), match[3]
        return cls(major, minor, suffix or _suffix(major))

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """The target of this very device, not of the first one that a tool lists."""
        major, minor = torch.cuda.get_device_capability(device)
        return cls(major, minor, _suffix(major))

    @classmethod
    def here(cls) -> Target:
        """The target of the current CUDA device.

        Raises:
            ValueError: there is none.
        """
        if not torch.cuda.is_available():
            raise ValueError("there is no CUDA device to take the arch target from: name it, as in target='sm_90a'")
        return cls.of(torch.device("cuda", torch.cuda.current_device()))

    @classmethod
    def of_all_devices(cls) -> list[Target]:
        """The targets of this machine's usable GPUs, each once; none where the driver is too old for torch."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return list(dict.fromkeys(cls.of(torch.device("cuda", index)) for index in range(count)))

    @property
    def flags(self) -> list[str]:
        name = str(self)[3:]
        return [f"-gencode=arch=compute_{name},code=sm_{name}"]

    @property
    def first_nvcc(self) -> tuple[int, int]:
        """The oldest nvcc release that compiles for this target."""
        return _FIRST_NVCC.get((self.major, self.minor), (11, 0))


def _suffix(major: int) -> str:
    # Arch-specific features (wgmma, tcgen05, …) exist only in the 'a' targets, from Hopper on.
    return "a" if major >= 9 else ""
