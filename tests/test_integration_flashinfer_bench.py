"""The operators as a FlashInfer-Trace data set and as wish-list requests, held to flashinfer-bench's own models,
builders and measure of error."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import cli
import pytest
import torch

from jit_kernels.checks.compare import same_bytes
from jit_kernels.checks.workload import Sample, Tolerance, Workload
from jit_kernels.dispatch import OPERATORS, SUPPORTED, Operator
from jit_kernels.integrations import flashinfer_bench as ours
from jit_kernels.integrations import kda, trace_sources
from jit_kernels.jit import toolchain
from jit_kernels.jit.arch import Target
from jit_kernels.jit.loader import kernel

TARGETS = (Target.parse("sm_90a"), Target.parse("sm_100a"))
MOST_ROWS = 33
CASES = [case for operator in ours.traced() for case in ours.cases(operator)]
FIRST = list({case.definition: case for case in CASES}.values())  # one a definition
SMALL = [
    replace(case, sample=replace(case.sample, count=min(case.sample.count, MOST_ROWS))) for case in CASES
]  # what a CPU computes in no time


def name_of(case: ours.Case) -> str:
    return f"{case.definition} {case.sample.label}"


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """flashinfer-bench itself, with a cache of its own."""
    if importlib.util.find_spec("flashinfer_bench") is None:
        pytest.skip(f"flashinfer-bench is missing: pip install --no-deps flashinfer-bench=={ours.TESTED}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FIB_CACHE_PATH", str(tmp_path_factory.mktemp("flashinfer_bench")))
        import flashinfer_bench.bench.utils
        import flashinfer_bench.compile

        yield flashinfer_bench


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The whole data set, with the inputs of the small cases."""
    made = tmp_path_factory.mktemp("data")
    ours.export(made, CASES, TARGETS)
    for case in SMALL:
        ours.write_inputs(made, case)
    return made


@pytest.fixture(scope="module")
def data(harness, folder):
    return harness.TraceSet.from_path(str(folder))


def runnable(harness, definition, kind: str, data):
    registry = harness.compile.BuilderRegistry.get_instance()
    if kind == "reference":
        return registry.build_reference(definition)
    return registry.build(definition, data.get_solution(f"{definition.name}_{kind}"))


def inputs_of(harness, definition, case: ours.Case, folder: Path, device: str = "cpu") -> list[torch.Tensor]:
    """A case's inputs as their harness makes them."""
    workload = harness.Workload.model_validate(ours.workload(case, case.blob)["workload"])
    utils = harness.bench.utils
    return utils.gen_inputs(definition, workload, device, utils.load_safetensors(definition, workload, folder))


def fails(harness, case: ours.Case, out, right) -> bool:
    """Whether their harness would call any of the outputs wrong."""
    config = harness.BenchmarkConfig(rtol=float(case.trace.rtol), atol=float(case.trace.atol))
    outputs = [t if isinstance(t, tuple) else (t,) for t in (out, right)]
    return any(harness.bench.utils.compute_error_stats(a, b, config)[2] for a, b in zip(*outputs, strict=True))


def test_their_models_accept_all_of_it(data):
    assert set(data.definitions) == {case.definition for case in CASES}
    for name, definition in data.definitions.items():
        mine = [case for case in CASES if case.definition == name]
        workloads = [trace.workload for trace in data.workloads[name]]
        assert [workload.axes for workload in workloads] == [case.axes for case in mine]
        assert len({workload.uuid for workload in workloads}) == len(mine)
        for workload in workloads:
            assert list(workload.inputs) == list(definition.inputs) == list(mine[0].inputs)
            assert list(workload.axes) == definition.var_axes
        built_for = [
            target
            for solution in data.solutions[name]
            if solution.spec.language == "cuda"
            for target in solution.spec.target_hardware
        ]
        assert sorted(built_for) == sorted(map(str, TARGETS))
        kinds = [solution.spec.language.value for solution in data.solutions[name]]
        assert kinds.count("python") == 2


