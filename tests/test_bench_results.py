"""The benchmark's documents: what is derived from times, how they are kept, and how two of them compare."""

from __future__ import annotations

import json
from pathlib import Path

import cli
import pytest
from jit_kernels.bench.compare import changes, compare
from jit_kernels.bench.record import Ceiling, Document, Estimate, Row, Timing, growths
from jit_kernels.bench.row import with_rates


def estimate(median: float, spread: float = 0.0, stable: bool = True) -> Estimate:
    half = median * spread / 2
    return Estimate(median=median, low=median - half, high=median + half, samples=30, stable=stable)


def row(times: dict[str, Estimate | None], count: int = 4, floor: float | None = None, **fields) -> Row:
    timings = [
        Timing(candidate=name, ours=name.startswith("ours"), gate="passed", eager=time, bytes=4_000_000)
        for name, time in times.items()
    ]
    given = {"operator": "op", "direction": "forward", "label": f"N={count}", "parameters": {"count": count, "d": 8}}
    return Row(
        **given | {"bytes": 4_000_000, "flops": 10**9, "floor": floor, "floor_by": None, "began": 0.0} | fields,
        timings=timings,
    )


def test_rates_floors_and_shares_come_from_the_runs_own_ceilings():
    found = [
        Ceiling(name="copy", unit="GB/s", value=estimate(4000.0)),
        Ceiling(name="ffma", unit="TFLOP/s", value=estimate(60.0)),
        Ceiling(name="fp64_tensor", unit="TFLOP/s", value=estimate(50.0)),
        Ceiling(name="empty_kernel", unit="us", value=estimate(0.5)),
    ]
    made = with_rates(row({"ours": estimate(20.0), "peer": None}), found, {"ours": "fp64_tensor", "peer": "ffma"})
    assert made.floor == pytest.approx(10**9 / 60e12 * 1e6)  # 16.7 us of FLOP against 1 us of bytes
    assert made.floor_by == "ffma"
    ours, peer = made.timings
    assert ours.gb_per_s == pytest.approx(200.0)
    assert ours.tflop_per_s == pytest.approx(50.0)
    assert ours.share == pytest.approx({"copy": 0.05, "fp64_tensor": 1.0})
    assert peer.share == {}
    small = with_rates(row({}, bytes=4, flops=4), found, {})
    assert (small.floor, small.floor_by) == (0.5, "empty_kernel")
    assert with_rates(row({}), [], {}).floor is None


def test_growth_is_what_one_more_costs():
    (found,) = growths(
        [row({"ours": estimate(10.0)}, 1), row({"ours": estimate(70.0)}, 21), row({"ours": estimate(30.0)}, 11)]
    )
    assert (found.along, found.fixed, found.sizes, found.times) == ("count", {"d": 8}, [1, 11, 21], [10.0, 30.0, 70.0])
    assert found.per_unit == pytest.approx(4.0)
    assert growths([row({"ours": estimate(1.0)})]) == []
    assert growths([row({"ours": estimate(1.0)}, label=label) for label in "ab"]) == []


# Result files and their comparison


def document_of(*rows_: Row, **fields) -> Document:
    given = {"provenance": {"device": "a GPU"}, "rows_set": "full", "timer": "cuda", "ok": True, "complete": True}
    return Document(**given | {"seconds": 1.0} | fields, rows=list(rows_))


def test_a_result_file_is_read_back(tmp_path):
    written = document_of(
        row({"ours": estimate(1.25)}, floor=1.0), ceilings=[Ceiling(name="copy", unit="GB/s", value=estimate(4e3))]
    )
    written.write(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["schema"] == 2
    read = Document.read(tmp_path / "a.json")
    assert read == written
    assert read.ceiling("copy") == 4e3
    assert read.ceiling("ffma") is None
    assert read.row("op", "forward", "N=4").timing("ours").eager.median == 1.25
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]


def test_an_infinite_error_is_written_and_read(tmp_path):
    nan = row({}).model_copy(
        update={"timings": [Timing(candidate="x", ours=False, gate="failed", errors={"out": float("inf")})]}
    )
    document_of(nan).write(tmp_path / "a.json")
    strict = json.loads(
        (tmp_path / "a.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    assert strict["rows"][0]["timings"][0]["errors"] == {"out": "Infinity"}
    assert Document.read(tmp_path / "a.json").rows[0].timings[0].errors == {"out": float("inf")}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Invalid JSON"),
        ('{"schema": 2}', "provenance: Field required"),
        ('{"schema": 1}', "schema: Input should be 2"),
        ("[]", "the file: Input should be an object"),
    ],
)
def test_what_is_no_result_file_is_refused_by_name(tmp_path, text, says):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        Document.read(tmp_path / "x.json")
    assert "x.json is no result file" in str(caught.value)


