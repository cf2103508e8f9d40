"""vLLM with our collapse in it: a stand-in here, the released package in ``.ci/clients``."""

from __future__ import annotations

import copy
import importlib
import logging
import sys

import pytest
import standins
import torch
from standins import standin_only

import jit_kernels
from jit_kernels import use_backend
from jit_kernels.checks.compare import same_bytes
from jit_kernels.integrations import IntegrationError, vllm
from jit_kernels.integrations.vllm import CLIENT, KERNELS, OP

SHAPES = [(0, 5120), (1, 4096), (33, 5137), (65, 65)]  # tokens and hidden_size, of vLLM's own tests and of the models
MODEL = "vllm.models.deepseek_v41.nvidia.model"


@pytest.fixture
def folder(tmp_path):
    """The stand-in's files; none where the released package is under test."""
    return None if standins.RELEASED else standins.write(tmp_path / "site", "vllm", CLIENT.tested)


@pytest.fixture
def client(folder, monkeypatch):
    """vLLM's modules, as they are before and after."""
    monkeypatch.setattr(vllm.ROUTE, "_said", set())
    with standins.importable("vllm", folder):
        yield importlib.import_module(f"{KERNELS}.triton")
        vllm.uninstall()


def inputs(generator, tokens, hidden, streams=4, device="cpu"):
    x = torch.randn(tokens, streams, hidden, generator=generator).to(torch.bfloat16)
    return x.to(device), torch.rand(tokens, streams, generator=generator).to(device)


def left_fold(x, pre):
    """What vLLM's kernel computes: product by product from the left, each sum rounded to float32."""
    total = pre[:, 0, None] * x[:, 0].float()
    for stream in range(1, x.shape[1]):
        total = total + pre[:, stream, None] * x[:, stream].float()
    return total.to(x.dtype)


def ulps(first, second):
    """Distance in units in the last place of bfloat16, for values of one sign."""
    return (first.view(torch.int16).int() - second.view(torch.int16).int()).abs()


# The collapse


@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_function_and_torch_op_give_our_bytes(client, device, tokens, hidden, generator):
    x, pre = inputs(generator, tokens, hidden, device=device)
    vllm.install()
    right = [jit_kernels.mhc_pre_h_aggregate(x, pre)]
    assert same_bytes([client.hc_collapse_triton(x, pre)], right)
    assert same_bytes([torch.ops.vllm.hc_collapse_triton(x, pre)], right)


def test_strided_streams_and_column_major_weights(client, device, generator):
    """As vLLM's own test: every other column of a wider buffer, weights in column-major order."""
    wide, pre = inputs(generator, 33, 2 * 513, device=device)
    x, columns = wide[..., ::2], pre.t().contiguous().t()
    assert x.stride(-1) == 2
    assert columns.stride() != pre.stride()
    vllm.install()
    right = [jit_kernels.mhc_pre_h_aggregate(x.contiguous(), pre)]
    assert same_bytes([client.hc_collapse_triton(x, columns)], right)
    assert same_bytes([torch.ops.vllm.hc_collapse_triton(x, columns)], right)


def test_one_hot_and_cancelling_rows_are_exact(client, device, generator):
    x, _ = inputs(generator, 8, 65, device=device)
    x[:, 1], x[:, 3] = -x[:, 0], -x[:, 2]
    vllm.install()
    assert not client.hc_collapse_triton(x, torch.ones(8, 4, device=device)).any()
    for stream in range(4):
        pre = torch.zeros(8, 4, device=device)
        pre[:, stream] = 1
        assert torch.equal(client.hc_collapse_triton(x, pre), x[:, stream])


def test_shards_collapse_to_the_bytes_of_the_whole(client, device, generator):
    x, pre = inputs(generator, 129, 4096, device=device)
    vllm.install()
    whole = client.hc_collapse_triton(x, pre)
    parts = [client.hc_collapse_triton(x[a:b], pre[a:b]) for a, b in ((0, 1), (1, 65), (65, 129))]
    assert same_bytes([torch.cat(parts)], [whole])


def test_the_tree_and_vllms_left_fold_differ_by_an_ulp_here_and_there(client, generator):
    """What an installation changes numerically: one rounding of a sum, seen where it meets a rounding to bfloat16."""
    x, pre = inputs(generator, 512, 5120)
    vllm.install()
    ours, theirs = client.hc_collapse_triton(x, pre), left_fold(x, pre)
    apart = ulps(ours, theirs)
    # Sums that nearly cancel are small against their rounding errors: there alone an ulp is no measure.
    whole = theirs.float().abs() > 2**-10 * (pre[..., None] * x.float()).abs().sum(1)
    assert int(apart[whole].max()) <= 1
    assert 0 < float((apart > 0).float().mean()) < 1e-4


