"""What can go wrong between a call and its compiled kernel: each fault its own class, under one base."""

from __future__ import annotations


class JitError(RuntimeError):
    """A kernel could not be had. ``cure`` says what to do about it.

    Under the ``auto`` backend a call then runs the torch fallback, with one warning; under ``fused`` this is raised.
    """

    def __init__(self, cause: str, cure: str = "") -> None:
        super().__init__(f"{cause}\n  cure: {cure}" if cure else cause)
        self.cause = cause
        self.cure = cure


class ToolchainError(JitError):
    """No usable CUDA compiler, host compiler or ninja was found."""


class CompilerNotFoundError(ToolchainError):
    """There is no nvcc, or none whose toolkit is whole."""


class CompilerTooOldError(ToolchainError):
    """There is an nvcc, but it does not know the arch target."""


class CompileForbiddenError(JitError):
    """The kernel isn't built, and ``JIT_KERNELS_COMPILE=never`` forbids building it."""


class CompileError(JitError):
    """The compiler rejected the source, or the build did not end in time."""


class HeaderNotFoundError(CompileError):
    """An include names a file that is in none of the include folders."""


class LinkError(CompileError):
    """The compiler was satisfied, the linker was not."""


class LoadError(JitError):
    """A freshly built library could not be loaded."""


class AbiMismatchError(LoadError):
    """A library was built for another tvm-ffi, C++ runtime or C library than the ones here."""


class CacheError(JitError):
    """The cache can't be written."""


class DiskFullError(CacheError):
    """No space is left where the kernel is being built; nothing half-written stays."""


class UntrustedCacheError(CacheError):
    """A cache folder or entry belongs to, or can be written by, somebody else."""


class LockTimeoutError(CacheError):
    """Another process has held the build lock for too long."""


class CaptureError(JitError):
    """A kernel that is not loaded yet was asked for while a CUDA graph is being captured."""
