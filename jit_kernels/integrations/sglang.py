"""SGLang's video diffusion (VDN-H3): its delta factors through ``vdn_delta_factors``.

As a plug-in (``JIT_KERNELS_INTEGRATIONS=sglang``) SGLang finds us in each of its processes and applies our hooks where
its workers are ready; `install` does the same by hand in one process. ``MiniMaxH3VDNLinearBranch`` then reaches our
kernel through SGLang's own hook registry. What the kernel doesn't cover runs SGLang's own path, and the log says why.

The three functions have SGLang's own signatures and can be used without SGLang.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from jit_kernels._version import __version__
from jit_kernels.integrations import IntegrationError, rebind
from jit_kernels.integrations.plugin import Client, Need, Route
from jit_kernels.ops.vdn_delta_factors import OPERATOR

MODEL = "sglang.multimodal_gen.runtime.models.dits.minimax_h3_vdn"
DOOR = "sglang.multimodal_gen.runtime.platforms.plugins"
RULES = ("vdn_solve", "vdn_scaled", "sana_scaled")

CLIENT = Client(
    name="sglang",
    tested="0.5.23",
    group="sglang.multimodal_gen.plugins",
    selection="SGLANG_PLUGINS",
    needs=(
        Need(MODEL, "MiniMaxH3VDNLinearBranch"),
        Need(MODEL, "delta_factor_apply", ("rule", "alpha", "A", "B", "tokens_per_frame", "fused")),
        Need(MODEL, "vdn_delta_factors"),
        Need(MODEL, "can_use_vdn_delta_factors"),
        Need(DOOR, "HookRegistry"),
        Need(DOOR, "HookType"),
    ),
)
ROUTE = Route(OPERATOR, CLIENT)


def delta_factor_apply(
    rule: str, alpha: Tensor, A: Tensor, B: Tensor, *, tokens_per_frame: int, fused: bool = False
) -> tuple[Tensor, Tensor]:
    """The transition and the injection of one frame's statistics, as SGLang's function of this name.

    With S = tokens_per_frame and I the identity:

    - ``vdn_solve``: diag(alpha) (I + A)^-1 and B (I + A)^-1
    - ``vdn_scaled``: the same of A/S and B/sqrt(S). The scaling happens inside the kernel, in no pass of its own
    - ``sana_scaled``: diag(alpha) (I - A/S) and B/sqrt(S)

    Args:
        rule: One of the three.
        alpha: ``[F, H, d]``, may be expanded.
        A, B: ``[F, H, d, d]``; of A the lower triangle counts, but for ``sana_scaled``.
        tokens_per_frame: At least 1; ``vdn_solve`` doesn't look at it.
        fused: Whether the kernel may run; without it the torch fallback does.

    Returns:
        ``[F, H, d, d]`` float32, twice.

    Raises:
        ValueError: the rule is none of the three, tokens_per_frame is below 1, or shapes don't fit.
    """
    if rule not in RULES:
        raise ValueError(f"unknown delta rule {rule!r}: expected one of {', '.join(RULES)}")
    args = _arguments(rule, alpha, A, B, tokens_per_frame)
    if rule == "sana_scaled":
        A, B, alpha, a_scale, b_scale = args
        eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        return alpha.unsqueeze(-1) * (eye - a_scale * A), b_scale * B
    return OPERATOR(*args, backend=None if fused else "torch")


def vdn_delta_factors(A: Tensor, B: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """``(diag(alpha) (I + A)^-1, B (I + A)^-1)``: `jit_kernels.vdn_delta_factors` as SGLang calls it."""
    return OPERATOR(A, B, alpha)


def can_use_vdn_delta_factors(*args: Any) -> bool:
    """Whether the fused kernel covers a call: of ``(device, dtype, head_dim)`` or of ``(A, B, alpha)``.

    SGLang 0.5.23 asks in the first form; the second is how the function came into its main branch. An answer of True
    means that the kernel is loaded: at the first question it is compiled.
    """
    if not isinstance(args[0], Tensor):
        device, dtype, head_dim = args
        if torch.device(device).type != "cuda" or not torch.cuda.is_available():
            return False
        A = torch.empty((0, head_dim, head_dim), dtype=dtype, device=device)
        args = (A, A, A[..., 0])
    return ROUTE.covers(*args)


def _arguments(rule: str, alpha: Tensor, A: Tensor, B: Tensor, tokens_per_frame: int) -> tuple[Any, ...]:
    """What the operator takes, to the scales of A and B."""
    scales = (1.0, 1.0)
    if rule != "vdn_solve":
        if tokens_per_frame < 1:
            raise ValueError(f"tokens_per_frame must be at least 1; got {tokens_per_frame}")
        scales = (1.0 / tokens_per_frame, math.sqrt(1.0 / tokens_per_frame))
    return (A.float(), B.float(), alpha.float(), *scales)


# The hooks: each gets what it wraps as its first argument.


def _delta_factor_apply(
    theirs: Callable[..., Any],
    rule: str,
    alpha: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    tokens_per_frame: int,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    def own() -> tuple[Tensor, Tensor]:
        return theirs(rule, alpha, A, B, tokens_per_frame=tokens_per_frame, fused=fused)

    if not fused or rule not in ("vdn_solve", "vdn_scaled"):
        return own()  # asked for without kernels; or a rule that has no inverse
    return ROUTE.run(_arguments(rule, alpha, A, B, tokens_per_frame), own)


def _vdn_delta_factors(theirs: Callable[..., Any], A: Tensor, B: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    return ROUTE.run((A, B, alpha), lambda: theirs(A, B, alpha))


def _can_use(theirs: Callable[..., bool], *args: Any) -> bool:
    return can_use_vdn_delta_factors(*args) or theirs(*args)


HOOKS: dict[str, Callable[..., Any]] = {
    f"{MODEL}.delta_factor_apply": _delta_factor_apply,
    f"{MODEL}.vdn_delta_factors": _vdn_delta_factors,
    f"{MODEL}.can_use_vdn_delta_factors": _can_use,
}


def plug_in() -> None:
    """The entry point: SGLang calls it in each process, and applies the hooks when it is ready for them."""
    CLIENT.plug_in(register)


def register() -> None:
    """Gives SGLang's registry our hooks, once. SGLang itself puts them in place.

    Raises:
        IntegrationError: SGLang isn't installed or isn't what this was written for; nothing has been changed.
    """
    CLIENT.require()
    door = import_module(DOOR)
    missing = {target: hook for target, hook in HOOKS.items() if hook not in _hooks_on(door, target)}
    for target, hook in missing.items():
        door.HookRegistry.register(target, hook, door.HookType.AROUND)
    if missing:
        CLIENT.log.info(f"jit_kernels {__version__}: vdn_delta_factors stands behind SGLang's delta_factor_apply")


def install() -> None:
    """Registers the hooks and puts them in place, in this process and now. Does nothing where they are.

    Imports SGLang's model; and applies what other plug-ins have registered by now, as SGLang does in one go.

    Raises:
        IntegrationError: as `register`.
    """
    register()
    door = import_module(DOOR)
    door.HookRegistry.apply_hooks()
    if not installed():
        uninstall()
        raise IntegrationError("SGLang's registry could not apply our hooks: its log says why. Nothing was changed")


def installed() -> bool:
    """Whether SGLang's functions go through ours in this process."""
    return MODEL in sys.modules and all(_standing(target) for target in HOOKS)


