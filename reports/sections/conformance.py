"""The section on whether a run does what the accountant of its epsilon assumes."""

from __future__ import annotations

from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import MOST_ROWS, Section
from leakaudit.results.conformance import ConformanceCheck, in_words
from leakaudit.results.wording import counted


def section(redacted: RedactedResult) -> Section | None:
    """Show every check of the run's declared noise; nothing if it declares none."""
    found = redacted.results.conformance
    if found is None:
        return None
    facts = {
        "said": in_words(found),
        "wrong": bool(found.contradicted),
        "mechanism": found.mechanism,
        "level": f"{found.level:.2g}",
        "steps": counted(len(found.steps), "step"),
        "rows": [_row(one) for one in found.checks[:MOST_ROWS]],
        "left_out": found.left_out[:MOST_ROWS],
    }
    return Section("conformance", "Does the run do what its epsilon assumes?", facts, urgent=bool(found.contradicted))


def _row(one: ConformanceCheck) -> dict[str, str]:
    state = {"contradicted": "leak", "not contradicted": "clean", "not tested": "open"}[one.outcome]
    return {"about": one.about, "outcome": one.outcome, "state": state, "sentence": one.sentence}
