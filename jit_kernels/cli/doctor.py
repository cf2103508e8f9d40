"""``jit-kernels env`` and ``doctor``: the settings, and what will happen when an op is called."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import torch
from rich.text import Text

from jit_kernels import __version__
from jit_kernels import env as settings
from jit_kernels.cli.output import emit, json_option, rows
from jit_kernels.dispatch import OPERATORS
from jit_kernels.jit import cache, store, toolchain
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import JitError, UntrustedCacheError

STYLE = {"ok": "green", "note": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``cure`` says what to do where the state isn't ok."""

    what: str
    state: str  # ok, note (works, but not with the fused kernel or not as asked), problem
    found: str
    cure: str = ""


@click.command()
@json_option
def env(as_json: bool) -> None:
    """Print every environment variable that the package reads, and what it is set to."""
    table = []
    for variable in settings.VARIABLES:
        try:
            value = variable.get()
            effective = _shown(value)
        except ValueError as error:
            effective = f"invalid: {error}"
        table.append(
            {
                "name": variable.name,
                "set": os.environ.get(variable.name),
                "effective": effective,
                "meaning": variable.meaning,
            }
        )
    emit(
        {"schema": 1, "variables": table},
        as_json,
        lambda: [
            rows(None, ("variable", "effective", "meaning"), ((v["name"], v["effective"], v["meaning"]) for v in table))
        ],
    )


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return (os.pathsep if any(isinstance(part, Path) for part in value) else ",").join(map(str, value))
    return "" if value is None else str(value)


