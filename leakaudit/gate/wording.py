"""The sentences of a verdict: what was observed and what the policy allows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from leakaudit.gate.events import EVENTS, Event
from leakaudit.gate.evidence import Evidence
from leakaudit.gate.outcome import Outcome, tolerated
from leakaudit.gate.policy import OBSERVED, SHIPPED, Rule
from leakaudit.gate.verdict import LimitKind, Status
from leakaudit.results import bounds as stats
from leakaudit.results.as_sent import AS_SENT, shipped_column
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted


def percent(value: float, beside: float | None = None) -> str:
    """Return a share as a percentage, with enough digits to differ from `beside`.

    >>> percent(0.11667), percent(0.05), percent(0.0504, beside=0.05), percent(0.0001)
    ('11.7%', '5%', '5.04%', '<0.1%')
    """
    if 0 < value < 0.0005 and beside is None:
        return "<0.1%"
    if 0.9995 < value < 1 and beside is None:
        return ">99.9%"
    text = _distinct(100 * value, None if beside is None else 100 * beside, 1)
    return (text.rstrip("0").rstrip(".") if "." in text else text) + "%"


def at_most(value: float, beside: float | None = None) -> str:
    """Return an upper bound as a percentage, rounded up.

    It has enough digits to differ from `beside`.

    >>> at_most(0.0481), at_most(0.05), at_most(0.0001), at_most(0.99999), at_most(0.0496, beside=0.05)
    ('4.9%', '5%', '0.1%', '100%', '4.96%')
    """
    return _outwards(math.ceil, value, beside)


def at_least(value: float, beside: float | None = None) -> str:
    """Return a lower bound as a percentage, rounded down.

    It has enough digits to differ from `beside`.

    >>> at_least(0.0119), at_least(0.05), at_least(0.0001), at_least(0.99999), at_least(0.0504, beside=0.05)
    ('1.1%', '5%', '0%', '99.9%', '5.04%')
    """
    return _outwards(math.floor, value, beside)


def rate_between(lower: float, upper: float, beside: float | None = None) -> str:
    """Return two bounds of a rate, each rounded away from the rate.

    >>> rate_between(0.6069, 1.0), rate_between(0.0, 0.3931)
    ('60.6% to 100%', '0% to 39.4%')
    """
    return f"{at_least(lower, beside)} to {at_most(upper, beside)}"


def _outwards(rounding: Callable[[float], int], value: float, beside: float | None) -> str:
    for digits in range(1, 7):
        end = rounding(round(100 * value * 10**digits, 6)) / 10**digits
        if beside is None or value == beside or abs(end - 100 * beside) > 1e-9:
            break
    return f"{end:.{digits}f}".rstrip("0").rstrip(".") + "%"


def number(value: float, beside: float | None = None) -> str:
    """Return a score from 0 to 1 with two digits, or enough to differ from `beside`.

    >>> number(0.5), number(0.501, beside=0.5)
    ('0.50', '0.501')
    """
    return _distinct(value, beside, 2)


def allowed(kind: LimitKind, limit: float) -> str:
    """Return the limit of a rule, for tables and for sentences such as `allowed: 5%`.

    >>> allowed("max_rate", 0.05), allowed("max_count", 0), allowed("max_count", 3), allowed("versus_baseline", 0.03)
    ('5%', 'no step', '3 steps', '+3 points')
    """
    if kind == "max_count":
        return counted(int(limit), "step") if limit else "no step"
    if kind == "versus_baseline":
        return f"{100 * limit:+g} points"
    if kind == "claimed_epsilon":
        return f"epsilon {limit:g}"
    return percent(limit) if kind in ("max_rate", "membership") else number(limit)


def change_in_words(difference: float, bounds: tuple[float, float], confidence: float) -> str:
    """Return the difference of two rates in points, with its bounds.

    >>> change_in_words(0.1, (0.021, 0.18), 0.95)
    'the rate changed by +10.0 points, 95% bounds +2.1 to +18.0'
    """
    low, high = (f"{100 * bound:+.1f}" for bound in bounds)
    return f"the rate changed by {100 * difference:+.1f} points, {100 * confidence:.0f}% bounds {low} to {high}"


def _distinct(value: float, beside: float | None, digits: int) -> str:
    while beside is not None and value != beside and digits < 6 and round(value, digits) == round(beside, digits):
        digits += 1
    return f"{value:.{digits}f}"


@dataclass(frozen=True)
class Finding:
    """A judged rule with all data that its sentences need."""

    rule: Rule
    outcome: Outcome
    evidence: Evidence
    status: Status
    """The rule's status after evidence floor and controls were considered."""
    confidence: float
    where: str
    """The defence, as the last words of a sentence."""
    min_tokens: int
    """Least length of a text that counts."""
    max_unjudged: float | None = None
    """Share of the steps that the policy lets be unjudged."""
    metric: str = ""
    """Label of the rule's metric; empty for a rule on an event."""

    @property
    def sure(self) -> str:
        """The confidence in percent."""
        return percent(self.confidence)