def test_other_stream_counts_and_dtypes_stay_vllms_and_are_said_once(client, caplog, generator, monkeypatch):
    own = client.hc_collapse_triton
    calls = []
    monkeypatch.setattr(client, OP, lambda x, pre_mix: calls.append(x.shape) or left_fold(x, pre_mix))
    vllm.install()
    ours = client.hc_collapse_triton
    assert ours is not own
    with caplog.at_level(logging.WARNING, CLIENT.log.name):
        for tokens in (3, 7):
            x, pre = inputs(generator, tokens, 65, streams=2)
            assert same_bytes([ours(x, pre)], [left_fold(x, pre)])
            assert same_bytes([torch.ops.vllm.hc_collapse_triton(x, pre)], [left_fold(x, pre)])
        x, pre = inputs(generator, 3, 65)
        assert ours(x, pre.bfloat16()).shape == (3, 65)
    assert calls == [(3, 2, 65), (3, 2, 65), (7, 2, 65), (7, 2, 65), (3, 4, 65)]
    said = [record.message for record in caplog.records if record.name == CLIENT.log.name]
    assert len(said) == 2, "once a reason, not once a batch size"
    assert "vllm's own path runs: residual must have shape [..., 4, hidden_size]" in said[0]
    assert "pre must be float32" in said[1]
    vllm.uninstall()


# torch.compile, graphs, opcheck


def test_compiled_in_one_graph_and_not_again_for_other_token_counts(client, device, generator):
    vllm.install()
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.code))
        return graph

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def compiled(x, pre):
        return client.hc_collapse_triton(x, pre) * 2

    for tokens in (5, 33, 129):
        x, pre = inputs(generator, tokens, 65, device=device)
        assert same_bytes([compiled(x, pre)], [jit_kernels.mhc_pre_h_aggregate(x, pre) * 2])
    assert len(graphs) == 1
    assert "vllm.hc_collapse_triton" in graphs[0], "the choice is left to the time of the call"


def test_opcheck(client, device, generator):
    x, pre = inputs(generator, 5, 65, device=device)
    vllm.install()
    torch.library.opcheck(torch.ops.vllm.hc_collapse_triton.default, (x, pre))


@pytest.mark.gpu
@pytest.mark.compiler
def test_captured_and_replayed_with_new_data(client, cuda, generator):
    x, pre = inputs(generator, 33, 4096, device=cuda)
    vllm.install()
    client.hc_collapse_triton(x, pre)  # vLLM's own run before it captures
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = client.hc_collapse_triton(x, pre), torch.ops.vllm.hc_collapse_triton(x, pre)
    for _ in range(2):
        x.copy_(torch.randn(x.shape, generator=generator))
        graph.replay()
        assert same_bytes(out, [jit_kernels.mhc_pre_h_aggregate(x, pre)] * 2)


# The reference path of V4


def gate_inputs(generator, *batch, streams=4, hidden=64):
    size = streams * (streams + 2)
    residual = torch.randn(*batch, streams, hidden, generator=generator).to(torch.bfloat16)
    fn = torch.randn(size, streams * hidden, generator=generator) / (streams * hidden) ** 0.5
    return residual, fn, torch.rand(3, generator=generator), torch.randn(size, generator=generator)


SCALARS = {
    "rms_eps": 1e-6,
    "hc_pre_eps": 1e-3,
    "hc_sinkhorn_eps": 1e-3,
    "hc_post_mult_value": 2.0,
    "sinkhorn_repeat": 3,
}


@pytest.mark.parametrize("batch", [(7,), (2, 3), (0,)])
@pytest.mark.parametrize("how", ["by place", "by name"])
def test_the_reference_path_keeps_its_gates_and_collapses_by_ours(client, generator, batch, how):
    reference = importlib.import_module(f"{KERNELS}.torch")
    args = gate_inputs(generator, *batch)
    post, comb, collapsed = reference.mhc_pre_torch(*args, **SCALARS)
    vllm.install()
    found = (
        reference.mhc_pre_torch(*args, *SCALARS.values(), 1)
        if how == "by place"
        else reference.mhc_pre_torch(*args, **SCALARS, n_splits=1)
    )
    assert [factor.shape for factor in found] == [post.shape, comb.shape, collapsed.shape]
    # vLLM computes the gates in another order there: a few float32 roundings, of values of order one.
    torch.testing.assert_close(found[0], post, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], comb, rtol=1e-5, atol=1e-6)
    # pre isn't returned. It is what mhc_pre_delayed_torch gives.
    pre = reference.mhc_pre_delayed_torch(args[0].flatten(0, -3), *args[1:], **SCALARS)[3]
    right = jit_kernels.mhc_pre_h_aggregate(args[0], pre.view(*batch, 4))
    assert same_bytes([found[2]], [right])
    torch.testing.assert_close(found[2], collapsed, rtol=2**-7, atol=1e-5)  # one bfloat16 ulp, and near-cancelled sums


