"""The four checks can fail: an operator without faults passes them all, and each planted fault is caught by its own."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jit_kernels.checks import invariance
from jit_kernels.checks.accuracy import EDGE_ROWS, with_edges
from jit_kernels.checks.compare import differing_rows, element_error, relative_error, same_bytes
from jit_kernels.checks.layouts import ALONE, CHUNKS, PADDING, arrange, collect, layouts, lengths
from jit_kernels.checks.result import CHECKS, Result
from jit_kernels.checks.run import check
from jit_kernels.checks.workload import Sample, Tolerance, Workload
from jit_kernels.dispatch import OPERATORS, SUPPORTED, Operator

# The operator: x [N, 16] float32 times s [N], with a "fused kernel" that is plain torch and runs on the CPU.

WIDTH = 16
PAGE = Path(__file__).resolve().parent.parent / "docs" / "checks.md"
FORWARD_ACCURACY, FORWARD_INVARIANCE, GRADIENT_ACCURACY, GRADIENT_INVARIANCE = CHECKS
SMALL = 1 + 2**-20  # a factor within the tolerance, which the bytes betray
LIMIT = Tolerance(norm=2**-18, rtol=2**-18, atol=2**-40, reason="well above a float32 rounding and SMALL")
PADDED = ("left-padded", "right-padded")
_names = (f"planted_{number}" for number in itertools.count())


def make(generator, count):
    return torch.randn(count, WIDTH, generator=generator), torch.randn(count, generator=generator)


def scale(x, s):
    return x * s.unsqueeze(-1)


def gradient(ctx, grad):
    x, s = ctx.saved_tensors
    return scale(grad, s), (grad * x).sum(-1)


def run(monkeypatch, fused=scale, gradient=gradient, fallback=scale, repeats=2, backend="auto", count=40, **changes):
    """The planted operator's result."""
    operator = Operator(
        name=next(_names),
        schema="(Tensor x, Tensor s) -> Tensor",
        validate=lambda x, s: None,
        supports=lambda x, s: SUPPORTED,
        outputs=lambda x, s: torch.empty_like(x),
        build=lambda target: None,
        fused=fused,
        fallback=fallback,
        gradient=gradient,
        public=False,
    )
    settings = {
        "samples": (Sample("some rows", make, count=1000, cpu_count=count),),
        "gold": lambda x, s: (scale(x, s),),
        "baseline": scale,
        "baseline_name": "torch",
        "outputs": {"out": LIMIT},
        "gradients": {"x": LIMIT, "s": Tolerance(norm=2**-10, reason="a sum of 16 products may cancel")},
        "bitwise_fallback": False,
        "sequence": "prompt",
    }
    workload = Workload(**(settings | changes))
    monkeypatch.setitem(sys.modules, f"jit_kernels.bench.{operator.name}", SimpleNamespace(WORKLOAD=workload))
    return check(operator, workload.samples[0], torch.device("cpu"), backend, repeats)


def failing(result):
    return [one.name for one in result.checks if one.failures]


def failures(result, name):
    return next(one.failures for one in result.checks if one.name == name)


def failing_layouts(result, name):
    return [failure.split(":")[0] for failure in failures(result, name)]


NAMES = [layout.name for layout in layouts(lengths(40))]


@pytest.mark.parametrize("count", [1, 2, 14, 40, 200])
def test_an_operator_without_faults_passes_all_four(monkeypatch, count):
    result = run(monkeypatch, count=count, bitwise_fallback=True)
    assert result.failures == []
    assert [one.name for one in result.checks] == list(CHECKS)
    assert result.ran == "fused"
    for one in (result.checks[1], result.checks[3]):
        assert list(one.details["layouts"]) == NAMES
        assert one.details["repeats"] == 2


# Forward


def test_a_forward_that_depends_on_the_batch_size(monkeypatch):
    def fused(x, s):
        return scale(x, s) * (SMALL if s.numel() > 30 else 1)

    result = run(monkeypatch, fused)
    assert failing(result) == [FORWARD_INVARIANCE]
    found = failing_layouts(result, FORWARD_INVARIANCE)
    assert found == ["packed in chunks", "each sequence whole", "each sequence in chunks", "each row alone"]


def test_a_forward_that_depends_on_the_position_in_the_batch(monkeypatch):
    def fused(x, s):
        out = scale(x, s)
        out.view(-1, WIDTH)[7:8] *= SMALL
        return out

    result = run(monkeypatch, fused)
    assert failing(result) == [FORWARD_INVARIANCE]
    assert failing_layouts(result, FORWARD_INVARIANCE) == NAMES[1:]
    assert "row 5 of prompt 2" in result.failures[0]  # prompts of 0, 2, 6 … rows: row 7 of the batch
    assert "out in 2 of 40 rows" in result.failures[0]


