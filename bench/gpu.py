"""All that needs a GPU but no peers: ``python3 -m bench.gpu --output DIR`` writes h200-gpu.json and h200-check.json.

Cold and warm start, the checks, the tests, compute-sanitizer. SGLANG_KERNELS_JIT names the ``kernels/jit`` folder of
SGLang's package, for the test that runs its own kernel through our loader.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from jit_kernels.bench.details import first_calls
from tvm_ffi import libinfo

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


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPO, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def cold_start() -> dict[str, Any]:
    """Every kernel compiled, one at a time, into an empty cache: what a first call waits for."""
    done = python("-m", "jit_kernels.cli", "warmup", "--jobs", "1", "--json", JIT_KERNELS_PREBUILT_DIR="")
    kernels = json.loads(done.stdout)["kernels"] if done.stdout else []
    return {"ok": done.returncode == 0, "kernels": kernels, "errors": done.stderr[-2000:]}


def warm_start() -> dict[str, Any]:
    """A cache hit in a fresh process that finds neither nvcc nor ninja."""
    calls = first_calls(list(OPERATORS.values()), Target.here())
    loads = {f"{call.operator} {call.build}": call.warm_milliseconds for call in calls if call.warm_milliseconds}
    milliseconds = {label: round(value, 2) for label, value in loads.items()}
    return {"ok": len(loads) == len(calls), "milliseconds": milliseconds, "errors": calls[0].reason}


def run_tests(*names: str, select: str = "") -> dict[str, Any]:
    """Those of what runs on a GPU; those of the loader's and the command line's own are CI's."""
    chosen = ["-m", select] if select else []
    files = [f"tests/test_{name}.py" for name in names]
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--durations=8", *chosen, *files)
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


@click.command()
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=REPO / "bench" / "results")
@click.option("--skip", multiple=True, help="A step to leave out.")
def main(output: Path, skip: tuple[str, ...]) -> None:
    """Run every step, print a short table, write the JSON documents."""
    output.mkdir(parents=True, exist_ok=True)
    # One after the other where times are taken; then side by side.
    alone: dict[str, Callable[[], dict[str, Any]]] = {
        "cold start": cold_start,
        "warm start": warm_start,
        "check": lambda: check(output),
        "tests of the benchmark": partial(run_tests, "bench", "bench_timing", select="gpu"),
    }
    together: dict[str, Callable[[], dict[str, Any]]] = {
        "tests of the operators": partial(
            run_tests,
            "mhc_pre_h_aggregate",
            "vdn_delta_factors",
            "vdn_small_dim",
            "torch_op",
            "dispatch",
            "refusals",
            "shortcut",
            "host_entry",
            "sglang_source",
        ),
        "tests of the drop-ins": partial(
            run_tests, "checks", "bench_peers", "integration_transformers", "integration_rl_kernel"
        ),
        "sanitizer": sanitizer,
    }
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("JIT_KERNELS_CACHE_DIR", cache)
        results: dict[str, Any] = {}
        writing = threading.Lock()

        def run(step: tuple[str, Callable[[], dict[str, Any]]]) -> None:
            name, call = step
            if name in skip:
                return
            began = time.perf_counter()
            found = call() | {"seconds": round(time.perf_counter() - began, 1)}
            with writing:
                results[name] = found
                print(name, json.dumps(found)[:1500], flush=True)
                document = {"schema": 1, "provenance": provenance(torch.device("cuda", 0)), "steps": results}
                (output / "h200-gpu.json").write_text(json.dumps(document, indent=1) + "\n")

        for step in alone.items():
            run(step)
        with ThreadPoolExecutor(len(together)) as pool:
            list(pool.map(run, together.items()))
    print()
    for name, result in results.items():
        print(f"{name:30} {'ok' if result['ok'] else 'FAILED':8} {result['seconds']:7.1f} s")
    sys.exit(0 if all(result["ok"] for result in results.values()) else 1)


if __name__ == "__main__":
    main()