def sentences(finding: Finding) -> list[str]:
    """Return sentences on what was observed and what the policy allows."""
    if finding.outcome.n == 0:
        return [f"There is no evidence {finding.where}: {ended(finding.evidence.problem)} Not tested is not a pass."]
    if finding.rule.event is None:
        return [*_about_metric(finding), *_about_limits(finding)]
    return [*_about_event(finding, EVENTS[finding.rule.event]), *_about_limits(finding)]


def _about_event(finding: Finding, event: Event) -> list[str]:
    rule, outcome, evidence = finding.rule, finding.outcome, finding.evidence
    said = [_observed_event(finding, event)]
    said += _about_unjudged(finding)
    if evidence.left_out:
        said.append(f"Not counted: {counted(evidence.left_out, 'step')} without a text that long.")
    most = percent(rule.max_rate) if rule.max_rate is not None else f"{rule.max_count or 'none'}"
    said.append(f"Policy allows {most}.")
    if finding.status is Status.INCONCLUSIVE and outcome.more:
        said.append(f"{counted(outcome.more, 'more clean step')} would decide.")
    if finding.status is not Status.FAIL and event.tells_reach:
        said += _about_reach(evidence.reach)
    return said


def _observed_event(finding: Finding, event: Event) -> str:
    """Return the sentence on how many steps had the event, with the bounds."""
    length = "" if finding.rule.min_tokens is None else f" of {finding.rule.min_tokens}+ tokens"
    clause, inverted, denial = (
        words.format(tokens=finding.min_tokens, any_length=length)
        for words in (event.clause, event.inverted, event.denial)
    )
    audited = "judged" if finding.evidence.unjudged else "audited"
    k, n, limit = finding.outcome.k or 0, finding.outcome.n, finding.rule.max_rate
    sure, where = finding.sure, finding.where
    low, high = at_least(finding.outcome.lower or 0.0, limit), at_most(finding.outcome.upper or 0.0, limit)
    if n == 1 and k == 0 and not finding.evidence.unjudged:
        return f"1 client step audited: {denial} {where}. The rate may be anything up to {sure}."
    if n == 1 and k:
        return f"In the one {audited} client step {clause} {where}."
    if k == 0:
        return f"In none of {counted(n, f'{audited} client step')} {inverted} {where}; {sure} upper bound {high}."
    bounds = {
        Status.FAIL: f"{sure} lower bound {low}",
        Status.PASS: f"{sure} upper bound {high}",
    }.get(finding.status, f"{sure} bounds {low} to {high}")
    return f"In {k} of {n} {audited} client steps ({percent(k / n)}, {bounds}) {clause} {where}."


