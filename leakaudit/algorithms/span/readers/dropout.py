"""Reader for dropout between the last normalisation and the attention, as in BERT.

Every real token has a mask of its own, so the rank of the update is the number of tokens. `mask_regression` finds the
masked inputs, and `grouping` sorts them into sequences by attention. Masks of later layers are unknown, so no guess is
proved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from leakaudit.algorithms.span.attention_evidence import Group
from leakaudit.algorithms.span.candidates import Candidates, Scan, blocks, join
from leakaudit.algorithms.span.grouping import group_inputs, own_score_of
from leakaudit.algorithms.span.mask_regression import SEARCH_SHARE, Masked, MaskSearch
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.reachability import dropout_reach
from leakaudit.client.observation import Observation
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction
from leakaudit.plugins.budget import Budget

CROWDED, MORE = 0.2, 4
"""If the rank is above CROWDED times the hidden size, MORE times as many tokens are tried per position.
Chosen on training sentences; see docs/decisions/span_constants.md."""


def fits(problem: SpanProblem) -> bool:
    """Say whether dropout acts between the last normalisation and the attention."""
    masked = problem.has_exact_span and problem.dropout > 0 and not problem.stage.position_free
    return masked and not problem.anatomy.dropout_before


def read(problem: SpanProblem) -> Reconstruction | None:
    """Return the sequences found behind dropout masks, or None if no input was found."""
    seen, budget = problem.seen, problem.budget
    time = budget.part(SEARCH_SHARE)
    pairs, search = _search(problem, time)
    masked = search.result()
    groups = _sequences(problem, masked)
    if (gaps := _gaps(groups, masked)) and not search.complete():
        search.look_again(
            pairs.take(torch.isin(pairs.positions, torch.tensor(gaps).to(pairs.positions)).nonzero().flatten())
        )
        if search.count() > len(masked):
            masked = search.result()
            groups = _sequences(problem, masked)
    reach = dropout_reach(problem, pairs, masked, all_tried=not time.exhausted())
    if len(masked) == 0:
        return None
    filler = _Filler(seen, pairs)
    guess = [
        GuessedSequence(
            filler.fill({int(masked.positions[i]): int(masked.tokens[i]) for i in group.members}),
            own_score=own_score_of(group),
        )
        for group in groups
    ]
    diagnostics = {"candidates": float(len(pairs)), "explained": float(len(masked))}
    return Reconstruction(tuple(guess), diagnostics=diagnostics, reach=reach)


def _sequences(problem: SpanProblem, masked: Masked) -> list[Group]:
    """Sort inputs into sequences that end as the tokenizer ends them."""
    if len(masked) == 0:
        return []
    ends_with = problem.seen.facts.vocabulary.ends_with
    closing = masked.tokens == ends_with[-1] if ends_with else None
    if closing is not None and not bool(closing.any()):
        closing = None
    return group_inputs(problem, masked.positions, masked.vectors, problem.basis.vectors, closing)


def _gaps(groups: Sequence[Group], masked: Masked) -> list[int]:
    """Return the positions at which a sequence lacks an input."""
    lacking: set[int] = set()
    for group in groups:
        has = {int(masked.positions[row]) for row in group.members}
        lacking |= set(range(max(has))) - has
    return sorted(lacking)


def _search(problem: SpanProblem, budget: Budget) -> tuple[Candidates, MaskSearch]:
    """Search blocks of positions for masked inputs, then search further copies.

    The search of blocks ends at a block without any input, or if there is an input for each direction of the span.

    Returns:
        All candidates, and the search with its masks.
    """
    rank, width = problem.basis.vectors.shape
    keep = problem.keep * (MORE if rank > CROWDED * width else 1)
    scan = Scan(problem.stage, problem.basis.vectors, problem.tokens, keep, tuple(problem.special))
    search = MaskSearch(problem.basis.vectors, problem.dropout, problem.rng, budget, problem.special)
    parts = []
    for start, stop in blocks(problem.stage.max_length):
        parts.append(scan.block(start, stop))
        if (not search.consider(parts[-1]) and (search.count() or start > rank)) or search.complete():
            break
    search.copies()
    return join(parts), search


class _Filler:
    """Fills the positions of a sentence that were not found."""

    def __init__(self, seen: Observation, pairs: Candidates) -> None:
        self._start = dict(enumerate(seen.facts.vocabulary.starts_with))
        self._nearest: dict[int, int] = {}
        for token, position in zip(pairs.tokens.tolist(), pairs.positions.tolist(), strict=True):
            self._nearest.setdefault(position, token)

    def fill(self, found: Mapping[int, int]) -> tuple[int, ...]:
        """Return the token ids of positions 0 to the last one found.

        A missing token is filled with the one that the tokenizer puts there, or else with the nearest candidate.
        """
        return tuple(
            found.get(p, self._start.get(p, self._nearest.get(p, next(iter(found.values())))))
            for p in range(max(found) + 1)
        )
