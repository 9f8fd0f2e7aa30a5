"""What the strings of a vocabulary say about its tokens.

A tokenizer writes into each token whether it begins a word: byte-level BPE and SentencePiece mark the tokens that do, WordPiece marks those that
do not. Its first token of a text may have another form than the same word inside a text: byte-level BPE has `The` and ` The`. These facts are
public, as the tokenizer is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

from tokenizers import decoders


class Mark(IntFlag):
    """One property of a token; a token may have several."""

    BEGINS_WORD = 1
    """It begins a word."""
    BEGINS_TEXT = 2
    """It has the form of the first token of a text."""
    CAPITAL = 4
    """Its first letter is a capital."""
    ENDS_SENTENCE = 8
    """It is punctuation after which a sentence may be over."""


@dataclass(frozen=True)
class Convention:
    """How a tokenizer tells the beginning of a word from its rest."""

    mark: str
    """First characters of a marked token."""
    begins: bool
    """Whether marked tokens begin words; if not, unmarked ones do."""


CONVENTIONS = (Convention("\u0120", True), Convention("\u2581", True), Convention("##", False))
"""Byte-level BPE (GPT-2), SentencePiece, WordPiece (BERT)."""

ENDS = re.compile(r"[^\w\s]*[.!?\u3002\uff01\uff1f][^\w\s]*")
"""Punctuation with a full stop, an exclamation mark or a question mark in it."""


_KNOWN: dict[str, str] = {}
"""Digest of a vocabulary -> its marks. A step of training asks for them again and again."""


def token_marks(tokenizer: Any, digest: str) -> str:
    """Return one hexadecimal digit for each id, the sum of its `Mark` values.

    Args:
        tokenizer: a tokenizer of transformers.
        digest: of its tokens; equal digests share one answer.
    """
    if digest not in _KNOWN:
        first = tokenizer.convert_ids_to_tokens(tokenizer("The", add_special_tokens=False)["input_ids"][:1])
        _KNOWN[digest] = _marks(tokenizer.get_vocab(), first[0] if first else "")
    return _KNOWN[digest]


def _marks(vocabulary: Mapping[str, int], first: str) -> str:
    convention = _convention_of(vocabulary)
    opens_marked = convention is not None and first.startswith(convention.mark)
    digits = ["0"] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        digits[number] = f"{_mark(token, convention, opens_marked):x}"
    return "".join(digits)


def _convention_of(vocabulary: Mapping[str, int]) -> Convention | None:
    """Return the convention with the most marked tokens; None if no token is marked."""
    counts = [sum(token.startswith(each.mark) for token in vocabulary) for each in CONVENTIONS]
    return CONVENTIONS[counts.index(max(counts))] if any(counts) else None


def _mark(token: str, convention: Convention | None, opens_marked: bool) -> Mark:
    """Return the properties of one token."""
    marked = convention is not None and token.startswith(convention.mark)
    text = _text_of(token, convention).strip()
    found = Mark(0)
    if convention is not None and marked == convention.begins:
        found |= Mark.BEGINS_WORD
    if convention is not None and marked == opens_marked and text:
        found |= Mark.BEGINS_TEXT
    if text[:1].isupper():
        found |= Mark.CAPITAL
    if ENDS.fullmatch(text):
        found |= Mark.ENDS_SENTENCE
    return found


def _text_of(token: str, convention: Convention | None) -> str:
    """Return a token's text without its mark."""
    if convention is not None and convention.mark == "\u0120":  # bytes are written as letters
        return str(decoders.ByteLevel().decode([token]))
    return token if convention is None else token.removeprefix(convention.mark)
