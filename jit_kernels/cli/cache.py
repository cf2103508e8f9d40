"""``jit-kernels cache``: where the compiled kernels lie, which there are, whether they are whole; and clearing them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import click

from jit_kernels.cli.arguments import Targets
from jit_kernels.cli.output import emit, json_option, rows, size
from jit_kernels.jit import store
from jit_kernels.jit.arch import Target
from jit_kernels.jit.errors import JitError


@click.group()
def cache() -> None:
    """See, verify and clear the compiled kernels."""


class Age(click.ParamType):
    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        match = re.fullmatch(r"(\d+)([mhd])", value)
        if not match:
            self.fail(
                f"{value!r} is no age: expected a number of minutes, hours or days, as in 90m, 12h or 7d", param, ctx
            )
        return timedelta(minutes=int(match[1]) * {"m": 1, "h": 60, "d": 24 * 60}[match[2]])


@dataclass(frozen=True)
class Row:
    """One entry as the command shows it."""

    entry: store.Entry
    name: str
    target: str
    version: str
    created: str
    size: int

    @classmethod
    def of(cls, entry: store.Entry) -> Row:
        folder = entry.folder
        try:
            meta = entry.meta
            return cls(entry, " ".join(meta["args"]), meta["target"], meta["version"], meta["created"], meta["size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            name = f"{folder.name.rsplit('-', 2)[0]} (damaged: {type(error).__name__})"
            return cls(entry, name, folder.parent.name, folder.parent.parent.name, "", 0)

    @property
    def place(self) -> str:
        return "prebuilt" if self.entry.prebuilt else "cache"

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "target": self.target,
            "version": self.version,
            "place": self.place,
            "size": self.size,
            "created": self.created,
            "folder": str(self.entry.folder),
        }


def filters(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that choose entries; together they narrow the choice."""
    for option in (
        click.option("--older-than", type=Age(), help="Only what was built longer ago, such as 12h or 7d."),
        click.option("--version", "versions", multiple=True, help="Only of this package version; again for more."),
        click.option("--arch", type=Targets(), default=(), help="Only of these arch targets, such as sm_90a,sm_100a."),
        click.option("--op", "names", multiple=True, help="Only of this operator or module; again for more."),
    ):
        command = option(command)
    return command


def chosen(
    names: tuple[str, ...], arch: tuple[Target, ...], versions: tuple[str, ...], older_than: timedelta | None
) -> list[Row]:
    latest = (datetime.now(timezone.utc) - older_than).isoformat() if older_than else None
    return [
        row
        for row in map(Row.of, store.listing())
        if (not names or row.name.split()[0] in names)
        and (not arch or row.target in map(str, arch))
        and (not versions or row.version in versions)
        and (latest is None or row.created < latest)
    ]


@cache.command("dir")
@json_option
def directory(as_json: bool) -> None:
    """Print the folder that holds the cache."""
    root = str(store.roots()[0])
    emit({"schema": 1, "dir": root}, as_json, lambda: [root])


@cache.command("list")
@filters
@json_option
def list_entries(as_json: bool, **choice: Any) -> None:
    """List the compiled kernels, those in prebuilt folders too."""
    found = chosen(**choice)
    emit(
        {"schema": 1, "entries": [row.as_dict() for row in found]},
        as_json,
        lambda: [
            rows(
                None,
                ("kernel", "arch", "version", "place", "size", "built", "folder"),
                (
                    (row.name, row.target, row.version, row.place, size(row.size), row.created, row.entry.folder)
                    for row in found
                ),
            )
            if found
            else "no compiled kernels"
        ],
    )


@cache.command("size")
@filters
@json_option
def total_size(as_json: bool, **choice: Any) -> None:
    """Print what the compiled kernels take, by arch target."""
    by_target: dict[str, list[int]] = {}
    for row in chosen(**choice):
        by_target.setdefault(row.target, []).append(row.size)
    sums: list[dict[str, Any]] = [
        {"target": target, "entries": len(s), "bytes": sum(s)} for target, s in sorted(by_target.items())
    ]
    total = sum(one["bytes"] for one in sums)
    emit(
        {"schema": 1, "targets": sums, "bytes": total},
        as_json,
        lambda: [
            rows(None, ("arch", "kernels", "size"), ((s["target"], s["entries"], size(s["bytes"])) for s in sums)),
            f"in all {size(total)}",
        ],
    )


@cache.command()
@filters
@json_option
@click.pass_context
def verify(context: click.Context, as_json: bool, **choice: Any) -> None:
    """Compare the compiled kernels with their recorded hashes, and check that nobody else can write them.

    Exits 1 if one fails; a damaged one is built again when it is needed.
    """
    found = [row.as_dict() | {"fault": _fault(row.entry)} for row in chosen(**choice)]
    faulty = [one for one in found if one["fault"]]
    emit(
        {"schema": 1, "entries": found, "ok": not faulty},
        as_json,
        lambda: [f"{len(found)} compiled kernels, {len(faulty)} faulty", *(one["fault"] for one in faulty)],
    )
    if faulty:
        context.exit(1)


@cache.command()
@filters
@json_option
def clean(as_json: bool, **choice: Any) -> None:
    """Remove compiled kernels. Prebuilt folders stay, and so does what is being built or loaded right now."""
    sizes = {row.entry: row.size for row in chosen(**choice)}
    removed = store.remove(sizes)
    total = sum(sizes[entry] for entry in removed)
    emit(
        {"schema": 1, "removed": _folders(removed), "bytes": total},
        as_json,
        lambda: [f"removed {len(removed)} compiled kernels, {size(total)}"],
    )


def _folders(entries: Iterable[store.Entry]) -> list[str]:
    return [str(entry.folder) for entry in entries]


def _fault(entry: store.Entry) -> str:
    try:
        entry.verify()
    except JitError as error:
        return str(error)
    return ""