def test_the_reference_path_of_another_stream_count_is_vllms(client, generator):
    reference = importlib.import_module(f"{KERNELS}.torch")
    args = gate_inputs(generator, 5, streams=2)
    before = reference.mhc_pre_torch(*args, **SCALARS)
    vllm.install()
    assert same_bytes(reference.mhc_pre_torch(*args, **SCALARS, n_splits=1), before)


# The opt-in split of V4's fused kernel


@pytest.fixture
def fused_call(generator):
    """The arguments of V4's fused kernel; its outputs are the last three tensors."""
    tokens, streams, hidden, splits = 5, 4, 64, 3
    residual, _, hc_scale, hc_base = gate_inputs(generator, tokens)
    mixes = torch.randn(splits, tokens, streams * (streams + 2), generator=generator)
    sqrsum = torch.rand(splits, tokens, generator=generator) * 64

    def outputs():
        return torch.full((tokens, streams), torch.nan), torch.full((tokens, 16), torch.nan), residual[:, 0] * torch.nan

    def call(kernel, residual=residual, **named):
        out = outputs()
        named = {"norm_weight": torch.full((hidden,), 0.5, dtype=torch.bfloat16), **named}
        kernel(mixes, sqrsum, hc_scale, hc_base, residual, *out, *SCALARS.values(), **named)
        return out

    return call


@standin_only
def test_the_split_is_off_unless_asked_for(client, monkeypatch):
    kernels = importlib.import_module(f"{KERNELS}.tilelang_kernels")
    own = kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL
    vllm.install()
    assert kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL is own
    vllm.uninstall()
    monkeypatch.setenv("JIT_KERNELS_VLLM_SPLIT", "on")
    for _ in range(2):
        vllm.install()
        vllm.install()
        assert isinstance(kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL, vllm.SplitKernel)
        vllm.uninstall()
        assert kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL is own


@standin_only
def test_the_split_waits_for_vllm_to_import_its_kernels(client):
    """Their module asks for the GPU when it is imported: no plug-in may do that before a worker has chosen its own."""
    name = f"{KERNELS}.tilelang_kernels"
    before = list(sys.meta_path)
    vllm.install(split=True)
    vllm.uninstall()
    assert sys.meta_path == before, "it waits no more"
    vllm.install(split=True)
    assert name not in sys.modules
    kernels = importlib.import_module(name)
    assert isinstance(kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL, vllm.SplitKernel)
    assert sys.meta_path == before
    vllm.uninstall()
    assert isinstance(kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL, kernels.Fused)


@standin_only
def test_a_split_that_somebody_replaced_leaves_all_as_it_is(client):
    kernels = importlib.import_module(f"{KERNELS}.tilelang_kernels")
    vllm.install(split=True)
    ours = client.hc_collapse_triton, kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL
    kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL = None
    with pytest.raises(IntegrationError, match="_MHC_PRE_BIG_FUSE_TILELANG_KERNEL was replaced again"):
        vllm.uninstall()
    assert client.hc_collapse_triton is ours[0]
    kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL = ours[1]


@standin_only
def test_the_split_kernel_is_gates_collapse_and_norm(client, fused_call, monkeypatch):
    kernels, warmup = (importlib.import_module(f"{KERNELS}.{name}") for name in ("tilelang_kernels", "warmup"))
    theirs = fused_call(kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL, norm_eps=1e-6)
    vllm.install(split=True)
    collapsed = []
    run = jit_kernels.dispatch.Operator.run
    monkeypatch.setattr(
        jit_kernels.dispatch.Operator, "run", lambda self, *args: collapsed.append(self.name) or run(self, *args)
    )
    split = fused_call(kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL, norm_eps=1e-6)
    assert warmup.modes == ["stats"]
    assert "mhc_pre_h_aggregate" in collapsed
    for own, ours in zip(theirs, split, strict=True):
        # The gates are the same; behind the norm an ulp of the collapse is an ulp, and one more by its rounding.
        torch.testing.assert_close(ours, own, rtol=2**-6 if own.dtype == torch.bfloat16 else 0, atol=0)


