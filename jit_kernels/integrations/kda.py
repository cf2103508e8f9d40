"""A request folder for the wish list of Kernel Design Agents (https://github.com/NVlabs/kda): README, definition,
workloads, baseline, and a benchmark that draws the inputs.

The definition and the workloads are those of `flashinfer_bench`. A request lives in somebody else's repository, so all
that it needs stands in it, and nothing of this package is imported.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from jit_kernels.integrations import flashinfer_bench, trace_sources
from jit_kernels.integrations.flashinfer_bench import TESTED, Case

_README = Template("""\
# Request: $name

$description

## Project and impact

$purpose

## Contract and baseline

$tensors
- Inputs are contiguous and not modified; the outputs are new.
- Reference: `definition.json`, in float64, rounded to the outputs' dtypes at the end.
- Baseline: `baseline.py`, $baseline: $source.
- Hardware: NVIDIA B200 or B300.
- Tolerance: each element within `rtol = $rtol` or `atol = $atol` of the reference: $reason.

## Workloads

| uuid | input | $axis |
|---|---|---|
$workloads

$origin

## Evaluate

With Python 3.10 or newer and a CUDA build of torch:

```bash
python -m pip install flashinfer-bench==$tested
python benchmark.py                         # the baseline
python benchmark.py --candidate kernel.py   # and another implementation of run($arguments)
```

`benchmark.py` draws the inputs, and runs flashinfer-bench on `definition.json`, `workloads.jsonl` and `baseline.py`: 10
warm-up runs, 50 timed ones, 3 trials. It prints one evaluation a line and exits with 1 unless all of them passed.
`speedup_factor` is over the float64 reference: compare a candidate's `latency_ms` with the baseline's.

## License

