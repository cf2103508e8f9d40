"""The record of ``.ci/clients``: ``python3 -m bench.released TESTS.xml --output FILE``, from pytest's JUnit XML."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import torch

from jit_kernels.checks.provenance import provenance
from jit_kernels.integrations import sglang, version_of, vllm


def cases(path: Path) -> list[dict[str, Any]]:
    """Each test with its outcome; why, where it didn't pass."""
    found = []
    for case in ElementTree.parse(path).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        found.append(
            {
                "test": f"{case.get('classname')}.{case.get('name')}",
                "outcome": "passed" if outcome is None else {"failure": "failed"}.get(outcome.tag, outcome.tag),
                **({} if outcome is None else {"reason": (outcome.get("message") or "").partition("\n")[0]}),
            }
        )
    return found


@click.command()
@click.argument("tests", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(tests: Path, output: Path) -> None:
    """Write which of the released packages' tests passed. Exits 1 where one did not."""
    found = cases(tests)
    counts = Counter(case["outcome"] for case in found)
    document = {
        "schema": 1,
        "provenance": provenance(torch.device("cpu")),
        "clients": {module.CLIENT.name: version_of(module.CLIENT.name) for module in (sglang, vllm)},
        "ok": counts["passed"] > 0 and not (counts["failed"] or counts["error"]),
        "counts": dict(sorted(counts.items())),
        "tests": found,
    }
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: document[key] for key in ("clients", "ok", "counts")}))
    sys.exit(0 if document["ok"] else 1)


if __name__ == "__main__":
    main()