@standin_only
def test_what_the_split_does_not_know_is_vllms(client, fused_call, generator):
    kernels, warmup = (importlib.import_module(f"{KERNELS}.{name}") for name in ("tilelang_kernels", "warmup"))
    first_layer = torch.randn(5, 64, generator=generator).to(torch.bfloat16)
    cases = (
        {"norm_weight": None},
        {"residual": first_layer, "residual_out": first_layer[:, None].expand(-1, 4, -1)},
    )
    own = [fused_call(kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL, **case) for case in cases]
    vllm.install(split=True)
    for before, case in zip(own, cases, strict=True):
        assert same_bytes(fused_call(kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL, **case), before)
    assert warmup.modes == []
    kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL.register_warmup("config")
    assert kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL.theirs.warm == ("config",)


# In and out


def test_every_holder_gets_ours_and_the_very_object_back(client):
    before = client.hc_collapse_triton
    reference = importlib.import_module(f"{KERNELS}.torch")
    reference_before = reference.mhc_pre_torch
    model = importlib.import_module(MODEL)  # it imported the function by name, before
    package = sys.modules[KERNELS]
    for _ in range(2):
        assert not vllm.installed()
        vllm.install()
        vllm.install()
        assert vllm.installed()
        assert client.hc_collapse_triton is not before
        assert model.hc_collapse_triton is client.hc_collapse_triton
        later = type(sys)("later")  # it imports the function by name, after
        later.collapse = client.hc_collapse_triton
        sys.modules["later"] = later
        try:
            vllm.uninstall()
            vllm.uninstall()
        finally:
            del sys.modules["later"]
        for module, name in ((client, OP), (model, OP), (later, "collapse")):
            assert getattr(module, name) is before, module
        assert reference.mhc_pre_torch is reference_before
        assert getattr(package, "mhc_pre_torch", reference_before) is reference_before


def test_the_torch_op_is_vllms_again(client, generator, monkeypatch):
    """By torch's own table of kernels: ours above vLLM's, then vLLM's alone."""

    def table():
        return torch._C._dispatch_dump("vllm::hc_collapse_triton")

    before = table()
    vllm.install()
    assert "CPU (inactive)" in table()
    assert "integrations/vllm.py" in table()
    vllm.uninstall()
    assert table() == before


def test_a_name_that_somebody_replaced_since_is_not_undone(client, monkeypatch):
    vllm.install()
    ours = client.hc_collapse_triton
    client.hc_collapse_triton = len
    with pytest.raises(IntegrationError, match=r"triton\.hc_collapse_triton was replaced again"):
        vllm.uninstall()
    assert vllm.installed()
    client.hc_collapse_triton = ours


TRITON, REFERENCE = f"{standins.KERNELS}/triton.py", f"{standins.KERNELS}/torch.py"
DRIFTS = {
    "the function is gone": (TRITON, "def hc_collapse_triton(x", "def collapse(x", "has no 'hc_collapse_triton'"),
    "a parameter is new": (
        TRITON,
        "def hc_collapse_triton(x, pre_mix)",
        "def hc_collapse_triton(x, pre_mix, out)",
        r"of other parameters: \('x', 'pre_mix', 'out'\) instead of \('x', 'pre_mix'\)",
    ),
    "the gates are gone": (REFERENCE, "def mhc_pre_delayed_torch", "def delayed", "has no 'mhc_pre_delayed_torch'"),
}


@standin_only
@pytest.mark.parametrize("drift", DRIFTS)
def test_another_version_is_refused_by_name(folder, drift, monkeypatch, caplog):
    name, old, new, said = DRIFTS[drift]
    standins.put(folder, name, old, new)
    monkeypatch.setenv("JIT_KERNELS_INTEGRATIONS", "all")
    with standins.importable("vllm", folder):
        with pytest.raises(IntegrationError, match=said) as raised:
            vllm.install()
        assert "vllm 0.33.0: " in str(raised.value)
        assert "nothing was changed" in str(raised.value)
        assert not vllm.installed()
        with caplog.at_level(logging.ERROR, CLIENT.log.name):
            vllm.plug_in()
        (record,) = [record for record in caplog.records if record.name == CLIENT.log.name]
        assert record.message == f"jit_kernels does not run in vllm: {raised.value}"
        monkeypatch.setenv("JIT_KERNELS_INTEGRATIONS_STRICT", "on")
        with pytest.raises(SystemExit, match="JIT_KERNELS_INTEGRATIONS_STRICT=on"):
            vllm.plug_in()


