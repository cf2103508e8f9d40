"""A whole model with every collapse replaced: ``python -m bench.model_run``. Needs transformers.

One layer of DeepSeek-V4 in its official sizes (7.6 B parameters, 14 GiB of bfloat16 on a GPU), or tiny on any machine.
What is right for it is the same model as transformers ships it.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jit_kernels import mhc_pre_h_aggregate, use_backend
from jit_kernels.checks.compare import largest_ratio, same_bytes
from jit_kernels.checks.provenance import provenance
from jit_kernels.checks.run import choose
from jit_kernels.dispatch import OPERATORS
from jit_kernels.integrations import transformers as integration
from jit_kernels.integrations import version_of

SEED = 0
BATCH = 2
SITES = ("attention", "mlp", "head")  # where a one-layer model collapses, in this order
# The first layer of the configuration's defaults: compressed attention, and experts chosen by the token.
OFFICIAL = {"num_hidden_layers": 1}
TINY = OFFICIAL | {
    "vocab_size": 64,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "head_dim": 32,
    "q_lora_rank": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "o_groups": 1,
    "o_lora_rank": 16,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
}
LENGTHS = {True: 32, False: 256}  # tokens a sample, tiny or not: two entries of the compressed attention
FEW = 64  # elements of a tensor whose rounding error is a matter of luck
BOUND_REASON = (
    "the Frobenius distance of the two models is in each tensor no more than bfloat16 costs the shipped one there, its "
    f"distance from float32; in tensors of fewer than {FEW} elements, if more, the median tensor's relative one. The "
    "models differ in the order of a float32 sum of four; experts are chosen by the token, so nothing jumps"
)

Collapse = tuple[Tensor, Tensor, Tensor]  # residual, pre, out


class Recorder(TorchDispatchMode):
    """Counts the operator's calls, forward and backward, and keeps the forward's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[Collapse] = []
        self.backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.jit_kernels.mhc_pre_h_aggregate.default:
            self.forward.append((args[0].detach(), args[1].detach(), out.detach()))
        self.backward += func is torch.ops.jit_kernels.mhc_pre_h_aggregate_backward.default
        return out


