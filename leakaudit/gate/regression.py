"""Rules on the difference from a baseline: is this audit worse than that one?

The gate gets the baseline as data (`Reference`). Its caller reads the file or the audit, and compares the comparability keys.

A rule passes if the upper bound of the difference is at or below its margin and fails if the lower bound is above it. A step that nobody could
judge counts against the answer: as a leak in this audit and as clean in the baseline where the rule is to pass, and the other way round where it
is to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from leakaudit.gate.events import EVENTS
from leakaudit.gate.evidence import Evidence
from leakaudit.gate.outcome import Outcome, tolerated
from leakaudit.gate.policy import Policy, Rule
from leakaudit.gate.verdict import Status, Versus
from leakaudit.gate.wording import Finding, change_in_words
from leakaudit.results.differences import PAIRED, TWO_SAMPLES, difference_of_pairs, difference_of_rates, more_steps
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted

Series = tuple[str, int | None, str, str]
"""What is compared: event, shortest text, defence of the scope, attacks."""

Seen = bool | None
"""Whether a step leaked; None if it could leak and nobody could judge it."""

NO_BASELINE = "no baseline is set; `leakaudit baseline set RUN` sets one"
"""What to do where there is none."""


@dataclass(frozen=True)
class Counted:
    """What the baseline's audit found for one rule."""

    steps: tuple[Seen, ...]
    """One entry for each step that could have the event."""
    batches: Mapping[str, Seen] = field(default_factory=dict)
    """Mark of a batch -> the same, for batches that have a mark and occur once."""


@dataclass(frozen=True)
class Reference:
    """The baseline of one judgement, or why there is none."""

    run: str = ""
    """Id of its run."""
    results_digest: str = ""
    """Digest of its results."""
    digest: str = ""
    """Digest of its file; empty if the results themselves were given."""
    pairing: str = ""
    """Id of the key of the marks."""
    series: Mapping[Series, Counted] = field(default_factory=dict)
    differs: str = ""
    """Comparability keys that differ, with both values; empty if the two can be compared."""
    problem: str = ""
    """Why there is no baseline, as the end of a sentence; empty if there is one."""


ABSENT = Reference(problem=NO_BASELINE)


def series_of(rule: Rule) -> Series:
    """Return what a rule on an event counts."""
    attacks = "any" if rule.scope.attacks is None else ", ".join(rule.scope.attacks)
    return rule.event or "", rule.min_tokens, rule.scope.defense, attacks


def outcomes(evidence: Evidence) -> dict[str, Seen]:
    """Return step -> whether it leaked, for the steps that could have the event."""
    unjudged: dict[str, Seen] = dict.fromkeys(evidence.unjudged_steps)
    return {name: value > 0 for name, value in evidence.values.items()} | unjudged


def by_batch(results: Results, seen: Mapping[str, Seen]) -> dict[str, Seen]:
    """Return mark of a batch -> outcome; a batch of several steps is left out."""
    marks = [step.batch for step in results.steps]
    return {
        step.batch: seen[step.id]
        for step in results.steps
        if step.batch and step.id in seen and marks.count(step.batch) == 1
    }


def counted_of(results: Results, evidence: Evidence) -> Counted:
    """Return what an audit found, as a baseline keeps it."""
    seen = outcomes(evidence)
    return Counted(tuple(seen.values()), by_batch(results, seen))


def pairs_of(before: Mapping[str, Seen], after: Mapping[str, Seen], steps: int) -> list[tuple[Seen, Seen]]:
    """Return the outcomes of both audits on each batch of the new one.

    The list is empty unless the first audit has the batch of every step of the new one: a step without its pair may not be left out.

    Args:
        before: mark of a batch -> its outcome in the first audit.
        after: the same in the new audit.
        steps: steps of the new audit that could have the event.
    """
    if not steps or len(after) < steps or not after.keys() <= before.keys():
        return []
    return [(before[mark], seen) for mark, seen in after.items()]


def leaks_of(seen: Iterable[Seen]) -> tuple[int, int]:
    """Return leaks and judged steps."""
    judged = [one for one in seen if one is not None]
    return sum(judged), len(judged)


def softened(policy: Policy, reference: Reference) -> Policy:
    """Return the policy of one judgement.

    A rule with `on_not_comparable: warn` is a warning in it if the baseline cannot be compared.
    """
    if not reference.differs:
        return policy
    rules = tuple(
        rule.model_copy(update={"level": "warn"}) if rule.on_not_comparable == "warn" else rule for rule in policy.rules
    )
    return policy.model_copy(update={"rules": rules})


