"""Tags for a version of a model in a registry: the verdict in key-value pairs."""

from __future__ import annotations

from leakaudit.gate.verdict import Verdict
from leakaudit.reports.escaping import plain

PREFIX = "leakaudit."
"""Begin of each key. A registry keeps the tags of several tools."""

MOST_CHARACTERS = 500
"""Most characters of a value: the least that a registry of MLflow keeps of a tag of a model's version."""


def tags(verdict: Verdict) -> dict[str, str]:
    """Return the tags of a verdict: key -> value. An empty value is left out."""
    found = {
        "verdict": verdict.verdict.value,
        "policy": plain(verdict.policy),
        "policy_digest": verdict.policy_digest,
        "results_digest": verdict.results_digest or verdict.results_sha256 or "",
        "evaluated_at": verdict.evaluated_at,
        "valid_until": verdict.valid_until or "",
        "waived_rules": ",".join(rule.id for rule in verdict.rules if rule.waived),
    }
    return {f"{PREFIX}{name}": value[:MOST_CHARACTERS] for name, value in found.items() if value}
