"""What the README says is what the files say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from jit_kernels.bench.readme import main as readme
from sample_run import document, rows

from jit_kernels.checks.provenance import sources_hash
from jit_kernels.checks.result import Check, Result
from jit_kernels.cli import commands

REPO = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (REPO / "README.md").exists(), reason="needs the checkout's README")


def test_figures_come_from_the_result_files():
    done = subprocess.run([sys.executable, "-m", "bench.readme", "--check"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_of_the_table_exists():
    named = re.findall(r"^\| `jit-kernels (\w+)", (REPO / "README.md").read_text(), re.M)
    assert set(named) == set(commands.commands)


def test_every_test_of_the_fault_table_exists():
    named = set(re.findall(r"`(test_\w+)`", (REPO / "README.md").read_text()))
    defined = {
        name for file in (REPO / "tests").glob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(named) > 20
    assert named <= defined


def test_every_link_leads_somewhere():
    for page in [REPO / "README.md", REPO / "CONTRIBUTING.md", *(REPO / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)


# The measured section, made in a checkout of its own


PAGE = "# x\n\n<!-- measured -->\nold\n<!-- end -->\n\nafter\n"
ORIGIN = {"device": "NVIDIA X100", "csrc": sources_hash(), "sglang": "0.5.23"}


def checked(error: float) -> dict:
    """An input of ``jit-kernels check``, as that command writes it."""
    result = Result("solve", "N=7", "cuda:0", 7, 7, [7], ran="fused", baseline_error={"T": 4e-7})
    result.checks = [Check("forward accuracy", details={"error": {"T": error}})]
    return result.as_dict()


def spread(low: float) -> dict:
    return {"median": low + 1, "low": low, "high": low + 2}


OTHERS = {
    "h200-check.json": (
        {"results": [checked(3e-8), checked(5e-8)]},
        ("on NVIDIA X100: 2 of 2 inputs hold", "`solve` T 5.0e-8 (what it replaces: 4.0e-7)"),
    ),
    "h200-gpu.json": (
        {
            "steps": {
                "warm start": {"ok": True, "milliseconds": {"a": 3.13, "b": 4.5}},
                "sanitizer": {"ok": True, "a memcheck": {"ok": True}, "a racecheck": {"ok": True}, "seconds": 3.0},
            }
        },
        ("takes 3.13 to 4.50 ms", "compute-sanitizer (memcheck, racecheck) found nothing in 2 of 2 runs"),
    ),
    "h200-model.json": (
        {
            "model": {"class": "Big", "transformers": "5.17", "parameters": 7_640_000_000, "layer_types": ["x"]},
            "forward": {
                "collapses_in_all": 12,
                "repeats_have_same_bytes": True,
                "logits_against_shipped": {"max_abs": 0.03125},
                "batch_against_samples": {"collapse": [{"same_bytes_given_same_inputs": True}] * 3},
            },
            "backward": {"tensors": 33, "largest_share_of_bound": 0.27},
        },
        ("`Big` of transformers 5.17 (7.6 B parameters", "Repeats have the same bytes; 3 of 3", "0.0312", "33", "27%"),
    ),
    "h200-sglang.json": (
        {
            "acceptance": [{"broken": []}, {"broken": ["T: error"]}],
            "timing": [
                {
                    "rule": "vdn_solve",
                    "matrices": 707,
                    "microseconds": {"ours": spread(154.0), "theirs": spread(252.0), "chain": spread(1136.0)},
                }
            ],
        },
        ("SGLang 0.5.23", "1 of 2 of its acceptance", "155 µs, 253 µs with SGLang's kernel, 1,137 µs with the torch"),
    ),
    "h200-flashinfer-bench.json": (
        {
            "evaluations": [
                {"solution": one, "evaluation": {"status": status}}
                for one, status in (("a", "PASSED"), ("a", "PASSED"), ("b", "RUNTIME_ERROR"))
            ]
        },
        ("2 of 3 evaluations of 2 solutions pass",),
    ),
}


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Nothing is made yet."""
    (tmp_path / "README.md").write_text(PAGE)
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    document().write(results / "h200-bench.json")
    for name, (found, _) in OTHERS.items():
        (results / name).write_text(json.dumps({"schema": 1, "provenance": ORIGIN} | found))
    return tmp_path


@pytest.fixture
def others(checkout) -> Path:
    """Without the benchmark, whose pictures take seconds to draw."""
    (checkout / "bench" / "results" / "h200-bench.json").unlink()
    return checkout


