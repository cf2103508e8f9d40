"""Where a figure comes from: machine, versions, and the very sources."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from jit_kernels import env
from jit_kernels._version import __version__
from jit_kernels.jit.source import CSRC, PACKAGE


def sources_hash() -> str:
    """Stands for every file in ``csrc``: figures with another hash describe other kernels."""
    files = sorted(path for path in CSRC.rglob("*") if path.suffix in (".cuh", ".cu", ".h"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(CSRC)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def provenance(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions, commit where there is one, and the command line, for a result file."""
    import tvm_ffi

    found: dict[str, Any] = {
        "package": __version__,
        "commit": env.COMMIT.get()
        or _output("git", "-C", str(PACKAGE), "describe", "--always", "--dirty", "--abbrev=12"),
        "csrc": sources_hash(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # Without this machine's folders.
        "command": " ".join(Path(word).name if os.path.isabs(word) else word for word in sys.argv),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tvm_ffi": tvm_ffi.__version__,
        "device": platform.processor() or platform.machine(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "arch": f"sm_{properties.major}{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"),
            "cuda": torch.version.cuda,
        }
    return found


def _output(*command: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    return None
