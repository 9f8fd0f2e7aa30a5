"""Token sequences of different lengths as one padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leakaudit.client.observation import Observation


def padded_batch(seen: Observation, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask, (B, T) int64 each, padded on the right.

    Args:
        seen: gives the padding token and the device.
        sequences: token ids of each of the B sequences, at least one.
    """
    device = next(seen.model.parameters()).device
    longest = max(map(len, sequences))
    pad = seen.facts.vocabulary.special.get("pad", 0)
    ids = torch.full((len(sequences), longest), pad, dtype=torch.long, device=device)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence, device=device)
        mask[row, : len(sequence)] = 1
    return ids, mask