@pytest.mark.parametrize("name", NAMES[1:])
def test_each_layout_alone_catches_a_fault(monkeypatch, name):
    """A fault in the rows that a layout moves or cuts off is found by that layout without the others' help."""
    monkeypatch.setattr(
        invariance, "layouts", lambda sizes: [one for one in layouts(sizes) if one.name in ("packed", name)]
    )

    def fused(x, s):
        out = scale(x, s)
        out.view(-1, WIDTH)[7:8] *= SMALL
        return out

    result = run(monkeypatch, fused)
    assert failing_layouts(result, FORWARD_INVARIANCE) == [name]


def test_a_forward_that_differs_from_call_to_call(monkeypatch):
    calls = itertools.count()

    def fused(x, s):
        return scale(x, s) * (SMALL if next(calls) % 50 == 20 else 1)

    result = run(monkeypatch, fused, repeats=50)
    assert failing(result) == [FORWARD_INVARIANCE]
    assert "bytes differ between repeats" in result.failures[0]


def test_a_forward_that_reads_padding(monkeypatch):
    def fused(x, s):
        return scale(x, s) + 0 * x.sum()

    result = run(monkeypatch, fused)
    assert failing(result) == [FORWARD_INVARIANCE]
    assert failing_layouts(result, FORWARD_INVARIANCE) == list(PADDED)


def test_a_forward_that_takes_one_batch_dimension_only(monkeypatch):
    def fused(x, s):
        if x.ndim != 2:
            raise RuntimeError("x must have two dimensions\nand more words")
        return scale(x, s)

    result = run(monkeypatch, fused)
    assert failing(result) == [FORWARD_INVARIANCE, GRADIENT_INVARIANCE]
    assert "left-padded: RuntimeError: x must have two dimensions" in failures(result, FORWARD_INVARIANCE)


def test_a_forward_that_raises(monkeypatch):
    def fused(x, s):
        raise ZeroDivisionError

    result = run(monkeypatch, fused)
    assert failing(result) == list(CHECKS)
    assert result.ran == "fused"
    assert failures(result, FORWARD_ACCURACY) == ["the packed batch: ZeroDivisionError"]
    assert result.milliseconds is None


def test_one_element_that_is_off_by_a_bfloat16_rounding(monkeypatch):
    def fused(x, s):
        out = scale(x, s)
        out[..., 3] *= 1 + 2**-7
        return out

    result = run(monkeypatch, fused)
    assert failing(result) == [FORWARD_ACCURACY]
    assert "an element of out is off" in result.failures[1]
    assert LIMIT.reason in result.failures[1]
    # The norm alone doesn't see it in a long row.
    loose = {"out": Tolerance(norm=2**-7, rtol=2**-18, atol=2**-40, reason="the elements' own")}
    assert len(run(monkeypatch, fused, outputs=loose).failures) == 1


def test_a_nan_is_an_error_and_no_number_in_the_document(monkeypatch):
    def fused(x, s):
        return scale(x, s).masked_fill(s.unsqueeze(-1) > 1.0, float("nan"))

    result = run(monkeypatch, fused)
    assert failing(result) == [FORWARD_ACCURACY]
    assert result.as_dict()["error"] == {"out": None}


def test_a_zero_that_loses_its_sign_differs_from_the_fallback(monkeypatch):
    def fused(x, s):
        return scale(x, s) + 0.0  # -0.0 + 0.0 = +0.0; any other number stays itself

    assert run(monkeypatch, fused).failures == []
    result = run(monkeypatch, fused, bitwise_fallback=True)
    assert failing(result) == [FORWARD_ACCURACY]
    assert "out of edge values has other bytes than the CPU fallback" in result.failures[0]


def test_a_last_bit_differs_from_the_fallback(monkeypatch):
    def fused(x, s):
        return scale(x, s) * SMALL

    result = run(monkeypatch, fused, bitwise_fallback=True)
    assert failing(result) == [FORWARD_ACCURACY]
    assert "out of the input has other bytes" in result.failures[0]


# Gradient


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient": None}, "the operator has no backward"),
        ({"gradients": {}}, "the workload states no tolerance for the gradient of x, s"),
        ({"gradients": {"x": LIMIT}}, "the workload states no tolerance for the gradient of s"),
    ],
)
def test_a_missing_backward_fails(monkeypatch, changes, words):
    result = run(monkeypatch, **changes)
    assert failing(result) == [GRADIENT_ACCURACY, GRADIENT_INVARIANCE]
    assert failures(result, GRADIENT_ACCURACY) == [f"the packed batch: MissingBackwardError: {words}"]


