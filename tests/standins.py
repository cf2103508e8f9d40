"""Small packages under the names of SGLang and vLLM: files with what our integrations touch, and no more.

They are written into a folder, for our integrations read a client's files before they import it. With
``TEST_RELEASED_CLIENTS`` set, the tests that can take them use the released packages instead (``.ci/clients``).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

RELEASED = bool(os.environ.get("TEST_RELEASED_CLIENTS"))
# Tests that change a client's files, or need a client that another plug-in has changed.
standin_only = pytest.mark.skipif(RELEASED, reason="needs a client whose files can be changed")

SGLANG_MODEL = "sglang/multimodal_gen/runtime/models/dits/minimax_h3_vdn.py"
SGLANG_DOOR = "sglang/multimodal_gen/runtime/platforms/plugins.py"
SGLANG = {
    "sglang/kernels.py": """
import torch

calls = []


def can_use_vdn_delta_factors(device, dtype, head_dim):
    return head_dim == 128


def vdn_delta_factors(A, B, alpha):
    calls.append(A.shape)
    inverse = torch.linalg.inv(A + torch.eye(A.shape[-1], device=A.device))
    return alpha[..., None] * inverse, B @ inverse
""",
    SGLANG_MODEL: """
import torch

from sglang.kernels import can_use_vdn_delta_factors, vdn_delta_factors


def delta_factor_apply(rule, alpha, A, B, *, tokens_per_frame, fused=False):
    A, B, eye = A.float(), B.float(), torch.eye(A.shape[-1], device=A.device)
    scale = 1.0 / tokens_per_frame
    if rule == "sana_scaled":
        return alpha[..., None] * (eye - scale * A), scale**0.5 * B
    if rule == "vdn_scaled":
        A, B = scale * A, scale**0.5 * B
    elif rule != "vdn_solve":
        raise ValueError(f"unknown delta rule {rule!r}")
    if fused and can_use_vdn_delta_factors(A.device, A.dtype, A.shape[-1]):
        return vdn_delta_factors(A, B, alpha)
    root = torch.linalg.cholesky(A + eye)
    inverse = torch.cholesky_inverse(root)
    return alpha[..., None] * inverse, B @ inverse


def frame_statistics(kf, vf, beta, *, a_fp32):
    A = (kf.float() * beta[..., None]).mT @ kf.float()
    return (A + A.mT) / 2, ((vf * beta[..., None].to(vf.dtype)).mT @ kf).float()


class MiniMaxH3VDNLinearBranch:
    fused_kernels = True

    def forward(self, rule, alpha, A, B, tokens_per_frame):
        return delta_factor_apply(rule, alpha, A, B, tokens_per_frame=tokens_per_frame, fused=self.fused_kernels)
""",
    SGLANG_DOOR: """
import functools
import importlib
import sys
import types
from collections import defaultdict
from enum import Enum
from importlib.metadata import entry_points


class HookType(Enum):
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    _hooks = defaultdict(list)
    _patched = set()

    @classmethod
    def register(cls, target, hook, hook_type, *, source=None):
        cls._hooks[target].append((hook_type, hook, source))

    @classmethod
    def apply_hooks(cls):
        for target, hooks in sorted(cls._hooks.items()):
            if target not in cls._patched:
                try:
                    cls._apply_target(target, hooks)
                    cls._patched.add(target)
                except Exception as error:
                    print(f"Failed to apply hooks to {target}: {error}")

    @classmethod
    def _apply_target(cls, target, hooks):
        path, _, name = target.rpartition(".")
        original = wrapped = getattr(importlib.import_module(path), name)
        for hook_type, hook, _ in sorted(hooks, key=lambda entry: entry[0] is not HookType.REPLACE):
            wrapped = _wrap(wrapped, hook, hook_type)
        for module in list(sys.modules.values()):
            if isinstance(module, types.ModuleType):
                for key, value in list(vars(module).items()):
                    if value is original:
                        setattr(module, key, wrapped)


def _wrap(original_fn, hook, hook_type):
    @functools.wraps(original_fn)
    def wrapper(*args, **kwargs):
        return hook(*args, **kwargs) if hook_type is HookType.REPLACE else hook(original_fn, *args, **kwargs)

    return wrapper


def load_plugins():
    for point in entry_points(group="sglang.multimodal_gen.plugins"):
        point.load()()


def apply_plugin_hooks():
    load_plugins()
    HookRegistry.apply_hooks()
""",
}

KERNELS = "vllm/model_executor/kernels/mhc"
VLLM = {
    "vllm/plugins.py": """
from importlib.metadata import entry_points


def load_general_plugins():
    for point in entry_points(group="vllm.general_plugins"):
        point.load()()
""",
    "vllm/_custom_ops.py": """
import torch


def rms_norm(out, input, weight, epsilon):
    scaled = input.float() * torch.rsqrt(input.float().square().mean(-1, keepdim=True) + epsilon)
    out.copy_(scaled * weight.float())
""",
    f"{KERNELS}/triton.py": """
import torch


def hc_collapse_triton(x, pre_mix):
    assert x.ndim == 3 and x.dtype == torch.bfloat16
    assert pre_mix.shape == x.shape[:2] and pre_mix.dtype == torch.float32
    total = torch.zeros(x.shape[0], x.shape[2], device=x.device)
    for stream in range(x.shape[1]):  # a left fold
        total = total + pre_mix[:, stream, None] * x[:, stream].float()
    return total.to(x.dtype)


library = torch.library.Library("vllm", "FRAGMENT")
library.define("hc_collapse_triton(Tensor x, Tensor pre_mix) -> Tensor")
for key in ("CUDA", "CPU"):
    library.impl("hc_collapse_triton", hc_collapse_triton, key)
