"""The two controls and the age of the evidence, compared with the policy."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Literal

from leakaudit.config.duration import length_of
from leakaudit.gate.events import EVENTS
from leakaudit.gate.policy import NegativeControl, Policy, PositiveControl, Rule
from leakaudit.gate.verdict import ControlVerdict
from leakaudit.gate.wording import at_least, at_most, percent
from leakaudit.results import bounds as stats
from leakaudit.results.consistency import CLOCK_SLACK, moment
from leakaudit.results.schema import Control, Kind, KindControl, Results, Tally
from leakaudit.results.wording import counted


def judge_controls(results: Results, policy: Policy) -> tuple[ControlVerdict, ...]:
    """Judge the positive control of each kind of rule, and the negative one.

    A kind is judged by the attack that recovered it most often.
    """
    confidence = policy.statistics.confidence
    asked = {kind for rule in policy.rules for kind in _kinds_of(rule, results)}
    positive = [_judge_kind(kind, results, policy, results.run.battery.attacks) for kind in _RECOVERED if kind in asked]
    asked_negative = (
        policy.controls.negative.model_copy(update={"steps": 0})
        if _about_labels_only(results)
        else policy.controls.negative
    )
    return (*positive, _judge_negative(results.controls.negative, asked_negative, confidence))


def _about_labels_only(results: Results) -> bool:
    """Return whether an audit can guess labels only.

    That is so if every attack of the battery looks for labels, or if the steps hold no texts. The negative control compares texts and words, so
    it has nothing to compare then.
    """
    entries = [results.catalogue.attacks.get(name) for name in results.run.battery.attacks]
    labels = bool(entries) and all(entry is not None and entry.goal == "labels" for entry in entries)
    finished = [attempt for attempt in results.attempts if attempt.finished]
    return labels or (bool(finished) and not any(attempt.sequences for attempt in finished))


_RECOVERED: dict[Kind, str] = {"text": "the text", "words": "every word", "labels": "the label counts"}
"""Kind -> what was recovered of a canary, in words."""


def trusted(results: Results, policy: Policy, rule: Rule) -> frozenset[str]:
    """Return the attacks that a rule trusts where they find nothing.

    These are the attacks that recovered their canary as the policy asks, in the kind that the rule is about.
    """
    return frozenset(
        name
        for name in results.run.battery.attacks
        if _judge_kind(_kind(rule, name, results), results, policy, (name,)).state == "ok"
    )


def blind(results: Results, policy: Policy, rule: Rule, attacks: Iterable[str]) -> str:
    """Return why none of the attacks behind a rule is trusted, in a sentence."""
    attacks = list(attacks)
    if results.controls.positive.n and not results.controls.kinds:
        return "The results do not say which attack recovered the canary, as schema 1.5 does; audit again with this version."
    kinds = {_kind(rule, name, results): name for name in attacks}
    said = " ".join(_judge_kind(kind, results, policy, attacks).sentence for kind in _RECOVERED if kind in kinds)
    return f"None of the attacks behind this rule ({', '.join(attacks)}) read its canary as the policy asks. {said}"


def _kinds_of(rule: Rule, results: Results) -> set[Kind]:
    if not rule.of_attacks:
        return set()
    return {_kind(rule, name, results) for name in rule.scope.attacks or results.run.battery.attacks}


def _kind(rule: Rule, attack: str, results: Results) -> Kind:
    """Return what an attack must have recovered from its canary for a rule.

    An event says it. A metric of texts may be that of guesses in order or of bags of words, so what the attack looks for says it.
    """
    if rule.event is not None:
        return EVENTS[rule.event].kind
    metric = results.catalogue.metrics.get(rule.metric or "")
    if metric is not None and metric.level == "step":
        return "labels"
    entry = results.catalogue.attacks.get(attack)
    return "words" if entry is not None and entry.goal == "words" else "text"


def _judge_kind(kind: Kind, results: Results, policy: Policy, attacks: Iterable[str]) -> ControlVerdict:
    """Judge the control of one kind by the best of some attacks."""
    found = results.controls.kinds.get(kind, KindControl())
    ran = {name: found.by[name] for name in attacks if name in found.by}
    note = "" if results.controls.positive.n else results.controls.positive.note
    verdicts = [
        _judge_positive(kind, name, own, policy.controls.positive, policy.statistics.confidence, note)
        for name, own in (ran or {"": Tally()}).items()
    ]
    return max(verdicts, key=lambda verdict: (verdict.state == "ok", verdict.k / max(1, verdict.n), verdict.n))


def _judge_positive(
    kind: Kind, attack: str, control: Tally, asked: PositiveControl, confidence: float, note: str
) -> ControlVerdict:
    """Judge one attack; the note says why no control ran, if it is known."""
    k, n, whom = control.k, control.n, f" by {attack}" if attack else ""
    state: Literal["ok", "not run", "failed"] = "ok"
    if n < asked.steps:
        state = "not run"
        why = f": {note}" if note and not n else ""
        said = (
            f"The positive control of {kind} ran on {counted(n, 'step')}{whom}{why}; the policy asks for {asked.steps}."
        )
    elif n == 0:
        said = "No positive control was run, and the policy asks for none."
    else:
        # with few control steps the lower bound is too low even if all n are recovered, so the plain share is compared
        bounded = stats.lower_bound(n, n, confidence) >= asked.rate_lower
        reached = stats.lower_bound(k, n, confidence) if bounded else k / n
        state = "ok" if reached >= asked.rate_lower else "failed"
        what = f"{percent(confidence)} lower bound {at_least(reached, asked.rate_lower)}" if bounded else "plain share"
        said = f"{_RECOVERED[kind].capitalize()} of the canary was recovered{whom} in {k} of {n} control steps ({what})"
        blind = f"; the policy asks for {percent(asked.rate_lower)}, so this audit may be blind."
        said += "." if state == "ok" else blind
    return ControlVerdict(name="positive", kind=kind, by=attack, state=state, k=k, n=n, sentence=said)


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
        said = "No negative control was run, and none is due."
    else:
        bounded = stats.upper_bound(0, n, confidence) <= asked.rate_upper
        upper = stats.upper_bound(k, n, confidence)
        state = "unproven" if bounded and upper > asked.rate_upper else "ok"
        bound = f"{percent(confidence)} upper bound {at_most(upper, asked.rate_upper)}"
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
    age = max(now - finished, timedelta())  # the audit's clock may be ahead, by up to CLOCK_SLACK
    started = moment(results.run.started)
    if started is not None and finished < started - CLOCK_SLACK:  # not a contradiction: a clock may be set back
        return age, "By its own clock the audit finished before it started, so its age is unknown."
    if age > length_of(policy.evidence.max_age):
        old = f"{age.total_seconds() / 86400:.1f} days"
        return age, f"The evidence is {old} old; the policy allows {policy.evidence.max_age}."
    return age, ""
