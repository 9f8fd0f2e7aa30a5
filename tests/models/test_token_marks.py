"""What a vocabulary's strings say about its tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from leakaudit.models.token_marks import Mark
from leakaudit.plugins import tokenizer_vocabulary
from tests.support import memorised, tiny


def _marks(tokenizer: Any) -> dict[str, Mark]:
    vocabulary = tokenizer_vocabulary(tokenizer)
    return {token: Mark(int(vocabulary.marks[number], 16)) for token, number in tokenizer.get_vocab().items()}


def _word_level(*words: str, mark: str = "") -> Any:
    """Return a tokenizer of whole words.

    With a mark, it is the one that SentencePiece puts before words.
    """
    inner = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(("<unk>", *words))}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=mark) if mark else pre_tokenizers.Whitespace()
    return tiny.hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def test_byte_level_tokens_begin_a_text_without_the_mark_of_a_word() -> None:
    """Letters of other scripts are read from their bytes."""
    found = _marks(memorised.tokenizer())
    assert found["The"] & Mark.BEGINS_TEXT and found["The"] & Mark.CAPITAL and not found["The"] & Mark.BEGINS_WORD
    assert found["\u0120the"] & Mark.BEGINS_WORD and not found["\u0120the"] & (Mark.BEGINS_TEXT | Mark.CAPITAL)
    assert found["."] & Mark.ENDS_SENTENCE and not found[","] & Mark.ENDS_SENTENCE


def test_wordpiece_marks_what_does_not_begin_a_word() -> None:
    """Its first token of a text has the form of any word."""
    found = _marks(tiny.bert_tokenizer())
    assert found["dog"] == Mark.BEGINS_WORD | Mark.BEGINS_TEXT and found["##ing"] == 0
    assert found["?"] & Mark.ENDS_SENTENCE


def test_sentencepiece_marks_words_and_the_beginning_of_a_text() -> None:
    """Both have the same form."""
    found = _marks(_word_level("\u2581The", "\u2581dog", "s", "!", mark="\u2581"))
    assert found["\u2581The"] == Mark.BEGINS_WORD | Mark.BEGINS_TEXT | Mark.CAPITAL
    assert found["\u2581dog"] == Mark.BEGINS_WORD | Mark.BEGINS_TEXT and found["s"] == 0
    assert found["!"] == Mark.ENDS_SENTENCE


def test_a_vocabulary_without_a_mark_tells_no_beginnings() -> None:
    """Capitals and full stops are still seen."""
    found = _marks(_word_level("The", "dog", "."))
    assert found["The"] == Mark.CAPITAL and found["dog"] == 0 and found["."] == Mark.ENDS_SENTENCE


@pytest.mark.parametrize("mark", [Mark.BEGINS_TEXT, Mark.CAPITAL | Mark.BEGINS_TEXT])
def test_ids_are_found_by_all_their_properties(mark: Mark) -> None:
    """A vocabulary whose strings were not kept has none."""
    vocabulary = tokenizer_vocabulary(memorised.tokenizer())
    found = _marks(memorised.tokenizer())
    ids = {number for token, number in memorised.tokenizer().get_vocab().items() if found[token] & mark == mark}
    assert vocabulary.marked(mark) == ids
    assert vocabulary.model_copy(update={"marks": ""}).marked(mark) == frozenset()
