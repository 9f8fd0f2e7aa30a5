"""The regulariser of embedding lengths.

Letters: N candidates, B sequences, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LengthRegulariser:
    """alpha_reg (mean token norm - a length)^2.

    It is L_reg of LAMP, Sec. 4.2, where the length is the mean norm of the word embedding's rows.
    """

    def __init__(self, weight: float, length: float, lengths: Sequence[int], device: torch.device) -> None:
        """Keep what it compares with.

        Args:
            weight: alpha_reg.
            length: the norm that tokens should have on average.
            lengths: (B,) tokens of each sequence.
            device: of the candidates.
        """
        self.weight = weight
        """alpha_reg; 0 for no regulariser."""
        self._length, self._tokens = length, sum(lengths)
        places = torch.arange(max(lengths))[None]
        self._inside = (places < torch.tensor(lengths)[:, None]).to(device)  # (B, T)

    def __call__(self, placed: Tensor) -> Tensor:
        """Return (N,) the regulariser of (N, B, T, D) embeddings."""
        norms = placed.square().sum(dim=3).clamp_min(1e-12).sqrt() * self._inside  # (N, B, T)
        mean = norms.sum(dim=(1, 2)) / self._tokens
        return self.weight * (mean - self._length).square()
