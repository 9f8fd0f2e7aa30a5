"""Trainings of an outside tester are audited.

No kept step is wrong without a warning, training is the same to the bit, and few runs are refused.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import other_runs
from tests.support.spy import Configuration, row_of


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> Iterator[None]:
    """Exclude the objects of all imports from garbage collection.

    The Trainer collects garbage after each training, which took half of these tests' time.
    """
    gc.freeze()
    yield
    gc.unfreeze()


SLOW = [pytest.param(case, marks=pytest.mark.integrations, id=case.name) for case in other_runs.SLOW]
FAST = [pytest.param(case, id=case.name) for case in other_runs.FAST]


@pytest.mark.parametrize("case", [*SLOW, *FAST])
def test_what_is_kept_is_true_and_training_is_the_same(tmp_path: Path, case: Configuration) -> None:
    """Against the same training without the audit, seen by code that is not ours."""
    row = row_of(case, tmp_path)
    assert row.same_training, row.line()
    assert not row.wrong, row.line()
    assert row.stamp == case.stamp, "\n".join([row.line(), *row.said])


def test_most_are_verified_and_hardly_any_is_refused() -> None:
    """A mismatch is a step whose update no other process can compute."""
    stamps = [case.stamp for case in other_runs.ALL]
    assert sum(stamp == "verified" for stamp in stamps) >= 74, stamps
    assert sum("refused" in stamp or "none kept" in stamp for stamp in stamps) <= len(stamps) / 20
