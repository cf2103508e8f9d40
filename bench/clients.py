"""SGLang's own model module with our kernel behind it: ``python3 -m bench.clients --sglang DIR --output FILE``.

DIR holds the released package, as its wheel unpacks. On a GPU: their acceptance limits on their shapes, through their
``delta_factor_apply(fused=True)``; and the time of one eager call beside theirs, in the order that their pipeline makes
them. Exits 1 where a limit is broken.

SGLang is imported while the GPU is hidden from torch, for then it doesn't ask for ``sgl_kernel``, whose kernels have
no part here; nothing is put in the place of any module. Their kernel is built by SGLang's own loader.
"""

from __future__ import annotations

import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor

from jit_kernels import use_backend
from jit_kernels.checks.compare import same_bytes
from jit_kernels.checks.provenance import provenance
from jit_kernels.integrations import sglang, version_of

Factors = tuple[Tensor, Tensor]
SHAPES = ((1, 1, 16), (5, 3, 64), (11, 7, 1008))  # frames, heads, tokens per frame: of SGLang's own tests
SCALES = (1, 50)  # of beta
HEAD_DIM = 128
DEVICE = "cuda"
ROWS = ((1, 7), (101, 7), (202, 7))  # frames and heads of a timed call: the text state, a clip, two clips
BLOCKS, CALLS, WARM = 5, 20, 10
# SGLang's limits: on the error against float64, relative Frobenius, and on the distance from the eager chain.
FACTOR, ADDED = 1.5, 1e-7  # times the chain's own error, plus
MOST = {"T": 1e-5, "J": 3e-5}
RTOL, ATOL = 1e-4, {"T": 1e-5, "J": 1e-4}


@contextmanager
def hidden_gpu() -> Iterator[None]:
    no, none = mock.Mock(return_value=False), mock.Mock(return_value=0)
    with mock.patch.multiple("torch.cuda", is_available=no, device_count=none):
        yield


def statistics_of(model: Any, shape: tuple[int, int, int], scale: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """alpha, A and B as their branch makes them: SiLU and L2 normalised keys, sigmoid betas, their frame_statistics."""
    frames, heads, tokens = shape
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=DEVICE)

    keys = torch.nn.functional.normalize(torch.nn.functional.silu(randn(frames, heads, tokens, HEAD_DIM)), dim=-1)
    values = torch.nn.functional.silu(randn(frames, heads, tokens, HEAD_DIM))
    beta = scale * torch.sigmoid(randn(frames, heads, tokens))
    A, B = model.frame_statistics(keys.bfloat16(), values.bfloat16(), beta, a_fp32=True)
    return torch.sigmoid(randn(frames, heads, HEAD_DIM)), A, B


def exact(rule: str, alpha: Tensor, A: Tensor, B: Tensor, tokens: int) -> Factors:
    A, B, alpha = A.double(), B.double(), alpha.double()
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    if rule != "vdn_solve":
        A, B = A / tokens, B / tokens**0.5
    if rule == "sana_scaled":
        return alpha.unsqueeze(-1) * (eye - A), B
    inverse = torch.linalg.inv(eye + A)
    return alpha.unsqueeze(-1) * inverse, B @ inverse


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def accept(model: Any, rule: str, shape: tuple[int, int, int], scale: int) -> dict[str, Any]:
    """One row: the errors of the eager chain, of their kernel and of ours; what of their limits ours breaks."""
    tokens = shape[2]
    alpha, A, B = statistics_of(model, shape, scale, seed=sum(shape) + scale)
    call = partial(model_call, model, rule, alpha, A, B, tokens)
    sglang.uninstall()
    chain, theirs = call(fused=False), attempt(partial(call, fused=True))
    sglang.install()
    with use_backend("fused"):  # so that nothing else can have run
        ours = call(fused=True)
        broken = [] if rule == "sana_scaled" else memory_layouts(model, rule, alpha, A, B, tokens, ours)
    row: dict[str, Any] = {"rule": rule, "frames, heads, tokens": shape, "beta scale": scale, "errors": {}}
    for name, right, eager, found, peer in zip(
        "TJ", exact(rule, alpha, A, B, tokens), chain, ours, theirs or (None, None), strict=True
    ):
        errors = {"chain": error(eager, right), "ours": error(found, right)}
        row["errors"][name] = errors | ({} if peer is None else {"theirs": error(peer, right)})
        if not errors["ours"] <= min(FACTOR * errors["chain"] + ADDED, MOST[name]):
            broken.append(f"{name}: error {errors['ours']:.2e} beside the chain's {errors['chain']:.2e}")
        if not torch.allclose(found, eager, rtol=RTOL, atol=ATOL[name]):
            broken.append(f"{name}: too far from the chain, {float((found - eager).abs().max()):.2e}")
    return row | {"broken": broken}


