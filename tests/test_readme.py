"""What the README says is what the files say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jit_kernels.cli import commands

REPO = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (REPO / "README.md").exists(), reason="needs the checkout's README")


def test_figures_come_from_the_result_files():
    done = subprocess.run([sys.executable, "-m", "bench.readme", "--check"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_of_the_table_exists():
    named = re.findall(r"^\| `jit-kernels (\w+)", (REPO / "README.md").read_text(), re.M)
    assert set(named) == set(commands.commands)


def test_every_test_of_the_fault_table_exists():
    named = set(re.findall(r"`(test_\w+)`", (REPO / "README.md").read_text()))
    defined = {
        name for file in (REPO / "tests").glob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(named) > 20
    assert named <= defined


def test_every_link_leads_somewhere():
    for page in [REPO / "README.md", REPO / "CONTRIBUTING.md", *(REPO / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)
