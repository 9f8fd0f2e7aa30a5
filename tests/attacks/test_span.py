"""The whole `span` attack on small random models; nothing is granted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from leakaudit.algorithms.resimulation import prove
from leakaudit.attacks.span import Span
from leakaudit.client.batches import make_batch, public_facts, with_random_state
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction
from leakaudit.plugins.budget import Budget
from tests.support import tiny

TEXTS = (
    "the old dog chased a small cat near the river .",
    "never saw three big horse under blue tree",
    "fish and bird ate",
)


def _step(model: Any, texts: Sequence[str], *, training: bool = False, frozen: str = "", **recipe: Any) -> ClientStep:
    tokenizer = tiny.bert_tokenizer()
    labels = [i % 3 for i in range(1, len(texts) + 1)]
    batch = make_batch(tokenizer, list(texts), labels, "classification", tiny.POSITIONS)
    if training:
        batch = with_random_state(batch, 3)
    names = frozenset(name for name, _ in model.named_parameters() if frozen and frozen in name)
    facts = public_facts(model, tokenizer, task="classification", training=training, frozen=names)
    return ClientStep(model, Truth((batch,)), StepRecipe(training=training, **recipe), facts)


def _attack(seen: Observation, seconds: float = 60.0) -> Reconstruction:
    return Span()(seen, torch.Generator().manual_seed(0), Budget(seconds))


def _recovered(guess: Reconstruction) -> set[tuple[int, ...]]:
    return {sequence.token_ids for sequence in guess.sequences or ()}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_encoders_batch_comes_back_with_labels_and_a_proof(count: int) -> None:
    """Dropout off, embeddings frozen: every sentence and label is proved."""
    step = _step(tiny.wide_bert(), TEXTS[:count], frozen="embeddings")
    guess = _attack(step.observe())
    assert _recovered(guess) == set(step.truth.sequences())
    assert all(sequence.proved for sequence in guess.sequences or ())
    assert guess.label_counts == tuple((step.truth.labels() or []).count(c) for c in range(3))


def test_a_clipped_update_is_as_good_as_the_whole_one() -> None:
    """Clipping scales everything alike, and the proof looks at directions."""
    step = _step(tiny.wide_bert(), TEXTS[:1], frozen="embeddings", max_grad_norm=0.01)
    guess = _attack(step.observe())
    assert _recovered(guess) == set(step.truth.sequences())
    assert guess.sequences is not None and guess.sequences[0].proved and guess.label_counts == (0, 1, 0)


@pytest.mark.parametrize("count", [1, 2])
def test_sentences_are_found_with_dropout_on_and_everything_trained(count: int) -> None:
    """Masks of later layers are unknown, so nothing is claimed to be proved."""
    step = _step(tiny.wide_bert(dropout=0.1), TEXTS[1 : 1 + count], training=True)
    guess = _attack(step.observe())
    assert _recovered(guess) == set(step.truth.sequences())
    assert not any(sequence.proved for sequence in guess.sequences or ())


def test_a_gpt2_classifiers_sentence_comes_back() -> None:
    """A causal model with learned positions and one transposed, fused projection."""
    tokenizer = tiny.gpt2_tokenizer()
    model = tiny.gpt2_classifier()
    batch = make_batch(tokenizer, ["the old dog chased a cat"], [1], "classification", tiny.POSITIONS)
    facts = public_facts(model, tokenizer, task="classification", training=False)
    step = ClientStep(model, Truth((batch,)), StepRecipe(training=False), facts)
    assert _recovered(_attack(step.observe())) == set(step.truth.sequences())


def test_noise_is_ranked_and_not_believed() -> None:
    """Far above the signal: no proof and a low score."""
    seen = _step(tiny.wide_bert(), TEXTS[:1], frozen="embeddings").observe()
    generator = torch.Generator().manual_seed(1)
    noisy = {name: g + 10 * g.std() * torch.randn(g.shape, generator=generator) for name, g in seen.update.items()}
    guess = _attack(replace(seen, update=noisy))
    assert all(not s.proved and s.own_score < 0.9 for s in guess.sequences or ())


def test_a_spent_budget_still_gives_a_guess() -> None:
    """The best so far, marked as stopped by the budget."""
    ticks = iter(float(i) for i in range(100_000))
    seen = _step(tiny.wide_bert(), TEXTS, frozen="embeddings").observe()
    guess = Span()(seen, torch.Generator().manual_seed(0), Budget(3.0, clock=lambda: next(ticks)))
    assert guess.stop == "budget"


def test_frozen_attention_is_not_applicable_and_named() -> None:
    """The reason names the layers that were looked for."""
    seen = _step(tiny.wide_bert(), TEXTS[:1], frozen="attention.self").observe()
    reason = Span().applies(seen).reason
    assert "query.weight" in reason and "frozen or withheld" in reason


def test_an_all_zero_update_is_not_applicable() -> None:
    """Nothing changed, so there is nothing to read."""
    seen = _step(tiny.wide_bert(), TEXTS[:1]).observe()
    empty = replace(seen, update={name: torch.zeros_like(g) for name, g in seen.update.items()})
    assert "is all zero" in Span().applies(empty).reason


def test_as_many_tokens_as_the_hidden_size_are_not_applicable_with_the_numbers() -> None:
    """Forty-odd tokens of different words in 32 dimensions: the span is everything."""
    texts = ["the old dog chased a small cat near the river .", "never saw three big horse under blue tree today"]
    texts += ["fish and bird ate one red house always ?", "two four five found liked new road or on at"]
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), texts, [0, 1, 0, 1])
    found = Span().applies(step.observe())
    assert not found and "hidden size 32" in found.reason


def test_one_wrong_word_is_not_proved() -> None:
    """The true sentence is proved; with one token changed no labels are claimed."""
    step = _step(tiny.wide_bert(), TEXTS[:1], frozen="embeddings")
    seen = step.observe()
    (truth,) = step.truth.sequences()
    wrong = (*truth[:3], truth[3] + 1, *truth[4:])
    assert prove(seen, [GuessedSequence(truth)], Budget(600)).sequences[0].proved
    rejected = prove(seen, [GuessedSequence(wrong)], Budget(600))
    assert not rejected.sequences[0].proved and rejected.label_counts is None


def test_the_model_is_left_as_it_was() -> None:
    """Weights, gradients and training flags."""
    step = _step(tiny.wide_bert(), TEXTS[:2])
    seen = step.observe()
    before = {name: p.detach().clone() for name, p in seen.model.named_parameters()}
    _attack(seen)
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in seen.model.named_parameters())
    assert not seen.model.training
