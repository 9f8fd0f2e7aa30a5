"""`span`: whole sentences by linear algebra, from the update of one block's query, key and value layers.

Four stages, one module each: the subspace of the inputs (`span_basis`), which tokens at which positions lie in it
(`span_candidates`), the same behind dropout masks (`span_dropout`), and which of them form a sentence (`span_assembly`).
What comes out is re-simulated where that is possible (`proof`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakaudit.anatomy import Anatomy, InputStage, anatomy_of, input_stage_of
from leakaudit.attacks.embedding_rows import EmbeddingRows
from leakaudit.attacks.proof import Proof, prove
from leakaudit.attacks.reconstruction import (
    APPLIES,
    Applicability,
    GuessedSequence,
    Reconstruction,
    not_applicable,
)
from leakaudit.attacks.span_assembly import COMPLETE, Group, assemble, factor
from leakaudit.attacks.span_basis import Basis, span_of, stacked_update
from leakaudit.attacks.span_candidates import EMPTY_BLOCKS, Candidates, Scan, blocks, join
from leakaudit.attacks.span_dropout import find_masked
from leakaudit.budget import Budget
from leakaudit.errors import AnatomyError
from leakaudit.registry import attack
from leakaudit.snapshot import Observation

FARTHEST_INSIDE = 0.03
"""Distance beyond which no pair counts as in the span of a clean update, however the others rank. Measured: true pairs at 1e-7
to 1e-6 in a pretrained encoder, up to 5e-4 in untrained tiny ones, whose weak directions drown in rounding; the nearest false
pair at 1e-1 and more."""


@attack("span")
@dataclass(frozen=True)
class Span:
    """Recover every sentence of the batch from the first block's attention update.

    Source: the span check of DAGER (Petrov et al., NeurIPS 2024, Sec. 4); rank by spectral gap, stacked projections, the
    whole-vocabulary product, dropout, assembly and proof are ours (see the modules).
    """

    goal: ClassVar[Literal["text", "words", "labels"]] = "text"
    source: ClassVar[str] = "Petrov et al., DAGER, NeurIPS 2024, Sec. 4; dropout, assembly and proof: own derivation"
    threat_model: ClassVar[str] = (
        "sees the update of one block's query, key and value layers and the public weights; works while the batch has fewer "
        "tokens than the hidden size; needs no labels, lengths, batch size or embedding update"
    )

    candidates: int = 64
    """Tokens per position that are checked in float64. Our choice: true tokens were always within the nearest 105 of 30,522
    with dropout on, and within the nearest few without."""
    beam: int = 8
    """Hypotheses kept while a sentence is assembled."""
    max_positions: int = 0
    """Positions to scan; 0 takes the model's own limit."""

    def applies(self, seen: Observation) -> Applicability:
        """Look for the parts, a non-zero update and an input that carries positions."""
        try:
            anatomy = anatomy_of(seen.model)
            stage = input_stage_of(seen.model, self._positions(seen))
        except AnatomyError as error:
            return not_applicable(str(error))
        present = [p for p in anatomy.projections if p.weight in seen.update]
        if not present:
            return not_applicable(
                f"none of the layers that read the first attention input is shared: {_names(anatomy)} are frozen or withheld"
            )
        if not any(bool(seen.update[p.weight].any()) for p in present):
            return not_applicable(f"the update of {_names(anatomy)} is all zero")
        if stage.position_free:
            return not_applicable(
                "the first block's inputs carry no positions (rotary or relative), so it names tokens but not their order; "
                "reading order from later blocks is not implemented"
            )
        basis = span_of(stacked_update(seen.update, anatomy))
        damaged = bool(seen.facts.defenses) or seen.facts.dtype != "float32"
        if basis.noisy and not damaged:
            return not_applicable(
                f"the update fills all directions of the hidden size {anatomy.hidden}, and no declared defence or low precision "
                "explains it: the batch has at least as many tokens, and the span is everything"
            )
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Run the four stages."""
        anatomy = anatomy_of(seen.model)
        stage = input_stage_of(seen.model, self._positions(seen))
        basis = span_of(stacked_update(seen.update, anatomy))
        tokens = _evidence_tokens(seen, rng, budget)
        rate = _input_dropout(seen, anatomy)
        facts = {"rank": float(basis.rank), "gap": basis.gap, "hidden": float(anatomy.hidden)}
        if basis.noisy or (rate and anatomy.dropout_before):
            found = self._ranked(stage, basis, tokens, budget)
        elif rate:
            found = self._behind_masks(seen, anatomy, stage, basis, tokens, rate, rng, budget)
        else:
            found = self._clean(seen, anatomy, stage, basis, tokens, budget)
        return replace(found, facts={**facts, **found.facts}, stop="budget" if budget.exhausted() else found.stop)

    def _positions(self, seen: Observation) -> int:
        longest = seen.facts.vocabulary.max_length
        return min(self.max_positions, longest) if self.max_positions else longest

    def _clean(
        self,
        seen: Observation,
        anatomy: Anatomy,
        stage: InputStage,
        basis: Basis,
        tokens: Tensor | None,
        budget: Budget,
    ) -> Reconstruction:
        """No dropout, no damage: pairs are in the span or not."""
        pairs = _scan(stage, basis, tokens, self.candidates, _special(seen), budget)
        inside = pairs.take(torch.arange(_inside(pairs.distance, basis.rank), device=pairs.distance.device))
        facts = {"candidates": float(len(inside))}
        if len(inside) == 0:
            return replace(self._ranked(stage, basis, tokens, budget), facts=facts)
        if _one_per_position(inside.positions):
            order = inside.positions.argsort()
            guess = [GuessedSequence(tuple(inside.tokens[order].tolist()), confidence=1.0)]
            proved = prove(seen, guess, budget)
        else:
            proofs: list[Proof] = []

            # Pairs that share token and position with true ones lie in the span as well, and assemble to nothing complete.
            def proves(groups: list[Group]) -> bool:
                proofs.append(prove(seen, _sequences(groups, inside.tokens), budget))
                return all(s.proved for s in proofs[-1].sequences)

            groups = self._assembled(seen, anatomy, inside.inputs, inside.positions, budget, reuse=True, enough=proves)
            known = proofs and all(s.proved for s in proofs[-1].sequences)
            proved = proofs[-1] if known else prove(seen, _sequences(groups, inside.tokens), budget)
        return Reconstruction(sequences=proved.sequences, label_counts=proved.label_counts, facts=facts | proved.facts)

    def _behind_masks(
        self,
        seen: Observation,
        anatomy: Anatomy,
        stage: InputStage,
        basis: Basis,
        tokens: Tensor | None,
        rate: float,
        rng: torch.Generator,
        budget: Budget,
    ) -> Reconstruction:
        """Dropout after the normalisation: every real token has a mask of its own, so the rank is their number."""
        special = _special(seen)
        pairs = _scan(stage, basis, tokens, self.candidates, special, budget)
        masked = find_masked(basis.vectors, pairs, rate, rng, budget.part(SEARCH_SHARE), frequent=special)
        facts = {"candidates": float(len(pairs)), "explained": float(len(masked))}
        if len(masked) == 0:
            return replace(self._ranked(stage, basis, tokens, budget), facts=facts)
        if len(torch.unique(masked.positions)) == len(masked):  # no position twice: one sentence
            groups = [Group(tuple(masked.positions.argsort().tolist()), residual=1.0 - len(masked) / basis.rank)]
        else:
            groups = self._assembled(seen, anatomy, masked.vectors, masked.positions, budget, reuse=False)
        filler = _Filler(seen, pairs)
        guess = [
            GuessedSequence(
                filler.fill({int(masked.positions[i]): int(masked.tokens[i]) for i in group.members}),
                confidence=_confidence(group),
            )
            for group in groups
        ]
        return Reconstruction(tuple(guess), facts=facts)

    def _assembled(
        self,
        seen: Observation,
        anatomy: Anatomy,
        inputs: Tensor,
        positions: Tensor,
        budget: Budget,
        *,
        reuse: bool,
        enough: Callable[[list[Group]], bool] = lambda groups: False,
    ) -> list[Group]:
        weights = {name: parameter.detach() for name, parameter in seen.model.named_parameters()}
        witness = factor(seen.update, weights, anatomy, inputs)
        if witness is None:
            return _by_position(positions)
        groups = assemble(witness, positions, reuse=reuse, beam=self.beam, budget=budget, enough=enough)
        return groups or _by_position(positions)

    def _ranked(self, stage: InputStage, basis: Basis, tokens: Tensor | None, budget: Budget) -> Reconstruction:
        """Damaged update: no pair lies in the span, so rank them; how far the best stands out decides the length."""
        scan = Scan(stage, basis.vectors, tokens, self.candidates)
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


def _names(anatomy: Anatomy) -> str:
    return ", ".join(p.weight for p in anatomy.projections)


def _evidence_tokens(seen: Observation, rng: torch.Generator, budget: Budget) -> Tensor | None:
    """Return the token ids that the word-embedding update names, with all special ones, or None where it names none."""
    rows = EmbeddingRows()
    if not rows.applies(seen):
        return None
    named = rows(seen, rng, budget).tokens or ()
    vocabulary = seen.facts.vocabulary
    special = vocabulary.wordless_ids
    return torch.tensor(sorted({*named, *special}), device=next(seen.model.parameters()).device)


def _input_dropout(seen: Observation, anatomy: Anatomy) -> float:
    """Return the rate of the dropout that attention inputs passed, 0 in eval mode."""
    if not seen.facts.training_mode:
        return 0.0
    return max(
        (seen.facts.dropout.get(name, 0.0) for name in (*anatomy.dropout_before, *anatomy.dropout_after)), default=0.0
    )


def _special(seen: Observation) -> frozenset[int]:
    """Return the ids that the tokenizer puts around every text: they are in every sequence, so they are always tested."""
    return seen.facts.vocabulary.surrounding_ids


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


def _scan(
    stage: InputStage, basis: Basis, tokens: Tensor | None, keep: int, always: frozenset[int], budget: Budget
) -> Candidates:
    """Scan positions until candidates run out: until two blocks in a row hold nothing that stands out of the rest."""
    scan = Scan(stage, basis.vectors, tokens, keep, tuple(always))
    parts: list[Candidates] = []
    empty = 0
    for start, stop in blocks(stage.max_length):
        block = scan.block(start, stop)
        # The last block seen so far without anything near is the measure of "far".
        far = float(block.distance.median())
        parts.append(block)
        near = float(block.distance.min())
        empty = empty + 1 if near > STANDS_OUT * far else 0
        # A sentence has no more positions than the span has directions.
        if empty >= EMPTY_BLOCKS or start > basis.rank + 16 or budget.exhausted():
            break
    return join(parts)


SEARCH_SHARE = 0.7
"""Share of the time left that the regressions may take. Our choice: assembly needs a tenth of theirs where both finish, and an
attack that found tokens but has no time to put them together would return nothing."""

STANDS_OUT = 0.8
"""A block of positions whose nearest pair is not below this share of its median holds nothing. Measured on a train split with
dropout 0.1: blocks with true pairs reach 0.6 or less, blocks without stay above 0.85."""


def _one_per_position(positions: Tensor) -> bool:
    """Return whether there is exactly one pair at every position from 0: then it is one sentence, and ordered."""
    ordered = positions.sort().values
    return bool(torch.equal(ordered, torch.arange(len(ordered), device=ordered.device)))


def _by_position(positions: Tensor) -> list[Group]:
    """Without attention evidence: the first pair at every position, as one guess that explains nothing."""
    first: dict[int, int] = {}
    for index, position in enumerate(positions.tolist()):
        first.setdefault(position, index)
    return [Group(tuple(first[p] for p in sorted(first)), residual=1.0)]


def _confidence(group: Group) -> float:
    """Return 1 less the residual for a group that explains its seed, and at most a half for one that does not."""
    share = min(1.0, max(0.0, 1.0 - group.residual))
    return share if group.residual < COMPLETE else 0.5 * share


def _sequences(groups: list[Group], tokens: Tensor) -> list[GuessedSequence]:
    """Turn assembled groups into guesses; a complete one is as sure as its residual is small."""
    return [
        GuessedSequence(tuple(tokens[list(group.members)].tolist()), confidence=_confidence(group)) for group in groups
    ]


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
