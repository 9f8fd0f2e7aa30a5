"""`llg`, `llg-star` and `llg-plus` count labels; `random-labels` is the baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.algorithms.labels.clipping import clipping_factor
from leakaudit.algorithms.labels.counts import batch_size, on_the_simplex, smallest_batch, solve_shares, whole_counts
from leakaudit.algorithms.labels.head_loss import HeadLoss
from leakaudit.algorithms.labels.llg import average_impact, extract_labels
from leakaudit.attacks.llg import Llg
from leakaudit.attacks.llg_plus import LlgPlus
from leakaudit.attacks.llg_star import LlgStar
from leakaudit.attacks.random_labels import RandomLabels
from leakaudit.client.batches import make_batch
from leakaudit.client.facts import Granted
from leakaudit.client.observation import Observation
from leakaudit.errors import DataError
from leakaudit.models.array_classifier import load_auxiliary, save_auxiliary
from leakaudit.plugins.budget import Budget
from tests.support import tiny

TEXTS = ["a dog", "the old cat ate", "a bird saw the river", "fish", "one horse liked two cats", "never at the house"]


def _counts(attack: Any, seen: Observation) -> tuple[int, ...]:
    counts: tuple[int, ...] = attack(seen, torch.Generator().manual_seed(0), Budget(600)).label_counts
    return counts


def _star(seen: Observation) -> tuple[int, ...]:
    return _counts(LlgStar(), seen)


@pytest.mark.parametrize("labels", [[0, 0, 1, 2, 2, 2], [4, 4, 4, 4, 4, 4], [0, 1, 2, 3, 4, 0]])
@pytest.mark.parametrize("attack", [Llg(), LlgStar()])
def test_counts_are_exact_for_a_fresh_head_with_bias(attack: Any, labels: list[int]) -> None:
    """A fresh head predicts nearly the same everywhere, so the bias is enough."""
    seen = tiny.observe(TEXTS, labels, model=tiny.bert(num_labels=5), batch_size_bound=6)
    assert _counts(attack, seen) == tuple(labels.count(c) for c in range(5))


def test_without_a_bound_the_smallest_fitting_batch_is_taken() -> None:
    """Shares of 1/2, 1/3 and 1/6 need six sequences."""
    seen = tiny.observe(TEXTS, [0, 0, 0, 1, 1, 2], model=tiny.bert(num_labels=4))
    assert _star(seen) == _counts(Llg(), seen) == (3, 2, 1, 0)


def test_without_a_bound_a_common_factor_is_lost_unless_the_count_is_granted() -> None:
    """Two of each of two classes look like one of each: only shares are known."""
    seen = tiny.observe(TEXTS[:4], [0, 0, 1, 1], model=tiny.bert(num_labels=3))
    assert _star(seen) == (1, 1, 0)
    granted = LlgStar(data_count=4)
    assert _counts(granted, seen) == (2, 2, 0) and granted.grants == ("data_count",)
    assert LlgStar().grants == ()


def test_granted_lengths_say_how_many_sequences_there_are_and_granted_labels_say_nothing() -> None:
    """The attack must find the labels itself, whatever else is granted."""
    seen = tiny.observe(TEXTS[:4], [0, 0, 1, 1], model=tiny.bert(num_labels=3))
    assert batch_size(seen.granting(Granted(lengths=(4, 6, 7, 3)))) == 4
    assert _star(seen.granting(Granted(lengths=(4, 6, 7, 3)))) == (2, 2, 0)
    assert _star(seen.granting(Granted(labels=(2, 2, 2, 2)))) == _star(seen)


def test_a_count_below_one_is_refused() -> None:
    """The message says what it is the number of."""
    for kind in (Llg, LlgStar, LlgPlus, RandomLabels):
        with pytest.raises(
            ValueError, match="data_count is the number of sequences behind the update, at least 1, got 0"
        ):
            kind(data_count=0)


def test_clipping_is_undone_where_a_class_is_absent() -> None:
    """An absent class has share 0, which fixes the factor."""
    seen = tiny.observe(
        TEXTS, [0, 0, 0, 0, 1, 2], model=tiny.bert(num_labels=4), batch_size_bound=6, max_grad_norm=1e-2
    )
    guess = LlgStar()(seen, torch.Generator().manual_seed(0), Budget(600))
    assert guess.label_counts == (4, 1, 1, 0)
    assert guess.diagnostics["scale"] < 0.1


def test_without_a_bias_counts_come_from_the_weight_rows() -> None:
    """A decoder's head has no bias; equal halves of two classes are still found."""
    step = tiny.client_step(
        tiny.gpt2_classifier(num_labels=2), tiny.gpt2_tokenizer(), TEXTS[:2] * 4, [0, 1] * 4, batch_size_bound=8
    )
    assert _star(step.observe()) == (4, 4)


