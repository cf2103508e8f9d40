"""The ``jit-kernels`` command as its tests call it."""

from __future__ import annotations

from click.testing import CliRunner, Result

from jit_kernels.cli import commands


def run(*arguments: object, code: int = 0) -> Result:
    """Runs it in this process, and checks how it ended."""
    result = CliRunner().invoke(commands, list(map(str, arguments)))
    assert result.exit_code == code, (result.output, result.exception)
    return result
