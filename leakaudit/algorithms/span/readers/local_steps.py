"""Reader for a difference of weights after local SGD steps (federated averaging).

Divided by the learning rate, the difference is the sum of the gradients of all local steps. To first order in the
learning rate its row space is the span of the inputs of all local batches. The main difficulty is not the change of the
weights during the steps but the number format. A client's weights are float32, and every step rounds them. The smaller
the learning rate, the larger is this error beside the gradient. Its size is known: one step adds an error that is
uniform within half a unit in the last place of the weight.

So the words are found first (`matching_pursuit`); everything below that error counts as zero. Then it is tried whether
they form one text, with one word at each position. If not, the pairs of these words and all positions are tested against
the span, in units of the expected error (`residuals`), and the pairs that pass are assembled to sequences
(`sequence_assembly`). (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from leakaudit.algorithms.resimulation import prove
from leakaudit.algorithms.span.candidates import Candidates
from leakaudit.algorithms.span.matching_pursuit import Words, find_words
from leakaudit.algorithms.span.order_refinement import refined
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.reachability import bag_of_words_reach
from leakaudit.algorithms.span.sequence_assembly import read_inside
from leakaudit.algorithms.span.single_text import arranged, residual_scale
from leakaudit.client.facts import PublicFacts
from leakaudit.models.structure import Anatomy
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction

LONGEST = 64
"""Largest number of positions that a text is assumed to have.
Our choice: every position leaves one dimension less to find words in."""

MORE_POSITIONS = 12
"""Most positions of one text beyond the number of its distinct words.
Our choice: words repeat."""

ARRANGED = 0.9
"""Own score of a text that explains the update and is not proved. Our choice."""

INSIDE = 1.5
"""Largest distance, in units of the expected error, at which a pair is in the span.
Chosen on training sentences; see docs/decisions/span_constants.md."""


def rounding_error(weight: Tensor, facts: PublicFacts) -> float:
    """Return the standard deviation of the error that rounding adds to an entry.

    It is in the update's units, and 0 for a gradient. A step adds an error that is uniform within half a unit in the
    last place u, so its variance is u^2 / 12. The variances of K steps add up, and the difference is divided by the
    learning rate times K.

    Args:
        weight: weights before the step.
        facts: learning rate and number of steps.
    """
    if facts.view != "delta" or not facts.learning_rate:
        return 0.0
    size = weight.detach().abs()
    unit = (torch.nextafter(size, torch.full_like(size, torch.inf)) - size).double()
    deviation = float((unit.square().mean() / 12).sqrt())
    return float(deviation / (facts.learning_rate * facts.local_steps**0.5))


def whitened_update(
    update: Mapping[str, Tensor], anatomy: Anatomy, weights: Mapping[str, Tensor], facts: PublicFacts
) -> Tensor:
    """Return (F, D) float64: the update in units of its rounding error.

    It stacks all layers that read the attention input.

    Args:
        update: parameter name -> update.
        anatomy: the layers.
        weights: parameter name -> weights before the step.
        facts: learning rate and number of steps.
    """
    readers = [*anatomy.projections, *(adapter.down for adapter in anatomy.adapters)]
    parts = [
        reader.by_output(update[reader.weight]).double() / rounding_error(weights[reader.weight], facts)
        for reader in readers
        if reader.weight in update and bool(update[reader.weight].any())
    ]
    return torch.cat(parts) if parts else torch.zeros(0, anatomy.hidden, dtype=torch.float64)


def fits(problem: SpanProblem) -> bool:
    """Say whether the update is a difference of weights after local steps of SGD."""
    optimizer = problem.seen.facts.optimizer
    sums_gradients = problem.seen.facts.update_kind in ("sgd", "momentum")
    return problem.seen.facts.view == "delta" and sums_gradients and (optimizer is None or optimizer.fresh)


def read(problem: SpanProblem) -> Reconstruction | None:
    """Return the sequences or words that a difference of weights gives, or None.

    None if no words were found, if no layer that reads the inputs is shared, or under dropout.
    """
    seen = problem.seen
    rows = whitened_update(seen.update, problem.anatomy, problem.weights, seen.facts)
    if len(rows) == 0 or problem.dropout:
        return None
    words = find_words(problem.stage, rows, min(LONGEST, problem.stage.max_length), problem.budget, noise=1.0)
    if words is None:
        return None
    diagnostics: dict[str, float] = {"words": float(len(words.tokens))}
    if problem.stage.position_free:
        return Reconstruction(tokens=tuple(words.tokens.tolist()), diagnostics=diagnostics)
    order = words.order() or _arranged(problem, words, rows)
    if order is not None:
        alone = prove(seen, [GuessedSequence(tuple(order), own_score=ARRANGED)], problem.budget)
        reach = bag_of_words_reach(words.tokens.tolist())
        return Reconstruction(
            alone.sequences, label_counts=alone.label_counts, diagnostics=diagnostics | alone.diagnostics, reach=reach
        )
    inside = _inside(problem, words, rows)
    if inside is None:
        named = words.tokens.tolist()
        return Reconstruction(tokens=tuple(named), diagnostics=diagnostics, reach=bag_of_words_reach(named))
    noise = {p.weight: rounding_error(problem.weights[p.weight], seen.facts) for p in problem.anatomy.projections}
    found = read_inside(problem, inside, noise)
    if found.sequences and not any(sequence.proved for sequence in found.sequences):
        found = _refined(problem, found, inside)
    return replace(found, diagnostics=diagnostics | dict(found.diagnostics))


def _refined(problem: SpanProblem, found: Reconstruction, inside: Candidates) -> Reconstruction:
    """Return the sequences after changes that lower the simulation's error."""
    options: dict[int, list[int]] = {}
    for token, position in zip(inside.tokens.tolist(), inside.positions.tolist(), strict=True):
        options.setdefault(position, []).append(token)
    return refined(problem.seen, found, options, ARRANGED / 2, problem.budget, problem.budget)


def _arranged(problem: SpanProblem, words: Words, rows: Tensor) -> list[int] | None:
    limit = min(LONGEST, problem.stage.max_length, len(words.tokens) + MORE_POSITIONS)
    return arranged(problem.stage, words.tokens, rows, limit)


def _inside(problem: SpanProblem, words: Words, rows: Tensor) -> Candidates | None:
    """Return the pairs of these words and positions in the span, nearest first."""
    scale = residual_scale(rows)
    positions = torch.arange(min(LONGEST, problem.stage.max_length), device=rows.device)
    tokens = words.tokens.repeat_interleave(len(positions))
    where = positions.repeat(len(words.tokens))
    inputs = problem.stage.inputs(tokens, where)
    units = scale(inputs)
    order = units.argsort(stable=True)[: int((units < INSIDE).sum())]
    return Candidates(tokens[order], where[order], units[order], inputs[order]) if len(order) else None