Apache-2.0.
""")

_BENCHMARK = Template('''\
# $license
"""Holds baseline.py, and a candidate, to definition.json on the inputs of workloads.jsonl. README.md says how."""

$makers


HERE = Path(__file__).resolve().parent

# The inputs that workloads.jsonl reads from files: the seed, and what draws them.
NAMES, STORED = $names, $stored
INPUTS = {
$inputs
}


def draw(folder: Path) -> None:
    for name, (seed, make) in INPUTS.items():
        made = dict(zip(NAMES, make(torch.Generator().manual_seed(seed)), strict=True))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({key: made[key].contiguous() for key in STORED}, folder / name)


def solution(definition: Definition, path: Path) -> Solution:
    return Solution(
        name=f"{definition.name}_{path.stem}",
        definition=definition.name,
        author=path.stem,
        spec=BuildSpec(
            language="python",
            target_hardware=["cuda"],
            entry_point="main.py::run",
            destination_passing_style=False,
        ),
        sources=[SourceFile(path="main.py", content=path.read_text())],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidate", type=Path, help="a Python file with run($arguments)")
    args = parser.parse_args()
    definition = Definition.model_validate_json((HERE / "definition.json").read_text())
    lines = (HERE / "workloads.jsonl").read_text().splitlines()
    workloads = [Trace.model_validate_json(line) for line in lines if line.strip()]
    files = [HERE / "baseline.py", *([args.candidate] if args.candidate else [])]
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder))
        data = TraceSet(
            root=Path(folder),
            definitions={definition.name: definition},
            workloads={definition.name: workloads},
            solutions={definition.name: [solution(definition, file) for file in files]},
        )
        benchmark = Benchmark(data, BenchmarkConfig(rtol=$rtol, atol=$atol))
        try:
            found = benchmark.run_all(dump_traces=False).traces.get(definition.name, [])
        finally:
            benchmark.close()
    for trace in found:
        print(trace.model_dump_json())
    return 0 if len(found) == len(workloads) * len(files) and all(trace.is_successful() for trace in found) else 1


if __name__ == "__main__":
    sys.exit(main())
''')

_IMPORTS = (
    "import argparse",
    "import sys",
    "import tempfile",
    "from pathlib import Path",
    "",
    "import torch",
    "from flashinfer_bench import Benchmark, BenchmarkConfig",
    "from flashinfer_bench.data import BuildSpec, Definition, Solution, SourceFile, Trace, TraceSet",
    "from safetensors.torch import save_file",
)


def export(folder: Path, found: Sequence[Case]) -> list[Path]:
    """Writes a request folder for each definition of these cases, and returns the files.

    Raises:
        ValueError: a sample's inputs are drawn by something that can't stand alone.
    """
    requests: dict[str, list[Case]] = {}
    for case in found:
        requests.setdefault(case.definition, []).append(case)
    written = []
    for name, cases in requests.items():
        for file, text in request(cases).items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written


def commands(folder: Path, found: Sequence[Case]) -> list[str]:
    """What runs the requests."""
    names = dict.fromkeys(case.definition for case in found)
    return [f"python {shlex.quote(str(folder / name / 'benchmark.py'))}" for name in names]


def request(cases: Sequence[Case]) -> dict[str, str]:
    """The files of one request, whose cases share a definition."""
    case = cases[0]
    names = tuple(case.inputs)
    lines = [json.dumps(flashinfer_bench.workload(case, _file(case))) for case in cases]
    return {
        "README.md": _readme(cases),
        "definition.json": json.dumps(flashinfer_bench.definition(case), indent=2) + "\n",
        "workloads.jsonl": "\n".join(lines) + "\n",
        "baseline.py": trace_sources.baseline(case.operator.workload.baseline, names),
        "benchmark.py": _benchmark(cases),
    }


def _readme(cases: Sequence[Case]) -> str:
    case = cases[0]
    trace, operator = case.trace, case.operator
    tensors = [
        f"- {kind} `{name}`: `[{', '.join(axes[name])}]` {str(tensor.dtype).removeprefix('torch.')}"
        for kind, axes, like in (("Input", trace.inputs, case.inputs), ("Output", trace.outputs, case.outputs))
        for name, tensor in like.items()
    ]
    sizes = [f"`{axis}` {size}" for axis, size in case.sizes.items()]
    rows = [f"| {one.uuid} | {one.sample.label} | {', '.join(map(str, one.axes.values()))} |" for one in cases]
    return _README.substitute(
        name=case.definition,
        description=trace.description,
        purpose=trace.purpose,
        tensors="\n".join([*tensors, f"- Axes: {', '.join(sizes)}; `{next(iter(case.axes))}` varies"]),
        baseline=operator.workload.baseline_name,
        source=trace.baseline_source,
        rtol=trace.rtol,
        atol=trace.atol,
        reason=trace.tolerance_reason,
        workloads="\n".join(rows),
        origin=_origin(case),
        axis=next(iter(case.axes)),
        tested=TESTED,
        arguments=", ".join(case.inputs),
    )


def _origin(case: Case) -> str:
    drawn = ", ".join(f"`{name}`" for name in case.stored)
    normal = ", ".join(f"`{name}`" for name in case.trace.normal)
    sentences = [f"`benchmark.py` draws {drawn} from a seed for each workload."] if drawn else []
    return " ".join([*sentences, *([f"flashinfer-bench draws {normal}: standard normal."] if normal else [])])


def _benchmark(cases: Sequence[Case]) -> str:
    case = cases[0]
    stored = cases if case.stored else ()
    return _BENCHMARK.substitute(
        license=trace_sources.LICENSE,
        makers=trace_sources.standalone(*(_maker(one).func for one in stored), imports=_IMPORTS).rstrip(),
        names=tuple(case.inputs),
        stored=case.stored,
        inputs="\n".join(
            f'    "{_file(one)}": (\n        {one.seed},\n        lambda generator: {_call(one)},\n    ),'
            for one in stored
        ),
        arguments=", ".join(case.inputs),
        rtol=case.trace.rtol,
        atol=case.trace.atol,
    )


def _maker(case: Case) -> partial[Any]:
    make = case.sample.make
    return make if isinstance(make, partial) else partial(make)


def _call(case: Case) -> str:
    """The expression that draws a case's inputs from ``generator``."""
    make = _maker(case)
    literals = (int, float, str, type(None))
    if not all(isinstance(value, literals) for value in (*make.args, *make.keywords.values())):
        raise ValueError(
            f"sample {case.sample.label!r} can't be written down: {make} has arguments that are no literals"
        )
    given = [*map(repr, make.args), "generator", str(case.sample.count)]
    return f"{make.func.__name__}({', '.join([*given, *(f'{key}={value!r}' for key, value in make.keywords.items())])})"


def _file(case: Case) -> str:
    """Where `benchmark.py` puts the drawn inputs, below a folder of its own."""
    return f"inputs/{case.uuid}.safetensors"
