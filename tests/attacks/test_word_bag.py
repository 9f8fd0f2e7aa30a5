"""The bag of words of every kind of client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from leakaudit.algorithms.above_noise import standing_out
from leakaudit.algorithms.bag.noisy_head import target_surprise
from leakaudit.algorithms.bag.pruned_head import left_over
from leakaudit.algorithms.bag.softmax_background import unlike_the_softmax
from leakaudit.algorithms.bag.word_bag import can_read_bag, exponential_cut, word_bag
from leakaudit.client.facts import PublicFacts
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.defenses.dp_sgd import DpSgd
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.defenses.prune import Prune
from leakaudit.models.vocabulary import Vocabulary
from tests.support import tiny

SIZE, POSITIONS = 600, 24
TEXTS = [[5, 77, 301, 77, 8], [99, 5, 410], [250, 599, 31, 12]]
WORDS = {token for text in TEXTS for token in text}


def _step(*, tied: bool, seed: int = 0) -> ClientStep:
    """Return a step of a GPT-2 of 600 tokens and D = 32 on three texts of ids."""
    config = tiny.gpt2_config(tie_word_embeddings=tied)
    config.update({"vocab_size": SIZE, "n_positions": POSITIONS})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = tiny.hf.GPT2LMHeadModel(config).eval()
    longest = max(map(len, TEXTS))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in TEXTS])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in TEXTS])
    labels = ids.masked_fill(mask == 0, -100)
    batch = MicroBatch(inputs={"input_ids": ids, "attention_mask": mask, "labels": labels})
    names = tuple(name for name, _ in model.named_parameters())
    facts = PublicFacts(
        task="causal-lm",
        training_mode=False,
        shared=names,
        tied=(("transformer.wte.weight", "lm_head.weight"),) if tied else (),
        vocabulary=Vocabulary(size=SIZE, special={"pad": 0}, max_length=POSITIONS),
    )
    return ClientStep(model, Truth((batch,)), StepRecipe(training=False), facts)


def _named(seen: Observation) -> set[int]:
    return set(word_bag(seen).tokens.tolist())


@pytest.mark.parametrize("tied", [True, False])
def test_the_words_of_the_batch_are_named(tied: bool) -> None:
    """In a tied table every row moves, and one may be named by chance.

    In an untied one, last words have no row of their own.
    """
    seen = _step(tied=tied).observe()
    assert bool((seen.update["transformer.wte.weight"] != 0).any(dim=1).all()) == tied
    named = _named(seen)
    assert named >= WORDS
    assert len(named - WORDS) <= int(tied)


def test_the_longest_text_is_read_from_the_positions() -> None:
    """The last token of a text has no gradient at its position."""
    assert word_bag(_step(tied=True).observe()).longest == max(map(len, TEXTS))


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_pruning_adds_no_word(share: float) -> None:
    """What the softmax leaves of frequent words is no word of the batch."""
    step = _step(tied=True)
    found = _named(Prune(share=share)(step, step.observe(), torch.Generator()))
    assert len(found & WORDS) >= 3
    assert len(found - WORDS) <= 1


def test_weak_noise_on_a_tied_table_leaves_words() -> None:
    """They are told from the softmax's share by their sign."""
    step = _step(tied=True)
    seen = GaussianNoise(scale=0.3)(step, step.observe(), torch.Generator().manual_seed(0))
    found = _named(seen)
    assert len(found & WORDS) >= 3
    assert len(found - WORDS) <= 2


def test_dp_sgd_hides_the_words_of_a_tied_table() -> None:
    """FILM's own rule names a hundred tokens there."""
    step = _step(tied=True)
    seen = DpSgd(noise_multiplier=1.0)(step, step.observe(), torch.Generator().manual_seed(0))
    bag = word_bag(seen)
    assert len(bag) <= 1
    assert bag.noise == pytest.approx(seen.noise_sigma)