def verdicts(old: Document, new: Document) -> dict[str, str]:
    return {f"{one.label} {one.candidate}": one.verdict for one in compare(old, new)}


def test_a_figure_is_worse_when_its_ratio_to_the_ceiling_grows_beyond_noise():
    times = {"ours": estimate(12.0), "ours noisy": estimate(12.0, 0.1), "peer": estimate(12.0)}
    old = document_of(row(times, floor=10.0))
    same = document_of(row(times | {"ours": estimate(12.3)}, floor=10.0))
    slower = {name: estimate(13.0, time.spread) for name, time in times.items()}
    assert verdicts(old, same) == {"N=4 ours": "same", "N=4 ours noisy": "same"}
    assert verdicts(old, document_of(row(slower, floor=10.0))) == {"N=4 ours": "worse", "N=4 ours noisy": "same"}
    # On a machine that is slower by as much, nothing got worse; on a faster one the same time is worse.
    assert set(verdicts(old, document_of(row(slower, floor=10.0 * 13 / 12))).values()) == {"same"}
    assert verdicts(old, document_of(row(times, floor=9.0)))["N=4 ours"] == "worse"
    assert verdicts(old, document_of(row(times, floor=11.0)))["N=4 ours"] == "better"


def test_what_is_missing_new_or_red_is_told():
    ours = row({"ours": estimate(12.0)}, floor=10.0)
    other = row({"ours": estimate(12.0)}, 8, floor=10.0)
    red = ours.model_copy(update={"timings": [Timing(candidate="ours", ours=True, gate="failed", reason="off by one")]})
    assert verdicts(document_of(ours), document_of(other)) == {"N=4 ours": "missing", "N=8 ours": "new"}
    assert verdicts(document_of(ours), document_of(red)) == {"N=4 ours": "failed"}
    assert verdicts(document_of(red), document_of(ours)) == {"N=4 ours": "new"}
    (found,) = compare(document_of(ours), document_of(red))
    assert found.note == "off by one"


@pytest.mark.parametrize(("new", "code"), [(12.1, 0), (14.0, 1)])
def test_compare_exits_by_what_it_finds(tmp_path, new, code):
    paths = [str(tmp_path / name) for name in ("old.json", "new.json")]
    for path, time in zip(paths, (12.0, new), strict=True):
        document_of(row({"ours": estimate(time)}, floor=10.0)).write(Path(path))
    assert "N=4" in cli.run("bench", "compare", *paths, code=code).stdout
    found = json.loads(cli.run("bench", "compare", *paths, "--json", code=code).stdout)
    assert found["ok"] == (code == 0)
    assert found["differences"][0]["old"] == pytest.approx(1.2)


def test_compare_refuses_where_there_is_nothing_to_compare(tmp_path):
    path = tmp_path / "cpu.json"
    document_of(row({"ours": estimate(12.0)})).write(path)
    assert "nothing to compare" in cli.run("bench", "compare", str(path), str(path), code=1).output
    found = json.loads(cli.run("bench", "compare", str(path), str(path), "--json", code=1).stdout)
    assert (found["ok"], "nothing to compare" in found["lack"]) == (False, True)


def test_compare_refuses_a_run_that_broke_off(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    whole = document_of(row({"ours": estimate(12.0)}, floor=10.0))
    whole.model_copy(update={"complete": True}).write(old)
    whole.model_copy(update={"complete": False}).write(new)
    cli.run("bench", "compare", str(old), str(old))
    found = cli.run("bench", "compare", str(old), str(new), "--json", code=1)
    assert json.loads(found.stdout)["ok"] is False
    assert "broke off" in found.output


def test_the_two_committed_runs_agree():
    """Medians within 3 % where a call is long enough: from 1024 tokens of 7168, or 132 matrices."""
    results = Path(__file__).parent.parent / "bench" / "results"
    if not results.exists():
        pytest.skip("needs the checkout's bench/results")
    first, again = (Document.read(results / f"h200-bench{name}.json") for name in ("", "-again"))
    assert first.provenance["csrc"] == again.provenance["csrc"]
    found = []
    for row, timing, ratio in changes(first, again):
        sizes = row.parameters
        large = sizes["tokens"] * sizes["hidden_size"] >= 1024 * 7168 if "tokens" in sizes else sizes["count"] >= 132
        if large:
            found.append(timing.candidate)
            assert 0.97 <= ratio <= 1.03, (row.label, timing.candidate, ratio)
    assert len(found) > 50
