"""``python -m bench.vdn_delta_factors``: any candidate for the delta factors beside the chain, ours and SGLang's.

A candidate is a function ``(A, B, alpha) -> (T, J)``, named as ``--candidate module:function``. It gets A and B
``[frames, heads, d, d]`` and alpha ``[frames, heads, d]``, all float32.
"""

from __future__ import annotations

import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from jit_kernels.bench.details import LaunchCounter
from jit_kernels.bench.peers.vdn_delta_factors import sglang
from jit_kernels.bench.suite import AbsentError, Setting
from jit_kernels.bench.vdn_delta_factors import FAMILIES, TOKENS, chain, gold, reference
from rich.console import Console
from torch import Tensor

from jit_kernels import vdn_delta_factors
from jit_kernels.checks.compare import relative_error
from jit_kernels.cli.output import rows
from jit_kernels.ops.vdn_delta_factors import OPERATOR, PRECISIONS

ASKED = OPERATOR.workload.outputs["T"].norm  # 1e-6, Frobenius against float64
WARM_UP, TIMED = 10, 50
Candidate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def named(text: str) -> Candidate:
    """The function that ``module:function`` names.

    Raises:
        click.BadParameter: there is none; the message says what is missing.
    """
    module_name, _, function_name = text.partition(":")
    if not module_name or not function_name:
        raise click.BadParameter(f"{text!r}: expected module:function", param_hint="--candidate")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a file in the current folder is a module too
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise click.BadParameter(f"{text!r}: {error}", param_hint="--candidate") from error
    if not callable(found):
        raise click.BadParameter(f"{text!r}: {function_name} is no function", param_hint="--candidate")
    return found


def built_in(A: Tensor, B: Tensor, alpha: Tensor, folder: Path | None) -> tuple[dict[str, Candidate], list[str]]:
    """The chain, ours, and SGLang's where it can be had; and a line for each that can't."""
    found: dict[str, Candidate] = {"torch chain": chain}
    absent = []
    support = OPERATOR.supports(A, B, alpha)
    if support:
        for precision in PRECISIONS:
            found[f"jit_kernels {precision}"] = partial(vdn_delta_factors, precision=precision, backend="fused")
    else:
        absent.append(f"jit_kernels fused: {support.reason}")
    found["jit_kernels fallback"] = partial(vdn_delta_factors, backend="torch")
    try:
        prepare = sglang(Setting(A.device, sglang=folder))
        flat = A.flatten(0, 1), B.flatten(0, 1), alpha.flatten(0, 1)
        prepare(*flat)  # says whether it covers them
        found["SGLang fused"] = lambda *inputs: prepare(*(tensor.flatten(0, 1) for tensor in inputs))()
    except AbsentError as error:
        absent.append(f"SGLang fused: {error}")
    return found, absent


