"""SGLang with our delta factors in it: a stand-in here, the released package in ``.ci/clients``."""

from __future__ import annotations

import importlib
import logging
import sys
from types import SimpleNamespace

import pytest
import standins
import torch
from jit_kernels.bench import clients
from jit_kernels.bench.vdn_delta_factors import gold, reference
from standins import standin_only

import jit_kernels
from jit_kernels import use_backend
from jit_kernels.checks.compare import same_bytes
from jit_kernels.integrations import IntegrationError, sglang
from jit_kernels.integrations.sglang import CLIENT, DOOR, HOOKS, MODEL, RULES
from jit_kernels.ops.vdn_delta_factors import OPERATOR

TOKENS = 1008
INVERSE_RULES = ("vdn_solve", "vdn_scaled")
# SGLang's own: relative Frobenius against float64, beside 1.5 times the eager chain's + 1e-7.
MOST = {"T": 1e-5, "J": 3e-5}


@pytest.fixture
def folder(tmp_path):
    """The stand-in's files; none where the released package is under test."""
    return None if standins.RELEASED else standins.write(tmp_path / "site", "sglang", CLIENT.tested)


@pytest.fixture
def client(folder, monkeypatch):
    """SGLang's modules, as they are before and after."""
    monkeypatch.setattr(sglang.ROUTE, "_said", set())
    with standins.importable("sglang", folder):
        importlib.import_module(DOOR)
        yield importlib.import_module(MODEL)
        sglang.uninstall()


def functions(model) -> dict[str, object]:
    return {target: getattr(model, target.rpartition(".")[2]) for target in HOOKS}


def inputs(generator, frames=3, heads=2, device="cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """alpha, A and B as SGLang orders them."""
    A, B, alpha = (tensor.to(device) for tensor in reference(generator, frames * heads))
    d = A.shape[-1]
    return alpha.view(frames, heads, d), A.view(frames, heads, d, d), B.view(frames, heads, d, d)


def exact(rule, alpha, A, B):
    alpha, A, B = alpha.double(), A.double(), B.double()
    if rule != "vdn_solve":
        A, B = A / TOKENS, B / TOKENS**0.5
    if rule == "sana_scaled":
        return alpha[..., None] * (torch.eye(A.shape[-1], device=A.device) - A), B
    return gold(A, B, alpha)


# The functions by themselves


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fused", [False, True])
def test_each_rule_is_what_it_says(rule, fused, device, generator):
    alpha, A, B = inputs(generator, device=device)
    found = sglang.delta_factor_apply(rule, alpha, A, B, tokens_per_frame=TOKENS, fused=fused)
    for name, factor, right in zip("TJ", found, exact(rule, alpha, A, B), strict=True):
        assert factor.dtype == torch.float32
        error = float((factor.double() - right).norm() / right.norm())
        assert error < 1e-6, (name, error)  # what the operator promises on this workload


def test_other_dtypes_are_converted_as_sglang_does(generator):
    alpha, A, B = inputs(generator)
    found = sglang.delta_factor_apply("vdn_solve", alpha.bfloat16(), A.double(), B.bfloat16(), tokens_per_frame=1)
    right = sglang.delta_factor_apply(
        "vdn_solve", alpha.bfloat16().float(), A, B.bfloat16().float(), tokens_per_frame=1
    )
    assert same_bytes(found, right)


def test_bad_rules_and_counts_are_named(generator):
    alpha, A, B = inputs(generator, 1, 1)
    with pytest.raises(ValueError, match="unknown delta rule 'vdn': expected one of vdn_solve, vdn_scaled, sana_scale"):
        sglang.delta_factor_apply("vdn", alpha, A, B, tokens_per_frame=7)
    for rule in ("vdn_scaled", "sana_scaled"):
        with pytest.raises(ValueError, match="tokens_per_frame must be at least 1; got 0"):
            sglang.delta_factor_apply(rule, alpha, A, B, tokens_per_frame=0)
    sglang.delta_factor_apply("vdn_solve", alpha, A, B, tokens_per_frame=0)  # which doesn't look at it


@pytest.mark.parametrize(("frames", "heads"), [(1, 7), (5, 3)])
@pytest.mark.parametrize("rule", INVERSE_RULES)
def test_where_the_inputs_lie_changes_no_bit(rule, frames, heads, device, generator):
    """A storage offset of one element, views [1:], an expanded alpha: as SGLang makes them."""
    alpha, A, B = inputs(generator, frames, heads, device)

    def call(*tensors):
        return sglang.delta_factor_apply(rule, *tensors, tokens_per_frame=TOKENS, fused=True)

    whole = call(alpha, A, B)
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (alpha, A, B)]
    assert all(tensor.storage_offset() == 1 for tensor in shifted)
    assert same_bytes(call(*shifted), whole)
    assert same_bytes(call(alpha[1:], A[1:], B[1:]), [factor[1:] for factor in whole])
    ones = torch.ones((), device=device).expand(alpha.shape)
    assert same_bytes(call(ones, A, B), call(ones.contiguous(), A, B))


def test_who_can_use_the_kernel_on_a_cpu():
    assert sglang.can_use_vdn_delta_factors(torch.device("cpu"), torch.float32, 128) is False
    A = torch.zeros(1, 128, 128)
    assert sglang.can_use_vdn_delta_factors(A, A, A[..., 0]) is False


@pytest.mark.gpu
@pytest.mark.compiler
def test_who_can_use_the_kernel_on_a_gpu(cuda):
    for d, dtype, can in ((128, torch.float32, True), (64, torch.float32, True), (96, torch.float32, False)):
        assert sglang.can_use_vdn_delta_factors(cuda, dtype, d) is can
        A = torch.zeros(2, d, d, device=cuda)
        assert sglang.can_use_vdn_delta_factors(A, A, A[..., 0]) is can
    assert sglang.can_use_vdn_delta_factors(cuda, torch.bfloat16, 128) is False


def test_the_question_in_both_forms_reaches_one_answer(monkeypatch):
    """Whatever the machine: the device's form asks the route about tensors like those that will come."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sglang, "ROUTE", SimpleNamespace(covers=lambda *args: asked.append(args) or True))
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))
    assert sglang.can_use_vdn_delta_factors(torch.device("cuda", 0), torch.float32, 128) is True
    A = torch.zeros(3, 128, 128)
    assert sglang.can_use_vdn_delta_factors(A, A, A[..., 0]) is True
    (by_device, by_tensors) = asked
    for first, second in zip(by_device, by_tensors, strict=True):
        assert first.dtype == second.dtype
        assert first.shape[1:] == second.shape[1:]


