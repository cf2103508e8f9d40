"""Every environment variable that the package reads, in one typed table."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable: ``get()`` reads, parses and checks it each time."""

    name: str
    default: T
    parse: Callable[[str], T]
    meaning: str

    def get(self) -> T:
        """Returns the parsed value, or the default where the variable is unset or empty.

        Raises:
            ValueError: the value can't be parsed; the message shows it and what is accepted.
        """
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text!r}: {error}") from None


def choice(*options: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in options:
            raise ValueError(f"expected one of {', '.join(options)}")
        return text.lower()

    return parse


def positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError("expected a number of seconds") from None
    if not 0 < seconds < float("inf"):
        raise ValueError("expected a number of seconds greater than 0")
    return seconds


def absolute(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # there is no home folder for ~
        raise ValueError(str(error)) from None


def folders(text: str) -> tuple[Path, ...]:
    return tuple(absolute(part) for part in text.split(os.pathsep) if part)


def names(*known: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        given = [part.strip().lower() for part in text.split(",") if part.strip()]
        unknown = [name for name in given if name not in (*known, "all")]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}; expected some of them, or all")
        return known if "all" in given else tuple(dict.fromkeys(given))

    return parse


BACKEND = Variable(
    "JIT_KERNELS_BACKEND",
    "auto",
    choice("auto", "fused", "torch"),
    "auto, fused or torch: what a call runs when it doesn't say; read once, at import",
)
COMPILE = Variable(
    "JIT_KERNELS_COMPILE",
    "auto",
    choice("auto", "never"),
    "never forbids compiling: a kernel must already be in the cache or a prebuilt folder",
)
CACHE_DIR: Variable[Path | None] = Variable(
    "JIT_KERNELS_CACHE_DIR",
    None,
    absolute,
    "where compiled kernels are kept (default: $XDG_CACHE_HOME/jit-kernels, else ~/.cache/jit-kernels)",
)
PREBUILT_DIR: Variable[tuple[Path, ...]] = Variable(
    "JIT_KERNELS_PREBUILT_DIR",
    (),
    folders,
    f"read-only folders of compiled kernels, searched first; separated by {os.pathsep!r}",
)
BUILD_TIMEOUT = Variable(
    "JIT_KERNELS_BUILD_TIMEOUT",
    600.0,
    positive_seconds,
    "seconds after which a build, or the wait for another process's build, is given up",
)
VDN_PRECISION: Variable[str | None] = Variable(
    "JIT_KERNELS_VDN_PRECISION",
    None,
    choice("fp64_tensor", "fp32"),
    "fp64_tensor or fp32: the arithmetic of vdn_delta_factors (default: fp64_tensor on sm_90, else fp32)",
)
INTEGRATIONS: Variable[tuple[str, ...]] = Variable(
    "JIT_KERNELS_INTEGRATIONS",
    (),
    names("sglang", "vllm"),
    "sglang, vllm, both with a comma between them, or all: in whose processes our plug-in runs (default: in none)",
)
INTEGRATIONS_STRICT = Variable(
    "JIT_KERNELS_INTEGRATIONS_STRICT",
    "off",
    choice("off", "on"),
    "on ends a process whose plug-in can't be installed; off logs it, and the client runs as if we weren't there",
)
VLLM_SPLIT = Variable(
    "JIT_KERNELS_VLLM_SPLIT",
    "off",
    choice("off", "on"),
    "on splits vLLM's fused kernel of DeepSeek-V4 so that its collapse is ours too; costs two launches more each",
)
COMMIT: Variable[str | None] = Variable(
    "JIT_KERNELS_COMMIT",
    None,
    str,
    "the commit that result files name, where the sources came without their repository",
)
CUDA_HOME: Variable[Path | None] = Variable("CUDA_HOME", None, absolute, "the CUDA toolkit, searched first")
CUDA_PATH: Variable[Path | None] = Variable("CUDA_PATH", None, absolute, "the CUDA toolkit, searched second")
CXX: Variable[str] = Variable("CXX", "c++", str, "the host C++ compiler")
XDG_CACHE_HOME: Variable[Path | None] = Variable("XDG_CACHE_HOME", None, absolute, "the user's cache folder")

# What compilers read by themselves: a build under other values is another build.
OF_COMPILERS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")


def of_compilers() -> dict[str, str]:
    """Those of `OF_COMPILERS` that are set."""
    return {name: os.environ[name] for name in OF_COMPILERS if os.environ.get(name)}


VARIABLES: tuple[Variable, ...] = (
    BACKEND,
    COMPILE,
    CACHE_DIR,
    PREBUILT_DIR,
    BUILD_TIMEOUT,
    VDN_PRECISION,
    INTEGRATIONS,
    INTEGRATIONS_STRICT,
    VLLM_SPLIT,
    COMMIT,
    CUDA_HOME,
    CUDA_PATH,
    CXX,
    XDG_CACHE_HOME,
)
