"""Summaries of an audit: one attack under one defence over all attacked steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import geometric_mean, median, stdev

from leakaudit.results.schema import Attempt, Measured, Missing, Score, StepRecord, Summary


def summarise(attempts: Iterable[Attempt], seeds: Mapping[str, int] | None = None) -> tuple[Summary, ...]:
    """Return one `Summary` per attack and defence, in order of first appearance.

    In a mean every sequence has the same weight, and in label accuracy every label. Attempts without a score count in
    `status_counts` only. An attempt that ran out of budget counts with its best guess so far.

    Args:
        attempts: of one audit.
        seeds: step -> seed of the simulation that made it (`seeds_of`); None for no spread over seeds.
    """
    groups: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        groups.setdefault((attempt.attack, attempt.defense), []).append(attempt)
    return tuple(_summarise_group(attack, defense, group, seeds or {}) for (attack, defense), group in groups.items())


def seeds_of(steps: Iterable[StepRecord]) -> dict[str, int]:
    """Return the seed of each step of a simulation with several seeds."""
    return {step.id: step.seed for step in steps if step.seed is not None}


def means_of_scores(attempts: Iterable[Attempt]) -> dict[str, float]:
    """Return the mean of every metric that has one."""
    scored = list(attempts)
    names = dict.fromkeys(name for attempt in scored for name in attempt.scores)
    means = {name: pooled(a.scores.get(name) for a in scored) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None}


def spread_over_seeds(attempts: Iterable[Attempt], seeds: Mapping[str, int]) -> dict[str, float]:
    """Return the sample standard deviation of every metric's means over the seeds.

    A metric is absent if fewer than two seeds have a mean of it. Attempts on steps without a seed do not count.

    Args:
        attempts: of one attack under one defence.
        seeds: step -> seed.
    """
    groups: dict[int, list[Attempt]] = {}
    for attempt in attempts:
        if attempt.step in seeds:
            groups.setdefault(seeds[attempt.step], []).append(attempt)
    by_seed = [means_of_scores(group) for group in groups.values()]
    values = {name: [means[name] for means in by_seed if name in means] for means in by_seed for name in means}
    return {name: stdev(found) for name, found in values.items() if len(found) > 1}


def _summarise_group(attack: str, defense: str, attempts: list[Attempt], seeds: Mapping[str, int]) -> Summary:
    scored = [a for a in attempts if any(isinstance(s, Score) for s in a.scores.values())]
    return Summary(
        attack=attack,
        defense=defense,
        steps=len(scored),
        sequences=sum(len(a.sequences) for a in scored),
        scores=means_of_scores(scored),
        spread=spread_over_seeds(scored, seeds),
        texts_found=texts_found(scored),
        guess_perplexity=_geometric_mean([a.guess_perplexity for a in scored]),
        seconds_per_step=median(a.wall_s for a in scored) if scored else None,
        status_counts=dict(Counter(a.status.value for a in attempts)),
        reachable_tokens=pooled(a.reachable_tokens for a in scored),
        reachable_sequences=pooled(a.reachable_sequences for a in scored),
    )


def texts_found(attempts: Iterable[Attempt]) -> int | None:
    """Return how many texts were found in all attempts (metric `sentences_found`).

    None if no attempt guessed a text.
    """
    found = [score for a in attempts if isinstance(score := a.scores.get("sentences_found"), Score)]
    return round(sum(score.value * score.n for score in found)) if found else None


def _geometric_mean(values: Iterable[float | Missing | None]) -> float | None:
    """Return the geometric mean of the numbers above 0; None without one."""
    numbers = [value for value in values if isinstance(value, float) and value > 0]
    return geometric_mean(numbers) if numbers else None


def pooled(measured: Iterable[Measured | None]) -> float | None:
    """Return the mean of all numbers, weighted by their `n`; None without a number.

    Every `Missing` and None is left out.

    >>> from leakaudit.results.schema import Missing, Score
    >>> pooled([Score(value=1.0, n=3), Missing(missing="no test"), Score(value=0.0)])
    0.75
    """
    found = [(score.value, score.n) for score in measured if isinstance(score, Score)]
    weight = sum([n for _, n in found])
    return sum([value * n for value, n in found]) / weight if weight else None
