"""The search for a CUDA toolkit that can really build."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from jit_kernels.jit import toolchain
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import ToolchainError
from jit_kernels.jit.loader import load_jit
from jit_kernels.jit.toolchain import Probe, Refusal, Toolchain

HOPPER = Target.parse("sm_90a")
BLACKWELL = Target.parse("sm_100a")

NVCC = """\
#!/bin/sh
echo ran >> '{log}'
case " $* " in
  *" --dryrun "*) echo '#$ _SPACE_= '; echo '#$ _HERE_={here}' ;;
  *) echo 'nvcc: NVIDIA (R) Cuda compiler driver'
     echo 'Cuda compilation tools, release {release}, V{release}.88' ;;
esac
"""
TOOLKIT = (
    "bin/ptxas",
    "nvvm/bin/cicc",
    "include/cuda_runtime.h",
    "include/crt/host_config.h",
    "include/nv/target",
    "lib64/libcudart_static.a",
)


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_toolkit(root: Path, release: str = "13.0", files: tuple[str, ...] = TOOLKIT) -> Path:
    """A folder that looks like a toolkit; its nvcc logs each run in ``ran`` and answers questions only."""
    write_program(root / "bin/nvcc", NVCC.format(log=root / "ran", here=root / "bin", release=release))
    for name in files:
        write_program(root / name, "#!/bin/sh\n")
    return root


def runs(root: Path) -> int:
    log = root / "ran"
    return len(log.read_text().split()) if log.exists() else 0


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine with a host compiler and nothing of CUDA. Returns its folder of programs, the only one on PATH."""
    programs = tmp_path / "programs"
    write_program(programs / "host-c++", "#!/bin/sh\necho 'g++ (fake) 14.2'\n")
    for tool in ("sh", "cat"):
        (programs / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("CXX", "host-c++")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    found = toolchain.candidates

    def without_this_machine(probe):
        for origin, root in found(probe):
            if root.is_relative_to(tmp_path):
                yield origin, root
            elif origin == "the usual place":
                yield origin, tmp_path / "usual"

    monkeypatch.setattr(toolchain, "candidates", without_this_machine)
    return programs


def test_cuda_home_comes_first_then_cuda_path_then_path_then_the_usual_place(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "home")))
    monkeypatch.setenv("CUDA_PATH", str(write_toolkit(tmp_path / "path")))
    write_toolkit(tmp_path / "onpath")
    (bare / "nvcc").symlink_to(tmp_path / "onpath/bin/nvcc")
    write_toolkit(tmp_path / "usual")
    found = toolchain.survey(HOPPER, Probe())
    assert [each.root.name for each in found] == ["home", "path", "onpath", "usual"]
    assert toolchain.find(HOPPER, Probe()).root == tmp_path / "home"


