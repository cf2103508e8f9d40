"""``jit-kernels doctor`` on machines that lack something: what will happen when an op is called, and what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import standins
import torch
from cli import run

import jit_kernels
from jit_kernels.dispatch import OPERATORS
from jit_kernels.integrations import sglang
from jit_kernels.integrations import vllm as vllm_plugin
from jit_kernels.jit import toolchain

TOOLKIT = (
    "bin/ptxas",
    "nvvm/bin/cicc",
    "include/cuda_runtime.h",
    "include/crt/host_config.h",
    "include/nv/target",
    "lib/libcudart_static.a",  # as in the wheels
)


def examine(code: int = 0) -> list[dict[str, str]]:
    """The findings, after a look at the form of both outputs."""
    document = json.loads(run("doctor", "--json", code=code).stdout)
    assert set(document) == {"schema", "findings"}
    assert document["schema"] == 1
    for finding in document["findings"]:
        assert set(finding) == {"what", "state", "found", "cure"}
        assert finding["found"]
        assert finding["state"] == "ok" or finding["cure"] or "there is no GPU" in finding["found"], finding
    assert code == any(finding["state"] == "problem" for finding in document["findings"])
    said = "".join(run("doctor", code=code).stdout.split())
    for finding in document["findings"]:
        assert "".join(finding["what"].split()) in said
    return document["findings"]


def of(findings: list[dict[str, str]], what: str) -> dict[str, str]:
    (found,) = (finding for finding in findings if finding["what"] == what)
    return found


def calls(findings: list[dict[str, str]], name: str) -> list[dict[str, str]]:
    """What is said of calls of an operator."""
    found = [finding for finding in findings if finding["what"].split()[0] == name]
    assert found, f"doctor does not say what a call of {name} does"
    return found


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_toolkit(root: Path, release: str = "13.0") -> Path:
    """A folder that looks like a toolkit, whose nvcc answers questions only."""
    write_program(
        root / "bin/nvcc",
        f"""#!/bin/sh
case " $* " in
  *" --dryrun "*) echo '#$ _HERE_={root}/bin' ;;
  *) echo 'Cuda compilation tools, release {release}, V{release}.88' ;;
