"""The search that DLG, TAG and LAMP share.

LAMP (Balunovic et al., NeurIPS 2022), Algorithm 1: starts, Adam, restarts, discrete rounds, and rules to stop. DLG
and TAG use the same search without the discrete rounds, the prior and the regulariser.

Letters: N candidates, B sequences, T tokens, D hidden size, C classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from leakaudit.algorithms.matching.candidates import Candidate
from leakaudit.algorithms.matching.descent import Descent, Run
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.permutation_rounds import PermutationRounds, Rounds
from leakaudit.algorithms.matching.starts import Start, draw_starts
from leakaudit.algorithms.matching.token_refinement import nearest_words, pooled, refine_tokens
from leakaudit.plugins.budget import Budget

Stop = Literal["done", "converged", "budget"]


class Found(NamedTuple):
    """The result of a search."""

    best: Candidate
    """One candidate."""
    tokens: list[tuple[int, ...]]
    """(B,) sequences."""
    likeness: list[float]
    """(B,) mean cosine of a sequence's embeddings with their nearest tokens'."""
    stop: Stop
    facts: dict[str, float]


def search(
    matcher: Matcher,
    descent: Descent,
    start: Start,
    rounds: Rounds | None,
    rng: torch.Generator,
    budget: Budget,
) -> Found:
    """Find embeddings whose gradient is the observed one.

    The result is at least one candidate, even if the budget is very small.
    """
    run = start_run(
        matcher, descent, start, rng, budget, positions_every=0 if rounds is None else rounds.positions_every
    )
    discrete = None if rounds is None else PermutationRounds(matcher, rounds, rng)
    if discrete is not None and start.given:
        discrete.run_round(run, budget)
    elif discrete is not None and run.taken:
        discrete.check_explained(run)
    stop = "converged" if discrete is not None and discrete.explained else advance(run, discrete, budget)
    best = run.end if discrete is None else discrete.result(run, budget)
    tokens, likeness = matcher.tokens(best.embeddings[0], best.label_logits[0])
    if rounds is not None and rounds.words and discrete is not None and not discrete.explained:
        tokens = _refined(matcher, [best, *run.dropped], rounds.words, rng, budget)
    facts = run.facts(float(run.best_losses[0]))
    if discrete is not None:
        facts |= discrete.facts | {"seated": float(run.position_moves)}
    return Found(best, tokens, likeness, stop, facts)


def _refined(
    matcher: Matcher, candidates: Sequence[Candidate], most: int, rng: torch.Generator, budget: Budget
) -> list[tuple[int, ...]]:
    """Return the best candidate's tokens, refined with the words of all.

    Args:
        matcher: compares.
        candidates: one or more candidates in each; the labels of the very first one are used for all.
        most: most words of the first candidate at each position. Every other candidate adds only its nearest word.
        rng: draws orders.
        budget: checked before every sweep.
    """
    logits = candidates[0].label_logits[0]
    embeddings = [one for some in candidates for one in some.embeddings]
    words = [nearest_words(matcher, one, most if number == 0 else 1) for number, one in enumerate(embeddings)]
    guesses = [
        matcher.tokens(one, own)[0]
        for some in candidates
        for one, own in zip(some.embeddings, some.label_logits, strict=True)
    ]
    losses = matcher.token_losses(guesses, logits)
    nearest = guesses[min(range(len(guesses)), key=lambda number: losses[number])]
    return list(refine_tokens(matcher, nearest, logits, pooled(words), rng, budget))


def start_run(
    matcher: Matcher, descent: Descent, start: Start, rng: torch.Generator, budget: Budget, *, positions_every: int = 0
) -> Run:
    """Return a run of the best candidate after a trial of all starts.

    In the trial, all candidates take `trial_steps` steps at once.

    Args:
        matcher: compares.
        descent: the steps.
        start: the candidates.
        rng: draws them.
        budget: checked before every step.
        positions_every: steps after which all candidates try other positions (`position_assignment`); they also do so after the
            descent's last step. If a candidate's tokens then explain the update, it is the best. 0 for never.
    """
    first = draw_starts(matcher, start, rng, budget)
    enumerated = start.labels == "enumerate" and matcher.labels.enumerable
    run = Run(matcher, descent, first, rng, optimise_labels=not enumerated)
    trial = min(start.trial_steps, descent.steps) if len(first.embeddings) > 1 else 0
    while run.taken < trial and not budget.exhausted():
        run.step()
        if not positions_every or (run.taken % positions_every and run.taken < descent.steps):
            continue
        for number, row in itertools.product(range(len(first.embeddings)), range(len(matcher.lengths))):
            run.assign_positions(row, number)
        explaining = [number for number in run.order() if run.explained(number)]
        if explaining:
            run.keep(explaining[:1])
            return run
    run.keep(run.order()[:1])
    return run


def advance(run: Run, discrete: PermutationRounds | None, budget: Budget) -> Stop:
    """Take the remaining steps and rounds, and return why they ended."""
    while run.taken_now < run.descent.steps:
        if budget.exhausted():
            return "budget"
        if run.stalled:
            return "converged"
        run.step()
        if discrete is None or not discrete.rounds.due(run.taken_now, run.descent.steps):
            continue
        discrete.run_round(run, budget)
        if discrete.settled:
            return "converged"
    return "done"