@pytest.mark.parametrize("label", range(4))
def test_without_bias_or_model_one_label_is_read_along_the_update_s_own_direction(label: int) -> None:
    """Row sums of a fresh LayerNorm are zero, but one class has the other sign."""
    step = tiny.client_step(
        tiny.gpt2_classifier(4), tiny.gpt2_tokenizer(), ["a bird near the river"], [label], batch_size_bound=1
    )
    guess = Llg()(step.observe(), torch.Generator(), Budget(600))
    assert guess.label_counts == tuple(int(c == label) for c in range(4))
    assert guess.diagnostics["from_bias"] == 0.0


def test_a_head_behind_tanh_is_said_to_break_property_1() -> None:
    """BERT's pooler gives negative features; the bias is read all the same."""
    seen = tiny.observe(TEXTS, [0, 0, 1, 2, 2, 2], model=tiny.bert(num_labels=5), batch_size_bound=6)
    assert LlgStar()(seen, torch.Generator().manual_seed(0), Budget(600)).diagnostics["property_1"] == 0.0


def test_algorithm_1_by_hand() -> None:
    """Two negatives count once each; the smallest calibrated gradient gets the rest."""
    # Shares p - g = 0.75, 0.25, 0, 0 of B = 4 with p = 1/4: worked out on paper.
    gradient = torch.tensor([-0.5, 0.0, 0.25, 0.25])
    assert extract_labels(gradient, 4, -0.25, torch.full((4,), 0.25)) == (3, 1, 0, 0)


def test_algorithm_1_never_names_more_labels_than_there_are_sequences() -> None:
    """Under noise more classes can be negative than there are sequences."""
    assert extract_labels(torch.tensor([-0.1, -0.3, -0.2]), 2, -0.5, torch.zeros(3)) == (0, 1, 1)


def test_the_impact_of_plain_llg_is_equation_18() -> None:
    """(sum of negatives) / B * (1 + 1/n) with n = 4 classes."""
    assert average_impact(torch.tensor([-0.5, -0.3, 0.4, 0.4]), 2) == pytest.approx(-0.4 * 1.25)


def test_clipping_factor_is_the_tightest_that_leaves_no_negative_share() -> None:
    """p - g/k >= 0 for all classes: k = max g / p."""
    assert clipping_factor(torch.tensor([-0.2, 0.1, 0.1]), torch.tensor([0.2, 0.4, 0.4])) == pytest.approx(0.25)
    assert clipping_factor(torch.zeros(2), torch.tensor([0.5, 0.5])) == 1.0


def test_smallest_batch_falls_back_on_the_best_fit() -> None:
    """Shares that no batch up to 64 makes whole still give a guess."""
    assert smallest_batch(torch.tensor([0.5, 0.5])) == 2
    assert 1 <= smallest_batch(torch.tensor([0.4142, 0.2718, 0.314])) <= 64


def test_rounding_keeps_the_total_and_stays_nearest() -> None:
    """Against all whole vectors with the same sum, tried one by one."""
    shares = torch.tensor([0.31, 0.44, 0.25], dtype=torch.float64)
    best = min(
        ((a, b, 7 - a - b) for a in range(8) for b in range(8 - a)),
        key=lambda n: float((torch.tensor(n) - 7 * shares).square().sum()),
    )
    assert whole_counts(shares, 7) == best
    assert sum(whole_counts(torch.tensor([0.9, 0.9, -0.3]), 5)) == 5


