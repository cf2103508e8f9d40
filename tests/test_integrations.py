"""What all integrations stand on: patches that hold whole or not at all, routes, the one switch, the plug-ins."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import standins
import torch
from click.testing import CliRunner
from jit_kernels.bench import released

import jit_kernels
from jit_kernels import UnsupportedError, env, use_backend
from jit_kernels.dispatch import Support
from jit_kernels.integrations import Change, IntegrationError, Patch, rebind, sglang, version_of, vllm
from jit_kernels.integrations.plugin import NAME, Client, Need, Route
from jit_kernels.jit.errors import CaptureError, CompileError

CLIENTS = {"sglang": sglang, "vllm": vllm}

# Patch


@pytest.fixture
def modules(monkeypatch):
    """A module with two functions, and one that imported the first by name."""
    owner, holder = ModuleType("owner"), ModuleType("holder")
    owner.first, owner.second = (lambda: 1), (lambda: 2)
    holder.alias = owner.first
    for module in (owner, holder):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return owner, holder


def test_a_patch_goes_in_once_and_comes_out_whole(modules):
    owner, holder = modules
    first, second = owner.first, owner.second
    patch = Patch("torch", "2")
    changes = (
        Change(owner, "first", lambda own: lambda: own() + 10, everywhere=True),
        Change(owner, "second", lambda own: lambda: own() + 20),
    )
    for _ in range(2):
        patch.install(*changes)
        patch.install(*changes)
        assert (owner.first(), owner.second(), holder.alias()) == (11, 22, 11)
        later = owner.first
        sys.modules["later"] = ModuleType("later")
        sys.modules["later"].name = later
        patch.uninstall()
        patch.uninstall()
        assert (owner.first, owner.second, holder.alias) == (first, second, first)
        assert sys.modules.pop("later").name is first


def test_a_patch_of_which_one_name_is_missing_changes_nothing(modules):
    owner, holder = modules
    before = dict(vars(owner))
    patch = Patch("torch", "2.9")
    with pytest.raises(IntegrationError, match=r"torch .*: owner has no 'third'.*nothing was changed.*torch 2\.9"):
        patch.install(Change(owner, "first", lambda own: None, True), Change(owner, "third", lambda own: None))
    assert dict(vars(owner)) == before
    assert holder.alias is owner.first
    assert not patch.installed


def test_a_patch_whose_replacement_fails_changes_nothing(modules):
    owner, _ = modules
    before = dict(vars(owner))
    with pytest.raises(ZeroDivisionError):
        Patch("torch", "2").install(
            Change(owner, "first", lambda own: len), Change(owner, "second", lambda own: 1 // 0)
        )
    assert dict(vars(owner)) == before


def test_a_patch_that_breaks_off_is_taken_back(modules):
    owner, holder = modules

    class Closed:
        second = staticmethod(lambda: 2)

    class Refusing(type):
        def __setattr__(cls, name, value):
            raise AttributeError("closed")

    closed = Refusing("Closed", (), dict(vars(Closed)))
    before, patch = dict(vars(owner)), Patch("torch", "2")
    with pytest.raises(AttributeError, match="closed"):
        patch.install(
            Change(owner, "first", lambda own: lambda: 10, True), Change(closed, "second", lambda own: lambda: 20)
        )
    assert not patch.installed
    assert dict(vars(owner)) == before
    assert holder.alias is owner.first


def test_a_name_replaced_since_is_not_put_back(modules):
    owner, _ = modules
    patch = Patch("torch", "2")
    patch.install(Change(owner, "first", lambda own: len), Change(owner, "second", lambda own: len))
    owner.second = abs
    with pytest.raises(IntegrationError, match=r"owner\.second was replaced again"):
        patch.uninstall()
    assert (owner.first, owner.second) == (len, abs)
    assert patch.installed


def test_rebind_finds_every_name_and_nothing_else(modules):
    owner, holder = modules
    old = owner.first
    holder.other, owner.equal = 1, 1
    rebind(old, len)
    assert (owner.first, holder.alias, holder.other) == (len, len, 1)
    assert owner.second is not len


# Route


class FakeOperator:
    """An operator whose kernel does what a test says; counts its calls by backend."""

    name = "fake"

    def __init__(self, support=None, failure=None):
        self.support = Support(True) if support is None else support
        self.failure, self.calls = failure, []

    def complete(self, args):
        return args

    def parameters(self, x):
        return (x.shape[-1],)

    def validate(self, x):
        if x.ndim != 2:
            raise ValueError(f"x must have two dimensions; got {x.ndim}")

    def supports(self, x):
        return self.support

    def __call__(self, x, backend=None):
        self.validate(x)
        choice = backend or jit_kernels.backend()
        self.calls.append(choice)
        if choice == "fused" and not self.support:
            raise UnsupportedError(f"fake: backend 'fused' was asked for, but {self.support.reason}")
        if choice == "fused" and self.failure:
            raise self.failure
        return "ours"


def route(**options) -> tuple[Route, FakeOperator]:
    operator = FakeOperator(**options)
    return Route(operator, SimpleNamespace(name="someone", log=logging.getLogger("someone.jit_kernels"))), operator


def theirs():
    return "theirs"


def test_a_covered_call_runs_ours_and_the_first_is_said(caplog):
    taken, operator = route()
    with caplog.at_level(logging.INFO, "someone.jit_kernels"):
        for _ in range(2):
            assert taken.run((torch.zeros(2, 3),), theirs) == "ours"
    assert operator.calls == ["fused", "fused"]
    assert [record.message for record in caplog.records] == [f"fake of jit_kernels {jit_kernels.__version__} runs"]


def test_an_uncovered_call_runs_theirs_and_says_why_once_a_reason(caplog):
    taken, operator = route()
    operator.support = Support(False, "head_dim 96: the fused kernel covers 64 and 128")
    for _ in range(3):
        assert taken.run((torch.zeros(2, 3),), theirs) == "theirs"
    operator.support = Support(False, "head_dim 32: the fused kernel covers 64 and 128")
    assert taken.run((torch.zeros(2, 3),), theirs) == "theirs"
    assert taken.run((torch.zeros(3),), theirs) == "theirs"
    assert [record.message for record in caplog.records] == [
        "fake: someone's own path runs: head_dim 96: the fused kernel covers 64 and 128",
        "fake: someone's own path runs: x must have two dimensions; got 1",
    ]


def test_a_kernel_that_cannot_be_had_is_tried_once_a_build(caplog):
    taken, operator = route(failure=CompileError("no compiler", "install one"))
    for _ in range(3):
        assert taken.run((torch.zeros(2, 3),), theirs) == "theirs"
    assert operator.calls == ["fused"]
    assert taken.run((torch.zeros(2, 4),), theirs) == "theirs"
    assert operator.calls == ["fused", "fused"]
    (record,) = caplog.records
    assert "no compiler" in record.message
    assert "install one" in record.message


def test_an_unloaded_kernel_in_a_capture_is_an_error_and_no_failure():
    taken, operator = route(failure=CaptureError("not loaded", "warm up"))
    for _ in range(2):
        with pytest.raises(CaptureError):
            taken.run((torch.zeros(2, 3),), theirs)
    operator.failure = None
    assert taken.run((torch.zeros(2, 3),), theirs) == "ours"


@pytest.mark.parametrize("choice", ["torch", "fused"])
def test_a_chosen_backend_is_ours_whatever_is_covered(choice):
    taken, operator = route(support=Support(False, "it isn't"))
    with use_backend(choice):
        if choice == "torch":
            assert taken.run((torch.zeros(2, 3),), theirs) == "ours"
        else:
            with pytest.raises(UnsupportedError):
                taken.run((torch.zeros(2, 3),), theirs)
        assert taken.run((torch.zeros(3),), theirs) == "theirs", "input that we refuse is the client's in any case"
    operator.support, operator.failure = Support(True), CompileError("no compiler")
    with use_backend("fused"), pytest.raises(CompileError):
        taken.run((torch.zeros(2, 3),), theirs)


# The client's files, the switch


def test_needs_are_looked_for_at_the_top_of_a_module(tmp_path, monkeypatch):
    """Functions, classes, imports, assignments, and what stands under an if or a try; not what a function holds."""
    text = """
