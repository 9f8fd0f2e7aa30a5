"""An in-toto Statement: what the gate found, bound to the artefacts of a release.

Statement v1 with the predicate test-result v0.1 of the in-toto Attestation Framework. It is unsigned: `cosign attest-blob` and the attestation
stores of CI systems sign it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.reports.escaping import plain
from leakaudit.reports.wording import meaning
from leakaudit.results.schema import Artifact

STATEMENT = "https://in-toto.io/Statement/v1"
"""Type of the statement."""

PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
"""Type of the predicate."""

UNDECIDED = "inconclusive:"
"""Prefix of the name of a rule that was not decided. The predicate has no word for it, so such a rule is among the failed tests."""


def attestation(verdict: Verdict, artifacts: Sequence[Artifact]) -> str:
    """Return an unsigned in-toto Statement with the verdict on `artifacts`.

    `result` is PASSED, WARNED (a rule at level warn, or a waived one, does not pass) or FAILED. A verdict that is INCONCLUSIVE or ERROR is FAILED,
    also where the caller allows an undecided one: a statement outlives the call.

    Raises:
        ValueError: no artefact is given; a statement without a subject says nothing.
    """
    if not artifacts:
        raise ValueError("an attestation is about artefacts, and none is given")
    open_rules = [rule for rule in verdict.rules if rule.status is not Status.PASS]
    predicate = {
        "result": _result(verdict),
        "configuration": _configuration(verdict),
        "passedTests": [rule.id for rule in verdict.rules if rule.status is Status.PASS],
        "warnedTests": [_name(rule) for rule in open_rules if not _binds(rule)],
        "failedTests": _failed(verdict),
    }
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": plain(one.name), "digest": {"sha256": one.sha256}} for one in artifacts],
        "predicateType": PREDICATE,
        "predicate": predicate,
    }
    return json.dumps(statement, indent=1) + "\n"


def _result(verdict: Verdict) -> str:
    if verdict.verdict is not Status.PASS:
        return "FAILED"
    return "WARNED" if any(rule.status is not Status.PASS for rule in verdict.rules) else "PASSED"


def _binds(rule: RuleVerdict) -> bool:
    """Return whether a rule has a part in the verdict."""
    return rule.level != "warn" and not rule.waived


def _name(rule: RuleVerdict) -> str:
    return rule.id if rule.status in (Status.PASS, Status.FAIL) else UNDECIDED + rule.id


def _failed(verdict: Verdict) -> list[str]:
    found = [_name(rule) for rule in verdict.rules if _binds(rule) and rule.status is not Status.PASS]
    if verdict.problems or (not found and verdict.verdict is not Status.PASS):
        found.append(UNDECIDED + "leakaudit/evidence")  # no rule of a policy has a slash in its id
    return found


def _configuration(verdict: Verdict) -> list[dict[str, Any]]:
    """Return descriptors of the policy and of the results."""
    found: list[dict[str, Any]] = [
        {
            "name": "policy",
            "digest": {"sha256": verdict.policy_digest.rpartition(":")[2]},
            "annotations": {
                "name": plain(verdict.policy),
                "digestOf": "content without its defaults, as `verdict.json` has it",
                **_origin_of_policy(verdict),
            },
        }
    ]
    said = {
        "verdict": verdict.verdict.value,
        "meaning": meaning(verdict),
        "evaluatedAt": verdict.evaluated_at,
        "validUntil": verdict.valid_until or "",
        **_about(verdict),
    }
    if verdict.results_sha256:
        own = {"run": plain(verdict.run), "contentDigest": verdict.results_digest or "", **said}
        found.append(_results("results.json", verdict.results_sha256, own))
    for run in verdict.runs:
        if run.counted and run.results_sha256:
            own = {"run": plain(run.run), "contentDigest": run.results_digest or "", **said}
            found.append(_results(f"results.json of {plain(run.run)}", run.results_sha256, own))
    return found


def _results(name: str, sha256: str, said: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256.rpartition(":")[2]}, "annotations": said}


def _origin_of_policy(verdict: Verdict) -> dict[str, str]:
    """Say with which policy the run began, and where the judging one was read."""
    said = {
        "policyOfRun": verdict.policy_of_run,
        "changedSinceTheRunBegan": "true" if verdict.policy_changed else "",
        "ref": plain(verdict.policy_ref),
        "commit": verdict.policy_commit,
    }
    return {key: value for key, value in said.items() if value}


def _about(verdict: Verdict) -> dict[str, str]:
    """Say what the results are bound to, and whether that includes the subject."""
    about = verdict.about
    changes = {None: "", True: "with changes", False: "clean"}[about.code_dirty]
    said = {
        "subjectIsNamedByTheRun": "true" if about.compared else "false",
        "codeCommit": plain(about.code_commit or ""),
        "codeTree": changes,
        "baseModel": plain(about.base_model),
        "data": plain(about.data),
    }
    return {key: value for key, value in said.items() if value}
