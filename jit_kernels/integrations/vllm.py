"""vLLM: the mHC collapse of DeepSeek-V4.1 and V4 through ``mhc_pre_h_aggregate``.

As a plug-in (``JIT_KERNELS_INTEGRATIONS=vllm``) vLLM finds us in each of its processes; `install` does the same by hand
in one process. In place of vLLM's own then stand:

- ``hc_collapse_triton``, in its own module and in every module that imported it, now or later: DeepSeek-V4.1
- the kernels of ``torch.ops.vllm.hc_collapse_triton`` on CUDA and CPU: AMD's models, and graphs of torch.compile,
  whose fake is vLLM's as before
- the collapse at the end of ``mhc_pre_torch``, the reference path of V4
- with ``JIT_KERNELS_VLLM_SPLIT=on`` the collapse inside V4's fused kernel (`SplitKernel`)

What our kernel doesn't cover runs vLLM's own function, and the log says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from jit_kernels import backend, env, use_backend
from jit_kernels._version import __version__
from jit_kernels.integrations import AfterImport, Change, IntegrationError, Patch, version_of
from jit_kernels.integrations.plugin import Client, Need, Route
from jit_kernels.ops.mhc_pre_h_aggregate import OPERATOR, STREAMS

KERNELS = "vllm.model_executor.kernels.mhc"
OP = "hc_collapse_triton"
OPTIONS = ("rms_eps", "hc_pre_eps", "hc_sinkhorn_eps", "hc_post_mult_value", "sinkhorn_repeat")  # in vLLM's order
GATES = ("residual", "fn", "hc_scale", "hc_base", *OPTIONS)

SPLIT_NEEDS = (
    Need(f"{KERNELS}.tilelang_kernels", "_MHC_PRE_BIG_FUSE_TILELANG_KERNEL"),
    Need(f"{KERNELS}.warmup", "MHC_PRE_NORM_KERNEL"),
    Need("vllm._custom_ops", "rms_norm", ("out", "input", "weight", "epsilon")),
)
CLIENT = Client(
    name="vllm",
    tested="0.33.0",
    group="vllm.general_plugins",
    selection="VLLM_PLUGINS",
    needs=(
        Need(f"{KERNELS}.triton", OP, ("x", "pre_mix")),
        Need(f"{KERNELS}.torch", "mhc_pre_torch", (*GATES, "n_splits")),
        Need(f"{KERNELS}.torch", "mhc_pre_delayed_torch", (*GATES, "pre_mix", "x")),
    ),
    further=lambda: SPLIT_NEEDS if env.VLLM_SPLIT.get() == "on" else (),
    strips=False,
    empty_is_all=False,
)
ROUTE = Route(OPERATOR, CLIENT)
PATCH, SPLIT = Patch(CLIENT.name, CLIENT.tested), Patch(CLIENT.name, CLIENT.tested)
_library: list[torch.library.Library] = []  # our kernels of vLLM's op live as long as it does


def plug_in() -> None:
    """The entry point: vLLM calls it in each process, more than once in some."""
    CLIENT.plug_in(install)


def install(split: bool | None = None) -> None:
    """Puts our collapse where vLLM's stands, in this process. Does nothing where it does already, split or not.

    Args:
        split: Whether V4's fused kernel is split too; None asks ``JIT_KERNELS_VLLM_SPLIT``.

    Raises:
        IntegrationError: vLLM isn't installed or isn't what this was written for; nothing has been changed.
    """
    if PATCH.installed:
        return
    split = env.VLLM_SPLIT.get() == "on" if split is None else split
    CLIENT.require(SPLIT_NEEDS if split else ())
    triton, reference = import_module(f"{KERNELS}.triton"), import_module(f"{KERNELS}.torch")
    theirs = triton.hc_collapse_triton
    changes = [
        Change(triton, OP, _function, everywhere=True),
        Change(reference, "mhc_pre_torch", lambda own: _reference(own, reference.mhc_pre_delayed_torch), True),
    ]
    if not hasattr(torch.ops.vllm, OP):
        raise IntegrationError(f"vllm {version_of('vllm')} registers no torch.ops.vllm.{OP}; nothing was changed")
    library = torch.library.Library("vllm", "IMPL")
    try:
        PATCH.install(*changes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel")  # as intended
            for key in ("CUDA", "CPU"):
                library.impl(OP, lambda x, pre_mix: collapse(theirs, x, pre_mix), key, allow_override=True)
        if split:
            KERNEL_IMPORT.wait()
    except BaseException:
        PATCH.uninstall()
        library._destroy()
        raise
    _library.append(library)
    where = f"{OP}, mhc_pre_torch" + ", DeepSeek-V4's fused kernel" * split
    CLIENT.log.info(f"jit_kernels {__version__}: mhc_pre_h_aggregate stands behind {where}")


def installed() -> bool:
    """Whether vLLM's functions go through ours in this process."""
    return PATCH.installed


