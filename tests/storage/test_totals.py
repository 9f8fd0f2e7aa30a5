"""What a trainer tells a worker at its end."""

from __future__ import annotations

from leakaudit.results.schema import Privacy
from leakaudit.storage.rounds_file import added
from leakaudit.storage.spool_files import Totals


def test_the_accountant_that_spoke_last_counts() -> None:
    """Wrong: two epsilons of two rounds, or none after a round that states none."""
    first, second = (Totals(kept=1, privacy=(Privacy(epsilon=number, origin="accountant"),)) for number in (1.0, 2.0))
    assert [one.epsilon for one in added(first, second).privacy] == [2.0]
    assert [one.epsilon for one in added(first, Totals(kept=1)).privacy] == [1.0]
    assert Totals.model_validate_json(first.model_dump_json()) == first
