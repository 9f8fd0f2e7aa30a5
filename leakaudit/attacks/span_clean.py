"""Sentences out of a clean update, dropout off: a pair of token and position is in the span or it is not."""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.attacks.proof import Proof, prove
from leakaudit.attacks.reconstruction import GuessedSequence, Reconstruction
from leakaudit.attacks.span_assembly import Group, as_guesses, assemble, by_position, factor
from leakaudit.attacks.span_scene import Scene

FARTHEST_INSIDE = 0.03
"""Distance beyond which no pair counts as in the span of a clean update, however the others rank. Measured: true pairs at 1e-7
to 1e-6 in a pretrained encoder, up to 5e-4 in untrained tiny ones, whose weak directions drown in rounding; the nearest false
pair at 1e-1 and more."""


def read_clean(scene: Scene) -> Reconstruction | None:
    """Return what lies in the span, assembled to sentences, and proved where that is possible; None where nothing does."""
    seen, budget = scene.seen, scene.budget
    pairs = scene.scan()
    inside = pairs.take(torch.arange(_inside(pairs.distance, scene.basis.rank), device=pairs.distance.device))
    facts = {"candidates": float(len(inside))}
    if len(inside) == 0:
        return None
    if _one_per_position(inside.positions):
        order = inside.positions.argsort()
        guess = [GuessedSequence(tuple(inside.tokens[order].tolist()), confidence=1.0)]
        proved = prove(seen, guess, budget)
    else:
        proofs: list[Proof] = []

        # Pairs that share token and position with true ones lie in the span as well, and assemble to nothing complete.
        def proves(groups: list[Group]) -> bool:
            proofs.append(prove(seen, as_guesses(groups, inside.tokens), budget))
            return all(s.proved for s in proofs[-1].sequences)

        witness = factor(seen.update, scene.weights, scene.anatomy, inside.inputs)
        groups = (
            assemble(witness, inside.positions, reuse=True, beam=scene.beam, budget=budget, enough=proves)
            if witness is not None
            else []
        ) or by_position(inside.positions)
        known = proofs and all(s.proved for s in proofs[-1].sequences)
        proved = proofs[-1] if known else prove(seen, as_guesses(groups, inside.tokens), budget)
    return Reconstruction(sequences=proved.sequences, label_counts=proved.label_counts, facts=facts | proved.facts)


def _inside(distance: Tensor, rank: int) -> int:
    """Return how many of the ranked pairs lie in the span: up to the widest gap, from as many pairs as directions on.

    There are at least as many true pairs as directions, and more where equal tokens stand at equal positions.

    Args:
        distance: (N,) ascending.
        rank: directions of the span.
    """
    near = int((distance < FARTHEST_INSIDE).sum())
    if near < rank or near == 0:
        return near
    steps = (distance[1:].clamp_min(1e-9) / distance[:-1].clamp_min(1e-9)).tolist()
    cuts = range(rank, min(near, len(steps)) + 1)
    return max(cuts, key=lambda cut: steps[cut - 1] if cut <= len(steps) else 0.0)


def _one_per_position(positions: Tensor) -> bool:
    """Return whether there is exactly one pair at every position from 0: then it is one sentence, and ordered."""
    ordered = positions.sort().values
    return bool(torch.equal(ordered, torch.arange(len(ordered), device=ordered.device)))
