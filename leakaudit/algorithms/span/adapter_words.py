"""The words of a batch from the rows of the first layer's adapters, in no order.

The search is a pursuit: the token that adds most evidence is taken and counts as known, until the best one adds little more
than chance.
Positions are unknown then. With u = w_t + d_p, an input is (gain u - mean(u) gain) / std(u) + shift, so the known part of the search is the
span of all gain d_p, gain and shift, and one vector gain w_t remains for each token (see `matching_pursuit`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.span.row_denoising import RepairedRows
from leakaudit.algorithms.span.row_evidence import KNOWN, Explained, RowEvidence
from leakaudit.models.structure import InputStage
from leakaudit.plugins.budget import Budget

LONGEST, SHARE = 64, 4
"""Most positions whose vectors are taken out, and the least ratio of the hidden size to that number.
Our choice: each position leaves one dimension less."""

MOST_WORDS = 2
"""Least ratio of the hidden size to the number of words. Our choice: beyond it any set of words explains much."""

SPARE = 8
"""Words below the bound on chance that are returned as well.
Our choice: a wrong word costs only time, but a missing one costs a sentence."""


@dataclass(frozen=True)
class BatchWords:
    """The words of a batch, the strongest first."""

    certain: tuple[int, ...] = ()
    """Token ids that add more than chance."""
    spare: tuple[int, ...] = ()
    """The next token ids, most of which are in no text."""


def words_of(stage: InputStage, rows: RepairedRows, budget: Budget) -> BatchWords:
    """Return the words that the rows combine.

    Args:
        stage: computes attention inputs; the result is empty if it is not additive.
        rows: of the adapters that read these inputs.
        budget: checked between words.
    """
    if not stage.additive or stage.norm is None:
        return BatchWords()
    gain, shift = stage.norm.gain, stage.norm.shift
    atoms = gain * stage.token_vectors.double()
    positions = stage.position_vectors[: min(LONGEST, stage.hidden // SHARE)]
    layer = RowEvidence(rows, atoms)
    known = Explained.nothing([layer])
    for vector in torch.cat([gain * positions[1:], gain[None], shift[None]]):
        if bool(vector.any()):
            known = known.with_inputs([vector])
    return _pursue(layer.whitened(atoms).float(), atoms, known, stage.hidden // MOST_WORDS, budget)


def _pursue(whitened: Tensor, atoms: Tensor, known: Explained, most: int, budget: Budget) -> BatchWords:
    """Return the atoms that the rows combine, the strongest first.

    Args:
        whitened: (V, D) float32 atoms in the coordinates of the rows.
        atoms: (V, D) float64.
        known: what no atom has to explain.
        most: most atoms.
        budget: checked between atoms.
    """
    found: list[int] = []
    length = whitened.square().sum(dim=1)
    outside = length - (whitened @ known.axes[0].T.float()).square().sum(dim=1)
    while len(found) < most and not budget.exhausted():
        share = (whitened @ known.readers[0].T.float()).square().sum(dim=1) / outside.clamp_min(1e-30)
        share[outside <= KNOWN * length] = 0.0
        best = int(share.argmax())
        if known.nats(0, float(share[best])) <= known.chance(0, len(atoms)):
            spare = share.topk(min(SPARE, len(share))).indices.tolist()
            return BatchWords(tuple(found), tuple(token for token in spare if token not in found))
        found.append(best)
        before = len(known.axes[0])
        known = known.with_inputs([atoms[best]])
        outside = outside - (whitened @ known.axes[0][before:].T.float()).square().sum(dim=1)
    return BatchWords(tuple(found))
