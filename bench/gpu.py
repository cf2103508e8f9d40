"""All that needs a GPU, in one run: ``python3 -m bench.gpu --output DIR``. Writes h200-gpu.json and h200-check.json.

Tests, checks, compute-sanitizer, cold and warm start, host time of a call, and SGLang's own kernel through our loader
where ``--sglang`` names the ``kernels/jit`` folder of its package.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from jit_kernels.bench.vdn_delta_factors import chain, gold, reference
from tvm_ffi import libinfo

from jit_kernels import load_jit, mhc_pre_h_aggregate, vdn_delta_factors
from jit_kernels.checks.compare import relative_error
from jit_kernels.checks.provenance import provenance
from jit_kernels.dispatch import OPERATORS
from jit_kernels.jit.arch import Target
from jit_kernels.jit.loader import kernel
from jit_kernels.jit.source import CSRC
from jit_kernels.ops.vdn_delta_factors import HEAD_DIMS, PRECISIONS

REPO = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# A process of its own without torch: compute-sanitizer would take minutes over torch's start.
SANITIZED = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
sys.exit(ctypes.CDLL(sys.argv[2]).sanitize())
"""
WARM = """
import time, torch, tvm_ffi
from jit_kernels.dispatch import OPERATORS
from jit_kernels.jit.arch import Target
for name, operator in OPERATORS.items():
    for build in operator.warmup:
        kernel = operator.build(Target.of(torch.device("cuda", 0)), **build)
        began = time.perf_counter()
        kernel.load()
        print(f"{name} {build}\\t{(time.perf_counter() - began) * 1e3}")
"""


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPO, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def cold_start() -> dict[str, Any]:
    """Every kernel compiled, one at a time, into an empty cache: what a first call waits for."""
    done = python("-m", "jit_kernels.cli", "warmup", "--jobs", "1", "--json")
    kernels = json.loads(done.stdout)["kernels"] if done.stdout else []
    return {"ok": done.returncode == 0, "kernels": kernels, "errors": done.stderr[-2000:]}


def warm_start() -> dict[str, Any]:
    """A cache hit in a fresh process that finds neither nvcc nor ninja."""
    done = python("-c", WARM, PATH="/nonexistent", CUDA_HOME="/nonexistent")
    lines = [line.rsplit("\t", 1) for line in done.stdout.splitlines() if "\t" in line]
    milliseconds = {label: round(float(value), 2) for label, value in lines}
    return {"ok": done.returncode == 0 and bool(lines), "milliseconds": milliseconds, "errors": done.stderr[-2000:]}


def tests() -> dict[str, Any]:
    """The tests of what runs on a GPU; those of the loader's and the command line's own are CI's."""
    files = ["mhc_pre_h_aggregate", "vdn_delta_factors", "torch_op", "dispatch", "sglang_source"]
    done = python(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--durations=8",
        *(f"tests/test_{f}.py" for f in files),
    )
    return {"ok": done.returncode == 0, "summary": done.stdout.strip().splitlines()[-1:], "output": done.stdout[-6000:]}


def check(output: Path) -> dict[str, Any]:
    target = output / "h200-check.json"
    done = python("-m", "jit_kernels.cli", "check", "--backend", "fused", "--output", str(target))
    return {"ok": done.returncode == 0, "output": (done.stdout + done.stderr)[-9000:]}


def sanitizer() -> dict[str, Any]:
    """Every kernel under every tool of compute-sanitizer: ``bench/sanitizer.cu``."""
    variants = [[], *([f"HEAD_DIM={d}", f"PRECISION={name}"] for d in HEAD_DIMS for name in PRECISIONS.values())]
    jobs = ThreadPoolExecutor(10)
    modules = list(jobs.map(_sanitized, variants))
    runs = {
        f"{' '.join(variant) or 'mhc_pre_h_aggregate'} {tool}": jobs.submit(_sanitize, module, tool)
        for variant, module in zip(variants, modules, strict=True)
        for tool in TOOLS
    }
    found = {name: run.result() for name, run in runs.items()}
    return {"ok": all(result["ok"] for result in found.values()), **found}


def _sanitized(flags: list[str]) -> Path:
    made = kernel(
        "sanitizer",
        *flags,
        cuda_files=[REPO / "bench" / "sanitizer.cu"],
        header_only=False,
        extra_include_paths=[CSRC],
        extra_cuda_cflags=[f"-D{flag}" for flag in flags],
        target=Target.here(),
    )
    return made.compile().verify()


