"""The section on what the audit did not test."""

from __future__ import annotations

from collections import Counter

from leakaudit.gate.verdict import Verdict
from leakaudit.gate.wording import percent
from leakaudit.reports.cells import OBSERVED
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.reports.wording import without_repeats
from leakaudit.results.regime import regime_in_words
from leakaudit.results.schema import AttemptStatus, Results
from leakaudit.results.wording import counted


def section(redacted: RedactedResult) -> Section:
    """List steps, attacks and adversaries about which the audit says nothing."""
    results = redacted.results
    coverage = results.coverage
    found = [{"what": item.what, "why": item.why} for item in coverage.not_tested]
    found += [{"what": f"attack {item.what}", "why": f"not run: {item.why}"} for item in coverage.not_run]
    found += [*_unfinished(results), *_steps_left_out(results, redacted.verdict)]
    return Section(
        "coverage",
        "What was not tested",
        {"coverage": found, "threat": _threat(results), "regime": regime_in_words(results)},
    )


def _unfinished(results: Results) -> list[dict[str, str]]:
    """Return the attacks that did not run to their end, with the reason."""
    words = {AttemptStatus.ERROR: "crashed"}
    states: Counter[tuple[str, str]] = Counter()
    reasons: dict[tuple[str, str], list[str]] = {}
    for attempt in results.attempts:
        if not attempt.finished:
            where = "" if attempt.defense == OBSERVED else f" under {attempt.defense}"
            word = words.get(attempt.status, attempt.status.value.replace("_", " "))
            key = (f"attack {attempt.attack}{where}", word)
            states[key] += 1
            reasons.setdefault(key, []).append(attempt.reason)
    found = []
    for (what, word), n in states.items():
        why = "; ".join(without_repeats(filter(None, reasons[what, word])))
        found.append({"what": what, "why": f"{word} in {counted(n, 'attempt')}" + (f": {why}" if why else "")})
    return found


def _steps_left_out(results: Results, verdict: Verdict) -> list[dict[str, str]]:
    """Return the steps that were not audited or are not evidence, with the reason."""
    coverage, found = results.coverage, []
    if verdict.unverified_steps:
        why = "the observed update does not come from the kept batch, so no number is shown for them"
        found.append({"what": counted(verdict.unverified_steps, "step"), "why": why})
    if coverage.total_steps:
        unseen = coverage.total_steps - len(results.steps)
        share = percent(max(0, unseen) / coverage.total_steps)
        why = f"{unseen} of {coverage.total_steps} ({share}) were not audited"
        found.append({"what": "other steps of the run", "why": why})
    if coverage.skipped_snapshots:
        why = "refused, and their steps are unknown"
        found.append({"what": counted(coverage.skipped_snapshots, "snapshot"), "why": why})
    if results.run.interrupted:
        found.append({"what": "the rest of this audit", "why": "it was interrupted"})
    return found


def _threat(results: Results) -> str:
    """Describe the adversary of the audit."""
    threat = results.threat_model
    granted = f" Granted beyond that, as papers do: {', '.join(threat.granted)}." if threat.granted else ""
    return (
        f"The adversary of this audit: {threat.adversary}, who sees {threat.sees} and knows {', '.join(threat.knows)}."
        f"{granted} Any other adversary is out of scope."
    )