def uninstall() -> None:
    """Puts vLLM's very functions back wherever they stood, and its kernels under the torch op.

    Raises:
        IntegrationError: somebody replaced one of the functions since; nothing has been changed.
    """
    SPLIT.require_untouched()
    PATCH.uninstall()
    SPLIT.uninstall()
    KERNEL_IMPORT.stop()
    while _library:
        _library.pop()._destroy()


def collapse(theirs: Callable[[Tensor, Tensor], Tensor], x: Tensor, pre_mix: Tensor) -> Tensor:
    """``[T, 4, H]`` and ``[T, 4]`` to ``[T, H]``, by our kernel or by ``theirs``."""
    if x.device.type == "cpu" and backend() == "auto":  # our fallback is for the CPU too; theirs, Triton, is not
        with use_backend("torch"):
            return ROUTE.run((x, pre_mix), lambda: theirs(x, pre_mix))
    return ROUTE.run((x, pre_mix), lambda: theirs(x, pre_mix))


def _function(theirs: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def hc_collapse_triton(x: Tensor, pre_mix: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # the choice is made when the graph runs
            return torch.ops.vllm.hc_collapse_triton(x, pre_mix)
        return collapse(theirs, x, pre_mix)

    return hc_collapse_triton


def _reference(theirs: Callable[..., Any], gates: Callable[..., Any]) -> Callable[..., Any]:
    """``mhc_pre_torch`` of vLLM's own gates and our collapse.

    The gates are those of ``mhc_pre_delayed_torch``, which returns ``pre`` too; its own collapse is a view of the first
    stream then.
    """

    def mhc_pre_torch(residual: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        if residual.shape[-2] != STREAMS:
            return theirs(residual, *args, **named)
        named.pop("n_splits", None)  # the reference has no use for it
        *batch, streams, hidden = residual.shape
        flat = residual.view(-1, streams, hidden)
        post, comb, _, pre = gates(flat, *args[: len(GATES) - 1], **named)
        return (
            post.view(*batch, streams, 1),
            comb.view(*batch, streams, streams),
            torch.ops.vllm.hc_collapse_triton(flat, pre).view(*batch, hidden),
        )

    return mhc_pre_torch


class SplitKernel:
    """V4's fused kernel (gates, collapse, RMSNorm) as three: vLLM's gates, our collapse, vLLM's RMSNorm.

    The gates are vLLM's own kernel in its mode ``stats``. What the split costs a call: two launches, and the collapsed
    hidden state written once and read once more, 4 * hidden_size bytes a token beside the 10 * hidden_size that the
    fused kernel moves. vLLM compiles the gates' kernel for each new number of GEMM splits, in its first run with such
    a number of tokens.
    """

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    @cached_property
    def gates(self) -> Callable[..., None]:
        return import_module(f"{KERNELS}.warmup").MHC_PRE_NORM_KERNEL

    @cached_property
    def rms_norm(self) -> Callable[..., None]:
        return import_module("vllm._custom_ops").rms_norm

    def __getattr__(self, name: str) -> Any:  # its warm-up, and whatever else vLLM asks it
        if name.startswith("__") or name == "theirs":  # copy and pickle ask before there is anything
            raise AttributeError(name)
        return getattr(self.theirs, name)

    def __call__(
        self,
        mixes: Tensor,
        sqrsum: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        layer_input: Tensor,
        *options: Any,
        residual_out: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> None:
        head = (mixes, sqrsum, hc_scale, hc_base, residual, post, comb, layer_input)
        # A first layer whose streams are still one has no four to collapse; without a norm it is another kernel.
        if residual_out is not None or norm_weight is None or residual.shape[-2] != STREAMS:
            own = {"residual_out": residual_out, "norm_weight": norm_weight, "norm_eps": norm_eps}
            self.theirs(*head, *options, **own)
            return
        _, streams, hidden = residual.shape
        pre = torch.empty_like(post)
        self.gates(
            *head,
            norm_weight,
            post,  # no pre comes in
            pre,
            layer_input,  # nothing else comes out
            hidden_size=hidden,
            norm_eps=norm_eps,
            hc_mult=streams,
            use_pre_mix_in=False,
            save_pre_mix=True,
            rms_numel=streams * hidden,
            split_mode="stats",
            **dict(zip(OPTIONS, options, strict=True)),
        )
        self.rms_norm(layer_input, torch.ops.vllm.hc_collapse_triton(residual, pre), norm_weight, norm_eps)


def _split(kernels: ModuleType) -> None:
    SPLIT.install(Change(kernels, "_MHC_PRE_BIG_FUSE_TILELANG_KERNEL", SplitKernel, everywhere=True))


# The module asks for the GPU when it is imported. That is for a worker to do, not for a plug-in in each process.
KERNEL_IMPORT = AfterImport(
    f"{KERNELS}.tilelang_kernels", _split, lambda error: CLIENT.refuse(error, env.INTEGRATIONS_STRICT.get() == "on")
)