from os import path as where
import os.path
VALUE: int = 1
if VALUE:
    class Here: ...
try:
    def maybe(a, /, b, *, c): ...
except ImportError:
    pass
def outer():
    def inner(): ...
"""
    (tmp_path / "someone").mkdir()
    (tmp_path / "someone" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

    def require(name, parameters=()):
        Client("someone", "1", "group", "SELECTION", (Need("someone", name, parameters),)).require()

    for name in ("where", "os", "VALUE", "Here", "outer"):
        require(name)
    require("maybe", ("a", "b", "c"))
    for name in ("inner", "path"):
        with pytest.raises(IntegrationError, match=f"someone has no '{name}'"):
            require(name)
    with pytest.raises(IntegrationError, match=r"maybe of other parameters: \('a', 'b', 'c'\) instead of \('a',\)"):
        require("maybe", ("a",))
    with pytest.raises(IntegrationError, match=r"someone\.missing is not there"):
        Client("someone", "1", "group", "SELECTION", (Need("someone.missing", "x"),)).require()
    assert "someone" not in sys.modules


@pytest.mark.parametrize(
    ("text", "names"),
    [("", ()), ("vllm", ("vllm",)), (" SGLang , vllm,", ("sglang", "vllm")), ("all", ("sglang", "vllm"))],
)
def test_the_switch_names_clients(monkeypatch, text, names):
    monkeypatch.setenv("JIT_KERNELS_INTEGRATIONS", text)
    assert env.INTEGRATIONS.get() == names


def test_an_unknown_name_in_the_switch_is_named_beside_the_known_ones(monkeypatch, caplog):
    monkeypatch.setenv("JIT_KERNELS_INTEGRATIONS", "vllm,sgl")
    with pytest.raises(ValueError, match=r"JIT_KERNELS_INTEGRATIONS='vllm,sgl': 'sgl' is none of sglang, vllm"):
        env.INTEGRATIONS.get()
    for module in CLIENTS.values():
        module.plug_in()  # and the client starts
        assert not module.installed()
    assert len(caplog.records) == 2
    assert all("'sgl' is none of sglang, vllm" in record.message for record in caplog.records)


@pytest.mark.parametrize("name", CLIENTS)
def test_without_the_switch_a_plug_in_looks_at_nothing(name, monkeypatch):
    monkeypatch.setattr(Client, "require", lambda *args: pytest.fail("it looked at its client"))
    CLIENTS[name].plug_in()
    monkeypatch.setenv("JIT_KERNELS_INTEGRATIONS", "sglang" if name == "vllm" else "vllm")
    CLIENTS[name].plug_in()


def test_the_version_of_what_is_not_there():
    assert version_of("torch") == importlib.metadata.version("torch")
    assert version_of("no-such-package-anywhere") is None


# The doors: entry points, in new processes

installed = pytest.mark.skipif(
    version_of("jit-kernels") is None, reason="plug-ins are found by the metadata of installed packages"
)
LOAD = {
    "sglang": """
