"""What the adapters of a decoder read at the end of a prefix, in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.models.structure import Adapter, probed_inputs
from leakaudit.models.versions import empty_cache

MOST_GROUPS = 8
"""Most tensors whose rows are read. Our choice: more layers cost time and say little more."""


class AdapterInputs:
    """Computation of the inputs of groups of adapters."""

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[Adapter]]) -> None:
        """Take the first groups.

        Args:
            model: a decoder in eval mode; left as it was.
            groups: adapters that read one tensor, in the order of the forward pass.
        """
        self.groups = tuple(groups)[:MOST_GROUPS]
        self._model = model
        self._readers = tuple(model.get_submodule(group[0].down.module) for group in self.groups)

    def run(self, ids: Tensor, **more: Any) -> tuple[Tensor, ...]:
        """Return for each group (N, T, D) inputs for token ids (N, T)."""
        return probed_inputs(self._model, ids, self._readers, **more)

    def children(self, prefixes: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return for each group (N, M, D) inputs of every token behind every prefix.

        Args:
            prefixes: (N, T) token ids, T from 0 up.
            tokens: (M,) token ids.
        """
        count, length = prefixes.shape
        last = tokens.repeat(count)[:, None]
        if not length:
            return tuple(given[:, 0].unflatten(0, (count, len(tokens))) for given in self.run(last))
        cache = empty_cache(self._model)
        self.run(prefixes, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(tokens))
        mask = torch.ones(len(last), length + 1, dtype=torch.long, device=last.device)
        made = self.run(last, attention_mask=mask, past_key_values=cache, use_cache=True)
        return tuple(given[:, 0].unflatten(0, (count, len(tokens))) for given in made)