@click.command()
@json_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Say what will happen when an op is called here, and what to do where that is not the fused kernel.

    Exits 1 if something is broken; that there is no GPU is not.
    """
    findings = list(examine())
    emit(
        {"schema": 1, "findings": [asdict(finding) for finding in findings]},
        as_json,
        lambda: [
            rows(
                None,
                ("", "what", "found", "what to do"),
                ((Text(f.state, style=STYLE[f.state]), f.what, f.found, f.cure) for f in findings),
            )
        ],
    )
    if any(finding.state == "problem" for finding in findings):
        context.exit(1)


def examine() -> Iterator[Finding]:
    """The findings, in the order in which a call meets them."""
    import tvm_ffi

    yield Finding(
        "versions",
        "ok",
        f"jit-kernels {__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"tvm-ffi {tvm_ffi.__version__}",
    )
    broken = False
    for variable in settings.VARIABLES:
        try:
            variable.get()
        except ValueError as error:
            broken = True
            yield Finding(variable.name, "problem", str(error), f"unset it, or set it right: {variable.meaning}")
    if broken:
        return
    yield from _devices()
    yield from _tools()
    yield from _places()
    yield from _calls()
    yield from _plugins()


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(
            "GPU",
            "note",
            f"none usable ({_why_no_gpu()}): every call runs the torch fallback",
            "on a machine with an NVIDIA GPU: check the driver (nvidia-smi) and that torch's CUDA is not newer than it",
        )
        return
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_properties(index).name
        target = Target.of(torch.device("cuda", index))
        if target.major >= 9:
            yield Finding(f"cuda:{index}", "ok", f"{name}, {target}")
        else:
            found = f"{name}, {target}: the fused kernels need sm_90 or newer, so calls on it run the torch fallback"
            yield Finding(f"cuda:{index}", "note", found, OLD_GPU)


OLD_GPU = "nothing, or a GPU of sm_90 or newer: the fallback keeps the same promises, more slowly"


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:
        return f"torch is built for CUDA {torch.version.cuda}; {str(error).splitlines()[0]}"
    return f"torch is built for CUDA {torch.version.cuda}"


def _tools() -> Iterator[Finding]:
    forbidden = settings.COMPILE.get() == "never"
    verdicts = toolchain.survey(None, cache.probe())
    usable = next((verdict for verdict in verdicts if isinstance(verdict, toolchain.Toolchain)), None)
    for verdict in verdicts:
        if isinstance(verdict, toolchain.Refusal) and (usable is None or verdict.origin in ("CUDA_HOME", "CUDA_PATH")):
            yield Finding(
                "CUDA compiler", "note", f"not usable: {verdict}", "mend or unset it; the next candidate is tried"
            )
    if usable is None:
        yield Finding("CUDA compiler", "note", "none usable: kernels that aren't built yet can't be", toolchain.CURE)
    else:
        yield Finding(
            "CUDA compiler", "ok", f"nvcc {'.'.join(map(str, usable.version))} in {usable.root} ({usable.origin})"
        )
        yield Finding("host compiler", "ok", usable.identity.split("; ", 1)[1])
    try:
        yield Finding("ninja", "ok", str(toolchain.ninja()))
    except JitError as error:
        yield Finding("ninja", "note", error.cause, error.cure)
    if forbidden:
        yield Finding(
            "compiling", "note", "forbidden by JIT_KERNELS_COMPILE=never", "only kernels built ahead will run"
        )


def _places() -> Iterator[Finding]:
    for overlay in settings.PREBUILT_DIR.get():
        if overlay.is_dir():
            yield Finding("prebuilt kernels", "ok", str(overlay))
        else:
            yield Finding("prebuilt kernels", "problem", f"{overlay} is no folder", "correct JIT_KERNELS_PREBUILT_DIR")
    choose = "set JIT_KERNELS_CACHE_DIR to a folder that can be written"
    root = store.default_root()
    if root is None:
        yield Finding("cache", "note", f"there is no home folder: kernels are kept in {store.roots()[0]}", choose)
        return
    try:
        store.trusted_roots()
        shelves = [store.shelf(root, target) for target in Target.of_all_devices()]
        writable = all(map(_can_be_made, [root / __version__, *shelves]))
    except UntrustedCacheError as error:
        yield Finding("cache", "problem", error.cause, error.cure)
        return
    if writable:
        yield Finding("cache", "ok", str(root))
    else:
        where = f"{root} can't be written: new kernels go to {store.roots()[-1]}"
        yield Finding("cache", "note", where, choose)


def _can_be_made(folder: Path) -> bool:
    """Whether the folder can be written, or made in the deepest one there is above it."""
    try:
        return os.access(next(path for path in (folder, *folder.parents) if path.exists()), os.W_OK)
    except PermissionError:
        return False


def _calls() -> Iterator[Finding]:
    """For each operator and each build that users need: what the first call does."""
    for operator in OPERATORS.values():
        for target in Target.of_all_devices():
            for parameters in operator.warmup:
                label = " ".join([operator.name, *(f"{key}={value}" for key, value in parameters.items())])
                yield _first_call(f"{label} on {target}", operator.build(target, **parameters), operator.name)
        if not Target.of_all_devices():
            yield Finding(operator.name, "note", "runs the torch fallback: there is no GPU")


def _first_call(what: str, kernel: Any, name: str) -> Finding:
    if kernel.target.major < 9:
        return Finding(what, "note", "runs the torch fallback: the fused kernels need sm_90 or newer", OLD_GPU)
    warm = f"jit-kernels warmup {name} --arch {kernel.target}"
    try:
        if kernel.require_available():
            return Finding(what, "ok", "runs the fused kernel: it is built")
    except JitError as error:
        return Finding(what, "problem", f"runs the torch fallback: {error.cause}", error.cure)
    return Finding(what, "ok", "the first call compiles the fused kernel, which takes some seconds", warm)


def _plugins() -> Iterator[Finding]:
    """For each stack that loads us as a plug-in: whether it will, and whether that can work."""
    from jit_kernels.integrations import IntegrationError, sglang, version_of, vllm
    from jit_kernels.integrations.plugin import NAME

    switch = settings.INTEGRATIONS.name
    for client in (sglang.CLIENT, vllm.CLIENT):
        what, here = f"plug-in {client.name}", f"{client.name} {version_of(client.name)}"
        selected = os.environ.get(client.selection)
        undo = f"or take it out of {switch}"
        if client.name not in settings.INTEGRATIONS.get():
            if version_of(client.name) is None:
                yield Finding(what, "ok", "off")
            else:
                yield Finding(what, "ok", f"off; {here} is installed", f"{switch}={client.name} switches it on")
            continue
        try:
            client.require(client.further())
        except IntegrationError as error:
            yield Finding(what, "problem", str(error), f"install {client.name} {client.tested}, {undo}")
            continue
        if not metadata.entry_points(group=client.group, name=NAME):
            found = f"asked for, but {client.name} can't find it: jit-kernels is not installed as a package"
            yield Finding(what, "problem", found, f"pip install jit-kernels, {undo}")
        elif selected is not None and not client.selects(selected):
            found = f"asked for, but {client.selection}={selected} leaves it out"
            yield Finding(what, "problem", found, f"add {NAME} to {client.selection}, {undo}")
        else:
            yield Finding(what, "ok", f"on in {here}; tested with {client.tested}")
