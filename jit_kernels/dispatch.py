"""Which implementation a call runs: the fused kernel from the JIT cache, or the torch fallback.

public op → Operator.__call__ → validate → supports → fused | fallback
          → a shortcut, where an earlier call left one for its like
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from jit_kernels import env, torch_op
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import CaptureError, JitError
from jit_kernels.jit.loader import Kernel
from jit_kernels.jit.store import warn

if TYPE_CHECKING:
    from jit_kernels.checks.workload import Workload

BACKENDS = ("auto", "fused", "torch")
FUSING = ("auto", "fused")  # those that run the fused kernel wherever it covers the call
MOST_SHORTCUTS = 8  # of one key: so many kinds of calls in turn find theirs
OPERATORS: dict[str, Operator] = {}

_DEFAULT: str = env.BACKEND.get()
_ambient: ContextVar[str] = ContextVar("jit_kernels_backend", default=_DEFAULT)
ambient = _ambient.get  # `backend` in less time


class UnsupportedError(RuntimeError):
    """The fused kernel was demanded, and does not cover this call."""


@dataclass(frozen=True)
class Support:
    """Whether the fused kernel covers a call, and why not. True or false like its ``ok``."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


SUPPORTED = Support(True, "the fused kernel covers it")


def backend() -> str:
    """The backend of calls that name none: ``auto``, ``fused`` or ``torch``."""
    return _ambient.get()


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Sets the backend of the calls inside a ``with`` block, in this thread or task.

    Under ``torch.compile`` the ambient backend is read when the compiled graph runs, not when it is traced.

    Args:
        name: ``auto`` (fused where it covers the call, else the fallback), ``fused`` (raises where it does not),
            or ``torch`` (the fallback).

    Raises:
        ValueError: the name is none of these.
    """
    token = _ambient.set(_checked(name))
    try:
        yield
    finally:
        _ambient.reset(token)


def _checked(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r}: expected one of {', '.join(BACKENDS)}")
    return name


@dataclass(frozen=True, eq=False)
class Operator:
    """All that dispatch, torch, the command line and the checks need to know of one operator.

    Every function takes the arguments of ``schema``, in its order: the tensors first.
    """

    name: str
    schema: str  # as torch writes it, without the name: "(Tensor residual, Tensor pre) -> Tensor"
    validate: Callable[..., None]  # raises ValueError or TypeError, the same for both implementations
    supports: Callable[..., Support]  # never raises, never compiles
    outputs: Callable[..., Any]  # new, unwritten outputs; also what torch.compile sees of the op
    build: Callable[..., Kernel]  # (target, *parameters): names the .cuh; launches nothing
    fused: Callable[..., Any]
    fallback: Callable[..., Any]
    # (key, launch) or None: how later calls like this one may run, where the kernel is loaded and its host entry checks
    # what `validate` would. The public op looks for it in `shortcuts` under that key.
    shortcut: Callable[..., tuple[Any, Callable[..., Any]] | None] | None = None
    parameters: Callable[..., tuple[Any, ...]] = lambda *args: ()  # of the build that a call needs, after the target
    gradient: Callable[..., tuple[Any, ...]] | None = None  # (ctx, *grads) → one gradient an argument
    warmup: tuple[dict[str, Any], ...] = ()  # parameters of the builds that users need
    core_ndim: int | None = (
        None  # the first tensor's dimensions of one sample: a DTensor may be sharded over the others
    )
    public: bool = True
    torch_op: Callable[..., Any] = field(init=False, repr=False)
    arguments: tuple[str, ...] = field(init=False, repr=False)  # their names
    defaults: tuple[Any, ...] = field(init=False, repr=False)  # their values, None where there is none
    tensors: int = field(init=False, repr=False)  # how many of them are tensors
    launchers: dict[Any, Callable[..., None]] = field(default_factory=dict, init=False, repr=False)  # of loaded kernels
    # For calls that are `torch_op.undisturbed`: launches, each behind the test whether the tensors are those it is for.
    shortcuts: dict[Any, tuple[tuple[Callable[..., bool], Callable[..., Any]], ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _failures: dict[Any, JitError] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        op = torch_op.register(self)
        parameters = op._schema.arguments[:-1]  # type: ignore[attr-defined]  # without the backend
        object.__setattr__(self, "torch_op", op)
        object.__setattr__(self, "arguments", tuple(parameter.name for parameter in parameters))
        object.__setattr__(self, "defaults", tuple(parameter.default_value for parameter in parameters))
        kinds = ["Tensor" in str(parameter.type) for parameter in parameters]
        if kinds != sorted(kinds, reverse=True):
            raise ValueError(f"{self.name}: the schema must name the tensors first; got {self.schema}")
        object.__setattr__(self, "tensors", sum(kinds))
        if self.public:
            OPERATORS[self.name] = self

    def complete(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with the defaults of those left out at the end."""
        return args if len(args) == len(self.defaults) else (*args, *self.defaults[len(args) :])

    @property
    def workload(self) -> Workload:
        """Inputs that users run, and what is right for them: ``bench/<name>.py``."""
        return importlib.import_module(f"jit_kernels.bench.{self.name}").WORKLOAD

    def __call__(self, *args: Any, backend: str | None = None) -> Any:
        args = self.complete(args)
        if torch.compiler.is_compiling():
            return self.torch_op(*args, backend=backend)
        choice = _ambient.get() if backend is None else _checked(backend)
        if torch_op.unwatched(*args[: self.tensors]):
            made = self.run(args, choice)
            if self.shortcut is not None:
                self._remember(args)
            return made
        self.validate(*args)  # a tensor that isn't one would be refused by torch in other words
        torch_op.require_no_tangent(self.name, args[: self.tensors])
        torch_op.prepare_dtensors(self, args[: self.tensors])
        return self.torch_op(*args, backend=choice)

    def _remember(self, args: tuple[Any, ...]) -> None:
        """Leaves a shortcut for calls like this one, which nobody watches."""
        assert self.shortcut is not None
        found, tensors = self.shortcut(*args), args[: self.tensors]
        if found is None:
            return
        key, launch = found
        known = self.shortcuts.get(key, ())
        if not any(like(*tensors) for like, _ in known):
            like = torch_op.likeness(*tensors)
            if like is not None:
                self.shortcuts[key] = ((like, launch), *known)[:MOST_SHORTCUTS]

    def run(self, args: tuple[Any, ...], backend: str | None) -> Any:
        """Validates, chooses and runs, past torch's dispatcher."""
        choice = _ambient.get() if backend is None else _checked(backend)
        self.validate(*args)
        if choice == "torch":
            return self._fall_back(args)
        support = self.supports(*args)
        if choice == "fused":
            if not support:
                raise UnsupportedError(f"{self.name}: backend 'fused' was asked for, but {support.reason}")
            self._failures.clear()  # whoever insists gets another try
            return self.fused(*args)
        if support:
            try:
                return self.fused(*args)
            except CaptureError:
                raise
            except JitError as error:
                _warn_once(self.name, error)
        return self._fall_back(args)

    def _fall_back(self, args: tuple[Any, ...]) -> Any:
        device = next(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return self.fallback(*args)
        with torch.autocast(device, enabled=False):  # the op's own precision, as in the kernel
            return self.fallback(*args)

    def launcher(self, export: str, device: torch.device, *parameters: Any) -> Callable[..., None]:
        """A function of the compiled module for this device and these build parameters; loaded at the first request.

        Raises:
            CaptureError: a CUDA graph is being captured and the kernel isn't loaded yet.
            JitError: the kernel can't be had.
        """
        key = (export, device.index, *parameters)
        found = self.launchers.get(key)
        if found is None:
            if key in self._failures:  # so that calls which fall back don't compile in vain each time
                raise self._failures[key].with_traceback(None)
            kernel = self.build(Target.of(device), *parameters)
            if not kernel.loaded and torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    f"{self.name}: its kernel is not loaded yet, and a CUDA graph is being captured",
                    "call the op once with such tensors, or jit_kernels.warm_up(), before the capture begins",
                )
            try:
                module = kernel.load()
            except JitError as error:
                self._failures[key] = error
                raise
            found = self.launchers[key] = getattr(module, export)
        return found


