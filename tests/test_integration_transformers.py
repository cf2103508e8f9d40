"""The collapse of Hugging Face transformers' DeepSeek-V4, replaced in the released modules themselves."""

from __future__ import annotations

import importlib
import json
import linecache
import sys
import threading
import types

import pytest
import torch
from click.testing import CliRunner
from jit_kernels.bench import model_run

from jit_kernels import mhc_pre_h_aggregate, use_backend
from jit_kernels.checks.compare import same_bytes
from jit_kernels.integrations import IntegrationError
from jit_kernels.integrations import transformers as integration

MODELING = importlib.import_module(integration.MODULE)
CLASSES = [getattr(MODELING, name) for name in integration.CLASSES]
ORIGINALS = [vars(cls)["forward"] for cls in CLASSES]


@pytest.fixture(autouse=True)
def _untouched():
    yield
    assert not integration.installed()
    assert [vars(cls)["forward"] for cls in CLASSES] == ORIGINALS


def replaced() -> bool:
    return all(vars(cls)["forward"] is not original for cls, original in zip(CLASSES, ORIGINALS, strict=True))


def model(**options):
    torch.manual_seed(0)
    config = MODELING.DeepseekV4Config(**(model_run.TINY | options))
    return MODELING.DeepseekV4ForCausalLM(config).bfloat16()


def tokens(length: int = 12) -> torch.Tensor:
    return torch.randint(model_run.TINY["vocab_size"], (2, length), generator=torch.Generator().manual_seed(1))


def test_the_collapse_alone_is_exchanged(device):
    hyper = model().to(device).model.layers[0].attn_hc
    streams = torch.randn(2, 9, 4, 64, device=device).bfloat16()
    with torch.no_grad():
        post, comb, collapsed = hyper(streams)
        with integration.enabled(), model_run.Recorder() as recorder:
            found = hyper(streams)
    (call,) = recorder.forward
    residual, pre, out = call
    assert same_bytes([residual, found[2]], [streams, out])
    assert same_bytes(found[:2], [post, comb])
    assert same_bytes([found[2].cpu()], [mhc_pre_h_aggregate(streams.cpu(), pre.cpu(), backend="torch")])
    beside_theirs = model_run.invariance("attention", call, call)
    assert beside_theirs["share_of_allowed"] <= 1
    assert beside_theirs["against_shipped_expression"] == model_run.differences(out, collapsed)


def test_three_collapses_a_forward_and_as_many_backward():
    trained = model().train()
    with integration.enabled(), model_run.Recorder() as recorder:
        trained(tokens(), labels=tokens()).loss.backward()
    assert (len(recorder.forward), recorder.backward) == (3, 3)
    assert all(p.grad.isfinite().all() for p in trained.parameters() if p.grad is not None)


def test_checkpointed_layers_recompute_with_the_same_collapse():
    grads = []
    for checkpointing in (False, True):
        trained = model().train()
        if checkpointing:
            trained.gradient_checkpointing_enable()
        with integration.enabled(), model_run.Recorder() as recorder:
            trained(tokens(), labels=tokens()).loss.backward()
        assert len(recorder.forward) == (5 if checkpointing else 3)  # the layer's two again
        grads.append([p.grad for p in trained.parameters() if p.grad is not None])
    assert same_bytes(*grads)


