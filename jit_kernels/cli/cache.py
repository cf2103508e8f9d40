"""``jit-kernels cache``: where the compiled kernels lie, which there are, and away with them."""

from __future__ import annotations

import json
from typing import Any

import click

from jit_kernels.cli.output import emit, json_option, rows, size
from jit_kernels.jit import cache as store


@click.group()
def cache() -> None:
    """See and clear the compiled kernels."""


@cache.command("dir")
@json_option
def directory(as_json: bool) -> None:
    """Print the folder that holds the cache."""
    root = str(store.roots()[0])
    emit({"schema": 1, "dir": root}, as_json, lambda: [root])


@cache.command("list")
@json_option
def list_entries(as_json: bool) -> None:
    """List the compiled kernels, those in prebuilt folders too."""
    entries = [_report(place, entry) for place, entry in store.listing()]
    emit(
        {"schema": 1, "entries": entries},
        as_json,
        lambda: [
            rows(
                None,
                ("kernel", "arch", "version", "place", "size", "built", "folder"),
                (
                    [
                        " ".join(e["args"]),
                        e["target"],
                        e["version"],
                        e["place"],
                        size(e["size"]),
                        e["created"],
                        e["folder"],
                    ]
                    for e in entries
                ),
            )
            if entries
            else "no compiled kernels"
        ],
    )


@cache.command()
@json_option
def clean(as_json: bool) -> None:
    """Remove the compiled kernels. Prebuilt folders stay, and so does what is being built right now."""
    freed = {str(entry.folder): _report(place, entry)["size"] for place, entry in store.listing() if place == "cache"}
    removed = [str(entry.folder) for entry in store.clean()]
    total = sum(freed[folder] for folder in removed if folder in freed)
    emit(
        {"schema": 1, "removed": removed, "bytes": total},
        as_json,
        lambda: [f"removed {len(removed)} compiled kernels, {size(total)}"],
    )


def _report(place: str, entry: store.Entry) -> dict[str, Any]:
    try:
        meta = entry.meta
    except (OSError, json.JSONDecodeError) as error:
        meta = {
            "args": [f"damaged: {error}"],
            "target": entry.folder.parent.name,
            "version": entry.folder.parent.parent.name,
        }
    return {
        "args": meta["args"],
        "target": meta["target"],
        "version": meta["version"],
        "place": place,
        "size": meta.get("size", 0),
        "created": meta.get("created", ""),
        "folder": str(entry.folder),
    }