def test_a_gradient_that_one_argument_does_not_get(monkeypatch):
    result = run(monkeypatch, gradient=lambda ctx, grad: (gradient(ctx, grad)[0], None))
    assert failing(result) == [GRADIENT_ACCURACY, GRADIENT_INVARIANCE]
    assert "no gradient reaches s" in failures(result, GRADIENT_ACCURACY)[0]


def test_a_gradient_that_depends_on_the_batch(monkeypatch):
    def depends(ctx, grad):
        grad_x, grad_s = gradient(ctx, grad)
        return grad_x * (SMALL if grad_s.numel() > 30 else 1), grad_s

    result = run(monkeypatch, gradient=depends)
    assert failing(result) == [GRADIENT_INVARIANCE]
    assert "grad_x in" in result.failures[0]
    assert "grad_s" not in result.failures[0]


def test_a_gradient_that_depends_on_the_position(monkeypatch):
    def depends(ctx, grad):
        grad_x, grad_s = gradient(ctx, grad)
        grad_s.view(-1)[0:1] *= SMALL
        return grad_x, grad_s

    result = run(monkeypatch, gradient=depends)
    assert failing(result) == [GRADIENT_INVARIANCE]
    assert "grad_s in" in result.failures[0]


def test_a_gradient_that_reads_padding(monkeypatch):
    def leaks(ctx, grad):
        grad_x, grad_s = gradient(ctx, grad)
        return grad_x + 0 * grad.sum(), grad_s

    result = run(monkeypatch, gradient=leaks)
    assert failing(result) == [GRADIENT_INVARIANCE]
    assert failing_layouts(result, GRADIENT_INVARIANCE) == list(PADDED)


def test_a_wrong_gradient(monkeypatch):
    def wrong(ctx, grad):
        grad_x, grad_s = gradient(ctx, grad)
        grad_x[..., 5] *= 1 + 2**-7
        return grad_x, grad_s

    assert failing(run(monkeypatch, gradient=wrong)) == [GRADIENT_ACCURACY]


def test_a_gradient_with_other_bytes_than_the_fallback(monkeypatch):
    def other(ctx, grad):
        grad_x, grad_s = gradient(ctx, grad)
        return grad_x + (0.0 if ctx.backend == "fused" else -0.0), grad_s

    assert run(monkeypatch, gradient=other).failures == []
    result = run(monkeypatch, gradient=other, bitwise_fallback=True)
    assert failing(result) == [GRADIENT_ACCURACY]
    assert "grad_x of edge values" in result.failures[0]


# What ran


def test_what_ran_is_named_in_every_call(monkeypatch):
    ran = []
    for backend in ("auto", "fused", "torch"):
        result = run(
            monkeypatch,
            lambda x, s: ran.append("fused") or scale(x, s),
            backend=backend,
            repeats=1,
            fallback=lambda x, s: ran.append("torch") or scale(x, s),
        )
        assert set(ran) == {result.ran} == {"torch" if backend == "torch" else "fused"}
        ran.clear()


def test_the_document_has_the_provenance_of_a_row(monkeypatch):
    found = run(monkeypatch).as_dict()
    assert found["device"] == "cpu"
    assert found["inputs"]["x"] == {"dtype": "float32", "shape": [40, WIDTH]}
    assert sum(found["sequences"]) == found["count"] == 40
    assert list(found["checks"]) == list(CHECKS)
    assert found["checks"][FORWARD_ACCURACY]["tolerance"]["out"]["reason"] == LIMIT.reason
    assert found["ok"]


# Layouts


@given(count=st.integers(1, 400))
def test_each_layout_holds_each_row_once(count):
    sizes = lengths(count)
    assert sum(sizes) == count
    assert sizes[0] == 0
    assert len(layouts(sizes)) == 8
    for layout in layouts(sizes):
        expected = min(count, ALONE) if layout.name == "each row alone" else count
        assert layout.rows.sort().values.tolist() == list(range(expected)), layout.name
        padded = any(bool((places == PADDING).any()) for places in layout.calls)
        assert padded == (layout.name in PADDED), layout.name


