"""The numbers of a rule: its statistic, its bounds and the status they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leakaudit.gate.evidence import Evidence
from leakaudit.gate.policy import Rule
from leakaudit.gate.verdict import Status
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


def judge_numbers(rule: Rule, evidence: Evidence, confidence: float) -> Outcome:
    """Compare the evidence for a rule with its limit.

    Args:
        rule: the rule.
        evidence: what the results show for it.
        confidence: of each one-sided bound, 0 to 1.
    """
    values = list(evidence.values.values())
    if not values:
        return Outcome(Status.INCONCLUSIVE, n=0, k=None if rule.metric else 0)
    if rule.metric is None:
        return _judge_event(rule, sum(value > 0 for value in values), len(values), evidence.silent, confidence)
    return _judge_maximum(rule, values) if rule.statistic == "max" else _judge_metric(rule, values, confidence)


def _judge_event(rule: Rule, k: int, n: int, silent: int, confidence: float) -> Outcome:
    """Judge a rule on an event that happened in `k` of `n` steps.

    Silent steps (unverifiable, without a leak) count in the lower bound only. They may be clean, so they can keep a rule from failing.
    Nothing shows that they are clean, so they never make it pass.
    """
    lower, upper = stats.lower_bound(k, n + silent, confidence), stats.upper_bound(k, n, confidence)
    method = "Clopper-Pearson, one-sided"
    if rule.max_rate is None:
        status = Status.FAIL if k > rule.threshold else Status.PASS
        return Outcome(status, n, k, float(k), lower, upper, compared=float(k), method=method)
    status = _by_bounds(lower, upper, rule.max_rate)
    more = stats.more_clean_steps(k, n, rule.max_rate, confidence) if status is Status.INCONCLUSIVE else None
    return Outcome(status, n, k, k / n, lower, upper, compared=upper, more=more, method=method)


def _judge_maximum(rule: Rule, values: Sequence[float]) -> Outcome:
    most = max(values)
    status = Status.FAIL if most > rule.threshold else Status.PASS
    return Outcome(status, len(values), observed=most, compared=most, method="the largest value seen")


def _judge_metric(rule: Rule, values: Sequence[float], confidence: float) -> Outcome:
    """Judge a rule on the mean or the 95th percentile of a metric over steps."""
    n = len(values)
    if rule.statistic == "mean":
        observed, bounds = sum(values) / n, stats.mean_bounds(values, confidence)
    else:
        observed, bounds = stats.percentile(values), stats.quantile_bounds(values, 0.95, confidence)
    if bounds is None:
        missing = f"no bounds below {stats.MIN_STEPS_FOR_BOOTSTRAP} steps"
        return Outcome(Status.INCONCLUSIVE, n, observed=observed, method=missing)
    status = _by_bounds(bounds.lower, bounds.upper, rule.threshold)
    return Outcome(status, n, None, observed, bounds.lower, bounds.upper, compared=bounds.upper, method=bounds.method)


def _by_bounds(lower: float | None, upper: float | None, threshold: float) -> Status:
    """Compare the bounds with a threshold.

    Return PASS for an upper bound at or below it, FAIL for a lower bound above it, else INCONCLUSIVE.
    """
    if upper is not None and upper <= threshold:
        return Status.PASS
    return Status.FAIL if lower is not None and lower > threshold else Status.INCONCLUSIVE
