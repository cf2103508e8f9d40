"""What all tests share: a cache of their own, seeds from the test's id, fresh processes, the marker ``gpu``."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

# Before jit_kernels is imported: the user's own settings and cache have no part in the tests; kernels built ahead may.
for _name in [name for name in os.environ if name.startswith("JIT_KERNELS_") and name != "JIT_KERNELS_PREBUILT_DIR"]:
    del os.environ[_name]
_SHARED_CACHE = tempfile.mkdtemp(prefix="jit-kernels-tests-")
os.environ["JIT_KERNELS_CACHE_DIR"] = _SHARED_CACHE

import pytest  # noqa: E402
import torch  # noqa: E402
from answer import Compiler, answer_kernel, entries  # noqa: E402

import jit_kernels  # noqa: E402
from jit_kernels.jit import toolchain  # noqa: E402
from jit_kernels.jit.arch import Target  # noqa: E402
from jit_kernels.jit.errors import ToolchainError  # noqa: E402

# Exports answer() without tvm-ffi's headers: builds in a third of a second where a typed export takes two.
_ANSWER = """\
#include <cstdint>
struct Any { int32_t type; int32_t padding; int64_t value; };
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_answer(void*, const Any*, int32_t, Any* result) {
  *result = {1, 0, ANSWER};
  return 0;
}
"""
# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: without them the permission bits bind root as they bind everybody.
_OVERRIDES = (1, 2)
_PR_CAPBSET_DROP = 24


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU with sm_90 or newer")
    config.addinivalue_line("markers", "compiler: needs a CUDA toolkit and a host compiler")


def pytest_unconfigure() -> None:
    shutil.rmtree(_SHARED_CACHE, ignore_errors=True)


def _gpu_lack() -> str:
    if not torch.cuda.is_available():
        return "needs a GPU, and torch sees none"
    major, minor = torch.cuda.get_device_capability()
    return "" if major >= 9 else f"needs sm_90 or newer, and the GPU is sm_{major}{minor}"


def _compiler_lack() -> str:
    try:
        toolchain.find(None, toolchain.Probe())
        toolchain.ninja()
    except ToolchainError as error:
        return str(error).splitlines()[0]
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, lack in (("gpu", _gpu_lack), ("compiler", _compiler_lack)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = lack() if marked else ""
        for item in marked if reason else ():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that belongs to this test, the same in every run."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """A CPU generator with the test's own seed."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def shared_cache() -> Path:
    """The cache of all tests that don't ask for `isolated_cache`: a kernel compiles once a run."""
    return Path(_SHARED_CACHE)


@pytest.fixture
def isolated_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for this test alone; temporary folders go beside it, since a second cache may arise there."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("JIT_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def target() -> Target:
    """The GPU's arch target; sm_90a where there is none."""
    return Target.parse("sm_90a") if _gpu_lack() else Target.of(torch.device("cuda", 0))


@pytest.fixture(scope="session")
def answer_source() -> Callable[..., Path]:
    """``answer_source(folder, value, name)`` writes a C++ source that exports ``answer()``; for header_only=False."""

    def write(folder: Path, value: object = 42, name: str = "answer.cpp", head: str = "") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        path.write_text(head + _ANSWER.replace("ANSWER", str(value)))
        return path

    return write


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """A host compiler that logs what it compiles, and can be made slow."""
    made = Compiler(tmp_path / "compiler")
    monkeypatch.setenv("CXX", str(made.program))
    yield made
    made.slow.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, answer_source: Callable[..., Path]) -> tuple[Path, Path]:
    """A source and a cache root that holds it. The library in it is never loaded from there: copy it, don't use it."""
    folder = tmp_path_factory.mktemp("built")
    path = answer_source(folder)
    answer_kernel(path).compile(folder / "cache")
    return path, folder / "cache"


@pytest.fixture
def copied(built: tuple[Path, Path], isolated_cache: Path) -> tuple[Path, Path]:
    """The source, and its entry in a cache of the test's own."""
    path, root = built
    shutil.copytree(root, isolated_cache, copy_function=shutil.copy2)
    return path, entries(isolated_cache)[0]


def _drop_overrides() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in _OVERRIDES:
        # Refused (EPERM) in containers whose root has no such capabilities to begin with.
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


@pytest.fixture(scope="session")
def start_python() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a snippet in a fresh process, as the leader of a process group; what still runs at the end is killed.

    ``env`` changes single variables (None removes one). ``bound`` binds root to the permission bits.
    """
    started = []

    def start(code: str, env: dict[str, object] | None = None, bound: bool = False, **options) -> subprocess.Popen:
        # The package under test, wherever it was imported from.
        variables = {**os.environ, "PYTHONPATH": str(Path(jit_kernels.__file__).parent.parent)}
        for name, value in (env or {}).items():
            variables.pop(name, None)
            if value is not None:
                variables[name] = str(value)
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_drop_overrides if bound and os.geteuid() == 0 else None,
            **{"cwd": tempfile.gettempdir(), **options},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def run_python(start_python: Callable[..., subprocess.Popen]) -> Callable[..., str]:
    """Runs a snippet as `start_python` does, checks that it ended well, and returns what it printed."""

    def run(code: str, timeout: float = 120, **options) -> str:
        process = start_python(code, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err}"
        return out

    return run


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The GPU; a test that needs one skips without it, with the reason."""
    if lack := _gpu_lack():
        pytest.skip(lack)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each place an op runs: the fallback on the CPU, the fused kernel on a GPU."""
    return torch.device("cpu") if request.param == "cpu" else request.getfixturevalue("cuda")
