"""The verdict on each rule, from its numbers, the evidence floor and the gaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leakaudit.gate.claims import judge_claim
from leakaudit.gate.controls import blind, trusted
from leakaudit.gate.events import EVENTS
from leakaudit.gate.evidence import Evidence, Index, gather
from leakaudit.gate.floors import below
from leakaudit.gate.membership import judge_membership
from leakaudit.gate.outcome import judge_numbers
from leakaudit.gate.policy import SHIPPED, EvidencePolicy, Policy, Rule
from leakaudit.gate.regression import ABSENT, Reference, judge_regression, sentences_on_difference
from leakaudit.gate.verdict import RuleVerdict, Status
from leakaudit.gate.wording import Finding, percent, sentences, where
from leakaudit.results.as_sent import shipped_column
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted


@dataclass(frozen=True)
class Gaps:
    """Problems with the evidence of the whole audit, as sentences."""

    sentences: tuple[str, ...] = ()
    """Problems; a single one keeps every rule from passing."""
    broken: str = ""
    """Why the scores themselves are wrong, so that every rule is INCONCLUSIVE; empty if they are not."""


def judge_rules(
    results: Results,
    policy: Policy,
    shipped_as: str,
    gaps: Gaps,
    reference: Reference = ABSENT,
    index: Index | None = None,
) -> list[RuleVerdict]:
    """Judge every rule.

    Args:
        results: the audit.
        policy: the rules.
        shipped_as: the defence that stands for `shipped` in the rules.
        gaps: problems of the whole audit.
        reference: the baseline, for rules on the difference from it.
        index: the attempts of `results`; None to group them here.
    """
    index = index or Index(results)
    return [
        _judge(
            results,
            policy,
            rule,
            shipped_as if rule.scope.defense == SHIPPED else rule.scope.defense,
            gaps,
            reference,
            index,
        )
        for rule in policy.rules
    ]


def _judge(
    results: Results, policy: Policy, rule: Rule, defense: str, gaps: Gaps, reference: Reference, index: Index
) -> RuleVerdict:
    column = shipped_column(results) if defense == SHIPPED else defense
    if rule.claimed_epsilon is not None:
        return judge_claim(results, rule, rule.claimed_epsilon, column, defense, gaps.sentences)
    if rule.membership is not None:
        return judge_membership(results, policy, rule, rule.membership, column, defense, gaps.sentences)
    readers = trusted(results, policy, rule)
    gaps = replace(gaps, broken=gaps.broken or _upside_down(results, rule))
    evidence = gather(results, rule, column, readers, index)
    confidence = policy.statistics.confidence
    if rule.versus_baseline is None:
        outcome = judge_numbers(rule, evidence, confidence, policy.evidence.max_unjudged)
    else:
        outcome = judge_regression(rule, results, evidence, reference, confidence, policy.evidence.max_unjudged)
    if outcome.more is not None:  # the floor asks for steps as well
        outcome = replace(outcome, more=max(outcome.more, policy.evidence.min_steps - evidence.bounding))
    unmet = list(gaps.sentences)
    if evidence.values:
        unsure = [] if readers & {*evidence.attacks} else [blind(results, policy, rule, evidence.attacks)]
        floors = below(results, evidence, policy.evidence)
        unmet = [*_shortfalls(evidence, policy.evidence), *floors, *_too_short(results, policy, rule), *unsure, *unmet]
    unmet = [*([outcome.problem] if outcome.problem else []), *unmet]
    status = Status.INCONCLUSIVE if gaps.broken or (outcome.status is Status.PASS and unmet) else outcome.status
    reasons = unmet if status is Status.INCONCLUSIVE else []
    if gaps.broken:
        reasons = [gaps.broken, *(gap for gap in reasons if gap != gaps.broken)]
    finding = Finding(
        rule,
        outcome,
        evidence,
        status,
        confidence,
        where=where(results, defense),
        min_tokens=results.min_tokens,
        metric=results.catalogue.metric_label(rule.metric or ""),
        max_unjudged=policy.evidence.max_unjudged,
    )
    return _verdict(finding, defense, reasons, readers)


def unclaimed(results: Results, policy: Policy) -> Iterator[str]:
    """Yield why what accountants say of one of several runs lets no rule pass."""
    for rule in policy.rules:
        if rule.claimed_epsilon is None or rule.level != "error":
            continue
        column = shipped_column(results) if rule.scope.defense == SHIPPED else rule.scope.defense
        found = judge_claim(results, rule, rule.claimed_epsilon, column, rule.scope.defense, ())
        if found.status is Status.INCONCLUSIVE:
            yield " ".join([found.sentence, *found.reasons])


def _verdict(finding: Finding, defense: str, reasons: list[str], readers: frozenset[str]) -> RuleVerdict:
    rule, outcome, evidence = finding.rule, finding.outcome, finding.evidence
    return RuleVerdict(
        id=rule.id,
        severity=rule.severity,
        level=rule.level,
        status=finding.status,
        kind=rule.limit,
        subject=rule.event or f"{rule.statistic} {rule.metric}",
        defense=defense,
        scope=rule.scope.attacks or (),
        attacks=evidence.attacks,
        trusted=tuple(sorted(readers)),
        min_tokens=rule.min_tokens,
        max_unjudged=finding.max_unjudged,
        k=outcome.k,
        n=outcome.n,
        observed=outcome.observed,
        lower=outcome.lower,
        upper=outcome.upper,
        threshold=rule.threshold,
        margin=None if outcome.compared is None else rule.threshold - outcome.compared,
        more_clean_steps=outcome.more if finding.status is Status.INCONCLUSIVE else None,
        confidence=finding.confidence,
        method=outcome.method,
        censored=evidence.censored,
        lost=evidence.lost,
        due=evidence.due,
        left_out=evidence.left_out,
        silent=evidence.silent,
        unjudged=evidence.unjudged,
        reasons=tuple(reasons),
        sentence=" ".join(_said(finding)),
        worst=evidence.worst,
        versus=outcome.versus,
    )


def _said(finding: Finding) -> list[str]:
    """Return the sentences of a rule."""
    compared = finding.rule.versus_baseline is not None and finding.outcome.n
    return sentences_on_difference(finding) if compared else sentences(finding)


def _upside_down(results: Results, rule: Rule) -> str:
    """Return a sentence if a lower score means that more leaked.

    The highest score of a step then says nothing about its worst attack.
    """
    metric = results.catalogue.metrics.get(rule.metric or "")
    if metric is None or metric.higher_is_better:
        return ""
    return f"A lower {metric.label} means that more leaked, so a limit on its largest value shows nothing."


def _too_short(results: Results, policy: Policy, rule: Rule) -> list[str]:
    """Return a sentence if the audit did not count texts that the policy counts."""
    if rule.event is None or not EVENTS[rule.event].long_texts or results.min_tokens <= policy.evidence.min_tokens:
        return []
    asked = policy.evidence.min_tokens
    return [
        f"The policy counts texts of {asked}+ tokens; the audit counted those of {results.min_tokens}+ (`min_tokens`)."
    ]


def _shortfalls(evidence: Evidence, floor: EvidencePolicy) -> list[str]:
    """Return sentences on where the evidence is below the floor of the policy."""
    found = []
    n = evidence.bounding
    if n < floor.min_steps:
        there = "is 1" if n == 1 else f"are {n}"
        found.append(f"The policy asks for {floor.min_steps} steps of evidence; there {there}.")
        if evidence.repeated:
            repeat = "step repeats" if evidence.repeated == 1 else "steps repeat"
            found.append(f"{evidence.repeated} {repeat} the update of another step and did not count again.")
    found += _too_many(
        evidence.lost,
        evidence.due,
        floor.max_error_share,
        "crashed, were skipped or not needed, or had no usable update",
    )
    found += _too_many(evidence.censored, evidence.finished, floor.max_censored, "ran out of time")
    return found


def _too_many(few: int, of: int, allowed: float, what: str) -> list[str]:
    """Return a sentence if a larger share of the attempts than allowed ended badly."""
    if not of or few / of <= allowed:
        return []
    share = percent(few / of, allowed)
    return [f"{few} of {counted(of, 'attempt')} ({share}) {what}; the policy allows {percent(allowed)}."]
