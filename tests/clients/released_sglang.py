"""SGLang as released, beyond what stands in for it elsewhere: its branch, from keys to readout, with our factors in it.

Run by ``.ci/clients``, where the package is: pytest does not collect this file by itself.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from jit_kernels import use_backend
from jit_kernels.dispatch import Operator
from jit_kernels.integrations import sglang

FRAMES, HEIGHT, WIDTH, TEXT = 7, 2, 3, 5
HEADS, HEAD_DIM, HIDDEN = 2, 128, 64
TOKENS = HEIGHT * WIDTH


@pytest.fixture
def model():
    importlib.import_module(sglang.DOOR)
    yield importlib.import_module(sglang.MODEL)
    sglang.uninstall()


@pytest.fixture
def branch(model, generator, tmp_path):
    """``MiniMaxH3VDNLinearBranch`` of two heads on one rank, random weights."""
    state = importlib.import_module("sglang.multimodal_gen.runtime.distributed.parallel_state")
    configs = importlib.import_module("sglang.multimodal_gen.configs.models.dits.minimax_h3")
    if not state.model_parallel_is_initialized():
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)
        state.maybe_init_distributed_environment_and_model_parallel(
            tp_size=1, sp_size=1, distributed_init_method=f"file://{tmp_path}/rendezvous"
        )
    arch = configs.MiniMaxH3DiTArchConfig(num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, hidden_size=HIDDEN)

    def make(rule):
        hybrid = configs.VDNHybridAttentionArchConfig(
            chunk=3, radius=1, anchor_frames="none", linear_head_dim=HEAD_DIM, delta_rule=rule
        )
        made = model.MiniMaxH3VDNLinearBranch(arch, hybrid, local_heads=HEADS)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.fill_(1)
                elif name.endswith("A_log"):
                    parameter.uniform_(0, 2, generator=generator)
                else:
                    parameter.normal_(0, 0.1, generator=generator)
        return made

    return make


def forward(model, branch, generator):
    """The arguments of a forward of one clip, drawn anew."""

    def randn(*size):
        return torch.randn(size, generator=generator).bfloat16()

    video = FRAMES * TOKENS
    layout = model.VDNH3Layout(
        seq_len=TEXT + video,
        used=TEXT + video,
        text_len=TEXT,
        video_start=TEXT,
        num_frames=FRAMES,
        tokens_per_frame=TOKENS,
        frame_height=HEIGHT,
        frame_width=WIDTH,
    )
    x, text = randn(video, HIDDEN), randn(TEXT, HIDDEN)
    arguments = {
        "q_raw": randn(video, HEADS, HEAD_DIM),
        "k_raw": randn(video, HEADS, HEAD_DIM),
        "v_raw": randn(video, HEADS, HEAD_DIM),
        "beta": branch.beta(x),
        "gate": branch.output_gate(x),
        "frame_mean": x.view(FRAMES, TOKENS, HIDDEN).mean(1, dtype=torch.float32),
        "layout": layout,
        "text_k_raw": randn(TEXT, HEADS, HEAD_DIM),
        "text_v_raw": randn(TEXT, HEADS, HEAD_DIM),
        "text_beta": branch.beta(text),
    }
    return lambda: branch(**arguments)


# vdn_solve takes the text state as a frame more; the scaled rules ask for it in a call of its own.
@pytest.mark.parametrize(("rule", "calls"), [("vdn_solve", 1), ("vdn_scaled", 2), ("sana_scaled", 0)])
@torch.no_grad()
def test_its_branch_reaches_our_factors(model, branch, generator, monkeypatch, rule, calls):
    call = forward(model, branch(rule), generator)
    before = call()
    assert before.isfinite().all()
    assert before.any()
    shapes, run = [], Operator.run
    monkeypatch.setattr(
        Operator, "run", lambda self, args, choice: shapes.append(args[0].shape) or run(self, args, choice)
    )
    sglang.install()
    with use_backend("torch"):
        after = call()
    assert len(shapes) == calls
    if rule == "vdn_solve":
        assert shapes == [(FRAMES + 1, HEADS, HEAD_DIM, HEAD_DIM)]
    # The factors differ by float32 roundings, and the readout is bfloat16: SGLang's own limit between two paths.
    assert float((after.float() - before.float()).norm() / before.float().norm()) < 5e-3
    if calls == 0:
        assert torch.equal(after, before)
    sglang.uninstall()
    assert torch.equal(call(), before)
