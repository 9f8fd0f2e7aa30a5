"""The word embedding, and the words nearest to an embedding.

Letters: B sequences, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from leakaudit.algorithms.embedding_rows import FALSE_ROWS, can_read_rows, holds_earlier_rounds, touched_rows
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.token_marks import Mark
from leakaudit.models.vocabulary import Vocabulary


class WordTable:
    """The word embedding of a model, and the directions of its words."""

    def __init__(self, seen: Observation, lengths: Sequence[int], *, bag: bool = False, lowest_id: int = 0) -> None:
        """Take the public model's word embedding.

        Args:
            seen: the observation.
            lengths: (B,) tokens of each sequence.
            bag: only tokens whose rows of the word embedding were updated may stand in a text, if these rows tell them.
            lowest_id: tokens with a lower id, special ones aside, cannot stand in a text.

        Raises:
            AnatomyError: tokens below `lowest_id` do stand in texts, by the marks of the tokenizer.
        """
        self.outside = tokens_without_update(seen) if bag else None
        """(V,) whether a token is no input of the batch; None if that is not known."""
        places = torch.arange(max(lengths))[None]  # (1, T)
        unseen = int(seen.facts.task == "causal-lm")
        inputs = places < torch.tensor(lengths)[:, None] - unseen
        self.inputs = inputs.to(next(seen.model.parameters()).device)
        """(B, T) whether a token at a place has a gradient as an input: the last of a causal language model has none."""
        self.table: Tensor = seen.model.get_input_embeddings().weight.detach()  # type: ignore[operator]
        """(V, D) the word embedding."""
        self.directions = functional.normalize(self.table, dim=1)
        """(V, D) its rows at norm 1; zero for tokens that cannot stand at a free position."""
        vocabulary = seen.facts.vocabulary
        unknown = vocabulary.special.get("unk", -1)
        self.directions[sorted(vocabulary.special_ids - {unknown} | unused_below(vocabulary, lowest_id))] = 0.0
        self.allowed = self.directions.any(dim=1)
        """(V,) whether a token can stand at a free position."""
        self.mean_length = float(self.table.norm(dim=1).mean())
        """Mean norm of the rows."""

    @property
    def root_mean_square(self) -> float:
        """The root mean square of the entries."""
        return float(self.table.square().mean().sqrt())

    def cosines(self, embeddings: Tensor, inputs: Tensor | None = None) -> Tensor:
        """Return (B, T, V) the cosines of (B, T, D) embeddings with all words.

        They are minus infinity for words that cannot stand at a place.

        Args:
            embeddings: of sequences.
            inputs: (B, T) as `inputs` of these sequences; None for those of the batch.
        """
        found = functional.normalize(embeddings, dim=2) @ self.directions.T
        if self.outside is None:
            return found
        counted = self.inputs if inputs is None else inputs
        return found.masked_fill(counted[..., None] & self.outside, -torch.inf)

    def nearest(self, embeddings: Tensor, inputs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (B, T) cosines with the nearest words, and (B, T) their ids.

        The arguments are those of `cosines`.
        """
        values, ids = self.cosines(embeddings, inputs).max(dim=2)
        return values, ids


def unused_below(vocabulary: Vocabulary, lowest_id: int) -> set[int]:
    """Return the ids below one that are not special.

    Raises:
        AnatomyError: some of them are capitals, ends of sentences or inner parts of words, so they are not unused; or nothing would be left.
    """
    below = set(range(lowest_id)) - vocabulary.special_ids
    plain = f"{Mark.BEGINS_WORD | Mark.BEGINS_TEXT:x}"
    used = sum(vocabulary.marks[token : token + 1] != plain for token in below)
    if used or lowest_id >= vocabulary.size:
        raise AnatomyError(
            f"lowest_id={lowest_id} leaves out {used or 'all'} tokens that can stand in a text; it is meant for a vocabulary that begins with "
            "unused tokens, such as that of BERT, uncased; give lowest_id=0"
        )
    return below


def tokens_without_update(seen: Observation) -> Tensor | None:
    """Return (V,) whether a token's row of the word embedding has no update.

    None if the rows do not tell the batch's tokens: the table is frozen or tied to an output head, an optimizer kept moments of other
    rounds, or noise or a declared defence changed rows.
    """
    if seen.facts.defenses or not can_read_rows(seen) or holds_earlier_rounds(seen):
        return None
    touched, noise = touched_rows(seen, FALSE_ROWS)
    return ~touched if not noise and bool(touched.any()) else None
