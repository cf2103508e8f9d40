"""What a call costs once its kernel is built: a hit's own work beside dlopen, and no file at all when it is loaded."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import jit_kernels
from jit_kernels.jit.arch import Target
from jit_kernels.jit.loader import kernel

pytestmark = pytest.mark.compiler

HOPPER = Target.parse("sm_90a")

# A hit in a fresh process. What dlopen and the library's own start-up take is none of the cache's work.
HIT = """
import json, time
import tvm_ffi
from jit_kernels.jit import cache
from jit_kernels.jit.arch import Target
from test_hot_path import {maker}

wanted = {maker}({path!r})
load_module, spent = tvm_ffi.load_module, []
def timed(*args, **options):
    begin = time.perf_counter()
    try:
        return load_module(*args, **options)
    finally:
        spent.append(time.perf_counter() - begin)
tvm_ffi.load_module = timed
begin = time.perf_counter()
cache.load(wanted.source, wanted.target)
whole = time.perf_counter() - begin
print(json.dumps(dict(own=1e3 * (whole - sum(spent)), dlopen=1e3 * sum(spent), loads=len(spent))))
"""


def toy(path: str):
    return kernel("hot", cpp_files=[path], header_only=False, target=HOPPER)


def operator(name: str):
    """The first usual build of a public operator."""
    made = jit_kernels.dispatch.OPERATORS[name]
    return made.build(HOPPER, **made.warmup[0])


def python_path() -> str:
    return f"{Path(__file__).parent}:{Path(jit_kernels.__file__).parent.parent}"


def own_milliseconds(run_python, maker: str, path: str) -> float:
    reports = [
        json.loads(run_python(HIT.format(maker=maker, path=path), env={"PYTHONPATH": python_path()})) for _ in range(5)
    ]
    assert [report["loads"] for report in reports] == [1] * 5
    own, dlopen = ([report[part] for report in reports] for part in ("own", "dlopen"))
    print(
        f"\na hit of {path.rpartition('/')[2]}: {min(own):.2f} ms of its own (median {statistics.median(own):.2f}), "
        f"{statistics.median(dlopen):.2f} ms in dlopen"
    )
    return min(own)  # a busy machine only adds to the time


def test_a_hits_own_work_is_at_most_5_ms(isolated_cache, tmp_path, answer_source, run_python):
    path = str(answer_source(tmp_path))
    toy(path).compile()
    assert own_milliseconds(run_python, "toy", path) <= 5


@pytest.mark.parametrize("name", jit_kernels.dispatch.OPERATORS)
def test_so_is_that_of_a_real_kernel(shared_cache, run_python, name):
    """Whose sources and headers are read for the key, and whose library of a megabyte is hashed."""
    operator(name).compile()
    assert own_milliseconds(run_python, "operator", name) <= 5


CALLS = 1000
# An operator whose kernel is host code: its call goes through the dispatcher as a GPU's would.
HOT = """
import os, sys
import torch
import jit_kernels
from jit_kernels.jit.arch import Target
from jit_kernels.jit.loader import kernel

Target.of = classmethod(lambda cls, device: Target.parse("sm_90a"))  # there may be no GPU to ask
torch.cuda.is_current_stream_capturing = lambda: False
def fused(x):
    out = torch.empty_like(x)
    OPERATOR.launcher("answer", x.device)()
    return out
OPERATOR = jit_kernels.Operator(
    name="hot_toy",
    schema="(Tensor x) -> Tensor",
    validate=lambda x: None,
    supports=lambda x: jit_kernels.Support(True, "a toy"),
    outputs=lambda x: x.new_empty(x.shape),
    build=lambda target: kernel("hot", cpp_files=[{path!r}], header_only=False, target=target),
    fused=fused,
    fallback=lambda x: x,
)
x = torch.ones(4)
for backend in ("auto", "fused"):
    OPERATOR(x, backend=backend)
    os.access("/hot-path-begins", os.F_OK)
    for _ in range({calls}):
        OPERATOR(x, backend=backend)
    os.access("/hot-path-ends", os.F_OK)
"""


def test_the_hot_call_touches_no_file(isolated_cache, tmp_path, answer_source):
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed (apt-get install strace)")
    path = str(answer_source(tmp_path))
    toy(path).compile()
    log = tmp_path / "strace"
    done = subprocess.run(
        [strace, "-f", "-o", log, sys.executable, "-c", HOT.format(path=path, calls=CALLS)],
        capture_output=True,
        text=True,
    )
    if "ptrace" in done.stderr and not (log.exists() and "hot-path-begins" in log.read_text()):
        pytest.skip(f"strace may not trace here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr
    text = log.read_text()
    assert "hot.so" in text, "the trace shows the load, so it would show a file that a call touches"
    parts = re.findall(r"/hot-path-begins.*\n((?:.*\n)*?).*/hot-path-ends", text)
    assert len(parts) == 2
    calls = [re.sub(r"^\d+ +", "", line) for part in parts for line in part.splitlines()]
    print(f"\n{len(calls)} system calls in {2 * CALLS} hot calls: {sorted({c.partition('(')[0] for c in calls})}")
    # Whatever names a path or opens, reads, locks a file; memory and threads may come and go.
    files = [
        call
        for call in calls
        if re.match(r"\w*(open|stat|access|readlink|getcwd|chdir|read|write|flock|fcntl|ioctl|dup|rename|unlink)", call)
    ]
    assert files == []
