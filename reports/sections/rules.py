"""The section on the rules of the policy, folded by what decided them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from leakaudit.gate.events import EVENTS
from leakaudit.gate.verdict import RuleVerdict, Status
from leakaudit.gate.wording import allowed, number
from leakaudit.reports.evidence import evidence_anchor
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.reports.wording import confidence_level, listed, rule_bounds
from leakaudit.results.wording import counted

IDS = "OWASP AISVS C11.4, AITG-MOD-05, NIST AI 100-2 E2025 data reconstruction"
"""Where the catalogues of risks name what a finding on recovered data is about, as the annex maps them."""

_NAMED = 3
"""Most rules that the line of a finding names. Our choice: they fit one line, and the list has all of them."""


def section(redacted: RedactedResult) -> Section:
    """Show each finding with what was observed, its bounds, its limit and its rules."""
    verdict = redacted.verdict
    owner = f", owned by {verdict.policy_owner}" if verdict.policy_owner else ""
    groups: dict[Hashable, list[RuleRow]] = {}
    for rule in verdict.rules:
        groups.setdefault(_reason(rule), []).append(_row(rule, redacted))
    lead = f"Policy {verdict.policy}{owner}. What failed comes first; rules with the same reason are one finding, shown by its first rule."
    return Section(
        "rules",
        "Rules",
        {
            "lead": lead,
            "problems": verdict.problems,
            "findings": [_finding(rows) for rows in groups.values()],
            "sure": confidence_level(verdict),
        },
    )


@dataclass(frozen=True)
class RuleRow:
    """One rule in the list of a finding."""

    verdict: RuleVerdict
    seen: str
    bounds: str
    limit: str
    evidence: str
    """Anchor of the strongest evidence against the rule; empty if there is none."""


@dataclass(frozen=True)
class Finding:
    """A row of the table: the rules with one answer for one reason."""

    title: str
    ids: str
    """Names of the finding in catalogues of risks; empty if nothing was recovered from updates."""
    names: str
    rules: Sequence[RuleRow]

    @property
    def first(self) -> RuleRow:
        """The rule whose numbers stand for the finding."""
        return self.rules[0]


def _reason(rule: RuleVerdict) -> Hashable:
    """Return what rules of one finding have in common."""
    if not rule.n and not rule.imported and rule.kind not in ("claimed_epsilon", "membership"):
        return rule.word, "no evidence"
    if rule.status is Status.INCONCLUSIVE and rule.k == 0:
        return rule.word, rule.reasons
    return rule.word, _about(rule), rule.defense, rule.reasons


def _about(rule: RuleVerdict) -> str:
    """Return what a rule is about.

    A kind of recovered thing, or the kind of its limit.
    """
    if rule.imported or rule.subject not in EVENTS or rule.kind == "versus_baseline":
        return f"{rule.kind} {rule.imported}"
    return EVENTS[rule.subject].kind


def _finding(rows: Sequence[RuleRow]) -> Finding:
    rule = rows[0].verdict
    ids = IDS if rule.n and not rule.imported and rule.kind != "claimed_epsilon" else ""
    names = [row.verdict.id for row in rows]
    return Finding(_title(rule), ids, f"{counted(len(rows), 'rule')}: {listed(names, _NAMED)}", rows)


def _title(rule: RuleVerdict) -> str:
    """Return a finding in a few words."""
    if rule.kind == "claimed_epsilon":
        return "Claimed epsilon"
    if rule.kind == "membership":
        return "Texts of the steps that the update names"
    if not rule.n:
        return "No evidence"
    if rule.imported:
        return f"{rule.subject}, judged by {rule.imported}"
    what = EVENTS[rule.subject].short if rule.subject in EVENTS else rule.subject
    if rule.kind == "versus_baseline":
        return f"Change from the baseline: {what}"
    if rule.status is Status.INCONCLUSIVE and rule.k == 0:
        return "Nothing came back, but the evidence is too thin"
    return (
        what[:1].upper() + what[1:] if rule.k else f"Within the limit: {what}" if rule.status is Status.PASS else what
    )


def _row(rule: RuleVerdict, redacted: RedactedResult) -> RuleRow:
    if rule.k is not None:
        now = rule.versus or rule
        seen = f"{now.k} of {now.n}" if rule.n else "no evidence"
        seen += f", baseline {rule.versus.base_k} of {rule.versus.base_n}" if rule.versus else ""
    else:
        seen = number(rule.observed, rule.threshold) if rule.observed is not None else "no evidence"
    return RuleRow(rule, seen, rule_bounds(rule), allowed(rule.kind, rule.threshold), evidence_anchor(rule, redacted))
