"""The cost model: its counts against the machine code, its arithmetic, and its predictions against the measured run."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import jit_kernels.bench
import pytest
from click.testing import CliRunner
from jit_kernels.bench.cost import collapse, delta_factors, delta_factors_backward, machine_code
from jit_kernels.bench.cost.__main__ import main
from jit_kernels.bench.cost.machine import B200, Machine, Prediction, expected, rows_of
from jit_kernels.bench.cost.markdown import BEGIN, END
from jit_kernels.bench.cost.report import WITHIN, report
from jit_kernels.bench.record import Ceiling, Clock, Document, Estimate, Row, Timing

from jit_kernels.jit.arch import Target

BENCH = next(Path(folder) for folder in jit_kernels.bench.__path__)
RESULTS = Path(os.environ.get("TEST_BENCH_RESULTS") or BENCH / "results" / "h200-bench.json")
COMMAND = "jit-kernels bench --output bench/results/h200-bench.json"

H200 = Machine("an H200", Target.parse("sm_90a"), 132, 1.98, 4466.0, 4096.0, 63.5, 66.1, 0.556)
CHIPS = [H200, expected(B200, H200)]
FORWARD = collapse.Forward(start=0.4, trip=0.7)
BACKWARD = collapse.Backward(start=0.9)
FP64 = delta_factors.Fp64Tensor(step=2800.0, product=1300.0)
FP32 = delta_factors.Fp32(step=1700.0, product=4000.0)
GRADIENTS = delta_factors_backward.Backward(FP64, FP32, cublas=0.4)
COLLAPSES, FACTORS = [FORWARD, BACKWARD], [FP64, FP32, GRADIENTS]


@pytest.fixture(autouse=True)
def _prebuilt(shared_cache, monkeypatch):
    """Builds that TEST_PREBUILT_KERNELS names a folder of are taken from there, as in test_machine_code."""
    if prebuilt := os.environ.get("TEST_PREBUILT_KERNELS"):
        monkeypatch.setenv("JIT_KERNELS_PREBUILT_DIR", prebuilt)


# The machine code

LISTING = """\
        /*0000*/                   S2R R0, SR_TID.X ;                    /* 0x1 */
        /*0010*/                   LDS.128 R4, [R0] ;                    /* 0x2 */
        /*0020*/              @!P0 FFMA R1, R2, R3, R1 ;                 /* 0x3 */
        /*0030*/                   FFMA2 R8, R2.F32x2, R4.F32, R8 ;      /* 0x4 */
        /*0040*/               @P1 BRA 0x20 ;                            /* 0x5 */
        /*0050*/                   DMMA.16x8x8 R12, R14, R16, R12 ;      /* 0x6 */
        /*0060*/                   DMMA.8x8x4 R12, R14, R16, R12 ;       /* 0x6 */
        /*0070*/              @!P2 BRA 0x10 ;                            /* 0x7 */
        /*0080*/                   EXIT ;                                /* 0x8 */
        /*0090*/                   BRA 0x90;                             /* 0x9 */
        /*00a0*/                   NOP;                                  /* 0xa */
