"""What `leakaudit explain` says of rules, events, and other words of a verdict."""

from __future__ import annotations

from dataclasses import dataclass

from leakaudit.explanation import Explanation, Topic
from leakaudit.gate.events import EVENTS
from leakaudit.gate.imported import SUBJECTS
from leakaudit.gate.policy import (
    OBSERVED,
    SHIPPED,
    EvidencePolicy,
    ImportedRule,
    Policy,
    Rule,
    default_policy,
    round_policy,
)
from leakaudit.gate.steps_needed import steps_of_rule
from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.gate.wording import allowed, ended, percent
from leakaudit.results.as_sent import shipped_column
from leakaudit.results.membership import one_in
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted

WORDS: dict[str, Explanation] = {
    "positive-control": Explanation(
        what="An undefended step with known text, which the attacks of the audit must recover.",
        tells="An attack that recovers it works here, so that it finds nothing elsewhere means something.",
        tells_not="That the attack finds everything: real texts may be longer, and a defence may be in the way.",
        do="If it failed or did not run, no rule that needs its kind passes. Check model and tokenizer of the audit, give "
        "the attacks more time, and audit again.",
    ),
    "negative-control": Explanation(
        what="An update of another batch, from which the text must not be recovered.",
        tells="If the text is `recovered` from it, the scores of the audit are wrong, and every rule is undecided.",
        tells_not="Whether anything leaks.",
        do="If it failed, do not use the audit. Look for an attack that was given the text, and report it.",
    ),
    "canary": Explanation(
        what="The made-up sentence of the positive control.",
        tells="Which attack recovered it, and so which attack is trusted where it finds nothing.",
        tells_not="Anything about the private texts.",
        do="`leakaudit explain positive-control` says what to do if it was not recovered.",
    ),
    "unjudged": Explanation(
        what="A step that could have leaked, was attacked, and about which no attack of the rule can say anything.",
        tells="No attack applied, all crashed or ran out of time, or the step could not be verified. The sentence of the "
        "rule names the reasons.",
        tells_not="That the step is clean. Where a rule is to pass it counts as a leak, where it is to fail as clean.",
        do="Add an attack that applies, or give more time. `max_unjudged` of the policy accepts a share of such steps.",
    ),
    "shipped": Explanation(
        what="The update as the training run sends it, with the defence that the run itself applies.",
        tells="Rules with `defense: shipped` judge what really leaves the client.",
        tells_not="How another defence would do: the comparison in the report says that.",
        do="Keep at least one rule at level error on it, or no rule passes for a training run.",
    ),
    "bound": Explanation(
        what="With 95 % confidence the true rate is at most the upper bound, or at least the lower one (one-sided).",
        tells="How far few steps can lead: 59 steps without a leak bound the rate by 5 %.",
        tells_not="Anything about attacks that did not run.",
        do="Audit more steps to narrow it. The number of further clean steps stands in the verdict.",
    ),
    "warn": Explanation(
        what="A rule at level warn that fails.",
        tells="More came back than the rule allows.",
        tells_not="The verdict: a rule at level warn is shown and never changes it.",
        do="Read its sentence. Write `level: error` in the policy if it should decide.",
    ),
    "waived": Explanation(
        what="A rule that fails and that a waiver lets fail until a day, with an owner and a reason.",
        tells="Somebody has taken responsibility for this leak, for a time.",
        tells_not="That the leak is gone: its numbers stand beside it.",
        do="Repair the cause before the waiver ends. `leakaudit gate --at DAY` rehearses the end.",
    ),
}
"""Word of a verdict -> what `leakaudit explain` says of it."""


def built_in() -> list[tuple[Policy, Rule]]:
    """Return the rules of the built-in policies, each rule once."""
    found: list[tuple[Policy, Rule]] = []
    for policy in (default_policy(), round_policy()):
        found += [(policy, rule) for rule in policy.rules if rule not in [known for _, known in found]]
    return found


def is_built_in(verdict: Verdict) -> bool:
    """Return whether a verdict was made by a built-in policy."""
    return verdict.policy_digest in (default_policy().digest, round_policy().digest)


def event_topic(name: str) -> Topic:
    """Explain an event that a policy may limit."""
    event = EVENTS[name]
    happened = event.clause.format(tokens=EvidencePolicy().min_tokens, any_length="")
    control = {"text": "the text", "words": "every word", "labels": "the label counts"}[event.kind]
    said = Explanation(
        what=f"Something that counts as a leak of a client step: {happened}.",
        tells=event.tells,
        tells_not=event.tells_not,
        do=f"Limit it by a rule of the policy: `event: {name}` with `max_count: 0` or `max_rate: 0.05`. The audit's positive "
        f"control must recover {control}.",
    )
    return Topic("event", name, f"{name}: an event of the gate", said.parts)