def verdict(error: float, chains: float) -> str:
    """OK within what was asked for; where the chain itself is not, OK if no worse than the chain."""
    return "OK" if error <= max(ASKED, chains) else "FAIL"


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median of 50 calls after 10: device events, or a clock on a CPU."""
    for _ in range(WARM_UP):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(TIMED):
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMED)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--frames", type=click.IntRange(1), default=101, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=7, show_default=True)
@click.option("--tokens", type=click.IntRange(1), help=f"Keys of a frame [default: {TOKENS}].")
@click.option("--beta-scale", type=float, help="Factor of the betas; 50 and 100 are the hard ones [default: 1].")
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True)
@click.option(
    "--family", type=click.Choice(list(FAMILIES)), help="Inputs of another kind, with its own tokens and betas."
)
@click.option("--candidate", "candidates", multiple=True, metavar="MODULE:FUNCTION", help="One to try; again for more.")
@click.option("--device", default=None, help="cuda, cuda:1, cpu … (default: cuda where there is one).")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--sglang", "folder", type=click.Path(exists=True, path_type=Path), help="SGLang's kernels/jit folder.")
@click.pass_context
def main(
    context: click.Context,
    frames: int,
    heads: int,
    tokens: int | None,
    beta_scale: float | None,
    head_dim: int,
    family: str | None,
    candidates: tuple[str, ...],
    device: str | None,
    seed: int,
    folder: Path | None,
) -> None:
    """Hold candidates for T = diag(alpha)(I+A)^-1 and J = B(I+A)^-1 to float64, and time them.

    OK: the largest relative Frobenius error of a matrix is at most 1e-6, or no larger than the chain's. Exits 1 if a
    candidate fails. With another number of frames the same runs in a moment on a CPU.
    """
    if family is not None and (tokens is not None or beta_scale is not None):
        raise click.UsageError(f"--family {family!r} has its own tokens and betas: leave --tokens and --beta-scale out")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    generator = torch.Generator(where).manual_seed(seed)
    count = frames * heads
    if family is not None:
        drawn = FAMILIES[family](generator, count, head_dim)
    else:
        drawn = reference(generator, count, head_dim, beta_scale or 1.0, tokens=tokens or TOKENS)
    A, B, alpha = (tensor.view(frames, heads, *tensor.shape[1:]) for tensor in drawn)
    exact = [tensor.flatten(0, 1) for tensor in gold(A.double(), B.double(), alpha.double())]
    table, absent = built_in(A, B, alpha, folder)
    table |= {text: named(text) for text in candidates}
    chains = _errors(chain(A, B, alpha), exact)
    beside = [tensor.flatten(0, 1) for tensor in chain(A, B, alpha)]

    click.echo(
        f"{family or f'beta-scale {beta_scale or 1:g}'}: N = {frames} x {heads} = {count}, d = {head_dim}, on {where}"
    )
    if where.type != "cuda":
        click.echo("no GPU: times by a clock, launches not counted")
    lines: list[list[str]] = []
    calls: dict[
        int, Callable[[], Any]
    ] = {}  # by their line, for the profiler, which makes launches dearer: it comes last
    for name, candidate in table.items():
        call = partial(candidate, A, B, alpha)
        try:
            made = call()
            errors, distances = _errors(made, exact), _errors(made, beside)
        except Exception as error:  # a stranger's own
            lines.append([name, "FAIL", f"{type(error).__name__}: {error}", "FAIL", "", "", ""])
            continue
        verdicts = [verdict(error, its) for error, its in zip(errors, chains, strict=True)]
        figures = [f"{error:.2e} ({distance:.1e})" for error, distance in zip(errors, distances, strict=True)]
        calls[len(lines)] = call
        lines.append([name, verdicts[0], figures[0], verdicts[1], figures[1], f"{milliseconds(call, where):.4f}", "-"])
    if where.type == "cuda":
        counter = LaunchCounter()
        for index, timed in calls.items():
            lines[index][-1] = str(counter.count([timed]).get("launches", "?"))
    console = Console() if sys.stdout.isatty() else Console(width=160)
    columns = ("candidate", "T", "error (from the chain)", "J", "error (from the chain)", "ms", "launches")
    console.print(rows(None, columns, lines))
    for one in absent:
        click.echo(f"absent: {one}")
    if any("FAIL" in line for line in lines):
        context.exit(1)


def _errors(outputs: Any, exact: list[Tensor]) -> list[float]:
    """Of T and J: the largest of a matrix; infinite where there is a NaN or an Inf."""
    T, J = outputs
    found = []
    for out, right in zip((T, J), exact, strict=True):
        if out.numel() != right.numel() or out.shape[-2:] != right.shape[-2:]:
            raise ValueError(
                f"expected {list(right.shape)} or the same matrices by frame and head; got {list(out.shape)}"
            )
        error = relative_error(out.reshape(right.shape), right)
        found.append(error if math.isfinite(error) else math.inf)
    return found
