"""Links from a rule to the strongest evidence against it."""

from __future__ import annotations

from leakaudit.gate.verdict import RuleVerdict
from leakaudit.reports.redaction import RedactedResult


def sample_anchors(redacted: RedactedResult) -> dict[tuple[str, str], str]:
    """Return (step, sequence) -> anchor of every text that the report shows."""
    return {(view.step, view.sequence): f"s-{i:04d}" for i, view in enumerate(redacted.sequences, start=1)}


def evidence_anchor(rule: RuleVerdict, redacted: RedactedResult) -> str:
    """Return the anchor of the strongest evidence against a rule.

    It is a text from the rule's worst step, or the matrix if no such text is shown.

    It is empty if there is no evidence against the rule.
    """
    if rule.worst is None:
        return ""
    shown = (anchor for (step, _), anchor in sample_anchors(redacted).items() if step == rule.worst.step)
    return next(shown, "matrix")
