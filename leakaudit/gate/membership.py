"""Rules on how many texts of the audited steps an update names.

The audit must have been given texts of no step (`membership` in its configuration).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from leakaudit.gate.policy_parts import PolicyPart
from leakaudit.gate.verdict import NO_STEPS, RuleVerdict, Status
from leakaudit.results.as_sent import shipped_column
from leakaudit.results.membership import (
    ATTACK,
    FALSE_RATES,
    FEWEST_NONMEMBERS,
    Membership,
    MembershipPoint,
    broken,
    in_words,
    one_in,
    too_many_false,
)
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted

if TYPE_CHECKING:
    from leakaudit.gate.policy import Policy, Rule

SUBJECT = "membership"
"""What such a rule is about, in outputs."""


class MembershipLimit(PolicyPart):
    """The largest share of the texts of a step that its update may name."""

    max_tpr: float = Field(gt=0.0, le=0.99)
    """Largest share of the texts of the steps that may be named. The rule passes if the upper bound is at or below it and fails if the lower bound is
    above it."""
    false_rate: float = FALSE_RATES[0]
    """Share of texts of no step that the threshold may name: 0.01, 0.02, 0.05 or 0.1."""

    @field_validator("false_rate")
    @classmethod
    def _has_a_threshold(cls, value: float) -> float:
        if value not in FALSE_RATES:
            raise ValueError(f"audits fix a threshold for {', '.join(map(str, FALSE_RATES))}; found {value:g}")
        return value


def judge_membership(
    results: Results, policy: Policy, rule: Rule, limit: MembershipLimit, column: str, defense: str, gaps: Sequence[str]
) -> RuleVerdict:
    """Judge a rule on membership.

    FAIL if the lower bound of the share of members that are named is above the limit, PASS if the upper bound is at or below it, else INCONCLUSIVE. It
    is INCONCLUSIVE as well where the threshold cannot be trusted.

    Args:
        results: the audit.
        policy: has the confidence, and what the control must show.
        rule: the rule.
        limit: its limits.
        column: defence in the results that the rule is about.
        defense: defence that the verdict names.
        gaps: problems with the evidence as a whole; a single one keeps the rule from passing.
    """
    found = results.membership if column == shipped_column(results) else None
    point = None if found is None else found.at(limit.false_rate)
    sure = policy.statistics.confidence
    doubts = list(_doubts(results, found, point, limit, sure))
    if found is None or point is None:
        return _verdict(rule, limit, defense, sure, found, None, Status.INCONCLUSIVE, [*doubts, *gaps])
    bounds = found.bounds_at(point, sure)
    lower, upper = bounds.lower or 0.0, 1.0 if bounds.upper is None else bounds.upper
    if doubts:
        return _verdict(rule, limit, defense, sure, found, point, Status.INCONCLUSIVE, [*doubts, *gaps])
    if lower > limit.max_tpr:
        return _verdict(rule, limit, defense, sure, found, point, Status.FAIL, [])
    unmet = [*_no_pass(results, policy, found), *gaps]
    if upper > limit.max_tpr:
        unmet = [
            f"The bounds are {lower:.1%} to {upper:.1%}, on both sides of {limit.max_tpr:g}: audit more steps.",
            *unmet,
        ]
    return _verdict(rule, limit, defense, sure, found, point, Status.INCONCLUSIVE if unmet else Status.PASS, unmet)


NOT_ASKED = "It was not asked who was in the steps: give the audit texts of no step (`membership: {nonmembers: FILE}`, or `leakaudit simulate --nonmembers`)."
"""Why a rule on membership is not decided without such texts."""


NOT_OF_THIS = "It was asked of the update that the run ships, and of no other defence."
"""The same for a defence that the run does not ship."""


def _doubts(
    results: Results, found: Membership | None, point: MembershipPoint | None, limit: MembershipLimit, sure: float
) -> Iterator[str]:
    """Yield why the numbers decide nothing, in sentences."""
    if found is None:
        yield NOT_ASKED if results.membership is None else NOT_OF_THIS
    elif point is None:
        yield f"{found.calibration} scores of calibration texts are too few for {one_in(limit.false_rate)}; audit more steps, or give more texts."
    else:
        if why := broken(found, point, sure):
            yield why
        if why := too_many_false(found, point, sure):
            yield why
        if found.nonmembers < FEWEST_NONMEMBERS:
            yield f"Only {counted(found.nonmembers, 'candidate')} of no step; {FEWEST_NONMEMBERS} are the fewest: audit more steps, or give more texts."


def _no_pass(results: Results, policy: Policy, found: Membership) -> Iterator[str]:
    """Yield why few named texts do not let the rule pass, in sentences."""
    k, n, least = found.control_found, found.control_texts, policy.controls.positive.rate_lower
    if not n or k / n < least:
        yield f"The attack names {k} of {n} texts of a known batch; {least:.0%} are asked for."
    untested = len(results.steps) - len(found.steps)
    if untested > policy.evidence.max_error_share * len(results.steps):
        why = f" ({'; '.join(found.left_out[:2])})" if found.left_out else ""
        yield f"{untested} of {counted(len(results.steps), 'step')} were not asked{why}; the policy allows {policy.evidence.max_error_share:.0%}."


def _verdict(
    rule: Rule,
    limit: MembershipLimit,
    defense: str,
    sure: float,
    found: Membership | None,
    point: MembershipPoint | None,
    status: Status,
    reasons: Sequence[str],
) -> RuleVerdict:
    bounds = None if found is None or point is None else found.bounds_at(point, sure)
    share = None if found is None or point is None else point.found / found.members
    upper = None if bounds is None else bounds.upper
    allowed = f"Policy allows {limit.max_tpr:.0%} at {one_in(limit.false_rate)}."
    return RuleVerdict(
        id=rule.id,
        severity=rule.severity,
        level=rule.level,
        status=status,
        kind="membership",
        subject=SUBJECT,
        defense=defense,
        attacks=() if found is None else (ATTACK,),
        k=None,
        n=0,
        observed=share,
        lower=None if bounds is None else bounds.lower,
        upper=upper,
        threshold=limit.max_tpr,
        margin=None if upper is None else limit.max_tpr - upper,
        confidence=sure,
        method="" if bounds is None else bounds.method,
        reasons=tuple(dict.fromkeys(reasons)),
        sentence=f"{_said(found, point)} {allowed}",
        **NO_STEPS,
    )


def _said(found: Membership | None, point: MembershipPoint | None) -> str:
    """Return what was found at the threshold of a rule, in a sentence."""
    if found is None or point is None:
        return "Nothing says how many texts of the steps are named."
    return in_words(found, point.false_rate)
