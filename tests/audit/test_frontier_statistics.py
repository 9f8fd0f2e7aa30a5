"""The interval of a frontier's differences, and the metrics that it pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn import metrics as reference

from leakaudit.audit.frontier.evaluation import Outcomes, metrics_of
from leakaudit.audit.frontier.statistics import is_above, mean_over_seeds


@pytest.mark.parametrize(("seed_sd", "example_sd", "rest_sd"), [(1.0, 0.0, 1.0), (0.0, 3.0, 1.0), (0.3, 2.0, 2.0)])
def test_the_interval_covers_the_truth_in_at_least_its_share_of_cases(
    seed_sd: float, example_sd: float, rest_sd: float
) -> None:
    """Forbids an interval without the noise of the seeds or of the examples."""
    rng, covered, trials, mean = np.random.default_rng(0), 0, 1500, 0.7
    for _ in range(trials):
        of_seeds, of_examples = rng.normal(0, seed_sd, (3, 1)), rng.normal(0, example_sd, (1, 40))
        found = mean_over_seeds(mean + of_seeds + of_examples + rng.normal(0, rest_sd, (3, 40)))
        assert found.lower is not None and found.upper is not None
        covered += found.lower <= mean <= found.upper
    assert covered / trials >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / trials)


def test_one_seed_gives_no_interval() -> None:
    """Forbids an interval that takes one training for all trainings."""
    found = mean_over_seeds(np.array([[0.0, 1.0, 2.0]]))
    assert (found.value, found.lower, found.upper) == (1.0, None, None)


def test_a_loss_is_above_another_only_beyond_the_noise() -> None:
    """Forbids dropping a strength for a difference that is noise."""
    rng = np.random.default_rng(1)
    base = rng.normal(2, 1, 50)
    assert is_above(base + 0.5 + rng.normal(0, 0.1, 50), base)
    assert not is_above(base + rng.normal(0, 1, 50), base)


def _classified(labels: list[int], predicted: list[int]) -> Outcomes:
    n = len(labels)
    return Outcomes(np.ones(n), np.ones(n), np.array(labels), np.array(predicted))


def test_metrics_of_classes_are_those_of_scikit_learn() -> None:
    """Forbids another MCC or F1 than the usual ones, with three classes."""
    rng = np.random.default_rng(2)
    labels, noise = rng.integers(0, 3, 200), rng.integers(0, 3, 200)
    predicted = np.where(rng.random(200) < 0.6, labels, noise)
    found = metrics_of(_classified(labels.tolist(), predicted.tolist()))
    assert found["accuracy"].value == pytest.approx(reference.accuracy_score(labels, predicted))
    assert found["mcc"].value == pytest.approx(reference.matthews_corrcoef(labels, predicted))
    assert found["f1"].value == pytest.approx(reference.f1_score(labels, predicted, average="macro"))
    for one in found.values():
        assert one.by_example.mean() == pytest.approx(one.value, abs=0.01)


def test_no_correlation_is_stated_where_all_labels_are_equal() -> None:
    """Forbids a zero, or NaN, for what cannot be measured."""
    assert "mcc" not in metrics_of(_classified([1, 1, 1], [1, 0, 1]))
    assert metrics_of(_classified([1, 0, 1], [1, 1, 1]))["mcc"].value == 0.0


def test_perplexity_is_over_tokens_and_not_over_texts() -> None:
    """Forbids a mean of means: a long text counts by its tokens."""
    outcomes = Outcomes(np.array([2.0, 9.0]), np.array([1.0, 9.0]), None, None)
    found = metrics_of(outcomes)
    assert found["loss"].value == pytest.approx(1.1)
    assert found["perplexity"].value == pytest.approx(math.exp(1.1))
