"""mhc_pre_h_aggregate against a bit-exact reference of its own, on the fallback and, where there is a GPU, fused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jit_kernels import UnsupportedError, mhc_pre_h_aggregate, use_backend
from jit_kernels.checks.compare import same_bytes
from jit_kernels.ops.mhc_pre_h_aggregate import BACKWARD

TOKENS = (0, 1, 2, 31, 32, 33, 127, 128, 129, 513)
HIDDEN = (1, 7, 8, 65, 513, 1279, 4096, 5120, 5137, 7168)


# The reference: numpy float32, where every operation rounds once, and bfloat16 by its bits.


def widen(tensor: Tensor) -> np.ndarray:
    """bfloat16 or float32 to the float32 it stands for."""
    if tensor.dtype == torch.float32:
        return tensor.cpu().numpy()
    bits = tensor.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> Tensor:
    """float32 to bfloat16, to nearest, ties to even; every NaN is 0x7FC0."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return torch.from_numpy(rounded.view(np.int16)).view(torch.bfloat16)


def single(values: np.ndarray) -> Tensor:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).copy()
    bits[np.isnan(values)] = 0x7FC00000
    return torch.from_numpy(bits.view(np.int32)).view(torch.float32)


def reference(residual: Tensor, pre: Tensor) -> Tensor:
    r, p = widen(residual), widen(pre)[..., None]
    with np.errstate(all="ignore"):
        products = [p[..., i, :] * r[..., i, :] for i in range(4)]
        return narrow((products[0] + products[1]) + (products[2] + products[3]))


def tree(values: np.ndarray) -> np.ndarray:
    """Neighbours, then pairs of neighbours, and so on; one left over moves up as it is."""
    while values.shape[-1] > 1:
        even = values.shape[-1] // 2 * 2
        paired = values[..., 0:even:2] + values[..., 1:even:2]
        values = np.concatenate([paired, values[..., even:]], axis=-1)
    return values[..., 0]


def reference_backward(grad: Tensor, residual: Tensor, pre: Tensor) -> tuple[np.ndarray, np.ndarray]:
    g, r, p = widen(grad)[..., None, :], widen(residual), widen(pre)[..., None]
    with np.errstate(all="ignore"):
        return g * p, tree(g * r)


def draw(generator: torch.Generator, tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """residual, pre, grad, on the CPU: sizes over many binades, signs mixed."""

    def make(*shape: int) -> Tensor:
        binade = torch.randint(-6, 7, shape, generator=generator).float()
        return torch.randn(shape, generator=generator) * torch.exp2(binade)

    return make(tokens, 4, hidden).bfloat16(), make(tokens, 4), make(tokens, hidden).bfloat16()


def backend_of(device: torch.device) -> str:
    return "fused" if device.type == "cuda" else "torch"


def run(device: torch.device, residual: Tensor, pre: Tensor) -> Tensor:
    return mhc_pre_h_aggregate(residual.to(device), pre.to(device), backend=backend_of(device)).cpu()


def run_backward(device: torch.device, grad: Tensor, residual: Tensor, pre: Tensor, mask=(True, True), dtype=None):
    on = [tensor.to(device) for tensor in (grad, residual, pre)]
    return tuple(out.cpu() for out in BACKWARD(*on, list(mask), dtype, backend=backend_of(device)))


def assert_right(device, residual, pre, grad):
    assert same_bytes([run(device, residual, pre)], [reference(residual, pre)])
    products, sums = reference_backward(grad, residual, pre)
    assert same_bytes(run_backward(device, grad, residual, pre), [narrow(products), single(sums)])
    assert same_bytes(run_backward(device, grad, residual, pre, dtype=torch.float32), [single(products), single(sums)])


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("tokens", TOKENS)
def test_bytes(device, generator, tokens, hidden):
    if tokens * hidden > 1 << 20 and device.type == "cpu":
        tokens = max(1, (1 << 20) // hidden)  # keeps the CPU's part of the grid short
    assert_right(device, *draw(generator, tokens, hidden))


def test_many_tokens(device, generator):
    # More tokens than one grid dimension other than x holds.
    residual, pre, _ = draw(generator, 1, 8)
    tokens = 65_537
    out = run(device, residual.expand(tokens, 4, 8), pre.expand(tokens, 4))
    assert same_bytes([out], [reference(residual, pre).expand(tokens, 8)])


SPECIAL = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 9.2e-41, 3e38, -3e38, 1e-20)


@pytest.mark.parametrize("hidden", [8, 65, 512])
def test_special_values(device, generator, hidden):
    pick = lambda *shape: torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=generator)]  # noqa: E731
    assert_right(device, pick(257, 4, hidden).bfloat16(), pick(257, 4), pick(257, hidden).bfloat16())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_values(device, data):
    tokens, hidden = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    bf16 = st.integers(0, 0xFFFF).map(lambda bits: bits - 0x8000)
    fp32 = st.integers(-(2**31), 2**31 - 1)

    def tensor(bits, dtype, signed, *shape):
        count = int(np.prod(shape))
        return (
            torch.tensor(data.draw(st.lists(bits, min_size=count, max_size=count)), dtype=signed)
            .view(dtype)
            .view(shape)
        )

    assert_right(
        device,
        tensor(bf16, torch.bfloat16, torch.int16, tokens, 4, hidden),
        tensor(fp32, torch.float32, torch.int32, tokens, 4),
        tensor(bf16, torch.bfloat16, torch.int16, tokens, hidden),
    )


