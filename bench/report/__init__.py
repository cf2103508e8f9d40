"""The report of a benchmark run, from its JSON alone: an HTML page that needs no other file, and the pictures in it."""

from __future__ import annotations

from pathlib import Path

try:
    from jit_kernels.bench.report.drawing import origin
    from jit_kernels.bench.report.figures import pictures, plan
    from jit_kernels.bench.report.page import render
except ImportError as error:
    raise ImportError(f"the report needs matplotlib and jinja2: pip install 'jit-kernels[bench]' ({error})") from None
from jit_kernels.bench.report.view import Result


def write(source: Path, folder: Path) -> list[Path]:
    """Makes ``NAME.html`` and ``NAME-*.png`` from the result file ``NAME.json``; returns their paths.

    The same file gives the same bytes, as long as matplotlib and pillow are the same.

    Raises:
        ValueError: the file is no result file, or there is nothing in it to report.
    """
    result = Result.read(source)
    drawn = pictures(result)
    folder.mkdir(parents=True, exist_ok=True)
    made = {picture_at(source, folder, name): content for name, content in drawn.items()}
    made[page_at(source, folder)] = render(result, drawn).encode()
    for path, content in made.items():
        path.write_bytes(content)
    return list(made)


def outdated(source: Path, folder: Path) -> list[str]:
    """What ``write`` would change, and why; empty where page and pictures are those of the file.

    Pictures are held to the file that they were drawn from, and not to their bytes, which another release of matplotlib
    makes differently; the page is held to the text that is made of the file and those pictures.

    Raises:
        ValueError: the file is no result file, or there is nothing in it to report.
    """
    result = Result.read(source)
    lacks, found = [], {}
    for name in plan(result):
        path = picture_at(source, folder, name)
        found[name] = path.read_bytes() if path.exists() else b""
        if origin(found[name]) != f"sha256:{result.digest}":
            lacks.append(f"{path.name} {'was drawn from another file' if found[name] else 'is missing'}")
    page = page_at(source, folder)
    if not page.exists():
        lacks.append(f"{page.name} is missing")
    elif not lacks and page.read_text(encoding="utf-8") != render(result, found):
        lacks.append(f"{page.name} is not the page of {source.name}")
    return lacks


def page_at(source: Path, folder: Path) -> Path:
    return folder / f"{source.stem}.html"


def picture_at(source: Path, folder: Path, name: str) -> Path:
    return folder / f"{source.stem}-{name}.png"
