"""The public facts about a tokenizer."""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic import BaseModel, ConfigDict
from torch import nn

from leakaudit.errors import ModelError
from leakaudit.models.token_marks import Mark, token_marks

UNLIMITED = 10**6
"""Largest number of tokens of a text if neither tokenizer nor model has a limit. Our choice: more than any text has."""


class Vocabulary(BaseModel):
    """The public facts about a tokenizer that attacks need."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    """Number of ids, which are 0 to size - 1."""
    special: dict[str, int] = {}
    """Role -> id: `cls`, `sep`, `pad`, `unk`, `mask`, `bos`, `eos`; only those that the tokenizer has."""
    starts_with: tuple[int, ...] = ()
    """Ids that the tokenizer puts before every text."""
    ends_with: tuple[int, ...] = ()
    """Ids that the tokenizer puts after every text."""
    max_length: int = 512
    digest: str = ""
    """SHA-256 of all tokens in the order of their ids, which a prior must match. Empty if it was not kept."""
    marks: str = ""
    """One hexadecimal digit for each id: what the token's string says (`leakaudit.models.token_marks.Mark`). Empty if it was not kept."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of all special tokens."""
        return frozenset(self.special.values())

    @property
    def surrounding_ids(self) -> frozenset[int]:
        """Return the ids that the tokenizer puts around every text."""
        return frozenset({*self.starts_with, *self.ends_with})

    @property
    def wordless_ids(self) -> frozenset[int]:
        """Return the ids that are not words: special ones and those around a text."""
        return self.special_ids | self.surrounding_ids

    def marked(self, mark: Mark) -> frozenset[int]:
        """Return the ids whose strings have all properties of a mark."""
        return frozenset(number for number, digit in enumerate(self.marks) if int(digit, 16) & mark == mark)


def vocabulary_of(tokenizer: Any, model: nn.Module) -> Vocabulary:
    """Return the public facts about a tokenizer.

    Raises:
        ModelError: the model's embedding has fewer rows than the tokenizer has tokens.
    """
    roles = ("cls", "sep", "pad", "unk", "mask", "bos", "eos")
    special = {role: getattr(tokenizer, f"{role}_token_id", None) for role in roles}
    rows = _rows_of_words(model)
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens but the model's embedding only {rows} rows: "
            "they do not belong together"
        )
    # The ids that the tokenizer adds to a text are those around the ids of the same text without them.
    alone, wrapped = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (False, True))
    start = next((i for i in range(len(wrapped)) if wrapped[i : i + len(alone)] == alone), 0)
    config = getattr(model, "config", None)
    limits = (int(tokenizer.model_max_length), int(getattr(config, "max_position_embeddings", UNLIMITED)))
    longest = min((limit for limit in limits if limit > 0), default=UNLIMITED)  # XLNet says -1 where there is none
    digest = tokens_digest(tokenizer)
    return Vocabulary(
        size=rows,
        special={role: int(found) for role, found in special.items() if found is not None},
        starts_with=tuple(wrapped[:start]),
        ends_with=tuple(wrapped[start + len(alone) :]),
        max_length=longest,
        digest=digest,
        marks=token_marks(tokenizer, digest),
    )


def tokens_digest(tokenizer: Any) -> str:
    """Return the SHA-256 of a tokenizer's tokens in the order of their ids."""
    by_id = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256("\n".join(f"{number} {token}" for number, token in by_id).encode()).hexdigest()


def _rows_of_words(model: nn.Module) -> int:
    """Return the number of rows of the word embedding.

    If the model does not name its word embedding, this is the largest table.
    """
    if hasattr(model, "get_input_embeddings"):
        try:
            table = model.get_input_embeddings()  # type: ignore[operator]
        except NotImplementedError:  # Canine hashes characters into several tables
            table = None
        if getattr(table, "weight", None) is None:
            raise ModelError(
                f"{type(model).__name__} has no one table of words, a row for each token of its tokenizer, which attacks and scores on texts "
                "need; audit a model with a word embedding"
            )
        flat = table.weight.dim() == 1  # FSDP1 keeps a piece of it here
        return int(table.num_embeddings if flat else table.weight.shape[0])
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        raise ModelError(
            f"{type(model).__name__} has no embedding of tokens; only models that read token ids are audited"
        )
    return max(tables)
