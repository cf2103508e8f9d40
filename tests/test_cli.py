"""The jit-kernels command: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cli import run

from jit_kernels.checks.result import CHECKS
from jit_kernels.dispatch import OPERATORS
from jit_kernels.jit import cache, store
from jit_kernels.jit.arch import Target


def document(*arguments: str, code: int = 0) -> dict:
    found = json.loads(run(*arguments, "--json", code=code).stdout)
    assert found["schema"] == 1
    return found


def test_check_reports_every_sample():
    found = document("check", "mhc_pre_h_aggregate", "--device", "cpu", "--repeats", "1")
    assert found["ok"]
    assert found["provenance"]["torch"]
    assert [row["sample"] for row in found["results"]] == [
        sample.label for sample in OPERATORS["mhc_pre_h_aggregate"].workload.samples
    ]
    for row in found["results"]:
        assert row["ran"] == "torch"
        assert "cpu" in row["reason"]
        assert row["error"]["out"] <= row["checks"]["forward accuracy"]["tolerance"]["out"]["norm"]
        assert [name for name, check in row["checks"].items() if check["ok"]] == list(CHECKS)
        assert row["ok"]
        assert row["count"] <= row["full_count"]
        assert row["milliseconds"] > 0


def test_check_says_what_it_compared_and_where_workloads_are_smaller():
    printed = run("check", "mhc_pre_h_aggregate", "--device", "cpu", "--repeats", "1").stdout
    assert "no GPU: smaller workloads than users run" in printed
    assert "bytes compared: 1 repeat; layouts packed, packed in chunks, each sequence whole" in printed
    assert "bytes compared with the CPU fallback's: no, since it is the fallback that ran" in printed


def test_check_fails_where_a_promise_is_broken(monkeypatch):
    operator = OPERATORS["mhc_pre_h_aggregate"]
    wrong = operator.fallback
    calls = iter(range(10**6))
    # Off by a last bit every second call: within the accuracy bound, so only the byte comparison can see it.
    flipped = lambda *args: wrong(*args) * (1 + 2**-7 * (next(calls) % 2))  # noqa: E731
    object.__setattr__(operator, "fallback", flipped)
    try:
        found = document("check", operator.name, "--device", "cpu", "--repeats", "2", code=1)
    finally:
        object.__setattr__(operator, "fallback", wrong)
    assert not found["ok"]
    checks = [row["checks"]["forward invariance"] for row in found["results"]]
    assert any("bytes differ between repeats" in failure for check in checks for failure in check["failures"])


def test_check_fails_where_fused_is_demanded_and_cannot_be_had():
    found = document("check", "--device", "cpu", "--backend", "fused", code=1)
    assert {row["operator"] for row in found["results"]} == set(OPERATORS)
    assert all("CUDA devices" in row["failures"][0] for row in found["results"])
    assert "not run" in run("check", "--device", "cpu", "--backend", "fused", code=1).stdout


def test_check_writes_the_document_too(tmp_path):
    target = tmp_path / "a" / "b" / "check.json"
    printed = document("check", "mhc_pre_h_aggregate", "--device", "cpu", "--repeats", "1", "--output", str(target))
    assert json.loads(target.read_text()) == printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("check", "no_such_op"), "mhc_pre_h_aggregate, vdn_delta_factors"),
        (("check", "--device", "toaster"), "--device toaster"),
        (("check", "--repeats", "0"), "--repeats"),
        (("warmup", "--arch", "sm_ninety"), "sm_90a"),
        (("warmup", "vdn_delta_factors", "--arch", "sm_90a", "--head-dim", "96"), "64, 128"),
        (("no-such-verb",), "No such command"),
    ],
)
def test_usage_errors_exit_2_and_say_what_is_accepted(arguments, words):
    result = run(*arguments, code=2)
    assert words in result.stderr
    assert not result.stdout


def test_warmup_without_a_gpu_asks_for_the_target(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "--arch sm_90a" in run("warmup", code=2).stderr


def test_warmup_dry_run_builds_nothing(isolated_cache):
    found = document("warmup", "--arch", "sm_90a,sm_100a", "--dry-run")
    assert {kernel["state"] for kernel in found["kernels"]} == {"would build"}
    assert {kernel["target"] for kernel in found["kernels"]} == {"sm_90a", "sm_100a"}
    assert {kernel["operator"] for kernel in found["kernels"]} == set(OPERATORS)
    assert not isolated_cache.exists()


def test_warmup_failure_exits_1(isolated_cache, monkeypatch):
    monkeypatch.setenv("JIT_KERNELS_COMPILE", "never")
    found = document("warmup", "mhc_pre_h_aggregate", "--arch", "sm_90a", code=1)
    (kernel,) = found["kernels"]
    assert kernel["state"] == "failed"
    assert "JIT_KERNELS_COMPILE=never" in kernel["error"]


@pytest.mark.compiler
def test_warmup_list_and_clean(isolated_cache, tmp_path, monkeypatch):
    output = tmp_path / "image"
    (kernel,) = document("warmup", "mhc_pre_h_aggregate", "--arch", "sm_90a", "--output", str(output))["kernels"]
    assert kernel["state"] == "built"
    assert kernel["registers"] > 0
    assert kernel["folder"].startswith(str(output))
    assert document("cache", "list")["entries"] == []

    monkeypatch.setenv("JIT_KERNELS_PREBUILT_DIR", str(output))
    monkeypatch.setenv("JIT_KERNELS_COMPILE", "never")
    (kernel,) = document("warmup", "mhc_pre_h_aggregate", "--arch", "sm_90a")["kernels"]
    assert kernel["state"] == "present"
    (entry,) = document("cache", "list")["entries"]
    assert (entry["place"], entry["target"], entry["name"]) == ("prebuilt", "sm_90a", "mhc_pre_h_aggregate")
    assert document("cache", "clean") == {"schema": 1, "removed": [], "bytes": 0}
    assert cache.find(OPERATORS["mhc_pre_h_aggregate"].build(Target.parse("sm_90a")).source, Target.parse("sm_90a"))


def test_clean_removes_what_is_there_and_spares_what_is_being_built(isolated_cache, answer_source, tmp_path):
    from jit_kernels import load_jit

    for name in ("first", "second"):
        source = answer_source(tmp_path / name)
        load_jit(name, cpp_files=[source], header_only=False, target="sm_90a")
    first, second = store.listing()
    with store.lock(second.folder.parent / f".{second.folder.name}.lock", 1):
        assert document("cache", "clean")["removed"] == [str(first.folder)]
    assert document("cache", "clean")["removed"] == [str(second.folder)]
    assert "removed 0 compiled kernels" in run("cache", "clean").stdout


def test_cache_dir(isolated_cache):
    assert run("cache", "dir").stdout.strip() == str(isolated_cache)
    assert document("cache", "dir")["dir"] == str(isolated_cache)


def test_damaged_entries_are_listed_as_such(isolated_cache):
    folder = isolated_cache / "0.1.0" / "sm_90a" / "broken-1-2"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text("{")
    (entry,) = document("cache", "list")["entries"]
    assert "damaged" in entry["name"]


def test_env_shows_values_and_faults(monkeypatch):
    monkeypatch.setenv("JIT_KERNELS_COMPILE", "never")
    monkeypatch.setenv("JIT_KERNELS_BUILD_TIMEOUT", "soon")
    variables = {variable["name"]: variable for variable in document("env")["variables"]}
    assert variables["JIT_KERNELS_COMPILE"]["effective"] == "never"
    assert "expected a number of seconds" in variables["JIT_KERNELS_BUILD_TIMEOUT"]["effective"]
    assert all(variable["meaning"] for variable in variables.values())


def test_doctor_finds_a_bad_setting(monkeypatch):
    monkeypatch.setenv("JIT_KERNELS_COMPILE", "sometimes")
    findings = document("doctor", code=1)["findings"]
    (problem,) = (finding for finding in findings if finding["state"] == "problem")
    assert "expected one of auto, never" in problem["found"]


def test_doctor_has_a_cure_for_all_that_is_not_ok(monkeypatch, isolated_cache):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    findings = document("doctor")["findings"]
    assert any("/nonexistent" in finding["found"] for finding in findings)
    for finding in findings:
        assert finding["state"] in ("ok", "note", "problem")
        assert finding["state"] == "ok" or finding["cure"] or "there is no GPU" in finding["found"]


def test_doctor_names_an_untrusted_cache(isolated_cache):
    isolated_cache.mkdir(mode=0o777)
    isolated_cache.chmod(0o777)
    (problem,) = (f for f in document("doctor", code=1)["findings"] if f["state"] == "problem")
    assert "can be written by others" in problem["found"]
    assert "chmod" in problem["cure"]


def test_the_command_itself_gives_errors_in_one_message(isolated_cache):
    isolated_cache.mkdir(mode=0o777)
    isolated_cache.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-m", "jit_kernels.cli", "warmup", "--arch", "sm_90a"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "can be written by others" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
