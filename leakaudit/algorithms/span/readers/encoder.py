"""Sentences out of a clean update, dropout off: a pair of token and position is in the span or it is not.

One sequence is its pairs, by position. In a batch, three steps repeat until nothing is left: the ledger says which pairs are real
(`span_ledger`), attention says which belong together (`span_assembly`), and each sequence that is put together is simulated alone
(`span_batch`): where its part of the update agrees it is certain, and taken out, so that the next round reads a smaller batch.
What does not agree is completed by its context (`span_climb`) or, where that cannot be told, repaired (`span_repair`). Where
the model's loss has no classes, sequences are believed by their attention alone.
"""

from __future__ import annotations

from dataclasses import replace

from leakaudit.algorithms.span.candidates import Candidates
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.sequence_assembly import count_inside, read_pairs
from leakaudit.plugins.attack_protocol import Reconstruction


def fits(problem: SpanProblem) -> bool:
    """Say whether inputs carry positions and lie in the span without dropout masks."""
    return problem.has_exact_span and not problem.dropout and not problem.stage.position_free


def read(problem: SpanProblem) -> Reconstruction | None:
    """Return what lies in the span, assembled to sentences, and proved where that is possible; None where nothing does."""
    # In general position a span holds no more tokens at one position than it has directions.
    problem = replace(problem, keep=max(problem.keep, problem.basis.rank + 1))
    pairs = problem.scan()
    while _crowded(pairs, problem.basis.rank, problem.keep) and problem.keep < problem.stage.vocabulary:
        problem = replace(problem, keep=4 * problem.keep)
        pairs = problem.scan()
    return read_pairs(problem, pairs, problem.basis.rank)


def _crowded(pairs: Candidates, rank: int, keep: int) -> bool:
    """Return whether at some position all of the `keep` nearest tokens lie in the span, so that there may be more."""
    inside = pairs.positions[: count_inside(pairs.distance, rank)]
    return len(inside) > 0 and int(inside.bincount().max()) >= keep