def test_negative_zero_survives(device):
    residual, pre = torch.full((3, 4, 16), -0.0).bfloat16(), torch.ones(3, 4)
    out = run(device, residual, pre)
    assert torch.signbit(out).all()
    _, grad_pre = run_backward(device, torch.ones(3, 16).bfloat16(), residual, pre)
    assert torch.signbit(grad_pre).all()


def test_one_hot_takes_that_stream(device, generator):
    residual, _, _ = draw(generator, 4, 512)
    assert same_bytes([run(device, residual, torch.eye(4))], [torch.stack([residual[i, i] for i in range(4)])])


def test_cancelling_streams_give_zero(device, generator):
    residual, _, _ = draw(generator, 9, 520)
    residual[:, 1], residual[:, 3] = -residual[:, 0], -residual[:, 2]
    assert (run(device, residual, torch.ones(9, 4)) == 0).all()


def test_nan_stays_in_its_element(device, generator):
    residual, pre, _ = draw(generator, 5, 264)
    clean = run(device, residual, pre)
    residual[2, 1, 100] = float("nan")
    dirty = run(device, residual, pre)
    assert torch.isnan(dirty).nonzero().tolist() == [[2, 100]]
    dirty[2, 100] = clean[2, 100]
    assert same_bytes([dirty], [clean])


LAYOUTS = {
    "every second element": lambda r, p, g: (
        r.repeat_interleave(2, -1)[..., ::2],
        p,
        g.repeat_interleave(2, -1)[..., ::2],
    ),
    "slice of a wider buffer": lambda r, p, g: (
        torch.nn.functional.pad(r, (8, 24))[..., 8:-24],
        torch.nn.functional.pad(p, (1, 2))[:, 1:-2],
        torch.nn.functional.pad(g, (8, 8))[..., 8:-8],
    ),
    "one element off alignment": lambda r, p, g: tuple(
        torch.nn.functional.pad(t.flatten(), (1, 0))[1:].view(t.shape) for t in (r, p, g)
    ),
    "column-major pre": lambda r, p, g: (r, p.t().contiguous().t(), g),
    "streams outermost": lambda r, p, g: (r.transpose(0, 1).contiguous().transpose(0, 1), p, g),
    "hidden before streams": lambda r, p, g: (r.mT.contiguous().mT, p, g.t().contiguous().t()),
    "expanded": lambda r, p, g: (r[:1].expand_as(r), p[:1].expand_as(p), g[:1].expand_as(g)),
    "every third token": lambda r, p, g: tuple(t.repeat_interleave(3, 0)[::3] for t in (r, p, g)),
}


@pytest.mark.parametrize("hidden", [512, 513])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, generator, layout, hidden):
    tensors = LAYOUTS[layout](*(tensor.to(device) for tensor in draw(generator, 33, hidden)))
    assert_right(device, *tensors)


def test_batch_dimensions(device, generator):
    residual, pre, grad = draw(generator, 30, 64)
    flat = run(device, residual, pre)
    assert same_bytes([run(device, residual.view(2, 3, 5, 4, 64), pre.view(2, 3, 5, 4))], [flat.view(2, 3, 5, 64)])
    assert same_bytes([run(device, residual[0], pre[0])], [flat[0]])
    grads = run_backward(device, grad.view(2, 15, 64), residual.view(2, 15, 4, 64), pre.view(2, 15, 4))
    assert same_bytes([t.flatten(0, 1) for t in grads], run_backward(device, grad, residual, pre))


