"""Several sentences of an encoder with adapters; nothing is granted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from leakaudit.algorithms.rare_rows.sentences import Draft
from leakaudit.algorithms.span.adapter_encoder import AdapterSimulator, PlacedCandidates, raw_rows
from leakaudit.algorithms.span.adapter_places import WordSums, once
from leakaudit.algorithms.span.matching_pursuit import find_words, word_weights
from leakaudit.attacks.span import Span
from leakaudit.models.lora import add_lora, is_adapter
from leakaudit.models.structure import anatomy_of, input_stage_of
from leakaudit.plugins.attack_protocol import Reconstruction
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.testing.small_models import client_step
from tests.support import tiny

TEXTS = ("the old dog chased a small cat near the river .", "never saw three big horse under blue tree .")

LABELS = [1, 2]


def _step(rank: int = 8, texts: tuple[str, ...] = TEXTS) -> Any:
    pytest.importorskip("peft")
    model = tiny.wide_bert()
    add_lora(model, rank)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    frozen = frozenset(n for n, _ in model.named_parameters() if not (is_adapter(n) or n.startswith("classifier")))
    return client_step(model, tiny.bert_tokenizer(), list(texts), LABELS, frozen=frozen)


def _attack(step: Any) -> Reconstruction:
    return Span()(step.observe(), tiny.generator(), Budget(120))


def _problem(seen: Any) -> Any:
    stage = input_stage_of(seen.model, tiny.POSITIONS)
    return cast(Any, SimpleNamespace(seen=seen, stage=stage, anatomy=anatomy_of(seen.model), budget=Budget(60)))


def _sums(problem: Any) -> WordSums:
    rows = raw_rows(problem)
    words = find_words(problem.stage, rows, tiny.POSITIONS, problem.budget)
    assert words is not None
    sums = WordSums.of(word_weights(problem.stage, words.tokens, rows, tiny.POSITIONS))
    assert sums is not None
    return sums


def test_two_sentences_come_back_and_are_proved() -> None:
    """From 16 rows for 23 pairs of word and place; both sentences share a word."""
    step = _step()
    guess = _attack(step)
    assert {s.token_ids for s in guess.sequences or ()} == set(step.truth.sequences())
    assert all(s.proved for s in guess.sequences or ()) and guess.tokens is None


def test_places_of_words_that_occur_once_are_right() -> None:
    """All of them are settled but those that hold a word which stands elsewhere, too."""
    step = _step()
    settled = _sums(_problem(step.observe())).settled()
    truth = step.truth.sequences()
    everywhere = [(place, token) for sentence in set(truth) for place, token in enumerate(sentence)]
    several = {t for t in {t for _, t in everywhere} if len({p for p, own in everywhere if own == t}) > 1}
    expected = {
        place: sorted({t for p, t in everywhere if p == place})
        for place in range(max(map(len, truth)))
        if not {t for p, t in everywhere if p == place} & several
    }
    assert {place: sorted(words) for place, words in settled.items()} == expected
    assert len(once(settled)) > 8


def test_a_simulated_sentence_has_the_weights_of_its_words() -> None:
    """Up to one factor, at every word that occurs once."""
    step = _step()
    problem = _problem(step.observe())
    sums = _sums(problem)
    simulator = AdapterSimulator(problem, sums.scale)
    places = once(sums.settled())
    sentence = step.truth.sequences()[1]
    laid = simulator.lay([Draft(dict(enumerate(sentence[1:-1], 1)), 1, len(sentence) - 1)])
    weights = simulator.gradients(simulator.inputs(laid), laid).detach()[LABELS[1], 0].double()
    cosines = [
        abs(float(torch.nn.functional.cosine_similarity(weights[place], sums.table[word], dim=0)))
        for place, word in enumerate(sentence)
        if places.get(word) == place and word not in (sentence[0], sentence[-1])
    ]
    assert len(cosines) > 3 and min(cosines) > 1 - 1e-6


def test_no_hole_allows_no_word() -> None:
    """Where every word is settled there is no place; a reader must not fail."""
    words = PlacedCandidates(torch.tensor([7, 8]), torch.tensor([0, -1]), frozenset({0}))
    assert words.allowed(torch.zeros(0, dtype=torch.long)).shape == (0, 2)
    assert words.allowed(torch.tensor([0, 1])).tolist() == [[True, False], [False, True]]
