"""`idlg` names the label of one sequence."""

from __future__ import annotations

import pytest
import torch

from leakaudit.attacks.idlg import Idlg
from leakaudit.client.observation import Observation
from leakaudit.plugins.budget import Budget
from tests.support import tiny


def _label(seen: Observation) -> int:
    counts = Idlg()(seen, torch.Generator().manual_seed(0), Budget(600)).label_counts
    assert counts is not None and sum(counts) == 1
    return counts.index(1)


@pytest.mark.parametrize("label", range(5))
def test_a_bias_gives_every_label_away(label: int) -> None:
    """With a bias the answer is exact, whatever the features are."""
    assert _label(tiny.observe(["a dog chased the cat"], [label], model=tiny.bert(num_labels=5))) == label


@pytest.mark.parametrize("seed", range(4))
def test_three_classes_without_a_bias_are_told_apart_by_row_length(seed: int) -> None:
    """The label's row of the weight update is as long as all others together."""
    step = tiny.client_step(tiny.gpt2_classifier(3, seed), tiny.gpt2_tokenizer(), ["a bird near the river"], [seed % 3])
    assert _label(step.observe()) == seed % 3


def test_clipping_does_not_matter() -> None:
    """Only the sign is read."""
    assert _label(tiny.observe(["a dog"], [1], max_grad_norm=1e-3)) == 1


def test_larger_batches_show_in_the_number_of_negative_classes() -> None:
    """One sequence has one negative class; the attack reports how many there are."""
    seen = tiny.observe(["a dog", "a cat"], [0, 3], model=tiny.bert(num_labels=5))
    assert Idlg()(seen, torch.Generator(), Budget(600)).diagnostics["negative_classes"] == 2


def test_it_does_not_apply_to_language_models() -> None:
    """The reason names the task."""
    seen = tiny.client_step(tiny.gpt2_lm(), tiny.gpt2_tokenizer(), ["a dog"], task="causal-lm").observe()
    verdict = Idlg().applies(seen)
    assert not verdict and "this task is causal-lm" in verdict.reason
