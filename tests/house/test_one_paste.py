"""README's blocks of "One paste" fit the programs of their users, and run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leakaudit.results.files import load_results
from tests.support.light_install import PROJECT, name_of
from tests.support.one_paste import ROOT, STACKS, Paste, pastes

MOST_LINES = 8
"""Most lines of code a block may have: more are no paste."""


@pytest.fixture(scope="module")
def blocks() -> dict[str, Paste]:
    """Return what README shows, by stack."""
    return {one.stack: one for one in pastes()}


def test_readme_has_a_block_for_each_stack(blocks: dict[str, Paste]) -> None:
    """In README's order, each no longer than a user reads at a glance."""
    assert list(blocks) == list(STACKS)
    assert all(0 < one.lines <= MOST_LINES for one in blocks.values()), {s: o.lines for s, o in blocks.items()}


@pytest.mark.parametrize("stack", STACKS)
def test_a_block_installs_an_extra_that_exists_and_fits_its_program(
    stack: str, blocks: dict[str, Paste], tmp_path: Path
) -> None:
    """Python parses the pasted program, and every name of leakaudit is there."""
    extras = {f"leakaudit[{name}]" for name in PROJECT["optional-dependencies"]}
    ours, *others = blocks[stack].requirements
    assert ours in extras and all(name_of(one) == one for one in others)
    blocks[stack].write(tmp_path, tmp_path / "audits")
    for part in STACKS[stack]:
        text = (tmp_path / part.target).read_text(encoding="utf-8")
        assert "leakaudit" in text and "# paste" not in text
        for node in ast.walk(ast.parse(text)) if part.target.endswith(".py") else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("leakaudit."):
                home = Path(ROOT, *str(node.module).split(".")).with_suffix(".py")
                for name in node.names:
                    assert re.search(rf"^(class|def) {name.name}\b|^{name.name} = ", home.read_text(), re.MULTILINE)


def test_the_block_for_torch_runs_here(blocks: dict[str, Paste], tmp_path: Path) -> None:
    """To a verdict, with all defaults.

    `make integrations` runs every block in an environment of its own.
    """
    blocks["torch"].write(tmp_path, tmp_path / "audits")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "report: " in done.stderr
    steps = load_results(tmp_path / "leakaudit-audit").steps
    assert steps and {step.verification.status.value for step in steps} == {"verified"}
