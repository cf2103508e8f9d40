"""Compiled kernels on disk: where they lie, whom to trust, and how an entry comes to be.

    <root>/<package version>/<arch target>/<name>-<key>-<compilers>/
        <name>.so  meta.json  build.log  build.ninja  cuda.cu

``key`` stands for everything that can be known without a compiler (`Source.key`), ``compilers`` for nvcc and the
host compiler. Where a toolchain is found, an entry must match both; where none is, the key alone decides, so a hit
needs neither nvcc nor ninja. An entry is never changed once published: it is built in a private folder beside its
place, loaded once as a test, flushed to disk, and renamed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jit_kernels import env
from jit_kernels._version import __version__
from jit_kernels.jit import build, toolchain
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import (
    AbiMismatchError,
    CacheError,
    CompileError,
    CompileForbiddenError,
    DiskFullError,
    LoadError,
    LockTimeoutError,
    ToolchainError,
    UntrustedCacheError,
)
from jit_kernels.jit.source import Source

META = "meta.json"
_KEPT = (META, build.LOG, "build.ninja", "main.cpp", "cuda.cu")
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class JitWarning(RuntimeWarning):
    """Something was worked around; the message names the cause and the cure."""


def warn(message: str) -> None:
    warnings.warn(message, JitWarning, stacklevel=2)


@dataclass(frozen=True)
class Entry:
    """One published build. Those of a prebuilt folder are never changed."""

    folder: Path
    prebuilt: bool = False

    @property
    def meta(self) -> dict[str, Any]:
        return json.loads(build.read(self.folder / META))

    @property
    def lock(self) -> Path:
        return self.folder.parent / f".{self.folder.name}.lock"

    def verify(self) -> Path:
        """The library, after it was compared with its recorded hash.

        Raises:
            UntrustedCacheError: somebody else could have written it.
            LoadError: it is damaged.
        """
        try:
            meta = self.meta
            library = self.folder / meta["library"]
            for path in (self.folder, library):
                require_trusted(path)
            if hashlib.sha256(library.read_bytes()).hexdigest() != meta["sha256"]:
                raise LoadError(f"{library} does not match its recorded hash")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LoadError(f"{self.folder} is damaged: {type(error).__name__}: {error}") from error
        return library

    def load(self) -> Any:
        """The tvm-ffi module.

        Raises:
            JitError: as `verify`, or the library can't be loaded.
        """
        with suppress(OSError), open(self.lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # keeps `clean` away till it is loaded
            return load_library(self.verify())
        return load_library(self.verify())


def load_library(path: Path) -> Any:
    """Loads one shared library.

    Raises:
        LoadError, AbiMismatchError: the loader refuses it.
    """
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(path))
    except Exception as error:
        text = str(error)
        foreign = re.search("undefined symbol|version `|wrong ELF class|cannot open shared object file", text)
        kind = AbiMismatchError if foreign else LoadError
        raise kind(
            f"{path} can't be loaded: {text}", "jit-kernels cache clean, and build again on this machine"
        ) from error


def default_root() -> Path | None:
    """Where new entries go unless that place can't be written; None where there is no home folder either."""
    configured = env.CACHE_DIR.get()
    if configured is not None:
        return configured
    try:
        return (env.XDG_CACHE_HOME.get() or Path("~/.cache").expanduser()) / "jit-kernels"
    except RuntimeError:
        return None


def roots() -> list[Path]:
    """The places for new entries, in order: the first that can be written is used."""
    root = default_root()
    return [*([root] if root else []), Path(tempfile.gettempdir()) / f"jit-kernels-{os.geteuid()}"]


def require_trusted(path: Path) -> None:
    """An entry is code: nobody but this user and root may own it or be able to change it.

    Raises:
        UntrustedCacheError: says who owns the path, or how it can be written.
    """
    stat = path.stat()
    if stat.st_uid not in (os.geteuid(), 0):
        raise UntrustedCacheError(
            f"{path} belongs to user {stat.st_uid}, not to user {os.geteuid()} who runs this",
            "set JIT_KERNELS_CACHE_DIR to a folder of your own",
        )
    if stat.st_mode & 0o022:
        raise UntrustedCacheError(
            f"{path} can be written by others (mode {stat.st_mode & 0o777:04o})", f"chmod go-w {path}"
        )


def shelf(root: Path, target: Target) -> Path:
    """The folder that holds one root's entries for one target and this package version."""
    return root / __version__ / str(target)


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
    return _make(source, target, None).load()


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
    return _make(source, target, root)


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
        yield from _entries(shelf(overlay, target), name, prebuilt=True)
    compilers = None
    if env.COMPILE.get() != "never":
        with suppress(ToolchainError):
            compilers = _fingerprint(toolchain.find(target, probe()))
    for root in roots():
        try:
            require_trusted(root)
        except UntrustedCacheError:
            if root == default_root():
                raise
            continue  # anybody can make a folder in the temporary one; it is refused where it would be used
        except OSError:
            continue
        for entry in _entries(shelf(root, target), name):
            if compilers is None or entry.folder.name == name + compilers:
                yield entry


def _warn_of(entry: Entry, error: LoadError) -> None:
    # It is removed where it is built again, under the lock: by now another process may have mended it.
    warn(f"{error.cause}; " + ("looking on" if entry.prebuilt else "building it again"))