def rule_topic(policy: Policy, rule: Rule | ImportedRule, seen: Seen | None = None) -> Topic:
    """Explain a rule of a policy.

    Args:
        policy: the policy.
        rule: one of its rules.
        seen: an audit and its verdict by that policy, to say what the rule found there; None to explain the rule alone.
    """
    tokens = policy.evidence.min_tokens if seen is None else seen.results.min_tokens
    said = _of_others(rule, policy) if isinstance(rule, ImportedRule) else _of_audit(rule, policy, tokens)
    said += (
        [("What to do", f"`leakaudit explain {rule.id} --run RUN` says what it saw in an audit.")]
        if seen is None
        else _seen(rule, policy, seen)
    )
    return Topic("rule", rule.id, f"{rule.id}: a rule of the policy {policy.name!r}", tuple(said))


def _of_audit(rule: Rule, policy: Policy, tokens: int) -> list[tuple[str, str]]:
    undecided = (
        "in every other case: too few steps, steps that nobody could judge, a control that did not work, or results"
        if rule.of_attacks
        else "without an accountant, with a doubt about what it says, with a gap in the audit, or with results"
        if rule.claimed_epsilon is not None
        else "in every other case: no or too few texts of no step, a threshold that lets too many of them through, or results"
    )
    return [
        ("It limits", _subject(rule, tokens)),
        ("Allowed", f"{allowed(rule.limit, rule.threshold)}. {_weight(rule)}"),
        ("It fails if", _fails(rule, policy.statistics.confidence)),
        ("It passes if", _passes(rule, policy)),
        ("Undecided", f"{undecided} older than {policy.evidence.max_age}."),
    ]


def _of_others(rule: ImportedRule, policy: Policy) -> list[tuple[str, str]]:
    """Return what a rule on the results of another auditor asks."""
    limit, sure = allowed("max_value", rule.max_value), percent(policy.statistics.confidence)
    return [
        ("It limits", f"the {SUBJECTS[rule.measure]} of the trained model, as {rule.import_} found it."),
        ("Allowed", f"{limit}. {_weight(rule)}"),
        ("It fails if", f"the {sure} lower bound is above {limit}."),
        ("It passes if", f"the {sure} upper bound is {limit} or less."),
        ("Undecided", f"without a report of {rule.import_}, or with one older than {policy.evidence.max_age}."),
    ]


@dataclass(frozen=True)
class Seen:
    """An audit, and the verdict on it by the policy of a rule."""

    results: Results
    verdict: Verdict


def _subject(rule: Rule, tokens: int) -> str:
    if rule.claimed_epsilon is not None:
        return f"the epsilon that an accountant gives for delta {rule.claimed_epsilon.delta_max:g} or less, and what recovered secrets say against it; the audit does not confirm it."
    if rule.membership is not None:
        return f"the share of the texts of the steps that the update names, at {one_in(rule.membership.false_rate)}; candidates and texts of no step are granted."
    where = {SHIPPED: "on the update as the run ships it", OBSERVED: "on the update as it was observed"}.get(
        rule.scope.defense, f"under the defence {rule.scope.defense}"
    )
    by = "any attack counts" if rule.scope.attacks is None else f"of attacks, only {', '.join(rule.scope.attacks)}"
    if rule.event is None:
        statistic = {"mean": "mean", "p95": "95th percentile", "max": "highest value"}[rule.statistic or "max"]
        return f"the {statistic} of {rule.metric} over client steps, {where}; a step has the highest score of its attacks; {by}."
    length = "" if rule.min_tokens is None else f" of {rule.min_tokens}+ tokens"
    clause = EVENTS[rule.event].clause.format(tokens=tokens, any_length=length)
    if rule.versus_baseline is not None:
        return f"how much larger than in the baseline the share of client steps is in which {clause}, {where}; {by} (event {rule.event})."
    much = "share" if rule.max_rate is not None else "number"
    return f"the {much} of client steps in which {clause}, {where}; {by} (event {rule.event})."


def _weight(rule: Rule | ImportedRule) -> str:
    """Return a sentence on what the rule means for the verdict."""
    if rule.level == "warn":
        return "At level warn it is shown and never changes the verdict."
    waiver = "cannot be waived" if rule.severity == "critical" else "can be waived"
    return f"It decides the verdict and {waiver} (severity {rule.severity})."


def _fails(rule: Rule, confidence: float) -> str:
    if rule.claimed_epsilon is not None:
        return f"an accountant gives more than {rule.threshold:g}, or recovered secrets contradict what is claimed of one step."
    if rule.membership is not None:
        return f"the {percent(confidence)} lower bound is above {allowed(rule.limit, rule.threshold)}."
    limit, sure = allowed(rule.limit, rule.threshold), percent(confidence)
    if rule.max_count is not None:
        return "one step has it." if rule.max_count == 0 else f"more than {limit} have it."
    if rule.statistic == "max":
        return f"one step scores above {limit}."
    if rule.statistic == "p95":
        return f"surely more than 5% of the steps score above {limit} ({sure} confidence)."
    what = " of the change since the baseline" if rule.versus_baseline is not None else ""
    return f"the {sure} lower bound{what} is above {limit}."


