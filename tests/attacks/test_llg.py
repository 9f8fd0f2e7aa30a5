"""`llg` counts the labels of a batch."""

from __future__ import annotations

import pytest
import torch

from leakaudit.attacks.llg import Llg, average_impact, batch_size, clipping_factor, extract_labels, smallest_batch
from leakaudit.budget import Budget
from leakaudit.snapshot import Granted, Observation
from tests import tiny

TEXTS = ["a dog", "the old cat ate", "a bird saw the river", "fish", "one horse liked two cats", "never at the house"]


def _counts(seen: Observation, **knobs: bool) -> tuple[int, ...] | None:
    return Llg(**knobs)(seen, torch.Generator().manual_seed(0), Budget(60)).label_counts


@pytest.mark.parametrize("labels", [[0, 0, 1, 2, 2, 2], [4, 4, 4, 4, 4, 4], [0, 1, 2, 3, 4, 0]])
def test_counts_are_exact_for_a_fresh_head_with_bias(labels: list[int]) -> None:
    """A fresh head predicts nearly the same for every input, so calibration is nearly exact."""
    seen = tiny.observe(TEXTS, labels, model=tiny.bert(num_labels=5), batch_size_bound=6)
    assert _counts(seen) == tuple(labels.count(c) for c in range(5))


def test_without_a_bound_the_smallest_fitting_batch_is_taken() -> None:
    """Shares of 1/2, 1/3 and 1/6 need six sequences."""
    seen = tiny.observe(TEXTS, [0, 0, 0, 1, 1, 2], model=tiny.bert(num_labels=4))
    assert _counts(seen) == (3, 2, 1, 0)


def test_without_a_bound_a_common_factor_is_lost() -> None:
    """Two of each of two classes look like one of each: the shares are all that can be read."""
    seen = tiny.observe(TEXTS[:4], [0, 0, 1, 1], model=tiny.bert(num_labels=3))
    assert _counts(seen) == (1, 1, 0)


def test_granted_lengths_say_how_many_sequences_there_are_and_granted_labels_say_nothing() -> None:
    """The attack must find the labels itself, whatever else is granted."""
    seen = tiny.observe(TEXTS[:4], [0, 0, 1, 1], model=tiny.bert(num_labels=3))
    assert batch_size(seen.granting(Granted(lengths=(4, 6, 7, 3)))) == 4
    assert _counts(seen.granting(Granted(lengths=(4, 6, 7, 3)))) == (2, 2, 0)
    assert _counts(seen.granting(Granted(labels=(2, 2, 2, 2)))) == _counts(seen)


def test_clipping_is_undone_where_a_class_is_absent() -> None:
    """An absent class has share 0, which fixes the factor."""
    seen = tiny.observe(
        TEXTS, [0, 0, 0, 0, 1, 2], model=tiny.bert(num_labels=4), batch_size_bound=6, max_grad_norm=1e-2
    )
    guess = Llg()(seen, torch.Generator().manual_seed(0), Budget(60))
    assert guess.label_counts == (4, 1, 1, 0)
    assert guess.facts["scale"] < 0.1


def test_without_a_bias_counts_come_from_the_weight_rows() -> None:
    """A decoder's head has no bias; half of one class and half of the other still shows."""
    model = tiny.gpt2_classifier(num_labels=2)
    step = tiny.client_step(model, tiny.gpt2_tokenizer(), TEXTS[:2] * 4, [0, 1] * 4, batch_size_bound=8)
    assert _counts(step.observe()) == (4, 4)


def test_algorithm_1_by_hand() -> None:
    """Two negatives are taken once each; then the smallest calibrated gradient takes the rest."""
    # Shares p - g = 0.75, 0.25, 0, 0 of B = 4 with p = 1/4: worked out on paper.
    gradient = torch.tensor([-0.5, 0.0, 0.25, 0.25])
    assert extract_labels(gradient, 4, -0.25, torch.full((4,), 0.25)) == (3, 1, 0, 0)


def test_algorithm_1_never_names_more_labels_than_there_are_sequences() -> None:
    """Under noise more classes can be negative than there are sequences."""
    assert extract_labels(torch.tensor([-0.1, -0.3, -0.2]), 2, -0.5, torch.zeros(3)) == (0, 1, 1)


def test_the_impact_of_plain_llg_is_equation_18() -> None:
    """(sum of negatives) / B * (1 + 1/n) with n = 4 classes."""
    assert average_impact(torch.tensor([-0.5, -0.3, 0.4, 0.4]), 2) == pytest.approx(-0.4 * 1.25)


def test_plain_llg_uses_the_gradients_only() -> None:
    """A balanced batch of one sequence a class has gradients near 0, which the plain variant cannot calibrate."""
    seen = tiny.observe(TEXTS, [0, 0, 0, 0, 1, 1], model=tiny.bert(num_labels=8), batch_size_bound=6)
    assert sum(_counts(seen, white_box=False) or ()) == 6


def test_clipping_factor_is_the_tightest_that_leaves_no_negative_share() -> None:
    """p - g/k >= 0 for all classes: k = max g / p."""
    assert clipping_factor(torch.tensor([-0.2, 0.1, 0.1]), torch.tensor([0.2, 0.4, 0.4])) == pytest.approx(0.25)
    assert clipping_factor(torch.zeros(2), torch.tensor([0.5, 0.5])) == 1.0


def test_smallest_batch_falls_back_on_the_best_fit() -> None:
    """Shares that no batch up to 64 makes whole still give a guess."""
    assert smallest_batch(torch.tensor([0.5, 0.5])) == 2
    assert 1 <= smallest_batch(torch.tensor([0.4142, 0.2718, 0.314])) <= 64


def test_it_does_not_apply_to_a_frozen_head() -> None:
    """The reason names the parameter."""
    seen = tiny.observe(["a dog"], frozen=frozenset({"classifier.weight", "classifier.bias"}))
    verdict = Llg().applies(seen)
    assert not verdict and "classifier.weight" in verdict.reason
