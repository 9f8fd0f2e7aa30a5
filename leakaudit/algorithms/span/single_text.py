"""The order of one text whose words are known."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakaudit.algorithms.span.matching_pursuit import NOISE_EDGE
from leakaudit.algorithms.span.residuals import ResidualScale
from leakaudit.algorithms.span.subspace import Basis
from leakaudit.models.structure import InputStage

EXTRA = 2.0
"""Energy that one more position must explain, as a multiple of the noise energy that any vector explains.
Our choice."""

ONLY_NOISE = 1.1
"""Largest mean square residual of one text, in units of the rounding error's variance.
Our choice: over 1e5 entries and more, chance stays within 2 % of 1."""


def arranged(stage: InputStage, tokens: Tensor, rows: Tensor, limit: int) -> list[int] | None:
    """Return the token ids of one sequence of these words, or None.

    Each word occurs at least once. The result is None if no such sequence explains the rows.

    Args:
        stage: computes attention inputs.
        tokens: (M,) distinct words.
        rows: (F, D) float64, the layers' gradients in units of their errors.
        limit: the most positions.
    """
    if len(tokens) > limit:
        return None
    where = torch.arange(limit, device=rows.device)
    inputs = stage.inputs(tokens.repeat_interleave(limit), where.repeat(len(tokens)))
    cost = residual_scale(rows)(inputs).square().view(-1, limit).cpu()  # (M, P)
    inputs = inputs.view(-1, limit, inputs.shape[1]).double()
    best: tuple[float, float, list[int]] | None = None
    for length in range(len(tokens), limit + 1):
        again = cost[:, :length].min(dim=0).values.expand(length - len(tokens), -1)  # positions of repeated words
        rows_of, columns = linear_sum_assignment(torch.cat([cost[:, :length], again]).numpy())
        order = cost[:, :length].argmin(dim=0).tolist()
        for word, position in zip(rows_of.tolist(), columns.tolist(), strict=True):
            if word < len(tokens):
                order[position] = word
        axes = torch.linalg.qr(inputs[order, where[:length]].T)[0].T
        left = float((rows - (rows @ axes.T) @ axes).square().sum())
        score = left + EXTRA * len(rows) * length
        if best is None or score < best[0]:
            best = (score, left / (len(rows) * (rows.shape[1] - length)), order)
    if best is None or best[1] > ONLY_NOISE:
        return None
    return [int(tokens[word]) for word in best[2]]


def residual_scale(rows: Tensor) -> ResidualScale:
    """Return the directions of rows (F, D) above unit noise, with the error of each."""
    _, strength, directions = torch.linalg.svd(rows, full_matrices=False)
    edge = NOISE_EDGE * (rows.shape[0] ** 0.5 + rows.shape[1] ** 0.5)
    rank = max(1, int((strength > edge).sum()))
    after = float(strength[rank]) if rank < len(strength) else 0.0
    basis = Basis(directions[:rank], gap=float(strength[rank - 1]) / max(after, 1e-300), noisy=True)
    return ResidualScale(basis, (rows.shape[1] - rank) ** 0.5 / strength[:rank])
