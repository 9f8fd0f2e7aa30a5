"""Sentences out of a clean update, dropout on: every real token has a mask of its own, so the rank is their number."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from leakaudit.attacks.reconstruction import GuessedSequence, Reconstruction
from leakaudit.attacks.span_assembly import Group, assemble, by_position, confidence_of, factor
from leakaudit.attacks.span_candidates import Candidates
from leakaudit.attacks.span_dropout import find_masked
from leakaudit.attacks.span_scene import Scene
from leakaudit.snapshot import Observation

SEARCH_SHARE = 0.7
"""Share of the time left that the regressions may take. Our choice: assembly needs a tenth of theirs where both finish, and an
attack that found tokens but has no time to put them together would return nothing."""


def read_masked(scene: Scene) -> Reconstruction | None:
    """Return what was found behind dropout masks after the last normalisation, assembled; None where nothing was found."""
    seen, budget, basis = scene.seen, scene.budget, scene.basis
    pairs = scene.scan()
    masked = find_masked(
        basis.vectors, pairs, scene.dropout, scene.rng, budget.part(SEARCH_SHARE), frequent=scene.special
    )
    if len(masked) == 0:
        return None
    if len(torch.unique(masked.positions)) == len(masked):  # no position twice: one sentence
        groups = [Group(tuple(masked.positions.argsort().tolist()), residual=1.0 - len(masked) / basis.rank)]
    else:
        witness = factor(seen.update, scene.weights, scene.anatomy, masked.vectors)
        groups = (
            assemble(witness, masked.positions, reuse=False, beam=scene.beam, budget=budget)
            if witness is not None
            else []
        ) or by_position(masked.positions)
    filler = _Filler(seen, pairs)
    guess = [
        GuessedSequence(
            filler.fill({int(masked.positions[i]): int(masked.tokens[i]) for i in group.members}),
            confidence=confidence_of(group),
        )
        for group in groups
    ]
    facts = {"candidates": float(len(pairs)), "explained": float(len(masked))}
    return Reconstruction(tuple(guess), facts=facts)


class _Filler:
    """Completes a sentence some of whose positions were not found: public tokens first, else the nearest candidate."""

    def __init__(self, seen: Observation, pairs: Candidates) -> None:
        self._start = dict(enumerate(seen.facts.vocabulary.starts_with))
        self._nearest: dict[int, int] = {}
        for token, position in zip(pairs.tokens.tolist(), pairs.positions.tolist(), strict=True):
            self._nearest.setdefault(position, token)

    def fill(self, found: Mapping[int, int]) -> tuple[int, ...]:
        """Return the token ids of positions 0 to the last one found."""
        return tuple(
            found.get(p, self._start.get(p, self._nearest.get(p, next(iter(found.values())))))
            for p in range(max(found) + 1)
        )
