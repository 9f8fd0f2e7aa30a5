"""Whether a policy is decided before all planned steps are audited.

A bound for one look may not be asked after every step, so rates are decided by a confidence sequence here. A red line needs none: one leak is a
fact at any time.
"""

from __future__ import annotations

from datetime import datetime

from leakaudit.gate.controls import trusted
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.evidence import gather_own
from leakaudit.gate.policy import Policy, Rule
from leakaudit.gate.verdict import Status
from leakaudit.results.schema import Results
from leakaudit.results.sequential import confidence_sequence

PERCENTILE_SHARE = 0.05
"""Share of the steps that may exceed the 95th percentile of a score."""


def decided(results: Results, policy: Policy, *, now: datetime) -> Status | None:
    """Return the verdict that further steps of the same kind cannot change.

    FAIL: one rule at level error is certain to fail. PASS: every rule at level error passes, and every rate and percentile among them is
    bounded at all looks. None: neither.

    Args:
        results: the audit so far.
        policy: the rules.
        now: the time of judgement, with time zone.
    """
    verdict = evaluate(results, policy, now=now)
    if verdict.verdict not in (Status.PASS, Status.FAIL):
        return None
    rules = {rule.id: rule for rule in policy.rules if rule.level == "error"}
    if verdict.verdict is Status.FAIL:
        failed = [rules[rule.id] for rule in verdict.rules if rule.id in rules and rule.status is Status.FAIL]
        return Status.FAIL if any(_sure_to_fail(rule, results, policy) for rule in failed) else None
    bounded = [_bounded(rule, results, policy) for rule in rules.values()]
    return Status.PASS if all(answer is not False for answer in bounded) and any(bounded) else None


def red_lines(policy: Policy) -> frozenset[str]:
    """Return the ids of the rules that one leak violates for good.

    They are critical, at level error, and allow no leak at all.
    """
    rules = (rule for rule in policy.rules if rule.severity == "critical" and rule.level == "error")
    return frozenset(rule.id for rule in rules if rule.max_count == 0)


def _sure_to_fail(rule: Rule, results: Results, policy: Policy) -> bool:
    """Return whether a rule that fails will fail whatever the next steps show."""
    if rule.max_count is not None or rule.statistic == "max" or rule.claimed_epsilon is not None:
        return True
    counts = None if rule.membership is not None else _counts(rule, results, policy)
    if counts is None:
        return False
    k, n, limit, unjudged = counts
    sure, prior = policy.statistics.confidence, policy.nights.prior
    return confidence_sequence(k, n + unjudged, confidence=sure, prior=prior).lower > limit


def _bounded(rule: Rule, results: Results, policy: Policy) -> bool | None:
    """Return whether a limit holds at all looks; None for a rule without a rate."""
    if rule.max_count is not None or rule.statistic == "max" or rule.claimed_epsilon is not None:
        return None
    counts = None if rule.membership is not None else _counts(rule, results, policy)
    if counts is None:
        return False
    k, n, limit, unjudged = counts
    sure, prior = policy.statistics.confidence, policy.nights.prior
    return confidence_sequence(k + unjudged, n + unjudged, confidence=sure, prior=prior).upper <= limit


def _counts(rule: Rule, results: Results, policy: Policy) -> tuple[int, int, float, int] | None:
    """Return exceedances, steps, the limit of their rate, and unjudged steps.

    None for the mean of a score and for a difference from a baseline, which have no such bound.
    """
    if rule.statistic == "mean" or rule.versus_baseline is not None:
        return None
    evidence = gather_own(results, rule, trusted(results, policy, rule))
    if rule.max_rate is not None:
        return (
            sum(value > 0 for value in evidence.values.values()),
            len(evidence.values),
            rule.max_rate,
            evidence.unjudged,
        )
    above = sum(value > rule.threshold for value in evidence.values.values())
    return above, len(evidence.values), PERCENTILE_SHARE, evidence.unjudged
