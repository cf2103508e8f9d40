"""The benchmark's report: a page with every figure of the file, pictures that are the file's, bad files refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jit_kernels.bench.report import drawing, figures, outdated, view, write
from jit_kernels.bench.report.view import Result
from PIL import Image
from sample_run import COPY, SCALE, SOLVE, document, rows


class Page(HTMLParser):
    """The lines of the tables, the words outside them, and what the page would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.lines: list[list[str]] = []
        self.words, self.links, self.styles = "", [], []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href") and value]
        if tag == "tr":
            self.lines.append([])
            self.styles.append(dict(attributes).get("class"))
        if tag in ("td", "th"):
            self.lines[-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data):
        if self._cell:
            self.lines[-1][-1] += data
        else:
            self.words += data

    def line(self, *cells: str) -> list[str]:
        """The one line that has these cells, as a whole."""
        (found,) = [line for line in self.lines if set(cells) <= set(line)]
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with run.json, the page and the pictures."""
    folder = tmp_path_factory.mktemp("report")
    document().write(folder / "run.json")
    write(folder / "run.json", folder)
    return folder


@pytest.fixture(scope="module")
def page(made) -> Page:
    return Page((made / "run.html").read_text())


# The page


def test_every_row_and_candidate_is_on_the_page(page):
    found = [line for line in page.lines if len(line) == 18]
    expected = [(row.label, timing) for row in rows() for timing in row.timings]
    assert len(found) == len(expected) + 3  # the heads of the three tables
    for label, timing in expected:
        wanted = [label, timing.candidate, timing.gate]
        times = [view.time(timing.graph), view.time(timing.eager), view.time(timing.host)]
        lines = [line for line in found if line[:3] == wanted and [line[3], line[5], line[6]] == times]
        assert lines, (label, timing)
        if timing.bytes:
            assert lines[0][10:12] == [view.figure(timing.gb_per_s, 4), view.figure(timing.tflop_per_s)]
            assert lines[0][16] == f"out {view.error(timing.errors['out'])}"
    # A full run holds each of these for 300 lines: what stands in one of them, as a person would check it.
    line = next(line for line in found if line[:2] == ["T=8192 H=4096", "jit_kernels"])
    # 8192 * 4096 * 10 bytes at 4000 GB/s are 83.9 us, and 1.25 times that 104.9.
    assert line[2:6] == ["passed", "105", "104 to 106", "125"]
    assert line[8:15] == ["1", "320", "3,200", "3.20", "80%" if COPY == 4000 else "", "5.3%", "83.9"]
    assert line[15] == "1.25"


def test_errors_ceilings_first_calls_candidates_and_growth_are_on_the_page(page):
    for one in document().accuracy:
        assert page.line(one.family, one.candidate)[4:] == [
            ", ".join(f"{name} {view.error(value)}" for name, value in found.items())
            for found in (one.worst, one.median)
        ]
    assert page.line("family 100000", "jit_kernels b")[4] == "T ∞, J ∞"
    assert page.line("copy", "GB/s")[1:] == ["4,000", "GB/s", "3,960 to 4,040"]
    assert page.line("empty_kernel")[1:3] == ["0.5000", "µs"]
    assert page.line("scale", "27.5")[2:5] == ["27.5", "3.25", "156"]
    for one in document().candidates:
        here = "yes" if one.present else "no: it sailed <yesterday>"
        assert page.line(f"{one.operator} {one.direction}", one.name, one.what)[3:] == [one.how, here]
    assert len([line for line in page.lines if line[4:5] == ["1 to 8192"]]) == len(SCALE) * 4
    # Of the solver's two largest sizes, by their bytes: (5000 - 700) * 128 * 128 * 12 at 4000 GB/s, twice, a matrix.
    assert page.line("solve forward", "jit_kernels a", "1 to 5000")[-1] == view.figure(growth("jit_kernels a"))


def growth(candidate: str) -> float:
    (found,) = [one for one in document().growth if one.candidate == candidate]
    return found.per_unit


def test_the_page_needs_nothing_else(page):
    assert len(page.links) == 5
    assert all(link.startswith("data:image/png;base64,") for link in page.links)


def test_where_it_comes_from_stands_on_top_and_in_whole(page):
    for words in (
        "NVIDIA X100",
        "driver 599.1",
        "torch 2.11.0",
        "cuda 13.0",
        "commit abc1234",
        "SM clock 1978 to 1980",
    ):
        assert words in page.words, words
    assert "nothing held the clocks back" in page.words
    for name, value in document().provenance.items():
        assert page.line(name, value)
    assert page.line("3", "1978 to 1980") == ["3", "1978 to 1980", "3201", "40 to 42", "300", "nothing"]


def test_absent_peers_are_listed_with_the_reason(page):
    assert ["scale forward", "at sea", "it sailed <yesterday>", "pip install at sea"] in page.lines


def test_unstable_figures_are_marked_and_the_others_are_not(page):
    marked = [line for line in page.lines if any(cell.startswith("~") for cell in line) and len(line) == 18]
    assert {(line[0], line[1]) for line in marked} == {
        (row.label, timing.candidate)
        for row in rows()
        for timing in row.timings
        if timing.graph and not timing.graph.stable
    }
    assert marked


def test_lines_of_ours_are_set_off(page):
    ours = {"jit_kernels", "jit_kernels a", "jit_kernels b"}
    candidates = {one.name for one in document().candidates}
    marks = {}
    for line, style in zip(page.lines, page.styles, strict=True):
        for name in candidates & set(line[1:4]):  # where a table has its candidates
            marks.setdefault(name, set()).add(style)
    del marks["at sea"]  # also in the table of absent ones
    assert marks == {name: {"ours" if name in ours else None} for name in candidates - {"at sea"}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"provenance": {"device": "X", "csrc": "0123"}}, "The kernels have changed since"),
        ({"complete": False}, "The run broke off"),
        ({"notes": ["clocks were held back in 3 of 9 readings: power"]}, "Clocks were held back in 3 of 9 readings"),
        ({}, "solve forward: red failed its gate on 3 of 3 input sizes and was not timed there (out: error 1.0e+00"),
    ],
)
def test_the_page_warns(fields, says, tmp_path, page):
    document(**fields).write(tmp_path / "run.json")
    assert says in " ".join(Result.read(tmp_path / "run.json").warnings)
    if fields:
        assert says not in page.words
    else:
        assert says in page.words


def test_a_run_without_ceilings_has_no_roofline_and_says_so(tmp_path):
    cpu = [
        row.model_copy(update={"floor": None, "timings": [t.model_copy(update={"host": None}) for t in row.timings]})
        for row in rows()
    ]
    document(timer="cpu", ceilings=[], rows=cpu[-1:], accuracy=[], clocks=[]).write(tmp_path / "run.json")
    names = {path.name for path in write(tmp_path / "run.json", tmp_path)}
    assert names == {"run.html", "run-solve.png"}
    assert (
        "No roofline: this run has no ceilings, for it had no GPU." in Page((tmp_path / "run.html").read_text()).words
    )


# The pictures


def test_the_same_file_gives_the_same_bytes_whatever_the_settings(made, tmp_path):
    (tmp_path / "matplotlibrc").write_text("font.size: 20\naxes.facecolor: red\nsavefig.dpi: 10\n")
    done = subprocess.run(
        [sys.executable, "-m", "jit_kernels.cli", "bench", "report", made / "run.json", "--output", tmp_path / "new"],
        env={**os.environ, "MPLCONFIGDIR": str(tmp_path), "TZ": "Asia/Tokyo"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    before = {path.name: path.read_bytes() for path in made.iterdir() if path.suffix != ".json"}
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == before
    assert done.stdout.split() == [
        str(tmp_path / "new" / f"run{name}")
        for name in ("-scale.png", "-solve.png", "-solve-forward-accuracy.png", "-roofline.png", "-host.png", ".html")
    ]


def test_pictures_are_wide_enough_for_a_readme_and_name_their_file(made):
    digest = Result.read(made / "run.json").digest
    pictures = sorted(made.glob("*.png"))
    assert len(pictures) == 5
    for path in pictures:
        picture = Image.open(path)
        assert picture.width == 1660  # twice the 830 px of a README
        assert picture.info == {"Source": f"sha256:{digest}"}  # no date and no release among them
        assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_colours_are_those_of_the_palette(made):
    seen = Image.open(made / "run-scale.png").convert("RGB").getcolors(1 << 20)
    colours = {f"#{r:02X}{g:02X}{b:02X}" for _, (r, g, b) in seen}
    assert {view.OURS[0], *view.PEERS[:2]} <= colours


def test_a_candidate_keeps_its_colour_in_both_directions_and_ours_are_blue(made):
    result = Result.read(made / "run.json")
    styles = {name: result.style("solve", name) for name in (*SOLVE, "red")}
    assert (styles["jit_kernels a"].color, styles["jit_kernels b"].color) == view.OURS
    assert len({style.color for style in styles.values()}) == len({style.marker for style in styles.values()}) == 5
    assert result.style("scale", "at sea") != result.style("scale", "peer")
    with pytest.raises(KeyError):
        result.style("scale", "stranger")


def test_bars_are_the_rows_times_and_long_ones_are_cut(made):
    result = Result.read(made / "run.json")
    (forward, _) = result.operators["scale"]
    with drawing.look():
        drawn = figures.speed(result, "scale", result.operators["scale"])
    left, right = drawn.axes[:2]
    assert left.get_title("left") == "forward, T=8192 H=4096"
    assert [label.get_text() for label in left.get_yticklabels()] == ["jit_kernels", "peer", "eager torch", "at sea"]
    times = {timing.candidate: timing.time.median for timing in forward.headline.timings}
    cut = figures.CUT * times["jit_kernels"]
    assert [bar.get_width() for bar in left.patches] == pytest.approx([times["jit_kernels"], times["peer"], cut])
    said = [text.get_text() for text in left.texts]
    assert said == ["105", "126 (1.20×)", "839 (8.00×)", "absent", " floor 83.9"]  # noqa: RUF001
    curves = {tuple(line.get_xdata()): line for line in right.lines if len(line.get_xdata()) == 3}
    assert list(curves) == [(1, 512, 8192)]
    assert right.get_xlabel() == "tokens"
    assert right.get_ylabel() == left.get_xlabel().removesuffix(" (times ours)") == "time of a call, µs"


def test_an_eager_time_and_a_failed_gate_are_told_on_the_bars(made):
    result = Result.read(made / "run.json")
    with drawing.look():
        left = figures.speed(result, "solve", result.operators["solve"]).axes[0]
    assert [label.get_text() for label in left.get_yticklabels()][-1] == "red"
    said = [text.get_text() for text in left.texts]
    assert sum("eager" in text for text in said) == 1
    assert "failed its gate" in said


def test_errors_are_drawn_against_the_condition_number(made):
    result = Result.read(made / "run.json")
    (group,) = result.operators["solve"]
    with drawing.look():
        of_t, of_j = figures.accuracy(result, group).axes
    curves = [line for line in of_j.lines if len(line.get_xdata()) == 3]
    assert [list(line.get_xdata()) for line in curves] == [[10.0, 1e3, 1e5]] * 3  # a, and the chains as one
    assert list(curves[0].get_ydata()) == [8e-8] * 3
    assert [
        len(line.get_xdata()) for line in of_t.lines if len(line.get_xdata()) == 2 and line.get_marker() == "D"
    ] == [2]
    assert {text.get_text() for text in of_j.texts} == {*SOLVE, "float32 rounding"}


def test_the_roofline_stands_on_the_runs_own_ceilings(made):
    result = Result.read(made / "run.json")
    with drawing.look():
        axes = figures.roofline(result, result.operators["scale"]).axes[0]
    roof = next(line for line in axes.lines if len(line.get_xdata()) == 3)
    xs, ys = roof.get_xdata(), roof.get_ydata()
    assert ys[0] / xs[0] == pytest.approx(COPY / 1e3)
    assert list(ys[1:]) == [60.0, 60.0]
    said = {text.get_text() for text in axes.texts}
    assert {"copy 4.00 TB/s", "fp32 60.0 TFLOP/s", "jit_kernels  80%", "peer  67%", "eager torch  10%"} == said


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=12), st.floats(0.01, 0.5))
def test_labels_are_moved_apart_and_no_further_than_needed(positions, gap):
    wanted = sorted(positions)
    found = drawing.apart(wanted, gap)
    assert all(after - before >= gap - 1e-9 for before, after in pairwise(found))
    if all(after - before > gap for before, after in pairwise(wanted)):
        assert found == pytest.approx(wanted)
    assert sum(found) == pytest.approx(sum(wanted), abs=1e-6)  # least squares keeps the mean


# Words and numbers


def test_errors_are_short():
    assert [view.error(value) for value in (4.12e-8, 0.00166, 2e-12, float("inf"), float("nan"), None)] == [
        *("4.1e-8", "1.7e-3", "2.0e-12", "∞", "∞", ""),
    ]


@pytest.mark.parametrize(
    ("value", "digits", "says"),
    [
        (133.592, 3, "134"),
        (17.72, 3, "17.7"),
        (0.944667, 3, "0.945"),
        (2387.6, 3, "2,388"),
        (99.96, 3, "100"),
        (9.996, 3, "10.0"),
        (0.0, 3, "0"),
        (4273.16, 4, "4,273"),
        (float("inf"), 3, "∞"),
        (float("nan"), 3, "NaN"),
        (None, 3, ""),
    ],
)
def test_numbers_are_written_as_people_write_them(value, digits, says):
    assert view.figure(value, digits) == says


def test_the_headline_is_the_largest_row_in_detail_and_its_series_differs_in_count_alone(made):
    result = Result.read(made / "run.json")
    assert [group.headline.label for group in result.groups] == ["T=8192 H=4096"] * 2 + ["N=700 d=128"]
    assert [row.label for row in result.groups[0].series] == ["T=1 H=4096", "T=512 H=4096", "T=8192 H=4096"]
    assert [row.label for row in result.groups[2].shown] == ["N=1 d=128", "N=700 d=128"]


def test_a_sentence_says_how_fast_and_how_near(made):
    result = Result.read(made / "run.json")
    assert view.span([2.5, 1.25], "{:.2f}".format) == "1.25 to 2.50"
    assert view.in_short(result.operators["solve"]) == (
        "Forward, over 3 sizes, it is 7.50 times as fast as the fastest peer and reaches 50% of the floor's rate."
    )


# Bad files


def report(path: Path) -> str:
    """What the command says of a file that it must refuse."""
    done = subprocess.run(
        [sys.executable, "-m", "jit_kernels.cli", "bench", "report", path], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    assert list(path.parent.iterdir()) == [path]
    return done.stderr


def spoiled(change) -> str:
    found = json.loads(document().json_text())
    change(found)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (spoiled(lambda found: found.update(schema=99)), "schema: Input should be 2"),
        (document().json_text()[:5000], "Invalid JSON: EOF"),
        (spoiled(lambda found: found["rows"][0].pop("timings")), "rows.0.timings: Field required"),
        (spoiled(lambda found: found.update(rows=[])), "has no row with a time"),
        (
            spoiled(lambda found: found["candidates"].pop(0)),
            "figure of jit_kernels, which its list of candidates lacks",
        ),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, text, says):
    (tmp_path / "bad.json").write_text(text)
    said = report(tmp_path / "bad.json")
    assert "bad.json" in said
    assert says in said


def test_without_matplotlib_the_command_says_what_to_install(tmp_path):
    document().write(tmp_path / "run.json")
    code = "import sys; sys.modules['matplotlib'] = None; from jit_kernels.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "report", tmp_path / "run.json"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "the report needs matplotlib and jinja2: pip install 'jit-kernels[bench]'" in done.stderr


# Whether page and pictures are up to date


@pytest.fixture
def copied(made, tmp_path) -> Path:
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert outdated(tmp_path / "run.json", tmp_path) == []
    return tmp_path


def test_a_changed_file_a_missing_picture_and_an_edited_page_are_noticed(copied):
    (copied / "run-host.png").unlink()
    assert outdated(copied / "run.json", copied) == ["run-host.png is missing"]
    (copied / "run-host.png").write_bytes(b"not a picture")
    assert outdated(copied / "run.json", copied) == ["run-host.png was drawn from another file"]


def test_an_edited_page_is_noticed(copied):
    page = (copied / "run.html").read_text()
    (copied / "run.html").write_text(page.replace('<td class="number">105</td>', '<td class="number">95.0</td>'))
    assert outdated(copied / "run.json", copied) == ["run.html is not the page of run.json"]
    (copied / "run.html").unlink()
    assert outdated(copied / "run.json", copied) == ["run.html is missing"]


def test_a_changed_figure_is_noticed(copied):
    changed = json.loads((copied / "run.json").read_text())
    changed["rows"][0]["timings"][0]["graph"]["median"] *= 1.01
    (copied / "run.json").write_text(json.dumps(changed))
    assert len(outdated(copied / "run.json", copied)) == 5
