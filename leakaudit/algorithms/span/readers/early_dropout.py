"""Reader for dropout before the first normalisation, as in GPT-2.

The input of the attention is x = g (u - mean u) / s + c with u = e m / (1 - p). Here e is the sum of token and position
vector, m the unknown mask, g and c the normalisation's gain and shift, and s its standard deviation. So the masked
vector is

    u = s (x / g) - s (c / g) + mean(u) 1.

It lies in the span of three things: the update's rows divided by g, the vector c / g, and the vector of ones. This span
has two dimensions more than there are tokens. `mask_regression` finds u in it. From u follows x, and `grouping` sorts
the inputs x into sequences. (Own derivation.)

Masks of later layers stay unknown, so nothing behind the first attention can be computed exactly. So there is no prefix
test and no proof. A language model's last token is only a target; it is guessed from the last layer's update
(`last_tokens`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from leakaudit.algorithms.span.candidates import Candidates, blocks, join
from leakaudit.algorithms.span.grouping import group_inputs, own_score_of
from leakaudit.algorithms.span.last_tokens import likely_last_tokens
from leakaudit.algorithms.span.mask_regression import SEARCH_SHARE, find_masked
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.unnormalised_inputs import SumScan, widened
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction

KEEP = 32
"""Tokens per position that are fitted.
Chosen on training sentences; see docs/decisions/span_constants.md."""

EMPTY_POSITIONS = 16
"""Positions beyond the longest possible sequence; they show how near a token is by chance.
Our choice."""

NEARER = 3.0
"""Standard deviations below chance at which a position holds a token.
Our choice; see docs/decisions/span_constants.md."""

SLACK = 3
"""Positions that are tried behind the last one that holds a token. Our choice."""


def fits(problem: SpanProblem) -> bool:
    """Say whether dropout acts before the first normalisation."""
    masked = problem.has_exact_span and problem.dropout > 0 and not problem.stage.position_free
    return masked and bool(problem.anatomy.dropout_before)


def read(problem: SpanProblem) -> Reconstruction | None:
    """Return the sequences found behind masks before the normalisation, or None."""
    stage, norm = problem.stage, problem.stage.norm
    if norm is None or not stage.additive or stage.position_free:
        return None
    basis = widened(problem.basis.vectors, norm)
    pairs = _nearest(problem, basis)
    masked = find_masked(
        basis, pairs, problem.dropout, problem.rng, problem.budget.part(SEARCH_SHARE), frequent=problem.special
    )
    diagnostics = {"candidates": float(len(pairs)), "explained": float(len(masked))}
    if len(masked) == 0:
        return None
    positions, inputs = masked.positions, norm.apply(masked.vectors)
    guess = [
        GuessedSequence(tuple(masked.tokens[list(group.members)].tolist()), own_score=own_score_of(group))
        for group in group_inputs(problem, positions, inputs)
    ]
    return Reconstruction(_with_last_tokens(problem, guess), diagnostics=diagnostics)


def _with_last_tokens(problem: SpanProblem, guess: Sequence[GuessedSequence]) -> tuple[GuessedSequence, ...]:
    """Append a language model's last tokens; no attention input shows them."""
    last = likely_last_tokens(problem.seen, [sequence.token_ids for sequence in guess], problem.budget)
    if last is None:
        return tuple(guess)
    return tuple(
        replace(sequence, token_ids=(*sequence.token_ids, token), own_score=sequence.own_score * sure)
        for sequence, (token, sure) in zip(guess, last, strict=True)
    )


def _nearest(problem: SpanProblem, basis: Tensor) -> Candidates:
    """Return the nearest tokens at every position that a sequence may reach.

    A sequence has no more positions than the batch has tokens, R. So positions from R on show how near the nearest token
    is by chance. The last position whose nearest token is clearly nearer than that ends the longest sequence. The inputs
    of the candidates are the vectors before the normalisation, as `find_masked` needs them.
    """
    rank, longest = problem.basis.rank, problem.stage.max_length
    scan = SumScan(problem.stage, basis, problem.tokens, min(problem.keep, KEEP))
    parts = [scan.block(start, stop) for start, stop in blocks(min(longest, rank + EMPTY_POSITIONS))]
    pairs = join(parts)
    nearest = torch.full((int(pairs.positions.max()) + 1,), torch.inf, dtype=torch.float64, device=basis.device)
    nearest = nearest.scatter_reduce(0, pairs.positions, pairs.distance, reduce="amin")
    chance = nearest[rank:]
    last = min(rank, len(nearest)) - 1
    if len(chance) >= EMPTY_POSITIONS // 2:
        occupied = nearest[:rank] < chance.mean() - NEARER * chance.std()
        last = min(last, int(occupied.nonzero().max()) + SLACK if bool(occupied.any()) else last)
    return pairs.take((pairs.positions <= last).nonzero().flatten())
