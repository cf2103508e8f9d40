"""Kernels had before they are needed: built once for all ranks, loaded in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jit_kernels.dispatch import OPERATORS, Operator, operator_of
from jit_kernels.jit import errors
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import JitError


def warm_up(*ops: Callable[..., Any] | str, target: Target | str | None = None, group: Any = None) -> None:
    """Builds and loads the kernels of operators, so that no later call compiles and a graph capture may begin.

    Under ``torch.distributed``, rank 0 of the group builds first and the others load what it built; where they don't
    share its disk, each of their machines builds once for itself. Every rank must call it.

    Args:
        *ops: Public ops, or their names; all of them where none is given. Their usual builds are warmed up.
        target: An arch target such as ``"sm_90a"``; by default that of the current CUDA device.
        group: The process group; by default the whole world, where one is initialised.

    Raises:
        JitError: the kernel can't be had. A failure of rank 0 is raised on every rank, in the same words.
        ValueError: there is no such op, or no target is named and there is no CUDA device.
    """
    operators = [operator_of(op) for op in ops] or list(OPERATORS.values())
    where = Target.here() if target is None else Target.parse(target) if isinstance(target, str) else target
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed:
        _build_on_first_rank(operators, where, group)
    for operator in operators:
        for build in operator.warmup:
            operator.build(where, **build).load()


def _build_on_first_rank(operators: list[Operator], target: Target, group: Any) -> None:
    failure: Exception | None = None
    told: list[Any] = [None]
    if torch.distributed.get_rank(group) == 0:
        try:
            for operator in operators:
                for build in operator.warmup:
                    operator.build(target, **build).compile()
        except JitError as error:
            failure, told[0] = error, (type(error).__name__, error.cause, error.cure)
        except Exception as error:  # whatever it is, the others must not wait for it
            failure, told[0] = error, ("JitError", f"rank 0 failed: {type(error).__name__}: {error}", "")
    torch.distributed.broadcast_object_list(told, group=group, group_src=0)
    if failure is not None:
        raise failure
    if told[0] is not None:
        name, cause, cure = told[0]
        raise getattr(errors, name)(cause, cure)
