"""States of many prefixes of one length, with cached keys.

Letters: n prefixes, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.models.structure.trace import run_until
from leakaudit.models.versions import empty_cache

START_CHUNK = 4096
"""Prefixes of one pass. Our choice: one token of each takes less than 0.2 GB in a small model."""


class PrefixStates:
    """The head's inputs at the ends of prefixes of one length, with cached keys."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> None:
        """Start without prefixes.

        Args:
            model: a causal language model; it is left as it was.
            weights: parameter name -> tensor that replaces the model's own.
        """
        self._model, self._weights = model, weights
        self.head: Any = model.get_output_embeddings()  # type: ignore[operator]  # a method of every transformers model
        self._cache: Any = None
        self.paths = torch.zeros(0, 0, dtype=torch.long)
        """(n, T) token ids."""

    def alone(self, paths: Tensor) -> Tensor:
        """Return the states (n, D) of prefixes (n, T), and keep nothing."""
        parts = [self._given(part)[:, -1] for part in paths.split(START_CHUNK)]
        return torch.cat(parts).float()

    def all_of(self, paths: Tensor) -> Tensor:
        """Return the states (n T, D) at all tokens of paths (n, T), and keep nothing."""
        return self._given(paths).flatten(0, 1).float()

    def start(self, paths: Tensor) -> Tensor:
        """Keep prefixes (n, T) and return their states (n, D)."""
        self.paths = paths
        self._cache = empty_cache(self._model)
        return self._run(paths)

    def extend(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Replace the prefixes by continued ones, and return their states.

        Args:
            rows: (m,) numbers of the prefixes to continue.
            tokens: (m,) one token for each.

        Returns:
            (m, D) states.
        """
        self.paths = torch.cat([self.paths[rows], tokens[:, None]], dim=1)
        self._cache.batch_select_indices(rows)
        return self._run(tokens[:, None])

    def _run(self, ids: Tensor) -> Tensor:
        mask = torch.ones_like(self.paths)
        return self._given(ids, attention_mask=mask, past_key_values=self._cache, use_cache=True)[:, -1].float()

    def _given(self, ids: Tensor, **more: Any) -> Tensor:
        return run_until(self._model, ids, self.head, weights=self._weights, **more)
