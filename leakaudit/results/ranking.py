"""Computes how well scores separate members of a round from other texts.

Letters: m members, n others.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leakaudit.results.bounds import Bounds, lower_bound, percentile, upper_bound

RESAMPLES = 1_999
"""Bootstrap resamples. Our choice: the random error of a bound is then far below the width of an interval over few rounds."""

Scores = tuple[Sequence[float], Sequence[float]]
"""Scores of the members of one round, and of the others."""


def auc(members: Sequence[float], others: Sequence[float]) -> float:
    """Return the probability that a member has a larger score than another text.

    Ties count half. It is the area under the curve of true over false positives (Hanley and McNeil 1982).

    Raises:
        ValueError: a group is empty.

    >>> auc([3.0, 1.0], [0.0, 1.0])
    0.875
    """
    _check(members, others)
    ordered = sorted(others)
    below = sum(bisect_left(ordered, one) + bisect_right(ordered, one) for one in members)
    return below / (2 * len(members) * len(ordered))


@dataclass(frozen=True)
class RateAt:
    """The share of members above a threshold."""

    k: int
    """Members above it."""
    n: int
    threshold: float
    bounds: Bounds
    """Clopper-Pearson; members of one round are not independent, so the interval is a little too short."""

    @property
    def rate(self) -> float:
        """Return the share k / n."""
        return self.k / self.n


def true_positive_rate(
    members: Sequence[float], others: Sequence[float], false_rate: float, confidence: float = 0.95
) -> RateAt:
    """Return the share of members above all but a share of the others.

    The threshold is the smallest score of another text above which at most floor(false_rate * n) of the n others are. It is fixed by these same others, so the
    true false positive rate may be larger than `false_rate`, and with few others much larger.

    Args:
        members: scores.
        others: scores.
        false_rate: largest share of others above the threshold.
        confidence: of each one-sided bound.

    Raises:
        ValueError: a group is empty, or the rate is not within 0 and 1.

    >>> true_positive_rate([3.0, 1.5, 0.5], [0.0, 1.0, 2.0, 0.2], 0.25).k
    2
    """
    _check(members, others)
    if not 0 <= false_rate < 1:
        raise ValueError(f"a false positive rate is at least 0 and below 1, got {false_rate}")
    allowed = math.floor(false_rate * len(others) + 1e-9)
    threshold = sorted(others, reverse=True)[allowed]
    k = sum(one > threshold for one in members)
    bounds = Bounds(
        lower_bound(k, len(members), confidence), upper_bound(k, len(members), confidence), "Clopper-Pearson"
    )
    return RateAt(k, len(members), threshold, bounds)


def over_rounds(
    rounds: Sequence[Scores], number: Callable[[Sequence[float], Sequence[float]], float], confidence: float = 0.95
) -> Bounds:
    """Bound the mean of a number over rounds by a percentile bootstrap of rounds.

    Scores of one round depend on each other, so whole rounds are drawn. With very few rounds the interval is too short.

    Args:
        rounds: scores of members and others of each round.
        number: computed in each round, such as `auc`.
        confidence: of each one-sided bound.

    Raises:
        ValueError: there are no rounds.
    """
    return mean_over_rounds([number(members, others) for members, others in rounds], confidence)


def mean_over_rounds(values: Sequence[float], confidence: float = 0.95) -> Bounds:
    """Bound the mean of one number for each round; see `over_rounds`.

    Raises:
        ValueError: there are no rounds.
    """
    if not values:
        raise ValueError("no rounds")
    draw = random.Random(0)
    means = [math.fsum(draw.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES)]
    return Bounds(percentile(means, 1 - confidence), percentile(means, confidence), "bootstrap over rounds")


def _check(members: Sequence[float], others: Sequence[float]) -> None:
    if not members or not others:
        raise ValueError(f"two groups are compared; got {len(members)} members and {len(others)} others")
