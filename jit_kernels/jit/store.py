"""The folders of compiled kernels: where they lie, whom to trust, locks, and what is in them.

<root>/<package version>/<arch target>/<name>-<key>-<compilers>/
    <name>.so  meta.json  build.log  build.ninja  cuda.cu
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
from pathlib import Path
from typing import Any

from jit_kernels import env
from jit_kernels._version import __version__
from jit_kernels.jit.arch import Target
from jit_kernels.jit.build import read
from jit_kernels.jit.errors import AbiMismatchError, CacheError, LoadError, LockTimeoutError, UntrustedCacheError

META = "meta.json"
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)


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
        return json.loads(read(self.folder / META))

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
        with suppress(OSError), _opened(self.lock, os.O_RDONLY) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # keeps `remove` away till it is loaded
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


def writable_shelf(places: list[Path], target: Target) -> Path:
    """The first of the places that can be written, made where it isn't there: its folder for the target.

    Raises:
        CacheError: none can be.
        UntrustedCacheError: the one to use can't be trusted.
    """
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


def entries(folder: Path, prefix: str, prebuilt: bool = False) -> list[Entry]:
    """Those of a shelf whose names begin so, the newest first."""
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith(prefix)]
        return [Entry(folder / name, prebuilt) for name in sorted(names, key=lambda n: -(folder / n).stat().st_mtime)]
    return []


def discard(entry: Entry) -> None:
    """Takes an entry out of the way first, so that nobody meets half of it; what can't be removed is left."""
    with suppress(OSError):
        aside = private_folder(entry.folder.parent, "discarded")
        os.rename(entry.folder, aside / "entry")
        shutil.rmtree(aside, ignore_errors=True)


_descriptors: set[int] = set()  # of the lock files that this process holds


def _leave_locks_to_the_parent() -> None:
    # A lock belongs to the open file, which a child forked meanwhile would share and so keep locked.
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_leave_locks_to_the_parent)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    _descriptors.add(descriptor)
    try:
        yield descriptor
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        _descriptors.discard(descriptor)
        os.close(descriptor)


@contextmanager
def lock(path: Path, timeout: float) -> Iterator[bool]:
    """Holds the file's lock. The system releases it when its holder dies, so a killed build blocks nobody.

    Yields whether it is really held: where a file system has no locks, publishing by rename alone is still right.

    Raises:
        LockTimeoutError: somebody else held it for ``timeout`` seconds; names who.
    """
    with _opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
        deadline = time.monotonic() + timeout
        held = False
        while not held:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
                    raise LockTimeoutError(
                        f"{path} has been locked for {timeout:g} s by {holder}",
                        "wait for that build, stop it, or raise JIT_KERNELS_BUILD_TIMEOUT",
                    ) from None
                time.sleep(0.02)
            except OSError:
                break
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield held


def _machine() -> str:
    """Stands for this boot of this machine and this container: where process ids mean the same."""
    boot = read(Path("/proc/sys/kernel/random/boot_id")).strip()
    return hashlib.sha256(f"{boot} {os.stat('/proc/self/ns/pid').st_ino}".encode()).hexdigest()[:8]


def private_folder(shelf: Path, kind: str) -> Path:
    """A new folder for this process alone, whose name tells `sweep` whose it is."""
    return Path(tempfile.mkdtemp(prefix=f".{kind}-{_machine()}-{os.getpid()}-", dir=shelf))


def sweep(shelf: Path) -> None:
    """Removes the private folders that killed processes left: at once those of dead ones here, others with time."""
    for left in shelf.glob(".*-*-*-*"):
        match = re.fullmatch(r"\.(?:staging|discarded)-(\w+)-(\d+)-\w+", left.name)
        if not match:
            continue
        with suppress(OSError):
            dead = match[1] == _machine() and not Path("/proc", match[2]).exists()
            if dead or time.time() - left.stat().st_mtime > 2 * env.BUILD_TIMEOUT.get():
                shutil.rmtree(left, ignore_errors=True)


def trusted_roots() -> list[Path]:
    """The places that exist and that nobody else can write.

    Raises:
        UntrustedCacheError: the configured place can't be trusted. One in the temporary folder, where anybody can
            make one, is passed over; it is refused where it would be written.
    """
    found = []
    for root in roots():
        try:
            require_trusted(root)
        except UntrustedCacheError:
            if root == default_root():
                raise
            continue
        except OSError:
            continue
        found.append(root)
    return found


def listing() -> Iterator[Entry]:
    """Everything that lies in the cache and in the prebuilt folders, of any version and target.

    Raises:
        UntrustedCacheError: as `trusted_roots`.
    """
    places = [(root, True) for root in env.PREBUILT_DIR.get()] + [(root, False) for root in trusted_roots()]
    for root, prebuilt in places:
        with suppress(PermissionError):
            for folder in sorted(root.glob("*/*/[!.]*-*-*")):
                if folder.is_dir():
                    yield Entry(folder, prebuilt)


def remove(entries: Iterable[Entry]) -> list[Entry]:
    """Removes entries, but for those that are being built or loaded right now, and those of prebuilt folders.

    Returns:
        the entries that were removed.

    Raises:
        OSError: an entry can't be removed.
    """
    removed = []
    for root in trusted_roots():
        for folder in root.glob("*/*"):
            sweep(folder)
    for entry in entries:
        if entry.prebuilt:
            continue
        with suppress(LockTimeoutError), lock(entry.lock, 0):
            discard(entry)
            if entry.folder.exists():
                raise PermissionError(errno.EACCES, "can't be removed", str(entry.folder))
            removed.append(entry)
    return removed
