"""The numbers of a rule: its statistic, its bounds and the status they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from leakaudit.gate.evidence import Evidence
from leakaudit.gate.policy import Rule
from leakaudit.gate.verdict import Status, Versus
from leakaudit.results import bounds as stats


@dataclass(frozen=True)
class Outcome:
    """The numbers of a rule, before evidence floor and controls are considered."""

    status: Status
    n: int
    """Steps that are evidence."""
    k: int | None = None
    """Steps that leaked; None for a rule on a metric."""
    observed: float | None = None
    lower: float | None = None
    upper: float | None = None
    compared: float | None = None
    """The number that must be at or below the threshold to pass; None without evidence or bounds."""
    more: int | None = None
    """Further steps without a leak that would make the rule pass; None if that does not apply."""
    method: str = ""
    versus: Versus | None = None
    """What was compared, for a rule on the difference from a baseline."""
    problem: str = ""
    """Why there is no comparison with the baseline, as a sentence; empty if there is one, and for other rules."""


def judge_numbers(rule: Rule, evidence: Evidence, confidence: float, max_unjudged: float | None = None) -> Outcome:
    """Compare the evidence for a rule with its limit.

    A step that nobody could judge may be clean or leak. So it counts as clean where a number is to prove a FAIL, and as a leak where a number is
    to prove a PASS.

    Args:
        rule: the rule.
        evidence: what the results show for it.
        confidence: of each one-sided bound, 0 to 1.
        max_unjudged: share of the steps that may be unjudged and then do not count as leaks; None for none.
    """
    values = list(evidence.values.values())
    if not values:
        return Outcome(Status.INCONCLUSIVE, n=0, k=None if rule.metric else 0)
    unknown = evidence.unjudged
    feared = 0 if tolerated(evidence, max_unjudged) else unknown
    if rule.metric is None:
        return _judge_event(rule, sum(value > 0 for value in values), len(values), unknown, feared, confidence)
    if rule.statistic == "max":
        return _judge_maximum(rule, values, feared)
    least = [*values, *(evidence.least.get(name, 0.0) for name in evidence.unjudged_steps)]
    return _judge_metric(rule, values, least, [*values, *[1.0] * feared], confidence)


def tolerated(evidence: Evidence, max_unjudged: float | None) -> bool:
    """Return whether the policy accepts that some steps were not judged."""
    of = evidence.unjudged + len(evidence.values)
    return max_unjudged is not None and evidence.unjudged <= max_unjudged * of


def _judge_event(rule: Rule, k: int, n: int, unknown: int, feared: int, confidence: float) -> Outcome:
    """Judge a rule on an event that happened in `k` of `n` judged steps.

    `unknown` further steps were not judged, and `feared` of them count as leaks in the upper bound.
    """
    most, of = k + feared, n + feared
    lower, upper = stats.lower_bound(k, n + unknown, confidence), stats.upper_bound(most, of, confidence)
    method = "Clopper-Pearson, one-sided"
    if rule.max_rate is None:
        status = _by_bounds(float(k), float(most), rule.threshold)
        return Outcome(status, n, k, float(k), lower, upper, compared=float(most), method=method)
    status = _by_bounds(lower, upper, rule.max_rate)
    more = stats.more_clean_steps(most, of, rule.max_rate, confidence) if status is Status.INCONCLUSIVE else None
    return Outcome(status, n, k, k / n, lower, upper, compared=upper, more=more, method=method)


def _judge_maximum(rule: Rule, values: Sequence[float], feared: int) -> Outcome:
    most = max(values)
    status = _by_bounds(most, 1.0 if feared else most, rule.threshold)
    return Outcome(status, len(values), observed=most, compared=most, method="the largest value seen")


def _judge_metric(
    rule: Rule, values: Sequence[float], least: Sequence[float], most: Sequence[float], confidence: float
) -> Outcome:
    """Judge a rule on the mean or the 95th percentile of a metric over steps.

    `least` and `most` also hold the unjudged steps, with the scores that they have at least, and that they may have.
    """
    if rule.statistic == "mean":
        observed, (low, high) = fmean(values), (stats.mean_bounds(found, confidence) for found in (least, most))
    else:
        observed = stats.percentile(values)
        low, high = (stats.quantile_bounds(found, 0.95, confidence) for found in (least, most))
    lower, upper = low.lower if low else None, high.upper if high else None
    method = high.method if high else f"no bounds below {stats.MIN_STEPS_FOR_BOOTSTRAP} steps"
    if rule.statistic == "p95" and _surely_above(least, rule.threshold, confidence):
        return Outcome(Status.FAIL, len(values), None, observed, lower, upper, compared=observed, method=_SHARE_ABOVE)
    if rule.statistic == "mean" and lower is None and stats.mean_lower_bound(least, confidence) > rule.threshold:
        least_mean = stats.mean_lower_bound(least, confidence)
        return Outcome(Status.FAIL, len(values), None, observed, least_mean, None, compared=observed, method=_HOEFFDING)
    status = _by_bounds(lower, upper, rule.threshold)
    return Outcome(status, len(values), None, observed, lower, upper, compared=upper, method=method)


_HOEFFDING = "Hoeffding's inequality, one-sided"
_SHARE_ABOVE = "Clopper-Pearson bound of the share of steps above the limit"


def _surely_above(values: Sequence[float], limit: float, confidence: float) -> bool:
    """Return whether more than 5 % of all steps are surely above a limit.

    The 95th percentile is then above it, whatever the number of steps.
    """
    return stats.lower_bound(sum(value > limit for value in values), len(values), confidence) > 0.05


def _by_bounds(lower: float | None, upper: float | None, threshold: float) -> Status:
    """Compare the bounds with a threshold.

    Return PASS for an upper bound at or below it, FAIL for a lower bound above it, else INCONCLUSIVE.
    """
    if upper is not None and upper <= threshold:
        return Status.PASS
    return Status.FAIL if lower is not None and lower > threshold else Status.INCONCLUSIVE