_warned: set[tuple[str, type]] = set()


def _warn_once(name: str, error: JitError) -> None:
    if (name, type(error)) not in _warned:
        _warned.add((name, type(error)))
        warn(f"{name} runs its torch fallback: {error}")


@dataclass(frozen=True)
class Explanation:
    """What a call would run, and why."""

    operator: str
    backend: str  # what was asked for
    runs: str  # "fused", "torch" or "error"
    reason: str
    compiles: bool = False  # whether the call would have to compile first

    def __str__(self) -> str:
        return f"{self.operator} (backend {self.backend}): {self.runs}: {self.reason}"


def operator_of(op: Callable[..., Any] | str) -> Operator:
    """The record of a public op, or of its name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in OPERATORS:
        raise ValueError(f"{name!r} is no operator: expected one of {', '.join(OPERATORS)}")
    return OPERATORS[name]


def explain(op: Callable[..., Any] | str, *args: Any, backend: str | None = None, **options: Any) -> Explanation:
    """Prints and returns what a call of ``op`` with these arguments would run, and why. Compiles and launches nothing.

    Args:
        op: A public op, or its name.
        *args, **options: What it would be called with.
        backend: As for the op itself.

    Raises:
        ValueError: there is no such op; or the op itself would raise it for these arguments.
        TypeError: the op itself would raise it.
    """
    operator = operator_of(op)
    name = operator.name
    choice = _ambient.get() if backend is None else _checked(backend)
    names = operator.arguments
    unknown = options.keys() - set(names[len(args) :])
    if unknown or len(args) > len(names):
        given = f"{len(args)} by place" + (f" and {', '.join(sorted(unknown))}" if unknown else "")
        raise TypeError(f"{name} takes {', '.join(names)}; got {given}")
    rest = zip(names[len(args) :], operator.defaults[len(args) :], strict=True)
    complete = args + tuple(options.get(key, default) for key, default in rest)
    operator.validate(*complete)
    found = _foresee(operator, complete, choice)
    print(found)
    return found


def _foresee(operator: Operator, args: tuple[Any, ...], choice: str) -> Explanation:
    if choice == "torch":
        return Explanation(operator.name, choice, "torch", "the torch backend was asked for")
    support = operator.supports(*args)
    reason, compiles = support.reason, False
    if support:
        kernel = operator.build(Target.of(args[0].device), *operator.parameters(*args))
        try:
            compiles = not kernel.require_available()
        except JitError as error:
            support, reason = Support(False), str(error)
    runs = "fused" if support else "error" if choice == "fused" else "torch"
    return Explanation(operator.name, choice, runs, reason + "; the first call compiles it" * compiles, compiles)


_device_support: dict[torch.device, Support] = {}


def cuda_support(tensor: torch.Tensor) -> Support:
    """The part of every support check that is about the device."""
    device = tensor.device
    found = _device_support.get(device)
    if found is None:
        found = _device_support[device] = _examine(device)
    return found


def _examine(device: torch.device) -> Support:
    if device.type != "cuda":
        return Support(False, f"the tensors are on {device}: the fused kernel runs on CUDA devices")
    if torch.version.hip:
        return Support(False, "this torch is built for ROCm: the fused kernel is CUDA")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return Support(False, f"the device is sm_{major}{minor}: the fused kernel needs sm_90 or newer")
    return SUPPORTED
