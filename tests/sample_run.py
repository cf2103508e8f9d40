"""A full run's result file, of two operators that don't exist: what the tests of report and README are made from."""

from __future__ import annotations

from jit_kernels.bench.record import (
    Accuracy,
    Candidate,
    Ceiling,
    Clock,
    Document,
    Estimate,
    FirstCall,
    Row,
    Timing,
    growths,
)

from jit_kernels.checks.provenance import sources_hash

COPY, FFMA = 4000.0, 60.0  # GB/s, TFLOP/s
# Time of a call over its floor, of each candidate; the fifth is eager only.
SCALE = {"jit_kernels": 1.25, "eager torch": 10.0, "peer": 1.5}
SOLVE = {"jit_kernels a": 2.0, "jit_kernels b": 3.0, "chain": 16.0, "chain, in a graph": 15.0}
EAGER_ONLY = {"chain"}


def estimate(median: float, stable: bool = True) -> Estimate:
    return Estimate(median=median, low=0.99 * median, high=1.01 * median, samples=30, stable=stable)


def ours(name: str) -> bool:
    return name.startswith("jit_kernels")


def row(operator: str, direction: str, sizes: dict[str, int], factors: dict[str, float], **fields) -> Row:
    """Times are the floor's, times the factors; ``detail`` says whether launches were counted and the host timed."""
    letters = dict(zip(sizes, ("T", "H") if "tokens" in sizes else ("N", "d"), strict=True))
    (count, width), detail = sizes.values(), fields.pop("detail", False)
    size = count * width * (10 if operator == "scale" else width * 12)
    flops = size * (1 if operator == "scale" else 100)
    floor = max(size / COPY * 1e-3, flops / FFMA * 1e-6, 0.5)
    timings = []
    for name, factor in factors.items():
        time = factor * floor
        gb, tflop = size / time * 1e-3, flops / time * 1e-6
        timings.append(
            Timing(
                candidate=name,
                ours=ours(name),
                gate="passed",
                errors={"out": 1.31e-7 * factor},
                graph=None if name in EAGER_ONLY else estimate(time, stable=name != "peer" or count != 512),
                eager=estimate(time + 20),
                host=estimate(7 * factor) if detail and count == 1 else None,
                kernel=time * 0.9 if detail else None,
                launches=1 if detail else None,
                peak_bytes=size,
                bytes=size,
                gb_per_s=gb,
                tflop_per_s=tflop,
                share={"copy": gb / COPY, "ffma": tflop / FFMA},
            )
        )
    return Row(
        operator=operator,
        direction=direction,
        label=" ".join(f"{letters[name]}={value}" for name, value in sizes.items()),
        parameters=sizes,
        bytes=size,
        flops=flops,
        floor=floor,
        floor_by="copy",
        began=1.0,
        timings=[*timings, *fields.pop("more", ())],
    )


def rows() -> list[Row]:
    found = [
        row(
            "scale",
            direction,
            {"tokens": tokens, "hidden_size": hidden},
            SCALE,
            detail=hidden == 4096 and tokens != 512,
        )
        for direction in ("forward", "backward")
        for hidden in (4096, 5120)
        for tokens in (1, 512, 8192)
    ]
    red = Timing(candidate="red", ours=False, gate="failed", reason="out: error 1.0e+00 exceeds 1.0e-05")
    return found + [
        row("solve", "forward", {"count": count, "head_dim": 128}, SOLVE, detail=count != 5000, more=[red])
        for count in (1, 700, 5000)
    ]


def candidates() -> list[Candidate]:
    def listed(operator: str, direction: str, names: tuple[str, ...]) -> list[Candidate]:
        return [
            Candidate(
                operator=operator,
                direction=direction,
                name=name,
                what=f"what {name} is",
                how=f"pip install {name}",
                ours=ours(name),
                present=name != "at sea",
                reason="it sailed <yesterday>" if name == "at sea" else "",
            )
            for name in names
        ]

    return [
        *listed("scale", "forward", (*SCALE, "at sea")),
        *listed("scale", "backward", tuple(SCALE)),
        *listed("solve", "forward", (*SOLVE, "red")),
    ]


def accuracy() -> list[Accuracy]:
    return [
        Accuracy(
            operator="solve",
            direction="forward",
            family=f"family {cond:g}",
            parameters={"count": 64, "head_dim": 128},
            samples=64,
            cond=cond,
            candidate=name,
            ours=ours(name),
            # The two chains have the same errors; b gives NaN on the hardest, which counts as infinite.
            worst={"T": error, "J": 2 * error},
            median={"T": error / 2, "J": error},
        )
        for cond in (10.0, 1e3, 1e5)
        for name, error in (
            ("jit_kernels a", 4e-8),
            ("jit_kernels b", float("inf") if cond == 1e5 else 2e-8 * cond),
            ("chain", 3e-8 * cond),
            ("chain, in a graph", 3e-8 * cond),
        )
    ]


def document(**fields) -> Document:
    """The whole run; ``fields`` take the place of its own."""
    found = fields.get("rows", rows())
    given = {
        "provenance": {
            "device": "NVIDIA X100",
            "driver": "599.1",
            "torch": "2.11.0",
            "cuda": "13.0",
            "commit": "abc1234",
            "csrc": sources_hash(),
            "created": "2026-01-02T03:04:05+00:00",
            "command": "jit-kernels bench --output run.json",
        },
        "rows_set": "full",
        "timer": "cuda",
        "ok": all(timing.gate != "failed" for one in found for timing in one.timings),
        "complete": True,
        "seconds": 123.4,
        "ceilings": [
            Ceiling(name="copy", unit="GB/s", value=estimate(COPY)),
            Ceiling(name="ffma", unit="TFLOP/s", value=estimate(FFMA)),
            Ceiling(name="empty_kernel", unit="us", value=estimate(0.5)),
        ],
        "candidates": candidates(),
        "rows": found,
        "accuracy": accuracy(),
        "first_calls": [
            FirstCall(operator="scale", build="", cold_seconds=27.5, warm_milliseconds=3.25, import_milliseconds=155.5)
        ],
        "growth": growths(found),
        "clocks": [
            Clock(seconds=float(n), sm_mhz=1980 - n, memory_mhz=3201, celsius=40 + n, watts=300.4, reasons=[])
            for n in range(3)
        ],
    }
    return Document(**given | fields)
