"""`freeze-embeddings` leaves embedding tables out of the update."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from leakaudit.attacks.embedding_rows import EmbeddingRows
from leakaudit.defenses.freeze_embeddings import FreezeEmbeddings
from tests.support import tiny

WORDS = "bert.embeddings.word_embeddings.weight"
OTHERS = {"bert.embeddings.position_embeddings.weight", "bert.embeddings.token_type_embeddings.weight"}


@pytest.mark.parametrize(("tables", "gone"), [("all", {WORDS, *OTHERS}), ("words", {WORDS}), ("none", set())])
def test_the_chosen_tables_are_gone_and_count_as_frozen(
    tables: Literal["all", "words", "none"], gone: set[str]
) -> None:
    """Nothing else is touched."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["a dog"], [1])
    seen = step.observe()
    defended = FreezeEmbeddings(tables=tables)(step, seen, torch.Generator())
    assert set(seen.update) - set(defended.update) == gone
    assert set(defended.facts.frozen) == gone
    assert all(defended.update[name] is seen.update[name] for name in defended.update)


def test_the_bag_of_words_is_no_longer_applicable() -> None:
    """The attack says so itself, it does not return an empty bag."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["a dog"], [1])
    assert not EmbeddingRows().applies(FreezeEmbeddings()(step, step.observe(), torch.Generator()))


def test_a_tied_head_is_frozen_with_its_table() -> None:
    """Word table and language-model head are one parameter."""
    step = tiny.client_step(tiny.gpt2_lm(), tiny.gpt2_tokenizer(), ["a dog"], task="causal-lm")
    defended = FreezeEmbeddings()(step, step.observe(), torch.Generator())
    assert not [name for name in defended.update if "wte" in name or "wpe" in name or "lm_head" in name]


def test_tables_that_are_frozen_already_leave_nothing_to_do() -> None:
    """No defence is declared that changes nothing."""
    frozen = frozenset({WORDS, *OTHERS})
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["a dog"], [1], frozen=frozen)
    seen = step.observe()
    assert FreezeEmbeddings()(step, seen, torch.Generator()) is seen
