"""The page's table of attacks and kinds of update is what the audit says."""

from __future__ import annotations

from tests.support import update_matrix


def test_the_page_shows_what_the_audit_says_of_every_attack_and_kind_of_update() -> None:
    """Make it again with `python -m tests.support.update_matrix --write`."""
    assert update_matrix.on_page() == update_matrix.table(update_matrix.all_cells())


def test_every_refusal_has_a_reason_and_every_attack_reads_a_gradient() -> None:
    """An attack that refuses a plain gradient of every small model has no row."""
    cells = update_matrix.all_cells()
    assert all(cells[name, "gradient"].word == "yes" for name in update_matrix.names())
    assert all(bool(one.reason) == (one.word == "no") for one in cells.values())
