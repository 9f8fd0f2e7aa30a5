"""Dropout masks behind the first normalisation, from rows of rare words.

With z = (u - mean) / deviation the gradient at u is r = (h - mean(h) - z mean(h z)) / deviation, where h is the gradient at z. Dropout behind the
normalisation makes h zero at the dropped entries, so all dropped entries of a row lie on one line: r_j = a + b z_j. Other entries do not. (Own
derivation.)

Letters: D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import torch
from torch import Tensor

from leakaudit.algorithms.rare_rows.rows import Rows
from leakaudit.client.observation import Observation
from leakaudit.models.structure import InputStage

LINES = 3_000
"""Lines through two entries that are tried for a row.
Our choice: with a tenth of the entries dropped, 30 of them pass through two dropped ones."""

ON_LINE = 1e-4
"""Largest distance from the line, in medians of the row's entries, at which an entry counts as dropped.
Measured: dropped entries of MiniLM are below 1e-5; one other entry in a thousand is below 1e-4."""

FEWEST = 8
"""Fewest entries on a line that show dropout.
Our choice: lines through entries that were not dropped pass within that distance of 2 to 4 of 384 entries."""


def kept_inputs(seen: Observation, rows: Rows, stage: InputStage) -> dict[tuple[int, int], Tensor]:
    """Return (token id, place) -> (D,) float32: 0 where dropped, or 1 / (1 - rate).

    Empty if dropout is off. Words whose row shows no line are left out.

    Args:
        seen: gives the public rates of dropout.
        rows: of the observation.
        stage: of its model.
    """
    if not seen.facts.training_mode or not seen.facts.dropout:
        return {}
    dropped = {
        (word, place): mask
        for word, place in rows.places.items()
        if (mask := _dropped(rows.sums[word], _normalised(stage, word, place))) is not None
    }
    if not dropped:
        return {}
    rate = _rate(seen.facts.dropout, fmean(float(mask.float().mean()) for mask in dropped.values()))
    return {pair: (~mask).float() / (1.0 - rate) for pair, mask in dropped.items()}


def _rate(rates: Mapping[str, float], share: float) -> float:
    """Return the public rate nearest to the share of dropped entries."""
    return min(rates.values(), key=lambda rate: abs(rate - share))


def _normalised(stage: InputStage, word: int, place: int) -> Tensor:
    """Return z (D,) float64."""
    u = stage.token_vectors[word].double() + stage.position_vectors[place].to(stage.device)
    centred = u - u.mean()
    return centred / centred.square().mean().sqrt()


def _dropped(row: Tensor, z: Tensor) -> Tensor | None:
    """Return (D,) bool: the entries on the line through most; None if too few."""
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randint(len(row), (2, LINES), generator=generator).to(row.device)
    slope = (row[one] - row[other]) / torch.where(one == other, torch.inf, z[one] - z[other])
    distance = (row - row[one, None] - slope[:, None] * (z - z[one, None])).abs()  # (lines, D)
    on_line = distance < ON_LINE * row.abs().median()
    best = on_line.sum(dim=1).argmax()
    found: Tensor = on_line[best]
    return found if int(found.sum()) >= FEWEST else None