@pytest.mark.parametrize("laplace", [False, True])
def test_noise_alone_names_a_row_in_one_table_of_a_hundred(laplace: bool) -> None:
    """200 tables of noise; six are three standard deviations above two."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(64, 32, generator=generator, dtype=torch.float64) + 1.0
    probabilities = torch.rand(64, 300, generator=generator).softmax(dim=1)
    tables = 0
    for _ in range(200):
        rows = torch.randn(300, 32, generator=generator)
        if laplace:
            one, two = (torch.empty(300, 32).exponential_(generator=generator) for _ in range(2))
            rows = (one - two) / 2**0.5
        surprise = target_surprise(rows, 1.0, features, probabilities)
        tables += bool(standing_out(surprise, exponential_cut, 1.0).any())
    assert tables <= 6


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "two bits": lambda noise: (noise / noise.abs().max() + torch.rand_like(noise)).floor() * noise.abs().max(),
    "one entry in ten": lambda noise: (
        noise * (noise.abs() > noise.abs().flatten().kthvalue(9 * noise.numel() // 10).values)
    ),
    "signs of one entry in ten": lambda noise: CHANGES["one entry in ten"](noise).sign(),
    "one entry in a hundred": lambda noise: (
        noise * (noise.abs() > noise.abs().flatten().kthvalue(99 * noise.numel() // 100).values)
    ),
}
"""What is done to noise -> noise afterwards."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("laplace", [False, True])
def test_noise_that_was_changed_afterwards_names_no_row_of_a_head(laplace: bool, change: str) -> None:
    """The declared size is 1, as before the change; a few features are large."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(64, 32, generator=generator, dtype=torch.float64) + 1.0
    features[:, :2] *= 10
    probabilities = torch.rand(64, 2000, generator=generator).softmax(dim=1)
    tables = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(12):
            noise = torch.randn(2000, 32)
            if laplace:
                noise = (torch.empty(2000, 32).exponential_() - torch.empty(2000, 32).exponential_()) / 2**0.5
            surprise = target_surprise(CHANGES[change](noise), 1.0, features, probabilities)
            tables += bool(standing_out(surprise, exponential_cut, 1.0).any())
    assert tables <= stats.binom.isf(1e-4, 12, 0.01)


def test_the_energys_bound_is_above_the_exact_tail() -> None:
    """With equal weights the energy is chi-squared."""
    rows = torch.randn(4000, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    features = torch.eye(16, dtype=torch.float64) * 3
    surprise = target_surprise(rows, 1.0, features, torch.full((16, 4000), 1 / 16))
    exact = -torch.as_tensor(stats.chi2.logsf(rows.square().sum(dim=1).numpy(), 16))
    linear = -torch.as_tensor(stats.norm.logsf((-rows.sum(dim=1) / 4).numpy()))
    assert bool((surprise <= torch.maximum(exact, linear) + 1e-9).all())


def test_rows_of_one_kind_do_not_stand_out() -> None:
    """An update without a batch's words gives an empty bag."""
    features = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) + 1.0
    shares = torch.rand(400, 5, generator=torch.Generator().manual_seed(1))
    assert int(unlike_the_softmax(shares @ features, 0.0, 0.1).named.sum()) <= 1


def test_a_long_tail_of_usual_rows_is_not_named() -> None:
    """The tail is measured up to the words, however long it is."""
    generator = torch.Generator().manual_seed(0)
    size = (0.3 * torch.randn(4000, generator=generator) - 12).exp()
    fifth = torch.rand(4000, generator=generator) < 0.2
    size[fifth] *= (2 + torch.empty(4000).exponential_(generator=generator))[fifth].exp()
    size[:40] = 1.0
    usual = torch.randn(16, generator=generator, dtype=torch.float64)
    rows = usual + size[:, None] * torch.randn(4000, 16, generator=generator, dtype=torch.float64)
    named = unlike_the_softmax(rows, 0.0, 1.0).named
    assert bool(named[:40].all())
    assert int(named[40:].sum()) <= 2


def test_a_pruned_untied_model_names_words_by_either_table() -> None:
    """At this share, rows of both tables are gone."""
    step = _step(tied=False)
    seen = Prune(share=0.97)(step, step.observe(), torch.Generator())
    rows = {name: (seen.update[name] != 0).any(dim=1) for name in ("transformer.wte.weight", "lm_head.weight")}
    inputs = {token for token in WORDS if rows["transformer.wte.weight"][token]}
    found = _named(seen)
    assert inputs < found & WORDS
    assert len(found - WORDS) <= 1


def test_a_row_smaller_than_all_others_by_the_mixture_is_named() -> None:
    """It points along its share, as theirs do."""
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(20, 16, generator=generator, dtype=torch.float64) + 1.0
    probabilities = torch.rand(20, 400, generator=generator)
    rows = probabilities.double().T @ features
    rows[7] *= 0.5
    assert left_over(rows, features, probabilities).gt(0).nonzero().flatten().tolist() == [7]


def test_a_row_of_the_softmaxs_share_has_nothing_left_over() -> None:
    """A row against its direction, or beside it, has."""
    features = torch.eye(4, dtype=torch.float64)[:2]
    probabilities = torch.full((2, 3), 0.5)
    share = probabilities.double().T @ features / 2  # (3, 4)
    beside = torch.tensor([0.0, 0.0, 5.0, 0.0], dtype=torch.float64)
    rows = torch.stack([9 * share[0], -9 * share[1], share[2] + beside])
    assert (left_over(rows, features, probabilities) > 0).tolist() == [False, True, True]


def test_a_table_with_few_rows_is_not_applicable() -> None:
    """The reason says how many there are."""
    seen = tiny.client_step(tiny.gpt2_lm(), tiny.gpt2_tokenizer(), ["a dog"], task="causal-lm").observe()
    verdict = can_read_bag(seen)
    assert not verdict and f"{len(tiny.VOCABULARY)} rows" in verdict.reason


def test_noise_on_a_model_of_which_parts_were_kept_is_not_applicable() -> None:
    """The head's inputs cannot be computed."""
    step = _step(tied=True)
    seen = GaussianNoise(scale=0.3)(step, step.observe(), torch.Generator().manual_seed(0))
    verdict = can_read_bag(replace(seen, whole=False))
    assert not verdict and "whole model" in verdict.reason
