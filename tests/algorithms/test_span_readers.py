"""The table of readers of the `span` attack."""

from __future__ import annotations

import inspect

from leakaudit.algorithms.span import readers
from leakaudit.algorithms.span.recover import READERS


def test_every_reader_stands_in_the_table_once() -> None:
    """A module in the package that the table lacks would never be asked."""
    names = [getattr(reader, "__name__", "").rsplit(".", 1)[-1] for reader in READERS]
    assert sorted(names) == sorted(readers.__all__)


def test_every_reader_takes_a_problem_and_nothing_else() -> None:
    """`fits` and `read` have one parameter each."""
    for reader in READERS:
        assert list(inspect.signature(reader.fits).parameters) == ["problem"]
        assert list(inspect.signature(reader.read).parameters) == ["problem"]


def test_the_last_reader_fits_every_problem() -> None:
    """Ranking never refuses, so some reader always returns a guess."""
    assert getattr(READERS[-1], "__name__", "").endswith(".noisy")
