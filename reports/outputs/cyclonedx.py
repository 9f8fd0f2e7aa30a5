"""CycloneDX 1.6: a bill of materials whose model cards hold the verdict."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from leakaudit import __version__
from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.gate.way_out import effective
from leakaudit.reports.escaping import plain
from leakaudit.reports.outputs.markdown import NEXT
from leakaudit.reports.wording import meaning, policy_changed
from leakaudit.results.schema import Artifact

SPECIFICATION = "1.6"
"""Version of CycloneDX."""

LIMITS = (
    "The audit looked at the updates that training sends, not at the released weights.",
    "Its figures are about the attacks, budgets and steps of this audit; other attacks may recover more.",
    "It did not look at servers that choose the weights, and not at sums over clients.",
)
"""What an audit does not show, for every verdict."""


def cyclonedx(verdict: Verdict, artifacts: Sequence[Artifact]) -> str:
    """Return a bill of materials of `artifacts` with the verdict in their cards.

    Raises:
        ValueError: no artefact is given; there would be no component.
    """
    if not artifacts:
        raise ValueError("a bill of materials lists artefacts, and none is given")
    card = _card(verdict)
    components = [
        {
            "type": "machine-learning-model",
            "bom-ref": f"artifact-{number}-{one.sha256[:12]}",
            "name": plain(one.name),
            "hashes": [{"alg": "SHA-256", "content": one.sha256}],
            "modelCard": card,
        }
        for number, one in enumerate(artifacts)
    ]
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{_serial(verdict, artifacts)}",
        "version": 1,
        "metadata": {
            "timestamp": verdict.evaluated_at,
            "tools": {"components": [{"type": "application", "name": "leakaudit", "version": __version__}]},
        },
        "components": components,
    }
    return json.dumps(bill, indent=1) + "\n"


def _serial(verdict: Verdict, artifacts: Sequence[Artifact]) -> uuid.UUID:
    """Return a number that belongs to this judgement of these files."""
    parts = [verdict.policy_digest, verdict.results_sha256 or "", verdict.evaluated_at]
    return uuid.uuid5(uuid.NAMESPACE_OID, "\n".join([*parts, *(one.sha256 for one in artifacts)]))


def _card(verdict: Verdict) -> dict[str, Any]:
    risks = [_risk(rule, verdict) for rule in verdict.rules if rule.status is not Status.PASS]
    if verdict.problems or (not risks and verdict.verdict is not Status.PASS):
        said = "; ".join(verdict.problems) or verdict.sentence
        risks.append({"name": plain(f"{verdict.verdict}: {said}"), "mitigationStrategy": NEXT[verdict.verdict]})
    considerations: dict[str, Any] = {"technicalLimitations": list(LIMITS)}
    if risks:
        considerations["ethicalConsiderations"] = risks
    properties = {
        "verdict": verdict.verdict.value,
        "meaning": meaning(verdict),
        "sentence": plain(verdict.sentence),
        "policy": plain(verdict.policy),
        "policy-digest": verdict.policy_digest,
        "policy-changed-since-the-run-began": policy_changed(verdict),
        "results-digest": verdict.results_digest or verdict.results_sha256 or "",
        "valid-until": verdict.valid_until or "",
    }
    return {
        "quantitativeAnalysis": {
            "performanceMetrics": [_metric(rule) for rule in verdict.rules if rule.observed is not None]
        },
        "considerations": considerations,
        "properties": [{"name": f"leakaudit:{name}", "value": value} for name, value in properties.items()],
    }


def _metric(rule: RuleVerdict) -> dict[str, Any]:
    """Return what a rule observed, with its bounds as shares of steps or scores."""
    versus = rule.versus is not None
    seen = rule.k / rule.n if rule.k is not None and rule.n and not versus else rule.observed
    found: dict[str, Any] = {
        "type": plain(f"privacy leak, {rule.subject}{', change since the baseline' if versus else ''}"),
        "value": f"{seen:.12g}",
        "slice": plain(
            f"rule {rule.id}, {rule.defense}, {rule.n} canaries, by {rule.imported}"
            if rule.imported
            else f"rule {rule.id}, defence {rule.defense}, {rule.n} audited steps"
        ),
    }
    bounds = {"lowerBound": rule.lower, "upperBound": rule.upper}
    if known := {name: f"{value:.12g}" for name, value in bounds.items() if value is not None}:
        found["confidenceInterval"] = known
    return found


def _risk(rule: RuleVerdict, verdict: Verdict) -> dict[str, str]:
    passing = [one.defense for one in effective(verdict.alternatives)]
    way_out = f" Passes in this audit: {', '.join(passing[:5])}." if passing else ""
    said = " ".join([f"{rule.word}, {rule.id}: {rule.sentence}", *rule.reasons])
    return {
        "name": plain(said),
        "mitigationStrategy": plain(f"Waived {rule.waived}" if rule.waived else NEXT[rule.status] + way_out),
    }
