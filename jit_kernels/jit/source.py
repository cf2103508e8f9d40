"""What is to be compiled, and the key that stands for all of it."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jit_kernels._version import __version__
from jit_kernels.jit.arch import Target

PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel the sources lie inside the package, in a checkout beside it.
CSRC = next((path for path in (PACKAGE / "csrc", PACKAGE.parent / "csrc") if path.is_dir()), PACKAGE / "csrc")

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.M)
_EXPORTS = """\
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
"""


@dataclass(frozen=True)
class Source:
    """One module: its files, its exports and its flags. Hashable, and cheap to make."""

    args: tuple[str, ...]
    cpp_files: tuple[Path, ...] = ()
    cuda_files: tuple[Path, ...] = ()
    cpp_wrappers: tuple[tuple[str, str], ...] = ()
    cuda_wrappers: tuple[tuple[str, str], ...] = ()
    extra_cflags: tuple[str, ...] = ()
    extra_cuda_cflags: tuple[str, ...] = ()
    extra_ldflags: tuple[str, ...] = ()
    extra_include_paths: tuple[Path, ...] = ()
    header_only: bool = True

    def __post_init__(self) -> None:
        if not self.args:
            raise ValueError("load_jit needs a name: load_jit('my_kernel', cuda_files=['my_kernel.cuh'], …)")
        if not (self.cpp_files or self.cuda_files):
            raise ValueError(f"{self.name}: no source: give cuda_files or cpp_files")
        if self.header_only and not (self.cpp_wrappers or self.cuda_wrappers):
            raise ValueError(
                f"{self.name}: nothing to export: give cuda_wrappers=[(export, kernel)], "
                "or header_only=False for sources that export by themselves"
            )
        for path in (*self.cpp_files, *self.cuda_files):
            if not path.is_file():
                raise FileNotFoundError(f"{self.name}: there is no source file {path}")
        for flag in (*self.extra_cflags, *self.extra_cuda_cflags):
            # What a compiler takes for system headers isn't told to the build, and couldn't be held against the key.
            if re.search("-isystem|-idirafter|--system-include", flag):
                raise ValueError(f"{self.name}: {flag!r} hides headers from the cache key: use extra_include_paths")

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "_", "_".join(self.args), flags=re.ASCII)[:80]

    def units(self, spell: Callable[[Path], str] = str) -> dict[str, str]:
        """The generated translation units, by file name. ``spell`` gives the name by which one includes a source."""
        if not self.header_only:
            return {}
        made = {}
        for name, files, wrappers in (
            ("main.cpp", self.cpp_files, self.cpp_wrappers),
            ("cuda.cu", self.cuda_files, self.cuda_wrappers),
        ):
            if files or wrappers:
                includes = "".join(f'#include "{spell(path)}"\n' for path in files)
                exports = "".join(
                    f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({export}, ({kernel}));\n" for export, kernel in wrappers
                )
                made[name] = _EXPORTS + includes + exports
        return made

    def unit_paths(self, spell: Callable[[Path], str] = str) -> list[str]:
        """What the compiler is run on: the generated units, or the sources themselves."""
        return list(self.units()) or [spell(path) for path in (*self.cpp_files, *self.cuda_files)]

    def include_dirs(self) -> list[Path]:
        from tvm_ffi import libinfo

        ffi = dict.fromkeys([libinfo.find_include_path(), libinfo.find_dlpack_include_path()])
        return [*self.scanned_dirs(), *map(Path, ffi)]

    def scanned_dirs(self) -> list[Path]:
        """Include folders whose headers stand in the key by content; the others do by version."""
        return [CSRC / "include", *self.extra_include_paths]

    def host_flags(self) -> list[str]:
        return ["-std=c++20", "-O3", "-fPIC", *self.extra_cflags]

    def cuda_flags(self, target: Target) -> list[str]:
        return [
            "-std=c++20",
            "-O3",
            "-Xcompiler",
            "-fPIC",
            "--expt-relaxed-constexpr",
            "-Xptxas",
            "-v",  # registers and spills end up in the build log
            *target.flags,
            # SGLang's headers ask for this name, so that its kernels compile here as they are.
            f"-DSGL_CUDA_ARCH={target.major * 100 + target.minor * 10}",
            *self.extra_cuda_cflags,
        ]

    def link_flags(self, cudart_dir: Path | None = None) -> list[str]:
        from tvm_ffi import libinfo

        flags = ["-shared", f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi"]
        if self.cuda_files and cudart_dir is not None:
            # The static runtime: the library then loads on machines that have no toolkit, and beside any torch.
            flags += [f"-L{cudart_dir}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        return [*flags, *self.extra_ldflags]

    def scan(self) -> dict[str, tuple[str, str]]:
        """(file, hash of its content) of the sources and of every header that they reach through the scanned folders,
        by a name free of location.

        The scan is textual and ignores conditions, so it finds too much rather than too little; a build is checked
        against it by what the compiler really opened. A warm start's time is spent here: plain strings, each file
        read once, each name looked for once.
        """
        folders = [str(folder) for folder in self.scanned_dirs()]
        reached: dict[str, tuple[str, str]] = {}
        known: dict[str, tuple[str, str] | None] = {}  # name in the key and file of a header looked for in the folders
        sources = (*self.cpp_files, *self.cuda_files)
        queue = [(f"source {i}:/{path.name}", str(path)) for i, path in enumerate(sources)]
        while queue:
            name, path = queue.pop()
            if name in reached:
                continue
            with open(path, "rb") as file:
                content = file.read()
            reached[name] = (path, hashlib.sha256(content).hexdigest())
            for quote, spelled in _INCLUDE.findall(content):
                header = spelled.decode(errors="replace")
                # Beside the including file first, then in the folders, as the compiler does.
                beside = os.path.join(os.path.dirname(path), header)
                if quote == b'"' and os.path.isfile(beside):
                    queue.append((posixpath.normpath(posixpath.join(posixpath.dirname(name), header)), beside))
                    continue
                if header not in known:
                    places = ((f"{i}:/{header}", os.path.join(folder, header)) for i, folder in enumerate(folders))
                    known[header] = next(((posixpath.normpath(n), p) for n, p in places if os.path.isfile(p)), None)
                if place := known[header]:
                    queue.append(place)
        return reached

    def key(self, target: Target) -> str:
        """Stands for all but the compilers: name, template arguments, exports, contents, flags, arch, versions."""
        import tvm_ffi

        contents = {name: digest for name, (_, digest) in self.scan().items()}
        parts = {
            "package": __version__,
            "tvm_ffi": tvm_ffi.__version__,
            "args": self.args,
            "target": str(target),
            "exports": [self.cpp_wrappers, self.cuda_wrappers, self.header_only],
            "files": sorted(contents.items()),
            "flags": [self.host_flags(), self.cuda_flags(target), self.extra_ldflags],
        }
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]
