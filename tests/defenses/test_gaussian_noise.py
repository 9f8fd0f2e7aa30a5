"""`gaussian-noise` adds noise of a stated size and says so."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from leakaudit.audit.verification import verify
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.results.schema import VerificationStatus
from tests.support import tiny


def _flat(update: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in update.values()])


def test_the_noise_is_as_large_as_declared_and_relative_to_the_update() -> None:
    """Standard deviation = scale x RMS of all entries, within sampling error."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["the dog saw a cat"], [1])
    seen = step.observe()
    noisy = GaussianNoise(scale=0.5)(step, seen, torch.Generator().manual_seed(0))
    noise = _flat(noisy.update) - _flat(seen.update)
    rms = float(_flat(seen.update).square().mean().sqrt())
    (declared,) = noisy.facts.defenses
    assert declared.parameters == {"scale": 0.5, "sigma": pytest.approx(0.5 * rms, rel=1e-5)}
    assert float(noise.std()) == pytest.approx(0.5 * rms, rel=0.02)
    assert abs(float(noise.mean())) < 0.02 * rms


def test_a_noised_step_is_verified_as_such() -> None:
    """The stamp recognises the declared sigma."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["the dog saw a cat"], [1])
    noisy = GaussianNoise(scale=1.0)(step, step.observe(), torch.Generator().manual_seed(0))
    declared = tiny.client_step(
        step.model, tiny.bert_tokenizer(), ["the dog saw a cat"], [1], defenses=noisy.facts.defenses
    )
    assert verify(declared, noisy.update).status is VerificationStatus.NOISED


def test_the_same_seed_gives_the_same_noise() -> None:
    """Noise comes from the generator that is handed in."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["a dog"], [1])
    one, two, other = (GaussianNoise()(step, step.observe(), torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert one.digest() == two.digest() != other.digest()


def test_negative_noise_is_refused() -> None:
    """The message names the value."""
    with pytest.raises(ValueError, match="scale must be 0 or more, got -1"):
        GaussianNoise(scale=-1)
