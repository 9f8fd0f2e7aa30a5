"""The two controls and the age of the evidence, compared with the policy."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

from leakaudit.config.duration import length_of
from leakaudit.gate.policy import NegativeControl, Policy, PositiveControl
from leakaudit.gate.verdict import ControlVerdict
from leakaudit.gate.wording import percent
from leakaudit.results import bounds as stats
from leakaudit.results.consistency import CLOCK_SLACK, moment
from leakaudit.results.schema import Control, Results
from leakaudit.results.wording import counted


def judge_controls(results: Results, policy: Policy) -> tuple[ControlVerdict, ...]:
    """Judge the positive and the negative control."""
    confidence = policy.statistics.confidence
    return (
        _judge_positive(results.controls.positive, policy.controls.positive, confidence),
        _judge_negative(results.controls.negative, policy.controls.negative, confidence),
    )


def _judge_positive(control: Control, asked: PositiveControl, confidence: float) -> ControlVerdict:
    k, n = control.k, control.n
    state: Literal["ok", "not run", "failed"] = "ok"
    if n < asked.steps:
        state = "not run"
        said = f"The positive control ran on {counted(n, 'step')}; the policy asks for {asked.steps}."
    elif n == 0:
        said = "No positive control was run, and the policy asks for none."
    else:
        # with few control steps the lower bound is too low even if all n are recovered, so the plain share is compared
        bounded = stats.lower_bound(n, n, confidence) >= asked.rate_lower
        reached = stats.lower_bound(k, n, confidence) if bounded else k / n
        state = "ok" if reached >= asked.rate_lower else "failed"
        what = f"{percent(confidence)} lower bound {percent(reached, asked.rate_lower)}" if bounded else "plain share"
        said = f"The positive control was recovered in {k} of {n} control steps ({what})"
        blind = f"; the policy asks for {percent(asked.rate_lower)}, so this audit may be blind."
        said += "." if state == "ok" else blind
    return ControlVerdict(name="positive", state=state, k=k, n=n, sentence=said)


def _judge_negative(control: Control, asked: NegativeControl, confidence: float) -> ControlVerdict:
    k, n = control.k, control.n
    state: Literal["ok", "not run", "failed", "unproven"] = "ok"
    if n and k / n > asked.rate_upper:
        state = "failed"
        said = f"The negative control leaked in {k} of {n} control steps: the scores of this audit are wrong."
    elif n < asked.steps:
        state = "not run"
        said = f"The negative control ran on {counted(n, 'step')}; the policy asks for {asked.steps}."
    elif n == 0:
        said = "No negative control was run, and the policy asks for none."
    else:
        bounded = stats.upper_bound(0, n, confidence) <= asked.rate_upper
        upper = stats.upper_bound(k, n, confidence)
        state = "unproven" if bounded and upper > asked.rate_upper else "ok"
        bound = f"{percent(confidence)} upper bound {percent(upper, asked.rate_upper)}"
        said = f"The negative control leaked in {k} of {n} control steps ({bound if bounded else 'plain share'})"
        said += "." if state == "ok" else f"; the policy allows {percent(asked.rate_upper)}."
    return ControlVerdict(name="negative", state=state, k=k, n=n, sentence=said)


def judge_age(results: Results, policy: Policy, now: datetime) -> tuple[timedelta | None, str]:
    """Return the age of the evidence, and its problem as a sentence.

    The age is None if it is unknown; the sentence is empty if there is no problem.
    """
    finished = moment(results.run.finished)
    if finished is None:
        return None, "The results do not say when the audit finished, so their age is unknown."
    age = now - finished
    started = moment(results.run.started)
    if started is not None and finished < started - CLOCK_SLACK:  # not a contradiction: a clock may be set back
        return age, "By its own clock the audit finished before it started, so its age is unknown."
    if age > length_of(policy.evidence.max_age):
        old = f"{age.total_seconds() / 86400:.1f} days"
        return age, f"The evidence is {old} old; the policy allows {policy.evidence.max_age}."
    return age, ""