def test_generation_collapses_three_times_a_token():
    with integration.enabled(), model_run.Recorder() as recorder:
        model().eval().generate(tokens(5), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert len(recorder.forward) == 4 * 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph_with_the_same_bytes(dynamic):
    hyper = model().model.layers[0].attn_hc
    streams = torch.randn(2, 9, 4, 64).bfloat16()
    with integration.enabled(), torch.no_grad():
        right = hyper(streams)
        torch.compiler.reset()
        compiled = torch.compile(hyper, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        assert same_bytes(compiled(streams), right)


def test_blocks_nest_and_end_on_exceptions():
    with integration.enabled():
        with pytest.raises(ZeroDivisionError), integration.enabled():
            raise ZeroDivisionError
        assert replaced()
    assert not replaced()


def test_a_permanent_install_outlives_blocks_and_blocks_outlive_it():
    integration.install()
    integration.install()
    with integration.enabled():
        pass
    assert replaced()
    assert integration.installed()
    with integration.enabled():
        integration.uninstall()
        assert replaced()
    assert not replaced()
    integration.uninstall()


def test_blocks_of_two_threads_overlap():
    inside, leave = threading.Barrier(2, timeout=60), threading.Event()

    def hold():
        with integration.enabled():
            inside.wait()
            assert leave.wait(60)

    thread = threading.Thread(target=hold)
    with integration.enabled():
        thread.start()
        inside.wait()
    assert replaced()  # the other thread's block is still open
    leave.set()
    thread.join()
    assert not replaced()


def test_an_error_inside_points_into_the_clients_own_line():
    with integration.enabled():
        for cls, original in zip(CLASSES, ORIGINALS, strict=True):
            ours = vars(cls)["forward"].__code__
            assert (ours.co_filename, ours.co_firstlineno) == (
                original.__code__.co_filename,
                original.__code__.co_firstlineno,
            )
            lines = {line for *_, line in ours.co_lines() if line}
            assert any(".sum(dim=2)" in linecache.getline(ours.co_filename, line) for line in lines)


def test_the_gradients_beside_their_expressions(generator):
    """The streams' gradient is one product, rounded once, in both; that of the weights is a sum in another order."""
    streams, upstream = torch.randn(2, 3, 4, 64, generator=generator).bfloat16(), torch.randn(2, 3, 64).bfloat16()
    leaves = [streams.requires_grad_(), torch.rand(2, 3, 4, generator=generator).requires_grad_()]
    theirs = torch.autograd.grad((leaves[1].unsqueeze(-1) * streams).sum(dim=2).to(streams.dtype), leaves, upstream)
    ours = torch.autograd.grad(mhc_pre_h_aggregate(*leaves), leaves, upstream)
    assert same_bytes(ours[:1], theirs[:1])
    # Two orders of a float32 sum of 64 products: each is within 64 roundings of the sum of the sizes.
    size = (upstream.double().unsqueeze(-2) * streams.detach().double()).abs().sum(-1)
    assert ((ours[1] - theirs[1]).abs() <= 2 * 64 * 2**-24 * size).all()


# Other releases: their module in the place of the installed one.

HEAD = """
import torch

class DeepseekV4HyperConnection(torch.nn.Module):
    def forward(self, hidden_streams, *, scale=2.0):
        pre = torch.sigmoid(hidden_streams.float().mean(-1))
        collapsed = (pre.unsqueeze(-1) * hidden_streams).sum(dim=2).to(hidden_streams.dtype)
        return pre * scale, another_name(collapsed)

def another_name(x):
    return x + 1
"""
TAIL = """
class DeepseekV4HyperHead(torch.nn.Module):
    def forward(self, x):
        pre = torch.ones(x.shape[:-1])
        return {}
"""
COLLAPSE = "(pre.unsqueeze(-1)*x).sum( dim=2 ).to(x.dtype)"


@pytest.fixture
def release(monkeypatch, tmp_path):
    """Puts a source in the place of transformers' module; `file=False` for one whose source can't be read."""

    def put(source: str, file: bool = True) -> types.ModuleType:
        module = types.ModuleType("another_release")
        path = tmp_path / "another_release.py"
        if file:
            path.write_text(source)
        linecache.clearcache()
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(integration, "MODULE", module.__name__)
        exec(compile(source, path, "exec"), vars(module))
        return module

    return put


def test_the_rest_of_another_release_stays_its_own(release):
    module = release(HEAD + TAIL.format(COLLAPSE))
    streams = torch.randn(2, 3, 4, 8).bfloat16()
    shipped = module.DeepseekV4HyperConnection()(streams)
    with integration.enabled(), model_run.Recorder() as recorder:
        found = module.DeepseekV4HyperConnection()(streams)
        scaled, _ = module.DeepseekV4HyperConnection()(streams, scale=3.0)
        module.DeepseekV4HyperHead()(streams)
    assert len(recorder.forward) == 3
    assert same_bytes(found[:1], shipped[:1])
    assert same_bytes([found[1]], [recorder.forward[0][2] + 1])
    assert same_bytes([scaled], [recorder.forward[0][1] * 3.0])


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (HEAD, "has no attribute 'DeepseekV4HyperHead'"),
        (HEAD + TAIL.format("torch.einsum('bsh,bshd->bsd', pre, x)"), "DeepseekV4HyperHead.forward holds the collapse"),
        (HEAD + TAIL.format(f"{COLLAPSE} + {COLLAPSE}"), "2 times instead of once"),
        (HEAD + TAIL.format("(pre.unsqueeze(-1) * x).sum(dim=2).to(pre.dtype)"), "0 times instead of once"),
        (HEAD + TAIL.format(COLLAPSE).replace("    def", "    @torch.no_grad()\n    def"), "is wrapped by something"),
    ],
)
def test_a_release_in_other_words_is_refused_whole(release, source, named):
    module = release(source)
    before = vars(module.DeepseekV4HyperConnection)["forward"]
    with pytest.raises(IntegrationError, match=named) as caught, integration.enabled():
        pytest.fail("installed")
    assert integration.version_of("transformers") in str(caught.value)
    assert integration.TESTED in str(caught.value)
    assert vars(module.DeepseekV4HyperConnection)["forward"] is before
    assert not integration.installed()


