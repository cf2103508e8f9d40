"""Compiled kernels: found in the cache, or built into it.

An entry's name ends in two hashes. ``key`` stands for everything that can be known without a compiler (`Source.key`),
``compilers`` for nvcc and the host compiler. Where a toolchain is found, an entry must match both; where none is, the
key alone decides, so a hit needs neither nvcc nor ninja. An entry is never changed once published: it is built in a
private folder beside its place, loaded once as a test, flushed to disk, and renamed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jit_kernels import env
from jit_kernels._version import __version__
from jit_kernels.jit import build, toolchain
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import (
    CacheError,
    CompileError,
    CompileForbiddenError,
    DiskFullError,
    LoadError,
    ToolchainError,
    UntrustedCacheError,
)
from jit_kernels.jit.source import Source
from jit_kernels.jit.store import (
    META,
    Entry,
    discard,
    entries,
    load_library,
    lock,
    private_folder,
    require_trusted,
    roots,
    shelf,
    sweep,
    trusted_roots,
    warn,
    writable_shelf,
)

_KEPT = (META, build.LOG, "build.ninja", "main.cpp", "cuda.cu")
_FULL = (errno.ENOSPC, errno.EDQUOT)

_probes: dict[Path, toolchain.Probe] = {}


def probe() -> toolchain.Probe:
    """Answers of compilers, remembered in the cache where it can be trusted."""
    root = roots()[0]
    with suppress(OSError, UntrustedCacheError):
        if root.exists():
            require_trusted(root)
        if root not in _probes:
            _probes[root] = toolchain.Probe(root / "toolchains.json")
        return _probes[root]
    return toolchain.Probe()


def find(source: Source, target: Target) -> Entry | None:
    """The entry that a load would try first, or None where it would have to be built.

    Raises:
        UntrustedCacheError: the cache can't be trusted.
    """
    return next(_candidates(source, target), None)


def load(source: Source, target: Target) -> Any:
    """The loaded module: from the cache, or built now. A damaged entry is removed and built again, once.

    Raises:
        JitError: one of its subclasses says what stands in the way.
    """
    for entry in _candidates(source, target):
        try:
            return entry.load()
        except LoadError as error:
            _warn_of(entry, error)
    return _make(source, target, None)[1]


def obtain(source: Source, target: Target, root: Path | None = None) -> Entry:
    """The entry, built if it isn't there yet: in ``root``, or in the first place that can be written.

    Raises:
        JitError: as `load`.
    """
    if root is None:
        for entry in _candidates(source, target):
            try:
                entry.load()
                return entry
            except LoadError as error:
                _warn_of(entry, error)
    return _make(source, target, root)[0]


def require_compiler(source: Source, target: Target) -> toolchain.Toolchain:
    """The tools that would build a missing entry.

    Raises:
        CompileForbiddenError: ``JIT_KERNELS_COMPILE=never``.
        ToolchainError: none is usable.
    """
    if env.COMPILE.get() == "never":
        raise CompileForbiddenError(
            f"{source.name} for {target} is not built, and JIT_KERNELS_COMPILE=never forbids building it",
            f"run `jit-kernels warmup --arch {target} --output DIR` where nvcc is, "
            "and set JIT_KERNELS_PREBUILT_DIR=DIR here",
        )
    return toolchain.find(target, probe())


def _candidates(source: Source, target: Target) -> Iterator[Entry]:
    name = f"{source.name}-{source.key(target)}-"
    for overlay in env.PREBUILT_DIR.get():
        yield from entries(shelf(overlay, target), name, prebuilt=True)
    compilers = None
    if env.COMPILE.get() != "never":
        with suppress(ToolchainError):
            compilers = _fingerprint(toolchain.find(target, probe()))
    for root in trusted_roots():
        for entry in entries(shelf(root, target), name):
            if compilers is None or entry.folder.name == name + compilers:
                yield entry


def _warn_of(entry: Entry, error: LoadError) -> None:
    # It is removed where it is built again, under the lock: by now another process may have mended it.
    if entry.folder.exists():  # and not taken away by `remove` just now
        warn(f"{error.cause}; " + ("looking on" if entry.prebuilt else "building it again"))


def _make(source: Source, target: Target, root: Path | None) -> tuple[Entry, Any]:
    """The entry and its module, loaded before anybody could remove it again."""
    tools = require_compiler(source, target)
    folder = writable_shelf(roots() if root is None else [root], target)
    probe().save()
    entry = Entry(folder / f"{source.name}-{source.key(target)}-{_fingerprint(tools)}")
    try:
        sweep(folder)
        with lock(entry.lock, env.BUILD_TIMEOUT.get()):
            if entry.folder.exists():  # another process was faster
                try:
                    return entry, entry.load()
                except LoadError:
                    discard(entry)
            _build(source, target, tools, entry)
            module = entry.load()
        sweep(folder)  # again: the compilers of a killed build may have gone on for a while
        return entry, module
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(
                f"no space is left under {folder}: {error}", "free some, or set JIT_KERNELS_CACHE_DIR"
            ) from error
        raise CacheError(
            f"{folder} can't be used: {error}", "set JIT_KERNELS_CACHE_DIR to a folder of your own"
        ) from error


def _build(source: Source, target: Target, tools: toolchain.Toolchain, entry: Entry) -> None:
    staging = private_folder(entry.folder.parent, "staging")
    try:
        started = time.perf_counter()
        library = build.compile_library(source, target, tools, staging, env.BUILD_TIMEOUT.get())
        seconds = time.perf_counter() - started
        _check_scan(source, tools, staging)
        if f"-{source.key(target)}-" not in entry.folder.name:
            raise CompileError(f"the sources of {source.name} changed while they were being built", "call again")
        load_library(library)
        meta = {
            "name": source.name,
            "args": list(source.args),
            "target": str(target),
            "version": __version__,
            "library": library.name,
            "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
            "size": library.stat().st_size,
            "compilers": tools.identity,
            "compile_seconds": round(seconds, 2),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "kernels": build.resources(build.read(staging / build.LOG)),
        }
        build.write(staging / META, json.dumps(meta, indent=1))
        for path in list(staging.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in (*_KEPT, library.name):
                path.unlink()
            else:
                path.chmod(path.stat().st_mode & ~0o022)
                _flush(path)
        _flush(staging)
        try:
            os.rename(staging, entry.folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # Locks don't reach everywhere: somebody published first. Theirs is as good.
            if _damaged(entry):
                raise LoadError(f"{entry.folder} is damaged", f"rm -r {entry.folder}") from None
        _flush(entry.folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_scan(source: Source, tools: toolchain.Toolchain, staging: Path) -> None:
    opened = []
    for path in staging.glob("*.o.d"):  # make's syntax: blanks part the names, unless escaped
        words = re.findall(r"(?:\\.|[^\s\\])+", build.read(path).replace("\\\n", " "))
        opened += [(staging / re.sub(r"\\(.)", r"\1", word).replace("$$", "$")).resolve() for word in words]
    # What lies in these folders stands in the key by version, or is made by the build itself.
    known = [staging, *tools.include_dirs, *source.include_dirs()[len(source.scanned_dirs()) :]]
    known = [folder.resolve() for folder in known]
    scanned = {Path(path).resolve() for path, _ in source.scan().values()}
    missed = [path for path in opened if path not in scanned and not any(path.is_relative_to(f) for f in known)]
    if missed:
        raise CompileError(
            f"{source.name} includes {missed[0]} in a way that the cache key can't see (a macro? a flag?)",
            "write the name in the #include itself, and name its folder in extra_include_paths",
        )


def _damaged(entry: Entry) -> bool:
    try:
        entry.load()
    except LoadError:
        return True
    return False


def _fingerprint(tools: toolchain.Toolchain) -> str:
    return hashlib.sha256(tools.identity.encode()).hexdigest()[:8]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
