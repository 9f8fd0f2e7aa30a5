"""Trainings with TRL and sentence-transformers: what the page says of the installed versions is what comes of them."""

from __future__ import annotations

import pytest

from tests.callbacks import package_rows
from tests.callbacks.package_rows import RUNS, installed, on_page
from tests.callbacks.spy import Configuration


def _cases() -> list[tuple[str, Configuration]]:
    return [(package, case) for package in RUNS if installed(package) for case in package_rows.runs_of(package)]


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "case"), _cases(), ids=lambda given: getattr(given, "name", given))
def test_a_row_of_the_page_is_what_training_it_gives(package: str, case: Configuration) -> None:
    """Of a version that the page does not have the stamp alone: what is read there was not looked at by anybody."""
    cells, number = on_page(package), installed(package)
    assert number is not None
    found = package_rows.cell(case)
    if (case.name, number) in cells:
        assert found == cells[case.name, number]
    else:
        assert found.split(",")[0] == case.stamp


@pytest.mark.parametrize("package", RUNS)
def test_the_page_has_every_row_in_two_versions_and_every_one_is_verified(package: str) -> None:
    """Without the packages: the page itself."""
    cells = on_page(package)
    versions = {number for _, number in cells}
    assert len(versions) >= 2
    assert {name for name, _ in cells} == {case.name for case in package_rows.runs_of(package)}
    assert {found.split(",")[0] for found in cells.values()} == {"verified"}
