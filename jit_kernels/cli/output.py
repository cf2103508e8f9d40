"""What every command prints: a table for people, or one JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

json_option: Callable[..., Any] = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def emit(document: Any, as_json: bool, table: Callable[[], Iterable[Any]]) -> None:
    """Prints the document, or what ``table`` yields: rich renderables."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe has no width: keep rows whole
    for part in table():
        console.print(part)


def rows(title: str | None, columns: Sequence[str], lines: Iterable[Sequence[Any]]) -> Table:
    """A table of strings; nothing in it is taken for markup."""
    from rich.text import Text

    table = Table(*columns, title=title, title_justify="left", show_edge=False, pad_edge=False)
    for line in lines:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in line))
    return table


def progress() -> Progress:
    """A bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