"""


def test_a_listing_is_read_into_opcodes_and_innermost_loops():
    code, loops = machine_code.parse(LISTING)
    assert code.opcodes[:3] == ("S2R", "LDS.128", "FFMA")
    assert code.opcodes[-1] == "EXIT"  # what fills the rest of the function is left out
    assert [loop.opcodes for loop in loops if len(loop) > 1] == [("FFMA", "FFMA2", "BRA")]
    assert loops[0].multiply_adds == 3
    assert code.tensor_flop == 2 * 16 * 8 * 8 + 2 * 8 * 8 * 4


def test_a_tensor_instruction_of_unknown_shape_is_no_guess():
    with pytest.raises(ValueError, match="DMMA: a tensor-core instruction of unknown shape"):
        assert machine_code.Code(("DMMA",)).tensor_flop


def test_a_kernel_is_named_by_a_part_that_only_it_has(monkeypatch):
    monkeypatch.setattr(machine_code, "kernels", lambda *args: {"one_a": 1, "two_a": 2})
    assert machine_code.kernel("op", (), H200.target, "two") == 2
    with pytest.raises(ValueError, match="expected one kernel with 'a' in its name, found"):
        machine_code.kernel("op", (), H200.target, "a")


@pytest.mark.compiler
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: str(chip.target))
@pytest.mark.parametrize("d", [128, 64])
def test_the_tensor_instructions_are_those_that_the_model_counts(d, chip):
    code = FP64.code(chip, d)
    sweep, product = FP64.flop(chip, d)
    assert product == 2 * d**3  # the instructions in J's loop times its turns
    # The sweep's code holds, for a warp of d = 128, W, the diagonal, its tiles and their other form as the pivot's row;
    # for one of d = 64 a whole step, which is W and the diagonal for three row blocks and the three tiles between them.
    # Then two products that refine the inverse, once and in a loop.
    sweeps = {128: 2 + 2 * 4, 64: 3 * 3}[d] + 4
    assert code.tensor_flop - code.hottest("tensor_flop").tensor_flop == sweeps * FP64.PRODUCT_FLOP
    assert sweep < product < 2 * sweep


@pytest.mark.compiler
@pytest.mark.parametrize("d", [128, 64])
def test_blackwell_issues_half_as_much_for_a_multiply_add(d):
    here, there = (FP32.code(chip, d).hottest("multiply_adds") for chip in CHIPS)
    assert here.count("FFMA2") == 0 < there.count("FFMA2")
    assert here.multiply_adds == there.multiply_adds
    # 1 is a multiply-add alone, 0.5 an FFMA2: operands from shared memory and the loop itself come on top.
    before, after = (FP32.instructions_a_multiply_add(chip, d) for chip in CHIPS)
    assert 1 < before < 1.3
    assert 0.5 < after < 0.8


@pytest.mark.compiler
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: str(chip.target))
def test_all_streams_are_in_flight_before_the_first_is_used(chip):
    """What lets memory reach its rate: the model supposes it on both chips."""
    for model, streams in ((FORWARD, 4), (BACKWARD, 5)):
        opcodes = model.code(chip).opcodes
        used = opcodes.index("FMUL")
        assert sum(opcode == "LDG.E.128" for opcode in opcodes[:used]) == streams


@pytest.mark.compiler
def test_the_issue_of_instructions_bounds_no_large_collapse():
    for chip in CHIPS:
        for model in COLLAPSES:
            assert model.predict(chip, {"tokens": 8192, "hidden_size": 7168}).issue == 0.0


# Geometry


def test_blocks_that_fit_a_multiprocessor():
    assert H200.resident(registers=128, threads=256) == 2
    assert H200.resident(registers=58, threads=128) == 8
    assert H200.resident(registers=40, threads=64) == 24
    assert H200.resident(registers=16, threads=32) == 32
    assert H200.resident(registers=16, threads=1024) == 2


WHOLE = (1.0,)


@pytest.mark.parametrize(
    ("count", "d", "rounds"),
    [
        (1, 128, [((0.25,), 1)]),
        (33, 128, [((0.25,), 1)]),
        (34, 128, [((0.5,), 1)]),
        (66, 128, [((0.5,), 1)]),
        (67, 128, [(WHOLE, 1)]),
        (132, 128, [(WHOLE, 1)]),
        (133, 128, [((1.0, 0.5), 1)]),  # two whole ones on an SM each, and 131 in halves: 264 blocks
        (200, 128, [(WHOLE * 2, 1)]),
        (264, 128, [(WHOLE * 2, 1)]),
        (265, 128, [(WHOLE * 2, 1), (WHOLE, 1)]),
        (396, 128, [(WHOLE * 2, 1), (WHOLE, 1)]),
        (397, 128, [(WHOLE * 2, 1), (WHOLE * 2, 1)]),  # two whole ones, and 131 in halves: 264 blocks
        (707, 128, [(WHOLE * 2, 2), (WHOLE * 2, 1)]),
        (1414, 128, [(WHOLE * 2, 5), (WHOLE, 1)]),
        (1, 64, [((0.25,), 1)]),
        (132, 64, [((0.25,) * 4, 1)]),
        (133, 64, [((0.5,) * 3, 1)]),
        (264, 64, [((0.5,) * 4, 1)]),
        (265, 64, [(WHOLE * 3, 1)]),
        (1056, 64, [(WHOLE * 8, 1)]),
        (1057, 64, [(WHOLE * 8, 1), (WHOLE, 1)]),
        (1414, 64, [(WHOLE * 8, 1), (WHOLE * 3, 1)]),
    ],
)
def test_rounds_of_the_fp64_kernel(count, d, rounds):
    assert FP64.rounds(count, d, 132) == rounds


@pytest.mark.parametrize(
    ("count", "d", "rounds"),
    [
        (1, 128, [((0.25,), 1)]),
        (33, 128, [((0.25,), 1)]),
        (34, 128, [((0.5,), 1)]),
        (66, 128, [((0.5,), 1)]),
        (67, 128, [(WHOLE, 1)]),
        (132, 128, [(WHOLE, 1)]),
        (133, 128, [((1.0, 0.5), 1)]),  # two whole ones on an SM each, and 131 in halves: 264 blocks
        (264, 128, [(WHOLE * 2, 1)]),
        (265, 128, [(WHOLE * 2, 1), ((0.25,), 1)]),
        (396, 128, [(WHOLE * 2, 1), (WHOLE, 1)]),
        (397, 128, [(WHOLE * 2, 1), (WHOLE * 2, 1)]),
        (66, 64, [((0.25,) * 2, 1)]),
        (132, 64, [((0.5,) * 2, 1)]),
        (133, 64, [(WHOLE * 2, 1)]),
        (1056, 64, [(WHOLE * 8, 1)]),
        (1057, 64, [(WHOLE * 8, 1), ((0.25,), 1)]),
        (1414, 64, [(WHOLE * 8, 1), (WHOLE * 3, 1)]),
    ],
)
def test_rounds_of_the_fp32_kernel(count, d, rounds):
    assert FP32.rounds(count, d, 132) == rounds


@pytest.mark.parametrize("model", [FP64, FP32], ids=lambda model: model.candidate)
@pytest.mark.parametrize("d", [128, 64])
def test_the_rounds_hold_all_matrices(model, d):
    for count in range(1, 2000):
        room = 132 * sum(sum(blocks) * times for blocks, times in model.rounds(count, d, 132))
        assert room >= count, count


@pytest.mark.compiler
def test_waves_of_the_collapse():
    # 40 registers: 24 blocks of 64 threads or 12 of 128; 14 or 7 blocks a token of 7168.
    waves = [FORWARD.waves(H200, {"tokens": tokens, "hidden_size": 7168}) for tokens in (1, 146, 147, 226, 227)]
    assert waves == [1, 1, 1, 1, 2]
    # 58 registers: 8 blocks of 128 threads, 7 of them a token.
    waves = [BACKWARD.waves(H200, {"tokens": tokens, "hidden_size": 7168}) for tokens in (1, 150, 151, 302)]
    assert waves == [1, 1, 2, 3]


def test_lines_of_a_lower_triangle():
    assert delta_factors.lower_lines(64) == 128 * (32 + 2 * 32)
    assert delta_factors.lower_lines(128) == 128 * (1 + 2 + 3 + 4) * 32


def test_a_size_off_the_vector_path_is_refused():
    with pytest.raises(ValueError, match="hidden_size 5137: the model covers"):
        FORWARD.predict(H200, {"tokens": 1, "hidden_size": 5137})


# What every prediction must obey


def parameters_of(model, size):
    if model in COLLAPSES:
        return {"tokens": size, "hidden_size": 7168}
    return {"count": size, "head_dim": 128}


@pytest.mark.compiler
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: str(chip.target))
@pytest.mark.parametrize("model", COLLAPSES + FACTORS, ids=lambda model: f"{model.operator} {type(model).__name__}")
def test_more_takes_no_less_and_nothing_beats_its_floor(model, chip):
    sizes = [*range(1, 1100), 1414, 2828, 5656, 8192]
    before = 0.0
    for size in sizes:
        parameters = parameters_of(model, size)
        found = model.predict(chip, parameters)
        assert all(part >= 0 for part in asdict(found).values()), (size, found)
        floor = max(chip.launch, chip.transfer(*model.traffic(parameters)))
        if model in FACTORS:
            flop = (9 if model is GRADIENTS else 3) * size * 128**3
            floor = max(floor, flop / max(chip.ffma, chip.fp64_tensor) * 1e-6)
        assert found.time >= floor * (1 - 1e-12), size
        assert found.time >= before, size
        before = found.time


@pytest.mark.compiler
@pytest.mark.parametrize("model", [FP64, FP32], ids=lambda model: model.candidate)
def test_head_dim_64_costs_less(model):
    for count in (1, 132, 707, 1414):
        small, large = (model.predict(H200, {"count": count, "head_dim": d}).time for d in (64, 128))
        assert small < large


@pytest.mark.compiler
def test_a_chip_twice_as_fast_in_everything_takes_half():
    twice = replace(
        H200,
        ghz=2 * H200.ghz,
        read=2 * H200.read,
        write=2 * H200.write,
        ffma=2 * H200.ffma,
        fp64_tensor=2 * H200.fp64_tensor,
    )
    for model in (FP64, FP32):
        slow, fast = (model.predict(chip, {"count": 707, "head_dim": 128}) for chip in (H200, twice))
        fixed = H200.launch + delta_factors.TRIP
        assert fast.time - fixed == pytest.approx((slow.time - fixed) / 2, rel=1e-9)


def test_a_chip_that_was_not_measured_reaches_the_same_share_of_its_data_sheet():
    chip = expected(B200, H200)
    assert (chip.multiprocessors, chip.ghz, str(chip.target)) == (148, 1.965, "sm_100a")
    assert chip.read / 7750 == pytest.approx(H200.read / 4800)
    assert chip.write / 7750 == pytest.approx(H200.write / 4800)
    assert chip.ffma / (148 * 256 * 1.965e-3) == pytest.approx(H200.ffma / (132 * 256 * 1.98e-3))
    assert chip.fp64_tensor / 37 == pytest.approx(H200.fp64_tensor / 67)
    assert chip.launch == H200.launch


def test_parts_add_up():
    one, other = Prediction(launch=1, chain=2), Prediction(launch=1, memory=4)
    assert (one + other) == Prediction(launch=2, memory=4, chain=2)
    assert (one + other).time == 8
    assert (one + other).most == "memory"


# From a run's file


def estimate(value):
    return Estimate(median=value, low=value, high=value, samples=30, stable=True)


def run(times, **fields):
    """A document with these graph times: {(model, size): us}."""
    ceilings = {
        "copy": ("GB/s", 2 / (1 / H200.read + 1 / H200.write)),
        "read": ("GB/s", H200.read),
        "ffma": ("TFLOP/s", H200.ffma),
        "fp64_tensor": ("TFLOP/s", H200.fp64_tensor),
        "empty_kernel": ("us", H200.launch),
    }
    rows = [
        Row(
            operator=model.operator,
            direction=model.direction,
            label=f"{size}",
            parameters=parameters_of(model, size) if not isinstance(size, tuple) else dict(size),
            bytes=1,
            flops=1,
            floor=None,
            floor_by=None,
            began=0.0,
            timings=[
                Timing(candidate=model.candidate, ours=True, gate="passed", graph=estimate(time)),
                Timing(candidate="a peer", ours=False, gate="passed", graph=estimate(1.0)),
            ],
        )
        for (model, size), time in times.items()
    ]
    values = {
        "provenance": {
            "device": H200.name,
            "arch": "sm_90",
            "multiprocessors": 132,
            "created": "2026-01-02T00:00:00+00:00",
            "driver": "1",
            "torch": "2",
            "csrc": "0123456789abcdef",
        },
        "rows_set": "full",
        "timer": "cuda",
        "ok": True,
        "complete": True,
        "seconds": 1.0,
        "ceilings": [Ceiling(name=name, unit=unit, value=estimate(value)) for name, (unit, value) in ceilings.items()],
        "clocks": [Clock(seconds=0, sm_mhz=1980, memory_mhz=3201, celsius=40, watts=300, reasons=[])],
        "rows": rows,
    }
    return Document(**{**values, **fields})


def by_the_model(sizes):
    return {(model, size): model.predict(H200, parameters_of(model, size)).time for model, size in sizes}


SMALL = tuple(collapse.SMALL.items())


def whole_run():
    times = by_the_model([(FP64, 1), (FP64, 132), (FP64, 707), (FP32, 1), (FP32, 132), (FP32, 707), (GRADIENTS, 132)])
    for model in COLLAPSES:
        times[model, SMALL] = model.predict(H200, dict(SMALL)).time
        times |= by_the_model([(model, 128), (model, 1024)])
    return times


@pytest.mark.compiler
def test_calibration_finds_the_latencies_that_made_the_times():
    found = report(run(whole_run()))
    assert found.here == replace(H200, write=pytest.approx(H200.write))
    for model, known in zip(found.models, [FP64, FP32, GRADIENTS, *COLLAPSES], strict=True):
        latencies = {name: value for name, value in asdict(model).items() if not isinstance(value, dict)}
        assert latencies == pytest.approx({name: asdict(known)[name] for name in latencies}, rel=1e-6)
    assert [line.ratio for line in found.lines] == pytest.approx([1.0] * len(found.lines))
    assert {line.timing.candidate for line in found.lines} == {
        "jit_kernels",
        "jit_kernels fp64_tensor",
        "jit_kernels fp32",
    }
    assert sum(line.calibrated for line in found.lines) == 8


@pytest.mark.compiler
def test_the_command_fails_where_a_prediction_is_off_and_names_the_row(tmp_path):
    times = whole_run()
    good, bad, output, page = (tmp_path / name for name in ("good.json", "bad.json", "cost.json", "page.md"))
    run(times).write(good)
    times[FP64, 707] *= 1.2  # as if the kernel had become slower
    run(times).write(bad)
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")

    done = CliRunner().invoke(
        main, ["--results", str(good), "--check", "--json", str(output), "--docs", str(page)], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "measured with other kernels" in done.output
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == len(times)
    for row in rows:
        for where in ("here", "there"):
            assert sum(row[where]["parts"].values()) == pytest.approx(row[where]["us"])
    written = page.read_text()
    assert written.startswith(f"before\n{BEGIN}Measured on 2026-01-02")
    assert written.endswith(f"{END}after\n")
    assert "old" not in written
    assert "| 707 | 3 |" in written

    done = CliRunner().invoke(main, ["--results", str(bad), "--check"])
    assert done.exit_code == 1
    assert "off by more than 15%: vdn_delta_factors forward 707 jit_kernels fp64_tensor: 0.83" in done.output
    assert CliRunner().invoke(main, ["--results", str(bad)]).exit_code == 0


@pytest.mark.compiler
def test_a_run_without_what_is_needed_is_refused(tmp_path):
    times = by_the_model([(FP64, 132), (FP64, 707)])
    with pytest.raises(ValueError, match=r"calibrated on vdn_delta_factors forward .*'count': 1.*fp64_tensor"):
        report(run(times))
    with pytest.raises(ValueError, match="this one ran on a CPU"):
        report(run(times, timer="cpu"))
    with pytest.raises(ValueError, match="this one lacks clocks"):
        report(run(times, clocks=[]))
    with pytest.raises(ValueError, match="this one lacks copy, read"):
        report(run(times, ceilings=[]))
    stranger = replace_candidate(run(times), "jit_kernels fp16")
    with pytest.raises(ValueError, match="no cost model covers vdn_delta_factors forward jit_kernels fp16"):
        report(stranger)
    page, results = tmp_path / "page.md", tmp_path / "run.json"
    page.write_text("no markers")
    run(whole_run()).write(results)
    done = CliRunner().invoke(main, ["--results", str(results), "--docs", str(page)])
    assert done.exit_code == 1
    assert "has no place for the tables" in done.output


def replace_candidate(document, name):
    rows = [
        row.model_copy(
            update={"timings": [timing.model_copy(update={"candidate": name}) for timing in row.timings[:1]]}
        )
        for row in document.rows
    ]
    return document.model_copy(update={"rows": rows})


def test_a_time_is_looked_up_by_operator_direction_and_size():
    measured = rows_of(run({(FP64, 132): 30.0, (FORWARD, 132): 4.0}))
    assert measured("vdn_delta_factors", "forward", {"count": 132, "head_dim": 128}, FP64.candidate) == 30.0
    with pytest.raises(ValueError, match="did not time"):
        measured("vdn_delta_factors", "backward", {"count": 132, "head_dim": 128}, FP64.candidate)


# Against the GPU


@pytest.fixture(scope="module")
def measured():
    if not RESULTS.is_file():
        pytest.fail(f"{RESULTS} is not there: on an H200, {COMMAND}")
    return Document.read(RESULTS)


@pytest.mark.compiler
def test_predictions_agree_with_the_measured_run(measured):
    found = report(measured)
    predicted = [line for line in found.lines if not line.calibrated]
    assert {line.model for line in predicted} == set(found.models)  # each is held to rows that it has not seen
    off = {str(line): round(line.ratio, 3) for line in found.lines if line.ratio is None or line.off}
    assert not off, f"predicted over measured, allowed is {WITHIN:.0%}: {off}"


def test_the_page_shows_the_measured_run(measured):
    page = (BENCH.parent / "docs" / "cost.md").read_text()
    section = page.partition(BEGIN)[2].partition(END)[0]
    assert f"`{measured.provenance['csrc']}`" in section, f"python -m bench.cost --docs docs/cost.md, after {COMMAND}"
    shown = re.findall(r"^\| ([TN]=[^|]*) \|", section, re.M)
    ours = [row.label for row in measured.rows for timing in row.timings if timing.ours and timing.gate == "passed"]
    assert sorted(shown) == sorted(ours)
