"""The words in which errors show a tensor, and reports an error."""

from __future__ import annotations

from typing import Any

import torch


def describe(tensor: torch.Tensor) -> str:
    """Dtype, shape and device in one word, such as ``float32[7, 4] on cuda:0``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def first_line(error: BaseException) -> str:
    """An exception in one line: its type, and what it says first."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def require_tensors(**named: Any) -> None:
    """Raises TypeError, naming the argument, where one is no dense tensor."""
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(value).__name__}: {value!r:.80}")
        if value.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor; got layout {value.layout}")
