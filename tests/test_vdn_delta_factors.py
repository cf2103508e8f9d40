"""vdn_delta_factors against float64: the fallback, and on a GPU the fused kernel in both its arithmetics."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from jit_kernels.bench.vdn_delta_factors import FAMILIES, chain, gold, reference, spectrum
from torch import Tensor

from jit_kernels import UnsupportedError, explain, use_backend, vdn_delta_factors
from jit_kernels.checks.compare import relative_error, same_bytes

PATHS = ("torch", "fp64_tensor", "fp32")
COUNTS = (0, 1, 7, 66, 131, 132, 133, 264, 707)


@pytest.fixture(params=PATHS)
def run(request):
    """The op by one path: the fallback on the CPU, or the fused kernel in one arithmetic. Tensors stay on the CPU."""
    path = request.param
    device = torch.device("cpu") if path == "torch" else request.getfixturevalue("cuda")
    options = {"backend": "torch"} if path == "torch" else {"backend": "fused", "precision": path}

    def call(A: Tensor, B: Tensor, alpha: Tensor, **more) -> tuple[Tensor, Tensor]:
        T, J = vdn_delta_factors(A.to(device), B.to(device), alpha.to(device), **options, **more)
        return T.cpu(), J.cpu()

    call.device, call.options = device, options
    return call


def few(run, count: int) -> int:
    """On the CPU, no more matrices than show the same."""
    return min(count, 9) if run.device.type == "cpu" else count


def exact(A: Tensor, B: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    return gold(A.double(), B.double(), alpha.double())


def exact_on(run, *inputs: Tensor) -> list[Tensor]:
    """The float64 result, computed where it is quick."""
    return [tensor.cpu() for tensor in exact(*(tensor.to(run.device) for tensor in inputs))]


@pytest.mark.parametrize("d", [128, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_accuracy(run, generator, family, d):
    """No worse than the float32 chain beside it, on any family; 1e-6 on the workload that the op was asked for."""
    count = 64 if run.device.type == "cuda" else 6
    inputs = FAMILIES[family](generator, count, d)
    out, right = run(*inputs), exact_on(run, *inputs)
    beside = [tensor.cpu() for tensor in chain(*(tensor.to(run.device) for tensor in inputs))]
    for mine, theirs, want in zip(out, beside, right, strict=True):
        assert relative_error(mine, want) <= relative_error(theirs, want)
        if family.startswith("randn"):
            assert relative_error(mine, want) <= 1e-6
        if run.device.type == "cpu":  # float64, then one rounding to float32 (J) or two (T)
            assert relative_error(mine, want) <= 2**-23


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fallback_on_a_gpu(cuda, generator, family):
    """Batched there: as accurate, symmetric to the bit, NaN alone, and without waiting for the device."""
    A, B, alpha = (tensor.to(cuda) for tensor in FAMILIES[family](generator, 64, 96))
    A[1] = torch.ones(96, 96) - torch.eye(96)
    A[2, 5, 3] = torch.nan
    vdn_delta_factors(A, B, alpha, backend="torch")  # whatever is set up at a first call
    torch.cuda.set_sync_debug_mode("error")
    try:
        T, J = vdn_delta_factors(A, B, alpha, backend="torch")
        P, _ = vdn_delta_factors(A, B, torch.ones_like(alpha), backend="torch")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isnan(T[1:3]).all()
    assert torch.isnan(J[1:3]).all()
    assert same_bytes([P], [P.mT])
    assert same_bytes([T], [alpha.unsqueeze(-1) * P])
    sound = [0, *range(3, 64)]
    inputs = [tensor[sound] for tensor in (A, B, alpha)]
    for mine, theirs, want in zip((T[sound], J[sound]), chain(*inputs), exact(*inputs), strict=True):
        assert relative_error(mine, want) <= relative_error(theirs, want)


@pytest.mark.parametrize("d", [128, 64])
@pytest.mark.parametrize("count", COUNTS)
def test_every_matrix_as_if_alone(run, generator, count, d):
    count = few(run, count)
    inputs = spectrum(generator, count, d, 50.0)
    out = run(*inputs)
    assert out[0].shape == out[1].shape == (count, d, d)
    if count:
        for mine, want in zip(out, exact_on(run, *inputs), strict=True):
            assert relative_error(mine, want) < 5e-6  # cond 50 times a few float32 roundings
    for start, stop in [(i, i + 1) for i in range(0, count, 1 + count // 40)] + [(count // 3, count), (0, count // 2)]:
        part = run(*(tensor[start:stop] for tensor in inputs))
        assert same_bytes(part, [tensor[start:stop] for tensor in out])


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("precision", ["fp64_tensor", "fp32"])
@pytest.mark.parametrize("d", [128, 64])
def test_a_call_reads_what_the_call_before_it_wrote(cuda, generator, d, precision, captured):
    """A kernel may be started before the one ahead of it has ended; memory is used again from the third call on."""
    first = [tensor.to(cuda) for tensor in spectrum(generator, 300, d, 10.0)]

    def chained(between: Callable[[], None]) -> tuple[Tensor, Tensor]:
        T, J, alpha = first[0], first[1], torch.ones_like(first[2])
        for _ in range(20):
            T, J = vdn_delta_factors(T, J, alpha, precision=precision, backend="fused")
            between()
        return T, J

    want = chained(torch.cuda.synchronize)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chained(lambda: None)
        graph.replay()
    else:
        found = chained(lambda: None)
    assert same_bytes(found, want)


def test_repeats(run, generator):
    inputs = [tensor.to(run.device) for tensor in reference(generator, few(run, 133))]
    first = vdn_delta_factors(*inputs, **run.options)
    for _ in range(1000 if run.device.type == "cuda" else 5):
        assert same_bytes(vdn_delta_factors(*inputs, **run.options), first)


def test_symmetric_to_the_bit(run, generator):
    A, B, alpha = reference(generator, 5)
    T, _ = run(A, B, torch.ones_like(alpha))
    assert same_bytes([T], [T.mT])
    scaled, _ = run(A, B, alpha)
    assert same_bytes([scaled], [alpha.unsqueeze(-1) * T])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_upper_triangle_is_not_read(run, generator, garbage):
    A, B, alpha = reference(generator, 3)
    right = run(A, B, alpha)
    dirty = torch.where(torch.ones_like(A).triu(1).bool(), torch.full_like(A, garbage), A)
    assert same_bytes(run(dirty, B, alpha), right)


@pytest.mark.parametrize("d", [128, 64])
@pytest.mark.parametrize("row", [0, 1, 17, 63, -1])
def test_an_indefinite_matrix_is_nan_alone(run, generator, row, d):
    A, B, alpha = spectrum(generator, 5, d, 10.0)
    row %= d
    clean = run(A, B, alpha)
    bad = A.clone()
    bad[1, row, row] = -1e3
    bad[3, row, row] = float("nan")
    T, J = run(bad, B, alpha)
    for out, good in zip((T, J), clean, strict=True):
        assert torch.isnan(out[[1, 3]]).all()
        assert same_bytes([out[[0, 2, 4]]], [good[[0, 2, 4]]])
    with pytest.raises(torch.linalg.LinAlgError, match=rf"matrix 1: .*order {row + 1} "):
        run(bad, B, alpha, check_errors=True)
    assert same_bytes(run(A, B, alpha, check_errors=True), clean)


@pytest.mark.parametrize("d", [128, 64])
def test_a_singular_matrix_is_nan_alone(run, generator, d):
    """I + A is all ones: its second pivot is zero to the bit."""
    A, B, alpha = spectrum(generator, 3, d, 10.0)
    clean = run(A, B, alpha)
    A[1] = torch.ones(d, d) - torch.eye(d)
    for out, good in zip(run(A, B, alpha), clean, strict=True):
        assert torch.isnan(out[1]).all()
        assert same_bytes([out[[0, 2]]], [good[[0, 2]]])


def test_check_errors_names_the_index_of_a_batch(run, generator):
    A, B, alpha = spectrum(generator, 6, 64, 10.0)
    A[4] = -2 * torch.eye(64)
    with pytest.raises(torch.linalg.LinAlgError, match=r"matrix \(1, 1\)"):
        run(A.view(2, 3, 64, 64), B.view(2, 3, 64, 64), alpha.view(2, 3, 64), check_errors=True)


@pytest.mark.parametrize("d", [128, 64])
def test_zero_matrix(run, generator, d):
    B, alpha = torch.randn(2, d, d, generator=generator), torch.randn(2, d, generator=generator)
    T, J = run(torch.zeros(2, d, d), B, alpha)
    assert same_bytes([T + 0.0, J], [torch.diag_embed(alpha) + 0.0, B])  # + 0.0: a zero may have either sign


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e20, 1e30])
def test_extreme_sizes(run, generator, size):
    A, B, alpha = spectrum(generator, 3, 128, 10.0)
    A = (A + torch.eye(128)) * size
    out, right = run(A, B, alpha), exact(A, B, alpha)
    for mine in out:
        assert torch.isfinite(mine).all()
    if size < 1:
        assert relative_error(out[0], right[0]) < 1e-6


def test_zero_rows(run, generator):
    A, B, alpha = spectrum(generator, 3, 128, 10.0)
    A[:, 40:50, :] = 0
    A[:, :, 40:50] = 0
    A, B[:, 7] = A + 0.0, 0
    T, J = run(A, B, alpha)
    for mine, want in zip((T, J), exact(A, B, alpha), strict=True):
        assert relative_error(mine, want) < 1e-6
    assert not J[:, 7].any()


def off_by_one(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t.flatten(), (1, 0))[1:].view(t.shape)


LAYOUTS = {
    "one float off alignment": lambda A, B, alpha: (off_by_one(A), off_by_one(B), off_by_one(alpha)),
    "views from 1": lambda A, B, alpha: tuple(torch.cat([t[:1], t])[1:] for t in (A, B, alpha)),
    "every second matrix": lambda A, B, alpha: tuple(t.repeat_interleave(2, 0)[::2] for t in (A, B, alpha)),
    "wider rows": lambda A, B, alpha: (
        torch.nn.functional.pad(A, (4, 8))[..., 4:-8],
        torch.nn.functional.pad(B, (3, 2))[..., 3:-2],
        torch.nn.functional.pad(alpha, (1, 1))[..., 1:-1],
    ),
    "transposed A": lambda A, B, alpha: (A.mT.contiguous().mT, B, alpha),
    "transposed B, strided alpha": lambda A, B, alpha: (
        A,
        B.mT.contiguous().mT,
        alpha.repeat_interleave(3, -1)[..., ::3],
    ),
    "expanded": lambda A, B, alpha: (A[:1].expand_as(A), B[:1].expand_as(B), alpha[:1, :1].expand_as(alpha)),
}


@pytest.mark.parametrize("d", [128, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run, generator, layout, d):
    inputs = LAYOUTS[layout](*(tensor.to(run.device) for tensor in spectrum(generator, 6, d, 10.0)))
    assert same_bytes(run(*inputs), run(*(tensor.contiguous().clone() for tensor in inputs)))


def test_batch_dimensions(run, generator):
    A, B, alpha = spectrum(generator, 6, 128, 10.0)
    flat = run(A, B, alpha)
    batched = run(A.view(2, 3, 128, 128), B.view(2, 3, 128, 128), alpha.view(2, 3, 128))
    assert same_bytes([t.flatten(0, 1) for t in batched], flat)
    assert same_bytes(run(A[0], B[0], alpha[0]), [t[0] for t in flat])


def test_scales(run, generator):
    A, B, alpha = reference(generator, 4, 128, 50)
    a_scale, b_scale = 1 / 1008, 1008**-0.5
    right = exact(A.double() * a_scale, B.double() * b_scale, alpha)
    for mine, want in zip(run(A, B, alpha, a_scale=a_scale, b_scale=b_scale), right, strict=True):
        assert relative_error(mine, want) < 1e-6


def test_out(run, generator):
    A, B, alpha = (tensor.to(run.device) for tensor in reference(generator, 5))
    right = vdn_delta_factors(A, B, alpha, **run.options)
    buffer = torch.full((2, 7, 128, 128), float("nan"), device=run.device)
    out = (buffer[0, 1:6], buffer[1, 1:6])
    made = vdn_delta_factors(A, B, alpha, out=out, **run.options)
    assert made[0] is out[0]
    assert made[1] is out[1]
    assert same_bytes(out, right)
    assert torch.isnan(buffer[:, [0, 6]]).all()
    wide = torch.full((10, 128, 128), float("nan"), device=run.device)
    vdn_delta_factors(A, B, alpha, out=(wide[::2], wide.clone()[::2]), **run.options)
    assert same_bytes([wide[::2]], right[:1])
    assert torch.isnan(wide[1::2]).all()


BAD_OUT = {
    "T is A": lambda A, B, alpha, T, J: (A, J),
    "J is B": lambda A, B, alpha, T, J: (T, B),
    "T is J": lambda A, B, alpha, T, J: (T, T),
    "T reaches into B": lambda A, B, alpha, T, J: (B.view(-1, 128)[1:-127].view(-1, 128, 128)[: len(A)], J),
    "shape": lambda A, B, alpha, T, J: (T[:1], J),
    "dtype": lambda A, B, alpha, T, J: (T.double(), J),
    "rows apart": lambda A, B, alpha, T, J: (T.mT, J),
    "itself": lambda A, B, alpha, T, J: (T[:1].expand_as(T), J),
    "device": lambda A, B, alpha, T, J: (T.to("meta"), J),
}


@pytest.mark.parametrize("case", BAD_OUT)
def test_bad_out_is_refused(run, generator, case):
    A, B, alpha = (tensor.to(run.device) for tensor in spectrum(generator, 3, 128, 10.0))
    B = torch.cat([B, B])[:3]
    before = [tensor.clone() for tensor in (A, B, alpha)]
    out = BAD_OUT[case](A, B, alpha, torch.empty_like(A), torch.empty_like(A))
    if case == "T reaches into B":
        out = (torch.cat([B, B])[:3], out[1])
        B = out[0].as_strided(out[0].shape, out[0].stride(), 128)
    with pytest.raises(ValueError, match="out "):
        vdn_delta_factors(A, B, alpha, out=out, **run.options)
    assert same_bytes([A, alpha], [before[0], before[2]])


def test_out_has_no_gradient(generator):
    A, B, alpha = spectrum(generator, 1, 16, 10.0)
    with pytest.raises(RuntimeError, match="no gradient"):
        vdn_delta_factors(A.requires_grad_(), B, alpha, out=(torch.empty_like(B), torch.empty_like(B)))


@pytest.mark.parametrize("d", [1, 2, 3, 16, 32, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_size_by_the_fallback(device, generator, d, dtype):
    inputs = [tensor.to(device, dtype) for tensor in spectrum(generator, 3, d, 10.0)]
    out = vdn_delta_factors(*inputs, backend="torch")
    for mine, want in zip(out, exact(*inputs), strict=True):
        assert mine.dtype == dtype
        assert relative_error(mine, want) < (1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_by_the_fallback(generator, family):
    """As accurate as the chain in float64, within the error of the LU that stands for the exact result."""
    inputs = [tensor.double() for tensor in FAMILIES[family](generator, 6, 128)]
    out = vdn_delta_factors(*inputs, backend="torch")
    for mine, theirs, want in zip(out, chain(*inputs), exact(*inputs), strict=True):
        assert relative_error(mine, want) <= 2 * relative_error(theirs, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("d", "count"), [(1, 70), (3, 70), (31, 270), (64, 70), (100, 30), (130, 20), (200, 9)])
def test_the_fallback_by_itself_or_in_any_batch(generator, d, count, dtype):
    """On the CPU, forward and backward: whatever the batch, the place in it and the alignment."""
    inputs = [tensor.to(dtype) for tensor in spectrum(generator, count, d, 10.0)]
    upstream = [torch.randn(inputs[0].shape, generator=generator, dtype=dtype) for _ in range(2)]

    def compute(place: Callable[[Tensor], Tensor], start: int, stop: int) -> tuple[Tensor, ...]:
        leaves = [place(tensor[start:stop]).requires_grad_() for tensor in inputs]
        out = vdn_delta_factors(*leaves, backend="torch")
        return *out, *torch.autograd.grad(out, leaves, [tensor[start:stop] for tensor in upstream])

    whole = compute(Tensor.clone, 0, count)
    for start, stop in ((0, 1), (1, 2), (3, 8), (count - 1, count), (0, count // 2), (1, count)):
        for place in (Tensor.clone, off_by_one):
            assert same_bytes(compute(place, start, stop), [tensor[start:stop] for tensor in whole])


def test_what_the_kernel_does_not_cover(cuda, generator, capsys):
    for d, dtype in ((96, torch.float32), (32, torch.float32), (256, torch.float32), (128, torch.float64)):
        inputs = [tensor.to(cuda, dtype) for tensor in spectrum(generator, 2, d, 10.0)]
        assert explain(vdn_delta_factors, *inputs).runs == "torch"
        vdn_delta_factors(*inputs)
        with pytest.raises(UnsupportedError, match="the fused kernel covers"):
            vdn_delta_factors(*inputs, backend="fused")
    assert "head_dim 96: the fused kernel covers 64 and 128" in capsys.readouterr().out


BAD = {
    "bfloat16": (TypeError, lambda A, B, a: (A.bfloat16(), B.bfloat16(), a.bfloat16())),
    "mixed dtypes": (TypeError, lambda A, B, a: (A, B.double(), a)),
    "no tensor": (TypeError, lambda A, B, a: (A, B, 1.0)),
    "sparse": (TypeError, lambda A, B, a: (A.to_sparse(), B, a)),
    "not square": (ValueError, lambda A, B, a: (A[..., :-1], B[..., :-1], a)),
    "one dimension": (ValueError, lambda A, B, a: (A[0, 0], B[0, 0], a[0])),
    "no rows": (ValueError, lambda A, B, a: (A[:, :0, :0], B[:, :0, :0], a[:, :0])),
    "other B": (ValueError, lambda A, B, a: (A, B[:1], a)),
    "other alpha": (ValueError, lambda A, B, a: (A, B, a[:, :-1])),
    "other device": (ValueError, lambda A, B, a: (A, B, a.to("meta"))),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_has_one_message(device, case):
    kind, spoil = BAD[case]
    arguments = spoil(
        torch.zeros(2, 64, 64, device=device), torch.zeros(2, 64, 64, device=device), torch.ones(2, 64, device=device)
    )
    messages = set()
    for backend in ("auto", "fused", "torch"):
        with pytest.raises(kind) as caught:
            vdn_delta_factors(*arguments, backend=backend)
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert "got" in messages.pop()


def test_bad_precision():
    with pytest.raises(ValueError, match=r"fp64_tensor, fp32; got 'tf32'"):
        vdn_delta_factors(torch.zeros(64, 64), torch.zeros(64, 64), torch.ones(64), precision="tf32")


@pytest.mark.parametrize("beta_scale", [1, 50, 100])
def test_gradients(run, generator, beta_scale):
    """Against autograd through the chain in float64; 5e-6: three products with a float32 inverse, and their sum."""
    inputs = reference(generator, few(run, 16), 128, beta_scale)
    upstream = [torch.randn(inputs[0].shape, generator=generator) for _ in range(2)]
    leaves = [tensor.to(run.device).requires_grad_() for tensor in inputs]
    out = vdn_delta_factors(*leaves, **run.options)
    grads = torch.autograd.grad(out, leaves, [u.to(run.device) for u in upstream])
    doubles = [tensor.double().requires_grad_() for tensor in inputs]
    right = torch.autograd.grad(chain(*doubles), doubles, [u.double() for u in upstream])
    for mine, want in zip(grads, right, strict=True):
        assert relative_error(mine.cpu(), want) <= 5e-6
    assert same_bytes([grads[0]], [grads[0].mT])


def test_gradients_with_scales_and_one_output(run, generator):
    A, B, alpha = reference(generator, 3, 64, 50)
    upstream = torch.randn(A.shape, generator=generator)
    doubles = [tensor.double().requires_grad_() for tensor in (A, B, alpha)]
    _, J = chain(doubles[0] / 1008, doubles[1] / 32, doubles[2])
    right = torch.autograd.grad(J, doubles[:2], upstream.double())
    for wanted in ((0, 1), (0,), (1,)):
        leaves = [tensor.clone().to(run.device).requires_grad_(i in wanted) for i, tensor in enumerate((A, B, alpha))]
        _, J = vdn_delta_factors(*leaves, a_scale=1 / 1008, b_scale=1 / 32, **run.options)
        J.backward(upstream.to(run.device))
        for i, leaf in enumerate(leaves):
            assert (leaf.grad is None) == (i not in wanted)
            if i in wanted:
                assert relative_error(leaf.grad.cpu(), right[i]) <= 5e-6


def test_gradcheck_in_float64(generator):
    A, B, alpha = (tensor.double() for tensor in spectrum(generator, 2, 6, 5.0))
    # Only A's lower triangle is read, and its gradient is the symmetric one: so differentiate along symmetric A.
    function = lambda X, B, alpha: vdn_delta_factors((X + X.mT) / 2, B, alpha, a_scale=0.7, b_scale=1.3)  # noqa: E731
    assert torch.autograd.gradcheck(function, (A.requires_grad_(), B.requires_grad_(), alpha.requires_grad_()))


def test_double_backward_is_refused(device, generator):
    inputs = [tensor.to(device).requires_grad_() for tensor in spectrum(generator, 1, 64, 10.0)]
    T, _ = vdn_delta_factors(*inputs)
    (grad,) = torch.autograd.grad(T.sum() * inputs[2].sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        grad.sum().backward()


@pytest.mark.parametrize("setting", ["highest", "medium"])
def test_tf32_is_never_used(cuda, generator, setting):
    """Whatever the user allows elsewhere: the bytes are the same, on every path and in the backward."""
    inputs = [tensor.to(cuda) for tensor in reference(generator, 3)]
    results = []
    for precision in ("highest", setting):
        torch.set_float32_matmul_precision(precision)
        try:
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            out = vdn_delta_factors(*leaves, backend="torch")
            results.append([*out, *torch.autograd.grad(out[0].sum() + out[1].sum(), leaves)])
        finally:
            torch.set_float32_matmul_precision("highest")
    assert same_bytes(*results)


@pytest.mark.parametrize("precision", ["fp64_tensor", "fp32"])
def test_graph_replay_and_streams(cuda, generator, precision):
    fixed = [tensor.to(cuda) for tensor in reference(generator, 7)]
    vdn_delta_factors(*fixed, precision=precision, backend="fused")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = vdn_delta_factors(*fixed, precision=precision, backend="fused")
    stream = torch.cuda.Stream()
    for _ in range(3):
        fresh = [tensor.to(cuda) for tensor in reference(generator, 7)]
        for old, new in zip(fixed, fresh, strict=True):
            old.copy_(new)
        for tensor in out:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            eager = vdn_delta_factors(*fresh, precision=precision, backend="fused")
        stream.synchronize()
        assert same_bytes(out, eager)


@pytest.mark.parametrize("precision", ["fp64_tensor", "fp32"])
@pytest.mark.parametrize("d", [128, 64])
def test_nothing_outside_is_touched(cuda, generator, precision, d):
    """Canaries around exact-size buffers: NaN around inputs, which outputs would show, and a mark around outputs."""
    inputs = spectrum(generator, 3, d, 10.0)

    def framed(tensor: Tensor, value: float) -> tuple[Tensor, Tensor]:
        buffer = torch.full((tensor.numel() + 8192,), value, device=cuda)
        return buffer, buffer[4096:-4096].view(tensor.shape)

    on = []
    for tensor in inputs:
        _, inside = framed(tensor, float("nan"))
        inside.copy_(tensor)
        on.append(inside)
    frames, out = zip(*(framed(inputs[0], -7.0) for _ in range(2)), strict=True)
    vdn_delta_factors(*on, out=out, precision=precision, backend="fused")
    assert same_bytes(out, vdn_delta_factors(*(t.to(cuda) for t in inputs), precision=precision, backend="fused"))
    for frame in frames:
        assert (frame[:4096] == -7).all()
        assert (frame[-4096:] == -7).all()


@pytest.mark.parametrize("precision", ["fp64_tensor", "fp32"])
def test_many_matrices(cuda, generator, precision):
    # More than one grid dimension other than x holds, and past 2**31 bytes; every matrix must come out as the first.
    A, B, alpha = (tensor.to(cuda) for tensor in spectrum(generator, 1, 64, 10.0))
    n = 140_000
    T, J = vdn_delta_factors(
        A.expand(n, 64, 64), B.expand(n, 64, 64), alpha.expand(n, 64), precision=precision, backend="fused"
    )
    assert (T == T[0]).all()
    assert (J == J[0]).all()


def test_ambient_backend_reaches_the_backward(cuda, generator):
    leaves = [tensor.to(cuda).requires_grad_() for tensor in reference(generator, 2)]
    with use_backend("fused"):
        T, J = vdn_delta_factors(*leaves)
    torch.autograd.grad(T.sum() + J.sum(), leaves)