def test_the_simplex_is_reached_by_the_shortest_way() -> None:
    """No point of a fine grid on the simplex is nearer."""
    wish = torch.tensor([0.9, 0.4, -0.2], dtype=torch.float64)
    found = on_the_simplex(wish)
    grid = torch.tensor([(a, b, 100 - a - b) for a in range(101) for b in range(101 - a)], dtype=torch.float64) / 100
    assert float((found - wish).norm()) <= float((grid - wish).norm(dim=1).min()) + 1e-9
    assert float(found.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_shares_solve_the_system_that_made_the_gradient(smoothing: float) -> None:
    """With P and shares chosen at will, d = x P - (1 - e) x - e / C gives x back."""
    rng = torch.Generator().manual_seed(0)
    predicted = torch.rand(4, 4, generator=rng, dtype=torch.float64).softmax(dim=1)
    shares = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    gradient = shares @ predicted - (1 - smoothing) * shares - smoothing / 4
    assert torch.allclose(solve_shares(predicted, gradient, HeadLoss(smoothing=smoothing)), shares)


def test_it_does_not_apply_to_a_frozen_head_nor_to_a_bias_that_is_not_there() -> None:
    """The reason names the parameter."""
    seen = tiny.observe(["a dog"], frozen=frozenset({"classifier.weight", "classifier.bias"}))
    verdict = Llg().applies(seen)
    assert not verdict and "classifier.weight" in verdict.reason
    decoder = tiny.client_step(tiny.gpt2_classifier(), tiny.gpt2_tokenizer(), ["a dog"]).observe()
    verdict = Llg(read="bias").applies(decoder)
    assert not verdict and "has no bias" in verdict.reason


def _auxiliary(path: Path, model: Any, labels: list[int]) -> Path:
    texts = [TEXTS[label % len(TEXTS)] for label in labels]
    batch = make_batch(tiny.bert_tokenizer(), texts, labels, "classification", tiny.POSITIONS)
    inputs = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
    save_auxiliary(path, inputs, batch.inputs["labels"])
    return path


def test_with_auxiliary_data_counts_are_exact_where_the_model_knows_the_classes(tmp_path: Path) -> None:
    """Each class has its own text and the head is trained: one offset is not enough."""
    model: Any = tiny.bert(num_labels=3, initializer_range=0.5)
    attack = LlgPlus(auxiliary=_auxiliary(tmp_path / "a.safetensors", model, [0, 1, 2]))
    labels = [0, 0, 0, 1, 1, 2]
    seen = tiny.observe([TEXTS[label] for label in labels], labels, model=model, batch_size_bound=6)
    before = seen.digest()
    assert attack.applies(seen) and attack.grants == ("auxiliary",)
    assert _counts(attack, seen) == _counts(attack, seen) == (3, 2, 1)
    assert seen.digest() == before and not any(module._forward_pre_hooks for module in model.modules())
    assert _star(seen) != (3, 2, 1)


def test_row_sums_with_auxiliary_data_are_the_paper_s_llg_plus(tmp_path: Path) -> None:
    """Behind tanh the row sums are a biased coin, but with a count they still add up."""
    model = tiny.bert(num_labels=3)
    path = _auxiliary(tmp_path / "a.safetensors", model, [0, 1, 2])
    seen = tiny.observe(TEXTS, [0, 0, 0, 1, 1, 2], model=model, batch_size_bound=6)
    assert sum(_counts(LlgPlus(auxiliary=path, read="rows"), seen)) == 6


def test_auxiliary_data_are_checked_before_they_are_used(tmp_path: Path) -> None:
    """None, none there, another file, and labels that the model has no class for."""
    seen = tiny.observe(["a dog"], model=tiny.bert(num_labels=2))
    (tmp_path / "text").write_text("no tensors")
    wrong = _auxiliary(tmp_path / "wrong", None, [0, 5])
    reasons = {
        None: "no auxiliary data was granted",
        tmp_path / "missing": "no such file",
        tmp_path / "text": "not readable as auxiliary data",
        wrong: "labels have to be classes from 0 to 1",
    }
    for path, reason in reasons.items():
        verdict = LlgPlus(auxiliary=path).applies(seen)
        assert not verdict and reason in verdict.reason
    save_auxiliary(tmp_path / "odd", {"input_ids": torch.zeros(3, 4)}, torch.zeros(2))
    with pytest.raises(
        DataError, match=r"`labels` is a float32 tensor of shape \(2,\); classes are \(N,\) whole numbers"
    ):
        load_auxiliary(tmp_path / "odd")
    save_auxiliary(tmp_path / "odd", {"input_ids": torch.zeros(3, 4)}, torch.zeros(2, dtype=torch.long))
    with pytest.raises(DataError, match="one label each; found 2 labels"):
        load_auxiliary(tmp_path / "odd")


def test_random_labels_know_the_number_of_sequences_and_nothing_else() -> None:
    """The guess depends only on size and seed; over seeds all classes are equal."""
    one, two = (tiny.observe(TEXTS, labels, model=tiny.bert(3), batch_size_bound=6) for labels in ([0] * 6, [1] * 6))
    guesses = [
        RandomLabels()(seen, torch.Generator().manual_seed(seed), Budget(1)).label_counts
        for seed in range(200)
        for seen in (one, two)
    ]
    assert guesses[::2] == guesses[1::2]
    totals = torch.tensor(guesses[::2]).sum(dim=0)
    assert int(totals.sum()) == 1200
    assert torch.all((totals - 400).abs() < 4 * (1200 * 2 / 9) ** 0.5)  # four standard deviations of a fair draw
