"""FlashInfer-Bench: operators as a FlashInfer-Trace data set of definitions, workloads and solutions.

Everything is read from an operator's record, its ``WORKLOAD`` and its ``TRACE``, both in ``bench/<operator>.py``; no
operator is named here. flashinfer-bench itself isn't needed to write the data set, only to run it.
"""

from __future__ import annotations

import importlib
import json
import shlex
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from jit_kernels.checks.workload import Sample
from jit_kernels.dispatch import OPERATORS, Operator
from jit_kernels.integrations import trace_sources
from jit_kernels.jit.arch import Target
from jit_kernels.jit.source import Source

TESTED = "0.1.2"  # the release whose models and builders the data set is made for
AUTHOR = "jit-kernels"
_UUIDS = uuid.uuid5(uuid.NAMESPACE_DNS, AUTHOR)


@dataclass(frozen=True)
class Trace:
    """What a published definition says of an operator beyond its record and its workload."""

    definition: str  # its name, with the sizes that are fixed: "row_scale_d{head_dim}"
    op_type: str  # the kind of operator, and the data set's folder for it
    description: str
    axes: Mapping[str, str]  # each axis, and what it counts; the first one varies, the others are fixed
    inputs: Mapping[str, tuple[str, ...]]  # the axes of each tensor that a sample makes, by its name in the schema
    outputs: Mapping[str, tuple[str, ...]]
    entry: str  # the call of the kernel's host entry, by the export's name in the build: "forward(out, x, s)"
    atol: float  # an element passes within either of the two of the float64 reference
    rtol: float
    tolerance_reason: str
    purpose: str  # who runs the operator, on what, and what for
    baseline_source: str  # where what users run today comes from, and its license
    normal: tuple[str, ...] = ()  # inputs that are torch.randn in their dtype: the harness draws them itself
    samples: tuple[Sample, ...] = ()  # beyond those of the workload
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One sample of an operator, with its sizes."""

    operator: Operator
    trace: Trace
    sample: Sample
    sizes: Mapping[str, int]  # of the fixed axes
    inputs: Mapping[str, Tensor]  # of one row: they give the dtypes
    outputs: Mapping[str, Tensor]

    @property
    def definition(self) -> str:
        return self.trace.definition.format(**self.sizes)

    @property
    def axes(self) -> dict[str, int]:
        """The varying axis and its size."""
        return {next(iter(self.trace.axes)): self.sample.count}

    @property
    def place(self) -> str:
        """The folder below ``definitions``, ``workloads`` and so on."""
        return f"{self.trace.op_type}/{self.definition}"

    @property
    def uuid(self) -> str:
        return str(uuid.uuid5(_UUIDS, f"{self.definition} {self.sample.label}"))

    @property
    def seed(self) -> int:
        return zlib.crc32(f"{self.operator.name} {self.sample.label}".encode())

    @property
    def stored(self) -> tuple[str, ...]:
        """The inputs that come from a file."""
        return tuple(name for name in self.inputs if name not in self.trace.normal)

    @property
    def blob(self) -> str:
        """The file of the stored inputs, in the data set."""
        return f"blob/workloads/{self.place}/{self.definition}_{self.uuid}.safetensors"

    def make(self) -> dict[str, Tensor]:
        """The stored inputs, drawn on the CPU from the seed."""
        made = self.sample.make(torch.Generator().manual_seed(self.seed), self.sample.count)
        return {n: tensor.contiguous() for n, tensor in zip(self.inputs, made, strict=True) if n in self.stored}


def traced() -> tuple[Operator, ...]:
    """The operators whose ``bench/<operator>.py`` has a ``TRACE``."""
    return tuple(operator for operator in OPERATORS.values() if hasattr(_bench(operator), "TRACE"))


def cases(operator: Operator) -> list[Case]:
    """Every sample of an operator's workload and trace.

    Raises:
        ValueError: the operator has no ``TRACE``, or that doesn't fit what a sample makes.
    """
    trace: Trace | None = getattr(_bench(operator), "TRACE", None)
    if trace is None:
        having = ", ".join(other.name for other in traced())
        raise ValueError(
            f"{operator.name}: bench/{operator.name}.py has no TRACE to publish it by; these have: {having}"
        )
    found = []
    for sample in (*operator.workload.samples, *trace.samples):
        made = sample.make(torch.Generator().manual_seed(0), 1)
        out = operator.outputs(*operator.complete(made))
        inputs = dict(zip(operator.arguments, made, strict=False))
        outputs = dict(zip(operator.workload.outputs, out if isinstance(out, tuple) else (out,), strict=True))
        sizes: dict[str, int] = {}
        for known, tensors in ((trace.inputs, inputs), (trace.outputs, outputs)):
            for name, tensor in tensors.items():
                axes, shape = known.get(name, ()), tuple(tensor.shape)
                named = zip(axes, shape, strict=False)
                if len(axes) != len(shape) or any(sizes.setdefault(axis, size) != size for axis, size in named):
                    raise ValueError(
                        f"TRACE of {operator.name} gives {name} the axes {axes}; one row of sample {sample.label!r} "
                        f"has shape {list(shape)}, where {sizes}"
                    )
        del sizes[next(iter(trace.axes))]
        found.append(Case(operator, trace, sample, sizes, inputs, outputs))
    return found


def definition(case: Case) -> dict[str, Any]:
    """The definition. Its reference is the workload's float64 formula, rounded once at the end."""
    trace = case.trace
    variable, *fixed = trace.axes

    def tensors(axes: Mapping[str, tuple[str, ...]], like: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            name: {"shape": list(axes[name]), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in like.items()
        }

    return {
        "name": case.definition,
        "op_type": trace.op_type,
        "description": trace.description,
        "tags": list(trace.tags),
        "axes": {variable: {"type": "var", "description": trace.axes[variable]}}
        | {axis: {"type": "const", "value": case.sizes[axis], "description": trace.axes[axis]} for axis in fixed},
        "inputs": tensors(trace.inputs, case.inputs),
        "outputs": tensors(trace.outputs, case.outputs),
        "reference": trace_sources.reference(case.operator.workload.gold, tuple(case.inputs), case.outputs),
    }


def workload(case: Case, blob: str) -> dict[str, Any]:
    """One line of a workload file; ``blob`` is the path of the stored inputs as the harness is to read it."""
    stored = {name: {"type": "safetensors", "path": blob, "tensor_key": name} for name in case.stored}
    return {
        "definition": case.definition,
        "workload": {
            "uuid": case.uuid,
            "axes": case.axes,
            "inputs": {name: stored.get(name, {"type": "random"}) for name in case.inputs},
        },
        "solution": None,
        "evaluation": None,
    }


def solutions(case: Case, targets: Sequence[Target]) -> Iterator[dict[str, Any]]:
    """The kernels as CUDA sources with a tvm-ffi entry, one for each build that the targets need; the public op; and
    the baseline.

    Raises:
        ValueError: a build needs what a solution can't carry.
    """
    operator = case.operator

    def solution(kind: str, description: str, sources: dict[str, str], **spec: Any) -> dict[str, Any]:
        spec = {"language": "python", "target_hardware": ["cuda"], "destination_passing_style": False} | spec
        return {
            "name": f"{case.definition}_{kind}",
            "definition": case.definition,
            "author": AUTHOR,
            "description": description,
            "spec": {**spec, "entry_point": f"{next(iter(sources))}::run"},
            "sources": [{"path": path, "content": content} for path, content in sources.items()],
        }

    parameters = operator.parameters(*operator.complete(tuple(case.inputs.values())))
    builds: dict[Source, list[str]] = {}
    for target in targets:
        builds.setdefault(operator.build(target, *parameters).source, []).append(str(target))
    for source, hardware in builds.items():
        yield solution(
            "_".join(["cuda", *hardware]),
            f"The CUDA sources of jit_kernels.{operator.name}",
            trace_sources.cuda(source, case.trace.entry, (*case.inputs, *case.outputs)),
            language="cuda",
            binding="tvm-ffi",
            target_hardware=hardware,
            destination_passing_style=True,
        )
    yield solution(
        "python",
        f"jit_kernels.{operator.name} as its users call it; an error where the fused kernel can't run",
        {"main.py": trace_sources.public_op(operator.name, tuple(case.inputs))},
        dependencies=[AUTHOR],
    )
    yield solution(
        "baseline",
        f"{operator.workload.baseline_name}: {case.trace.baseline_source}",
        {"main.py": trace_sources.baseline(operator.workload.baseline, tuple(case.inputs))},
    )


def export(folder: Path, found: Sequence[Case], targets: Sequence[Target]) -> list[Path]:
    """Writes the definitions, workloads and solutions of these cases, and returns the files; no inputs yet."""
    files: dict[Path, str] = {}
    for case in found:
        lines = folder / "workloads" / f"{case.place}.jsonl"
        files[lines] = files.get(lines, "") + json.dumps(workload(case, case.blob)) + "\n"
        if (path := folder / "definitions" / f"{case.place}.json") not in files:
            files[path] = json.dumps(definition(case), indent=2) + "\n"
            for one in solutions(case, targets):
                path = folder / "solutions" / AUTHOR / case.place / f"{one['name']}.json"
                files[path] = json.dumps(one, indent=2) + "\n"
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def write_inputs(folder: Path, case: Case) -> Path | None:
    """Draws the stored inputs of a case into their file; None where it has none to store.

    Raises:
        ValueError: the package safetensors is missing.
    """
    if not case.stored:
        return None
    try:
        save = importlib.import_module("safetensors.torch").save
    except ImportError:
        raise ValueError("inputs are stored as safetensors: pip install safetensors, or use --no-inputs") from None
    path = folder / case.blob
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_bytes(save(case.make()))
    partial.replace(path)
    return path


def lacking(folder: Path, found: Sequence[Case]) -> list[Case]:
    """Those of the cases that stand in a data set without their inputs."""
    there = [case for case in found if (folder / "workloads" / f"{case.place}.jsonl").is_file()]
    return [case for case in there if case.stored and not (folder / case.blob).exists()]


def commands(folder: Path, found: Sequence[Case]) -> list[str]:
    """What runs the harness on a data set: a command for each pair of tolerances, which differ by operator."""
    definitions: dict[tuple[float, float], dict[str, None]] = {}
    for case in found:
        definitions.setdefault((case.trace.rtol, case.trace.atol), {})[case.definition] = None
    return [
        f"flashinfer-bench run --local {shlex.quote(str(folder))} --rtol {rtol} --atol {atol} "
        f"--definitions {' '.join(names)}"
        for (rtol, atol), names in definitions.items()
    ]


def results(folder: Path) -> list[dict[str, Any]]:
    """The evaluations that ``flashinfer-bench run`` left in a data set, in its own schema; logs of failed ones only."""
    found = []
    for file in sorted((folder / "traces").rglob("*.jsonl")):
        for line in filter(None, file.read_text(encoding="utf-8").splitlines()):
            one = json.loads(line)
            if passed(one):
                del one["evaluation"]["log"]
            found.append(one)
    return found


def passed(result: Mapping[str, Any]) -> bool:
    return result["evaluation"]["status"] == "PASSED"


def _bench(operator: Operator) -> ModuleType:
    return importlib.import_module(f"jit_kernels.bench.{operator.name}")
