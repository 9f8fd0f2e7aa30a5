"""The page's matrix is what comes out when its cells are trained."""

from __future__ import annotations

import pytest

from tests.support import matrix
from tests.support.stacks import STACKS


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("feature", matrix.ROWS)
def test_a_cell_of_the_page_is_what_training_it_gives(feature: str, stack: str) -> None:
    """The page has what the runs show.

    If a cell became better, make the page again with `python -m tests.support.matrix --write`.
    """
    assert matrix.cell(feature, stack) == matrix.on_page()[feature, stack]


def test_the_page_has_every_cell_and_no_mismatch() -> None:
    """A mismatch would be a defect of the capture, not a property of a stack."""
    cells = matrix.on_page()
    assert set(cells) == {(feature, stack) for feature in matrix.ROWS for stack in STACKS}
    assert set(cells.values()) <= {"verified", "scaled", "noised", "refused", "untested"}