def test_whole_batch_and_alone(device, generator):
    residual, pre, grad = draw(generator, 129, 4096)
    out, grads = run(device, residual, pre), run_backward(device, grad, residual, pre)
    for i in range(129):
        one = slice(i, i + 1)
        assert same_bytes([out[one]], [run(device, residual[one], pre[one])])
        assert same_bytes([g[one] for g in grads], run_backward(device, grad[one], residual[one], pre[one]))


def test_one_gradient_only(device, generator):
    residual, pre, grad = draw(generator, 17, 1279)
    both = run_backward(device, grad, residual, pre)
    first, none = run_backward(device, grad, residual, pre, mask=(True, False))
    assert none.shape == (0,)
    assert same_bytes([first], both[:1])
    none, second = run_backward(device, grad, residual, pre, mask=(False, True))
    assert none.shape == (0,)
    assert same_bytes([second], both[1:])


def test_autograd(device, generator):
    residual, pre, grad = (tensor.to(device) for tensor in draw(generator, 12, 96))
    wanted = BACKWARD(grad, residual, pre, [True, True], None, backend=backend_of(device))
    with use_backend(backend_of(device)):
        for leaves in ((True, True), (True, False), (False, True)):
            r, p = residual.clone().requires_grad_(leaves[0]), pre.clone().requires_grad_(leaves[1])
            mhc_pre_h_aggregate(r, p).backward(grad)
            for leaf, needed, right in zip((r, p), leaves, wanted, strict=True):
                assert (leaf.grad is None) != needed
                assert not needed or same_bytes([leaf.grad], [right])
        r, p = residual.clone().requires_grad_(), pre.clone().requires_grad_()
        mhc_pre_h_aggregate(r, p).sum().backward()  # an expanded gradient: stride 0
        ones = torch.ones_like(grad)
        assert same_bytes([r.grad, p.grad], BACKWARD(ones, residual, pre, [True, True], None))


def test_double_backward_is_refused(device, generator):
    residual, pre, _ = (tensor.to(device) for tensor in draw(generator, 2, 16))
    pre.requires_grad_()
    (grad_pre,) = torch.autograd.grad(
        mhc_pre_h_aggregate(residual * pre.sum().bfloat16(), pre).sum(), pre, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="no double backward"):
        grad_pre.sum().backward()


def test_gradcheck_in_float64():
    residual = torch.randn(3, 4, 9, dtype=torch.float64, requires_grad=True)
    pre = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mhc_pre_h_aggregate, (residual, pre))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accuracy_of_the_fallback(dtype, generator):
    """The fallback against float64: one rounding to the dtype, beside the float32 sum's own."""
    residual, pre, _ = draw(generator, 40, 512)
    residual = residual.to(dtype)
    out = mhc_pre_h_aggregate(residual, pre, backend="torch")
    terms = pre.double().unsqueeze(-1) * residual.double()
    # Three float32 roundings on each path to the result, then one rounding to the dtype.
    slack = 3 * 2.0**-24 * terms.abs().sum(-2)
    bound = slack + (terms.sum(-2).abs() + slack) * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal
    assert ((out.double() - terms.sum(-2)).abs() <= bound).all()


