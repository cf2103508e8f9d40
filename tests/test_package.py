"""What is shipped: the contents of the wheel and the source distribution, a run from the wheel, the cost of import."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import jit_kernels
from jit_kernels.dispatch import OPERATORS
from jit_kernels.jit.arch import Target

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("jit_kernels", "csrc", "fallbacks", "bench")  # in the wheel the last three lie inside the first
FILES = ("pyproject.toml", "LICENSE", "README.md")

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs a checkout")


def build(kind: str, folder: Path, into: Path) -> Path:
    """Asks the build backend as pip does."""
    into.mkdir(exist_ok=True)
    code = f"import setuptools.build_meta as backend; print('built', backend.build_{kind}({str(into)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return into / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the checkout, for builds leave files behind."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    unwanted = shutil.ignore_patterns("__pycache__", ".*")
    for name in (*SHIPPED, "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel, checkout):
    expected = {"jit_kernels/py.typed"}
    for folder, kinds in (
        ("jit_kernels", "py"),
        ("csrc", "cuh cu h"),
        ("fallbacks", "py"),
        ("bench", "py cuh cu html"),
    ):
        place = Path() if folder == "jit_kernels" else Path("jit_kernels")
        for kind in kinds.split():
            for path in (checkout / folder).rglob(f"*.{kind}"):
                if "results" not in path.parts:
                    expected.add(str(place / path.relative_to(checkout)))
    names = names_in(wheel)
    info = {name for name in names if ".dist-info/" in name}
    assert names - info == expected
    assert "jit_kernels/csrc/include/jit_kernels/tensor.cuh" in names
    assert {name.partition("/")[2] for name in info} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
        "top_level.txt",
    }


def test_the_source_distribution_builds_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (folder,) = (tmp_path / "sdist").iterdir()
    assert (folder / "LICENSE").is_file()
    assert names_in(build("wheel", folder, tmp_path / "wheel")) == names_in(wheel)


def test_metadata(wheel):
    metadata = metadata_of(wheel)
    assert metadata["Name"] == "jit-kernels"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata.get_payload().strip(), "README.md is the long description"
    runtime = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w-]+(\[\w+\])?", line)[0] for line in runtime} == {
        "torch",
        "apache-tvm-ffi[cpp]",
        "click",
        "rich",
    }
    assert {"test", "bench", "nvcc"} <= set(metadata.get_all("Provides-Extra"))


def test_versions_agree(wheel):
    assert metadata_of(wheel)["Version"] == jit_kernels.__version__
    assert wheel.name == f"jit_kernels-{jit_kernels.__version__}-py3-none-any.whl"
    try:
        installed = importlib.metadata.version("jit-kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    assert installed == jit_kernels.__version__


RUN = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "Editable" not in getattr(f, "__name__", type(f).__name__)]
import importlib.metadata, json
import torch
import jit_kernels
from jit_kernels.dispatch import OPERATORS
from jit_kernels.jit.arch import Target

out = jit_kernels.mhc_pre_h_aggregate(torch.ones(2, 4, 8).bfloat16(), torch.ones(2, 4))
assert out.eq(4).all()
T, J = jit_kernels.vdn_delta_factors(torch.zeros(2, 4, 4), torch.ones(2, 4, 4), torch.full((2, 4), 0.5))
assert torch.equal(T, torch.eye(4).expand(2, 4, 4) / 2) and J.eq(1).all()
(script,) = [point for point in importlib.metadata.entry_points(group="console_scripts") if point.name == "jit-kernels"]
assert callable(script.load())
target = Target.parse("sm_90a")
builds = {name: operator.build(target, **operator.warmup[0]).source for name, operator in OPERATORS.items()}
print(json.dumps({
    "path": list(jit_kernels.__path__),
    "modules": [m.__file__ for name, m in sys.modules.items() if name.startswith("jit_kernels") and m.__file__],
    "keys": {name: source.key(target) for name, source in builds.items()},
    "sources": [str(path) for source in builds.values() for path, _ in source.scan().values()],
}))
"""


def test_the_wheel_runs_without_the_checkout(unpacked, run_python):
    report = json.loads(run_python(RUN, env={"PYTHONPATH": unpacked}, cwd=unpacked.parent))
    assert report["path"] == [str(unpacked / "jit_kernels")]
    for path in report["modules"] + report["sources"]:
        assert path.startswith(str(unpacked / "jit_kernels")), path
    # What was compiled for a checkout serves a wheel, and the other way round.
    target = Target.parse("sm_90a")
    for name, operator in OPERATORS.items():
        assert report["keys"][name] == operator.build(target, **operator.warmup[0]).source.key(target)


def test_a_bare_checkout_runs_as_it_is(checkout, run_python):
    code = RUN.replace("(script,)", "script,").replace("assert callable(script.load())", "")
    code = re.sub(r"^script,.*$", "", code, flags=re.M)
    report = json.loads(run_python(code, env={"PYTHONPATH": checkout}, cwd=checkout.parent))
    for path in report["modules"] + report["sources"]:
        assert path.startswith(str(checkout)), path


IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
begin = time.perf_counter()
import jit_kernels
seconds = time.perf_counter() - begin
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""
# Each costs more than the whole package, and none is needed before a kernel is loaded or a command is run.
HEAVY = {"tvm_ffi", "ninja", "click", "rich", "triton", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"}


def test_import_costs_little_beyond_torch(run_python):
    for _ in range(5):  # a busy machine only adds to the time
        seconds, modules = json.loads(run_python(IMPORT))
        assert not HEAVY & set(modules)
        if seconds <= 0.15:
            return
    pytest.fail(f"import jit_kernels took {seconds:.3f} s")


def test_what_is_public_is_there():
    assert sorted(jit_kernels.__all__) == jit_kernels.__all__
    for name in jit_kernels.__all__:
        assert getattr(jit_kernels, name) is not None