def _make(source: Source, target: Target, root: Path | None) -> Entry:
    tools = require_compiler(source, target)
    folder = _writable_shelf(roots() if root is None else [root], target)
    probe().save()
    name = f"{source.name}-{source.key(target)}-{_fingerprint(tools)}"
    entry = Entry(folder / name)
    try:
        with lock(entry.lock, env.BUILD_TIMEOUT.get()) as alone:
            if entry.folder.exists():  # another process was faster
                if not _damaged(entry):
                    return entry
                discard(entry)
            if alone:
                for left in folder.glob(f"{_staging_prefix(entry)}*"):  # by a build that was killed
                    shutil.rmtree(left, ignore_errors=True)
            _build(source, target, tools, entry)
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(
                f"no space is left under {folder}: {error}", "free some, or set JIT_KERNELS_CACHE_DIR"
            ) from error
        raise CacheError(
            f"{folder} can't be used: {error}", "set JIT_KERNELS_CACHE_DIR to a folder of your own"
        ) from error
    return entry


def discard(entry: Entry) -> None:
    """Takes an entry out of the way first, so that nobody meets half of it; what can't be removed is left."""
    with suppress(OSError):
        aside = Path(tempfile.mkdtemp(prefix=".discarded-", dir=entry.folder.parent))
        os.rename(entry.folder, aside / "entry")
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def lock(path: Path, timeout: float) -> Iterator[bool]:
    """Holds the file's lock. The system releases it when its holder dies, so a killed build blocks nobody.

    Yields whether it is really held: where a file system has no locks, publishing by rename alone is still right.

    Raises:
        LockTimeoutError: somebody else held it for ``timeout`` seconds; names who.
    """
    with open(path, "a+") as file:
        deadline = time.monotonic() + timeout
        held = False
        while not held:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    holder = file.read().strip() or "unknown"
                    raise LockTimeoutError(
                        f"{path} has been locked for {timeout:g} s by {holder}",
                        "wait for that build, stop it, or raise JIT_KERNELS_BUILD_TIMEOUT",
                    ) from None
                time.sleep(0.02)
            except OSError:
                break
        with suppress(OSError):
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield held


def _build(source: Source, target: Target, tools: toolchain.Toolchain, entry: Entry) -> None:
    staging = Path(tempfile.mkdtemp(prefix=_staging_prefix(entry), dir=entry.folder.parent))
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


def _staging_prefix(entry: Entry) -> str:
    return f".staging-{socket.gethostname()}-{entry.folder.name}-"


def _check_scan(source: Source, tools: toolchain.Toolchain, staging: Path) -> None:
    opened = []
    for path in staging.glob("*.o.d"):  # make's syntax: blanks part the names, unless escaped
        words = re.findall(r"(?:\\.|[^\s\\])+", build.read(path).replace("\\\n", " "))
        opened += [(staging / re.sub(r"\\(.)", r"\1", word).replace("$$", "$")).resolve() for word in words]
    # What lies in these folders stands in the key by version, or is made by the build itself.
    known = [staging, *tools.include_dirs, *source.include_dirs()[len(source.scanned_dirs()) :]]
    known = [folder.resolve() for folder in known]
    scanned = {path.resolve() for path in source.files().values()}
    missed = [path for path in opened if path not in scanned and not any(path.is_relative_to(f) for f in known)]
    if missed:
        raise CompileError(
            f"{source.name} includes {missed[0]} in a way that the cache key can't see (a macro? a flag?)",
            "write the name in the #include itself, and name its folder in extra_include_paths",
        )


def _entries(folder: Path, prefix: str, prebuilt: bool = False) -> list[Entry]:
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith(prefix)]
        return [Entry(folder / name, prebuilt) for name in sorted(names, key=lambda n: -(folder / n).stat().st_mtime)]
    return []


def _damaged(entry: Entry) -> bool:
    try:
        entry.load()
    except LoadError:
        return True
    return False


def _writable_shelf(places: list[Path], target: Target) -> Path:
    failures = []
    for root in places:
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            for folder in (root, root / __version__, shelf(root, target)):
                with suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                require_trusted(folder)
            with tempfile.TemporaryFile(dir=shelf(root, target)):
                pass
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise CacheError(f"{root} can't be used: {error}", "set JIT_KERNELS_CACHE_DIR") from error
            failures.append(f"{root}: {error.strerror}")
            continue
        if failures:
            warn(
                f"the kernel cache can't be written ({'; '.join(failures)}): using {root}; "
                "set JIT_KERNELS_CACHE_DIR to choose"
            )
        return shelf(root, target)
    raise CacheError(
        f"no place for the kernel cache can be written ({'; '.join(failures)})", "set JIT_KERNELS_CACHE_DIR"
    )


def _fingerprint(tools: toolchain.Toolchain) -> str:
    return hashlib.sha256(tools.identity.encode()).hexdigest()[:8]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def listing() -> Iterator[Entry]:
    """Everything that lies in the cache and in the prebuilt folders, of any version and target."""
    places = [(root, True) for root in env.PREBUILT_DIR.get()] + [(root, False) for root in roots()]
    for root, prebuilt in places:
        with suppress(PermissionError):
            for meta in sorted(root.glob(f"*/*/[!.]*/{META}")):
                yield Entry(meta.parent, prebuilt)


def remove(entries: Iterable[Entry]) -> list[Entry]:
    """Removes entries, but for those that are being built or loaded right now, and those of prebuilt folders.

    Returns:
        the entries that were removed.

    Raises:
        OSError: an entry can't be removed.
    """
    removed = []
    for entry in entries:
        if entry.prebuilt:
            continue
        with suppress(LockTimeoutError), lock(entry.lock, 0):
            discard(entry)
            if entry.folder.exists():
                raise PermissionError(errno.EACCES, "can't be removed", str(entry.folder))
            removed.append(entry)
    return removed