def _passes(rule: Rule, policy: Policy) -> str:
    if rule.claimed_epsilon is not None:
        return f"an accountant gives {rule.threshold:g} or less for the whole run."
    if rule.membership is not None:
        sure = percent(policy.statistics.confidence)
        return f"the {sure} upper bound is {allowed(rule.limit, rule.threshold)} or less, and the attack names the texts of a known batch."
    limit, sure = allowed(rule.limit, rule.threshold), percent(policy.statistics.confidence)
    steps = counted(steps_of_rule(rule, policy) or policy.evidence.min_steps, "step")
    if rule.max_count is not None:
        condition = f"at most {limit} has it" if rule.max_count == 1 else f"{limit} has it"
        condition = f"at most {limit} have it" if rule.max_count > 1 else condition
        return f"{condition}, of {steps} or more that an attack could judge, and the attack read its control."
    if rule.statistic == "max":
        return f"no step scores above {limit}, of {steps} or more, and the attack read its control."
    least = f"{steps} at the least" if rule.metric else f"{steps} without a leak at the least"
    what = " of the change since the baseline" if rule.versus_baseline is not None else ""
    return f"the {sure} upper bound{what} is {limit} or less, which takes {least}, and the attack read its control."


def _seen(rule: Rule | ImportedRule, policy: Policy, seen: Seen) -> list[tuple[str, str]]:
    """Return what the rule found in an audit, and what to do next."""
    found = next((one for one in seen.verdict.rules if one.id == rule.id), None)
    if found is None:
        problem = f"{seen.verdict.verdict}. {seen.verdict.sentence}"
        return [("In this run", problem), ("What to do", "`leakaudit explain exit-code 5` says what to do.")]
    reasons = list(found.reasons)[:_MOST_REASONS]
    more = len(found.reasons) - len(reasons)
    reasons += [f"({counted(more, 'more reason')} in the report)"] if more else []
    said = [ended(one) for one in (found.sentence, *reasons)]
    word = "WARN" if found.word == "WARN" else found.status.value
    return [("In this run", " ".join([f"{word}.", *said])), ("What to do", _next(found, policy, seen))]


_MOST_REASONS = 3
"""Most reasons of a rule that are printed. Our choice: the report has all of them."""


_NEXT_OF_CLAIM = {
    Status.PASS: "Nothing about this rule. The audit does not confirm the accountant's number.",
    Status.INCONCLUSIVE: "Correct what the reasons name, and audit again.",
    Status.FAIL: "Do not ship. If secrets contradict the claim, look for noise that is missing; else train with more noise or for fewer steps.",
}
"""Status of a rule on a claimed epsilon -> what to do."""


_NEXT_OF_MEMBERSHIP = {
    Status.PASS: "Nothing about this rule. It speaks of one attack, and another may name more.",
    Status.INCONCLUSIVE: "Correct what the reasons name, and audit again.",
    Status.FAIL: "Do not ship. Add noise, or send updates of more texts.",
}
"""Status of a rule on membership -> what to do."""


def _next(found: RuleVerdict, policy: Policy, seen: Seen) -> str:
    """Return what to do after what a rule found."""
    if found.imported:
        return f"`leakaudit gate RUN --{found.imported} FILE` judges this rule by its report, which this command does not read."
    if found.kind == "claimed_epsilon":
        return _NEXT_OF_CLAIM[found.status]
    if found.kind == "membership":
        return _NEXT_OF_MEMBERSHIP[found.status]
    if found.status is Status.PASS:
        return "Nothing about this rule. It speaks of the attacks that ran, and of no others."
    if found.status is Status.FAIL:
        worst = f" Look first at step {found.worst.step} (attack {found.worst.attack})." if found.worst else ""
        return f"Do not ship.{worst}{_defences(found, seen)}"
    if found.n == 0:
        return "Audit with an attack that can show this, on steps that can have it."
    missing = max(found.more_clean_steps or 0, policy.evidence.min_steps - found.n)
    if missing > 0:
        others = len(found.reasons) - (found.n < policy.evidence.min_steps)
        rest = " Correct what the other reasons name as well." if others > 0 else ""
        return (
            f"Audit {counted(missing, 'more step')} at the least; if none of them leaks, their number is enough.{rest}"
        )
    return "Correct what the reasons name, and audit again." if found.reasons else "Audit more steps, and judge again."


def _defences(found: RuleVerdict, seen: Seen) -> str:
    """Return a sentence on the defences of the audit under which the rule passes.

    It is empty if the rule judges one defence by name.
    """
    if found.defense not in (SHIPPED, shipped_column(seen.results)):
        return ""
    tried = seen.verdict.alternatives
    passing = [one.defense for one in tried if any(r.id == found.id and r.status is Status.PASS for r in one.rules)]
    if passing:
        return f" It passes under {', '.join(passing[:3])}."
    return (
        " No other defence of this audit passes it."
        if tried
        else " Audit defences as well, to find one that passes it."
    )
