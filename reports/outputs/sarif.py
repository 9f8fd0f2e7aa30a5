"""SARIF 2.1.0: each rule that does not pass is a result at its line of the policy.

The keys are those of the OASIS standard (`sarif-schema-2.1.0.json`). Code scanning of GitHub, Azure DevOps and editors read it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from leakaudit import __version__
from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.gate.wording import allowed
from leakaudit.reports.escaping import plain
from leakaudit.reports.wording import meaning, policy_changed

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
"""Address of the schema, as the standard gives it."""

EVIDENCE = "leakaudit/evidence"
"""Id of the result for evidence that cannot be judged. No rule of a policy can have it, because of its slash."""

SECURITY = {"critical": "9.5", "high": "8.0", "medium": "5.5", "low": "2.0"}
"""Severity of a rule -> the number that GitHub sorts by. Our choice: the middle of GitHub's range of the same name."""


def sarif(verdict: Verdict, policy: Path | None = None, lines: Mapping[str, int] | None = None) -> str:
    """Return a verdict as SARIF with one result for each rule that does not pass.

    A result is an `error`, or a `warning` for a rule at level warn, for a waived one, which is also suppressed, and for an undecided one where the
    caller allows it. Else one that cannot be decided is an `error`, too: a pipeline that counts results
    must not go on. Evidence that cannot be judged is a result of its own, and the run then says that it did not succeed.

    Args:
        verdict: of the gate.
        policy: the policy's file; None for the built-in one, whose results have no location.
        lines: id of a rule -> its line in that file, counted from 1.
    """
    rules = [_descriptor(rule) for rule in verdict.rules]
    results = [
        _result(index, rule, verdict, _locations(policy, (lines or {}).get(rule.id)))
        for index, rule in enumerate(verdict.rules)
        if rule.status is not Status.PASS
    ]
    if verdict.problems or (verdict.verdict is not Status.PASS and not results):
        rules.append(_evidence_descriptor())
        results.append(_evidence_result(len(rules) - 1, verdict, _locations(policy, None)))
    run = {
        "tool": {"driver": {"name": "leakaudit", "version": __version__, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {"executionSuccessful": verdict.verdict is not Status.ERROR, "endTimeUtc": verdict.evaluated_at}
        ],
        "results": results,
        "properties": {
            "verdict": verdict.verdict.value,
            "meaning": meaning(verdict),
            "sentence": plain(verdict.sentence),
            "policy": plain(verdict.policy),
            "policyDigest": verdict.policy_digest,
            "policyChanged": policy_changed(verdict),
            "resultsDigest": verdict.results_digest or verdict.results_sha256 or "",
        },
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _descriptor(rule: RuleVerdict) -> dict[str, Any]:
    said = f"{rule.subject} under {rule.defense}; allowed: {allowed(rule.kind, rule.threshold)}."
    return {
        "id": rule.id,
        "shortDescription": {"text": _message(said)},
        "defaultConfiguration": {"level": _level(rule)},
        "properties": {"tags": ["privacy", "security"], "security-severity": SECURITY.get(rule.severity, "8.0")},
    }


def _result(index: int, rule: RuleVerdict, verdict: Verdict, locations: list[Any]) -> dict[str, Any]:
    text = " ".join([f"{rule.word}: {rule.sentence}", *rule.reasons])
    found = {
        "ruleId": rule.id,
        "ruleIndex": index,
        "level": "warning" if rule.waived or verdict.allowed else _level(rule),
        "message": {"text": _message(text)},
        "locations": locations,
        "partialFingerprints": {"leakauditRule/v1": _fingerprint(verdict.policy, rule.id)},
        "properties": {"status": rule.status.value, "severity": rule.severity},
    }
    if rule.waived:
        # without a status: it counts as accepted (3.27.23), and drafts of the schema call the key otherwise
        suppression = {"kind": "external", "justification": plain(rule.waived)}
        found["suppressions"] = [suppression]
    return found


def _evidence_descriptor() -> dict[str, Any]:
    return {
        "id": EVIDENCE,
        "shortDescription": {"text": "The evidence can be judged."},
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": ["privacy", "security"], "security-severity": "8.0"},
    }


def _evidence_result(index: int, verdict: Verdict, locations: list[Any]) -> dict[str, Any]:
    said = "; ".join(verdict.problems) or verdict.sentence
    return {
        "ruleId": EVIDENCE,
        "ruleIndex": index,
        "level": "error",
        "message": {"text": _message(f"{verdict.verdict.value}: {said}")},
        "locations": locations,
        "partialFingerprints": {"leakauditRule/v1": _fingerprint(verdict.policy, EVIDENCE)},
        "properties": {"status": verdict.verdict.value},
    }


def _level(rule: RuleVerdict) -> str:
    return "warning" if rule.level == "warn" else "error"


def _message(text: str) -> str:
    """Return a message without placeholders and links (SARIF 3.11.5, 3.11.6)."""
    return plain(text).replace("{", "{{").replace("}", "}}").replace("](", "] (")


def _fingerprint(policy: str, rule: str) -> str:
    """Return a digest of what a rule is, not of what it finds or where it stands."""
    return hashlib.sha256(f"{policy}\0{rule}".encode(errors="surrogatepass")).hexdigest()


def _locations(policy: Path | None, line: int | None) -> list[Any]:
    """Return the place of a rule; the policy's file is named from the working folder."""
    if policy is None:
        return []
    where: dict[str, Any] = {"artifactLocation": _address(policy)}
    if line is not None:
        where["region"] = {"startLine": line}
    return [{"physicalLocation": where}]


def _address(file: Path) -> dict[str, str]:
    """Return the address of a file: from the root of the sources, or its name alone."""
    whole, here = Path(os.path.abspath(file)), Path.cwd()  # noqa: PTH100 - resolve() would follow links out of the repository
    if not whole.is_relative_to(here):
        return {"uri": quote(os.fsencode(whole.name))}
    return {"uri": quote(os.fsencode(whole.relative_to(here).as_posix())), "uriBaseId": "%SRCROOT%"}
