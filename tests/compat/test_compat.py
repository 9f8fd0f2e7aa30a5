"""Lowest and highest versions: the same stamps and the same recovered texts.

`make compat` makes both environments and prints the table; here they are used where they are.
"""

from __future__ import annotations

import re

import pytest

from tests.compat.compare import ROOT, main
from tests.support.light_install import PROJECT, name_of

PYTHONS = [str(ROOT / folder / "bin" / "python") for folder in (".venv-lowest", ".venv-highest")]


@pytest.mark.integrations
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not all((ROOT / path).exists() for path in PYTHONS), reason="`make compat` makes the environments")
def test_both_environments_agree() -> None:
    """Twelve trainings, a gate and a report."""
    assert main(PYTHONS) == 0


def test_the_lowest_versions_are_the_floors() -> None:
    """A floor that no run has seen would be a promise."""
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name_of(line): line.partition("==")[2] for line in lines if not line.startswith("#")}
    extras = PROJECT["optional-dependencies"]
    for requirement in (
        *PROJECT["dependencies"],
        *(one for name in ("audit", "lightning", "lora", "opacus") for one in extras[name]),
    ):
        floor = re.search(r">=([\d.]+)", requirement)
        if floor is not None:
            wanted, found = (
                [int(part) for part in version.split(".")] for version in (floor[1], pinned[name_of(requirement)])
            )
            assert found[: len(wanted)] == wanted, requirement
