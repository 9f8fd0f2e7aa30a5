"""Reader for a difference of weights after the first step of Adam or AdamW.

From zero moments every entry of the difference has an inverse with a known error (`gradient_estimate`). The error depends on the entry: large
gradients are known worse than small ones. So an ordinary rank test fails, and three things are done first:

1. Words and positions: a table's row moved if and only if its token, or position, is in the batch, because a zero gradient moves nothing.
2. The span: every row of the gradient counts in units of its own error.
3. The gradient: with the inputs known, a row of a weight matrix lies in their space. One regression for each row uses all its entries, and
   its error is far below theirs (`adam_step.known_rows`).

After that the update is read like an exact one, with a stated error. A guess is proved if the movement that it predicts agrees with the
observed one in nearly all entries. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional

from leakaudit.algorithms.adam_step import AdamStep, known_rows
from leakaudit.algorithms.resimulation import prove
from leakaudit.algorithms.span.candidates import Candidates
from leakaudit.algorithms.span.matching_pursuit import find_words, used_positions
from leakaudit.algorithms.span.order_refinement import refined
from leakaudit.algorithms.span.problem import SpanProblem, only_adapters
from leakaudit.algorithms.span.reachability import bag_of_words_reach, dropout_reach
from leakaudit.algorithms.span.sequence_assembly import read_inside
from leakaudit.algorithms.span.single_text import arranged
from leakaudit.client.observation import Observation
from leakaudit.models.structure import word_embedding
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction

MOVED = 5.0
"""Root mean square movement of a row, in units of rounding, above which its token is in the batch.
Our choice: rounding alone stays below 1.2, and rows of true tokens have 1e4 and more; see docs/decisions/adam_deltas.md."""

LONGEST = 64
"""Positions that a text is assumed to have if no table tells. Our choice, as for local steps of SGD."""

MARGIN = 2.0
"""Factor on the regression's stated error, above which a difference is none of its errors.
Our choice: measured errors were 1.0 to 1.3 times the stated ones; see docs/decisions/adam_deltas.md."""

NOISE_LEVELS = (1.0, 2.0)
"""Assumed noise of rows in units of their error.
Our choice: entries of one row have different errors, so the largest direction of the noise is up to twice that of equal errors."""

REFINING = 0.5
"""Share of the remaining budget for exchanges of words. Our choice."""

ARRANGED = 0.9
"""Own score of a text that explains the update and is not proved. Our choice."""


def fits(problem: SpanProblem) -> bool:
    """Say whether the update is a first step of Adam."""
    return AdamStep.of(problem.seen) is not None


def read(problem: SpanProblem) -> Reconstruction | None:
    """Return the sequences or words that the first step of Adam gives.

    None if no layer that reads the inputs is shared, under dropout, or if the words are not known.
    """
    step = AdamStep.of(problem.seen)
    if step is None:
        return None
    rows = _whitened(problem, step.estimate.update, step.estimate.error)
    words = _words(problem, step, rows) if len(rows) else None
    if words is None:
        return None
    tokens, length = words
    if problem.dropout or problem.stage.position_free:
        return Reconstruction(tokens=tuple(tokens.tolist()), reach=bag_of_words_reach(tokens.tolist()))
    alone = _one_text(problem, step, rows, tokens, length)
    if alone is not None and any(sequence.proved for sequence in alone.sequences or ()):
        return alone
    if only_adapters(problem.seen.update, problem.anatomy):
        # Several texts need the updates of query and key, and adapters hold a low-rank image of them.
        return alone or Reconstruction(tokens=tuple(tokens.tolist()), reach=bag_of_words_reach(tokens.tolist()))
    pairs = _all_pairs(problem, tokens, length)
    estimate, noise = _denoised(problem, step, pairs)
    found = read_inside(replace(problem, seen=estimate), pairs, noise)
    if found.sequences and not any(sequence.proved for sequence in found.sequences):
        found = _refined(problem, _with_words(problem, found), tokens)
    found = replace(found, reach=dropout_reach(problem, pairs, pairs, all_tried=True))
    return replace(found, diagnostics={"words": float(len(tokens)), **found.diagnostics})


def _with_words(problem: SpanProblem, found: Reconstruction) -> Reconstruction:
    """Return the sequences without those that hold special tokens only."""
    whole = [sequence for sequence in found.sequences or () if set(sequence.token_ids) - problem.special]
    return replace(found, sequences=tuple(whole))


def _refined(problem: SpanProblem, found: Reconstruction, tokens: Tensor) -> Reconstruction:
    """Return the sequences after exchanges of words that lower the disagreement.

    At each position it tries the words that any sequence has there, and the words that no sequence has.
    """
    guess = [sequence.token_ids for sequence in found.sequences or ()]
    if not guess:
        return found
    missing = sorted(set(tokens.tolist()) - {token for ids in guess for token in ids} - problem.special)
    options = {
        place: sorted({ids[place] for ids in guess if place < len(ids)} | set(missing))
        for place in range(1, max(map(len, guess)))
    }
    changes = problem.budget.part(REFINING)
    return refined(problem.seen, found, options, ARRANGED / 2, changes, problem.budget)


def _words(problem: SpanProblem, step: AdamStep, rows: Tensor) -> tuple[Tensor, int] | None:
    """Return the words (M,) of the batch, and the length of its longest text.

    If the tables are not shared, the words are those that explain the rows. With few rows, two levels of noise are assumed, and the one with
    the fewest words counts.
    """
    tokens, limit = _tokens(problem, step), min(LONGEST, problem.stage.max_length)
    if tokens is not None:
        return tokens, _length(problem, step)
    levels = NOISE_LEVELS if len(rows) < rows.shape[1] else NOISE_LEVELS[:1]
    tried = (find_words(problem.stage, rows, limit, problem.budget, noise=noise) for noise in levels)
    found = min((words for words in tried if words is not None), key=lambda words: len(words.tokens), default=None)
    if found is None or not len(found.tokens):
        return None
    return found.tokens, used_positions(found.places) or limit


def _tokens(problem: SpanProblem, step: AdamStep) -> Tensor | None:
    """Return (M,) int64: the tokens whose rows moved.

    None if the table is frozen or tied.
    """
    name = word_embedding(problem.seen.model)
    facts = step.seen.facts
    if name is None or name not in step.estimate.error or any(name in pair for pair in facts.tied):
        return None
    return step.rows_that_moved(name, MOVED).nonzero().flatten()


def _positions(problem: SpanProblem, step: AdamStep) -> str | None:
    """Return the name of the trained table of positions; None if there is none."""
    long_enough = (
        name
        for name in problem.anatomy.tables
        if name in step.estimate.error and len(step.seen.update[name]) >= problem.stage.max_length
    )
    return next(long_enough, None)


def _length(problem: SpanProblem, step: AdamStep) -> int:
    """Return the number of positions of the longest text, as the tables tell it."""
    limit, name = problem.stage.max_length, _positions(problem, step)
    if name is None:
        return min(limit, LONGEST)
    return min(limit, int(step.rows_that_moved(name, MOVED).sum()))


def _one_text(problem: SpanProblem, step: AdamStep, rows: Tensor, tokens: Tensor, length: int) -> Reconstruction | None:
    """Return one text of these words; None if they form no single text."""
    orders = [arranged(problem.stage, tokens, rows, length), _order_of_rows(problem, step, tokens, length)]
    tried = [
        prove(problem.seen, [GuessedSequence(tuple(order), own_score=ARRANGED)], problem.budget)
        for order in orders
        if order is not None
    ]
    if not tried:
        return None
    found = next((one for one in tried if one.sequences[0].proved), tried[0])
    return Reconstruction(
        found.sequences,
        label_counts=found.label_counts,
        diagnostics=found.diagnostics,
        reach=bag_of_words_reach(tokens.tolist()),
    )


def _order_of_rows(problem: SpanProblem, step: AdamStep, tokens: Tensor, length: int) -> list[int] | None:
    """Return the words in the order in which their rows moved like those of positions.

    In one text a word that occurs once gets the same gradient as its position, however large it is.
    """
    word, place = word_embedding(problem.seen.model), _positions(problem, step)
    if word is None or place is None or word not in step.estimate.error or len(tokens) > length:
        return None
    where = step.rows_that_moved(place, MOVED).nonzero().flatten()
    by_word, by_place = step.moved(word)[0][tokens], step.moved(place)[0][where]
    alike = functional.normalize(by_word) @ functional.normalize(by_place).T  # (M, P)
    order = alike.argmax(dim=0)
    rows, columns = linear_sum_assignment(-alike.cpu().numpy())
    order[torch.as_tensor(columns)] = torch.as_tensor(rows)
    return tokens[order].tolist()


def _whitened(problem: SpanProblem, update: Mapping[str, Tensor], error: Mapping[str, Tensor]) -> Tensor:
    """Return (F, D) float64: the layers' gradients, each row in units of its error."""
    parts = []
    for layer in (*problem.anatomy.projections, *(adapter.down for adapter in problem.anatomy.adapters)):
        if layer.weight in error and bool(update[layer.weight].any()):
            gradient, off = layer.by_output(update[layer.weight]).double(), layer.by_output(error[layer.weight])
            parts.append(gradient / off.double().square().mean(1, keepdim=True).sqrt().clamp_min(1e-300))
    return torch.cat(parts) if parts else torch.zeros(0, problem.anatomy.hidden, dtype=torch.float64)