def _about_unjudged(finding: Finding) -> list[str]:
    """Return a sentence on the steps that nobody could judge."""
    evidence = finding.evidence
    few, of = evidence.unjudged, evidence.unjudged + finding.outcome.n
    if not few:
        return []
    reasons = Counter(evidence.unjudged_steps.values())
    why = "; ".join(f"{n} {reason}" if len(reasons) > 1 else reason for reason, n in reasons.items())
    said = f"{few} of {counted(of, 'audited step')} could not be judged ({why})"
    if tolerated(evidence, finding.max_unjudged):
        return [f"{said}; the policy accepts {percent(finding.max_unjudged or 0.0)}."]
    return [f"{said}: to pass, {'it counts as a leak' if few == 1 else 'they count as leaks'}."]


def _about_limits(finding: Finding) -> list[str]:
    """Return a sentence on clean steps about which some attacks can say nothing."""
    evidence = finding.evidence
    if finding.status is Status.FAIL or not evidence.beyond or not evidence.limited:
        return []
    others = ", ".join(name for name in evidence.attacks if name not in evidence.limited)
    verb = "has" if evidence.beyond == 1 else "have"
    steps = f"{counted(evidence.beyond, 'step')} without such a leak {verb} as many tokens as the hidden size or more."
    limit = f"{', '.join(evidence.limited)} can say nothing there; what counts is that {others} found none."
    return [steps, f"That is no protection: {limit}"]


def _about_reach(reach: Mapping[str, int]) -> list[str]:
    """Return sentences on whether the attacks could have found the missed texts.

    The list is empty if no attack can tell, or if no text was missed.
    """
    gave_up, out = reach.get("search gave up", 0), reach.get("out of reach", 0)
    missed = gave_up + out + reach.get("unknown", 0)
    if gave_up:
        verb = "was" if gave_up == 1 else "were"
        which = f"{gave_up} of the {missed} texts" if missed > 1 else "The text"
        return [
            f"{which} that did not come back {verb} in reach of an attack whose search gave up: that is no protection."
        ]
    if 0 < out < missed:
        return [
            f"{out} of the {missed} texts that did not come back are out of reach of these attacks, but not of every attack."
        ]
    if out:
        return ["What did not come back is out of reach of these attacks, but not of every attack."]
    return []


def _about_metric(finding: Finding) -> list[str]:
    rule, outcome, sure = finding.rule, finding.outcome, finding.sure
    metric = finding.metric
    name = {"mean": f"mean {metric}", "p95": f"95th percentile of {metric}", "max": f"highest {metric}"}
    steps = "the one audited client step" if outcome.n == 1 else f"{outcome.n} audited client steps"
    limit = rule.threshold
    bound = ""
    if finding.status is Status.FAIL and outcome.lower is not None:
        bound = f", {sure} lower bound {number(outcome.lower, limit)}"
    elif outcome.upper is not None:
        bound = f", {sure} upper bound {number(outcome.upper, limit)}"
    observed = number(outcome.observed or 0.0, limit)
    said = [f"The {name[rule.statistic or 'max']} of {steps} is {observed}{bound}, {finding.where}."]
    said += _about_unjudged(finding)
    said.append(f"Policy allows {number(limit)}.")
    if finding.status is Status.INCONCLUSIVE and outcome.upper is None and rule.statistic != "max":
        needed = 59 if rule.statistic == "p95" else stats.MIN_STEPS_FOR_BOOTSTRAP
        said.append(f"An upper bound needs {needed} steps or more.")
    return said


def where(results: Results, defense: str) -> str:
    """Return the defence of a rule as the last words of a sentence."""
    if defense != SHIPPED:
        return f"under the defence {defense}" if defense != OBSERVED else "with no defence added"
    changed = shipped_column(results) == AS_SENT
    shipped = sorted({step.shipped_defense for step in results.steps})
    if shipped in ([], [OBSERVED]):
        return "from the updates as they were sent" if changed else "from the updates you ship (no defence)"
    return f"under the defence you ship ({', '.join(shipped)})"


def ended(sentence: str) -> str:
    """Return a sentence with a full stop, unless it already ends with a mark."""
    return sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."