def test_the_sizes_that_users_run_are_there():
    def mine(name: str) -> list[ours.Case]:
        return [case for case in CASES if case.operator.name == name]

    assert {case.sample.count for case in mine("vdn_delta_factors")} >= {7, 707, 1414}
    for hidden_size in (4096, 7168):
        sized = [case for case in mine("mhc_pre_h_aggregate") if case.sizes["hidden_size"] == hidden_size]
        assert {case.sample.count for case in sized} >= {1, 8, 32, 128, 129, 512, 1024}


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_reference_baseline_and_op_agree_in_their_measure(case, harness, data, folder):
    definition = data.definitions[case.definition]
    inputs = inputs_of(harness, definition, case, folder)
    right = runnable(harness, definition, "reference", data)(*inputs)
    assert not fails(harness, case, runnable(harness, definition, "baseline", data)(*inputs), right)
    # The fallback computes by a way of its own, and is itself held to float64.
    assert not fails(harness, case, case.operator(*inputs, backend="torch"), right)


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_their_measure_sees_less_precision(case, harness, data, folder):
    """Ten bits of mantissa, as TF32 has: the tolerance is there to refuse just that."""
    definition = data.definitions[case.definition]
    inputs = inputs_of(harness, definition, case, folder)
    reference = runnable(harness, definition, "reference", data)
    coarse = [
        (((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)) if t.dtype == torch.float32 else t
        for t in inputs
    ]
    assert fails(harness, case, reference(*coarse), reference(*inputs))


@pytest.mark.parametrize("case", FIRST, ids=name_of)
def test_the_python_solution_is_the_fused_kernel_or_an_error(case, harness, data):
    function = runnable(harness, data.definitions[case.definition], "python", data)
    inputs = tuple(case.inputs.values())
    if not torch.cuda.is_available():
        with pytest.raises(Exception, match="the fused kernel runs on CUDA devices"):
            function(*inputs)
        return
    on = [tensor.cuda() for tensor in inputs]
    assert same_bytes(as_tuple(function(*on)), as_tuple(case.operator(*on, backend="fused")))


def as_tuple(out):
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.compiler
@pytest.mark.parametrize("case", {case.operator.name: case for case in FIRST}.values(), ids=name_of)
def test_their_builder_compiles_the_sources(case, harness, data, monkeypatch, target):
    """With its own flags and nothing of this package's: a solution carries no flags."""
    found = toolchain.find(None, toolchain.Probe())
    monkeypatch.setenv("CUDA_HOME", str(found.root))
    monkeypatch.setenv("LIBRARY_PATH", str(found.library_dir))  # of wheels, where there is no lib64
    monkeypatch.setenv("PATH", str(toolchain.ninja().parent), prepend=":")
    # On sm_90 what it would find by itself, without the suffix; the float32 build for later chips needs theirs.
    suffix = "" if target.major == 9 else target.suffix
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", f"{target.major}.{target.minor}{suffix}")
    (solution,) = (
        solution for solution in data.solutions[case.definition] if str(target) in solution.spec.target_hardware
    )
    definition = data.definitions[case.definition]
    built = harness.compile.BuilderRegistry.get_instance().build(definition, solution)
    inputs = tuple(case.inputs.values())
    if not torch.cuda.is_available():
        # The kernel's own check of the device answers: the entry is there, and takes the definition's tensors.
        with pytest.raises(Exception, match="expected a CUDA tensor"):
            built(*inputs, *case.outputs.values())
        return
    on = [tensor.cuda() for tensor in inputs]
    assert same_bytes(as_tuple(built.call_value_returning(*on)), as_tuple(case.operator(*on, backend="fused")))


@pytest.mark.gpu
def test_their_command_passes_all_solutions(harness, folder, tmp_path, target):
    small = tmp_path / "small"
    ours.export(small, SMALL, [target])
    for case in SMALL:
        ours.write_inputs(small, case)
    for command in ours.commands(small, SMALL):
        _, *arguments = shlex.split(command)
        code = "from flashinfer_bench.cli.main import cli; cli()"
        options = ["--warmup-runs", "1", "--iterations", "1", "--num-trials", "1"]
        subprocess.run([sys.executable, "-c", code, *arguments, *options], check=True, timeout=600)
    assert [one["solution"] for one in ours.results(small) if not ours.passed(one)] == []
    assert len(ours.results(small)) == 3 * len(SMALL)


def test_the_same_bytes_each_time(folder, tmp_path):
    ours.export(tmp_path, CASES, TARGETS)
    drawn = [ours.write_inputs(tmp_path, case) for case in SMALL]
    files = [path.relative_to(tmp_path) for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert {tmp_path / name for name in files} >= set(drawn)
    assert files == [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    for name in files:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


def test_without_safetensors_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ValueError, match="pip install safetensors, or use --no-inputs"):
        ours.write_inputs(tmp_path, SMALL[0])
    assert not list(tmp_path.iterdir())


# ---- requests for the wish list


@pytest.fixture(scope="module")
def requests(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("requests")
    kda.export(made, CASES)
    return made


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"request_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", FIRST, ids=name_of)
def test_a_request_holds_what_the_wish_list_asks_for(case, requests, harness):
    request = requests / case.definition
    names = {"README.md", "baseline.py", "benchmark.py", "definition.json", "workloads.jsonl"}
    assert {path.name for path in request.iterdir()} == names
    definition = harness.Definition.model_validate_json((request / "definition.json").read_text())
    lines = (request / "workloads.jsonl").read_text().splitlines()
    traces = [harness.Trace.model_validate_json(line) for line in lines]
    assert {trace.definition for trace in traces} == {definition.name}
    assert [trace.workload.axes for trace in traces] == [c.axes for c in CASES if c.definition == case.definition]
    readme = (request / "README.md").read_text()
    assert "$" not in readme
    for name in (*case.inputs, *case.outputs, *(trace.workload.uuid for trace in traces)):
        assert name in readme


@pytest.mark.parametrize("case", FIRST, ids=name_of)
def test_a_request_s_baseline_is_the_workload_s(case, requests):
    inputs = tuple(case.inputs.values())
    theirs = load(requests / case.definition / "baseline.py").run(*inputs)
    assert same_bytes(as_tuple(theirs), as_tuple(case.operator.workload.baseline(*inputs)))


@pytest.mark.parametrize("case", [case for case in CASES if case.sample.count <= MOST_ROWS], ids=name_of)
def test_a_request_draws_the_data_set_s_inputs(case, requests, harness):
    benchmark = load(requests / case.definition / "benchmark.py")
    seed, make = benchmark.INPUTS[f"inputs/{case.uuid}.safetensors"]
    made = dict(zip(benchmark.NAMES, make(torch.Generator().manual_seed(seed)), strict=True))
    right = case.make()
    assert benchmark.STORED == tuple(right)
    assert same_bytes([made[name] for name in right], list(right.values()))


@pytest.mark.gpu
def test_a_request_s_benchmark_passes(requests, harness, tmp_path):
    case = min(CASES, key=lambda case: case.sample.count)
    candidate = tmp_path / "candidate.py"
    candidate.write_text(trace_sources.public_op(case.operator.name, tuple(case.inputs)))
    command = [sys.executable, "benchmark.py", "--candidate", str(candidate)]
    found = subprocess.run(command, cwd=requests / case.definition, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr


# ---- an operator that the exporter has never seen

ROW_SCALE = """
#include <jit_kernels/tensor.cuh>

namespace row_scale {
inline void forward(jit_kernels::TensorView out, jit_kernels::TensorView x, jit_kernels::TensorView s) {}
}
"""


def make_rows(width: int, generator: torch.Generator, count: int):
    return torch.randn(count, width, generator=generator), torch.rand(count, generator=generator)


def scale_rows(x, s):
    return (x * s.unsqueeze(-1),)


@pytest.fixture(scope="module")
def unseen(tmp_path_factory) -> Operator:
    source = tmp_path_factory.mktemp("csrc") / "row_scale.cuh"
    source.write_text(ROW_SCALE)
    return Operator(
        name="row_scale",
        schema="(Tensor x, Tensor s) -> Tensor",
        validate=lambda x, s: None,
        supports=lambda x, s: SUPPORTED,
        outputs=lambda x, s: torch.empty_like(x),
        build=lambda target: kernel(
            "row_scale", cuda_files=[source], cuda_wrappers=[("forward", "row_scale::forward")], target=target
        ),
        fused=lambda x, s: scale_rows(x, s)[0],
        fallback=lambda x, s: scale_rows(x, s)[0],
        public=False,
    )


@pytest.fixture
def row_scale(unseen, monkeypatch) -> Operator:
    bench = ModuleType("jit_kernels.bench.row_scale")
    bench.WORKLOAD = Workload(  # type: ignore[attr-defined]
        samples=(Sample("wide", partial(make_rows, 16), count=3, cpu_count=3),),
        gold=scale_rows,
        baseline=scale_rows,
        baseline_name="torch",
        outputs={"out": Tolerance(norm=1e-6, reason="one product")},
        gradients={},
        bitwise_fallback=True,
    )
    bench.TRACE = ours.Trace(  # type: ignore[attr-defined]
        definition="row_scale_d{width}",
        op_type="scale",
        description="Rows times numbers.",
        axes={"rows": "rows", "width": "width"},
        inputs={"x": ("rows", "width"), "s": ("rows",)},
        outputs={"out": ("rows", "width")},
        entry="forward(out, x, s)",
        atol=1e-6,
        rtol=1e-6,
        tolerance_reason="one rounding",
        purpose="None.",
        baseline_source="this test",
        normal=("x", "s"),
    )
    monkeypatch.setitem(sys.modules, bench.__name__, bench)
    return unseen


def test_a_third_operator_needs_no_edit_here(row_scale, harness, tmp_path):
    (case,) = ours.cases(row_scale)
    ours.export(tmp_path, [case], TARGETS)
    assert ours.write_inputs(tmp_path, case) is None
    data = harness.TraceSet.from_path(str(tmp_path))
    definition = data.definitions["row_scale_d16"]
    assert definition.const_axes == {"width": 16}
    solution = data.get_solution("row_scale_d16_cuda_sm_90a_sm_100a")
    assert [file.path for file in solution.sources] == ["main.cu", "jit_kernels/tensor.cuh", "row_scale.cuh"]
    inputs = inputs_of(harness, definition, case, tmp_path)
    reference = runnable(harness, definition, "reference", data)
    assert torch.equal(reference(*inputs), scale_rows(*inputs)[0])
    files = kda.request([case])
    compile(files["benchmark.py"], "benchmark.py", "exec")


def change(operator: Operator, **values) -> None:
    bench = sys.modules[f"jit_kernels.bench.{operator.name}"]
    bench.TRACE = replace(bench.TRACE, **values)  # type: ignore[attr-defined]


def test_without_a_trace_the_error_names_the_file(row_scale):
    del sys.modules["jit_kernels.bench.row_scale"].TRACE  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"bench/row_scale\.py has no TRACE.*these have: .*vdn_delta_factors"):
        ours.cases(row_scale)


@pytest.mark.parametrize("axes", [("rows",), ("rows", "rows"), ("rows", "width", "width")])
def test_axes_that_do_not_fit_the_tensors_are_refused(row_scale, axes):
    change(row_scale, inputs={"x": axes, "s": ("rows",)})
    with pytest.raises(ValueError, match=r"TRACE of row_scale gives x the axes .*'wide' has shape \[1, 16\]"):
        ours.cases(row_scale)


def test_an_entry_that_is_no_export_is_refused(row_scale, tmp_path):
    change(row_scale, entry="run(out, x, s)")
    with pytest.raises(ValueError, match=r"entry 'run\(out, x, s\)': row_scale exports forward"):
        ours.export(tmp_path, ours.cases(row_scale), TARGETS)


def test_a_build_with_flags_is_refused(unseen):
    source = replace(unseen.build(TARGETS[0]).source, extra_cuda_cflags=("-G",))
    with pytest.raises(ValueError, match="compiler flags of its own, which a solution can't carry"):
        trace_sources.cuda(source, "forward(out, x, s)", ("x", "s", "out"))


def test_a_sample_that_cannot_be_written_down_is_refused(row_scale):
    change(row_scale, normal=())
    (case,) = ours.cases(row_scale)
    odd = replace(case.sample, make=partial(make_rows, torch.tensor(16)))
    with pytest.raises(ValueError, match="arguments that are no literals"):
        kda.request([replace(case, sample=odd)])


# ---- source text that stands alone

LIMIT = 3
STEP = 5
UNWRITABLE = object()


def helper(n: int) -> int:
    return n if n <= 0 else helper(n - 1) + LIMIT


def uses_helpers(n: int, *rest: int, step: int = STEP) -> list[int]:
    total: int = step
    total += helper(n)
    return [torch.tensor(total + helper(i) + len(rest)).item() for i in range(n)]


def uses_something_else():
    return UNWRITABLE


def test_a_function_stands_alone_with_all_it_uses():
    text = trace_sources.standalone(uses_helpers)
    found: dict = {}
    exec(text, found)
    assert found["uses_helpers"](4, 1) == uses_helpers(4, 1)
    assert text.count("def helper") == 1
    assert "UNWRITABLE" not in text


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: 1, "must be a def at the top of a module"),
        (partial(helper, 1), "must be a def at the top of a module"),
        (uses_something_else, "uses UNWRITABLE, which is neither a module"),
    ],
)
def test_what_cannot_stand_alone_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        trace_sources.standalone(function)


