"""Source text for a data set: Python and CUDA that run where this package isn't installed."""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from jit_kernels.jit.source import Source

LICENSE = "SPDX-License-Identifier: Apache-2.0"


def standalone(*functions: Callable[..., Any], imports: Sequence[str] = ()) -> str:
    """The functions, and the imports, constants and functions of their modules that they use; without type hints.

    Args:
        imports: Import lines that stand there in any case.

    Raises:
        ValueError: one is no plain ``def``, or uses something of its module that can't be written down.
    """
    needed = dict.fromkeys(imports)  # dicts, for their order
    constants: dict[str, None] = {}
    sources: dict[Callable[..., Any], str] = {}

    def add(function: Callable[..., Any]) -> None:
        if function in sources:
            return
        if not isinstance(function, FunctionType) or not function.__qualname__.isidentifier():
            raise ValueError(f"{function!r} can't stand alone: it must be a def at the top of a module")
        sources[function] = ""  # ends a recursion; its place is after what it uses
        tree = _Untyped().visit(ast.parse(inspect.getsource(function)))
        for name in (*_names_at_definition(tree), *_globals_used(function.__code__)):
            if name not in function.__globals__:
                continue  # a builtin
            value = function.__globals__[name]
            if isinstance(value, ModuleType):
                needed[f"import {value.__name__}" + f" as {name}" * (value.__name__ != name)] = None
            elif isinstance(value, FunctionType) and value.__module__ == function.__module__:
                add(value)
            elif isinstance(value, (int, float, str, tuple)):
                constants[f"{name} = {value!r}"] = None
            else:
                raise ValueError(
                    f"{function.__module__}.{function.__name__} can't stand alone: it uses {name}, which is neither "
                    f"a module, nor a number or a text, nor a function of its own module"
                )
        del sources[function]
        sources[function] = ast.unparse(tree)

    for function in functions:
        add(function)
    preamble = "\n\n".join(filter(None, ["\n".join(needed), "\n".join(constants)]))
    return "\n\n\n".join(filter(None, [preamble, *sources.values()])) + "\n"


class _Untyped(ast.NodeTransformer):
    """Drops type hints: their names may be anything."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return node.value and ast.copy_location(ast.Assign([node.target], node.value), node)


def _names_at_definition(module: ast.Module) -> Iterator[str]:
    """What the decorators and the defaults of a module's one function refer to."""
    (function,) = module.body
    assert isinstance(function, ast.FunctionDef)
    parts = (*function.decorator_list, *function.args.defaults, *filter(None, function.args.kw_defaults))
    return (node.id for part in parts for node in ast.walk(part) if isinstance(node, ast.Name))


def _globals_used(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_used(constant)


def reference(gold: Callable[..., Any], inputs: Sequence[str], outputs: Mapping[str, Tensor]) -> str:
    """A ``run`` that computes in float64 by ``gold``, and rounds once to the outputs' dtypes."""
    doubles = ", ".join(f"{name}.double()" for name in inputs)
    exact = ", ".join(outputs) if len(outputs) > 1 else f"({next(iter(outputs))},)"
    rounded = ", ".join(f"{name}.to({tensor.dtype})" for name, tensor in outputs.items())
    body = f"    {exact} = {gold.__name__}({doubles})\n    return {rounded}\n"
    return f"# {LICENSE}\n\n{standalone(gold, imports=['import torch'])}\n\ndef run({', '.join(inputs)}):\n{body}"


def baseline(function: Callable[..., Any], inputs: Sequence[str]) -> str:
    """A ``run`` that calls ``function``."""
    names = ", ".join(inputs)
    return f"# {LICENSE}\n\n{standalone(function)}\n\ndef run({names}):\n    return {function.__name__}({names})\n"


def public_op(name: str, inputs: Sequence[str]) -> str:
    """A ``run`` that calls this package's op, and fails where the fused kernel can't run."""
    names = ", ".join(inputs)
    body = f'    return {name}({names}, backend="fused")\n'
    return f"# {LICENSE}\n\nfrom jit_kernels import {name}\n\n\ndef run({names}):\n{body}"


def cuda(source: Source, entry: str, names: Sequence[str]) -> dict[str, str]:
    """``main.cu``, which exports ``run(*names)`` for tvm-ffi, and every file that it reaches, under the names by which
    they include each other.

    Args:
        entry: The call of the host entry, by its export's name: ``"forward(out, x, s)"``.

    Raises:
        ValueError: the entry names no export; or the build has what a solution can't carry.
    """
    if source.cpp_files or source.extra_cflags or source.extra_cuda_cflags or source.extra_ldflags:
        raise ValueError(f"{source.name} has C++ files or compiler flags of its own, which a solution can't carry")
    export, _, arguments = entry.partition("(")
    functions = dict(source.cuda_wrappers)
    if export not in functions:
        raise ValueError(f"entry {entry!r}: {source.name} exports {', '.join(functions)}")
    main = [
        f"// {LICENSE}",
        *("#include <tvm/ffi/container/tensor.h>", "#include <tvm/ffi/function.h>", ""),
        *(f'#include "{path.name}"' for path in source.cuda_files),
        *("", "namespace {", "using tvm::ffi::TensorView;", ""),
        "// The kernel's host entry, with the definition's arguments in their order: inputs, then outputs.",
        f"void run({', '.join(f'TensorView {name}' for name in names)}) {{",
        f"  {functions[export]}({arguments};",
        *("}", "}  // namespace", "", "TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);", ""),
    ]
    files = {name.partition(":/")[2]: path for name, (path, _) in source.scan().items()}
    texts = {name: Path(files[name]).read_text(encoding="utf-8") for name in sorted(files)}
    return {"main.cu": "\n".join(main), **texts}
