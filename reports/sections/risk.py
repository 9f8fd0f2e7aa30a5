"""The section on the worst case, and on defences that would pass."""

from __future__ import annotations

from typing import Any

from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.gate.wording import number
from leakaudit.reports.evidence import evidence_anchor
from leakaudit.reports.frontier import cost_in_words
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.reports.wording import run_time
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted


def section(redacted: RedactedResult) -> Section:
    """Name the worst case, and judge the policy as if another defence were shipped."""
    results, verdict = redacted.results, redacted.verdict
    worst = _worst_rule(verdict)
    return Section(
        "risk",
        "Top risk",
        {
            "risk": _risk(results, verdict),
            "anchor": "" if worst is None else evidence_anchor(worst, redacted),
            "again": _again(worst, redacted),
            "alternatives": _alternatives(results, verdict),
        },
    )


def _alternatives(results: Results, verdict: Verdict) -> list[dict[str, Any]]:
    """Return the other tested defences.

    Those with the same answer, open rules and cost share a row.
    """
    rows: dict[tuple[Status, tuple[str, ...], str], list[str]] = {}
    for one in verdict.alternatives:
        rows.setdefault((one.status, one.open_rules, cost_in_words(results, one.defense)), []).append(one.defense)
    return [
        {"defense": ", ".join(names), "status": status, "open": ", ".join(still_open) or "none", "cost": cost}
        for (status, still_open, cost), names in rows.items()
    ]


def _again(rule: RuleVerdict | None, redacted: RedactedResult) -> str:
    """Return the command that makes the worst case again.

    Empty if its snapshot is not kept.
    """
    if rule is None or rule.worst is None:
        return ""
    return redacted.replays.get(rule.worst, "")


def _worst_rule(verdict: Verdict) -> RuleVerdict | None:
    return next((rule for rule in verdict.rules if rule.worst is not None), None)


def _risk(results: Results, verdict: Verdict) -> str:
    rule = _worst_rule(verdict)
    if rule is None or rule.worst is None:
        if any(rule.n for rule in verdict.rules):
            few = max(rule.unjudged for rule in verdict.rules)
            more = f" Up to {counted(few, 'step')} could not be judged." if few else ""
            return f"No attack recovered anything that a rule of this policy asks about.{more}"
        return "Nothing was measured that a rule of this policy asks about."
    worst = rule.worst
    step = next((s.step for s in results.steps if s.id == worst.step), worst.step)
    metric = results.catalogue.metric_label(rule.subject.split()[-1])
    value = f", with {metric} {number(worst.value)}" if worst.value is not None else ""
    return (
        f"The worst case of rule {rule.id} ({rule.severity}) is training step {step}: "
        f"the attack {worst.attack} needed {run_time(worst.wall_s)}{value}."
    )
