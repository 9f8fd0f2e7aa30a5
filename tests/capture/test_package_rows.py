"""The page is right about trainings with TRL and sentence-transformers.

It is compared with the installed versions.
"""

from __future__ import annotations

import pytest

from tests.support import package_rows
from tests.support.package_rows import RUNS, installed, on_page
from tests.support.spy import Configuration


def _cases() -> list[tuple[str, Configuration]]:
    return [(package, case) for package in RUNS if installed(package) for case in package_rows.runs_of(package)]


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "case"), _cases(), ids=lambda given: getattr(given, "name", given))
def test_a_row_of_the_page_is_what_training_it_gives(package: str, case: Configuration) -> None:
    """For a version that the page lacks, only the stamp is checked.

    Nobody has reviewed what is recovered there.
    """
    cells, number = on_page(package), installed(package)
    assert number is not None
    found = package_rows.cell(case)
    said = cells.get((case.name, number), case.stamp)
    assert found.split(",")[0] == said.split(",")[0]
    if not _is_partly_read(said):  # a search that finds a part of the texts finds another part with other rounding
        assert found == said or (case.name, number) not in cells


def _is_partly_read(cell: str) -> bool:
    """Return whether a cell says that some of the texts were read and others were not."""
    read, _, of = cell.partition(", ")[2].removesuffix(" read").partition(" of ")
    return read not in ("", "0", of)


@pytest.mark.parametrize("package", RUNS)
def test_the_page_has_every_row_in_two_versions_and_every_one_is_verified(package: str) -> None:
    """Without the packages: the page itself."""
    cells = on_page(package)
    versions = {number for _, number in cells}
    assert len(versions) >= 2
    assert {name for name, _ in cells} == {case.name for case in package_rows.runs_of(package)}
    assert {found.split(",")[0] for found in cells.values()} == {"verified"}