@standin_only
def test_a_split_that_this_version_does_not_allow_is_refused_whole(folder, monkeypatch):
    standins.put(folder, f"{standins.KERNELS}/warmup.py", "def MHC_PRE_NORM_KERNEL", "def NORM")
    with standins.importable("vllm", folder):
        with pytest.raises(IntegrationError, match="has no 'MHC_PRE_NORM_KERNEL'"):
            vllm.install(split=True)
        assert not vllm.installed()
        vllm.install()
        vllm.uninstall()


@standin_only
@pytest.mark.parametrize("imported", [False, True])
def test_a_split_whose_kernel_is_not_bound_in_the_end_stops_nobody(folder, imported, monkeypatch, caplog):
    """Named in the source, but not on this machine: as behind an import that failed."""
    name = f"{KERNELS}.tilelang_kernels"
    place = f"{standins.KERNELS}/tilelang_kernels.py"
    standins.put(
        folder, place, "_MHC_PRE_BIG_FUSE_TILELANG_KERNEL = ", "if False:\n    _MHC_PRE_BIG_FUSE_TILELANG_KERNEL = "
    )
    with standins.importable("vllm", folder):
        if imported:
            importlib.import_module(name)
            with pytest.raises(
                IntegrationError, match=r"has no '_MHC_PRE_BIG_FUSE_TILELANG_KERNEL'.*nothing was changed"
            ):
                vllm.install(split=True)
            assert not vllm.installed()
        else:
            vllm.install(split=True)
            with caplog.at_level(logging.ERROR, vllm.CLIENT.log.name):
                importlib.import_module(name)
            assert "has no '_MHC_PRE_BIG_FUSE_TILELANG_KERNEL'" in caplog.text
            monkeypatch.delitem(sys.modules, name)
            vllm.uninstall()
            vllm.install(split=True)
            monkeypatch.setenv("JIT_KERNELS_INTEGRATIONS_STRICT", "on")
            with pytest.raises(SystemExit, match="JIT_KERNELS_INTEGRATIONS_STRICT=on"):
                importlib.import_module(name)
        vllm.uninstall()


def test_the_split_kernel_can_be_copied():
    theirs = object()
    assert copy.copy(vllm.SplitKernel(theirs)).theirs is theirs


def test_an_installation_that_breaks_off_is_taken_back(client, monkeypatch):
    before = client.hc_collapse_triton, torch._C._dispatch_dump("vllm::hc_collapse_triton")
    impl = torch.library.Library.impl

    def fail_second(self, name, function, key, **options):
        if key == "CPU":
            raise RuntimeError("no CPU kernel")
        return impl(self, name, function, key, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch.library.Library, "impl", fail_second)
        with pytest.raises(RuntimeError, match="no CPU kernel"):
            vllm.install()
    assert not vllm.installed()
    assert (client.hc_collapse_triton, torch._C._dispatch_dump("vllm::hc_collapse_triton")) == before
    vllm.install()


@standin_only
def test_a_version_that_registers_no_such_op_is_refused(folder):
    standins.put(folder, TRITON, 'library.define("hc_collapse_triton', 'library.define("hc_collapse')
    standins.put(folder, TRITON, 'library.impl("hc_collapse_triton"', 'library.impl("hc_collapse"')
    standins.put(folder, TRITON, 'library._register_fake("hc_collapse_triton"', 'library._register_fake("hc_collapse"')
    with standins.importable("vllm", folder):
        with pytest.raises(IntegrationError, match=r"registers no torch\.ops\.vllm\.hc_collapse_triton"):
            vllm.install()
        assert not vllm.installed()


@standin_only
def test_a_broken_client_does_not_stop_its_server(folder, monkeypatch, caplog):
    """An error that nobody foresaw is logged whole, and the client starts without us."""
    standins.put(folder, TRITON, "import torch\n", "import torch\n\nraise ImportError('no such driver')\n")
    monkeypatch.setenv("JIT_KERNELS_INTEGRATIONS", "vllm")
    with standins.importable("vllm", folder), caplog.at_level(logging.ERROR, CLIENT.log.name):
        vllm.plug_in()
    (record,) = [record for record in caplog.records if record.name == CLIENT.log.name]
    assert record.message == "jit_kernels does not run in vllm: no such driver"
    assert record.exc_info
    assert not vllm.installed()


def test_under_the_fused_backend_nothing_else_runs(client, generator):
    x, pre = inputs(generator, 3, 65)
    vllm.install()
    with use_backend("fused"), pytest.raises(jit_kernels.UnsupportedError, match="on cpu"):
        client.hc_collapse_triton(x, pre)