def model_call(model: Any, rule: str, alpha: Tensor, A: Tensor, B: Tensor, tokens: int, fused: bool = True) -> Factors:
    return model.delta_factor_apply(rule, alpha, A, B, tokens_per_frame=tokens, fused=fused)


def memory_layouts(
    model: Any, rule: str, alpha: Tensor, A: Tensor, B: Tensor, tokens: int, whole: Factors
) -> list[str]:
    """The same bits for inputs elsewhere in memory, for frames alone, and for an alpha that is expanded."""
    call = partial(model_call, model, rule, tokens=tokens)
    shifted = [torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape) for tensor in (alpha, A, B)]
    ones = torch.ones((), device=A.device).expand(alpha.shape)
    found = {
        "a storage offset of one element": (call(*shifted), whole),
        "views [1:]": (call(alpha[1:], A[1:], B[1:]), tuple(factor[1:] for factor in whole)),
        "alpha expanded": (call(ones, A, B), call(ones.contiguous(), A, B)),
    }
    return [f"{what}: other bits" for what, (first, second) in found.items() if not same_bytes(first, second)]


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # theirs: without it ours is held to the chain alone
        print(f"SGLang's own kernel did not run: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr)
        return None


def durations(call: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Microseconds of eager calls in a row: between events, and of the host until the call returns."""
    for _ in range(WARM):
        call()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    host = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        host.append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize()  # so that the launch queue is never full
    return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)], host


def timing(model: Any, rule: str, frames: int, heads: int) -> dict[str, Any]:
    """Their chain, their kernel and ours in turns; each call is ``delta_factor_apply`` as their branch makes it."""
    alpha, A, B = statistics_of(model, (frames, heads, 1008), 1, seed=frames)
    calls = {
        "chain": partial(model_call, model, rule, alpha, A, B, 1008, fused=False),
        "theirs": partial(model_call, model, rule, alpha, A, B, 1008),
        "ours": partial(model_call, model, rule, alpha, A, B, 1008),
    }
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for _ in range(BLOCKS):
        for name, call in calls.items():
            (sglang.install if name == "ours" else sglang.uninstall)()
            measure = partial(durations, call)
            found = (attempt(measure) if name == "theirs" else measure()) or ((), ())
            for into, some in zip(taken[name], found, strict=True):
                into.extend(some)
    return {
        "rule": rule,
        "matrices": frames * heads,
        "microseconds": {name: summary(events) for name, (events, _) in taken.items() if events},
        "host microseconds": {name: summary(host) for name, (_, host) in taken.items() if host},
    }


def summary(samples: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(samples, n=4)
    return {"median": round(median, 2), "low": round(low, 2), "high": round(high, 2)}


@click.command()
@click.option("--sglang", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
@torch.inference_mode()
def main(folder: Path, output: Path) -> None:
    """Hold SGLang's own module, with our kernel in it, to SGLang's limits; and time it."""
    if not torch.cuda.is_available():
        raise click.ClickException("this needs a GPU; .ci/clients tries the released modules without one")
    sys.path.insert(0, str(folder))
    with hidden_gpu():
        model = importlib.import_module(sglang.MODEL)
        importlib.import_module(sglang.DOOR)
    accepted = [accept(model, rule, shape, scale) for rule in sglang.RULES for shape in SHAPES for scale in SCALES]
    timed = [timing(model, rule, *row) for rule in ("vdn_solve", "vdn_scaled") for row in ROWS]
    sglang.uninstall()
    document = {
        "schema": 1,
        "provenance": provenance(torch.device("cuda", 0)) | {"sglang": version_of("sglang")},
        "ok": not any(row["broken"] for row in accepted),
        "acceptance": accepted,
        "timing": timed,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    for row in (*accepted, *timed):
        print(json.dumps(row))
    sys.exit(0 if document["ok"] else 1)


if __name__ == "__main__":
    main()
