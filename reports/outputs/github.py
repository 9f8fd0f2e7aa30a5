"""The words of GitHub Actions: annotations, outputs of a job, and a badge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.reports.escaping import plain
from leakaudit.reports.wording import policy_changed

COLOURS = {Status.PASS: "brightgreen", Status.FAIL: "red", Status.INCONCLUSIVE: "yellow", Status.ERROR: "lightgrey"}
"""Colour of a badge, as shields.io names it."""

MOST_ANNOTATIONS = 10
"""Most annotations of one kind that GitHub shows for a step."""


def workflow_commands(
    verdict: Verdict, policy: Path | None = None, lines: Mapping[str, int] | None = None
) -> list[str]:
    """Return one workflow command for each rule that does not pass.

    A rule that fails or cannot be decided is an `error`, and one at level warn a `warning`. Evidence that cannot be judged is an `error`.

    Args:
        verdict: of the gate.
        policy: the policy's file; None for the built-in one.
        lines: id of a rule -> its line in that file, counted from 1.
    """
    found = [
        _rule(rule, policy, (lines or {}).get(rule.id), allowed=verdict.allowed)
        for rule in verdict.rules
        if rule.status is not Status.PASS
    ]
    found += [_command("error", "leakaudit: evidence", problem) for problem in verdict.problems]
    errors = [one for one in found if one.startswith("::error")]
    return [*errors[:MOST_ANNOTATIONS], *[one for one in found if one not in errors][:MOST_ANNOTATIONS]]


def _rule(rule: RuleVerdict, policy: Path | None, line: int | None, *, allowed: bool) -> str:
    kind = "warning" if allowed or rule.level == "warn" or rule.waived else "error"
    where = {} if policy is None else {"file": policy.as_posix(), **({} if line is None else {"line": str(line)})}
    return _command(kind, f"leakaudit: {rule.word}, {rule.id}", rule.sentence, where)


def _command(kind: str, title: str, text: str, where: Mapping[str, str] | None = None) -> str:
    """Return a workflow command; characters that would end it are escaped."""
    properties = ",".join(f"{name}={_property(value)}" for name, value in {**(where or {}), "title": title}.items())
    return f"::{kind} {properties}::{_data(text)}"


def _data(text: str) -> str:
    return plain(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def job_outputs(verdict: Verdict) -> str:
    """Return lines for the file that `GITHUB_OUTPUT` names: one value a line."""
    binding = [rule for rule in verdict.rules if rule.level == "error" and not rule.waived]
    failed = ",".join(rule.id for rule in binding if rule.status is not Status.PASS)
    found = {
        "verdict": verdict.verdict.value,
        "exit-code": str(verdict.exit_code),
        "sentence": verdict.sentence,
        "open-rules": failed,
        "policy-changed": policy_changed(verdict),
        "results-digest": verdict.results_digest or verdict.results_sha256 or "",
    }
    return "".join(f"{name}={plain(value)}\n" for name, value in found.items())


def badge(verdict: Verdict) -> str:
    """Return the JSON of a badge, as the `endpoint` of shields.io reads it."""
    return json.dumps(
        {
            "schemaVersion": 1,
            "label": "leakaudit",
            "message": verdict.verdict.value if not verdict.texts_back else f"{verdict.verdict.value}, leaks",
            "color": "red" if verdict.texts_back else COLOURS[verdict.verdict],
            "isError": verdict.verdict is not Status.PASS,
        },
        indent=1,
    )
