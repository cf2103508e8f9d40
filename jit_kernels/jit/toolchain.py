"""Finds a CUDA toolkit that can really build, a host compiler and ninja.

An ``nvcc`` on PATH proves little: it is often a wrapper script far from its toolkit, or a toolkit without its
headers. So each candidate is resolved to the real toolkit and checked before use, and a refusal names the file
that was missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jit_kernels import env
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import CompilerNotFoundError, CompilerTooOldError, ToolchainError

CURE = (
    "install a CUDA toolkit and set CUDA_HOME to it, or `pip install 'jit-kernels[nvcc]'`; "
    "or use kernels built elsewhere through JIT_KERNELS_PREBUILT_DIR"
)

_HERE = re.compile(r"^#\$ _HERE_=(.+)$", re.M)
_RELEASE = re.compile(r"release (\d+)\.(\d+)")
_BUILD = re.compile(r"V[\d.]+")


class Probe:
    """Remembers what programs answered, by path, size and time of change, so that a warm start runs none."""

    def __init__(self, memo: Path | None = None) -> None:
        self._memo = memo
        self._answers: dict[str, str] = {}
        if memo is not None:
            with suppress(OSError, ValueError, AttributeError):
                stored = json.loads(memo.read_text()).items()
                self._answers = {key: answer for key, answer in stored if isinstance(answer, str)}

    def output(self, program: Path, *arguments: str) -> str:
        """What ``program arguments`` prints. Raises OSError or subprocess.SubprocessError where it fails."""
        stat = program.stat()
        key = " ".join([str(program), *arguments, str(stat.st_size), str(stat.st_mtime_ns)])
        if key not in self._answers:
            done = subprocess.run(
                [str(program), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                check=True,
                timeout=60,
            )
            self._answers[key] = done.stdout
            self.save()
        return self._answers[key]

    def save(self) -> None:
        """Writes the memo, where its folder exists."""
        if self._memo is None or not self._memo.parent.is_dir():
            return
        with suppress(OSError):  # a memo that can't be kept costs time, nothing else
            with tempfile.NamedTemporaryFile("w", dir=self._memo.parent, prefix=".memo-", delete=False) as file:
                json.dump(self._answers, file)
            os.replace(file.name, self._memo)


@dataclass(frozen=True)
class Toolchain:
    """A checked set of build tools. ``identity`` stands for their versions in cache keys."""

    root: Path
    origin: str
    nvcc: Path
    version: tuple[int, int]
    library_dir: Path
    include_dirs: tuple[Path, ...]  # where its headers really lie, behind any links
    host: Path
    host_command: tuple[str, ...]  # the host compiler with what CXX puts around it
    identity: str


@dataclass(frozen=True)
class Refusal:
    origin: str
    where: str
    reason: str
    too_old: bool = False

    def __str__(self) -> str:
        return f"{self.origin} ({self.where}): {self.reason}"


def ninja() -> Path:
    """The ninja program: that of the Python package where installed, else the one on PATH.

    Raises:
        ToolchainError: there is none.
    """
    if importlib.util.find_spec("ninja"):
        from ninja import BIN_DIR

        program = Path(BIN_DIR) / "ninja"
        if program.exists():
            return program
    found = shutil.which("ninja")
    if found is None:
        raise ToolchainError("ninja was not found", "pip install ninja")
    return Path(found)


def host_compiler() -> tuple[Path, tuple[str, ...]]:
    """The C++ compiler that ``CXX`` names, else ``c++``; and its command, with a launcher before it or flags after it.

    Raises:
        ToolchainError: it isn't on PATH.
    """
    text = env.CXX.get()
    words = shlex.split(text)
    launcher = words[:1] if Path(words[0]).name in ("ccache", "sccache", "distcc") else []
    name, *flags = words[len(launcher) :] or [""]
    found = shutil.which(name)
    if found is None:
        raise ToolchainError(
            f"the host compiler was not found (CXX={text!r})", "install g++, or set CXX to a C++20 compiler"
        )
    program = Path(found).absolute()
    return program, (*launcher, str(program), *flags)


def candidates(probe: Probe) -> Iterator[tuple[str, Path]]:
    """(origin, toolkit root), in the order of preference."""
    for variable in (env.CUDA_HOME, env.CUDA_PATH):
        root = variable.get()
        if root is not None:
            yield variable.name, root
    on_path = shutil.which("nvcc")
    if on_path is not None:
        yield "nvcc on PATH", toolkit_of(Path(on_path), probe)
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for nvcc in sorted(Path(location).glob("cu*/bin/nvcc"), reverse=True):
            yield "the nvidia-cuda-nvcc package", nvcc.parent.parent
    yield "the usual place", Path("/usr/local/cuda")


def toolkit_of(nvcc: Path, probe: Probe) -> Path:
    """The toolkit behind an nvcc on PATH: the folder that nvcc itself says it works from."""
    with suppress(OSError, subprocess.SubprocessError):
        # A dry run prints nvcc's own settings; _HERE_ is the folder of the real program, behind any wrapper.
        match = _HERE.search(probe.output(nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"))
        if match:
            return Path(match[1]).parent
    return nvcc.resolve().parent.parent


def inspect(origin: str, root: Path, target: Target | None, probe: Probe) -> Toolchain | Refusal:
    """Checks one candidate: every file that a build needs is there, nvcc runs, and knows the target."""

    def refuse(reason: str) -> Refusal:
        return Refusal(origin, str(root), reason)

    def first(*patterns: str) -> Path | None:
        for pattern in patterns:
            if "*" not in pattern and (root / pattern).exists():
                return root / pattern
            if "*" in pattern and (found := sorted(root.glob(pattern))):
                return found[0]
        return None

    found = {}
    for what, patterns in {
        "bin/nvcc": ("bin/nvcc",),
        "bin/ptxas": ("bin/ptxas",),
        "nvvm/bin/cicc": ("nvvm/bin/cicc",),
        "include/cuda_runtime.h": ("include/cuda_runtime.h", "targets/*/include/cuda_runtime.h"),
        "include/crt/host_config.h": ("include/crt/host_config.h", "targets/*/include/crt/host_config.h"),
        "include/nv/target (CCCL)": (
            "include/nv/target",
            "include/cccl/nv/target",
            "targets/*/include/nv/target",
            "targets/*/include/cccl/nv/target",
        ),
        "lib64/libcudart_static.a": (
            "lib64/libcudart_static.a",
            "lib/libcudart_static.a",
            "targets/*/lib/libcudart_static.a",
        ),
    }.items():
        path = first(*patterns)
        if path is None:
            return refuse(f"{what} is missing" if root.is_dir() else "there is no such folder")
        found[what] = path

    nvcc = found["bin/nvcc"]
    try:
        text = probe.output(nvcc, "--version")
    except (OSError, subprocess.SubprocessError) as error:
        return refuse(f"{nvcc} --version failed: {error}")
    release = _RELEASE.search(text)
    if release is None:
        return refuse(f"{nvcc} --version names no release: {text.strip()[:200]!r}")
    version = (int(release[1]), int(release[2]))
    if target is not None and version < target.first_nvcc:
        needed = ".".join(map(str, target.first_nvcc))
        reason = f"nvcc {version[0]}.{version[1]} does not know {target}, which needs {needed} or newer"
        return Refusal(origin, str(root), reason, too_old=True)

    try:
        host, host_command = host_compiler()
        host_text = probe.output(host, "--version")
    except ToolchainError as error:
        return refuse(error.cause)
    except (OSError, subprocess.SubprocessError) as error:
        return refuse(f"the host compiler does not run: {error}")

    builds = _BUILD.search(text)
    return Toolchain(
        root=root,
        origin=origin,
        nvcc=nvcc,
        version=version,
        library_dir=found["lib64/libcudart_static.a"].parent,
        include_dirs=tuple(
            found[header].resolve().parents[depth]
            for header, depth in (
                ("include/cuda_runtime.h", 0),
                ("include/crt/host_config.h", 1),
                ("include/nv/target (CCCL)", 1),
            )
        ),
        host=host,
        host_command=host_command,
        identity="; ".join(
            [
                f"nvcc {builds[0] if builds else version}",
                host_text.splitlines()[0],
                *host_command[host_command.index(str(host)) + 1 :],
                *(f"{name}={value}" for name, value in env.of_compilers().items()),
            ]
        ),
    )


def survey(target: Target | None, probe: Probe) -> list[Toolchain | Refusal]:
    """Every candidate with its verdict, in the order of preference."""
    return [inspect(origin, root, target, probe) for origin, root in candidates(probe)]


def find(target: Target | None, probe: Probe) -> Toolchain:
    """The first usable toolchain.

    Raises:
        CompilerNotFoundError, CompilerTooOldError: none is usable; the message lists each and what it lacks.
    """
    refusals = []
    for origin, root in candidates(probe):
        verdict = inspect(origin, root, target, probe)
        if isinstance(verdict, Toolchain):
            return verdict
        refusals.append(verdict)
    kind = CompilerTooOldError if any(refusal.too_old for refusal in refusals) else CompilerNotFoundError
    raise kind("no usable CUDA compiler was found:" + "".join(f"\n  - {refusal}" for refusal in refusals), CURE)
