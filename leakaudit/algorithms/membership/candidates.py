"""A candidate text of a round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A text that may have been in the round."""

    token_ids: tuple[int, ...]
    """As the client's tokenizer writes it, special tokens included, no padding."""
    label: int | None = None
    """Class of the text. None if it is not known, and for a language model."""
