"""Simulated gradients of one sequence: what it alone adds to the update.

The update of a batch is a weighted sum over its sequences. The weights are the gradients of the loss with respect to
the logits: few, unknown, and the same for all tokens of a sequence. So the gradient of each logit is simulated. Least
squares then gives the weights from the observed gradients of the sequence's own tokens: thousands of equations for one
weight per class. If these equations agree to rounding, the sequence is confirmed without the rest of the batch, and its
part can be subtracted. Dropout has to be off, because the masks of later layers are unknown. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.padding import padded_batch
from leakaudit.client.observation import Observation
from leakaudit.models.structure import Projection
from leakaudit.models.structure.trace import watched


@dataclass(frozen=True)
class SequenceGradient:
    """The simulated gradients of one sequence of L tokens, for C classes."""

    gradients: Tensor
    """(C - 1, L, F) float64: derivative of each logit minus the first, by the outputs of some layers."""
    inputs: Tensor
    """(L, W) float64: what the last of these layers reads."""


def sequence_gradients(
    seen: Observation, layers: Sequence[Projection], sequences: Sequence[Sequence[int]]
) -> list[SequenceGradient]:
    """Simulate each sequence on its own; all run in one padded batch.

    There is one backward pass for each class but the first.

    Args:
        seen: a classification step with dropout off.
        layers: linear layers of its model, with F outputs together.
        sequences: token ids of each sequence.
    """
    model = seen.model
    ids, mask = padded_batch(seen, sequences)
    with watched(model, (layer.module for layer in layers)) as passed, torch.enable_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    outputs = [passed.made[layer.module] for layer in layers]
    # Cross-entropy's gradient sums to zero over the classes, so differences from the first logit span all gradients.
    scores = logits[:, 1:] - logits[:, :1] if logits.shape[1] > 1 else logits
    parts = []
    for number in range(scores.shape[1]):
        gradients = torch.autograd.grad(scores[:, number].sum(), outputs, retain_graph=number + 1 < scores.shape[1])
        parts.append(torch.cat([g.double() for g in gradients], dim=2))
    by_score = torch.stack(parts)  # (C - 1, B, T, F)
    inputs = passed.given[layers[-1].module].detach()  # (B, T, W)
    return [
        SequenceGradient(by_score[:, row, : len(sequence)], inputs[row, : len(sequence)].double())
        for row, sequence in enumerate(sequences)
    ]