esac
""",
    )
    for name in TOOLKIT:
        write_program(root / name, "#!/bin/sh\n")
    return root


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch, isolated_cache):
    """A machine with a host compiler and nothing of CUDA, no GPU, an empty cache. Gives its only folder on PATH."""
    programs = tmp_path / "programs"
    write_program(programs / "c++", "#!/bin/sh\necho 'g++ (fake) 14.2'\n")
    (programs / "sh").symlink_to(shutil.which("sh"))
    monkeypatch.setenv("PATH", str(programs))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "JIT_KERNELS_PREBUILT_DIR"):
        monkeypatch.delenv(name, raising=False)
    candidates = toolchain.candidates

    def of_this_test(probe):
        return (pair for pair in candidates(probe) if pair[1].is_relative_to(tmp_path))

    monkeypatch.setattr(toolchain, "candidates", of_this_test)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return programs


def plug_in(monkeypatch, capability: tuple[int, int] = (9, 0), name: str = "NVIDIA Test") -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    properties = SimpleNamespace(name=name, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)


# The compiler


def test_no_nvcc_and_no_gpu_is_nothing_broken(machine):
    found = examine()
    compiler = of(found, "CUDA compiler")
    assert compiler["state"] == "note"
    assert "none usable" in compiler["found"]
    assert "jit-kernels[nvcc]" in compiler["cure"]
    assert "CUDA_HOME" in compiler["cure"]
    for name in OPERATORS:
        (call,) = calls(found, name)
        assert "torch fallback" in call["found"]


def test_no_nvcc_beside_a_gpu_is_a_problem_of_each_operator(machine, monkeypatch):
    plug_in(monkeypatch)
    found = examine(code=1)
    assert of(found, "cuda:0")["state"] == "ok"
    for name in OPERATORS:
        for call in calls(found, name):
            assert call["state"] == "problem"
            assert "torch fallback" in call["found"]
            assert "no usable CUDA compiler" in call["found"]
            assert "jit-kernels[nvcc]" in call["cure"]


def test_a_wrapper_nvcc_is_shown_as_the_toolkit_behind_it(machine, tmp_path, monkeypatch):
    root = write_toolkit(tmp_path / "far/away/cuda")
    write_program(machine / "nvcc", f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n')
    plug_in(monkeypatch)
    found = examine()
    compiler = of(found, "CUDA compiler")
    assert compiler["state"] == "ok"
    assert f"nvcc 13.0 in {root} (nvcc on PATH)" in compiler["found"]
    assert of(found, "host compiler")["found"] == "g++ (fake) 14.2"
    for name in OPERATORS:
        for call in calls(found, name):
            assert call["state"] == "ok"
            assert "the first call compiles" in call["found"]
            assert f"jit-kernels warmup {name} --arch sm_90a" in call["cure"]


def test_the_wheels_nvcc_is_shown_as_such(machine, tmp_path, monkeypatch):
    root = write_toolkit(tmp_path / "site-packages/nvidia/cu13")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    compiler = of(examine(), "CUDA compiler")
    assert compiler["state"] == "ok"
    assert f"{root} (the nvidia-cuda-nvcc package)" in compiler["found"]


def test_a_cuda_home_that_is_passed_over_is_named(machine, tmp_path, monkeypatch):
    """The build works, but not with what the user asked for."""
    broken = write_toolkit(tmp_path / "broken")
    (broken / "include/cuda_runtime.h").unlink()
    monkeypatch.setenv("CUDA_HOME", str(broken))
    monkeypatch.setenv("CUDA_PATH", str(write_toolkit(tmp_path / "good")))
    note, taken = (finding for finding in examine() if finding["what"] == "CUDA compiler")
    assert note["state"] == "note"
    assert "CUDA_HOME" in note["found"]
    assert "include/cuda_runtime.h is missing" in note["found"]
    assert taken["state"] == "ok"
    assert str(tmp_path / "good") in taken["found"]


def test_an_nvcc_too_old_for_the_gpu_is_a_problem(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "cuda", release="12.0")))
    plug_in(monkeypatch, (10, 0))
    for name in OPERATORS:
        for call in calls(examine(code=1), name):
            assert call["state"] == "problem"
            assert "12.0 does not know sm_100a, which needs 12.8 or newer" in call["found"]


def test_a_missing_host_compiler_is_named(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "cuda")))
    (machine / "c++").unlink()
    found = [finding for finding in examine() if finding["what"] == "CUDA compiler"]
    assert any("host compiler was not found" in finding["found"] for finding in found)


# The GPU


def test_no_gpu_says_that_the_fallback_runs(machine):
    gpu = of(examine(), "GPU")
    assert gpu["state"] == "note"
    assert "every call runs the torch fallback" in gpu["found"]
    assert "nvidia-smi" in gpu["cure"]


OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


@pytest.mark.parametrize("count", [0, 1], ids=["without NVML", "with NVML"])
def test_an_old_driver_is_told_from_a_missing_gpu(machine, monkeypatch, count):
    """torch counts devices through NVML, which works under any driver; CUDA itself then refuses to start."""

    def refuse(*arguments):
        raise RuntimeError(OLD)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for name in ("init", "_lazy_init", "get_device_capability", "get_device_properties", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    found = examine()
    gpu = of(found, "GPU")
    assert gpu["state"] == "note"
    assert "CUDA 13.0" in gpu["found"]
    assert "driver on your system is too old (found version 12020)" in gpu["found"]
    assert "driver" in gpu["cure"]
    for name in OPERATORS:
        for call in calls(found, name):
            assert "torch fallback" in call["found"]


def test_a_gpu_that_is_too_old_runs_the_fallback(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "cuda")))
    plug_in(monkeypatch, (8, 0), "NVIDIA A100")
    found = examine()
    gpu = of(found, "cuda:0")
    assert gpu["state"] == "note"
    assert "NVIDIA A100, sm_80" in gpu["found"]
    assert "sm_90 or newer" in gpu["found"]
    for name in OPERATORS:
        for call in calls(found, name):
            assert call["state"] == "note"
            assert "torch fallback" in call["found"]
            assert "sm_90" in call["found"]


# The cache


def test_nothing_built_where_compiling_is_forbidden(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "cuda")))
    monkeypatch.setenv("JIT_KERNELS_COMPILE", "never")
    plug_in(monkeypatch)
    found = examine(code=1)
    forbidden = of(found, "compiling")
    assert forbidden["state"] == "note"
    assert "JIT_KERNELS_COMPILE=never" in forbidden["found"]
    for name in OPERATORS:
        for call in calls(found, name):
            assert call["state"] == "problem"
            assert "torch fallback" in call["found"]
            assert "is not built" in call["found"]
            assert "jit-kernels warmup" in call["cure"]
            assert "--arch sm_90a" in call["cure"]
            assert "JIT_KERNELS_PREBUILT_DIR" in call["cure"]


def test_a_prebuilt_folder_that_is_missing_is_a_problem(machine, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("JIT_KERNELS_PREBUILT_DIR", f"{tmp_path}/absent:{tmp_path}/there")
    missing, there = (finding for finding in examine(code=1) if finding["what"] == "prebuilt kernels")
    assert (missing["state"], there["state"]) == ("problem", "ok")
    assert f"{tmp_path}/absent is no folder" in missing["found"]
    assert "JIT_KERNELS_PREBUILT_DIR" in missing["cure"]


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_an_untrusted_cache_is_a_problem_of_each_call(machine, isolated_cache, monkeypatch, mode):
    isolated_cache.mkdir()
    isolated_cache.chmod(mode)
    plug_in(monkeypatch)
    found = examine(code=1)
    place = of(found, "cache")
    assert place["state"] == "problem"
    assert f"can be written by others (mode 0{mode:o})" in place["found"]
    assert place["cure"] == f"chmod go-w {isolated_cache}"
    for name in OPERATORS:
        for call in calls(found, name):
            assert call["state"] == "problem"
            assert "torch fallback" in call["found"]


def test_without_any_home_the_temporary_cache_is_a_note(machine, monkeypatch):
    import pwd

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "JIT_KERNELS_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    place = of(examine(), "cache")
    assert place["state"] == "note"
    assert f"jit-kernels-{os.geteuid()}" in place["found"]
    assert "JIT_KERNELS_CACHE_DIR" in place["cure"]


def in_a_process(run_python, tmp_path, home: Path) -> list[dict[str, str]]:
    """The findings of the real command, of a user whom permission bits bind, with a home folder and no settings."""
    code = "import sys; sys.argv = ['jit-kernels', 'doctor', '--json']; from jit_kernels.cli import main; main()"
    env = {"HOME": home, "TMPDIR": tmp_path, "JIT_KERNELS_CACHE_DIR": None, "XDG_CACHE_HOME": None}
    return json.loads(run_python(code, env=env, bound=True))["findings"]


@pytest.mark.parametrize("part", ["", ".cache", ".cache/jit-kernels", f".cache/jit-kernels/{jit_kernels.__version__}"])
def test_a_read_only_home_sends_new_kernels_elsewhere(run_python, tmp_path, part):
    home = tmp_path / "home"
    (home / part).mkdir(parents=True)
    for folder in [home, *home.rglob("*")]:
        folder.chmod(0o755)
    (home / part).chmod(0o555)
    place = of(in_a_process(run_python, tmp_path, home), "cache")
    assert place["state"] == "note"
    assert f"{home}/.cache/jit-kernels" in place["found"]
    assert f"can't be written: new kernels go to {tmp_path}/jit-kernels-{os.geteuid()}" in place["found"]
    assert "JIT_KERNELS_CACHE_DIR" in place["cure"]
    made = [path for path in home.rglob("*") if path.is_dir()]
    assert sorted(made) == sorted(
        path for path in (home / part, *(home / part).parents) if path.is_relative_to(home) and path != home
    ), "doctor makes no folder"


def test_the_command_itself_exits_1_where_something_is_broken(tmp_path):
    env = {**os.environ, "JIT_KERNELS_PREBUILT_DIR": str(tmp_path / "absent"), "NO_COLOR": "1"}
    env["PYTHONPATH"] = str(Path(jit_kernels.__file__).parent.parent)
    done = subprocess.run([sys.executable, "-m", "jit_kernels.cli", "doctor"], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "is no folder" in done.stdout
    assert not done.stderr


# The plug-ins


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A stand-in of vLLM, and the switch on."""
    monkeypatch.setenv("JIT_KERNELS_INTEGRATIONS", "vllm")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    folder = standins.write(tmp_path / "clients", "vllm", "0.33.0")
    with standins.importable("vllm", folder):
        yield folder


