"""Reader for encoders without dropout: every true pair lies exactly in the span.

`candidates` finds the pairs in the span at all positions, and `sequence_assembly` assembles them to sequences.
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
    """Return the sequences that the pairs in the span form; None without any pair.

    The sequences are proved if that is possible.
    """
    # A span holds no more tokens at one position than it has directions, except by coincidence.
    problem = replace(problem, keep=max(problem.keep, problem.basis.rank + 1))
    pairs = problem.scan()
    while _crowded(pairs, problem.basis.rank, problem.keep) and problem.keep < problem.stage.vocabulary:
        problem = replace(problem, keep=4 * problem.keep)
        pairs = problem.scan()
    return read_pairs(problem, pairs, problem.basis.rank)


def _crowded(pairs: Candidates, rank: int, keep: int) -> bool:
    """Return whether at some position all `keep` nearest tokens lie in the span.

    Then there may be more.
    """
    inside = pairs.positions[: count_inside(pairs.distance, rank)]
    return len(inside) > 0 and int(inside.bincount().max()) >= keep
