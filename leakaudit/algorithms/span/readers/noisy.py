"""Reader for noisy updates: no pair lies exactly in the span.

This is the effect of noise, rounding, pruning and updates of signs. Each step has a module of its own:

1. `subspace.soft_span_of`: directions of the update, each weighted by its share of signal.
2. `word_scores`: a score for every word at every position, and the likely lengths (`sentence_frame`).
3. `length_selection`: first sentences, at the best lengths.
4. `hypothesis_search`: each sentence is simulated, and changed (`sentence_moves`) as long as changes explain more of
   the update.
5. `explained_signal`: the own score is the share of the signal that the best sentence explains, times the probability
   that it beats the next best one.

Nothing is tested against a threshold, so nothing is proved. One sentence is returned, whatever the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from leakaudit.algorithms.span.explained_signal import ExplainedSignal
from leakaudit.algorithms.span.hypothesis_search import (
    Hypothesis,
    Neighbours,
    SearchResult,
    can_simulate,
    labels_of,
    local_search,
)
from leakaudit.algorithms.span.length_selection import LengthSelection
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.reachability import PairReach, ranked_reach
from leakaudit.algorithms.span.sentence_moves import SentenceMoves
from leakaudit.algorithms.span.subspace import soft_span_of
from leakaudit.algorithms.span.word_scores import WordScores
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction

HIGHEST = 0.99
"""Own score of a sentence that explains everything.
Our choice: 1 is kept for proofs."""

MOST_SIMULATED = 400
"""Most sentences that one search simulates, so that a search without success ends.
Our choice; see docs/decisions/span_constants.md for its cost."""

WIDTHS = (6, 16, 64)
"""Tokens per position that are tried from each score; if no change improves, the next width is used.
Chosen on training sentences; see docs/decisions/span_constants.md."""


def fits(problem: SpanProblem) -> bool:  # noqa: ARG001  every reader takes the problem
    """Say yes: words can be ranked against every update."""
    return True


def read(problem: SpanProblem) -> Reconstruction:
    """Return the best sentence found, with its score.

    If the budget ends, it is the best sentence so far.
    """
    level = problem.seen.noise_level
    declared = level if level.largest > 0.0 else None
    span = soft_span_of(problem.seen.update, problem.anatomy, declared)
    if not len(span.weights):
        return Reconstruction(sequences=(), diagnostics={"positions": 0.0})
    simulates = can_simulate(problem.seen) and not problem.budget.exhausted()
    signal = ExplainedSignal(problem, span, declared)
    scores = WordScores.of(problem, span)
    starts = LengthSelection(problem, scores, signal).starts()
    if not simulates or not signal.compared:
        guess = GuessedSequence(starts[0].token_ids, own_score=0.0)
        found = {"positions": float(len(guess.token_ids))}
    else:
        guess, found = _searched(problem, scores, signal, starts)
    return Reconstruction((guess,), diagnostics=found, reach=_reach(problem, scores))


def _searched(
    problem: SpanProblem, scores: WordScores, signal: ExplainedSignal, starts: Sequence[Hypothesis]
) -> tuple[GuessedSequence, dict[str, float]]:
    """Return the best sentence that a search finds, and its diagnostics."""
    moves = SentenceMoves(scores, signal, labels_of(problem.seen))
    first = _best_of(problem, signal, moves, starts)
    final = _search(
        problem, signal, moves, first.best, WIDTHS, lambda base: [*moves.other_lengths(base), *moves.jumps(base)]
    )
    explained, margin = signal.share(final.best), signal.margin(final)
    beats_next = NormalDist().cdf(margin) * 2 - 1
    found = {
        "positions": float(len(final.best.token_ids)),
        "directions": float(signal.directions),
        "simulated": float(first.simulated + final.simulated),
        "explained": explained,
        "margin": margin,
    }
    return GuessedSequence(final.best.token_ids, own_score=HIGHEST * explained * beats_next), found


def _best_of(
    problem: SpanProblem, signal: ExplainedSignal, moves: SentenceMoves, starts: Sequence[Hypothesis]
) -> SearchResult:
    """Return the best result of short searches from every start.

    Its `simulated` counts the sentences of all searches.
    """
    best, simulated = None, 0
    for start in starts:
        found = _search(problem, signal, moves, start, WIDTHS[:1], moves.jumps)
        simulated += found.simulated
        if best is None or found.score > best.score:
            best = found
        if problem.budget.exhausted() or signal.is_explained(best.best):
            break
    assert best is not None
    best.simulated = simulated
    return best


def _search(
    problem: SpanProblem,
    signal: ExplainedSignal,
    moves: SentenceMoves,
    start: Hypothesis,
    widths: Sequence[int],
    jumps: Callable[[Hypothesis], Sequence[Hypothesis]],
) -> SearchResult:
    return local_search(
        signal.simulation,
        start,
        Neighbours(jumps, moves.propose, widths),
        done=signal.is_explained,
        most=MOST_SIMULATED,
        budget=problem.budget,
        layers=signal.compared,
    )


@dataclass(frozen=True)
class _Ranked:
    """The pairs that were tried."""

    tokens: Tensor
    positions: Tensor


def _reach(problem: SpanProblem, scores: WordScores) -> PairReach | None:
    """Return which pairs the search could have tried.

    These are the best words by the widest of `WIDTHS`, and the frame's tokens at every position.
    """
    width = min(WIDTHS[-1], problem.stage.vocabulary)
    tokens = scores.soft.topk(width, dim=0).indices  # (W, P)
    frame = torch.tensor([*scores.frame.before, *scores.frame.after], dtype=torch.long, device=tokens.device)
    tokens = torch.cat([tokens, frame[:, None].expand(-1, tokens.shape[1])])
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    return ranked_reach(problem, _Ranked(tokens.flatten(), positions.flatten()))