def _sanitize(module: Path, tool: str) -> dict[str, Any]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "3"]
    command += [sys.executable, "-c", SANITIZED, str(libinfo.find_libtvm_ffi()), str(module)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
    except subprocess.TimeoutExpired:
        return {"ok": False, "output": "took more than 200 s"}
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", done.stdout)
    ok = done.returncode == 0 and bool(summary)
    return {"ok": ok, "summary": summary} | ({} if ok else {"output": done.stdout[-1500:]})


def host_time() -> dict[str, Any]:
    """Microseconds of the host for one eager call without gradients, the launch queue never full."""

    def median(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(40):
            began = time.perf_counter()
            for _ in range(50):
                call()
            times.append((time.perf_counter() - began) * 1e6 / 50)
            torch.cuda.synchronize()
        return round(statistics.median(times), 2)

    residual = torch.ones(1, 4, 4096, dtype=torch.bfloat16, device="cuda")
    pre = torch.ones(1, 4, device="cuda")
    A, alpha = torch.zeros(1, 128, 128, device="cuda"), torch.ones(1, 128, device="cuda")
    ops = torch.ops.jit_kernels
    with torch.inference_mode():
        out, (T, J) = mhc_pre_h_aggregate(residual, pre), vdn_delta_factors(A, A, alpha)
        collapse = OPERATORS["mhc_pre_h_aggregate"].launcher("forward", A.device)
        factors = OPERATORS["vdn_delta_factors"].launcher("run", A.device, 128, None)
        return {
            "ok": True,
            "mhc_pre_h_aggregate": median(lambda: mhc_pre_h_aggregate(residual, pre)),
            "mhc_pre_h_aggregate, the module's function alone": median(lambda: collapse(out, residual, pre)),
            "mhc_pre_h_aggregate through torch.ops": median(lambda: ops.mhc_pre_h_aggregate(residual, pre)),
            "vdn_delta_factors": median(lambda: vdn_delta_factors(A, A, alpha)),
            "vdn_delta_factors, the module's function alone": median(
                lambda: factors(T, J, A, A, alpha, 1.0, 1.0, None)
            ),
            "vdn_delta_factors through torch.ops": median(lambda: ops.vdn_delta_factors(A, A, alpha)),
            "torch.add": median(lambda: torch.add(A, A)),
            "torch.empty_like": median(lambda: torch.empty_like(A)),
        }


def sglang(folder: Path | None) -> dict[str, Any]:
    """SGLang's own vdn_delta_factors.cuh, unmodified, through load_jit: right, and how long beside ours."""
    if folder is None:
        return {"ok": True, "skipped": "no --sglang"}
    module = load_jit(
        "sglang_vdn_delta_factors",
        cuda_files=[folder / "csrc/diffusion/vdn_delta_factors.cuh"],
        cuda_wrappers=[("vdn_delta_factors", "sglang::vdn_delta_factors::VdnDeltaFactorsKernel::run")],
        extra_include_paths=[folder / "include"],
    )
    inputs = reference(torch.Generator("cuda").manual_seed(0), 707)
    T, J = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])

    def theirs() -> None:
        module.vdn_delta_factors(T, J, *inputs)

    theirs()
    right = gold(*(tensor.double() for tensor in inputs))
    errors = [relative_error(mine, want) for mine, want in zip((T, J), right, strict=True)]
    microseconds = {
        "sglang": graph_time(theirs),
        "torch chain, eager": event_time(partial(chain, *inputs)),
        "fallback, eager": event_time(partial(vdn_delta_factors, *inputs, backend="torch")),
    }
    for precision in ("fp64_tensor", "fp32"):
        microseconds[precision] = graph_time(partial(vdn_delta_factors, *inputs, precision=precision, out=(T, J)))
    return {"ok": max(errors) < 1e-5, "errors T J": errors, "microseconds at N=707 d=128": microseconds}


def graph_time(call: Callable[[], Any]) -> float:
    """Median microseconds of a call inside a CUDA graph of 10; 185 MB of inputs and outputs pass the L2 each time."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return round(event_time(graph.replay) / 10, 2)


def event_time(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return round(statistics.median(times[5:]), 2)


@click.command()
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=REPO / "bench" / "results")
@click.option(
    "--sglang", "sglang_folder", type=click.Path(exists=True, path_type=Path), help="SGLang's kernels/jit folder."
)
@click.option("--skip", multiple=True, help="A step to leave out.")
def main(output: Path, sglang_folder: Path | None, skip: tuple[str, ...]) -> None:
    """Run every step, print a short table, write the JSON documents."""
    output.mkdir(parents=True, exist_ok=True)
    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "cold start": cold_start,
        "warm start": warm_start,
        "host time": host_time,
        "sglang": lambda: sglang(sglang_folder),
        "check": lambda: check(output),
        "tests": tests,
        "sanitizer": sanitizer,
    }
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("JIT_KERNELS_CACHE_DIR", cache)
        results: dict[str, Any] = {}
        for name, step in steps.items():
            if name in skip:
                continue
            began = time.perf_counter()
            results[name] = step() | {"seconds": round(time.perf_counter() - began, 1)}
            print(name, json.dumps(results[name])[:3000], flush=True)
            document = {"schema": 1, "provenance": provenance(torch.device("cuda", 0)), "steps": results}
            (output / "h200-gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    print()
    for name, result in results.items():
        print(f"{name:12} {'ok' if result['ok'] else 'FAILED':8} {result['seconds']:7.1f} s")
    sys.exit(0 if all(result["ok"] for result in results.values()) else 1)


if __name__ == "__main__":
    main()
