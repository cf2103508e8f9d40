"""The benchmark: gates, rows, suites, commands. All but a GPU's own timing runs on a CPU."""

from __future__ import annotations

import importlib.util
import re
from contextlib import contextmanager
from functools import partial

import cli
import pytest
import torch
from click.testing import CliRunner
from jit_kernels.bench import ceilings, details, run, suite, vdn_script
from jit_kernels.bench.details import LaunchCounter, condition
from jit_kernels.bench.gate import judge, poisoned
from jit_kernels.bench.mhc_pre_h_aggregate import eager, gold
from jit_kernels.bench.peers import mhc_pre_h_aggregate as collapse_peers
from jit_kernels.bench.peers import vdn_delta_factors as vdn_peers
from jit_kernels.bench.record import Document
from jit_kernels.bench.timing import (
    CpuTimer,
)

from jit_kernels.dispatch import OPERATORS

CPU = suite.Setting(torch.device("cpu"))
EXACT = (2**-8,)  # as the collapse's own gate

# The gate


@pytest.fixture
def inputs(generator):
    return collapse_peers.inputs(64, generator, 3)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda out: out * 1.01, r"out: error \d.* exceeds 3.9e-03"),
        (lambda out: out.index_fill(0, torch.tensor([1]), torch.nan), "out: error inf"),
        (lambda out: out[:2], r"shape \[2, 64\], not \[3, 64\]"),
    ],
)
def test_the_gate_sees_wrong_values_nan_and_wrong_shapes(inputs, spoil, says):
    exact = gold(*(tensor.double() for tensor in inputs))
    out = eager(*inputs)
    assert judge(out, exact, ("out",), EXACT).failure == ""
    assert re.search(says, judge(spoil(out), exact, ("out",), EXACT).failure)


def test_the_gate_compares_bytes_where_they_are_promised():
    zeros = torch.zeros(2, 4)
    assert judge(zeros, (zeros.double(),), ("out",), EXACT, zeros.clone()).failure == ""
    assert "bytes differ" in judge(zeros, (zeros.double(),), ("out",), EXACT, -zeros).failure  # -0.0 is not +0.0


def test_what_a_call_leaves_unwritten_is_nan():
    memory = torch.ones(2, 3)

    def writes_half():
        memory[0] = 1.0
        return memory

    (out,) = poisoned(writes_half)
    assert out[0].tolist() == [1.0] * 3
    assert out[1].isnan().all()


# Rows: what is timed, and what is not


class GraphTimer(CpuTimer):
    """A graph as CUDA has it: the outputs of the capture are the memory that each replay writes again."""

    kind = "cuda"

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor  # of what a replay computes

    def graph(self, calls):
        outputs = [suite.outputs_of(call()) for call in calls]

        def shot():
            for some, call in zip(outputs, calls, strict=True):
                for out, value in zip(some, suite.outputs_of(call()), strict=True):
                    out.copy_(value * self.factor)
            return lambda: 7.0

        return shot, outputs


def entrant(name, call, **fields) -> suite.Entrant:
    return suite.Entrant(name, "a candidate", "nowhere", suite.function(call), EXACT, **fields)


def collapse_suite(*entrants) -> suite.Suite:
    case = suite.Case(
        "T=3 H=64", {"tokens": 3, "hidden_size": 64}, partial(collapse_peers.inputs, 64), 7 * 3 * 64, cpu=True
    )
    return suite.Suite("mhc_pre_h_aggregate", "forward", (case,), entrants, gold, ("out",))


def bench_of(monkeypatch, *entrants, timer=None) -> Document:
    monkeypatch.setattr(run, "suites", lambda operator: [collapse_suite(*entrants)])
    bench = run.Bench([OPERATORS["mhc_pre_h_aggregate"]], CPU)
    if timer is not None:
        bench.timer = timer
    return bench.run()


def absent(setting):
    raise suite.AbsentError("it is at sea")


def fails(residual, pre):
    raise RuntimeError("no kernel image\nand more")


def covers_other_shapes(setting):
    def prepare(residual, pre):
        raise suite.AbsentError("it covers T=4")

    return prepare


