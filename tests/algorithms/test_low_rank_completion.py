"""Filling in what pruning removed, where the rank is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakaudit.algorithms.matching.low_rank_completion import completed
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.objective import Matching, Objective
from leakaudit.defenses.prune import Prune
from tests.support import tiny

RANK = 3


def _matrix() -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(60, RANK, generator=rng) @ torch.randn(RANK, 40, generator=rng)


@pytest.mark.parametrize(("share", "least"), [(0.0, 0.99999), (0.5, 0.999), (0.75, 0.98), (0.9, 0.9)])
def test_a_matrix_of_low_rank_comes_back_from_its_largest_entries(share: float, least: float) -> None:
    """The result has that rank and is far nearer than zeros for missing entries."""
    whole = _matrix()
    smallest = float(whole.abs().flatten().quantile(share))
    pruned = whole * (whole.abs() >= smallest)
    found = completed(pruned, RANK, smallest)
    assert torch.linalg.matrix_rank(found, rtol=1e-4) == RANK
    assert tiny.cosine(found, whole) > least
    assert share == 0.0 or 1 - tiny.cosine(found, whole) < 0.5 * (1 - tiny.cosine(pruned, whole))


def test_of_nothing_nothing_comes_back() -> None:
    nothing = torch.zeros(6, 4)
    assert torch.equal(completed(nothing, 2, 0.1), nothing)


def test_a_rank_that_says_nothing_leaves_the_matrix_as_it_is() -> None:
    whole = _matrix()
    pruned = whole * (whole.abs() >= 1.0)
    assert torch.equal(completed(pruned, 21, 1.0), pruned)


def test_with_what_was_removed_filled_in_the_true_words_explain_a_pruned_update_better() -> None:
    """With half of the entries, the distance is less than half of that with zeros."""
    seen, ids = tiny.defended(Prune(share=0.5), "the cat sat on the mat")
    logits = torch.zeros(1, 2)
    filled, unaware = (
        Matcher(seen, (len(ids),), Objective("cosine"), Matching(aware=aware)) for aware in (True, False)
    )
    assert filled.objective.filled and not filled.objective.masked and not unaware.objective.filled
    one, other = (matcher.token_losses([[ids]], logits)[0] for matcher in (filled, unaware))
    assert one < 0.5 * other
