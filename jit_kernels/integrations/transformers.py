"""Hugging Face transformers: the collapse of DeepSeek-V4's ``HyperConnection`` and ``HyperHead``.

Their forwards compute the weights, then collapse in one expression: ``(pre.unsqueeze(-1) * x).sum(dim=2).to(x.dtype)``.
That expression alone is exchanged, in their own forward as it is installed: whatever else a release changes in there
stays theirs, and a release that writes the collapse in other words is refused.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import logging
import re
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jit_kernels.integrations import Change, IntegrationError, Patch, version_of
from jit_kernels.ops.mhc_pre_h_aggregate import DTYPES, STREAMS, mhc_pre_h_aggregate

MODULE = "transformers.models.deepseek_v4.modeling_deepseek_v4"
CLASSES = ("DeepseekV4HyperConnection", "DeepseekV4HyperHead")
TESTED = "5.17 and 5.24"
PATCH = Patch("transformers", TESTED)

_COLLAPSE = re.compile(r"\((?P<pre>\w+)\.unsqueeze\(-1\) \* (?P<x>\w+)\)\.sum\(dim=2\)\.to\((?P=x)\.dtype\)")
_log = logging.getLogger(__name__)
_lock = threading.RLock()
_permanent = False
_open = 0  # `enabled` blocks that are being executed, by whatever thread


def install() -> None:
    """Replaces the collapse of every DeepSeek-V4 model in this process, for training and inference, until `uninstall`.

    Install before a model is compiled, or loaded with a ``device_map``: both keep the forward that they found.

    Raises:
        IntegrationError: transformers isn't installed, or its DeepSeek-V4 is none that this was written for; nothing
            has been changed then.
    """
    global _permanent
    with _lock:
        PATCH.install(*_changes())
        _permanent = True


def uninstall() -> None:
    """Ends `install`: the original forwards are back, unless an `enabled` block is still being executed.

    Raises:
        IntegrationError: somebody replaced one of the forwards since.
    """
    global _permanent
    with _lock:
        _permanent = False
        _settle()


def installed() -> bool:
    """Whether the collapse is replaced at this moment."""
    return PATCH.installed


@contextmanager
def enabled() -> Iterator[None]:
    """`install` for the duration of a ``with`` block. Blocks may be nested, and overlap in several threads.

    The switch belongs to the process, not to the thread: autograd recomputes checkpointed layers in threads of its own,
    and they must meet what the forward met. So a backward that recomputes belongs inside the block, too.

    Raises:
        IntegrationError: as `install` and `uninstall` do.
    """
    global _open
    with _lock:
        PATCH.install(*_changes())
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            _settle()


def _settle() -> None:
    if not _permanent and not _open:
        PATCH.uninstall()


def kernel_layers() -> SimpleNamespace:
    """Both classes as stateless layers for Hugging Face ``kernels``, which puts their forwards onto a model's modules.

    Raises:
        IntegrationError: as `install` does.
    """
    members = {"has_backward": True, "can_torch_compile": True}
    return SimpleNamespace(
        **{
            change.owner.__name__: type(
                change.owner.__name__,
                (torch.nn.Module,),
                {"forward": change.replace(vars(change.owner)["forward"]), **members},
            )
            for change in _changes()
        }
    )


def write_kernel_repository(folder: Path) -> Path:
    """Writes a repository of `kernel_layers` for ``kernels.LocalLayerRepository``, and returns its folder.

    It holds no kernel: its layers import the installed ``jit_kernels``.
    """
    variant = folder / "build" / "torch-universal"
    variant.mkdir(parents=True, exist_ok=True)
    metadata = {"id": "jit_kernels_mhc", "name": "jit-kernels-mhc", "version": 1, "license": "Apache-2.0"}
    metadata |= {"python-depends": [], "backend": {"type": "cuda"}}
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    (variant / "__init__.py").write_text(
        "from jit_kernels.integrations.transformers import kernel_layers\n\nlayers = kernel_layers()\n"
    )
    return folder


def _changes() -> list[Change]:
    found = version_of("transformers")
    if found is None:
        raise IntegrationError("transformers is not installed: pip install 'transformers>=5.17,<6'")
    try:
        module = importlib.import_module(MODULE)
        owners = [getattr(module, name) for name in CLASSES]
    except (ImportError, AttributeError) as error:
        raise _refusal(str(error)) from error
    return [Change(owner, "forward", _exchange) for owner in owners]


def _refusal(what: str) -> IntegrationError:
    found = version_of("transformers")
    return IntegrationError(f"transformers {found}: {what}; nothing was changed. Tested with transformers {TESTED}")


def _exchange(forward: FunctionType) -> FunctionType:
    """The same function, compiled from its own source with the collapse exchanged; what it calls stays the client's.

    Where the operator doesn't take the tensors, the expression is evaluated as it stood.
    """
    if hasattr(forward, "_jit_kernels"):  # it is ours already
        return forward
    name = f"{forward.__module__}.{forward.__qualname__}"
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or forward.__closure__:
        raise _refusal(f"{name} is wrapped by something, so its own collapse can't be exchanged")
    try:
        source = textwrap.dedent(inspect.getsource(forward))
    except OSError as error:
        raise _refusal(f"{name} has no source, where the collapse would be found") from error
    tree = ast.parse(source)
    exchange = _Exchange()
    exchange.visit(tree)
    if exchange.count != 1:
        raise _refusal(
            f"{name} holds the collapse, (pre.unsqueeze(-1) * x).sum(dim=2).to(x.dtype), {exchange.count} times "
            f"instead of once"
        )
    # Lines and file are the client's: a traceback shows the expression that was exchanged.
    ast.increment_lineno(tree, forward.__code__.co_firstlineno - 1)
    maker = ast.parse("def make(_jit_kernels_covers, _jit_kernels_collapse): pass")
    function = maker.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [*tree.body, ast.Return(ast.Name(forward.__name__, ast.Load()))]
    ast.fix_missing_locations(maker)
    flags = forward.__code__.co_flags & annotations.compiler_flag  # the client's own choice
    code = compile(maker, forward.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    scope: dict[str, Any] = {}
    exec(code, forward.__globals__, scope)
    ours = scope["make"](_covers, mhc_pre_h_aggregate)
    ours.__qualname__ = forward.__qualname__
    ours.__defaults__, ours.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    ours.__dict__ |= forward.__dict__ | {"_jit_kernels": forward}
    return ours


class _Exchange(ast.NodeTransformer):
    count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if match := _COLLAPSE.fullmatch(ast.unparse(node)):
            self.count += 1
            arguments = f"({match['x']}, {match['pre']})"
            ours = ast.parse(f"_jit_kernels_collapse{arguments} if _jit_kernels_covers{arguments} else 0", mode="eval")
            assert isinstance(ours.body, ast.IfExp)
            ours.body.orelse = node
            return ast.copy_location(ours.body, node)
        return self.generic_visit(node)


_told: set[str] = set()


def _covers(x: Tensor, pre: Tensor) -> bool:
    """Whether the operator takes these: streams ``[B, S, 4, D]`` and weights ``[B, S, 4]`` in float32."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.ndim == 4 and x.shape[2] == STREAMS and pre.shape == x.shape[:3] and x.dtype in DTYPES and pre.dtype == wide:
        return True
    if not torch.compiler.is_compiling():
        reason = f"x {x.dtype} {list(x.shape[2:])}, pre {pre.dtype}"
        if reason not in _told:
            _told.add(reason)
            _log.warning("DeepSeek-V4 runs its own collapse for %s: jit_kernels takes 4 streams, float32 pre", reason)
    return False
