"""`embedding-rows` names the words of a batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from leakaudit.algorithms.gradient_estimate import as_gradient
from leakaudit.attacks.embedding_rows import EmbeddingRows
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import Observation
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.plugins.budget import Budget
from tests.support import tiny
from tests.support.optimizer_steps import difference_step


def _tokens(seen: Observation) -> set[int]:
    return set(EmbeddingRows()(seen, torch.Generator(), Budget(600)).tokens or ())


def test_exactly_the_words_of_the_batch_are_named() -> None:
    """Special and padding tokens are left out, repeated words are named once."""
    seen = tiny.observe(["the dog saw the dog", "a bird"], [0, 1])
    assert _tokens(seen) == {tiny.VOCABULARY[word] for word in ("the", "dog", "saw", "a", "bird")}


def test_a_row_sticking_out_of_declared_noise_is_named() -> None:
    """At one false row in a thousand tables, no row of noise alone is named."""
    generator = torch.Generator().manual_seed(0)
    seen = tiny.observe(["a dog"])
    table = torch.randn(len(tiny.VOCABULARY), tiny.HIDDEN, generator=generator)
    table[[9, 11]] *= 4
    noise = DeclaredDefense(name="gaussian-noise", parameters={"scale": 1.0, "sigma": 1.0})
    noisy = seen.under(noise, {**seen.update, tiny.word_table(seen.model): table})
    assert EmbeddingRows(false_rows=1e-3)(noisy, torch.Generator(), Budget(600)).tokens == (9, 11)


def test_noise_far_below_the_signal_hides_nothing() -> None:
    """The declared defence changes the rule from non-zero to outlying."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["the dog saw a bird"], [1])
    noisy = GaussianNoise(scale=1e-4)(step, step.observe(), torch.Generator().manual_seed(0))
    assert _tokens(noisy) >= {tiny.VOCABULARY[word] for word in ("the", "dog", "saw", "a", "bird")}


def test_a_frozen_table_is_not_applicable() -> None:
    """The reason names the table."""
    seen = tiny.observe(["a dog"], frozen=frozenset({"bert.embeddings.word_embeddings.weight"}))
    verdict = EmbeddingRows().applies(seen)
    assert not verdict and "word_embeddings" in verdict.reason


def test_a_tied_table_is_not_applicable() -> None:
    """A language model's softmax touches every row."""
    seen = tiny.client_step(tiny.gpt2_lm(), tiny.gpt2_tokenizer(), ["a dog"], task="causal-lm").observe()
    verdict = EmbeddingRows().applies(seen)
    assert not verdict and "tied to an output head" in verdict.reason


def test_false_rows_must_be_above_zero() -> None:
    """There is no quantile for zero false rows."""
    with pytest.raises(ValueError, match="false_rows must be above 0"):
        dataclasses.replace(EmbeddingRows(), false_rows=0.0)


WORDS = {"the", "dog", "saw", "a", "bird"}


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("name", ["momentum", "nesterov", "Adam", "AdamW", "Adafactor"])
def test_the_words_of_all_local_steps_are_named(name: str, steps: int) -> None:
    """Weight decay moves every row, and is taken out."""
    batches = [["the dog saw"], ["a bird"], ["the bird"], ["a dog"], ["saw a bird"]][-steps:]
    seen = difference_step(name, batches).observe()
    said = {word for texts in batches for text in texts for word in text.split()}
    assert _tokens(seen) == {tiny.VOCABULARY[word] for word in said}


@pytest.mark.parametrize("steps", [1, 5])
def test_decay_that_is_added_to_the_gradient_of_adam_is_taken_out(steps: int) -> None:
    """It moves every row by nearly a whole step."""
    step = difference_step("Adam", [["the dog saw a bird"]] * steps)
    group = step.facts.optimizer.groups[0]  # type: ignore[union-attr]
    group = group.model_copy(update={"options": {**group.options, "weight_decay": 0.01}})
    facts = step.facts.model_copy(update={"optimizer": step.facts.optimizer.model_copy(update={"groups": (group,)})})  # type: ignore[union-attr]
    seen = dataclasses.replace(step, facts=facts).observe()
    moved = (seen.update[tiny.word_table(seen.model)] != 0).any(dim=1)
    assert bool(moved[1:].all())  # the row of padding is zero and stays so
    assert _tokens(seen) == {tiny.VOCABULARY[word] for word in WORDS}


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_kept_moments_name_the_words_of_earlier_rounds_as_well(name: str) -> None:
    """The diagnostics say so."""
    seen = difference_step(name, [["the dog"]], kept=["saw a bird"]).observe()
    guess = EmbeddingRows()(seen, torch.Generator(), Budget(600))
    assert set(guess.tokens or ()) == {tiny.VOCABULARY[word] for word in WORDS}
    assert guess.diagnostics["earlier_rounds"] == 1.0


def test_kept_moments_with_decay_in_the_gradient_are_not_applicable() -> None:
    """Every row moves, and nobody knows by how much."""
    seen = difference_step("nesterov", [["the dog"]], kept=["saw a bird"]).observe()
    verdict = EmbeddingRows().applies(seen)
    assert not verdict and "every row moves" in verdict.reason


def test_rows_of_an_estimated_gradient_are_those_that_the_client_moved() -> None:
    """The inverse of a step of Adam turns rounding into small gradients."""
    seen, _ = as_gradient(difference_step("AdamW", [["the dog saw a bird"]]).observe())
    assert _tokens(seen) == {tiny.VOCABULARY[word] for word in WORDS}