def test_plug_ins_are_off_unless_asked_for(machine, tmp_path):
    assert of(examine(), "plug-in sglang")["found"] == "off"
    with standins.importable("vllm", standins.write(tmp_path / "clients", "vllm", "0.33.0")):
        found = of(examine(), "plug-in vllm")
    assert (found["state"], found["found"]) == ("ok", "off; vllm 0.33.0 is installed")
    assert "JIT_KERNELS_INTEGRATIONS=vllm" in found["cure"]


def test_a_plug_in_that_will_run_is_on(machine, vllm, monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda **named: [named["group"]])
    found = examine()
    assert of(found, "plug-in vllm")["found"] == "on in vllm 0.33.0; tested with 0.33.0"
    assert of(found, "plug-in sglang")["found"] == "off"
    assert "vllm.model_executor" not in sys.modules, "doctor imports no client"
    monkeypatch.setenv("VLLM_PLUGINS", "other,jit_kernels")
    assert of(examine(), "plug-in vllm")["state"] == "ok"


@pytest.mark.parametrize(
    ("client", "text", "loads"),
    [
        (sglang.CLIENT, "other, jit_kernels", True),
        (sglang.CLIENT, "", True),
        (sglang.CLIENT, "other", False),
        (vllm_plugin.CLIENT, "other,jit_kernels", True),
        (vllm_plugin.CLIENT, "other, jit_kernels", False),  # vLLM takes the blank for a part of the name
        (vllm_plugin.CLIENT, "", False),
    ],
)
def test_a_selection_is_read_as_its_client_reads_it(client, text, loads):
    assert client.selects(text) is loads