BAD = {
    "bfloat16 pre": (TypeError, lambda r, p: (r, p.bfloat16())),
    "integer residual": (TypeError, lambda r, p: (r.int(), p)),
    "float64 pre": (TypeError, lambda r, p: (r, p.double())),
    "no tensor": (TypeError, lambda r, p: (r, 0.25)),
    "sparse": (TypeError, lambda r, p: (r.to_sparse(), p)),
    "three streams": (ValueError, lambda r, p: (r[:, :3], p[:, :3])),
    "eight streams": (ValueError, lambda r, p: (r.repeat(1, 2, 1), p.repeat(1, 2))),
    "other tokens": (ValueError, lambda r, p: (r, p[:-1])),
    "one dimension": (ValueError, lambda r, p: (r[0, 0], p[0])),
    "no hidden": (ValueError, lambda r, p: (r[..., :0], p)),
    "other device": (ValueError, lambda r, p: (r, p.to("meta"))),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_has_one_message(device, case):
    kind, spoil = BAD[case]
    arguments = spoil(torch.ones(3, 4, 8, device=device).bfloat16(), torch.ones(3, 4, device=device))
    messages = set()
    for backend in ("auto", "fused", "torch"):
        with pytest.raises(kind) as caught:
            mhc_pre_h_aggregate(*arguments, backend=backend)
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert "got" in messages.pop()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_fall_back(device, dtype, generator):
    residual, pre, _ = (tensor.to(device) for tensor in draw(generator, 3, 32))
    residual, pre = residual.to(dtype), pre.double() if dtype == torch.float64 else pre
    assert mhc_pre_h_aggregate(residual, pre).dtype == dtype
    with pytest.raises(UnsupportedError, match="fused kernel"):
        mhc_pre_h_aggregate(residual, pre, backend="fused")


def test_graph_replay(cuda, generator):
    residual, pre, grad = (tensor.to(cuda) for tensor in draw(generator, 64, 4096))
    mhc_pre_h_aggregate(residual, pre, backend="fused")
    BACKWARD(grad, residual, pre, [True, True], None, backend="fused")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mhc_pre_h_aggregate(residual, pre, backend="fused")
        grads = BACKWARD(grad, residual, pre, [True, True], None, backend="fused")
    for _ in range(3):
        fresh = draw(generator, 64, 4096)
        for old, new in zip((residual, pre, grad), fresh, strict=True):
            old.copy_(new)
        for tensor in (out, *grads):
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bytes([out.cpu()], [reference(*fresh[:2])])
        assert same_bytes([g.cpu() for g in grads], run_backward(torch.device("cpu"), fresh[2], *fresh[:2]))


def test_side_stream_and_repeats(cuda, generator):
    residual, pre, grad = draw(generator, 257, 5137)
    right, right_grads = reference(residual, pre), run_backward(torch.device("cpu"), grad, residual, pre)
    on = [tensor.to(cuda) for tensor in (residual, pre, grad)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(100):
            out = mhc_pre_h_aggregate(*on[:2], backend="fused")
            grads = BACKWARD(on[2], *on[:2], [True, True], None, backend="fused")
            assert same_bytes([out.cpu()], [right])
            assert same_bytes([g.cpu() for g in grads], right_grads)


def test_past_32_bits(cuda):
    # T*4*H past 2**31; the last row sits where a 32-bit offset would have wrapped.
    tokens, hidden = 131_073, 4096
    residual = torch.zeros(tokens, 4, hidden, dtype=torch.bfloat16, device=cuda)
    pre = torch.ones(tokens, 4, device=cuda)
    residual[-1] = 1.5
    out = mhc_pre_h_aggregate(residual, pre, backend="fused")
    assert (out[-1] == 6).all()
    assert not out[:-1].any()
    grad = torch.ones_like(out)
    grad_residual, grad_pre = BACKWARD(grad, residual, pre, [True, True], None, backend="fused")
    assert (grad_residual == 1).all()
    assert (grad_pre[-1] == 1.5 * hidden).all()
    assert not grad_pre[:-1].any()


def test_nothing_outside_is_written(cuda, generator):
    residual, pre, grad = (tensor.to(cuda) for tensor in draw(generator, 5, 65))
    from jit_kernels.ops.mhc_pre_h_aggregate import OPERATOR

    frame = lambda *shape, dtype: torch.full((int(np.prod(shape)) + 128,), -7.0, dtype=dtype, device=cuda)  # noqa: E731
    frames = [
        frame(5, 65, dtype=torch.bfloat16),
        frame(5, 4, 65, dtype=torch.bfloat16),
        frame(5, 4, dtype=torch.float32),
    ]
    inside = [f[64:-64].view(shape) for f, shape in zip(frames, ((5, 65), (5, 4, 65), (5, 4)), strict=True)]
    OPERATOR.launcher("forward", cuda)(inside[0], residual, pre)
    OPERATOR.launcher("backward", cuda)(inside[1], inside[2], grad, residual, pre)
    torch.cuda.synchronize()
    for f, tensor in zip(frames, inside, strict=True):
        assert (f[:64] == -7).all()
        assert (f[-64:] == -7).all()
        assert (tensor != -7).all()
