"""`target-tokens` names what a language model was trained to predict."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from leakaudit.attacks.target_tokens import TargetTokens
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import Observation
from leakaudit.plugins.budget import Budget
from tests.support import tiny

TEXTS = ["a dog chased the old cat near the river", "never saw three big horse", "one bird ate fish and two cat"]


def _model(tied: bool, steps: int) -> Any:
    """Return a GPT-2 of the tests, trained for some steps on random words."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny.hf.GPT2LMHeadModel(tiny.gpt2_config(tie_word_embeddings=tied))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        words, draw = tiny.TEXT_WORDS.split(), random.Random(1)
        for _ in range(steps):
            texts = [" ".join(draw.choices(words, k=8)) for _ in range(8)]
            ids = tiny.gpt2_tokenizer()(texts, return_tensors="pt")["input_ids"]
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    model.zero_grad(set_to_none=True)
    return model.eval()


def _words(model: Any, texts: list[str]) -> tuple[Observation, set[int], set[int]]:
    """Return the observation, the target tokens and all tokens of the batch."""
    step = tiny.client_step(model, tiny.gpt2_tokenizer(), texts, task="causal-lm")
    sequences = step.truth.sequences()
    around = step.facts.vocabulary.wordless_ids
    targets = {token for ids in sequences for token in ids[1:]} - around
    return step.observe(), targets, {token for ids in sequences for token in ids} - around


@pytest.mark.parametrize("steps", [0, 60])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("texts", [1, 3])
def test_every_target_is_named_and_nothing_that_is_not_in_the_batch(tied: bool, steps: int, texts: int) -> None:
    """Untrained and trained, with an untied and with a tied head."""
    seen, targets, everything = _words(_model(tied, steps), TEXTS[:texts])
    assert TargetTokens().applies(seen)
    found = set(TargetTokens()(seen, torch.Generator().manual_seed(0), Budget(600)).tokens or ())
    assert targets <= found <= everything
    if not tied:
        assert found == targets


def test_declared_noise_raises_the_bar() -> None:
    """Few wrong tokens are named, where half of all rows point backwards by chance."""
    seen, targets, everything = _words(_model(False, 60), TEXTS)
    sigma = 0.02
    rng = torch.Generator().manual_seed(0)
    noisy = {name: g + sigma * torch.randn(g.shape, generator=rng) for name, g in seen.update.items()}
    declared = seen.under(DeclaredDefense(name="gaussian-noise", parameters={"sigma": sigma}), noisy)
    found = set(TargetTokens()(declared, torch.Generator().manual_seed(0), Budget(600)).tokens or ())
    assert found <= everything and len(found & targets) > 0.8 * len(targets)


@pytest.mark.parametrize("tied", [True, False])
def test_private_sgd_raises_the_bar_as_well(tied: bool) -> None:
    """Noise of 3,000 times the update: no token is named."""
    seen, _, _ = _words(_model(tied, 0), TEXTS)
    rng = torch.Generator().manual_seed(0)
    sigma = 3000 * max(float(g.abs().max()) for g in seen.update.values())
    noisy = {name: g + sigma * torch.randn(g.shape, generator=rng) for name, g in seen.update.items()}
    knobs: dict[str, float | int | str | bool] = {
        "noise_multiplier": 2.0,
        "max_grad_norm": 2.0 * sigma,
        "expected_batch_size": 4.0,
    }
    declared = seen.under(DeclaredDefense(name="dp-sgd", parameters=knobs), noisy)
    assert TargetTokens()(declared, torch.Generator().manual_seed(0), Budget(600)).tokens == ()


def test_undeclared_noise_shows_in_the_column_sums_of_an_untied_head() -> None:
    """Softmax gradients sum to 0 over the vocabulary; the rest is noise."""
    seen, targets, everything = _words(_model(False, 60), TEXTS)
    rng = torch.Generator().manual_seed(0)
    noisy = {name: g + 0.02 * torch.randn(g.shape, generator=rng) for name, g in seen.update.items()}
    guess = TargetTokens()(replace(seen, update=noisy), torch.Generator().manual_seed(0), Budget(600))
    assert set(guess.tokens or ()) <= everything and len(set(guess.tokens or ()) & targets) > 0.8 * len(targets)


def test_the_reason_says_where_it_does_not_apply() -> None:
    """A classifier predicts no tokens; a frozen head sends nothing."""
    verdict = TargetTokens().applies(tiny.observe(["a dog"]))
    assert not verdict and "this task is classification" in verdict.reason
    step = tiny.client_step(
        _model(False, 0), tiny.gpt2_tokenizer(), TEXTS, task="causal-lm", frozen=frozenset({"lm_head.weight"})
    )
    verdict = TargetTokens().applies(step.observe())
    assert not verdict and "'lm_head.weight' is frozen" in verdict.reason
