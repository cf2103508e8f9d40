"""Plug-ins: clients find them by an entry point, in each of their processes; one switch says where they run."""

from __future__ import annotations

import ast
import importlib.util
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jit_kernels import backend, env, torch_op
from jit_kernels._version import __version__
from jit_kernels.dispatch import Operator, UnsupportedError
from jit_kernels.integrations import IntegrationError, version_of
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import CaptureError, JitError

NAME = "jit_kernels"  # of our entry points, and so what a client's own selection of plug-ins names


@dataclass(frozen=True)
class Need:
    """A name at the top of a client's module; of a function also its parameters, in their order."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Client:
    """A stack that loads plug-ins, and what of it an integration stands on."""

    name: str  # on PyPI, and in JIT_KERNELS_INTEGRATIONS
    tested: str  # the versions it was tested with
    group: str  # of its plug-ins' entry points
    selection: str  # its own variable that names the plug-ins to load
    needs: tuple[Need, ...]
    further: Callable[[], tuple[Need, ...]] = lambda: ()  # what a setting needs beside them
    strips: bool = True  # whether its selection may have blanks between the names
    empty_is_all: bool = True  # whether an empty selection selects all

    def selects(self, text: str) -> bool:
        """Whether its own selection, as the variable holds it, loads us."""
        names = text.split(",")
        return NAME in ([name.strip() for name in names] if self.strips else names) or (self.empty_is_all and not text)

    @property
    def log(self) -> logging.Logger:
        """Below the client's own logger, so that its settings show what we say."""
        return logging.getLogger(f"{self.name}.{NAME}")

    def require(self, further: tuple[Need, ...] = ()) -> None:
        """Looks into the client's source files for what we need; imports nothing.

        Raises:
            IntegrationError: it isn't installed, or a name that we need isn't there or takes other parameters.
        """
        spec = importlib.util.find_spec(self.name)
        if spec is None or not spec.submodule_search_locations:
            raise IntegrationError(f"{self.name} is not installed")
        root = Path(next(iter(spec.submodule_search_locations)))
        needs = self.needs + further
        found = {module: _names(root, module) for module in {need.module for need in needs}}
        for need in needs:
            names = found[need.module]
            lack = ""
            if need.name not in names:
                lack = f"has no {need.name!r}" if names else "is not there"
            elif need.parameters and names[need.name] not in (None, need.parameters):
                lack = f"has a {need.name} of other parameters: {names[need.name]} instead of {need.parameters}"
            if lack:
                raise IntegrationError(
                    f"{self.name} {version_of(self.name)}: {need.module} {lack}; nothing was changed. "
                    f"jit_kernels {__version__} was tested with {self.name} {self.tested}"
                )

    def plug_in(self, install: Callable[[], Any]) -> None:
        """What the entry point does: installs where the switch names this client.

        A plug-in that can't be installed says so in the log and leaves the client as it is.

        Raises:
            SystemExit: it can't, and JIT_KERNELS_INTEGRATIONS_STRICT forbids to go on without it. No other exception
                would do: clients catch those of plug-ins.
        """
        strict = False
        try:
            strict = env.INTEGRATIONS_STRICT.get() == "on"
            if self.name in env.INTEGRATIONS.get():
                install()
        except Exception as error:  # whatever it is: the client must start
            self.refuse(error, strict)

    def refuse(self, error: Exception, strict: bool) -> None:
        """Says in the log why we don't run here.

        Raises:
            SystemExit: ``strict`` forbids to go on without us.
        """
        said = f"jit_kernels does not run in {self.name}: {error}"
        if strict:
            raise SystemExit(f"{said} ({env.INTEGRATIONS_STRICT.name}=on)") from error
        self.log.error(said, exc_info=not isinstance(error, (ValueError, IntegrationError)))


def _names(root: Path, module: str) -> dict[str, tuple[str, ...] | None]:
    """The names that a module's file binds at its top, with the parameters of functions; none without a file."""
    place = root.joinpath(*module.split(".")[1:])
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return dict(_bindings(ast.parse(path.read_bytes()).body))
    return {}


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            yield node.name, tuple(arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs))
        elif isinstance(node, ast.ClassDef):
            yield node.name, None
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name.partition(".")[0], None) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, None) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _bindings(node.body + node.orelse)


@dataclass
class Route:
    """Whose implementation a client's call runs: ours where the fused kernel covers it, else the client's own.

    That is under the ``auto`` backend; ``fused`` and ``torch`` run ours whatever the client has. Input that the
    operator refuses goes to the client in any case: it may know what to do with it.
    """

    operator: Operator
    client: Client
    _failures: dict[Any, JitError] = field(default_factory=dict, repr=False)  # why a kernel can't be had, by build
    _said: set[str] = field(default_factory=set, repr=False)
    _ran: bool = field(default=False, repr=False)

    @torch_op.untraced  # in a traced graph the refusal would come too late to be caught
    def run(self, args: tuple[Any, ...], theirs: Callable[[], Any]) -> Any:
        """The operator on ``args``, or ``theirs()`` with the reason logged once.

        Raises:
            CaptureError: a CUDA graph is being captured and the kernel isn't loaded: neither is right then.
            UnsupportedError, JitError: under the ``fused`` backend, as the operator itself.
        """
        asked = backend()
        try:
            if asked == "auto" and self._failures and (failure := self._failures.get(self._build(args))):
                raise failure.with_traceback(None)
            out = self.operator(*args, backend="fused" if asked == "auto" else None)
        except CaptureError:
            raise
        except (TypeError, ValueError) as error:
            refusal = str(error)
        except UnsupportedError:
            if asked != "auto":
                raise
            refusal = self.operator.supports(*self.operator.complete(args)).reason
        except JitError as error:
            if asked != "auto":
                raise
            self._failures[self._build(args)] = error  # so that it isn't compiled in vain at each call
            refusal = str(error)
        else:
            if not self._ran:  # clients set up their logs after they have loaded plug-ins: say it where it can be seen
                self._ran = True
                self.client.log.info("%s of jit_kernels %s runs", self.operator.name, __version__)
            return out
        kind = re.sub(r"\d+", "#", refusal)  # the same words about another batch size say nothing new
        if kind not in self._said:
            self._said.add(kind)
            self.client.log.warning("%s: %s's own path runs: %s", self.operator.name, self.client.name, refusal)
        return theirs()

    def covers(self, *args: Any) -> bool:
        """Whether the fused kernel covers a call, and can be had; it is compiled and loaded for that."""
        args = self.operator.complete(args)
        try:
            self.operator.validate(*args)
        except (TypeError, ValueError):
            return False
        build = self._build(args)
        if not self.operator.supports(*args) or build in self._failures:
            return False
        try:
            self.operator.build(Target.of(args[0].device), *self.operator.parameters(*args)).load()
        except JitError as error:
            self._failures[build] = error
            return False
        return True

    def _build(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].device, *self.operator.parameters(*self.operator.complete(args)))
