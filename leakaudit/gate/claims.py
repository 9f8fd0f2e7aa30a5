"""Rules on the epsilon of differential privacy that an accountant gives.

An audit does not confirm an epsilon. Such a rule compares what the accountant says with what the policy allows, and fails where the updates
contradict what the accountant assumes, or where secrets that an attack recovered contradict what the mechanism claims of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, FiniteFloat

from leakaudit.gate.policy_parts import PolicyPart
from leakaudit.gate.verdict import NO_STEPS, RuleVerdict, Status
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.canaries import bounded, bounds_on, strongest
from leakaudit.results.conformance import CONTRADICTED, ConformanceCheck
from leakaudit.results.privacy import SHIPPED, stated, statements_on
from leakaudit.results.schema import Privacy, Results
from leakaudit.results.wording import counted

if TYPE_CHECKING:
    from leakaudit.gate.policy import Rule

SUBJECT = "claimed epsilon"
"""What such a rule is about, in outputs."""


class ClaimedEpsilon(PolicyPart):
    """The largest epsilon that the accountant of a run may give."""

    max: Annotated[FiniteFloat, Field(gt=0.0)]
    """Largest epsilon of the whole run. The rule passes at or below it and fails above it."""
    delta_max: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    """Largest delta for which epsilon may be given. The default is that of Abadi et al. (2016)."""


@dataclass(frozen=True)
class _Answer:
    """What the statements on one defence say to a rule."""

    status: Status
    said: str
    """What was found, in a sentence."""
    reasons: tuple[str, ...] = ()
    """Why the rule is not decided, in sentences."""
    epsilon: float | None = None


def judge_claim(
    results: Results, rule: Rule, claimed: ClaimedEpsilon, column: str, defense: str, gaps: Sequence[str]
) -> RuleVerdict:
    """Judge a rule on a claimed epsilon.

    FAIL if the updates contradict what the accountant assumes, if recovered secrets contradict what the mechanism claims of one step, or if any
    epsilon is above the limit. PASS if an accountant's epsilon is at or below it, else INCONCLUSIVE. A bound that contradicts nothing changes nothing.

    Args:
        results: the audit.
        rule: the rule.
        claimed: its limits.
        column: defence in the results whose statements count.
        defense: defence that the verdict names.
        gaps: problems with the evidence as a whole; a single one keeps the rule from passing.
    """
    refuted = strongest([one for one in bounds_on(results, column) if one.verdict == "contradicted"])
    answer = _answer(statements_on(results, column), claimed)
    if column in _OF_THE_RUN and results.conformance is not None and (wrong := results.conformance.contradicted):
        answer = _Answer(Status.FAIL, f"{answer.said} {CONTRADICTED}: {_first_of(wrong)}", (), answer.epsilon)
    if refuted is not None:
        answer = _Answer(Status.FAIL, f"{bounded(refuted)} {answer.said}", (), answer.epsilon)
    held = answer.status is Status.PASS and bool(gaps)
    status = Status.INCONCLUSIVE if held else answer.status
    reasons = (*answer.reasons, *gaps) if status is Status.INCONCLUSIVE else ()
    allowed = f"Policy allows epsilon up to {claimed.max:g} at delta up to {claimed.delta_max:g}."
    return RuleVerdict(
        id=rule.id,
        severity=rule.severity,
        level=rule.level,
        status=status,
        kind="claimed_epsilon",
        subject=SUBJECT,
        defense=defense,
        attacks=(),
        k=None,
        n=0,
        observed=answer.epsilon,
        lower=None,
        upper=None,
        threshold=claimed.max,
        margin=None if answer.epsilon is None else claimed.max - answer.epsilon,
        confidence=_NO_SAMPLE if refuted is None else refuted.confidence,
        method=_NUMBER if refuted is None else "secrets recovered from single steps (Clopper-Pearson)",
        reasons=reasons,
        sentence=f"{answer.said} {allowed}",
        **NO_STEPS,
    )


_OF_THE_RUN = (SHIPPED, AS_SENT)
"""Columns that show what the run itself ships, of which alone the measured noise is."""


def _first_of(wrong: Sequence[ConformanceCheck]) -> str:
    """Return the first contradiction, and how many more there are."""
    more = len(wrong) - 1
    return wrong[0].sentence + (f" {counted(more, 'more contradiction')} in `leakaudit conformance`." if more else "")


_NUMBER = "the accountant's number; no estimate of the audit"
"""How the rule is judged where no secret contradicts the claim."""

_NO_SAMPLE = 1.0
"""Confidence of a comparison of two numbers, which samples nothing."""


def _answer(found: Sequence[Privacy], claimed: ClaimedEpsilon) -> _Answer:
    """Return what the statements say; the largest epsilon counts."""
    numbers = [one for one in found if one.epsilon is not None]
    if not numbers:
        return _Answer(Status.INCONCLUSIVE, stated(found[0]) if found else NO_ACCOUNTANT, (NOT_STATED,))
    worst = max(numbers, key=lambda one: one.epsilon or 0.0)
    epsilon = worst.epsilon or 0.0
    if epsilon > claimed.max:  # a smaller delta or more messages only make epsilon larger
        return _Answer(Status.FAIL, stated(worst), (), epsilon)
    doubts = tuple(doubt for one in numbers for doubt in _doubts(one, claimed))
    contradicted = _contradicted(found, numbers)
    reasons = tuple(dict.fromkeys((*doubts, *contradicted)))
    return _Answer(Status.INCONCLUSIVE if reasons else Status.PASS, stated(worst), reasons, epsilon)


NO_ACCOUNTANT = "There is no accountant, so there is no epsilon."
NOT_STATED = "A rule on a claimed epsilon needs an accountant: train with Opacus, or write `privacy` in the audit's configuration."


def _doubts(one: Privacy, claimed: ClaimedEpsilon) -> list[str]:
    """Return why an epsilon within the limit does not let the rule pass."""
    doubts = []
    if not one.accountant:
        doubts.append("The claim does not name the accountant that computed it (`privacy: {accountant: ...}`).")
    if one.covers != "run":
        doubts.append(
            "This epsilon is of one message, and the rule is about the whole run; nothing adds the messages up."
        )
    if one.delta is None:
        doubts.append("The statement does not say at which delta epsilon holds.")
    elif one.delta > claimed.delta_max:
        doubts.append(
            f"Epsilon is given at a delta of {one.delta:g}, above {claimed.delta_max:g}; set `privacy: {{delta: {claimed.delta_max:g}}}` "
            "in the audit's configuration and train again."
        )
    return doubts


def _contradicted(found: Sequence[Privacy], numbers: Sequence[Privacy]) -> list[str]:
    """Return why a claim does not stand where the run's own accountant gives none.

    An accountant that is not there contradicts nothing. One that counted, but not the steps of this run, does.
    """
    if any(one.origin != "claim" for one in numbers):
        return []
    return [
        f"The run's own accountant gives no epsilon: {one.why_not}." for one in found if one.why_not and one.accountant
    ]
