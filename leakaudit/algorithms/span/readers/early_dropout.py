"""Sentences where dropout sits before the first normalisation, as in GPT-2: masked token and position vectors, then LayerNorm.

The input of the attention is x = g (u - mean u) / s + c with u = e m / (1 - p): e the sum of token and position vector, m the
unknown mask. So the masked vector is

    u = s (x / g) - s (c / g) + mean(u) 1,

in the span of the update's rows over g, of c / g and of the vector of ones: two dimensions more than there are tokens, and the
same regression against gross errors as behind a BERT's dropout (`span_dropout`) finds it. With u known, x is computed, and the
sequences follow from who attends to whom (`span_assembly`). (Own derivation.)

Masks of later layers stay unknown, so nothing behind the first attention can be computed exactly: no prefix check and no proof. A
language model's last token, which is only a target, is guessed from the last layer's update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from leakaudit.algorithms.span.candidates import Candidates, blocks, join
from leakaudit.algorithms.span.grouping import confidence_of, group_inputs
from leakaudit.algorithms.span.last_tokens import likely_last_tokens
from leakaudit.algorithms.span.mask_regression import SEARCH_SHARE, find_masked
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.unnormalised_inputs import SumScan, widened
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction

KEEP = 32
"""Tokens per position that are fitted. Measured on a train split (B = 4, p = 0.1): true ones within the nearest 8."""


EMPTY_POSITIONS = 16
"""Positions looked at that cannot hold anything."""


NEARER = 3.0
"""Standard deviations below chance from which a position holds a token, and SLACK further positions are tried. Our choice; as
measured, nearest tokens at 0.15 to 0.33 where there is one and 0.34 to 0.41 by chance, at 29 tokens in 384 dimensions."""


SLACK = 3


def fits(problem: SpanProblem) -> bool:
    """Say whether dropout acts before the first normalisation."""
    masked = problem.has_exact_span and problem.dropout > 0 and not problem.stage.position_free
    return masked and bool(problem.anatomy.dropout_before)


def read(problem: SpanProblem) -> Reconstruction | None:
    """Return what was found behind dropout masks before the normalisation, assembled; None where nothing was found."""
    stage, norm = problem.stage, problem.stage.norm
    if norm is None or not stage.additive or stage.position_free:
        return None
    basis = widened(problem.basis.vectors, norm)
    pairs = _nearest(problem, basis)
    masked = find_masked(
        basis, pairs, problem.dropout, problem.rng, problem.budget.part(SEARCH_SHARE), frequent=problem.special
    )
    facts = {"candidates": float(len(pairs)), "explained": float(len(masked))}
    if len(masked) == 0:
        return None
    positions, inputs = masked.positions, norm.apply(masked.vectors)
    guess = [
        GuessedSequence(tuple(masked.tokens[list(group.members)].tolist()), confidence=confidence_of(group))
        for group in group_inputs(problem, positions, inputs)
    ]
    return Reconstruction(_with_last_tokens(problem, guess), diagnostics=facts)


def _with_last_tokens(problem: SpanProblem, guess: Sequence[GuessedSequence]) -> tuple[GuessedSequence, ...]:
    """Append a language model's last tokens, which are in no attention input."""
    last = likely_last_tokens(problem.seen, [sequence.token_ids for sequence in guess], problem.budget)
    if last is None:
        return tuple(guess)
    return tuple(
        replace(sequence, token_ids=(*sequence.token_ids, token), confidence=sequence.confidence * sure)
        for sequence, (token, sure) in zip(guess, last, strict=True)
    )


def _nearest(problem: SpanProblem, basis: Tensor) -> Candidates:
    """Return the nearest tokens at every position that a sequence may reach, by the plain residual.

    A sequence has no more positions than there are tokens in the batch, R, so positions from R on show how near the nearest
    token comes by chance; the last position that is clearly nearer ends the longest sequence.

    The candidates' inputs are the vectors before the normalisation, as `find_masked` is to fit them.
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