def uninstall() -> None:
    """Takes the hooks out of the registry, and puts SGLang's very functions back wherever they stood.

    Raises:
        IntegrationError: another plug-in hooked the same function, or somebody replaced it since; nothing has been
            changed.
    """
    door = sys.modules.get(DOOR)
    if door is None:
        return
    registry = door.HookRegistry
    mine = [target for target, hook in HOOKS.items() if hook in _hooks_on(door, target)]
    for target in mine:
        if len(_hooks_on(door, target)) > 1 or (target in registry._patched and not _standing(target)):
            raise IntegrationError(f"{target} was hooked or replaced by somebody else too: undo that first")
    for target in mine:
        wrapper = _standing(target)
        del registry._hooks[target]
        registry._patched.discard(target)
        if wrapper is not None:
            rebind(wrapper, wrapper.__wrapped__)


def _hooks_on(door: Any, target: str) -> list[Any]:
    return [hook for _, hook, _ in door.HookRegistry._hooks.get(target, ())]


def _standing(target: str) -> Any:
    """What stands in the model's module, where that is the registry's wrapper around our hook; else None."""
    wrapper = getattr(sys.modules.get(MODEL), target.rpartition(".")[2], None)
    cells = getattr(wrapper, "__closure__", None) or ()
    return wrapper if any(cell.cell_contents is HOOKS[target] for cell in cells) else None