# In SGLang


def test_its_module_runs_ours(client, generator):
    alpha, A, B = inputs(generator)
    sglang.install()
    scales = {"vdn_solve": {}, "vdn_scaled": {"a_scale": 1 / TOKENS, "b_scale": (1 / TOKENS) ** 0.5}}
    for rule in INVERSE_RULES:
        with use_backend("torch"):
            found = client.delta_factor_apply(rule, alpha, A, B, tokens_per_frame=TOKENS, fused=True)
        right = jit_kernels.vdn_delta_factors(A, B, alpha, **scales[rule], backend="torch")
        assert same_bytes(found, right), "SGLang's scaling in a pass of its own would give other bits"


@standin_only
def test_the_branch_reaches_ours(client, generator):
    alpha, A, B = inputs(generator)
    branch = client.MiniMaxH3VDNLinearBranch()
    sglang.install()
    with use_backend("torch"):
        found = branch.forward("vdn_solve", alpha, A, B, TOKENS)
    assert same_bytes(found, jit_kernels.vdn_delta_factors(A, B, alpha, backend="torch"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [1, 50])
@pytest.mark.parametrize(("frames", "heads", "tokens"), [(1, 1, 16), (5, 3, 64), (11, 7, 1008)])
def test_sglangs_own_limits_hold(client, rule, scale, frames, heads, tokens, generator):
    keys = torch.nn.functional.normalize(torch.randn(frames, heads, tokens, 128, generator=generator), dim=-1)
    values = torch.randn(frames, heads, tokens, 128, generator=generator)
    beta = scale * torch.rand(frames, heads, tokens, 1, generator=generator)
    A, B = (keys * beta).mT @ keys, (values * beta).mT @ keys
    A = (A + A.mT) / 2
    alpha = torch.rand(frames, heads, 128, generator=generator)
    eager = client.delta_factor_apply(rule, alpha, A, B, tokens_per_frame=TOKENS)
    sglang.install()
    with use_backend("torch"):
        found = client.delta_factor_apply(rule, alpha, A, B, tokens_per_frame=TOKENS, fused=True)
    for name, ours, theirs, right in zip("TJ", found, eager, exact(rule, alpha, A, B), strict=True):
        error, chain = (float((factor.double() - right).norm() / right.norm()) for factor in (ours, theirs))
        assert error <= min(1.5 * chain + 1e-7, MOST[name])
        # The chain's own error at beta 50 is part of the distance: the limits are SGLang's.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol={"T": 1e-5, "J": 1e-4}[name])


def test_what_asks_for_no_kernel_stays_sglangs(client, generator):
    """fused=False, the rule without an inverse, an unknown rule: whatever the backend."""
    alpha, A, B = inputs(generator)
    before = [client.delta_factor_apply(rule, alpha, A, B, tokens_per_frame=TOKENS) for rule in RULES]
    before.append(client.delta_factor_apply("sana_scaled", alpha, A, B, tokens_per_frame=TOKENS, fused=True))
    sglang.install()
    with use_backend("torch"):
        after = [client.delta_factor_apply(rule, alpha, A, B, tokens_per_frame=TOKENS) for rule in RULES]
        after.append(client.delta_factor_apply("sana_scaled", alpha, A, B, tokens_per_frame=TOKENS, fused=True))
        with pytest.raises(ValueError, match="unknown delta rule 'vdn'"):
            client.delta_factor_apply("vdn", alpha, A, B, tokens_per_frame=TOKENS, fused=True)
    for first, second in zip(before, after, strict=True):
        assert same_bytes(first, second)


def test_what_we_do_not_cover_runs_sglangs_path_and_is_said_once(client, generator, caplog):
    alpha, A, B = inputs(generator)
    before = client.delta_factor_apply("vdn_solve", alpha, A, B, tokens_per_frame=1, fused=True)
    sglang.install()
    with caplog.at_level(logging.WARNING, CLIENT.log.name):
        for part in (slice(None), slice(1, None)):
            found = client.delta_factor_apply(
                "vdn_solve", alpha[part], A[part], B[part], tokens_per_frame=1, fused=True
            )
            assert same_bytes(found, [factor[part] for factor in before])
    (said,) = [record.message for record in caplog.records if record.name == CLIENT.log.name]
    assert said == (
        "vdn_delta_factors: sglang's own path runs: the tensors are on cpu: the fused kernel runs on CUDA devices"
    )
    with use_backend("fused"), pytest.raises(jit_kernels.UnsupportedError, match="on cpu"):
        client.delta_factor_apply("vdn_solve", alpha, A, B, tokens_per_frame=1, fused=True)


def test_so_does_a_compiled_call(client, generator):
    """Which must not have the refusal in its graph, where nobody catches it."""
    alpha, A, B = inputs(generator)

    def solve(alpha, A, B):
        return client.delta_factor_apply("vdn_solve", alpha, A, B, tokens_per_frame=1, fused=True)

    before = solve(alpha, A, B)
    sglang.install()
    torch._dynamo.reset()
    assert same_bytes(torch.compile(solve, backend="eager")(alpha, A, B), before)


@standin_only
def test_its_own_kernel_is_asked_where_ours_does_not_cover(client, generator):
    """As SGLang on an older GPU: its functions below our hooks see what they always saw."""
    alpha, A, B = inputs(generator)
    kernels = sys.modules["sglang.kernels"]
    sglang.install()
    client.delta_factor_apply("vdn_solve", alpha, A, B, tokens_per_frame=1, fused=True)
    assert kernels.calls == [A.shape]
    assert client.can_use_vdn_delta_factors(A.device, A.dtype, 128)
    assert not client.can_use_vdn_delta_factors(A.device, A.dtype, 64)
    with use_backend("torch"):
        found = client.vdn_delta_factors(A, B, alpha)
    assert kernels.calls == [A.shape]
    assert same_bytes(found, jit_kernels.vdn_delta_factors(A, B, alpha, backend="torch"))


@pytest.mark.gpu
@pytest.mark.compiler
def test_the_fused_kernel_runs_inside_its_module(client, cuda, generator):
    alpha, A, B = inputs(generator, device=cuda)
    sglang.install()
    found = client.delta_factor_apply("vdn_solve", alpha, A, B, tokens_per_frame=1, fused=True)
    assert same_bytes(found, jit_kernels.vdn_delta_factors(A, B, alpha, backend="fused"))


@pytest.mark.parametrize("rule", RULES)
def test_the_run_on_a_gpu_finds_what_breaks_the_limits(client, rule, monkeypatch):
    """``bench.clients`` here on the CPU with our fallback passes; with factors that are a thousandth off it fails."""
    monkeypatch.setattr(clients, "DEVICE", "cpu")
    monkeypatch.setattr(clients, "use_backend", lambda name: use_backend("torch"))
    row = clients.accept(client, rule, (3, 2, 16), 50)
    assert row["broken"] == []
    assert {"chain", "theirs", "ours"} == row["errors"]["T"].keys()

    class Off:
        name = "off"

        def __call__(self, *args, backend=None):
            T, J = OPERATOR(*args, backend="torch")
            return T * (1 + 1e-3 * (args[0].storage_offset() + 1)), J * 1.001  # and other bits elsewhere in memory

    monkeypatch.setattr(sglang.ROUTE, "operator", Off())
    broken = " ".join(clients.accept(client, rule, (3, 2, 16), 50)["broken"])
    if rule == "sana_scaled":  # which stays SGLang's
        assert not broken
    else:
        for said in ("T: error", "J: error", "T: too far", "storage offset of one element: other bits"):
            assert said in broken


# In and out


def test_uninstall_puts_the_very_objects_back(client):
    before = functions(client)
    holder = SimpleNamespace(module=type(sys)("holder"))  # a module that imported the name before
    holder.module.apply = client.delta_factor_apply
    sys.modules["holder"] = holder.module
    try:
        for _ in range(2):
            assert not sglang.installed()
            sglang.install()
            sglang.install()
            assert sglang.installed()
            assert all(getattr(client, t.rpartition(".")[2]) is not before[t] for t in HOOKS)
            assert holder.module.apply is client.delta_factor_apply
            sglang.uninstall()
            sglang.uninstall()
            assert functions(client) == before
            assert holder.module.apply is before[f"{MODEL}.delta_factor_apply"]
        assert not set(HOOKS) & (set(sys.modules[DOOR].HookRegistry._hooks) | sys.modules[DOOR].HookRegistry._patched)
    finally:
        del sys.modules["holder"]


@standin_only
@pytest.mark.parametrize("how", ["a hook of another plug-in", "an assignment"])
def test_somebody_elses_change_is_not_undone(client, how):
    sglang.install()
    ours = functions(client)
    registry = sys.modules[DOOR].HookRegistry
    target = f"{MODEL}.delta_factor_apply"
    if how == "an assignment":
        client.delta_factor_apply = len
    else:
        registry.register(target, len, sys.modules[DOOR].HookType.AROUND)
    with pytest.raises(IntegrationError, match=rf"{target} was hooked or replaced by somebody else too"):
        sglang.uninstall()
    client.delta_factor_apply = ours[target]
    assert functions(client) == ours
    registry._hooks[target] = registry._hooks[target][:1]


DRIFTS = {
    "a function is gone": (standins.SGLANG_MODEL, "def delta_factor_apply(", "def apply(", "has no 'delta_factor_app"),
    "a parameter is new": (
        standins.SGLANG_MODEL,
        "tokens_per_frame, fused=False",
        "frames, fused=False",
        r"has a delta_factor_apply of other parameters: \('rule', 'alpha', 'A', 'B', 'frames', 'fused'\) instead of",
    ),
    "an import is gone": (standins.SGLANG_MODEL, "can_use_vdn_delta_factors, vdn", "vdn", "no 'can_use_vdn_delta_fac"),
    "the registry is gone": (standins.SGLANG_DOOR, "class HookRegistry", "class Registry", "has no 'HookRegistry'"),
}


@standin_only
@pytest.mark.parametrize("drift", DRIFTS)
def test_another_version_is_refused_by_name(folder, drift, monkeypatch, caplog):
    name, old, new, said = DRIFTS[drift]
    standins.put(folder, name, old, new)
    monkeypatch.setenv("JIT_KERNELS_INTEGRATIONS", "sglang")
    with standins.importable("sglang", folder):
        with pytest.raises(IntegrationError, match=said) as raised:
            sglang.install()
        assert "sglang 0.5.23: " in str(raised.value)
        assert "nothing was changed" in str(raised.value)
        assert f"tested with sglang {CLIENT.tested}" in str(raised.value)
        assert MODEL not in sys.modules, "nothing was imported either"
        with caplog.at_level(logging.ERROR, CLIENT.log.name):
            sglang.plug_in()
        (record,) = [record for record in caplog.records if record.name == CLIENT.log.name]
        assert record.message == f"jit_kernels does not run in sglang: {raised.value}"
        monkeypatch.setenv("JIT_KERNELS_INTEGRATIONS_STRICT", "on")
        with pytest.raises(SystemExit, match="JIT_KERNELS_INTEGRATIONS_STRICT=on"):
            sglang.plug_in()


@standin_only
def test_hooks_that_do_not_hold_are_taken_back(client, monkeypatch):
    monkeypatch.setattr(sys.modules[DOOR].HookRegistry, "apply_hooks", lambda: None)
    with pytest.raises(IntegrationError, match="could not apply our hooks"):
        sglang.install()
    assert not sys.modules[DOOR].HookRegistry._hooks


@standin_only
def test_without_sglang_it_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(IntegrationError, match="sglang is not installed"):
        sglang.install()
    sglang.uninstall()
    assert not sglang.installed()


def test_the_operator_is_the_one_of_the_package():
    assert sglang.ROUTE.operator is OPERATOR
