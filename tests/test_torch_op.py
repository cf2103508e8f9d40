"""The operators as torch sees them: every transform, mode and compiler gets the right answer or a clear error."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import jit_kernels
from jit_kernels import UnsupportedError, mhc_pre_h_aggregate, use_backend, vdn_delta_factors

OPS: dict[str, Callable] = {"mhc_pre_h_aggregate": mhc_pre_h_aggregate, "vdn_delta_factors": vdn_delta_factors}
each_op = pytest.mark.parametrize("name", OPS)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own use of it


def collapse_inputs(tokens: int = 3, dtype=torch.bfloat16, hidden: int = 24) -> tuple[Tensor, ...]:
    weights = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(tokens, 4, hidden).to(dtype), torch.rand(tokens, 4, dtype=weights)


def factor_inputs(count: int = 3, dtype=torch.float32, d: int = 8) -> tuple[Tensor, ...]:
    root = torch.randn(count, d, d, dtype=dtype)
    return root @ root.mT / d, torch.randn(count, d, d, dtype=dtype), torch.rand(count, d, dtype=dtype)


def inputs(name: str, count: int = 3, dtype=None) -> tuple[Tensor, ...]:
    make = collapse_inputs if name == "mhc_pre_h_aggregate" else factor_inputs
    return make(count) if dtype is None else make(count, dtype)


def torch_op(name: str):
    return getattr(torch.ops.jit_kernels, name).default


def outputs(result) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def assert_same(result, expected) -> None:
    for one, other in zip(outputs(result), outputs(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def needing_grad(tensors: tuple[Tensor, ...], which=None) -> tuple[Tensor, ...]:
    return tuple(
        tensor.detach().clone().requires_grad_(which is None or index in which) for index, tensor in enumerate(tensors)
    )


def loss(result) -> Tensor:
    """Depends on every element of every output, each with its own weight."""
    return sum((out.double() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in outputs(result))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return sum(func is torch_op(name) for func, _, _ in self.calls)


# opcheck

COLLAPSE, FACTORS = collapse_inputs(), factor_inputs()
CALLS = {
    "collapse": ("mhc_pre_h_aggregate", COLLAPSE, {}),
    "collapse with gradients": ("mhc_pre_h_aggregate", needing_grad(COLLAPSE), {}),
    "collapse, pre's gradient": ("mhc_pre_h_aggregate", needing_grad(COLLAPSE, {1}), {}),
    "collapse in float64": ("mhc_pre_h_aggregate", needing_grad(collapse_inputs(dtype=torch.float64)), {}),
    "collapse of nothing": ("mhc_pre_h_aggregate", needing_grad(collapse_inputs(0)), {}),
    "collapse of strided": ("mhc_pre_h_aggregate", (COLLAPSE[0][..., ::2], COLLAPSE[1].T.contiguous().T), {}),
    "collapse of one token": ("mhc_pre_h_aggregate", (COLLAPSE[0][0], COLLAPSE[1][0]), {}),
    "collapse by torch": ("mhc_pre_h_aggregate", needing_grad(COLLAPSE), {"backend": "torch"}),
    "collapse backward": ("mhc_pre_h_aggregate_backward", (COLLAPSE[0][:, 0], *COLLAPSE, [True, True]), {}),
    "half of it": ("mhc_pre_h_aggregate_backward", (COLLAPSE[0][:, 0], *COLLAPSE, [False, True]), {}),
    "collapse backward in float32": (
        "mhc_pre_h_aggregate_backward",
        (COLLAPSE[0][:, 0], *COLLAPSE, [True, False]),
        {"grad_residual_dtype": torch.float32},
    ),
    "factors": ("vdn_delta_factors", FACTORS, {}),
    "factors with gradients": ("vdn_delta_factors", needing_grad(FACTORS), {}),
    "factors, alpha's gradient": ("vdn_delta_factors", needing_grad(FACTORS, {2}), {}),
    "factors of nothing": ("vdn_delta_factors", needing_grad(factor_inputs(0)), {}),
    "factors of transposed": ("vdn_delta_factors", tuple(tensor.mT for tensor in FACTORS[:2]) + FACTORS[2:], {}),
    "factors of one matrix": ("vdn_delta_factors", tuple(tensor[0] for tensor in FACTORS), {}),
    "factors with options": ("vdn_delta_factors", needing_grad(FACTORS), {"a_scale": 0.5, "b_scale": 0.25}),
    "factors backward": ("vdn_delta_factors_backward", (*FACTORS[1::-1], *FACTORS, 0.5, 0.25, [True] * 3), {}),
    "a third of it": ("vdn_delta_factors_backward", (*FACTORS[1::-1], *FACTORS, 1.0, 1.0, [False, True, False]), {}),
    "factors into buffers": ("vdn_delta_factors_out", (*FACTORS, *(torch.empty_like(FACTORS[0]) for _ in "TJ")), {}),
}


@pytest.mark.parametrize("call", CALLS)
def test_opcheck(call):
    name, args, options = CALLS[call]
    torch.library.opcheck(torch_op(name), copy.deepcopy(args), options)


# Compilers and tracers


@each_op
@pytest.mark.parametrize("grad", [False, True])
def test_compile_in_one_graph_and_not_again_for_another_count(name, grad):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(OPS[name], fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for count in (2, 3, 17, 129):
        given = inputs(name, count)
        first, second = (needing_grad(given), needing_grad(given)) if grad else (given, given)
        result, expected = compiled(*first), OPS[name](*second)
        assert_same(result, expected)
        if grad:
            loss(result).backward()
            loss(expected).backward()
            assert_same([tensor.grad for tensor in first], [tensor.grad for tensor in second])
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1  # dynamo itself may begin the first one twice


@each_op
def test_compile_learns_that_the_count_varies(name):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(OPS[name], fullgraph=True, backend=counter)
    for count in (5, 3, 17, 129, 64):
        given = inputs(name, count)
        assert_same(compiled(*given), OPS[name](*given))
    assert counter.frame_count <= 2


@pytest.mark.skipif(not shutil.which("c++") and not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_compile_through_inductor():
    torch._dynamo.reset()

    def block(residual, pre):
        return mhc_pre_h_aggregate(residual * 2, pre + 1).float().relu()

    assert_same(torch.compile(block, fullgraph=True, dynamic=True)(*COLLAPSE), block(*COLLAPSE))


def test_compile_of_the_form_that_writes_to_buffers():
    torch._dynamo.reset()
    T, J = (torch.full_like(FACTORS[0], float("nan")) for _ in "TJ")
    compiled = torch.compile(vdn_delta_factors, fullgraph=True, backend="aot_eager")
    result = compiled(*FACTORS, out=(T, J))
    assert_same((T, J), vdn_delta_factors(*FACTORS))
    assert_same(result, (T, J))


def test_a_compiled_call_takes_the_ambient_backend_of_its_run():
    torch._dynamo.reset()
    compiled = torch.compile(mhc_pre_h_aggregate, fullgraph=True, backend="aot_eager")
    expected = mhc_pre_h_aggregate(*COLLAPSE)
    assert_same(compiled(*COLLAPSE), expected)
    with use_backend("fused"), pytest.raises(UnsupportedError, match="on cpu"):
        compiled(*COLLAPSE)
    with use_backend("torch"):
        assert_same(compiled(*COLLAPSE), expected)


def test_the_context_manager_inside_a_compiled_function_counts():
    torch._dynamo.reset()

    def function(residual, pre):
        with use_backend("fused"):
            return mhc_pre_h_aggregate(residual, pre)

    with pytest.raises(UnsupportedError):
        torch.compile(function, backend="eager")(*COLLAPSE)


def test_a_compiled_call_keeps_the_backend_it_names():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: mhc_pre_h_aggregate(*args, backend="torch"), fullgraph=True, backend="eager")
    with use_backend("fused"):
        assert_same(compiled(*COLLAPSE), mhc_pre_h_aggregate(*COLLAPSE, backend="torch"))


@each_op
def test_compile_shows_why_wrong_input_is_wrong(name):
    torch._dynamo.reset()
    compiled = torch.compile(OPS[name], fullgraph=True, backend="eager")
    given = inputs(name)
    with pytest.raises(Exception, match=r"must .*; got .*\[2, "):
        compiled(*given[:-1], given[-1][:2])


@each_op
def test_export_with_a_dynamic_count(name):
    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return OPS[name](*tensors)

    given = inputs(name, 5)
    count = torch.export.Dim("count", min=2)
    shapes = {"tensors": tuple({0: count} for _ in given)}
    program = torch.export.export(Module(), given, dynamic_shapes=shapes)
    assert [node.target for node in program.graph.nodes].count(torch_op(name)) == 1
    for other in (2, 5, 33):
        given = inputs(name, other)
        assert_same(program.module()(*given), OPS[name](*given))


@each_op
def test_make_fx_records_the_op(name):
    given = inputs(name)
    graph = make_fx(lambda *tensors: OPS[name](*tensors), tracing_mode="symbolic")(*given)
    assert [node.target for node in graph.graph.nodes].count(torch_op(name)) == 1
    assert_same(graph(*given), OPS[name](*given))


@each_op
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_records_the_op(name):
    given = inputs(name)
    traced = torch.jit.trace(lambda *tensors: OPS[name](*tensors), given)
    assert f"jit_kernels::{name}" in str(traced.graph)
    other = inputs(name)
    assert_same(traced(*other), OPS[name](*other))


# Modes, subclasses, tensors without data


@each_op
def test_fake_tensors_give_shapes_of_any_device(name):
    expected = outputs(OPS[name](*inputs(name)))
    with FakeTensorMode() as mode:
        for device in ("cpu", "cuda"):
            given = tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in inputs_shapes(name))
            for out, right in zip(outputs(OPS[name](*given)), expected, strict=True):
                assert (out.shape, out.dtype, out.stride()) == (right.shape, right.dtype, right.stride())
                assert out.device.type == device
                assert out.fake_mode is mode


def inputs_shapes(name: str) -> tuple[Tensor, ...]:
    shapes = {
        "mhc_pre_h_aggregate": (((3, 4, 24), torch.bfloat16), ((3, 4), torch.float32)),
        "vdn_delta_factors": (((3, 8, 8), torch.float32), ((3, 8, 8), torch.float32), ((3, 8), torch.float32)),
    }
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes[name])


@each_op
def test_meta_tensors_give_shapes(name):
    for out, right in zip(outputs(OPS[name](*inputs_shapes(name))), outputs(OPS[name](*inputs(name))), strict=True):
        assert (out.shape, out.dtype, out.device.type) == (right.shape, right.dtype, "meta")


@each_op
@pytest.mark.parametrize("grad", [False, True])
def test_a_dispatch_mode_sees_the_op_once(name, grad):
    given = needing_grad(inputs(name)) if grad else inputs(name)
    with Seen() as seen:
        result = OPS[name](*given)
        if grad:
            loss(result).backward()
    assert seen.count(name) == 1
    assert seen.count(f"{name}_backward") == grad


@each_op
def test_a_function_mode_sees_the_op(name):
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    given = inputs(name)
    with Mode():
        OPS[name](*given)
    assert torch_op(name) in seen


class Wrapper(Tensor):
    """Holds a plain tensor, and logs what is done to it."""

    log: list = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, plain):
        return Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype, device=plain.device)

    def __init__(self, plain):
        self.plain = plain

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.log.append(func)
        unwrapped = [arg.plain if isinstance(arg, cls) else arg for arg in args]
        result = func(*unwrapped, **(kwargs or {}))
        return cls(result) if isinstance(result, Tensor) else tuple(map(cls, result))


@each_op
@pytest.mark.parametrize("which", [0, -1])
def test_a_tensor_subclass_goes_through_the_dispatcher(name, which):
    given = list(inputs(name))
    expected = OPS[name](*given)
    given[which] = Wrapper(given[which])
    Wrapper.log.clear()
    result = OPS[name](*given)
    assert torch_op(name) in Wrapper.log
    assert all(isinstance(out, Wrapper) for out in outputs(result))
    assert_same([out.plain for out in outputs(result)], expected)


@each_op
def test_a_subclass_that_only_names_its_tensors_keeps_its_name(name):
    class Named(Tensor):
        pass

    given = [tensor.as_subclass(Named) for tensor in inputs(name)]
    assert all(isinstance(out, Named) for out in outputs(OPS[name](*given)))


@each_op
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_sign_that_torch_keeps_beside_the_memory_counts(name, device):
    """As in the imaginary part of a conjugated tensor, which is a view of the memory with the other sign."""
    right = [tensor.to(device) for tensor in (collapse_inputs() if name.startswith("mhc") else factor_inputs(d=64))]
    watched = list(right)
    watched[1] = torch._neg_view(-right[1])
    assert watched[1].is_neg()
    assert_same(OPS[name](*watched), OPS[name](*right))


@each_op
def test_inference_mode(name):
    given = inputs(name)
    with torch.inference_mode():
        inside = OPS[name](*given)
        made_inside = OPS[name](*(tensor.clone() for tensor in given))
    assert all(out.is_inference() for out in outputs(inside))
    assert_same(inside, OPS[name](*given))
    assert_same(made_inside, inside)


@each_op
def test_autocast_changes_nothing(name):
    given = inputs(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = OPS[name](*given)
    assert_same(result, OPS[name](*given))


AMBIENT = {
    "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "default device": (torch.set_default_device, "meta", None),
    "matmul precision": (torch.set_float32_matmul_precision, "medium", "highest"),
    "deterministic algorithms": (torch.use_deterministic_algorithms, True, False),
}


@each_op
@pytest.mark.parametrize("setting", AMBIENT)
def test_ambient_settings_change_nothing(name, setting):
    change, value, usual = AMBIENT[setting]
    given = inputs(name)
    first, second = needing_grad(given), needing_grad(given)
    expected = outputs(OPS[name](*first))
    weights = [torch.randn_like(out) for out in expected]
    torch.autograd.backward(expected, weights)
    change(value)
    try:
        assert_same(OPS[name](*given), expected)
        torch.autograd.backward(outputs(OPS[name](*second)), weights)
    finally:
        change(usual)
    assert_same([tensor.grad for tensor in second], [tensor.grad for tensor in first])


@pytest.fixture
def two_ranks():
    """A mesh of two ranks of which this process is the first; what they would exchange is made up."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch is built without distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