# ---- the command


run = partial(cli.run, "trace")


def test_export_lists_its_files_and_refuses_a_folder_in_use(tmp_path):
    folder = tmp_path / "data"
    found = json.loads(run("export", folder, "mhc_pre_h_aggregate", "--no-inputs", "--json").stdout)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found["files"] == files
    assert {name.split("/")[0] for name in files} == {"definitions", "solutions", "workloads"}
    assert all(tolerance["reason"] for tolerance in found["definitions"].values())
    (command,) = found["commands"]
    assert f"--local {folder} --rtol 0.0078125" in command
    assert command.endswith("--definitions mhc_pre_h_aggregate_h4096 mhc_pre_h_aggregate_h7168")

    text = (folder / files[0]).read_text()
    (folder / files[0]).write_text("changed")
    (folder / "mine").write_text("kept")
    refused = run("export", folder, "mhc_pre_h_aggregate", "--no-inputs", code=2)
    assert "is not empty" in refused.output
    assert "--force" in refused.output
    assert (folder / files[0]).read_text() == "changed"
    run("export", folder, "mhc_pre_h_aggregate", "--no-inputs", "--force")
    assert (folder / files[0]).read_text() == text
    assert (folder / "mine").read_text() == "kept"


def test_inputs_come_with_the_export_or_later(tmp_path, row_scale, monkeypatch):
    change(row_scale, normal=("x",))
    monkeypatch.setitem(OPERATORS, row_scale.name, row_scale)
    run("export", tmp_path / "now", "row_scale")
    run("export", tmp_path / "later", "row_scale", "--no-inputs")
    (now,) = (tmp_path / "now").rglob("*.safetensors")
    assert not list((tmp_path / "later").rglob("*.safetensors"))
    assert run("inputs", tmp_path / "later").stdout.split() == [str(now.relative_to(tmp_path / "now"))]  # no other's
    assert "nothing is lacking" in run("inputs", tmp_path / "later").stdout
    (later,) = (tmp_path / "later").rglob("*.safetensors")
    assert later.read_bytes() == now.read_bytes()
    assert "no exported data set" in run("inputs", tmp_path, "row_scale", code=2).output