def test_a_release_without_source_is_refused(release):
    release(HEAD + TAIL.format(COLLAPSE), file=False)
    with pytest.raises(IntegrationError, match="has no source"):
        integration.install()


def test_without_transformers(monkeypatch):
    monkeypatch.setattr(integration, "version_of", lambda client: None)
    with pytest.raises(IntegrationError, match="pip install"):
        integration.install()


def test_somebody_elses_later_patch_is_not_overwritten(monkeypatch):
    integration.install()
    ours = vars(CLASSES[0])["forward"]
    CLASSES[0].forward = ORIGINALS[1]
    with pytest.raises(IntegrationError, match="replaced again"):
        integration.uninstall()
    assert vars(CLASSES[0])["forward"] is ORIGINALS[1]
    CLASSES[0].forward = ours
    integration.uninstall()


# What the operator doesn't take runs as it did.


def test_another_number_of_streams_runs_their_own_collapse_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(integration, "_told", set())
    other = model(hc_mult=2).eval()
    with torch.no_grad():
        right = other(tokens()).logits
        with integration.enabled(), model_run.Recorder() as recorder:
            found = [other(tokens()).logits for _ in range(2)]
    assert not recorder.forward
    assert same_bytes(found, [right, right])
    assert len(caplog.messages) == 1
    assert "[2, 64]" in caplog.messages[0]


def test_under_autocast_the_weights_are_bfloat16_and_theirs_runs():
    hyper = model().model.layers[0].attn_hc
    streams = torch.randn(1, 3, 4, 64).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        right = hyper(streams)
        with integration.enabled():
            found = hyper(streams)
    assert same_bytes(found, right)


def test_float32_models_run_the_fallback_of_the_operator():
    single = model().float().eval()
    with torch.no_grad(), integration.enabled(), model_run.Recorder() as recorder:
        single(tokens())
    assert [out.dtype for *_, out in recorder.forward] == [torch.float32] * 3


# Hugging Face kernels.


@pytest.mark.parametrize("mode", ["INFERENCE", "TRAINING", "TRAINING | TORCH_COMPILE"])
def test_kernelize_maps_the_layers_from_a_local_repository(tmp_path, monkeypatch, mode):
    kernels = pytest.importorskip("kernels")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = integration.write_kernel_repository(tmp_path)
    for cls in CLASSES:
        for attribute in ("kernel_layer_name", "kernel_condition"):  # so that the next line is undone at the end
            monkeypatch.setattr(cls, attribute, None, raising=False)
        kernels.replace_kernel_forward_from_hub(cls, cls.__name__)
    layers = {name: {"cpu": kernels.LocalLayerRepository(folder, layer_name=name)} for name in integration.CLASSES}
    wanted = kernels.Mode(0)
    for name in mode.split(" | "):
        wanted |= kernels.Mode[name]
    with kernels.use_kernel_mapping(layers, inherit_mapping=False):
        kernelized = kernels.kernelize(model().eval(), mode=wanted, device="cpu")
    with torch.no_grad(), integration.enabled():
        right = model().eval()(tokens()).logits
    with torch.no_grad(), model_run.Recorder() as recorder:
        found = kernelized(tokens()).logits
    assert len(recorder.forward) == 3
    assert same_bytes([found], [right])


def test_kernel_layers_are_the_clients_own_while_installed_too():
    with integration.enabled():
        layers = integration.kernel_layers()
        for cls in CLASSES:
            assert getattr(layers, cls.__name__).forward is cls.forward


