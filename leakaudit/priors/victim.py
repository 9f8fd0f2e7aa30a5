"""`victim`: the model under attack itself, where it is a causal language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from leakaudit.algorithms.language_models.token_scorer import TokenScorer
from leakaudit.plugins import PriorError, Vocabulary, prior

LOOKED_BACK = 1e-4
"""Two texts differ in their last token. This is the largest relative difference of their logits before it. Our choice: rounding leaves
1e-6, and a model that sees later tokens much more."""


@prior("victim")
@dataclass(frozen=True)
class Victim:
    """The public model itself, if it predicts next tokens.

    In a federated run every participant has this model; its weights are those before the step. The prior tests whether the logits at a
    position depend on later tokens. If they do, it refuses the model.
    """

    source: ClassVar[str] = "FILM (Gupta et al. 2022), Sec. 4.3: the shared language model as its own prior"
    knows: ClassVar[str] = "Nothing more: the weights before the step are public."

    def load(self, vocabulary: Vocabulary, victim: nn.Module | None = None) -> TokenScorer:
        """Check that the public model is a causal language model.

        Raises:
            PriorError: there is no public model, or it is another kind of model.
        """
        if victim is None or not _predicts_next_tokens(victim, vocabulary):
            kind = "nothing" if victim is None else type(victim).__name__
            raise PriorError(
                f"victim: the model under attack is not a causal language model, found {kind}; name another prior"
            )
        return TokenScorer(victim, vocabulary)


@torch.no_grad()
def _predicts_next_tokens(model: nn.Module, vocabulary: Vocabulary) -> bool:
    """Return whether logits (B, T, V) do not depend on later tokens."""
    length = min(4, vocabulary.max_length)
    if vocabulary.size < 2 or length < 2:
        return False
    ids = torch.zeros(2, length, dtype=torch.long, device=next(model.parameters()).device)
    ids[1, -1] = 1
    try:
        logits = getattr(model(input_ids=ids, attention_mask=torch.ones_like(ids)), "logits", None)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    if not isinstance(logits, Tensor) or logits.shape != (2, length, vocabulary.size):
        return False
    before = logits[:, :-1]
    return bool((before[0] - before[1]).abs().max() <= LOOKED_BACK * logits.abs().max().clamp_min(1e-30))