def test_a_wrapper_on_path_is_resolved_to_its_toolkit(bare, tmp_path):
    root = write_toolkit(tmp_path / "far/away/cuda")
    write_program(bare / "nvcc", f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n')
    found = toolchain.find(HOPPER, Probe())
    assert (found.root, found.nvcc, found.library_dir) == (root, root / "bin/nvcc", root / "lib64")


@pytest.mark.compiler
def test_a_wrapper_of_the_real_nvcc_is_resolved_to_its_toolkit(tmp_path, monkeypatch):
    real = toolchain.find(None, Probe())
    write_program(tmp_path / "nvcc", f'#!/bin/sh\nexec {real.nvcc} "$@"\n')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    found = toolchain.find(HOPPER, Probe())
    assert found.origin == "nvcc on PATH"
    assert found.root.resolve() == real.root.resolve()


@pytest.mark.parametrize("missing", ["bin/nvcc", *TOOLKIT])
def test_a_refusal_names_the_missing_file_and_the_next_candidate_is_taken(bare, tmp_path, monkeypatch, missing):
    broken = write_toolkit(tmp_path / "broken")
    (broken / missing).unlink()
    monkeypatch.setenv("CUDA_HOME", str(broken))
    monkeypatch.setenv("CUDA_PATH", str(write_toolkit(tmp_path / "good")))
    refusal, taken, *_ = toolchain.survey(HOPPER, Probe())
    assert isinstance(refusal, Refusal)
    assert missing in refusal.reason
    assert "CUDA_HOME" in str(refusal)
    assert str(broken) in str(refusal)
    assert taken == toolchain.find(HOPPER, Probe())


def test_a_cuda_home_that_does_not_exist_is_named(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(ToolchainError, match=r"CUDA_HOME \(\S*/nowhere\): there is no such folder"):
        toolchain.find(HOPPER, Probe())


@pytest.mark.parametrize(
    ("replaced", "by"),
    [
        ("lib64/libcudart_static.a", "lib/libcudart_static.a"),
        ("lib64/libcudart_static.a", "targets/sbsa-linux/lib/libcudart_static.a"),
        ("include/nv/target", "include/cccl/nv/target"),
        ("include/cuda_runtime.h", "targets/sbsa-linux/include/cuda_runtime.h"),
    ],
)
def test_other_layouts_of_a_toolkit_are_known(bare, tmp_path, monkeypatch, replaced, by):
    root = write_toolkit(tmp_path / "cuda", files=(*(name for name in TOOLKIT if name != replaced), by))
    monkeypatch.setenv("CUDA_HOME", str(root))
    found = toolchain.find(HOPPER, Probe())
    assert (found.library_dir / "libcudart_static.a").is_file()


def test_the_nvcc_wheels_in_site_packages_are_found(bare, tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    wheel = (*TOOLKIT[:-1], "lib/libcudart_static.a")
    old = write_toolkit(site / "nvidia/cu12", release="12.8", files=wheel)
    new = write_toolkit(site / "nvidia/cu13", files=wheel)
    monkeypatch.syspath_prepend(str(site))
    assert toolchain.find(HOPPER, Probe()).root == new
    (new / "bin/ptxas").unlink()
    found = toolchain.find(HOPPER, Probe())
    assert (found.root, found.library_dir) == (old, old / "lib")
    assert "nvidia-cuda-nvcc" in found.origin


def installed_wheels() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    places = (spec.submodule_search_locations or ()) if spec else ()
    return [path for place in places for path in Path(place).glob("cu1*/bin/nvcc")]


@pytest.mark.compiler
@pytest.mark.skipif(not installed_wheels(), reason="the nvidia-cuda-nvcc wheels (extra 'nvcc') aren't installed")
def test_the_nvcc_wheels_build_a_module(isolated_cache, tmp_path, monkeypatch, answer_source):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with_nvcc = [folder for folder in os.environ["PATH"].split(os.pathsep) if (Path(folder) / "nvcc").exists()]
    kept = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder not in with_nvcc]
    monkeypatch.setenv("PATH", os.pathsep.join(kept))
    monkeypatch.setenv("CXX", shutil.which(os.environ.get("CXX", "c++"), path=os.pathsep.join(kept + with_nvcc)))
    source = answer_source(tmp_path, 13, "wheels.cu", head="__global__ void nothing() {}\n")
    assert "nvidia-cuda-nvcc" in toolchain.find(HOPPER, Probe()).origin
    assert load_jit("wheels", cuda_files=[source], header_only=False, target=HOPPER).answer() == 13


@pytest.mark.parametrize(
    ("release", "target", "knows"),
    [
        ("11.8", HOPPER, False),
        ("12.0", HOPPER, True),
        ("12.7", BLACKWELL, False),
        ("12.8", BLACKWELL, True),
        ("9.2", HOPPER, False),  # not compared as text
        ("12.10", Target.parse("sm_121a"), True),
    ],
)
def test_an_nvcc_too_old_for_the_target_is_refused(bare, tmp_path, monkeypatch, release, target, knows):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "cuda", release=release)))
    verdict = toolchain.survey(target, Probe())[0]
    if knows:
        assert isinstance(verdict, Toolchain)
    else:
        assert release in verdict.reason
        assert str(target) in verdict.reason
        assert ".".join(map(str, target.first_nvcc)) in verdict.reason


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/bin/sh\nexit 3\n", "exit status 3"),
        ("#!/nowhere/sh\n", "No such file"),
        ("#!/bin/sh\necho hello\n", "hello"),
    ],
)
def test_an_nvcc_that_does_not_answer_is_refused(bare, tmp_path, monkeypatch, script, reason):
    root = write_toolkit(tmp_path / "cuda")
    write_program(root / "bin/nvcc", script)
    monkeypatch.setenv("CUDA_HOME", str(root))
    with pytest.raises(ToolchainError, match=reason):
        toolchain.find(HOPPER, Probe())


def test_without_any_compiler_one_error_lists_each_candidate_and_the_cure(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CUDA_PATH", str(write_toolkit(tmp_path / "old", release="11.0")))
    program = write_program(tmp_path / "lonely/bin/nvcc", "#!/bin/sh\nexit 1\n")
    (bare / "nvcc").symlink_to(program)
    with pytest.raises(ToolchainError) as raised:
        toolchain.find(HOPPER, Probe())
    text = str(raised.value)
    for candidate in ("CUDA_HOME", "CUDA_PATH", "nvcc on PATH", "usual"):
        assert candidate in text
    assert "jit-kernels[nvcc]" in text
    assert "JIT_KERNELS_PREBUILT_DIR" in text


def test_a_missing_host_compiler_is_named(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "cuda")))
    monkeypatch.setenv("CXX", "no-such-c++")
    with pytest.raises(ToolchainError, match=r"host compiler .*was not found.*no-such-c\+\+"):
        toolchain.find(HOPPER, Probe())


