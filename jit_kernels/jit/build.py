"""One build: writes ``build.ninja`` into a folder, runs it, and explains a failure in the compiler's words.

The file is written here rather than by ``tvm_ffi.cpp``, so that every flag which reaches the compiler is visible
in one place and stands in the cache key, and so that concurrent builds need no change to the process's environment.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import CompileError, DiskFullError, HeaderNotFoundError, JitError, LinkError
from jit_kernels.jit.source import Source
from jit_kernels.jit.toolchain import Toolchain, ninja

LOG = "build.log"

# The first line of an error, as gcc, cudafe, ptxas, nvlink, ld and the shell write it.
_FIRST_ERROR = re.compile(
    r"^.*(?:\berror(?: \S+)?:|\bfatal\s*:|undefined reference|cannot find -l|No space left|: not found).*$", re.M
)

_HINTS = (
    ("No space left on device", "free some space on the disk that holds the cache"),
    ("cannot find -l", "a library is missing: give its folder with extra_ldflags=['-L…']"),
    ("undefined reference", "a symbol has no definition: a wrapper may name a function that the source lacks"),
    ("No such file or directory", "a header is missing: give its folder with extra_include_paths"),
    ("unsupported GNU version", "this nvcc rejects this host compiler: set CXX to an older one"),
    ("Unsupported gpu architecture", "this nvcc is too old for the arch target: install a newer toolkit"),
)


def compile_library(source: Source, target: Target, toolchain: Toolchain, folder: Path, timeout: float) -> Path:
    """Builds the source in an empty folder, and returns the shared library. The full output stays in ``build.log``.

    Raises:
        CompileError: a compiler failed, or the timeout (in seconds) passed.
        HeaderNotFoundError, LinkError, DiskFullError: what their names say.
        ToolchainError: ninja was not found.
    """
    links: dict[Path, str] = {}

    def spell(path: Path) -> str:
        # nvcc hands paths on through a shell without quoting them: those with such signs go by a link in the folder.
        if not re.search(r"['\"$`\\]", str(path)):
            return str(path)
        place = path if path.is_dir() else path.parent
        if place not in links:
            links[place] = f"link{len(links)}"
            (folder / links[place]).symlink_to(place)
        return str(Path(links[place]) / path.relative_to(place))

    for name, text in source.units(spell).items():
        write(folder / name, text)
    library = f"{source.name}.so"
    write(folder / "build.ninja", _ninja_file(source, target, toolchain, library, spell))
    command = [str(ninja()), "-v"]
    # The compilers' temporary files stay in the folder too: a killed build leaves nothing elsewhere.
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "TMPDIR": "."},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="surrogateescape",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise CompileError(
            f"building {source.name} for {target} took more than {timeout:g} s and was stopped",
            "raise JIT_KERNELS_BUILD_TIMEOUT, or find out what slows the compiler down",
        ) from None
    finally:
        if process.poll() is None:
            # Ninja gives each compiler a process group of its own, and ends them when it is asked to end.
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    write(folder / LOG, output)
    if process.returncode != 0:
        raise _explain(source, target, toolchain, output)
    return folder / library


def write(path: Path, text: str) -> None:
    """Whatever the locale: the text holds paths, and those are bytes."""
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def read(path: Path) -> str:
    """What `write` wrote, or what a compiler did."""
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def resources(log: str) -> dict[str, dict[str, int]]:
    """Registers, spills, stack and static shared memory of each kernel, from ptxas's report in a build log."""
    found: dict[str, dict[str, int]] = {}
    kernel = None
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)'", line):
            kernel = found.setdefault(match[1], {})
        elif kernel is not None and "spill stores" in line:
            stack, stores, loads = map(int, re.findall(r"(\d+) bytes", line)[:3])
            kernel.update(stack=stack, spill_stores=stores, spill_loads=loads)
        elif kernel is not None and (match := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            kernel.update(registers=int(match[1]), shared=int(shared[1]) if shared else 0)
            kernel = None
    return found


def _ninja_file(
    source: Source, target: Target, toolchain: Toolchain, library: str, spell: Callable[[Path], str]
) -> str:
    def escape(path: object) -> str:
        return re.sub(r"([$ :])", r"$\1", str(path))

    def quoted(flags: list[str]) -> str:
        # ninja hands the line to sh: quote for sh, then escape ninja's own $.
        return " ".join("'" + flag.replace("'", "'\\''").replace("$", "$$") + "'" for flag in flags)

    includes = [f"-I{spell(path)}" for path in source.include_dirs()]
    host, nvcc = quoted([*toolchain.host_command]), quoted([str(toolchain.nvcc), "-ccbin", str(toolchain.host)])
    lines = [
        "ninja_required_version = 1.3",
        "rule cpp",
        f"  command = {host} -MMD -MF $out.d {quoted([*source.host_flags(), *includes])} -c $in -o $out",
        "  depfile = $out.d",
        "rule cuda",
        f"  command = {nvcc} -MMD -MF $out.d {quoted([*source.cuda_flags(target), *includes])} -c $in -o $out",
        "  depfile = $out.d",
        "rule link",
        f"  command = {host} $in {quoted(source.link_flags(toolchain.library_dir))} -o $out",
    ]
    objects = []
    for index, unit in enumerate(source.unit_paths(spell)):
        objects.append(f"{index}.o")
        lines.append(f"build {index}.o: {'cuda' if unit.endswith('.cu') else 'cpp'} {escape(unit)}")
    lines += [f"build {escape(library)}: link {' '.join(objects)}", f"default {escape(library)}", ""]
    return "\n".join(lines)


def _explain(source: Source, target: Target, toolchain: Toolchain, output: str) -> JitError:
    # ninja prints "FAILED: …", the command, then what the command said.
    failed = re.search(r"^FAILED: (?:\[code=\d+\] )?(\S+).*\n(.*)\n((?:.*\n?)*)", output, re.M)
    product, command, said = failed.groups() if failed else ("", "ninja -v", output)
    match = _FIRST_ERROR.search(said)
    error = match[0].strip() if match else said.strip()[:500] or "no output"
    kind: type[JitError] = LinkError if product.endswith(".so") else CompileError
    if "No space left on device" in said:
        kind = DiskFullError
    elif kind is CompileError and re.search(r"fatal error: .*: No such file or directory", said):
        kind = HeaderNotFoundError
    hint = next((hint for mark, hint in _HINTS if mark in said), "see the compiler's output below")
    tail = "\n".join(said.strip().splitlines()[:40])
    return kind(
        f"building {source.name} for {target} with {toolchain.nvcc} failed: {error}\n"
        f"  command: {command}\n  output:\n{tail}",
        hint,
    )
