"""The first candidates of a search: random, given, permuted or labelled.

Letters: N candidates, B sequences, T tokens, D hidden size, C classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakaudit.algorithms.matching.candidates import Candidate, joined
from leakaudit.algorithms.matching.guessed_labels import CERTAIN
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.permutations import Permutation, shuffled
from leakaudit.plugins.budget import Budget

MOST_LABELLINGS = 64
"""Most assignments of classes to sequences that are tried if labels are enumerated. Our choice: enough for six sequences of
two classes."""


@dataclass(frozen=True)
class Start:
    """Settings of the first candidate."""

    samples: int = 1
    """n_init: number of normal samples that are scored."""
    permutations: int = 0
    """Number of random orders of the best sample that are scored."""
    norm: float = 0.0
    """Norm of every row of the chosen samples, which are then compared by their gradients alone; 0 leaves rows as drawn."""
    restarts: int = 1
    """Number of best samples that take `trial_steps` steps at once."""
    trial_steps: int = 0
    given: tuple[tuple[int, ...] | None, ...] = ()
    """Tokens to start from, for each sequence that another attack recovered; None for a sequence that is drawn."""
    labels: Literal["joint", "enumerate"] = "joint"
    """How to find unknown labels: optimise them with the embeddings (DLG), or use each assignment as a restart of its own."""
    masks: Literal["mean", "bernoulli"] = "mean"
    """First values of learned dropout masks: all 1 - p, as in a pass without dropout, or drawn (GRAB, Algorithm 1)."""


def draw_starts(matcher: Matcher, start: Start, rng: torch.Generator, budget: Budget) -> Candidate:
    """Return the `restarts` best of `samples` random candidates, best first.

    If the settings say so, the best is also permuted, and repeated with every assignment of labels.

    At least one candidate is returned, even if the budget is very small. Only as many are made at a time as run at once.
    """
    score = matcher.distances if start.norm else matcher.losses
    found = _drawn(matcher, start, 1, rng)
    if start.samples > 1:
        losses = score(found) if not budget.exhausted() else None
        for count in _portions(start.samples - 1, matcher):
            if losses is None or budget.exhausted():
                break
            drawn = _drawn(matcher, start, count, rng)
            found, losses = _best(joined([found, drawn]), torch.cat([losses, score(drawn)]), start.restarts)
    if start.permutations and not start.given and not budget.exhausted():
        found = permuted(matcher, found, start.permutations, rng, budget)
    if start.norm and not start.given:
        found = found._replace(embeddings=start.norm * torch.nn.functional.normalize(found.embeddings, dim=3))
    if start.labels == "enumerate" and matcher.labels.enumerable:
        found = _with_every_labelling(found.take([0]))
    return found


def _drawn(matcher: Matcher, start: Start, count: int, rng: torch.Generator) -> Candidate:
    """Return random candidates, with the given tokens at their positions."""
    drawn = matcher.candidates.random(count, rng)
    if start.masks == "bernoulli":
        drawn = drawn._replace(masks=matcher.masks.drawn(count, rng))
    for row, ids in enumerate(start.given):
        if ids is not None:
            drawn.embeddings[:, row, : len(ids)] = matcher.table[list(ids)]
    return drawn


def permuted(matcher: Matcher, found: Candidate, permutations: int, rng: torch.Generator, budget: Budget) -> Candidate:
    """Return the candidates; the first has the best of some random orders."""
    first = found.take([0])
    best, losses = first, matcher.losses(first)
    for count in _portions(permutations, matcher):
        if budget.exhausted():
            break
        orders = [
            [shuffled(matcher.free_places(row), max(matcher.lengths), rng) for row in range(len(matcher.lengths))]
            for _ in range(count)
        ]
        tried = joined([_rearranged(first, row_orders) for row_orders in orders])
        best, losses = _best(joined([best, tried]), torch.cat([losses, matcher.losses(tried)]), 1)
    return joined([best, found.take(slice(1, None))])


def _portions(total: int, matcher: Matcher) -> Iterator[int]:
    """Yield how many candidates to make at a time, up to `total` in all."""
    while total > 0:
        count = min(total, matcher.at_once)
        yield count
        total -= count


def _best(candidates: Candidate, losses: Tensor, count: int) -> tuple[Candidate, Tensor]:
    """Return the best candidates and their losses, best first."""
    order = losses.nan_to_num(nan=math.inf).argsort()[:count]
    return candidates.take(order), losses[order]


def _with_every_labelling(one: Candidate) -> Candidate:
    """Return a candidate once for each assignment of classes to sequences.

    At most `MOST_LABELLINGS` assignments are used.
    """
    _, sequences, classes = one.label_logits.shape
    labellings = list(itertools.islice(itertools.product(range(classes), repeat=sequences), MOST_LABELLINGS))
    certain = torch.nn.functional.one_hot(torch.tensor(labellings), classes) * CERTAIN
    return Candidate(
        one.embeddings.expand(len(labellings), -1, -1, -1).clone(),
        certain.to(one.label_logits),
        one.masks.expand(len(labellings), -1).clone(),
    )


def _rearranged(one: Candidate, orders: Sequence[Permutation]) -> Candidate:
    """Return the only candidate with its sequences in these orders."""
    embeddings = torch.stack([one.embeddings[0, row][list(order)] for row, order in enumerate(orders)])
    logits = one.label_logits
    if logits.dim() == 4:  # of the token at each place
        logits = torch.stack([logits[0, row][list(order)] for row, order in enumerate(orders)])[None]
    return one._replace(embeddings=embeddings[None], label_logits=logits)
