"""The attack `rare-rows` on encoders: small random models; nothing is granted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from leakaudit.algorithms.embedding_rows import FALSE_ROWS, rows_of_tokens, tokens_of, touched_rows
from leakaudit.algorithms.position_rows import longest_length
from leakaudit.algorithms.rare_rows import same_sentence
from leakaudit.algorithms.rare_rows.agreement import Agreement
from leakaudit.algorithms.rare_rows.encoder import EncoderSearch
from leakaudit.algorithms.rare_rows.grouping import Grouping
from leakaudit.algorithms.rare_rows.insertion import with_frequent_words
from leakaudit.algorithms.rare_rows.rows import Rows
from leakaudit.algorithms.rare_rows.same_sentence import learn
from leakaudit.attacks.rare_rows import RareRows
from leakaudit.client.batches import with_random_state
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import input_stage_of
from leakaudit.plugins.attack_protocol import Reconstruction
from leakaudit.plugins.budget import Budget
from tests.support import tiny

TEXTS = (
    "the old dog chased a small cat near the river .",
    "the fish and the bird ate .",
    "never saw three big horse under blue tree .",
)


@pytest.fixture(autouse=True)
def _few_invented_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model needs few."""
    monkeypatch.setattr(same_sentence, "LEAST", 1_000)


def _narrow(classes: int = 2, dropout: float = 0.0) -> nn.Module:
    """Return a BERT classifier with D = 24 and weights far from zero."""
    return tiny.bert(
        num_labels=classes,
        dropout=dropout,
        hidden_size=24,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.2,
    )


def _step(model: nn.Module, *, training: bool = False, frozen: str = "", classes: int = 2) -> ClientStep:
    labels = [turn % classes for turn in range(len(TEXTS))]
    names = frozenset(name for name, _ in model.named_parameters() if frozen and frozen in name)
    step = tiny.client_step(model, tiny.bert_tokenizer(), list(TEXTS), labels, training=training, frozen=names)
    if not training:
        return step
    return replace(step, truth=Truth(tuple(with_random_state(batch, 3) for batch in step.truth.micro_batches)))


def _attack(step: ClientStep, seconds: float = 100.0) -> Reconstruction:
    return RareRows()(step.observe(), torch.Generator().manual_seed(0), Budget(seconds))


@pytest.mark.parametrize("classes", [2, 3])
def test_a_batch_with_more_tokens_than_the_hidden_size_comes_back_whole(classes: int) -> None:
    """Every sentence is proved by itself, and nothing is left in the rows."""
    step = _step(_narrow(classes), classes=classes)
    assert sum(map(len, step.truth.sequences())) > 24
    guess = _attack(step)
    assert {sequence.token_ids for sequence in guess.sequences or ()} == set(step.truth.sequences())
    assert all(sequence.proved for sequence in guess.sequences or ())
    assert guess.diagnostics["words_left"] == 0.0


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_words_that_occur_once_show_their_places_with_and_without_dropout(dropout: float) -> None:
    """Each word that occurs once is found with its place, and no other word is."""
    step = _step(_narrow(dropout=dropout), training=dropout > 0)
    seen, sequences = step.observe(), step.truth.sequences()
    stage = input_stage_of(seen.model, seen.facts.vocabulary.max_length)
    touched, _ = touched_rows(seen, FALSE_ROWS)
    table = rows_of_tokens(seen)
    rows = Rows.of({word: table[word].double() for word in tokens_of(touched, seen)}, {}, stage, 12)
    words = [word for sequence in sequences for word in sequence]
    once = {
        word: place
        for sequence in sequences
        for place, word in enumerate(sequence)
        if words.count(word) == 1 and word in rows.sums
    }
    assert dict(rows.places) == once


def test_the_longest_sentence_is_read_from_the_rows_of_places() -> None:
    """The position table's untouched rows bound the length."""
    step = _step(_narrow())
    assert longest_length(step.observe()) == max(map(len, step.truth.sequences()))


def test_rows_of_one_sentence_are_told_from_others_under_dropout() -> None:
    """The odds learned on invented sentences rank true pairs first in most cases."""
    step = _step(_narrow(dropout=0.1), training=True)
    seen, sequences = step.observe(), step.truth.sequences()
    search = EncoderSearch(seen, torch.Generator().manual_seed(0), Budget(100.0))
    before = torch.get_rng_state()
    alike = learn(search.simulator, search.rows, search.longest, True, search.rng, Budget(5.0))
    assert alike is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in seen.model.modules())
    words = search.rows.rare
    odds = alike.log_odds(torch.stack([search.rows.sums[word] for word in words]))
    sentence = torch.tensor([next(n for n, ids in enumerate(sequences) if word in ids) for word in words])
    same = (sentence[:, None] == sentence) & ~torch.eye(len(words), dtype=torch.bool)
    other = sentence[:, None] != sentence
    higher = (odds[same][:, None] > odds[other]).float().mean()
    assert float(higher) > 0.7


def test_a_sentence_under_dropout_comes_back_as_a_draft() -> None:
    """Drafts hold every rare word once, and none is called proved."""
    step = _step(_narrow(dropout=0.1), training=True)
    guess = _attack(step, seconds=20.0)
    assert guess.sequences
    assert not any(sequence.proved for sequence in guess.sequences)
    drafted = [token for sequence in guess.sequences for token in sequence.token_ids]
    rare = EncoderSearch(step.observe(), torch.Generator(), Budget(1.0)).rows.rare
    assert [drafted.count(word) for word in rare] == [1] * len(rare)


def test_frequent_words_are_added_to_drafts_and_change_no_rare_word() -> None:
    """Without time the drafts stay as they are."""
    seen = _step(_narrow(dropout=0.1), training=True).observe()
    search = EncoderSearch(seen, torch.Generator().manual_seed(0), Budget(100.0))
    alike = learn(search.simulator, search.rows, search.longest, True, search.rng, Budget(2.0))
    assert alike is not None
    grouping = Grouping(Agreement(search.simulator, search.rows), search.longest - 1, alike)
    groups = grouping.groups(Budget(10.0))
    plain = with_frequent_words(groups, grouping, Budget(1e-9))
    richer = with_frequent_words(groups, grouping, Budget(10.0))
    assert {group: set(draft.words.values()) for group, draft in plain.items()} == {
        group: set(group) for group in groups
    }
    added = [set(richer[group].words.items()) - set(plain[group].words.items()) for group in groups]
    assert any(added)
    assert {word for words in added for _, word in words} <= set(search.rows.frequent)
    assert all(plain[group].words.items() <= richer[group].words.items() for group in groups)


def test_an_attack_without_time_proves_nothing() -> None:
    """The budget ends the search, and no guess is called proved."""
    guess = _attack(_step(_narrow()), seconds=1e-6)
    assert guess.stop == "budget"
    assert not any(sequence.proved for sequence in guess.sequences or ())


def test_frozen_word_embeddings_are_refused_with_the_reason() -> None:
    """Without rows there is nothing to read."""
    answer = RareRows().applies(_step(_narrow(), frozen="embeddings").observe())
    assert not answer
    assert "frozen" in answer.reason


def test_rows_that_show_no_place_are_no_evidence() -> None:
    """Noise hides every place; an empty guess would count as a clean step."""
    seen = _step(_narrow()).observe()
    noise = {name: update + 1e-4 * torch.randn_like(update) for name, update in seen.update.items()}
    with pytest.raises(AnatomyError, match="found none among"):
        RareRows()(replace(seen, update=noise), torch.Generator().manual_seed(0), Budget(10.0))