def test_a_red_gate_is_not_timed_and_the_others_are(monkeypatch):
    document = bench_of(
        monkeypatch,
        entrant("right", eager),
        entrant("wrong", lambda residual, pre: eager(residual, pre) * 1.1),
        entrant("fails", fails),
        suite.Entrant("absent", "", "", absent, EXACT),
        suite.Entrant("elsewhere", "", "", covers_other_shapes, EXACT),
    )
    (row,) = document.rows
    assert not document.ok
    assert document.complete
    timings = {timing.candidate: timing for timing in row.timings}
    assert timings["right"].gate == "passed"
    assert timings["right"].eager.median > 0
    assert timings["right"].errors["out"] <= EXACT[0]
    assert timings["wrong"].gate == "failed"
    assert timings["wrong"].time is None
    assert "exceeds" in timings["wrong"].reason
    assert (timings["fails"].gate, timings["fails"].reason) == ("failed", "RuntimeError: no kernel image")
    assert (timings["elsewhere"].gate, timings["elsewhere"].reason) == ("not run", "it covers T=4")
    listed = {candidate.name: (candidate.present, candidate.reason) for candidate in document.candidates}
    assert listed["absent"] == (False, "it is at sea")
    assert listed["right"] == (True, "")
    assert "absent" not in timings


def test_a_graph_is_timed_and_its_outputs_are_judged_too(monkeypatch):
    document = bench_of(monkeypatch, entrant("right", eager), entrant("waits", eager, waits=True), timer=GraphTimer())
    right, waits = document.rows[0].timings
    assert document.ok
    assert (right.graph.median, right.graph.stable) == (7.0, True)
    assert 4 <= right.graph_calls <= 128
    assert right.time == right.graph
    assert waits.graph is None
    assert waits.time == waits.eager
    assert "wait" in waits.reason


def test_a_replay_that_is_wrong_fails_the_gate(monkeypatch):
    document = bench_of(monkeypatch, entrant("right", eager), timer=GraphTimer(factor=2.0))
    (timing,) = document.rows[0].timings
    assert (timing.gate, timing.time) == ("failed", None)
    assert timing.reason.startswith("in a CUDA graph: out: error")


def test_the_document_is_kept_after_every_row(monkeypatch):
    one = collapse_suite(entrant("right", eager))
    two = suite.replace(one, cases=(*one.cases, suite.replace(one.cases[0], label="again")))
    monkeypatch.setattr(run, "suites", lambda operator: [two])
    kept: list[Document] = []
    run.Bench([OPERATORS["mhc_pre_h_aggregate"]], CPU, keep=kept.append).run()
    assert [len(document.rows) for document in kept] == [1, 2, 2, 2]
    assert [document.complete for document in kept] == [False, False, False, True]


def test_an_error_without_words_is_told_by_its_type(monkeypatch):
    def silent(residual, pre):
        raise NotImplementedError

    document = bench_of(monkeypatch, entrant("right", eager), entrant("silent", silent))
    assert document.rows[0].timings[1].reason == "NotImplementedError"


def test_a_peer_that_cannot_do_a_family_does_not_end_the_run(monkeypatch, generator):
    one = collapse_suite(entrant("right", eager), entrant("fails", fails))
    family = suite.replace(one.cases[0], label="hard")
    ready = {item.name: item.have(suite.Setting(torch.device("cpu"))) for item in one.entrants}
    (found,) = details.accuracy(one, family, ready, generator)
    assert found.candidate == "right"
    ours = suite.replace(one, entrants=(one.entrants[0], suite.replace(one.entrants[1], ours=True)))
    with pytest.raises(RuntimeError, match="no kernel image"):
        details.accuracy(ours, family, ready, generator)


# The suites


def test_the_collapses_rows_are_those_of_the_pull_request_and_more():
    for direction, found in zip(("forward", "backward"), collapse_peers.SUITES, strict=True):
        sizes = {(case.parameters["tokens"], case.parameters["hidden_size"]) for case in found.cases}
        assert found.direction == direction
        assert sizes == {(t, h) for t in (1, 8, 32, 128, 512, 1024, 8192) for h in (4096, 5120, 7168)}


def why_absent(one: suite.Entrant) -> str | None:
    try:
        one.have(CPU)
    except suite.AbsentError as absent:
        return str(absent)
    return None


