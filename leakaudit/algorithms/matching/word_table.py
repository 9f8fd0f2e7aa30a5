"""The word embedding, and the words nearest to an embedding.

Letters: B sequences, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from leakaudit.client.observation import Observation


class WordTable:
    """The word embedding of a model, and the directions of its words."""

    def __init__(self, seen: Observation) -> None:
        """Take the public model's word embedding."""
        self.table: Tensor = seen.model.get_input_embeddings().weight.detach()  # type: ignore[operator]
        """(V, D) the word embedding."""
        self.directions = functional.normalize(self.table, dim=1)
        """(V, D) its rows at norm 1; zero for tokens that cannot stand at a free position."""
        vocabulary = seen.facts.vocabulary
        unknown = vocabulary.special.get("unk", -1)
        self.directions[sorted(vocabulary.special_ids - {unknown})] = 0.0
        self.allowed = self.directions.any(dim=1)
        """(V,) whether a token can stand at a free position."""
        self.mean_length = float(self.table.norm(dim=1).mean())
        """Mean norm of the rows."""

    @property
    def root_mean_square(self) -> float:
        """The root mean square of the entries."""
        return float(self.table.square().mean().sqrt())

    def cosines(self, embeddings: Tensor) -> Tensor:
        """Return (B, T, V) the cosines of (B, T, D) embeddings with all words."""
        return functional.normalize(embeddings, dim=2) @ self.directions.T

    def nearest(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, T) cosines with the nearest words, and (B, T) their ids."""
        found = (functional.normalize(embeddings.flatten(0, 1), dim=1) @ self.directions.T).max(dim=1)
        values, ids = (each.view(embeddings.shape[:2]) for each in found)
        return values, ids