def _all_pairs(problem: SpanProblem, tokens: Tensor, length: int) -> Candidates:
    """Return every pair of these tokens and positions that the tokenizer allows."""
    where = torch.arange(length, device=tokens.device).repeat(len(tokens))
    which = tokens.repeat_interleave(length)
    inputs = problem.stage.inputs(which, where).double()
    return Candidates(which, where, torch.zeros(len(which), dtype=torch.float64, device=tokens.device), inputs)


def _denoised(problem: SpanProblem, step: AdamStep, pairs: Candidates) -> tuple[Observation, dict[str, float]]:
    """Return the estimate with denoised first layers, and their errors.

    All inputs of these pairs lie in a space of about as many dimensions as there are words and positions.
    """
    axes = torch.linalg.svd(pairs.inputs, full_matrices=False)
    basis = axes.Vh[1e-9 * axes.S[0] < axes.S]
    update, noise = dict(step.estimate.update), {}
    for layer in problem.anatomy.projections:
        if layer.weight not in step.estimate.error:
            continue
        moved, off = (layer.by_output(part).double() for part in step.moved(layer.weight))
        found, error = known_rows(moved, off, step.eps(layer.weight), basis)
        update[layer.weight] = layer.by_output(found).float()  # transposes again, if at all
        noise[layer.weight] = MARGIN * float(error.square().mean().sqrt())
    return replace(step.estimate, update=update), noise