@pytest.mark.parametrize(
    "found", [*collapse_peers.SUITES, *vdn_peers.SUITES], ids=lambda s: f"{s.operator} {s.direction}"
)
def test_every_candidate_is_there_or_says_why_not(found):
    for one in found.entrants:
        assert why_absent(one) is None or len(why_absent(one)) > 10
        assert one.what
        assert one.how
        assert len(one.bounds) == len(found.outputs)
    labels = [case.label for case in found.cases]
    assert len(set(labels)) == len(labels)
    assert {one.name for one in found.entrants if one.ours} >= {"jit_kernels fallback"}


def test_the_compiled_backward_is_autograds(generator):
    grad, residual, pre = (t.double() for t in collapse_peers.inputs_backward(64, generator, 3))
    right = suite.gradient_gold(gold, 1)(grad, residual, pre)
    for mine, exact in zip(collapse_peers.closed_form(grad, residual, pre), right, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-6)  # its upstream passes through float32


def test_an_operator_without_peers_runs_on_its_workload(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (found,) = suite.suites(OPERATORS["mhc_pre_h_aggregate"])
    assert [one.name for one in found.entrants] == ["jit_kernels", "jit_kernels fallback", "torch eager"]
    assert len(found.cases) == len(OPERATORS["mhc_pre_h_aggregate"].workload.samples)
    monkeypatch.undo()
    found = suite.replace(found, cases=found.cases[:1])
    monkeypatch.setattr(run, "suites", lambda operator: [found])
    document = run.Bench([OPERATORS["mhc_pre_h_aggregate"]], CPU).run()
    assert document.ok
    assert [timing.gate for timing in document.rows[0].timings] == ["passed", "passed"]


def test_condition_is_that_of_the_matrix_which_is_inverted():
    A = torch.diag_embed(torch.tensor([[0.0, 99.0], [1.0, 3.0], [0.0, 9.0]]))
    assert condition(A) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ([9.0, 1.0, 2.0, 9.0, 3.0, 5.0], {"launches": 2, "kernel": 5.5}),  # each 9 is the flush before a call
        ([9.0, 1.0, 9.0, 3.0, 5.0], {}),  # calls that differ
        ([9.0, 9.0], {}),
        ([], {}),
    ],
)
def test_launches_are_counted_without_the_flushs_own(monkeypatch, seen, found):
    monkeypatch.setattr(LaunchCounter, "_profile", lambda self, steps: [9.0] if len(steps) == 1 else seen)
    assert LaunchCounter().count([list, list]) == found


@pytest.mark.compiler
@pytest.mark.parametrize(
    "build", [ceilings.build, collapse_peers.build_one_block], ids=["ceilings", "one block a token"]
)
def test_the_benchmarks_own_kernels_compile_and_check_their_arguments(build, target):
    module = build(target).load()
    wrong = torch.zeros(3, 4, 8)
    call = module.read if build is ceilings.build else partial(module.forward, wrong)
    with pytest.raises(ValueError, match=r"expected .*got float32\[3, 4, 8\]"):
        call(wrong, wrong)


# The commands


def test_a_run_on_a_cpu_says_that_it_is_one(tmp_path):
    path = tmp_path / "out.json"
    result = cli.run("bench", "vdn_delta_factors", "--rows", "quick", "--device", "cpu", "--output", path, "--json")
    document = Document.model_validate_json(result.stdout)
    assert document == Document.read(path)
    assert document.ok
    assert document.complete
    assert document.timer == "cpu"
    assert "no GPU" in document.notes[0]
    assert {row.label for row in document.rows} == {"N=1 d=128"}
    assert {timing.candidate for timing in document.rows[0].timings} >= {"jit_kernels fallback", "torch chain"}
    missing = {one.name: one.reason for one in document.candidates if not one.present}
    assert {"jit_kernels fp64_tensor", "jit_kernels fp32", "cuSOLVERDx"} <= set(missing)
    assert all(missing.values())
    families = {(one.family, one.candidate): one for one in document.accuracy if one.direction == "forward"}
    hard = "correlated 0.98, beta 100"
    ours, chains = families[hard, "jit_kernels fallback"], families[hard, "torch chain"]
    assert ours.samples >= 64
    assert 1e4 < ours.cond < 1e6
    for output in "TJ":
        assert ours.median[output] <= ours.worst[output] < 1e-6 < chains.worst[output]
    assert "vdn_delta_factors forward N=1 d=128" in result.stderr