def test_arch_chooses_the_cuda_solutions(tmp_path):
    run("export", tmp_path, "vdn_delta_factors", "--no-inputs", "--arch", "sm_100a")
    names = {path.stem for path in (tmp_path / "solutions").rglob("*.json")}
    assert {name for name in names if "_cuda_" in name} == {"vdn_delta_factors_d128_cuda_sm_100a"}


def test_the_kda_layout_is_a_folder_a_definition(tmp_path):
    run("export", tmp_path, "--layout", "kda")
    assert {path.name for path in tmp_path.iterdir()} == {case.definition for case in CASES}


@pytest.mark.parametrize(("status", "code"), [("PASSED", 0), ("INCORRECT_NUMERICAL", 1)])
def test_report_reads_their_traces(status, code, harness, folder, tmp_path):
    case = FIRST[0]
    data = harness.TraceSet(
        root=tmp_path, definitions={case.definition: harness.Definition.model_validate(ours.definition(case))}
    )
    evaluation = harness.Evaluation(
        status=status,
        environment=harness.Environment(hardware="NVIDIA H200"),
        timestamp="now",
        log="[what the worker said]",
        correctness=harness.Correctness(max_relative_error=float("nan"), max_absolute_error=0.25),
        performance=harness.Performance(latency_ms=0.5, reference_latency_ms=2.0) if code == 0 else None,
    )
    workload = harness.Workload.model_validate(ours.workload(case, case.blob)["workload"])
    data.add_traces(
        [harness.Trace(definition=case.definition, workload=workload, solution="mine", evaluation=evaluation)]
    )
    printed = run("report", tmp_path, code=code).stdout
    assert status in printed
    assert "NVIDIA H200" in printed
    assert ("[what the worker said]" in printed) == (code == 1)
    found = json.loads(run("report", tmp_path, "--json", code=code).stdout)
    assert found["ok"] == (code == 0)
    assert found["evaluations"][0]["evaluation"]["correctness"]["max_absolute_error"] == 0.25
    assert ("log" in found["evaluations"][0]["evaluation"]) == (code == 1)


def test_report_without_evaluations_says_how_to_get_them(tmp_path):
    assert "flashinfer-bench run --local" in run("report", tmp_path, code=2).output
