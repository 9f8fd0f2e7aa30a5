"""AUC and true positive rates, compared with counting and with scikit-learn."""

from __future__ import annotations

import random

import pytest

from leakaudit.results.ranking import auc, over_rounds, true_positive_rate


def _scores(seed: int = 0, shift: float = 1.0) -> tuple[list[float], list[float]]:
    """Return scores with ties of 30 members and 200 others."""
    draw = random.Random(seed)
    return [round(draw.gauss(shift, 1), 1) for _ in range(30)], [round(draw.gauss(0, 1), 1) for _ in range(200)]


def test_the_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    """Ties count half."""
    members, others = _scores()
    pairs = [(a > b) + (a == b) / 2 for a in members for b in others]
    assert auc(members, others) == pytest.approx(sum(pairs) / len(pairs))


def test_the_auc_is_that_of_scikit_learn() -> None:
    """Another implementation."""
    metrics = pytest.importorskip("sklearn.metrics")
    members, others = _scores()
    truth = [1] * len(members) + [0] * len(others)
    assert auc(members, others) == pytest.approx(metrics.roc_auc_score(truth, members + others))


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 0.5])
def test_the_true_positive_rate_is_that_of_scikit_learn(rate: float) -> None:
    """It is the highest point of the curve at or left of the false positive rate."""
    metrics = pytest.importorskip("sklearn.metrics")
    members, others = _scores(seed=1)
    false, true, _ = metrics.roc_curve([1] * 30 + [0] * 200, members + others, drop_intermediate=False)
    found = true_positive_rate(members, others, rate)
    assert found.rate == pytest.approx(max(t for f, t in zip(false, true, strict=True) if f <= rate + 1e-12))


def test_the_threshold_lets_no_more_others_through_than_asked() -> None:
    """One per cent of 200 are two."""
    members, others = _scores()
    threshold = true_positive_rate(members, others, 0.01).threshold
    assert sum(one > threshold for one in others) <= 2


def test_equal_scores_say_nothing() -> None:
    """AUC one half, and no true positive."""
    assert auc([1.0, 1.0], [1.0]) == 0.5
    found = true_positive_rate([1.0, 1.0], [1.0], 0.0)
    assert found.k == 0 and found.bounds.lower == 0.0


def test_the_interval_over_rounds_holds_the_mean() -> None:
    """And is a point if all rounds are equal."""
    rounds = [_scores(seed) for seed in range(8)]
    bounds = over_rounds(rounds, auc)
    mean = sum(auc(*scores) for scores in rounds) / 8
    assert bounds.lower is not None and bounds.upper is not None
    assert bounds.lower < mean < bounds.upper
    same = over_rounds([rounds[0]] * 3, auc)
    assert same.lower == same.upper == pytest.approx(auc(*rounds[0]))


@pytest.mark.parametrize("groups", [([], [1.0]), ([1.0], [])])
def test_an_empty_group_is_refused_with_the_numbers(groups: tuple[list[float], list[float]]) -> None:
    """No number is not one half."""
    with pytest.raises(ValueError, match=f"{len(groups[0])} members and {len(groups[1])} others"):
        auc(*groups)
    with pytest.raises(ValueError, match="no rounds"):
        over_rounds([], auc)
