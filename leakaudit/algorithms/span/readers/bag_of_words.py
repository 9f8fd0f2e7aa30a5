"""Reader for inputs without positions: words without order.

With rotary or relative positions every occurrence of a token has the same input, so the span of the update is that of
the distinct tokens of the batch. A decoder's later layers give the order (`decoder`). An encoder has no prefixes, and
its later inputs depend on the whole sequence at once.
"""

from __future__ import annotations

import torch
from scipy import special
from torch import Tensor

from leakaudit.algorithms.above_noise import standing_out
from leakaudit.algorithms.span.candidates import Scan
from leakaudit.algorithms.span.mask_regression import find_masked
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.reachability import bag_of_words_reach
from leakaudit.algorithms.span.residuals import ROUNDING_UNITS, ResidualScale
from leakaudit.algorithms.span.subspace import stacked_update
from leakaudit.algorithms.span.unnormalised_inputs import SumScan, widened
from leakaudit.plugins.attack_protocol import Reconstruction

CANDIDATES = 2
"""Candidate tokens for the mask regression, per direction of the span.
Our choice: there is one direction for every occurrence of a word."""

FALSE_WORDS = 1.0
"""Tokens that may be named by chance in a noisy update, if other tokens are above chance.
Our choice, as in `embedding-rows`: with noise alone, 99 of 100 updates name no token."""


def fits(problem: SpanProblem) -> bool:
    """Say whether attention inputs carry no position."""
    return problem.stage.position_free


def read(problem: SpanProblem) -> Reconstruction:
    """Return the words of the batch without special tokens, in ascending order of ids."""
    if problem.basis.noisy:
        tokens = _standing_out(problem)
    elif problem.dropout:
        tokens = _masked(problem)
    else:
        tokens = _inside(problem)
    around = problem.seen.facts.vocabulary.wordless_ids
    ids = sorted({token for token in tokens.tolist() if token not in around})
    return Reconstruction(
        tokens=tuple(ids), diagnostics={"candidates": float(len(tokens))}, reach=bag_of_words_reach(ids)
    )


def _scan(problem: SpanProblem, keep: int) -> Scan:
    return Scan(problem.stage, problem.basis.vectors, problem.tokens, keep, tuple(problem.special))


def _inside(problem: SpanProblem) -> Tensor:
    """Return the tokens whose input lies in the span."""
    pairs = _scan(problem, max(problem.keep, problem.basis.rank + 32)).block(0, 1)
    scale = ResidualScale.of(stacked_update(problem.seen.update, problem.anatomy))
    return pairs.tokens[scale(pairs.inputs) < ROUNDING_UNITS]


def _masked(problem: SpanProblem) -> Tensor:
    """Return the tokens whose input is found behind a mask.

    Masks make all occurrences of a token distinct, so a token may be returned several times.
    """
    keep, vectors = CANDIDATES * max(problem.keep, problem.basis.rank), problem.basis.vectors
    norm = problem.stage.norm
    if not problem.anatomy.dropout_before:
        pairs = _scan(problem, keep).block(0, 1)
    elif norm is not None and problem.stage.additive:
        vectors = widened(vectors, norm)
        pairs = SumScan(problem.stage, vectors, problem.tokens, keep).block(0, 1)
    else:
        return torch.zeros(0, dtype=torch.long)
    pairs = pairs.take(pairs.distance.argsort())
    return find_masked(vectors, pairs, problem.dropout, problem.rng, problem.budget, frequent=problem.special).tokens


def _standing_out(problem: SpanProblem) -> Tensor:
    """Return the tokens that lie nearer to a noisy span than chance explains."""
    scan, size = _scan(problem, problem.stage.vocabulary), (len(problem.basis.vectors), problem.basis.vectors.shape[1])
    if not problem.stage.additive:
        pairs = scan.block(0, 1)
        return pairs.tokens[_stands_out(pairs.distance.square(), *size)]
    outside = scan.outside_share(torch.zeros(1, dtype=torch.long, device=problem.basis.vectors.device))[:, 0]
    nearer = _stands_out(outside, *size)
    return nearer.nonzero().flatten() if problem.tokens is None else problem.tokens[nearer]


def standing_out_words(outside: Tensor, rank: int, dimension: int) -> Tensor:
    """Return the token ids that lie nearer to a span than chance explains.

    Args:
        outside: (V,) share of each token's squared length outside the span.
        rank: directions of the span.
        dimension: D.
    """
    return _stands_out(outside, rank, dimension).nonzero().flatten()


def _stands_out(outside: Tensor, rank: int, dimension: int) -> Tensor:
    """Return (N,) booleans: whether more of a token lies in the span than by chance.

    For a random direction in D dimensions the share of its squared length in a span of rank R has the distribution
    Beta(R / 2, (D - R) / 2). At small ranks it is far from normal. Inputs are not random directions, so the distribution
    is scaled to the median share: most tokens are not in the batch, so the median describes chance.

    Args:
        outside: (N,) share of each token's squared length outside the span.
        rank: R.
        dimension: D.
    """
    inside = (1 - outside.double()).clamp_min(0.0)
    shape = (rank / 2, max(1, dimension - rank) / 2)  # of the beta distribution of such a share by chance
    statistic = inside / inside.median().clamp_min(1e-300) * float(special.betaincinv(*shape, 0.5))
    return standing_out(statistic, lambda tail: float(special.betainccinv(*shape, tail)), FALSE_WORDS)
