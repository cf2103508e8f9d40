"""The ``jit-kernels`` command. Data goes to stdout, progress and warnings to stderr; 0 fine, 1 failed, 2 usage."""

from __future__ import annotations

import sys
import warnings

import click

from jit_kernels import __version__
from jit_kernels.cli.bench import bench
from jit_kernels.cli.cache import cache
from jit_kernels.cli.check import check
from jit_kernels.cli.completion import completion
from jit_kernels.cli.doctor import doctor, env
from jit_kernels.cli.operators import list_operators
from jit_kernels.cli.trace import trace
from jit_kernels.cli.warmup import warmup
from jit_kernels.jit.errors import JitError
from jit_kernels.jit.store import JitWarning


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jit-kernels")
def commands() -> None:
    """CUDA kernels compiled on first call, with a torch fallback.

    JIT_KERNELS_* variables set the cache, the backend and more: see `jit-kernels env`.
    """


for command in (list_operators, check, bench, warmup, env, doctor, cache, trace, completion):
    commands.add_command(command)


def main() -> None:
    """Entry point: turns the package's own errors into one message and exit code 1."""
    warnings.showwarning = _show_warning
    try:
        commands(prog_name="jit-kernels")
    except (JitError, OSError, ValueError) as error:
        click.echo(f"jit-kernels: {error}", err=True)
        sys.exit(1)


def _show_warning(message: Warning | str, category: type[Warning], *rest: object, **more: object) -> None:
    prefix = "warning" if issubclass(category, JitWarning) else category.__name__
    click.echo(f"{prefix}: {message}", err=True)
