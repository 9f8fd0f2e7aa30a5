"""Scores of a canary gradient with the noise of a step redrawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from leakaudit.audit.canary_scores import canary_scores, gaussian_release
from leakaudit.defenses.dp_sgd import DpSgd
from tests.support import tiny


def updates(length: float, size: int = 50) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return two updates whose difference has a length."""
    base = {"a": torch.randn(size, generator=tiny.generator(1)), "b": torch.randn(3, generator=tiny.generator(2))}
    step = torch.randn(size, generator=tiny.generator(3))
    return {**base, "a": base["a"] + length * step / step.norm()}, base


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0, 3.0])
def test_the_scores_of_a_gaussian_have_its_mu(mu: float) -> None:
    """Means and spread by their closed form, and a bound just below mu."""
    sigma = 0.7
    scores = canary_scores(*updates(mu * sigma), gaussian_release(sigma), tiny.generator(), draws=1500)
    seen, unseen = torch.tensor(scores.with_record), torch.tensor(scores.without_record)
    assert scores.length == pytest.approx(mu * sigma, rel=1e-5)
    assert float(seen.mean()) == pytest.approx(mu * sigma, abs=0.08)
    assert float(unseen.mean()) == pytest.approx(0.0, abs=0.08)
    assert float(unseen.std()) == pytest.approx(sigma, rel=0.08)
    assert mu - 0.4 < scores.mu() <= mu


def test_the_bound_exceeds_mu_rarely() -> None:
    """Sixty audits at 95 %: more than nine wrong ones have a probability of 0.1 %."""
    found = [
        canary_scores(*updates(0.7, 5), gaussian_release(0.7), tiny.generator(seed), draws=100).mu()
        for seed in range(60)
    ]
    assert sum(one > 1.0 for one in found) <= 9


def test_forgotten_noise_contradicts_its_claim() -> None:
    """A mechanism that claims mu = 1 and adds nothing."""
    scores = canary_scores(*updates(0.7), gaussian_release(0.0), tiny.generator(), draws=100)
    assert scores.mu() > 3


def test_a_step_of_dp_sgd_keeps_its_claim() -> None:
    """A text of a real step is the canary; its clipped gradient is at most the bound."""
    defense = DpSgd(noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=2)
    texts, labels = ["the dog saw a cat", "a bird ate the old fish"], [0, 1]
    both = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), texts, labels)
    one = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), texts[:1], labels[:1])
    clean = [
        replace(defense, noise_multiplier=0.0)(step, step.observe(), tiny.generator()).update for step in (both, one)
    ]
    sigma = defense.added_noise(both, clean[0])
    scores = canary_scores(clean[0], clean[1], gaussian_release(sigma), tiny.generator(), draws=300)
    assert scores.length <= 0.5 / 2 * (1 + 1e-4)  # C / L
    assert 0.3 < scores.mu() <= 1.0


def test_updates_that_cannot_be_told_apart_are_refused() -> None:
    """Another set of parameters, or no canary in it."""
    one, base = updates(1.0)
    with pytest.raises(ValueError, match="are the same"):
        canary_scores(base, base, gaussian_release(1.0), tiny.generator())
    with pytest.raises(ValueError, match="different parameters"):
        canary_scores({"a": one["a"]}, base, gaussian_release(1.0), tiny.generator())