# The model run.


def test_the_model_run(tmp_path):
    target = tmp_path / "run.json"
    done = CliRunner().invoke(model_run.main, ["--tiny", "--device", "cpu", "--output", str(target)])
    assert done.exit_code == 0, done.output
    found = json.loads(target.read_text())
    assert found["ok"]
    assert found["backend"]["ran"] == "torch"
    assert found["forward"]["collapses_in_all"] == 12
    assert found["forward"]["repeats_have_same_bytes"]
    assert found["backward"]["collapses"] == [3, 3]
    assert found["backward"]["tensors"] == 33
    assert {"transformers", "parameters", "seed"} <= found["model"].keys()
    assert {"commit", "torch", "device", "csrc"} <= found["provenance"].keys()


def test_the_model_run_refuses_the_official_sizes_on_a_cpu():
    done = CliRunner().invoke(model_run.main, ["--device", "cpu"])
    assert done.exit_code == 2
    assert "--tiny" in done.output


def test_the_model_run_finds_a_wrong_collapse(monkeypatch):
    lost = torch.tensor([1.0, 1.0, 1.0, 0.0])
    monkeypatch.setattr(integration, "mhc_pre_h_aggregate", lambda x, pre: mhc_pre_h_aggregate(x, pre * lost))
    failures = model_run.run(True, torch.device("cpu"))["failures"]
    assert any(failure.startswith("logits") for failure in failures)
    assert any(failure.startswith("gradient of") for failure in failures)


@pytest.mark.parametrize(("steps", "held"), [(1, True), (2, False)])
def test_one_step_from_their_expression_is_allowed_and_two_are_not(steps, held):
    residual, pre = torch.ones(1, 1, 4, 8).bfloat16(), torch.full((1, 1, 4), 0.25)
    out = (torch.ones(1, 1, 8).bfloat16().view(torch.int16) + steps).view(torch.bfloat16)
    found = model_run.invariance("head", (residual, pre, out), (residual, pre, out))
    assert (found["share_of_allowed"] <= 1) == held
    assert found["against_shipped_expression"] == {"differ": 8, "of": 8, "max_abs": steps * 2**-7}


def test_the_model_run_finds_a_collapse_that_is_not_called(monkeypatch):
    monkeypatch.setattr(integration, "_covers", lambda x, pre: False)
    failures = model_run.run(True, torch.device("cpu"))["failures"]
    assert any("collapses of the four forwards: [0, 0, 0, 0]" in failure for failure in failures)
    assert any("collapses forward and backward: [0, 0]" in failure for failure in failures)


def test_drift_is_traced_to_inputs_or_to_the_collapse_itself(monkeypatch):
    residual, pre = torch.randn(2, 3, 4, 8).bfloat16(), torch.rand(2, 3, 4)
    out = mhc_pre_h_aggregate(residual, pre)
    alone = [(r, p.clone(), o) for r, p, o in zip(residual.split(1), pre.split(1), out.split(1), strict=True)]
    alone[1][1][0, 2, 3] += 0.5
    found = model_run.invariance("mlp", (residual, pre, out), *alone)
    assert found["inputs_that_differ"] == ["pre"]
    assert found["inputs"]["pre"] == {"differ": 1, "of": 24, "max_abs": 0.5}
    assert found["same_bytes_given_same_inputs"]
    monkeypatch.setattr(model_run, "mhc_pre_h_aggregate", lambda r, p: mhc_pre_h_aggregate(r, p) * (3 - len(r)))
    assert not model_run.invariance("mlp", (residual, pre, out), *alone)["same_bytes_given_same_inputs"]


def test_the_fused_backend_is_an_error_of_the_run_where_there_is_none():
    found = model_run.run(True, torch.device("cpu"), "fused")
    assert found["backend"]["ran"] == "error"
    assert found["failures"] == [found["backend"]["reason"]]


def test_the_backend_in_force_is_the_one_that_runs(device):
    hyper = model().to(device).model.layers[0].attn_hc
    with integration.enabled(), use_backend("fused"), torch.no_grad():
        if device.type == "cuda":
            hyper(torch.ones(1, 2, 4, 64, device=device).bfloat16())
        else:
            with pytest.raises(RuntimeError, match="'fused' was asked for"):
                hyper(torch.ones(1, 2, 4, 64).bfloat16())
