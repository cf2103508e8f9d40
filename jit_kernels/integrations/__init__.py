"""Drop-ins for the stacks that already run these operators: each through the stack's own door, each with a way back.

An integration imports its client when it is installed, not before; ``import jit_kernels`` imports none.
"""

from __future__ import annotations

import importlib.abc
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class IntegrationError(RuntimeError):
    """A client isn't what an integration was written for: a name that it needs is missing, or somebody changed it."""


def version_of(client: str) -> str | None:
    """The installed version of a package by its name on PyPI; None where there is none."""
    try:
        return metadata.version(client)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Change:
    """One name of a client, and what comes in its place."""

    owner: Any  # a module or a class
    name: str
    replace: Callable[[Any], Any]  # (what stands there) → what shall stand there
    everywhere: bool = False  # also where other modules hold the same object by ``from … import …``


@dataclass
class Patch:
    """Names of a client that are replaced together and put back together: all of them, or none."""

    client: str  # its name on PyPI
    tested: str  # the versions it was tested with
    _placed: list[tuple[Change, Any, Any]] = field(default_factory=list, repr=False)  # (change, original, ours)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def installed(self) -> bool:
        return bool(self._placed)

    def install(self, *changes: Change) -> None:
        """Makes the changes, once.

        Raises:
            IntegrationError: one of the names isn't there; nothing has been changed.
        """
        with self._lock:
            if self._placed:
                return
            placed = []
            for change in changes:
                if change.name not in vars(change.owner):
                    raise IntegrationError(
                        f"{self.client} {version_of(self.client)}: {_name(change.owner)} has no {change.name!r}, which "
                        f"jit_kernels would replace; nothing was changed. Tested with {self.client} {self.tested}"
                    )
                original = vars(change.owner)[change.name]
                placed.append((change, original, change.replace(original)))
            try:
                for change, original, ours in placed:
                    _put(change, original, ours)
                    self._placed.append((change, original, ours))
            except BaseException:
                self.uninstall()
                raise

    def uninstall(self) -> None:
        """Puts the very objects back that were replaced. Does nothing where nothing is installed.

        Raises:
            IntegrationError: somebody replaced one of the names since; nothing has been changed.
        """
        with self._lock:
            self.require_untouched()
            for change, original, ours in self._placed:
                _put(change, ours, original)
            self._placed = []

    def require_untouched(self) -> None:
        """Makes sure that `uninstall` can do its work.

        Raises:
            IntegrationError: somebody replaced one of the names since.
        """
        for change, _, ours in self._placed:
            if vars(change.owner).get(change.name) is not ours:
                raise IntegrationError(
                    f"{_name(change.owner)}.{change.name} was replaced again after jit_kernels replaced it: "
                    f"undo that first"
                )


class AfterImport(importlib.abc.MetaPathFinder):
    """Does something to a module as soon as it has been imported: at once, or when its client imports it.

    What goes wrong then is told to ``failed``, since the import is the client's own, and the client must go on.
    """

    def __init__(
        self, name: str, then: Callable[[ModuleType], None], failed: Callable[[IntegrationError], None]
    ) -> None:
        self.name, self.then, self.failed = name, then, failed

    def wait(self) -> None:
        if self.name in sys.modules:
            self.then(sys.modules[self.name])
        else:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self.name else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.stop()
            try:
                self.then(module)
            except IntegrationError as error:
                self.failed(error)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def rebind(old: Any, new: Any) -> None:
    """Puts ``new`` in the place of ``old`` in every module that holds it, under whatever name."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name in [name for name, value in list(vars(module).items()) if value is old]:
                setattr(module, name, new)


def _put(change: Change, old: Any, new: Any) -> None:
    setattr(change.owner, change.name, new)
    if change.everywhere:
        rebind(old, new)


def _name(owner: Any) -> str:
    module = getattr(owner, "__module__", None)
    return f"{module}.{owner.__qualname__}" if module else owner.__name__
