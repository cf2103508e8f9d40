"""``load_jit``, and the handle that operators use: which kernel, for which target, loaded when first needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jit_kernels import torch_op
from jit_kernels.jit import cache, store
from jit_kernels.jit.arch import Target
from jit_kernels.jit.source import CSRC, Source

_modules: dict[tuple[Source, Target], Any] = {}
_loading = threading.Lock()


def _renew() -> None:
    global _loading
    _loading = threading.Lock()  # a child forked while another thread loads would wait for it for ever


os.register_at_fork(after_in_child=_renew)


@dataclass(frozen=True)
class Kernel:
    """A kernel and what it is compiled for. Making one costs nothing: no compiler, no file, no GPU is touched."""

    source: Source
    target: Target

    def load(self) -> Any:
        """The loaded tvm-ffi module; built first where it must be.

        Raises:
            JitError: one of its subclasses says what stands in the way.
        """
        key = (self.source, self.target)
        module = _modules.get(key)
        if module is None:
            with _loading:
                module = _modules.get(key)
                if module is None:
                    module = _modules[key] = cache.load(self.source, self.target)
        return module

    @property
    def loaded(self) -> bool:
        """Whether this process has it already."""
        return (self.source, self.target) in _modules

    def compile(self, root: Path | None = None) -> store.Entry:
        """Builds without loading for use: in ``root``, or in the cache. Needs no GPU.

        Raises:
            JitError: as `load`.
        """
        return cache.obtain(self.source, self.target, root)

    def find(self) -> store.Entry | None:
        """The entry that `load` would take, or None where it would compile."""
        return cache.find(self.source, self.target)

    def require_available(self) -> bool:
        """Whether it is built; where it isn't, whether it could be is tried out, short of compiling.

        Raises:
            JitError: it can't be had.
        """
        if self.loaded or self.find() is not None:
            return True
        cache.require_compiler(self.source, self.target)
        return False


def kernel(
    *args: object,
    cpp_files: Sequence[str | Path] = (),
    cuda_files: Sequence[str | Path] = (),
    cpp_wrappers: Sequence[tuple[str, str]] = (),
    cuda_wrappers: Sequence[tuple[str, str]] = (),
    extra_cflags: Sequence[str] = (),
    extra_cuda_cflags: Sequence[str] = (),
    extra_ldflags: Sequence[str] = (),
    extra_include_paths: Sequence[str | Path] = (),
    header_only: bool = True,
    target: Target,
) -> Kernel:
    """The handle behind `load_jit`: the same arguments, nothing built yet."""

    def resolve(files: Sequence[str | Path] | None) -> tuple[Path, ...]:
        return tuple((CSRC / file).resolve() for file in files or ())  # an absolute path stays as it is

    source = Source(
        args=tuple(map(str, args)),
        cpp_files=resolve(cpp_files),
        cuda_files=resolve(cuda_files),
        cpp_wrappers=tuple((export, name) for export, name in cpp_wrappers or ()),
        cuda_wrappers=tuple((export, name) for export, name in cuda_wrappers or ()),
        extra_cflags=tuple(extra_cflags or ()),
        extra_cuda_cflags=tuple(extra_cuda_cflags or ()),
        extra_ldflags=tuple(extra_ldflags or ()),
        extra_include_paths=tuple(Path(path).resolve() for path in extra_include_paths or ()),
        header_only=header_only,
    )
    return Kernel(source, target)


@torch_op.untraced
def load_jit(*args: object, target: Target | str | None = None, **options: Any) -> Any:
    """Loads a JIT module, compiling it where the cache doesn't hold it yet.

    Follows SGLang's function of this name, so that its ``.cuh`` files compile as they are.

    Args:
        *args: The module's name and its template arguments; any values with a stable ``str``.
        cuda_files, cpp_files: Sources; relative names lie in ``csrc/``.
        cuda_wrappers, cpp_wrappers: ``(export, kernel)`` pairs: what Python calls, and the C++ name it stands for.
        extra_cflags, extra_cuda_cflags, extra_ldflags: Further flags of the host compiler, nvcc and the linker.
        extra_include_paths: Further include folders; the headers that the sources reach in them stand in the key.
        header_only: False for sources that export functions by themselves.
        target: An arch target such as ``"sm_90a"``; by default that of the current CUDA device.

    Returns:
        The ``tvm_ffi.Module``, whose attributes are the exports.

    Raises:
        JitError: one of its subclasses says what stands in the way.
        ValueError, FileNotFoundError: the arguments name no module.
    """
    if target is None:
        target = Target.here()
    elif isinstance(target, str):
        target = Target.parse(target)
    return kernel(*args, target=target, **options).load()