def test_a_split_that_will_be_refused_is_a_problem(machine, vllm, monkeypatch):
    standins.put(vllm, f"{standins.KERNELS}/warmup.py", "def MHC_PRE_NORM_KERNEL", "def NORM")
    monkeypatch.setattr(metadata, "entry_points", lambda **named: [named["group"]])
    assert of(examine(), "plug-in vllm")["state"] == "ok"
    monkeypatch.setenv("JIT_KERNELS_VLLM_SPLIT", "on")
    assert "has no 'MHC_PRE_NORM_KERNEL'" in of(examine(code=1), "plug-in vllm")["found"]


def test_a_plug_in_asked_for_whose_client_is_not_there_is_a_problem(machine, monkeypatch):
    monkeypatch.setenv("JIT_KERNELS_INTEGRATIONS", "all")
    for name, version in (("sglang", "0.5.23"), ("vllm", "0.33.0")):
        found = of(examine(code=1), f"plug-in {name}")
        assert (found["state"], found["found"]) == ("problem", f"{name} is not installed")
        assert f"install {name} {version}, or take it out of JIT_KERNELS_INTEGRATIONS" in found["cure"]


def test_a_client_of_another_version_is_a_problem_by_name(machine, vllm):
    standins.put(vllm, f"{standins.KERNELS}/triton.py", "def hc_collapse_triton(x", "def collapse(x")
    found = of(examine(code=1), "plug-in vllm")
    assert found["state"] == "problem"
    assert "has no 'hc_collapse_triton'" in found["found"]
    assert "install vllm 0.33.0" in found["cure"]


def test_a_plug_in_that_its_client_will_not_find_is_a_problem(machine, vllm, monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda **named: [])
    found = of(examine(code=1), "plug-in vllm")
    assert "vllm can't find it: jit-kernels is not installed as a package" in found["found"]
    monkeypatch.setattr(metadata, "entry_points", lambda **named: [named["group"]])
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert "VLLM_PLUGINS= leaves it out" in of(examine(code=1), "plug-in vllm")["found"]
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    found = of(examine(code=1), "plug-in vllm")
    assert "VLLM_PLUGINS=lora_filesystem_resolver leaves it out" in found["found"]
    assert "add jit_kernels to VLLM_PLUGINS" in found["cure"]
