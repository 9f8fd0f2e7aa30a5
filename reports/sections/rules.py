"""The section on the rules of the policy."""

from __future__ import annotations

from dataclasses import dataclass

from leakaudit.gate.verdict import RuleVerdict
from leakaudit.gate.wording import allowed, number
from leakaudit.reports.evidence import evidence_anchor
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.reports.wording import confidence_level, rule_bounds


def section(redacted: RedactedResult) -> Section:
    """Show each rule with what was observed, its bounds and its limit."""
    verdict = redacted.verdict
    owner = f", owned by {verdict.policy_owner}" if verdict.policy_owner else ""
    return Section(
        "rules",
        "Rules",
        {
            "lead": f"Policy {verdict.policy}{owner}. What failed comes first.",
            "problems": verdict.problems,
            "rules": [_row(rule, redacted) for rule in verdict.rules],
            "sure": confidence_level(verdict),
        },
    )


@dataclass(frozen=True)
class RuleRow:
    """A row of the table: one rule."""

    verdict: RuleVerdict
    seen: str
    bounds: str
    limit: str
    evidence: str
    """Anchor of the strongest evidence against the rule; empty if there is none."""


def _row(rule: RuleVerdict, redacted: RedactedResult) -> RuleRow:
    if rule.k is not None:
        now = rule.versus or rule
        seen = f"{now.k} of {now.n}" if rule.n else "no evidence"
        seen += f", baseline {rule.versus.base_k} of {rule.versus.base_n}" if rule.versus else ""
    else:
        seen = number(rule.observed, rule.threshold) if rule.observed is not None else "no evidence"
    return RuleRow(rule, seen, rule_bounds(rule), allowed(rule.kind, rule.threshold), evidence_anchor(rule, redacted))
