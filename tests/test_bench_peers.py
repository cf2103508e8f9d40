"""The benchmark's peers that other packages bring: how they are absent, and what of them runs without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jit_kernels.bench import suite
from jit_kernels.bench.gate import exactly, judge
from jit_kernels.bench.peers import mhc_pre_h_aggregate as collapse_peers
from jit_kernels.bench.peers import mhc_pre_h_aggregate_tile_kernels as tile_kernels
from jit_kernels.bench.peers import vdn_delta_factors as vdn_peers
from jit_kernels.bench.peers import vdn_delta_factors_cusolverdx as cusolverdx
from jit_kernels.bench.vdn_delta_factors import gold, reference

from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import CompileError, LinkError, ToolchainError

CPU = suite.Setting(torch.device("cpu"))
HOPPER = Target(9, 0, "a")
LARGEST_BLOCK = 227 * 1024  # bytes of shared memory that one block may have on an H200
RESERVED = 1024  # of them for the status word that POTRF writes, rounded up


def why_absent(have, setting=CPU) -> str:
    with pytest.raises(suite.AbsentError) as caught:
        have(setting)
    return str(caught.value)


def test_a_candidate_names_the_versions_of_what_is_installed():
    def versions(*packages):
        return suite.Entrant("one", "a candidate", "pip", suite.function(len), (1.0,), packages=packages).versions()

    assert versions("pytest", "no-such-package") == {"pytest": pytest.__version__}
    assert versions() == {}
    for found in (*collapse_peers.SUITES, *vdn_peers.SUITES):
        for entrant in found.entrants:
            named = [word.partition("==")[0] for word in entrant.how.split(",")[0].split()[2:]]
            assert not entrant.how.startswith("pip install") or set(named) <= set(entrant.packages)


# TileKernels


def tile_kernels_folder(tmp_path, monkeypatch, text: str) -> None:
    folder = tmp_path / "tile_kernels" / "modeling" / "mhc"
    folder.mkdir(parents=True)
    (folder / "ops.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("tile_kernels")]:
        monkeypatch.delitem(sys.modules, name)
    tile_kernels._lack.cache_clear()


GPU = suite.Setting(torch.device("cuda"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os, sys\nprint('they do not fit', file=sys.stderr, flush=True)\nos.abort()", "they do not fit"),
        ("import os\nos.abort()", "its process ended with -6"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_tile_kernels_that_break_are_absent_and_tried_once(tmp_path, monkeypatch, text, reason):
    tile_kernels_folder(tmp_path, monkeypatch, text)
    assert why_absent(collapse_peers.tile_kernels_forward, GPU) == reason
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("it was tried again"))
    assert why_absent(collapse_peers.tile_kernels_backward, GPU) == reason


def test_tile_kernels_are_called_as_they_want_it(tmp_path, monkeypatch, generator):
    text = "    assert mix.shape == (*x.shape[:-1], 1)\n    return (x.float() * mix).sum(-2).to(x.dtype)\n"
    tile_kernels_folder(tmp_path, monkeypatch, "def mhc_pre_apply_mix(x, mix):\n" + text)
    monkeypatch.setattr(
        tile_kernels, "TRY", tile_kernels.TRY.replace('"cuda"', '"cpu"').replace("torch.cuda.synchronize()", "")
    )
    monkeypatch.setattr(collapse_peers, "TRIED", collapse_peers.TRIED[:1])  # the others would take the same way
    inputs = collapse_peers.inputs_backward(64, generator, 3)
    directions = (collapse_peers.tile_kernels_forward, inputs[1:]), (collapse_peers.tile_kernels_backward, inputs)
    for found, (have, args) in zip(collapse_peers.SUITES, directions, strict=True):
        (entrant,) = (one for one in found.entrants if one.name == "TileKernels")
        assert entrant.have is have
        outputs = have(GPU)(*args)()
        assert judge(outputs, exactly(found.gold, args), found.outputs, entrant.bounds).failure == ""


def test_tile_kernels_are_tried_ahead_for_every_hidden_size():
    ahead = collapse_peers.SUITES[0].builds(GPU, HOPPER)
    sizes = {case.parameters["hidden_size"] for case in collapse_peers.SUITES[0].cases}
    assert {one.hidden_size for one in ahead if isinstance(one, tile_kernels.Tried)} == sizes


def test_no_time_is_spent_on_tile_kernels_without_a_gpu(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("a process was started"))
    for have in (collapse_peers.tile_kernels_forward, collapse_peers.tile_kernels_backward):
        assert "this run is on cpu" in why_absent(have)


# cuSOLVERDx


def test_cusolverdx_without_its_library_is_absent_with_the_cure(monkeypatch):
    monkeypatch.setattr(cusolverdx, "library", cusolverdx.library.__wrapped__)
    monkeypatch.setattr(cusolverdx.importlib.util, "find_spec", lambda name: None)
    reason = why_absent(vdn_peers.cusolverdx)
    assert "for CUDA 13 is not installed" in reason
    assert "pip install nvidia-libmathdx-cu13" in reason
    assert not any(isinstance(one, cusolverdx.Linked) for one in vdn_peers.builds(CPU, HOPPER))


def test_with_its_library_it_is_built_ahead_and_waits_for_a_gpu(monkeypatch):
    monkeypatch.setattr(vdn_peers, "libmathdx", lambda: None)
    assert "this run is on cpu" in why_absent(vdn_peers.cusolverdx)
    ahead = vdn_peers.builds(CPU, HOPPER)
    assert {one.plan for one in ahead if isinstance(one, cusolverdx.Linked)} == set(cusolverdx.PLANS.values())
    assert cusolverdx.build_host(HOPPER) in ahead


def test_a_library_is_found_in_any_of_the_vendors_folders(tmp_path, monkeypatch):
    place = tmp_path / "cu13" / "lib" / "libsome.so.1"
    place.parent.mkdir(parents=True)
    place.touch()
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "elsewhere"), str(tmp_path)]})
    monkeypatch.setattr(cusolverdx.importlib.util, "find_spec", lambda name: spec if name == "nvidia" else None)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: path)
    assert cusolverdx.library.__wrapped__("libsome.so.*") == str(place)
    with pytest.raises(ToolchainError, match="libother for CUDA 13 is not installed"):
        cusolverdx.library.__wrapped__("libother.so.*")


def test_each_plan_fits_into_a_block_and_keeps_the_alignment_it_promises():
    for dim, plan in cusolverdx.PLANS.items():
        assert plan.dim == dim
        assert plan.lead >= dim
        assert 4 * plan.lead % cusolverdx.ALIGNMENT == 0
        assert plan.shared_bytes + RESERVED <= LARGEST_BLOCK
    assert set(cusolverdx.PLANS) == {case.parameters["head_dim"] for case in vdn_peers.SUITES[0].cases}


@pytest.mark.parametrize("sized", [True, False])
def test_what_a_c_function_writes_is_fetched_whole(sized):
    def ask(handle, size):
        size._obj.value = handle
        return 0

    def read(handle, *rest):
        *told, into = rest
        assert [size.value for size in told] == [4] * sized
        into.raw = b"\0ab\0"[:handle]
        return 0

    assert cusolverdx.fetched(SimpleNamespace(readSize=ask, read=read), "read", 4, sized=sized) == b"\0ab\0"


def test_a_status_that_is_not_zero_names_the_function():
    def refuses(code):
        return code

    cusolverdx.check(refuses, 0)
    with pytest.raises(LinkError, match="refuses failed with status 3"):
        cusolverdx.check(refuses, 3)


class Refusing:
    """A compiler or linker whose functions succeed, all but the one that does the work."""

    log = b"line 7: no"

    def __init__(self, verb: str) -> None:
        self._verb = verb

    def __getattr__(self, name):
        def function(*args):
            if name.endswith("LogSize"):
                args[1]._obj.value = len(self.log)
            elif name.endswith("Log"):
                args[1].raw = self.log
            return int(name.endswith(self._verb))

        return function


def test_what_the_compiler_and_the_linker_say_is_told(monkeypatch):
    plan = cusolverdx.PLANS[128]
    monkeypatch.setattr(cusolverdx, "library", lambda *args, **kwargs: Refusing("CompileProgram"))
    with pytest.raises(CompileError, match=r"refused vdn_delta_factors_cusolverdx\.cu: line 7: no"):
        cusolverdx.compiled(plan, HOPPER)
    monkeypatch.setattr(cusolverdx, "library", lambda *args, **kwargs: Refusing("Complete"))
    with pytest.raises(LinkError, match="could not link the cuSOLVERDx peer: line 7: no"):
        cusolverdx.link([(cusolverdx.LTO_IR, b"x")], HOPPER)


# The kernel as plain C++ of one thread a block, with a textbook's Cholesky, substitution and products in the place of
# the vendor's. Its shared memory is as large as the plan says, and POTRF leaves NaN above the diagonal.
_HOST = """\
#include <cmath>
#define __device__
#define __global__
#define __shared__
#define __restrict__
#define __align__(bytes)
#define __launch_bounds__(threads)
static void __syncthreads() {}
static struct { int x; } threadIdx, blockIdx;
constexpr int kDim = %d, kThreads = 1, kLead = %d;
extern "C" { float shared[%d / sizeof(float)]; }
#include "%s"
extern "C" void factor(float* m, int* info) {
  for (int j = 0; j < kDim; ++j) {
    for (int i = 0; i < j; ++i) m[j * kLead + i] = NAN;
    for (int i = j; i < kDim; ++i) {
      double sum = m[j * kLead + i];
      for (int k = 0; k < j; ++k) sum -= double(m[k * kLead + i]) * m[k * kLead + j];
      m[j * kLead + i] = i == j ? std::sqrt(sum) : sum / m[j * kLead + j];
    }
  }
  *info = 0;
}
extern "C" void solve(const float* l, float* columns) {
  for (float* x = columns; x < columns + kDim * kLead; x += kLead)
    for (int i = 0; i < kDim; ++i) {
      double sum = x[i];
      for (int k = 0; k < i; ++k) sum -= double(l[k * kLead + i]) * x[k];
      x[i] = sum / l[i * kLead + i];
    }
}
// c = alpha a b + beta c; b's elements are `down` apart in a column and `across` in a row.
static void product(float alpha, const float* a, const float* b, int down, int across, float beta, float* c) {
  for (int i = 0; i < kDim; ++i)
    for (int j = 0; j < kDim; ++j) {
      double sum = 0;
      for (int k = 0; k < kDim; ++k) sum += double(a[i * kLead + k]) * b[k * down + j * across];
      float& to = c[i * kLead + j];
      to = alpha * sum + (beta == 0 ? 0 : beta * to);
    }
}
extern "C" void square(float* alpha, float* a, float* b, float* beta, float* c) {
  product(*alpha, a, b, 1, kLead, *beta, c);
}
extern "C" void multiply(float* alpha, float* a, float* b, float* beta, float* c) {
  product(*alpha, a, b, kLead, 1, *beta, c);
}
extern "C" void run(int count, float* T, float* J, const float* A, const float* B, const float* alpha) {
  for (blockIdx.x = 0; blockIdx.x < count; ++blockIdx.x) delta_factors(T, J, A, B, alpha);
}
"""


@pytest.mark.compiler
@pytest.mark.parametrize("plan", cusolverdx.PLANS.values(), ids=str)
def test_the_kernel_around_the_vendors_functions_computes_the_factors(tmp_path, generator, plan):
    kernel = Path(cusolverdx.__file__).with_suffix(".cu")
    (tmp_path / "host.cpp").write_text(_HOST % (plan.dim, plan.lead, plan.shared_bytes, kernel))
    library = tmp_path / "host.so"
    command = ["c++", "-std=c++17", "-O2", "-shared", "-fPIC", "-Wno-unknown-pragmas", str(tmp_path / "host.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    inputs = reference(generator, 3, plan.dim)
    T, J = torch.full_like(inputs[0], torch.nan), torch.full_like(inputs[0], torch.nan)
    ctypes.CDLL(str(library)).run(3, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (T, J, *inputs)))
    assert judge((T, J), exactly(gold, inputs), ("T", "J"), (1e-6, 1e-6)).failure == ""


@pytest.mark.compiler
def test_the_host_entry_compiles_and_checks_its_arguments(target):
    wrong = torch.zeros(3, 4, 8)
    with pytest.raises(ValueError, match=r"A: expected a CUDA tensor, got float32\[3, 4, 8\]"):
        cusolverdx.build_host(target).load().forward(0, 128, 256, 0, *[wrong] * 5)


@pytest.mark.gpu
@pytest.mark.compiler
def test_cusolverdx_computes_the_factors(cuda):
    generator = torch.Generator(cuda).manual_seed(1)
    try:
        prepare = vdn_peers.cusolverdx(suite.Setting(cuda))
    except suite.AbsentError as absent:
        pytest.skip(str(absent))
    for dim in cusolverdx.PLANS:
        inputs = reference(generator, 5, dim)
        assert judge(prepare(*inputs)(), exactly(gold, inputs), ("T", "J"), vdn_peers.THEIRS).failure == ""