def test_a_red_gate_exits_1(monkeypatch):
    monkeypatch.setattr(
        run, "suites", lambda operator: [collapse_suite(entrant("wrong", lambda r, p: eager(r, p) * 2))]
    )
    result = cli.run("bench", "mhc_pre_h_aggregate", "--device", "cpu", code=1)
    assert "FAILED mhc_pre_h_aggregate forward T=3 H=64 wrong: out: error" in result.stdout


@contextmanager
def module_of(tmp_path, monkeypatch, text):
    (tmp_path / "stranger.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield


STRANGER = """
import torch
def inverse(A, B, alpha):
    P = torch.linalg.inv(torch.eye(A.shape[-1], dtype=A.dtype) + A)
    return alpha.unsqueeze(-1) * P, B @ P
def off(A, B, alpha):
    T, J = inverse(A, B, alpha)
    return T, J * (1 + 1e-5)
def flat(A, B, alpha):
    return A[0], B[0]
"""


def script(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(vdn_script.main, ["--device", "cpu", "--frames", "2", "--heads", "1", *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("inverse", 0, r"stranger:inverse +│ OK .*│ OK "),
        ("off", 1, r"stranger:off +│ OK .*│ FAIL .*1\.0\de-05"),
        ("flat", 1, r"stranger:flat +│ FAIL .*ValueError: expected \[2, 64, 64\]"),
    ],
)
def test_a_strangers_candidate_is_judged(tmp_path, monkeypatch, name, code, line):
    monkeypatch.setattr(vdn_script, "TIMED", 3)  # what its time is doesn't matter here
    with module_of(tmp_path, monkeypatch, STRANGER):
        output = script("--head-dim", "64", "--candidate", f"stranger:{name}", code=code)
    assert re.search(line, output), output
    assert re.search(r"jit_kernels fallback +│ OK .*│ OK ", output)
    assert "no GPU: times by a clock" in output
    assert "absent: jit_kernels fused: the tensors are on cpu" in output


def test_where_the_chain_misses_1e_6_no_worse_than_the_chain_is_ok():
    assert vdn_script.verdict(9e-7, 1e-8) == "OK"
    assert vdn_script.verdict(2e-6, 1e-8) == "FAIL"
    assert vdn_script.verdict(2e-6, 3e-6) == "OK"
    assert vdn_script.verdict(float("inf"), 3e-6) == "FAIL"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--candidate", "stranger"), "expected module:function"),
        (("--candidate", "no_such_module:f"), "No module named 'no_such_module'"),
        (("--candidate", "math:pi"), "pi is no function"),
        (("--family", "spectrum 1e3", "--tokens", "16"), "has its own tokens and betas"),
        (("--family", "no such"), "spectrum 1e3"),
    ],
)
def test_wrong_usage_of_the_script_is_told(arguments, says):
    assert says in script(*arguments, code=2)


@pytest.mark.gpu
@pytest.mark.compiler
def test_a_row_on_a_gpu_has_all_its_figures(cuda, monkeypatch):
    operator = OPERATORS["mhc_pre_h_aggregate"]
    one = collapse_suite(suite.fused(operator, bounds=EXACT), entrant("torch eager", eager))
    one = suite.replace(one, cases=(suite.replace(one.cases[0], detail=True, host=True),))
    monkeypatch.setattr(run, "suites", lambda operator: [one])
    document = run.Bench([operator], suite.Setting(cuda)).run()
    assert document.ok
    (row,) = document.rows
    assert row.floor_by == "empty_kernel"
    assert row.host_add.median > 0
    ours, theirs = row.timings
    assert (ours.launches, theirs.launches) == (1, 3)  # a product, a sum, a rounding
    for timing in row.timings:
        assert 0 < timing.kernel < 100
        assert 0 < timing.graph.median < timing.eager.median
        assert timing.host.median > 0
        assert timing.peak_bytes >= 3 * 64 * 2
    assert ours.graph.median < theirs.graph.median
    assert {ceiling.name for ceiling in document.ceilings} == {"copy", "read", "ffma", "fp64_tensor", "empty_kernel"}
    assert all(ceiling.value.median > 0 for ceiling in document.ceilings)
    assert document.first_calls[0].warm_milliseconds > 0