def build(tiny: bool, device: torch.device) -> Any:
    """The model with seeded bfloat16 weights, made on the device; tokens routed to random, different experts."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**(TINY if tiny else OFFICIAL)))
    finally:
        torch.set_default_dtype(before)
    experts = model.model.layers[0].mlp.gate.tid2eid
    order = torch.rand(len(experts), model.config.n_routed_experts, dtype=torch.float32, device=device)
    experts.copy_(order.topk(experts.shape[1]).indices)
    return model.eval()


def run(tiny: bool, device: torch.device, backend: str = "auto") -> dict[str, Any]:
    """Everything that is held against the model as it ships; ``failures`` is empty where all of it holds.

    Raises:
        IntegrationError: transformers is missing, or writes its collapse in other words.
    """
    began = time.perf_counter()
    with integration.enabled():  # refuses before 14 GiB are filled
        model = build(tiny, device)
    ids = torch.randint(model.config.vocab_size, (BATCH, LENGTHS[tiny]), device=device)
    hidden = model.config.hidden_size
    probe = torch.zeros(*ids.shape, 4, hidden, dtype=torch.bfloat16, device=device)
    ran, reason = choose(OPERATORS["mhc_pre_h_aggregate"], (probe, probe[..., 0].float()), backend)
    result: dict[str, Any] = {
        "model": {
            "class": type(model).__name__,
            "transformers": version_of("transformers"),
            "experts": model.config._experts_implementation,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype),
            "hidden_size": hidden,
            "layer_types": model.config.layer_types,
            "mlp_layer_types": model.config.mlp_layer_types,
            "batch": BATCH,
            "length": LENGTHS[tiny],
            "seed": SEED,
        },
        "backend": {"asked": backend, "ran": ran, "reason": reason},
        "bound": BOUND_REASON,
    }
    if ran == "error":
        return result | {"failures": [reason]}
    failures: list[str] = []
    loss, shipped = gradients(model, ids)
    with float32(model):
        _, exact = gradients(model, ids)
        noise = {name: (distance(exact[name], tensor), distance(exact[name])) for name, tensor in shipped.items()}
        del exact
    typical = statistics.median(error / size for error, size in noise.values() if size)
    bounds = {name: max(error, typical * size * (shipped[name].numel() < FEW)) for name, (error, size) in noise.items()}
    result["bfloat16_error_of_shipped"] = typical
    result["backward"] = {"loss_of_shipped": loss} | backward(model, ids, ran, shipped, bounds, failures)
    del shipped
    with torch.no_grad():
        result["forward"] = forward(model, ids, ran, bounds["logits"], failures)
    if device.type == "cuda":
        result["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 1)
    return result | {"seconds": round(time.perf_counter() - began, 1), "failures": failures}


def forward(model: Any, ids: Tensor, ran: str, bound: float, failures: list[str]) -> dict[str, Any]:
    """Four counted forwards (the batch, again, and each sample alone), one uncounted, and the model as it ships."""
    shipped = model(ids).logits
    shipped_alone = torch.cat([model(one).logits for one in ids.split(1)])
    with replaced(ran) as whole:
        logits = model(ids).logits
    with replaced(ran) as again:
        repeat = model(ids).logits
    alone, samples = [], []
    for one in ids.split(1):
        with replaced(ran) as recorder:
            samples.append(model(one).logits)
        alone.append(recorder)
    with integration.enabled(), use_backend(ran):
        direct = model(ids).logits  # not watched, so past torch's dispatcher
    counts = [len(recorder.forward) for recorder in (whole, again, *alone)]
    expect(failures, counts == [len(SITES)] * 4, f"collapses of the four forwards: {counts}, expected 3 each")
    expect(failures, same_bytes([logits], [repeat]), "logits: a repeat has other bytes")
    expect(failures, same_bytes([logits], [direct]), "logits: the unwatched call has other bytes than the watched one")
    near(failures, "logits", logits, shipped, bound)
    with use_backend(ran):
        sites = [invariance(*calls) for calls in zip(SITES, whole.forward, *(r.forward for r in alone), strict=False)]
    for site in sites:
        held = site["same_bytes_given_same_inputs"]
        expect(failures, held, f"{site['site']}: the collapse of a sample has other bytes than in the batch")
        expect(
            failures, site["share_of_allowed"] <= 1, f"{site['site']}: the collapse is more than a rounding from theirs"
        )
    moved = next((site for site in sites if site["inputs_that_differ"]), None)
    return {
        "collapses": counts,
        "collapses_in_all": sum(counts),
        "repeats_have_same_bytes": same_bytes([logits, logits], [repeat, direct]),
        "logits_against_shipped": differences(logits, shipped),
        "batch_against_samples": {
            "logits": differences(logits, torch.cat(samples)),
            "logits_of_shipped": differences(shipped, shipped_alone),
            "first_difference": f"{moved['site']}: {', '.join(moved['inputs_that_differ'])}" if moved else None,
            "collapse": sites,
        },
    }


def invariance(site: str, whole: Collapse, *alone: Collapse) -> dict[str, Any]:
    """What one collapse met in the batch and in its samples alone, and what it makes of one sample's part of the batch.

    Only the latter is the collapse's own doing: its inputs are given. And how far it is, on the same, from the
    expression that it replaces: a unit in the last place of bfloat16 (2^-7 of an element, at most), beside the three
    float32 roundings of each, where products cancel.
    """
    residual, pre, out = (torch.cat(tensors) for tensors in zip(*alone, strict=True))
    parts = torch.cat([mhc_pre_h_aggregate(r, p) for r, p in zip(whole[0].split(1), whole[1].split(1), strict=True)])
    products = whole[1].unsqueeze(-1) * whole[0]
    shipped = products.sum(dim=-2).to(out.dtype)
    allowed = 2.0**-7 * torch.maximum(whole[2].abs(), shipped.abs()) + 6 * 2.0**-24 * products.abs().sum(dim=-2)
    inputs = {"residual": differences(whole[0], residual), "pre": differences(whole[1], pre)}
    return {
        "site": site,
        "inputs_that_differ": [name for name, found in inputs.items() if found["differ"]],
        "inputs": inputs,
        "out": differences(whole[2], out),
        "same_bytes_given_same_inputs": same_bytes([parts], [whole[2]]),
        "against_shipped_expression": differences(whole[2], shipped),
        "share_of_allowed": largest_ratio((whole[2].float() - shipped.float()).abs(), allowed),
    }


def backward(
    model: Any, ids: Tensor, ran: str, shipped: dict[str, Tensor], bounds: dict[str, float], failures: list[str]
) -> dict[str, Any]:
    """The gradients of a language-model loss in every parameter, against those of the model as it ships."""
    with replaced(ran) as recorder:
        loss, found = gradients(model, ids)
    calls = [len(recorder.forward), recorder.backward]
    expect(failures, calls == [len(SITES)] * 2, f"collapses forward and backward: {calls}, expected 3 each")
    expect(failures, found.keys() == shipped.keys(), "gradients: other parameters have one")
    shares, equal = {}, 0
    for name, tensor in found.items():
        expect(failures, bool(tensor.isfinite().all()), f"{name}: not finite")
        shares[name] = near(failures, name, tensor, shipped[name], bounds[name])
        equal += same_bytes([tensor], [shipped[name]])
    worst = max(shares, key=shares.__getitem__)
    return {
        "collapses": calls,
        "loss": loss,
        "tensors": len(found),
        "tensors_with_same_bytes": equal,
        "largest_share_of_bound": shares[worst],
        "largest_in": worst,
    }


@contextmanager
def replaced(ran: str) -> Iterator[Recorder]:
    with integration.enabled(), use_backend(ran), Recorder() as recorder:
        yield recorder


@contextmanager
def float32(model: Any) -> Iterator[None]:
    """The model with its parameters in float32; buffers stay, as they are not all bfloat16."""
    dtypes = [parameter.dtype for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    yield
    for parameter, dtype in zip(model.parameters(), dtypes, strict=True):
        parameter.data = parameter.data.to(dtype)


def gradients(model: Any, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The loss; the logits, and the loss's gradient in each parameter that has one."""
    out = model(ids, labels=ids)
    out.loss.backward()
    found = {"logits": out.logits.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
            parameter.grad = None
    return float(out.loss.detach()), found


def differences(one: Tensor, other: Tensor) -> dict[str, Any]:
    """How many elements have other bits, of how many, and by how much at most."""
    bits = {2: torch.int16, 4: torch.int32}[one.element_size()]
    differ = int((one.contiguous().view(bits) != other.contiguous().view(bits)).sum())
    return {"differ": differ, "of": one.numel(), "max_abs": float((one.float() - other.float()).abs().max())}


def distance(one: Tensor, other: Tensor | None = None) -> float:
    return float(torch.linalg.vector_norm(one if other is None else one - other, dtype=torch.float32))


def near(failures: list[str], what: str, found: Tensor, shipped: Tensor, bound: float) -> float:
    """The distance from the shipped model's, as a share of the bound."""
    apart = distance(found, shipped)
    expect(failures, apart <= bound, f"{what}: {apart:.2e} from the shipped model's, more than {bound:.2e}")
    return apart / bound if bound else float(apart > 0)


def expect(failures: list[str], held: bool, failure: str) -> None:
    if not held:
        failures.append(failure)


@click.command()
@click.option("--tiny", is_flag=True, help="A model of a few thousand parameters, for machines without a GPU.")
@click.option("--device", default=None, help="cpu, cuda, … [default: cuda where there is one].")
@click.option("--backend", type=click.Choice(("auto", "fused", "torch")), default="auto")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write the JSON to this file.")
def main(tiny: bool, device: str | None, backend: str, output: Path | None) -> None:
    """Run DeepSeek-V4 from transformers with every collapse replaced, and hold it against the model as it ships.

    Prints a JSON document. Exits 1 where something doesn't hold.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cpu" and not tiny:
        raise click.UsageError("the official sizes need a GPU with about 90 GiB; --tiny runs anywhere")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)  # now, rather than lose the result
    result = run(tiny, where, backend)
    text = json.dumps({"schema": 1, "provenance": provenance(where), "ok": not result["failures"]} | result, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    click.echo(text)
    sys.exit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
