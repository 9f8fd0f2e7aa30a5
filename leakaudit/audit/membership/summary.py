"""Counts of all tested steps, for the results."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence

from leakaudit.audit.membership.log import Scored
from leakaudit.results.membership import FALSE_RATES, Curve, Membership, MembershipPoint, MembershipStep
from leakaudit.results.ranking import auc
from leakaudit.results.wording import counted

MOST_POINTS = 60
"""Most points of a curve. Our choice: the picture is 480 pixels wide."""


def conformal_threshold(calibration: Sequence[float], false_rate: float) -> float | None:
    """Return the score above which a text is named; None for too few texts.

    A text of no step is above it with a probability of at most the rate, if its score and those of the calibration texts are exchangeable. It is
    the ceil((M + 1) (1 - rate))-th smallest of M scores. Source: Vovk, Gammerman and Shafer 2005, section 2.2.

    >>> conformal_threshold([float(n) for n in range(1, 100)], 0.01), conformal_threshold([1.0] * 98, 0.01)
    (99.0, None)
    """
    place = math.ceil(round((len(calibration) + 1) * (1 - false_rate), 9))
    return sorted(calibration)[place - 1] if 1 <= place <= len(calibration) else None


def membership_of(scored: Mapping[str, Scored], left_out: Sequence[str], order: Sequence[str]) -> Membership | None:
    """Return what the tested steps of an audit say; None if none was tested.

    Args:
        scored: step id -> scores.
        left_out: why other steps were not tested.
        order: ids of the audit's steps, in their order.
    """
    kept = {step: scored[step] for step in order if step in scored and scored[step].members and scored[step].others}
    if not kept:
        return None
    every = list(kept.values())
    calibration = [value for one in every for value in one.calibration]
    base = [value for one in every for value in one.base_calibration]
    points = [_point(every, rate, calibration, base) for rate in FALSE_RATES]
    first = conformal_threshold(calibration, FALSE_RATES[0])
    known = [value for one in every for value in one.known_batch]
    guesses, right = _guesses(every, first)
    return Membership(
        steps=tuple(_step(step, one, first) for step, one in kept.items()),
        points=tuple(point for point in points if point is not None),
        calibration=len(calibration),
        calibration_texts=len({number for one in every for number in one.numbers}),
        null_candidates=sum(len(one.null_members) + len(one.null_others) for one in every),
        control_found=_above(known, first),
        control_texts=len(known),
        guesses=guesses,
        right=right,
        pairs=sum(min(len(one.members), len(one.others)) for one in every),
        curve=_curve([(one.members, one.others) for one in every]),
        base_curve=_curve([(one.base_members, one.base_others) for one in every]),
        null_curve=_curve([(one.null_members, one.null_others) for one in every]),
        granted=_granted(every),
        overlapped=sum(one.overlapped for one in every),
        left_out=tuple(f"{counted(n, 'step')}: {why}" for why, n in Counter(left_out).items()),
    )


def _granted(every: Sequence[Scored]) -> tuple[str, ...]:
    """Return what the attacker of every step knows besides model and update."""
    labels = "their labels" if all(one.labelled for one in every) else "no labels where they are classes"
    least = min(len(one.calibration) for one in every)
    return (f"candidate texts, {labels}", f"{least} texts of the same source that are in no step")


def _step(step: str, one: Scored, threshold: float | None) -> MembershipStep:
    null = auc(one.null_members, one.null_others) if one.null_members and one.null_others else None
    return MembershipStep(
        step=step,
        members=len(one.members),
        nonmembers=len(one.others),
        found=_above(one.members, threshold),
        false=_above(one.others, threshold),
        auc=auc(one.members, one.others),
        base_auc=auc(one.base_members, one.base_others),
        null_auc=null,
        null="none" if null is None else one.null,
    )


def _point(
    every: Sequence[Scored], rate: float, calibration: Sequence[float], base: Sequence[float]
) -> MembershipPoint | None:
    """Return the counts at a false alarm rate; None if it has no threshold."""
    threshold, of_base = conformal_threshold(calibration, rate), conformal_threshold(base, rate)
    if threshold is None:
        return None
    return MembershipPoint(
        false_rate=rate,
        found=sum(_above(one.members, threshold) for one in every),
        false=sum(_above(one.others, threshold) for one in every),
        null=sum(_above([*one.null_members, *one.null_others], threshold) for one in every),
        calibration=_above(calibration, threshold),
        base=sum(_above(one.base_members, of_base) for one in every),
    )


def _above(values: Sequence[float], threshold: float | None) -> int:
    return 0 if threshold is None else sum(value > threshold for value in values)


def _guesses(every: Sequence[Scored], threshold: float | None) -> tuple[int, int]:
    """Return for how many pairs the attacker guesses, and how often rightly.

    The i-th member and the i-th other of a step are a pair, in the shuffled order of candidates. A guess is that the only one above the threshold is
    the member. The threshold comes from calibration texts, so it is fixed before.
    """
    if threshold is None:
        return 0, 0
    pairs = [pair for one in every for pair in zip(one.members, one.others, strict=False)]
    right = sum(member > threshold >= other for member, other in pairs)
    return right + sum(other > threshold >= member for member, other in pairs), right


def _curve(rounds: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Curve:
    """Return the share of members above each score that another candidate has."""
    members = sorted(value for mine, _ in rounds for value in mine)
    others = sorted((value for _, theirs in rounds for value in theirs), reverse=True)
    if not members or not others:
        return ()
    found = [
        (above / len(others), (len(members) - bisect_right(members, score)) / len(members))
        for above, score in enumerate(others)
    ]
    found.append((1.0, 1.0))
    chosen = {round((len(found) - 1) ** (turn / MOST_POINTS)) for turn in range(MOST_POINTS + 1)} | {0}
    return tuple(found[place] for place in sorted(chosen) if place < len(found))
