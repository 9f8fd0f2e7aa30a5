"""Warnings about a policy: rules that look strict and are not.

Each finding is about a valid policy. What can never be meant is an error of the policy itself (`policy.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import combinations

from leakaudit.config.duration import length_of
from leakaudit.config.yaml_document import Place
from leakaudit.gate.events import EVENTS
from leakaudit.gate.policy import OBSERVED, SHIPPED, Policy, Rule
from leakaudit.gate.steps_needed import steps_of_policy, steps_of_rule
from leakaudit.gate.wording import at_most, percent
from leakaudit.plugins.described import own_goals, own_levels
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.bounds import upper_bound
from leakaudit.results.schema import Kind
from leakaudit.results.wording import counted

LONG_AGE = timedelta(days=90)
"""Longest age of evidence without a warning. Our choice: as long as a waiver may last."""
LOW_CONFIDENCE = 0.9
"""Lowest confidence without a warning. Our choice: below it one clean audit in ten is luck."""
HALF = 0.5
"""Share from which on a limit or an allowance is called wide. Our choice: half of the evidence may then be missing, or half of it may leak."""
WIDE_BOUND = 0.10
"""Highest bound of a rate that a pass may leave open without a warning. Our choice: 29 clean steps reach it at 95 % confidence."""
SHORT = 3
"""Longest least length that counts as a rule on short texts. Two words may come back by luck (`default_policy`)."""

_SENT = frozenset({SHIPPED, OBSERVED, AS_SENT})
"""Names of the update that is sent; which of the two others it is depends on the run."""

_READERS: dict[Kind, frozenset[str]] = {
    "text": frozenset({"text"}),
    "words": frozenset({"text", "words"}),
    "labels": frozenset({"text", "labels"}),
}
"""What an event is about -> what an attack that can show it looks for. Some attacks on texts also read the labels."""


@dataclass(frozen=True)
class Battery:
    """What an audit will run, as its configuration says."""

    attacks: Mapping[str, str | None]
    """Name with its options -> what the attack looks for (text, words or labels); None if unknown."""
    defenses: frozenset[str]
    """Names with their options."""
    min_tokens: int
    """Tokens from which on a text counts as a sentence."""
    controls: int
    """Control steps at most."""
    budget_s: float
    """Time limit of one attempt, in seconds."""
    nonmembers: bool = True
    """Whether it has texts of no step, which rules on membership need."""


@dataclass(frozen=True)
class Finding:
    """One warning about a policy."""

    id: str
    """Short name of the check."""
    path: Place
    """Keys and indices to the value in the policy."""
    sentence: str
    """What is found and why that is weak."""
    advice: str
    """What to do."""
    line: int = field(default=0)
    """Line in the file, counted from 1; 0 if unknown."""


def lint(
    policy: Policy, battery: Battery | None = None, line_of: Callable[[Place], int] | None = None
) -> list[Finding]:
    """Return the warnings about a policy, in the order of the file if it is known.

    Args:
        policy: the policy.
        battery: what the audit will run; None if unknown.
        line_of: returns the line of a value in the file.
    """
    found = [*_cannot_trigger(policy, battery), *(finding for check in _CHECKS for finding in check(policy))]
    if battery is not None:
        found += [*_not_configured(policy, battery), *_configured_less(policy, battery)]
    if line_of is None:
        return found
    return sorted((replace(finding, line=line_of(finding.path)) for finding in found), key=lambda one: one.line)


def _rules(policy: Policy, *, deciding: bool = False) -> Iterator[tuple[Place, Rule]]:
    """Yield each rule with its place.

    `deciding`: only rules at level error that attacks on the update that is sent decide.
    """
    for index, rule in enumerate(policy.rules):
        if not deciding or (rule.level == "error" and rule.of_attacks and rule.scope.defense in _SENT):
            yield ("rules", index), rule


def _kind(rule: Rule) -> Kind | None:
    """Return what a rule is about; None for a metric that is not ours."""
    if rule.event is not None:
        return EVENTS[rule.event].kind
    level = own_levels().get(rule.metric or "")
    return None if level is None else "labels" if level == "step" else "words"


def _cannot_trigger(policy: Policy, battery: Battery | None) -> Iterator[Finding]:
    goals = dict(own_goals()) | (dict(battery.attacks) if battery else {})
    for path, rule in _rules(policy):
        kind, asked = _kind(rule), rule.scope.attacks or (battery.attacks if battery else ())
        looks_for = {goals.get(name, goals.get(name.partition("(")[0])) for name in asked}
        if kind is not None and looks_for and None not in looks_for and not looks_for & _READERS[kind]:
            yield Finding(
                "cannot-trigger",
                (*path, "scope", "attack") if rule.scope.attacks else path,
                f"rule {rule.id!r} is about {_about(rule)}, and its attacks look for {' and '.join(sorted(filter(None, looks_for)))} "
                "only, so none of them can break it",
                f"name an attack that looks for {' or '.join(sorted(_READERS[kind]))} (`leakaudit attacks`), or write any",
            )


def _about(rule: Rule) -> str:
    return f"the event {rule.event}" if rule.event else f"the metric {rule.metric}"


def _not_configured(policy: Policy, battery: Battery) -> Iterator[Finding]:
    for path, rule in _rules(policy):
        asked = [("attack", name, battery.attacks) for name in rule.scope.attacks or ()]
        if rule.scope.defense not in _SENT:
            asked.append(("defense", rule.scope.defense, dict.fromkeys(battery.defenses)))
        for key, name, runs in asked:
            if name not in runs:
                word = "attack" if key == "attack" else "defence"
                yield Finding(
                    "not-configured",
                    (*path, "scope", key),
                    f"rule {rule.id!r} looks at the {word} {name}, which the configuration does not run, so the rule cannot pass",
                    f"write one of {', '.join(sorted(runs))}, with its options, or add it to the configuration",
                )
        if rule.membership is not None and not battery.nonmembers:
            yield Finding(
                "not-configured",
                (*path, "membership"),
                f"rule {rule.id!r} asks who was in a step, and the configuration has no texts of no step, so the rule cannot pass",
                "set membership: {nonmembers: FILE} in the configuration",
            )
    bare = {name.partition("(")[0] for name in battery.attacks}
    for name in policy.requires.attacks:
        if name not in battery.attacks and name not in bare:
            yield Finding(
                "not-configured",
                ("requires", "attacks"),
                f"the policy requires the attack {name}, which the configuration does not run, so no rule can pass",
                "add it to the configuration, or take it out of the policy",
            )


def _configured_less(policy: Policy, battery: Battery) -> Iterator[Finding]:
    asked: list[tuple[Place, float | None, float, str, bool]] = [
        (("evidence", "min_tokens"), policy.evidence.min_tokens, battery.min_tokens, "min_tokens", False),
        (("controls", "positive", "steps"), policy.controls.positive.steps, battery.controls, "controls", True),
        (("controls", "negative", "steps"), policy.controls.negative.steps, battery.controls, "controls", True),
        (("requires", "budget_s"), policy.requires.budget_s, battery.budget_s, "budget_s", True),
    ]
    for path, wanted, given, key, at_least in asked:
        if wanted is not None and (given < wanted if at_least else given > wanted):
            yield Finding(
                "configured-less",
                path,
                f"the policy asks for {wanted:g} and the configuration has {key}: {given:g}, so rules on it cannot pass",
                f"set {key}: {wanted:g} in the configuration",
            )


def _floor(policy: Policy) -> Iterator[Finding]:
    confidence, floor = policy.statistics.confidence, policy.evidence.min_steps
    slow: dict[int, list[tuple[Place, str]]] = {}
    for path, rule in _rules(policy):
        needed, place = steps_of_rule(rule, policy), (*path, rule.limit)
        if needed is None:
            yield Finding(
                "never-shown",
                place,
                f"no number of steps can show the limit of rule {rule.id!r}, so it never passes",
                "write a limit above 0, or limit the largest value (statistic: max)",
            )
        elif needed > floor and rule.level == "error":
            slow.setdefault(needed, []).append((place, rule.id))
    if slow:
        most = max(slow)
        bound = at_most(upper_bound(0, floor, confidence))
        names = ", ".join(name for _, name in slow[most])
        yield Finding(
            "floor-too-low",
            slow[most][0][0],
            f"{counted(floor, 'clean step')} (min_steps) bound a rate by {bound} at best; {names} can pass from {most} clean steps on",
            f"set evidence.min_steps: {most}, so that the policy says how many steps an audit must have",
        )
    enough = steps_of_policy(policy)
    if enough is not None and (left := upper_bound(0, enough, confidence)) > WIDE_BOUND:
        yield Finding(
            "little-evidence",
            ("evidence", "min_steps"),
            f"{counted(enough, 'clean step')} can pass every rule, and up to {at_most(left)} of all steps may then leak",
            "raise evidence.min_steps: 59 clean steps bound the rate by 5 % at 95 % confidence",
        )


def _weak_controls(policy: Policy) -> Iterator[Finding]:
    positive, negative = policy.controls.positive, policy.controls.negative
    at: Place = ("controls", "positive")
    if positive.steps == 0:
        yield Finding(
            "no-control",
            (*at, "steps"),
            "no positive control is asked for, so an audit that cannot find anything passes",
            "ask for 1 control step at least",
        )
    if positive.rate_lower < HALF:
        yield Finding(
            "weak-control",
            (*at, "rate_lower"),
            f"an attack may miss its known text in {percent(1 - positive.rate_lower)} of the control steps and is still trusted",
            "write 0.9",
        )
    at = ("controls", "negative")
    if negative.steps == 0:
        yield Finding(
            "no-control",
            (*at, "steps"),
            "no negative control is asked for, so wrong scores stay unnoticed",
            "ask for 1 control step at least; in an audit of labels alone none is due anyway",
        )
    if negative.rate_upper >= HALF:
        yield Finding(
            "weak-control",
            (*at, "rate_upper"),
            f"text of another batch may be 'recovered' in {percent(negative.rate_upper)} of the control steps, and the scores still count",
            "write 0.1",
        )


def _weak_evidence(policy: Policy) -> Iterator[Finding]:
    evidence = policy.evidence
    for key, what in (
        ("max_error_share", "of the attempts may be lost"),
        ("max_censored", "of the attempts may run out of time"),
        ("max_unjudged", "of the steps may stay unjudged"),
    ):
        share = getattr(evidence, key)
        if share is not None and share >= HALF:
            yield Finding(
                "weak-evidence",
                ("evidence", key),
                f"{percent(share)} {what}, and the rest still passes",
                "write 0.2 or less",
            )
    if length_of(evidence.max_age) > LONG_AGE:
        yield Finding(
            "old-evidence",
            ("evidence", "max_age"),
            f"results may be {evidence.max_age} old; data, model and attacks change in less",
            f"write {LONG_AGE.days}d or less",
        )
    for room, confidence in (("statistics", policy.statistics.confidence), ("nights", policy.nights.confidence)):
        if confidence < LOW_CONFIDENCE:
            yield Finding(
                "low-confidence",
                (room, "confidence"),
                f"with a confidence of {confidence:g} a bound is wrong in {percent(1 - confidence)} of the audits",
                "write 0.95",
            )


def _gaps(policy: Policy) -> Iterator[Finding]:
    deciding = [rule for _, rule in _rules(policy, deciding=True)]
    if not deciding:
        yield Finding(
            "not-shipped",
            ("rules",),
            "no rule at level error looks at the update that is sent (defense: shipped), so no training run can pass",
            "add a rule with scope: {defense: shipped}",
        )
    of_texts = any(_kind(rule) != "labels" for rule in deciding)
    short = any(rule.event and EVENTS[rule.event].any_length and (rule.min_tokens or 1) <= SHORT for rule in deciding)
    if of_texts and not short:
        yield Finding(
            "no-short-texts",
            ("rules",),
            f"no rule at level error counts texts of fewer than {policy.evidence.min_tokens} tokens: names, diagnoses and chat lines may come back",
            f"add a rule with event: exact_sequence, min_tokens: {SHORT}, max_count: 0",
        )
    bounded = {rule.metric for rule in deciding if rule.statistic != "mean"}
    for path, rule in _rules(policy, deciding=True):
        if rule.statistic == "mean" and rule.metric not in bounded:
            yield Finding(
                "mean-only",
                (*path, "statistic"),
                f"only the mean of {rule.metric} is limited: one step of a hundred that leaks everything moves it by 0.01",
                "limit p95 or max of the same metric as well",
            )


def _wide_limits(policy: Policy) -> Iterator[Finding]:
    for path, rule in _rules(policy):
        share = rule.max_count / policy.evidence.min_steps if rule.max_count is not None else rule.max_rate
        named = None if rule.membership is None else rule.membership.max_tpr
        if rule.level == "warn" and rule.severity == "critical":
            yield Finding(
                "critical-warns",
                (*path, "level"),
                f"rule {rule.id!r} is critical and only warns, so it never changes the verdict",
                "set level: error, or a lower severity",
            )
        if rule.level == "error" and share is not None and share >= HALF:
            yield Finding(
                "wide-limit",
                (*path, "max_rate" if rule.max_count is None else "max_count"),
                f"rule {rule.id!r} passes although {percent(share)} of the steps leak",
                "write a share such as 0.05",
            )

        if rule.level == "error" and named is not None and named >= HALF:
            yield Finding(
                "wide-limit",
                (*path, "membership", "max_tpr"),
                f"rule {rule.id!r} passes although {percent(named)} of the texts of a step are named",
                "write a share such as 0.1",
            )


def _repeated(policy: Policy) -> Iterator[Finding]:
    for (_, one), (path, other) in combinations(_rules(policy), 2):
        if one.level != other.level or one.scope != other.scope or _question(one) != _question(other):
            continue
        key = one.limit
        kept, looser = sorted((one, other), key=lambda rule: rule.threshold)
        yield Finding(
            "repeated",
            (*path, key),
            f"rule {looser.id!r} asks what rule {kept.id!r} asks with {key}: {kept.threshold:g}, so its {looser.threshold:g} never decides",
            f"remove rule {looser.id!r}, or give it another scope",
        )


def _question(rule: Rule) -> tuple[object, ...]:
    """Return what a rule asks: everything but its limit, and the key of that."""
    false_rate = None if rule.membership is None else rule.membership.false_rate
    return rule.event, rule.min_tokens, rule.metric, rule.statistic, rule.limit, false_rate


_CHECKS: tuple[Callable[[Policy], Iterator[Finding]], ...] = (
    _floor,
    _weak_controls,
    _weak_evidence,
    _gaps,
    _wide_limits,
    _repeated,
)