library._register_fake("hc_collapse_triton", lambda x, pre_mix: x.new_empty(x.shape[0], x.shape[2]))
""",
    f"{KERNELS}/torch.py": """
import torch


def _gates(x, streams, fn, hc_scale, hc_base, rms_eps, pre_eps, sinkhorn_eps, post_mult, repeat):
    x = x.float()
    mixes = (x @ fn.t()) * torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps)
    pre, post, comb = mixes.split([streams, streams, streams * streams], dim=-1)
    bases = hc_base.split([streams, streams, streams * streams])
    pre = torch.sigmoid(pre * hc_scale[0] + bases[0]) + pre_eps
    post = torch.sigmoid(post * hc_scale[1] + bases[1]) * post_mult
    comb = torch.softmax((comb * hc_scale[2] + bases[2]).view(-1, streams, streams), -1) + sinkhorn_eps
    for _ in range(repeat):
        comb = comb / (comb.sum(-2, keepdim=True) + sinkhorn_eps)
        comb = comb / (comb.sum(-1, keepdim=True) + sinkhorn_eps)
    return post.unsqueeze(-1), comb, pre


def mhc_pre_delayed_torch(
    residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat,
    pre_mix=None, x=None,
):
    x = residual.flatten(1) if x is None else x
    post, comb, pre = _gates(
        x, residual.shape[1], fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
        sinkhorn_repeat,
    )
    collapsed = residual[:, 0]
    if pre_mix is not None:
        collapsed = (pre_mix.unsqueeze(-1) * residual.float()).sum(1).to(residual.dtype)
    return post, comb, collapsed, pre


def mhc_pre_torch(
    residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat,
    n_splits=1,
):
    *batch, streams, hidden = residual.shape
    flat = residual.view(-1, streams, hidden)
    post, comb, pre = _gates(
        flat.flatten(1), streams, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
        sinkhorn_repeat,
    )
    collapsed = (pre.unsqueeze(-1) * flat.float()).sum(1).bfloat16()
    return post.view(*batch, streams, 1), comb.view(*batch, streams, streams), collapsed.view(*batch, hidden)
""",
    f"{KERNELS}/warmup.py": """
import torch

modes = []


def MHC_PRE_NORM_KERNEL(
    mixes, sqrsum, hc_scale, hc_base, residual, post, comb, layer_input, norm_weight, pre_in, pre_out, aux, *,
    hidden_size, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps, hc_mult,
    use_pre_mix_in, save_pre_mix, rms_numel, split_mode="fused", write_aux=False,
):
    modes.append(split_mode)
    assert save_pre_mix and not use_pre_mix_in and hidden_size * hc_mult == rms_numel
    rms = torch.rsqrt(sqrsum.sum(0) / rms_numel + rms_eps)
    logits = mixes.sum(0) * rms[:, None]
    pre_out.copy_(torch.sigmoid(logits[:, :hc_mult] * hc_scale[0] + hc_base[:hc_mult]) + hc_pre_eps)
    post.copy_(torch.sigmoid(logits[:, hc_mult : 2 * hc_mult] * hc_scale[1]) * hc_post_mult_value)
    comb.copy_(logits[:, 2 * hc_mult :] * hc_scale[2])
""",
    f"{KERNELS}/tilelang_kernels.py": """
import torch

from vllm import _custom_ops


class Fused:
    warm = ()

    def register_warmup(self, *args):
        self.warm = args

    def __call__(
        self, mixes, sqrsum, hc_scale, hc_base, residual, post, comb, layer_input, rms_eps, hc_pre_eps,
        hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, *, residual_out=None, norm_weight=None, norm_eps=0.0,
    ):
        streams, hidden = post.shape[-1], residual.shape[-1]
        rms = torch.rsqrt(sqrsum.sum(0) / (streams * hidden) + rms_eps)
        logits = mixes.sum(0) * rms[:, None]
        pre = torch.sigmoid(logits[:, :streams] * hc_scale[0] + hc_base[:streams]) + hc_pre_eps
        post.copy_(torch.sigmoid(logits[:, streams : 2 * streams] * hc_scale[1]) * hc_post_mult_value)
        comb.copy_(logits[:, 2 * streams :] * hc_scale[2])
        wide = residual if residual_out is None else residual[:, None].expand(-1, streams, -1)
        collapsed = (pre[..., None] * wide.float()).sum(1).bfloat16()
        if norm_weight is None:
            layer_input.copy_(collapsed)
        else:
            _custom_ops.rms_norm(layer_input, collapsed, norm_weight, norm_eps)


_MHC_PRE_BIG_FUSE_TILELANG_KERNEL = Fused()
""",
    "vllm/models/deepseek_v41/nvidia/model.py": f"""
from {KERNELS.replace("/", ".")}.triton import hc_collapse_triton


def forward(streams, pre):
    return hc_collapse_triton(streams, pre)
""",
}


def write(folder: Path, client: str, version: str) -> Path:
    """The files of a stand-in, and the metadata that gives its version."""
    for name, text in {"sglang": SGLANG, "vllm": VLLM}[client].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(folder).parents:
            if parent != Path():
                (folder / parent / "__init__.py").touch()
    info = folder / f"{client}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {client}\nVersion: {version}\n")
    return folder


def put(folder: Path, name: str, old: str, new: str) -> None:
    """Changes a line in a file of a stand-in."""
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))


@contextmanager
def importable(client: str, folder: Path | None) -> Iterator[None]:
    """Inside, the folder's package is what ``import <client>`` finds; afterwards it has never been there.

    Without a folder it is the installed package, which stays.
    """
    if folder is None:
        yield
        return
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == client}
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == client]:
            library = getattr(sys.modules.pop(name), "library", None)
            if library is not None:
                library._destroy()
        sys.modules.update(before)
        importlib.invalidate_caches()