from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks
apply_plugin_hooks()
model = "sglang.multimodal_gen.runtime.models.dits.minimax_h3_vdn"
imported = model in sys.modules
function = importlib.import_module(model).delta_factor_apply
A = torch.zeros(1, 1, 64, 64)
call = lambda: function("vdn_solve", A[..., 0], A, A, tokens_per_frame=1, fused=True)
""",
    "vllm": """
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
kernels = "vllm.model_executor.kernels.mhc.triton"
imported = kernels in sys.modules
function = importlib.import_module(kernels).hc_collapse_triton
call = lambda: function(torch.ones(2, 4, 8).bfloat16(), torch.ones(2, 4))
""",
}
HEAD = "import importlib, json, sys\nimport torch\n"
TAIL = """
import jit_kernels
from jit_kernels.dispatch import Operator
ran, run = [], Operator.run
Operator.run = lambda self, *args: ran.append(self.name) or run(self, *args)
try:
    with jit_kernels.use_backend("torch"):
        call()
except Exception as error:  # a Triton kernel, called without a GPU
    assert not ran, error
print(json.dumps({"imported": imported, "ran": ran}))
"""


@pytest.fixture
def in_a_client(run_python, tmp_path):
    """Runs a client's own loading of plug-ins in a new process, and says what a call of its function then ran."""

    def run(name, **variables):
        paths = [str(Path(jit_kernels.__file__).parent.parent)]
        if not standins.RELEASED:
            paths.insert(0, str(standins.write(tmp_path / name, name, CLIENTS[name].CLIENT.tested)))
        variables = {"PYTHONPATH": os.pathsep.join(paths), **variables}
        return json.loads(run_python(HEAD + LOAD[name] + TAIL, env=variables, timeout=300).splitlines()[-1])

    return run


@installed
def test_both_doors_are_open():
    """As installed; what a client looks up."""
    for name, module in CLIENTS.items():
        (point,) = importlib.metadata.entry_points(group=module.CLIENT.group, name=NAME)
        assert point.load() is module.plug_in, name


@installed
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_finds_the_plug_in_in_a_new_process(in_a_client, name):
    operators = {"sglang": "vdn_delta_factors", "vllm": "mhc_pre_h_aggregate"}
    assert in_a_client(name, JIT_KERNELS_INTEGRATIONS=name)["ran"] == [operators[name]]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_without_the_switch_is_as_it_was(in_a_client, name):
    assert in_a_client(name) == {"imported": False, "ran": []}


# The record of a run against the released packages


@pytest.mark.parametrize(("inner", "ok"), [("", True), ('<failure message="assert 1 == 2&#10;more"/>', False)])
def test_the_record_says_what_ran_and_exits_by_it(tmp_path, inner, ok):
    tests, output = tmp_path / "tests.xml", tmp_path / "clients.json"
    tests.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="skips"><skipped message="needs a GPU"/></testcase>'
        f'<testcase classname="tests.a" name="runs">{inner}</testcase></testsuite></testsuites>'
    )
    result = CliRunner().invoke(released.main, [str(tests), "--output", str(output)])
    assert result.exit_code == (0 if ok else 1), result.output
    document = json.loads(output.read_text())
    assert document["ok"] is ok
    assert document["clients"].keys() == CLIENTS.keys()
    assert document["counts"] == {"passed" if ok else "failed": 1, "skipped": 1}
    skips, runs = document["tests"]
    assert skips == {"test": "tests.a.skips", "outcome": "skipped", "reason": "needs a GPU"}
    assert runs["outcome"] == ("passed" if ok else "failed")
    assert runs.get("reason") == (None if ok else "assert 1 == 2")


def test_a_record_of_nothing_is_no_success(tmp_path):
    (tmp_path / "tests.xml").write_text("<testsuites><testsuite/></testsuites>")
    result = CliRunner().invoke(released.main, [str(tmp_path / "tests.xml"), "--output", str(tmp_path / "out.json")])
    assert result.exit_code == 1