def judge_regression(
    rule: Rule,
    results: Results,
    evidence: Evidence,
    reference: Reference,
    confidence: float,
    max_unjudged: float | None,
) -> Outcome:
    """Compare the evidence for a rule with the baseline.

    Args:
        rule: the rule, with `versus_baseline`.
        results: the audit that is judged.
        evidence: what it shows for the rule.
        reference: the baseline.
        confidence: of each one-sided bound, 0 to 1.
        max_unjudged: share of the steps that may be unjudged and then do not count as leaks; None for none.
    """
    seen = outcomes(evidence)
    k, n = leaks_of(seen.values())
    problem = _not_compared(rule, results, reference)
    before = reference.series.get(series_of(rule))
    if problem or before is None or not n:
        return Outcome(Status.INCONCLUSIVE, n, k, problem=problem)
    accepted = tolerated(evidence, max_unjudged)
    same_key = bool(reference.pairing) and reference.pairing == results.run.pairing
    pairs = pairs_of(before.batches, by_batch(results, seen), len(seen)) if same_key else []
    judged = [(one, other) for one, other in pairs if one is not None and other is not None]
    found = _of_pairs(pairs, confidence, accepted) if judged else _of_samples(before.steps, seen, confidence, accepted)
    base = leaks_of(one for one, _ in judged) if judged else leaks_of(before.steps)
    new = leaks_of(other for _, other in judged) if judged else (k, n)
    upper = found.upper(0)
    status = _status(found.lower, upper, rule.threshold)
    return Outcome(
        status,
        n,
        k,
        observed=new[0] / new[1] - base[0] / base[1],
        lower=found.lower,
        upper=upper,
        compared=upper,
        more=more_steps(found.upper, rule.threshold) if status is Status.INCONCLUSIVE else None,
        method=PAIRED if judged else TWO_SAMPLES,
        versus=Versus(run=reference.run, paired=bool(judged), base_k=base[0], base_n=base[1], k=new[0], n=new[1]),
    )


def _status(lower: float, upper: float, margin: float) -> Status:
    if upper <= margin:
        return Status.PASS
    return Status.FAIL if lower > margin else Status.INCONCLUSIVE


def _not_compared(rule: Rule, results: Results, reference: Reference) -> str:
    """Return a sentence on why the baseline says nothing; empty if it does."""
    if reference.problem:
        return f"There is nothing to compare with: {reference.problem}."
    if reference.differs:
        softer = "; therefore this rule only warns here (`on_not_comparable: warn`)"
        return (
            f"The baseline {reference.run} cannot be compared: {reference.differs}"
            f"{softer if rule.on_not_comparable == 'warn' else ''}. Set a baseline that was made like this audit."
        )
    if reference.run == results.run.id or (reference.results_digest and reference.results_digest == results.digest):
        return f"The baseline {reference.run} is this audit itself, so nothing is compared; name an earlier one."
    before = reference.series.get(series_of(rule))
    if before is None:
        return (
            f"The baseline {reference.run} did not count what this rule counts; set it again with this policy "
            "(`leakaudit baseline set RUN --policy FILE`)."
        )
    if not leaks_of(before.steps)[1]:
        return f"No step of the baseline {reference.run} could be judged for this rule."
    return ""


@dataclass(frozen=True)
class _Bounded:
    """Bounds of the difference, with the worst of every unjudged step."""

    lower: float
    upper: Callable[[int], float]
    """Number of further steps of this audit without a leak -> the upper bound."""


def _of_pairs(pairs: Sequence[tuple[Seen, Seen]], confidence: float, accepted: bool) -> _Bounded:
    least = [(one is not False, other is True) for one, other in pairs]
    feared = [pair for pair in pairs if pair[1] is not None] if accepted else pairs
    most = [(one is True, other is not False) for one, other in feared]

    def bounds(found: Sequence[tuple[bool, bool]], more: int) -> tuple[float, float]:
        opened = sum(other and not one for one, other in found)
        stopped = sum(one and not other for one, other in found)
        return difference_of_pairs(opened, stopped, len(found) + more, confidence)

    return _Bounded(bounds(least, 0)[0], lambda more: bounds(most, more)[1])


def _of_samples(before: Sequence[Seen], after: Mapping[str, Seen], confidence: float, accepted: bool) -> _Bounded:
    (k0, n0), (k1, n1) = leaks_of(before), leaks_of(after.values())
    unknown0, unknown1 = len(before) - n0, len(after) - n1
    feared = 0 if accepted else unknown1
    return _Bounded(
        difference_of_rates((k0 + unknown0, n0 + unknown0), (k1, n1 + unknown1), confidence)[0],
        lambda more: difference_of_rates((k0, n0 + unknown0), (k1 + feared, n1 + feared + more), confidence)[1],
    )


def sentences_on_difference(finding: Finding) -> list[str]:
    """Return sentences on both audits, their difference and the margin."""
    rule, outcome = finding.rule, finding.outcome
    event, versus = EVENTS[rule.event or ""], outcome.versus
    if versus is None or outcome.lower is None or outcome.upper is None:
        seen = f"{outcome.k} of {counted(outcome.n, 'judged client step')} {event.verb} {finding.where}."
        return [seen]
    how = "on the same batches" if versus.paired else "on other batches"
    change = change_in_words(outcome.observed or 0.0, (outcome.lower, outcome.upper), finding.confidence)
    now = f"{versus.k} of {counted(versus.n, 'judged client step')} {event.verb} {finding.where}"
    said = [f"{now}, and {versus.base_k} of {versus.base_n} in the baseline {versus.run}, {how}: {change}."]
    if finding.evidence.unjudged:
        said.append(f"{counted(finding.evidence.unjudged, 'step')} of this audit could not be judged.")
    said.append(f"Policy allows {100 * rule.threshold:g} points more than in the baseline.")
    if finding.status is Status.INCONCLUSIVE and outcome.more:
        said.append(f"{counted(outcome.more, 'more clean step')} would decide.")
    return said
