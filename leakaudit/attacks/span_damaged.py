"""A damaged update (noise, rounding, pruning): no pair lies in the span, so they are ranked."""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.attacks.reconstruction import GuessedSequence, Reconstruction
from leakaudit.attacks.span_candidates import EMPTY_BLOCKS, Scan, blocks, join
from leakaudit.attacks.span_scene import Scene


def read_damaged(scene: Scene) -> Reconstruction:
    """Return the best pair at every position; how far the best stands out decides the length."""
    stage, basis, budget = scene.stage, scene.basis, scene.budget
    scan = Scan(stage, basis.vectors, scene.tokens, scene.keep)
    limit = min(stage.max_length, max(4 * basis.rank, 2 * EMPTY_BLOCKS * 16))
    parts = []
    for start, stop in blocks(limit):
        parts.append(scan.block(start, stop))
        if budget.exhausted():
            break
    pairs = join(parts)
    best: dict[int, tuple[float, int]] = {}
    for token, position, distance in zip(
        pairs.tokens.tolist(), pairs.positions.tolist(), pairs.distance.tolist(), strict=True
    ):
        best.setdefault(position, (distance, token))
    nearest = torch.tensor([best[p][0] for p in range(len(best))], dtype=torch.float64)
    length = _length_from(nearest)
    if length == 0:
        return Reconstruction(sequences=(), facts={"positions": 0.0})
    floor = float(nearest[length:].median()) if length < len(nearest) else 1.0
    confidence = max(0.0, min(1.0, 1.0 - float(nearest[:length].mean()) / max(floor, 1e-12)))
    ids = tuple(best[p][1] for p in range(length))
    return Reconstruction((GuessedSequence(ids, 0.9 * confidence),), facts={"positions": float(length)})


def _length_from(nearest: Tensor) -> int:
    """Return how many leading positions hold something: the split of positions into near and far that fits best.

    Args:
        nearest: (P,) distance of the best pair at each position; far positions are alike.
    """
    if len(nearest) < 4:
        return len(nearest)
    total = ((nearest - nearest.mean()).square()).sum()
    best, length = total * 0.9, 0  # a split has to explain a tenth at least: our choice, else there is nothing to see
    for cut in range(1, len(nearest) - 1):
        left, right = nearest[:cut], nearest[cut:]
        if left.mean() >= right.mean():
            continue
        left_over = ((left - left.mean()).square()).sum() + ((right - right.mean()).square()).sum()
        if left_over < best:
            best, length = left_over, cut
    return length
