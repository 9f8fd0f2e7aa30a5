"""Likeness in meaning, by a tiny encoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leakaudit.audit.scoring.score import ONLY_WORDS, Scored, score, with_similarity
from leakaudit.errors import ModelError
from leakaudit.metrics.semantic_similarity import SemanticSimilarity
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction
from leakaudit.plugins.metric_protocol import Pair
from leakaudit.results.schema import Score
from tests.support import tiny

DOG, BIRD = "the old dog", "a small bird ate three fish"


@pytest.fixture(scope="module")
def metric(tmp_path_factory: pytest.TempPathFactory) -> SemanticSimilarity:
    folder = tmp_path_factory.mktemp("encoder")
    tiny.hf.BertModel(tiny.bert().config).save_pretrained(folder)
    tiny.bert_tokenizer().save_pretrained(folder)
    return SemanticSimilarity(folder)


def _pair(true: str, guess: str) -> Pair:
    return Pair((), (), true, guess)


@torch.no_grad()
def test_it_is_the_cosine_of_mean_states(metric: SemanticSimilarity) -> None:
    """One text at a time and without padding; the metric pads the shorter one."""
    model = tiny.hf.BertModel.from_pretrained(metric.path).eval()
    means = []
    for text in (DOG, BIRD):
        states = model(**tiny.bert_tokenizer()(text, return_tensors="pt")).last_hidden_state[0]
        means.append(states.mean(dim=0))
    expected = float(torch.nn.functional.cosine_similarity(means[0], means[1], dim=0))
    assert metric(_pair(DOG, BIRD)) == pytest.approx(max(0.0, expected), abs=1e-5)
    assert metric(_pair(BIRD, DOG)) == pytest.approx(max(0.0, expected), abs=1e-5)


def test_the_perfect_guess_is_1_the_empty_one_0_and_an_empty_truth_is_missing(metric: SemanticSimilarity) -> None:
    """As with every metric."""
    assert metric(_pair(DOG, DOG)) == 1.0
    assert metric(_pair(DOG, "")) == 0.0
    assert metric(_pair("", DOG)) is None


def test_a_folder_without_an_encoder_is_a_clear_error(tmp_path: Path) -> None:
    """Said with what to give."""
    with pytest.raises(ModelError, match="holds no sentence model; give the folder of an encoder"):
        SemanticSimilarity(tmp_path)(_pair(DOG, BIRD))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="no sentence model can be loaded from it"):
        SemanticSimilarity(tmp_path)(_pair(DOG, BIRD))


def _scored(guess: Reconstruction) -> Scored:
    truths = [tiny.bert_tokenizer()(text)["input_ids"] for text in (DOG, BIRD)]
    return score(guess, truths, None, None, tiny.bert_tokenizer(), {0, 2, 3}, 3)


def test_a_steps_score_is_the_mean_over_its_sequences(metric: SemanticSimilarity) -> None:
    """A sequence without a guess counts as 0; the other scores stay as they are."""
    ids = tuple(tiny.bert_tokenizer()(DOG)["input_ids"])
    before = _scored(Reconstruction(sequences=(GuessedSequence(ids),)))
    after = with_similarity(before, metric)
    assert after.scores["semantic_similarity"] == Score(value=0.5, n=2)
    assert {name: after.scores[name] for name in before.scores} == before.scores


def test_words_without_order_have_no_meaning_to_compare(metric: SemanticSimilarity) -> None:
    """Missing, for the reason that every metric of sequences gives."""
    assert with_similarity(_scored(Reconstruction(tokens=(7,))), metric).scores["semantic_similarity"] == ONLY_WORDS
