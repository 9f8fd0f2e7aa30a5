"""Counts of target tokens from a head."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakaudit.algorithms.bag.target_counts import constant_direction, target_counts
from leakaudit.algorithms.bag.word_bag import word_bag
from leakaudit.algorithms.film.bag import read_bag
from leakaudit.client.facts import PublicFacts
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.models.vocabulary import Vocabulary
from tests.support import tiny

SIZE, POSITIONS = 600, 24
TEXTS = [[5, 77, 301, 77, 8, 77], [99, 5, 410, 301], [250, 599, 31, 12]]
TARGETS = Counter(token for text in TEXTS for token in text[1:])


def _step(*, tied: bool = False, bias: float = 0.3, head_bias: bool = False) -> ClientStep:
    """Return a step of a GPT-2 whose last normalisation has a bias."""
    config = tiny.gpt2_config(tie_word_embeddings=tied)
    config.update({"vocab_size": SIZE, "n_positions": POSITIONS})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = tiny.hf.GPT2LMHeadModel(config).eval()
        last = model.get_submodule("transformer.ln_f")
        nn.init.uniform_(last.weight, 0.5, 2.0)  # type: ignore[arg-type]  # a parameter
        nn.init.constant_(last.bias, bias)  # type: ignore[arg-type]  # a parameter
        if head_bias:
            model.get_submodule("lm_head").bias = nn.Parameter(torch.zeros(SIZE))
    longest = max(map(len, TEXTS))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in TEXTS])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in TEXTS])
    labels = ids.masked_fill(mask == 0, -100)
    batch = MicroBatch(inputs={"input_ids": ids, "attention_mask": mask, "labels": labels})
    facts = PublicFacts(
        task="causal-lm",
        training_mode=False,
        shared=tuple(name for name, _ in model.named_parameters()),
        tied=(("transformer.wte.weight", "lm_head.weight"),) if tied else (),
        vocabulary=Vocabulary(size=SIZE, special={"pad": 0}, max_length=POSITIONS),
    )
    return ClientStep(model, Truth((batch,)), StepRecipe(training=False), facts)


def test_an_untied_head_after_a_layer_norm_tells_every_count() -> None:
    """The number of targets follows, too."""
    found = target_counts(_step().observe())
    assert found is not None and bool(found.known.all())
    assert {token: count for token, count in enumerate(found.counts.tolist()) if count} == TARGETS
    assert found.total == TARGETS.total()


def test_the_bias_of_a_tied_head_tells_every_count() -> None:
    """Its gradient is the statistic itself."""
    found = target_counts(_step(tied=True, bias=0.0, head_bias=True).observe())
    assert found is not None
    assert {token: count for token, count in enumerate(found.counts.tolist()) if count} == TARGETS


def test_counts_show_in_a_clipped_update() -> None:
    """Its factor is not 1 / N, and the counts are integers all the same."""
    seen = _step().observe()
    facts = seen.facts.model_copy(update={"max_grad_norm": 1.0})
    clipped = replace(seen, facts=facts, update={name: 0.37 * each for name, each in seen.update.items()})
    found = target_counts(clipped)
    assert found is not None
    assert {token: count for token, count in enumerate(found.counts.tolist()) if count} == TARGETS
    assert found.total == TARGETS.total()


def test_a_scaled_update_without_clipping_tells_no_count() -> None:
    """The unit contradicts the number of targets."""
    seen = _step().observe()
    assert target_counts(replace(seen, update={name: 0.37 * each for name, each in seen.update.items()})) is None


def test_the_bag_holds_the_counts() -> None:
    """Tokens that only begin texts are in it and are predicted no time."""
    bag = word_bag(_step().observe())
    assert bag.targets == TARGETS.total()
    assert bag.counts == {token: TARGETS[token] for text in TEXTS for token in text}


def test_film_lets_a_word_come_as_often_as_it_is_predicted() -> None:
    """Any token may begin a text here, which is one time more."""
    bag = read_bag(_step().observe())
    assert bag.counts == {token: max(1, TARGETS[token] + 1) for text in TEXTS for token in text}


def test_a_normalisation_without_bias_tells_no_count() -> None:
    """Then w . h is 0 at every position."""
    assert target_counts(_step(bias=0.0).observe()) is None


def test_a_tied_head_tells_no_count() -> None:
    """The gradients of inputs are in the same rows."""
    assert target_counts(_step(tied=True).observe()) is None


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_direction_is_found_for_gains_that_are_added_to_one(shift: float) -> None:
    """A LayerNorm's features have one product with 1 / gain."""
    generator = torch.Generator().manual_seed(0)
    gain = torch.rand(16, generator=generator, dtype=torch.float64) + 0.5
    normal = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    features = gain * (normal - normal.mean(dim=1, keepdim=True)) + 0.2
    model = nn.LayerNorm(16)
    model.weight = nn.Parameter(gain - shift)
    direction = constant_direction(model, features)
    assert direction is not None
    torch.testing.assert_close(features @ direction, torch.ones(40, dtype=torch.float64))