@given(count=st.integers(1, 300), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_what_is_arranged_comes_back_in_order(count, dtype):
    rows = torch.arange(count * 6).view(count, 2, 3).to(dtype)
    for layout in layouts(lengths(count)):
        calls = [arrange(rows, places) for places in layout.calls]
        assert same_bytes([collect(layout, calls)], [rows[: len(layout.rows)]]), layout.name
        for places, call in zip(layout.calls, calls, strict=True):
            assert call.shape == (*places.shape, 2, 3)
            assert call.dtype == dtype
            assert bool(call[places != PADDING].isfinite().all())
            assert (places != PADDING).all() or call.isnan().any()


def test_padding_holds_nan_and_both_infinities():
    (places,) = next(layout.calls for layout in layouts([0, 1, 3]) if layout.name == "left-padded")
    padding = arrange(torch.zeros(4, 2), places)[places == PADDING]
    assert {str(value) for value in padding.flatten().tolist()} >= {"nan", "inf", "-inf", "1.0"}


def test_an_output_of_another_shape_is_refused():
    layout = layouts([2, 3])[0]
    with pytest.raises(ValueError, match=r"float32\[4, 2\] on cpu for a batch of shape \[5\]"):
        collect(layout, [torch.zeros(4, 2)])


def test_edges_hold_what_random_numbers_do_not():
    x, s = with_edges([torch.rand(EDGE_ROWS, 4) + 0.5, torch.rand(EDGE_ROWS) + 0.5])
    assert same_bytes([x[:2], s[:1]], [-torch.zeros(2, 4), -torch.zeros(1)])
    assert s[1] > 0
    assert bool((x[2] < 2e-38).all() and (x[2] > 0).all())
    assert x.isnan().sum() == 1
    assert x.isposinf().sum() == 2
    assert x.isneginf().sum() == 1


# The page about them


def stated(tolerance):
    """As docs/checks.md writes it."""

    def number(value):
        base, exponent = (2, math.log2(value)) if math.log2(value).is_integer() else (10, math.floor(math.log10(value)))
        factor = round(value / base**exponent)
        power = f"{base}{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
        return power if factor == 1 else f"{factor}·{power}"

    if tolerance.rtol is None:
        return f"each row: {number(tolerance.norm)} of its norm"
    return (
        f"each element: {number(tolerance.atol) + ' + ' if tolerance.atol else ''}{number(tolerance.rtol)} of its value"
    )


@pytest.mark.skipif(not PAGE.exists(), reason="the docs are in the checkout, and not in a wheel")
def test_the_page_states_the_tolerances_checks_and_layouts():
    page = PAGE.read_text()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    for name, operator in OPERATORS.items():
        workload = operator.workload
        gradients = {f"grad_{argument}": tolerance for argument, tolerance in workload.gradients.items()}
        for output, tolerance in {**workload.outputs, **gradients}.items():
            (allowed,) = [row[2] for row in table if row[0] == f"`{name}`" and output in row[1].split(", ")]
            assert allowed == stated(tolerance), (name, output)
    for check_name in CHECKS:
        assert f"| {check_name} |" in page
    for field in Result("", "", "", 0, 0, []).as_dict():
        assert f"`{field}`" in page, field
    assert all(name in page for name in NAMES)
    assert ", ".join(map(str, CHUNKS)) in page
    assert f"the first {ALONE}" in page


# Comparing


@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [
        ([[0.0, 1.0], [0.0, 1.0]], [[0.0, 1.0], [-0.0, 1.0]], [1]),
        ([[float("nan")], [1.0]], [[float("nan")], [1.0]], []),
        ([1.0, 2.0, 3.0], [0.0, 2.0, 4.0], [0, 2]),
    ],
)
def test_differing_rows(first, second, rows):
    assert differing_rows(torch.tensor(first), torch.tensor(second)) == rows


def test_other_shapes_and_dtypes_are_refused_and_not_broadcast():
    with pytest.raises(ValueError, match=r"float32\[3\] on cpu where float32\[3, 1\]"):
        differing_rows(torch.zeros(3), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="float64"):
        differing_rows(torch.zeros(3), torch.zeros(3).double())
    with pytest.raises(ValueError, match="was expected"):
        relative_error(torch.zeros(3, 1), torch.zeros(3, 3))


def test_errors_of_one_row_and_one_element():
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0], [100.0, 0.0]])
    out = exact + torch.tensor([[0.0, 0.5], [0.0, 0.0], [1.0, 0.0]])
    assert relative_error(out, exact) == pytest.approx(0.1)  # of the first row: 0.5 of 5
    assert element_error(out, exact, rtol=2**-3, atol=0.0) == pytest.approx(1.0)
    assert element_error(out, exact, rtol=0.0, atol=0.25) == pytest.approx(4.0)
    assert relative_error(exact, exact) == 0.0
    assert relative_error(exact.masked_fill(exact == 3, float("nan")), exact) == float("inf")
    assert relative_error(exact + 1e-30, exact) == float("inf")  # the second row should be zero
    assert relative_error(exact[:0], exact[:0]) == 0.0