@each_op
@pytest.mark.parametrize(
    ("dim", "wanted"), [(None, "all"), (0, "none"), (0, "first"), (0, "last"), (0, "all"), (1, "first"), (1, "all")]
)
def test_dtensors_sharded_over_the_batch_stay_so(two_ranks, name, dim, wanted):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    place = Replicate() if dim is None else Shard(dim)

    def distribute(tensor):
        return distribute_tensor(tensor.detach(), two_ranks, [place], src_data_rank=None)

    def held(tensor):
        return tensor if dim is None else tensor.narrow(dim, 0, tensor.shape[dim] // 2)

    whole = [tensor.unflatten(0, (2, 4)) for tensor in inputs(name, 8)]
    which = {"none": set(), "first": {0}, "last": {len(whole) - 1}, "all": set(range(len(whole)))}[wanted]
    sharded = [distribute(tensor).requires_grad_(index in which) for index, tensor in enumerate(whole)]
    whole = needing_grad(tuple(whole), which)
    result, expected = outputs(OPS[name](*sharded)), outputs(OPS[name](*whole))
    for out, right in zip(result, expected, strict=True):
        assert isinstance(out, DTensor)
        assert out.placements == (place,)
        assert out.shape == right.shape
        assert_same(out.to_local(), held(right))
    if which:
        weights = [torch.randn_like(out) for out in expected]
        torch.autograd.backward(expected, weights)
        torch.autograd.backward(result, [distribute(weight) for weight in weights])
    for index, (tensor, right) in enumerate(zip(sharded, whole, strict=True)):
        if index in which:
            assert tensor.grad.placements == (place,)
            assert_same(tensor.grad.to_local(), held(right.grad))
        else:
            assert tensor.grad is None


def test_a_dtensor_sharded_inside_its_samples_is_gathered(two_ranks):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    residual, pre = COLLAPSE
    residual = distribute_tensor(residual, two_ranks, [Shard(2)], src_data_rank=None)
    pre = distribute_tensor(pre, two_ranks, [Replicate()], src_data_rank=None)
    out = mhc_pre_h_aggregate(residual, pre)
    assert out.placements == (Replicate(),)
    assert out.to_local().shape == (3, 24)


# Gradients


@each_op
@pytest.mark.parametrize("which", ["first", "last", "all"])
def test_only_the_wanted_gradients_are_computed(name, which):
    given = inputs(name)
    wanted = {"first": {0}, "last": {len(given) - 1}, "all": set(range(len(given)))}[which]
    some, everything = needing_grad(given, wanted), needing_grad(given)
    loss(OPS[name](*everything)).backward()
    with Seen() as seen:
        loss(OPS[name](*some)).backward()
    for index, (one, right) in enumerate(zip(some, everything, strict=True)):
        if index in wanted:
            assert_same(one.grad, right.grad)
            assert one.grad.shape == one.shape
            assert one.grad.dtype == one.dtype
        else:
            assert one.grad is None
    (arguments,) = [args for func, args, _ in seen.calls if func is torch_op(f"{name}_backward")]
    mask = next(argument for argument in arguments if isinstance(argument, list))
    assert list(mask) == [index in wanted for index in range(len(given))]


def symmetric_factors(X: Tensor, B: Tensor, alpha: Tensor):
    # vdn_delta_factors reads one triangle and gives a symmetric gradient, so it is tried along symmetric directions.
    return vdn_delta_factors((X + X.mT) / 2, B, alpha, a_scale=0.7, b_scale=1.3)


def test_gradcheck_of_the_collapse():
    assert torch.autograd.gradcheck(mhc_pre_h_aggregate, needing_grad(collapse_inputs(2, torch.float64, 5)))


def test_gradcheck_of_the_factors():
    assert torch.autograd.gradcheck(symmetric_factors, needing_grad(factor_inputs(2, torch.float64, 3)))


def test_a_gradient_of_one_output_alone():
    for used in (0, 1):
        A, B, alpha = needing_grad(factor_inputs(2, torch.float64, 4))
        vdn_delta_factors(A, B, alpha)[used].sum().backward()
        inverse = torch.linalg.inv(torch.eye(4, dtype=torch.float64) + A.detach())
        if used == 0:
            torch.testing.assert_close(alpha.grad, inverse.sum(-1))
        else:
            torch.testing.assert_close(B.grad, inverse.sum(-1).unsqueeze(-2).expand_as(B))
            assert not alpha.grad.any()


@each_op
def test_an_expanded_gradient(name):
    first = needing_grad(inputs(name))
    second = needing_grad(first)
    results = outputs(OPS[name](*first)), outputs(OPS[name](*second))
    torch.autograd.backward(results[0], [torch.ones(()).to(out.dtype).expand(out.shape) for out in results[0]])
    torch.autograd.backward(results[1], [torch.ones_like(out) for out in results[1]])
    assert_same([tensor.grad for tensor in first], [tensor.grad for tensor in second])


@each_op
def test_a_second_derivative_is_a_clear_error(name):
    given = needing_grad(inputs(name))
    grads = torch.autograd.grad(loss(OPS[name](*given)), given, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{name} can be differentiated once: it has no double backward"):
        sum(grad.double().square().sum() for grad in grads).backward()


@each_op
def test_backward_twice_through_a_kept_graph(name):
    given = needing_grad(inputs(name))
    result = loss(OPS[name](*given))
    first = torch.autograd.grad(result, given, retain_graph=True)
    assert_same(torch.autograd.grad(result, given), first)


@each_op
def test_an_input_changed_before_the_backward_is_noticed(name):
    given = needing_grad(inputs(name))
    result = loss(OPS[name](*given))
    with torch.no_grad():
        given[-1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@each_op
def test_parameters(name):
    given = inputs(name)
    parameters = tuple(torch.nn.Parameter(tensor) for tensor in given)
    right = needing_grad(given)
    loss(OPS[name](*parameters)).backward()
    loss(OPS[name](*right)).backward()
    assert_same([tensor.grad for tensor in parameters], [tensor.grad for tensor in right])
    with torch.no_grad():
        result = OPS[name](*parameters)
    assert not any(out.requires_grad for out in outputs(result))
    assert all(type(out) is Tensor for out in outputs(result))
    assert_same(result, OPS[name](*given))


@each_op
def test_the_backward_runs_on_the_backend_of_its_forward(name):
    given = needing_grad(inputs(name))
    named = loss(OPS[name](*given, backend="torch"))
    with use_backend("torch"):
        ambient = loss(OPS[name](*given))
    with use_backend("fused"):
        named.backward()
        ambient.backward()


@each_op
def test_checkpointing(name):
    first = needing_grad(inputs(name))
    second = needing_grad(first)
    loss(checkpoint(OPS[name], *first, use_reentrant=False)).backward()
    loss(OPS[name](*second)).backward()
    assert_same([tensor.grad for tensor in first], [tensor.grad for tensor in second])


def test_buffers_and_gradients_do_not_mix():
    A, B, alpha = needing_grad(FACTORS, {0})
    out = (torch.empty_like(A), torch.empty_like(A))
    with pytest.raises(RuntimeError, match=r"out=\.\.\. has no gradient, and an argument requires one"):
        vdn_delta_factors(A, B, alpha, out=out)
    with torch.no_grad():
        assert_same(vdn_delta_factors(A, B, alpha, out=out), vdn_delta_factors(*FACTORS))


# torch.func and forward mode: right, or a clear error


@each_op
def test_func_grad_is_right_or_refused(name):
    given = inputs(name)
    right = needing_grad(given)
    loss(OPS[name](*right)).backward()
    transform = torch.func.grad(lambda *args: loss(OPS[name](*args)), tuple(range(len(given))))
    try:
        grads = transform(*given)
    except (RuntimeError, NotImplementedError) as error:
        assert "functorch transforms" in str(error)  # noqa: PT017
        return
    assert_same(grads, [tensor.grad for tensor in right])


@each_op
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_right_or_refused(name, shared):
    many = [inputs(name) for _ in range(4)]
    stacked = [torch.stack(tensors) for tensors in zip(*many, strict=True)]
    in_dims = [0] * len(stacked)
    if shared:
        stacked[-1], in_dims[-1] = many[0][-1], None
        many = [(*given[:-1], many[0][-1]) for given in many]
    try:
        result = torch.func.vmap(OPS[name], in_dims=tuple(in_dims))(*stacked)
    except (RuntimeError, NotImplementedError) as error:
        assert "vmap" in str(error).lower() or "batching rule" in str(error)  # noqa: PT017
        return
    for index, given in enumerate(many):
        assert_same([out[index] for out in outputs(result)], OPS[name](*given))


def assert_tangent_or_refusal(name: str, call) -> None:
    """``call(args, tangents)`` gives the output tangents; the right ones come from finite differences in float64."""
    given = inputs(name, 2, torch.float64)
    tangents = tuple(torch.randn_like(tensor) for tensor in given)
    if name == "vdn_delta_factors":
        tangents = ((tangents[0] + tangents[0].mT) / 2, *tangents[1:])
    try:
        found = call(given, tangents)
    except (RuntimeError, NotImplementedError) as error:
        words = ("forward ad", "forward-mode", "forward mode", "jvp")
        assert any(word in str(error).lower() for word in words)  # noqa: PT017
        return
    step = 1e-6
    ahead, behind = (
        outputs(OPS[name](*(x + sign * step * t for x, t in zip(given, tangents, strict=True)))) for sign in (1, -1)
    )
    for tangent, a, b in zip(found, ahead, behind, strict=True):
        assert tangent is not None, "the tangent was lost without a word"
        torch.testing.assert_close(tangent, (a - b) / (2 * step), rtol=1e-5, atol=1e-6)


@each_op
def test_func_jvp_is_right_or_refused(name):
    assert_tangent_or_refusal(
        name, lambda given, tangents: outputs(torch.func.jvp(lambda *args: OPS[name](*args), given, tangents)[1])
    )


@each_op
@pytest.mark.parametrize("grad", [False, True])
def test_dual_numbers_are_right_or_refused(name, grad):
    def call(given, tangents):
        with forward_ad.dual_level(), torch.set_grad_enabled(grad):
            duals = [forward_ad.make_dual(x, t) for x, t in zip(given, tangents, strict=True)]
            return [forward_ad.unpack_dual(out).tangent for out in outputs(OPS[name](*duals))]

    assert_tangent_or_refusal(name, call)


@each_op
def test_inside_a_dual_level_plain_tensors_are_plain(name):
    given = inputs(name)
    with forward_ad.dual_level():
        result = OPS[name](*given)
    assert_same(result, OPS[name](*given))


# On a GPU


@pytest.fixture
def on_gpu(shared_cache):
    return torch.randn(129, 4, 4096, device="cuda").bfloat16(), torch.rand(129, 4, device="cuda")


@pytest.mark.gpu
@pytest.mark.compiler
def test_compiled_calls_run_the_fused_kernel(on_gpu):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: mhc_pre_h_aggregate(*args, backend="fused"), fullgraph=True, dynamic=True)
    assert_same(compiled(*on_gpu), mhc_pre_h_aggregate(*on_gpu, backend="torch"))


@pytest.mark.gpu
@pytest.mark.compiler
def test_a_captured_graph_replays_on_new_data(on_gpu):
    residual, pre = on_gpu
    mhc_pre_h_aggregate(residual, pre, backend="fused")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mhc_pre_h_aggregate(residual, pre, backend="fused")
    residual.copy_(torch.randn_like(residual))
    graph.replay()
    assert_same(out, mhc_pre_h_aggregate(residual, pre, backend="torch"))


@pytest.mark.gpu
@pytest.mark.compiler
def test_a_capture_before_the_first_call_is_a_clear_error(run_python):
    code = """
import torch, jit_kernels
from jit_kernels.jit.errors import CaptureError
residual, pre = torch.ones(1, 4, 64, device="cuda").bfloat16(), torch.ones(1, 4, device="cuda")
for backend in ("auto", "fused"):
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            jit_kernels.mhc_pre_h_aggregate(residual, pre, backend=backend)
    except CaptureError as error:
        print("refused" if "before the capture" in str(error) else error)
"""
    assert run_python(code).split() == ["refused", "refused"]


@pytest.mark.gpu
@pytest.mark.compiler
def test_the_launch_goes_to_the_current_stream(on_gpu):
    residual, pre = on_gpu
    mhc_pre_h_aggregate(residual, pre, backend="fused")
    new = torch.randn_like(residual)
    expected = mhc_pre_h_aggregate(new, pre, backend="torch")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        residual.copy_(new)
        out = mhc_pre_h_aggregate(residual, pre, backend="fused")
    stream.synchronize()
    assert_same(out, expected)


@pytest.mark.gpu
@pytest.mark.compiler
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_op
def test_the_launch_goes_to_the_tensors_device(shared_cache, name):
    given = collapse_inputs(hidden=4096) if name.startswith("mhc") else factor_inputs(d=64)
    expected = OPS[name](*(tensor.to("cuda:0") for tensor in given), backend="fused")
    there = [tensor.to("cuda:1") for tensor in given]
    with torch.cuda.device(0):
        for _ in range(3):  # the first call loads the kernel
            found = OPS[name](*there, backend="fused")
            assert {out.device for out in outputs(found)} == {torch.device("cuda:1")}
            assert_same([out.cpu() for out in outputs(found)], [out.cpu() for out in outputs(expected)])
        assert torch.cuda.current_device() == 0


def test_every_public_op_is_tested_here():
    assert set(OPS) == set(jit_kernels.dispatch.OPERATORS)