def run(checkout: Path, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(readme, ["--root", str(checkout), *arguments])
    return done.exit_code, done.output


def test_the_section_is_made_and_each_way_of_going_stale_is_caught(checkout):
    assert run(checkout, "--check")[0] == 1
    assert run(checkout) == (0, "")
    assert run(checkout, "--check") == (0, "")
    page, results = checkout / "README.md", checkout / "bench" / "results"
    text = page.read_text()
    assert text.startswith("# x\n\n<!-- measured -->\nOn one NVIDIA X100")
    assert text.endswith("<!-- end -->\n\nafter\n")

    page.write_text(text.replace("| 105 |", "| 95.0 |"))
    assert page.read_text() != text
    assert run(checkout, "--check") == (
        1,
        "README.md differs from the files in bench/results; run: python -m bench.readme\n",
    )
    page.write_text(text)

    faster = [row.model_copy(update={"floor": row.floor * 0.9}) for row in rows()]
    document(rows=faster).write(results / "h200-bench.json")
    code, says = run(checkout, "--check")
    assert code == 1
    assert "README.md differs" in says
    assert "h200-bench-scale.png was drawn from another file" in says


def test_the_section_has_each_shown_row_the_pictures_and_the_absent(checkout):
    run(checkout)
    text = (checkout / "README.md").read_text()
    # 8192 * 4096 * 10 bytes at 4000 GB/s are 83.9 us; ours takes 1.25 times that, the peer 1.5 times.
    assert "| forward, T=8192 H=4096 | 105 | 80% | 126 peer | 1.20 | 1.6e-7 | 2.0e-7 |" in text
    assert "| forward, T=512 H=4096 |" not in text  # not measured in detail
    assert "Not there to be measured: at sea (it sailed <yesterday>)." in text
    assert "SM clock 1978 to 1980 MHz, nothing held the clocks back" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len([link for link in links if link.endswith(".png")]) == 5
    for link in set(links) - {"docs/benchmark.md"}:
        assert (checkout / link).exists(), link


def test_a_second_run_is_told_by_how_far_it_lies_apart(checkout):
    def slower(timing):
        factor = 0.98 if timing.ours else 1.043
        graph = timing.graph and timing.graph.model_copy(update={"median": factor * timing.graph.median})
        return timing.model_copy(update={"graph": graph})

    results = checkout / "bench" / "results"
    found = [row.model_copy(update={"timings": [slower(timing) for timing in row.timings]}) for row in rows()]
    document(rows=found).write(results / "h200-bench-again.json")
    assert run(checkout) == (0, "")
    assert "differ by at most 2.0% for our candidates, 4.3% for peers" in (checkout / "README.md").read_text()
    other = document(rows=found)
    other.provenance["csrc"] = "0123"
    other.write(results / "h200-bench-again.json")
    code, says = run(checkout)
    assert code == 1
    assert "no second run of h200-bench.json's kernels" in says


@pytest.mark.parametrize("name", OTHERS)
def test_a_line_says_what_its_file_holds_and_whether_the_kernels_are_the_same(name, others):
    def line() -> str:
        assert run(others) == (0, "")
        (found,) = [line for line in (others / "README.md").read_text().splitlines() if f"/{name})" in line]
        return found

    for words in OTHERS[name][1]:
        assert words in line()
    assert "earlier kernels" not in line()
    path = others / "bench" / "results" / name
    found = json.loads(path.read_text())
    found["provenance"]["csrc"] = "0123"
    path.write_text(json.dumps(found))
    assert run(others, "--check")[0] == 1
    assert line().endswith("**Of earlier kernels.**")


def test_what_is_not_there_is_not_spoken_of(others):
    *first, last = sorted((others / "bench" / "results").iterdir())
    for path in first:
        path.unlink()
    assert run(others) == (0, "")
    assert re.findall(r"h200-[\w-]+", (others / "README.md").read_text()) == [last.stem] * 2
    last.unlink()
    code, says = run(others)
    assert code == 1
    assert "has none of h200-bench.json, h200-check.json" in says


def without(field: str):
    return lambda found: found.pop(field)


@pytest.mark.parametrize(
    ("name", "spoil", "says"),
    [
        (
            "h200-bench.json",
            lambda found: found.update(rows_set="quick"),
            "expected {'complete': True, 'timer': 'cuda'",
        ),
        ("h200-bench.json", lambda found: found.update(complete=False), "'complete': False"),
        ("h200-bench.json", lambda found: found["rows"][0]["timings"][0].update(gate="failed"), "scale forward jit_k"),
        ("h200-bench.json", without("rows"), "has no row with a time"),
        ("h200-check.json", without("results"), "lacks what the README says of it: field 'results'"),
        ("h200-check.json", lambda found: found["results"].clear(), "inputs that the fused kernels ran, all of them"),
        ("h200-check.json", lambda found: found["results"][0].update(ran="torch"), "fused kernels ran, all of them"),
        (
            "h200-gpu.json",
            lambda found: found["steps"]["warm start"]["milliseconds"].clear(),
            "a warm start that worked",
        ),
        ("h200-gpu.json", lambda found: found.update(schema=2), "expected a JSON object of schema 1, got 2"),
        ("h200-gpu.json", lambda found: found["steps"].clear(), "field 'warm start'"),
        ("h200-model.json", lambda found: found["forward"].clear(), "lacks what the README says of it"),
        ("h200-sglang.json", lambda found: found["timing"].clear(), "lacks what the README says of it"),
        ("h200-flashinfer-bench.json", without("provenance"), "field 'provenance'"),
    ],
)
def test_a_file_that_lacks_something_is_refused_by_name(name, spoil, says, checkout):
    path = checkout / "bench" / "results" / name
    found = json.loads(path.read_text())
    spoil(found)
    path.write_text(json.dumps(found))
    code, output = run(checkout)
    assert code == 1
    assert name in output
    assert says in output
    assert (checkout / "README.md").read_text() == PAGE


def test_a_truncated_file_and_a_readme_without_markers_are_refused(checkout):
    path = checkout / "bench" / "results" / "h200-gpu.json"
    path.write_text(path.read_text()[:100])
    code, says = run(checkout)
    assert code == 1
    assert re.search("h200-gpu.json is no JSON document, or cut off", says)
    (checkout / "README.md").write_text("# x\n")
    assert "has no section between <!-- measured --> and <!-- end -->" in run(checkout)[1]
    (checkout / "README.md").unlink()
    assert "this command is for a checkout" in run(checkout)[1]
