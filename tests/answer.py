"""A module that compiles in a third of a second, and what the loader's tests do with it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from jit_kernels.jit import cache
from jit_kernels.jit.arch import Target
from jit_kernels.jit.loader import Kernel, kernel

HOPPER = Target.parse("sm_90a")
BLACKWELL = Target.parse("sm_100a")

SOMEBODY = 54321


def can_give_away() -> bool:
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.chown(file.name, SOMEBODY, SOMEBODY)
        except OSError:
            return False
        return True


ROOT_ONLY = pytest.mark.skipif(not can_give_away(), reason="only root can give a file to another user")

# What a fresh process runs; it reports in JSON.
FRESH = """
import json, subprocess, sys, time, warnings
import torch, tvm_ffi
import jit_kernels
from jit_kernels.jit.loader import kernel

commands, seen = [], []
class Popen(subprocess.Popen):
    def __init__(self, args, *rest, **options):
        commands.append(str(args))
        super().__init__(args, *rest, **options)
subprocess.Popen = Popen
warnings.simplefilter("always")
warnings.showwarning = lambda message, *rest: seen.append(str(message))
begin = time.perf_counter()
try:
    result = jit_kernels.load_jit({name!r}, cpp_files=[{path!r}], header_only=False, target="sm_90a").answer()
except Exception as error:
    result = f"{{type(error).__name__}}: {{error}}"
print(json.dumps(dict(result=result, seconds=time.perf_counter() - begin, commands=commands, warnings=seen)))
"""


def fresh(path: Path, name: str = "answer") -> str:
    return FRESH.format(name=name, path=str(path))


def answer_kernel(path: Path, *args: object, **options) -> Kernel:
    return kernel(*(args or ("answer",)), cpp_files=[path], header_only=False, **{"target": HOPPER, **options})


def load(wanted: Kernel):
    """Loads as a new process would: past the modules that this one remembers."""
    return cache.load(wanted.source, wanted.target)


def entries(root: Path) -> list[Path]:
    return sorted(meta.parent for meta in root.glob("*/*/[!.]*/meta.json"))


def leftovers(root: Path) -> list[str]:
    """Whatever lies beside the entries, but for their locks."""
    return [path.name for path in root.glob("*/*/.*") if not path.name.endswith(".lock")]


class Compiler:
    """A host compiler that logs each compilation, and waits as long as a file named ``slow`` lies beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.program = folder / "logging-c++"
        self.release("1.0")
        self.program.chmod(0o755)

    def release(self, version: str) -> None:
        self.program.write_text(
            f"""#!/bin/sh
case " $* " in
  *" --version "*) echo 'logging-c++ {version}'; exit ;;
  *" -c "*) echo $$ >> '{self.folder}/compiled' ;;
esac
while [ -e '{self.folder}/slow' ]; do sleep 0.05; done
exec {shutil.which("c++")} "$@"
"""
        )

    @property
    def slow(self) -> Path:
        return self.folder / "slow"

    @property
    def compiled(self) -> list[int]:
        """The process id of each compilation so far."""
        log = self.folder / "compiled"
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while not self.compiled:
            assert time.monotonic() < deadline, "the build did not begin"
            time.sleep(0.02)
