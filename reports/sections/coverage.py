"""The section on what the audit did not test."""

from __future__ import annotations

from leakaudit.gate.wording import percent
from leakaudit.reports.cells import OBSERVED
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.results.schema import AttemptStatus
from leakaudit.results.wording import counted


def section(redacted: RedactedResult) -> Section:
    """List the steps, attacks and adversaries that the audit says nothing about."""
    results, verdict = redacted.results, redacted.verdict
    coverage, found = results.coverage, []
    found += [{"what": item.what, "why": item.why} for item in coverage.not_tested]
    found += [{"what": f"attack {item.what}", "why": f"not run: {item.why}"} for item in coverage.not_run]
    states: dict[tuple[str, str, str], int] = {}
    for attempt in results.attempts:
        if not attempt.finished:
            where = "" if attempt.defense == OBSERVED else f" under {attempt.defense}"
            word = {AttemptStatus.ERROR: "crashed", AttemptStatus.SKIPPED: "skipped"}.get(
                attempt.status, "not applicable"
            )
            key = (f"attack {attempt.attack}{where}", word, attempt.reason)
            states[key] = states.get(key, 0) + 1
    found += [
        {"what": what, "why": f"{word} in {counted(n, 'attempt')}" + (f": {reason}" if reason else "")}
        for (what, word, reason), n in states.items()
    ]
    if verdict.unverified_steps:
        why = "the observed update does not come from the batch that was kept, so no number is shown for them"
        found.append({"what": counted(verdict.unverified_steps, "step"), "why": why})
    if coverage.total_steps:
        unseen = coverage.total_steps - len(results.steps)
        share = percent(max(0, unseen) / coverage.total_steps)
        found.append(
            {"what": "other steps of the run", "why": f"{unseen} of {coverage.total_steps} ({share}) were not audited"}
        )
    if coverage.skipped_snapshots:
        why = "refused, and nobody knows of which step they were"
        found.append({"what": counted(coverage.skipped_snapshots, "snapshot"), "why": why})
    if results.run.interrupted:
        found.append({"what": "the rest of this audit", "why": "it was interrupted"})
    threat = results.threat_model
    granted = ", ".join(threat.granted)
    text = (
        f"The adversary of this audit: {threat.adversary}, who sees {threat.sees} and knows {', '.join(threat.knows)}"
    )
    text += f". Granted beyond that, as papers do: {granted}." if granted else "."
    text += " Any other adversary is out of scope."
    return Section("coverage", "What was not tested", {"coverage": found, "threat": text})