def test_cxx_may_be_relative(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "cuda")))
    monkeypatch.chdir(bare)
    monkeypatch.setenv("CXX", "./host-c++")
    found = toolchain.find(HOPPER, Probe())
    assert found.host.is_absolute()  # the build runs in another folder
    assert found.host.samefile(bare / "host-c++")


def test_the_identity_names_both_compilers(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "cuda", release="13.0")))
    first = toolchain.find(HOPPER, Probe()).identity
    assert "13.0.88" in first
    assert "14.2" in first
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "other", release="13.1")))
    assert toolchain.find(HOPPER, Probe()).identity != first


def test_ninja_is_found_without_path(monkeypatch):
    pytest.importorskip("ninja")
    monkeypatch.setenv("PATH", "")
    done = subprocess.run([toolchain.ninja(), "--version"], capture_output=True, check=True)
    assert done.stdout


def test_ninja_on_path_serves_where_the_package_is_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="pip install ninja"):
        toolchain.ninja()
    write_program(tmp_path / "ninja", "#!/bin/sh\n")
    assert toolchain.ninja() == tmp_path / "ninja"


def test_a_warm_start_runs_no_program(bare, tmp_path, monkeypatch):
    root = write_toolkit(tmp_path / "cuda")
    write_program(bare / "nvcc", f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n')
    memo = tmp_path / "memo.json"
    first = toolchain.find(HOPPER, Probe(memo))

    def run(*arguments, **options):
        raise AssertionError(f"ran {arguments}")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(subprocess, "Popen", run)
    assert toolchain.find(HOPPER, Probe(memo)) == first


def test_a_changed_nvcc_is_noticed_in_spite_of_the_memo(bare, tmp_path, monkeypatch):
    root = write_toolkit(tmp_path / "cuda", release="13.0")
    monkeypatch.setenv("CUDA_HOME", str(root))
    memo = tmp_path / "memo.json"
    assert toolchain.find(HOPPER, Probe(memo)).version == (13, 0)
    asked = runs(root)
    write_toolkit(root, release="13.1")  # as long as before
    assert toolchain.find(HOPPER, Probe(memo)).version == (13, 1)
    assert runs(root) > asked


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"a": 1}', "\x00\xff"])
def test_a_broken_memo_is_forgotten(bare, tmp_path, monkeypatch, text):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "cuda")))
    memo = tmp_path / "memo.json"
    memo.write_text(text, encoding="latin-1")
    assert toolchain.find(HOPPER, Probe(memo)).version == (13, 0)
    assert json.loads(memo.read_text())


def test_answers_of_a_broken_memo_are_asked_again(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "cuda")))
    memo = tmp_path / "memo.json"
    toolchain.find(HOPPER, Probe(memo))
    memo.write_text(json.dumps(dict.fromkeys(json.loads(memo.read_text()), 7)))
    assert toolchain.find(HOPPER, Probe(memo)).version == (13, 0)


def test_a_memo_that_cannot_be_kept_costs_nothing_but_time(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "cuda")))
    assert toolchain.find(HOPPER, Probe(tmp_path / "no/such/folder/memo.json")).version == (13, 0)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("sm_90a", "sm_90a"),
        ("sm_90", "sm_90a"),
        ("90", "sm_90a"),
        ("9.0", "sm_90a"),
        ("9.0a", "sm_90a"),
        (" SM_100A ", "sm_100a"),
        ("10.0", "sm_100a"),
        ("100f", "sm_100f"),
        ("12.0", "sm_120a"),
        ("sm_80", "sm_80"),
    ],
)
def test_an_arch_target_is_read_as_people_write_it(text, name):
    target = Target.parse(text)
    assert str(target) == name
    assert target.flags == [f"-gencode=arch=compute_{name[3:]},code={name}"]


@pytest.mark.parametrize("text", ["", "hopper", "sm_", "sm_9", "90b", "sm_90a,sm_100a", "compute_90a"])
def test_what_is_no_arch_target_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="no arch target: expected a name such as sm_90a"):
        Target.parse(text)


def test_the_target_is_that_of_the_tensors_own_device(monkeypatch):
    """Not of the first one that a tool lists, nor of the current one."""
    capabilities = {0: (10, 0), 1: (9, 0), 2: (8, 6)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[torch.device(device).index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert [str(Target.of(torch.device("cuda", index))) for index in range(3)] == ["sm_100a", "sm_90a", "sm_86"]


@pytest.mark.gpu
def test_the_target_of_a_real_device(target):
    assert target.major >= 9
    assert target.suffix == "a"
