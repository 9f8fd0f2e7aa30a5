"""One zip with the evidence of an audit, for somebody who has nothing else.

A bundle holds results, policy, waivers, verdict, report, annex and model card section, and says how to check them. The same inputs give the same bytes:
members are sorted, stored without compression, and dated by the verdict.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from leakaudit import __version__
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.imported import Imported
from leakaudit.gate.policy import Policy
from leakaudit.gate.regression import ABSENT, Reference
from leakaudit.gate.subject import NO_CLAIM, Claim
from leakaudit.gate.verdict import Verdict, to_json
from leakaudit.gate.waivers import Waivers
from leakaudit.reports import outputs
from leakaudit.reports.escaping import markdown_text
from leakaudit.reports.outputs.cyclonedx import LIMITS
from leakaudit.reports.page import render_html
from leakaudit.reports.redaction import cleaned, redact
from leakaudit.reports.wording import INVENTED, date_and_time, meaning
from leakaudit.results.binding import SUBJECT
from leakaudit.results.files import to_json as results_to_json
from leakaudit.results.journal import JournalEntry
from leakaudit.results.schema import Results, TextMode

SCHEMA = "leakaudit.bundle/1"
"""Format of a bundle, as `versions.json` names it."""

SUMS = "SHA256SUMS"
README = "README.md"
VERSIONS = "versions.json"
VERDICT = "verdict.json"
RESULTS = "results.json"
POLICY = "policy.yaml"
WAIVERS = "waivers.yaml"
BASELINE = "baseline.json"
IMPORTED = "imported.json"
REPORT = "report.html"
FULL_REPORT = "report-FULL-TEXT.html"
ANNEX = "annex.md"
CARD = "model-card.md"

MEMBERS = {
    README: "this text",
    ANNEX: "clauses of regulations and standards: what was tested for each, the result with its bound, what was not tested",
    SUBJECT: "the files that the run made, with their digests",
    BASELINE: "the audit that this one is compared with: counts and keyed marks",
    CARD: "ten lines for the card of the model",
    IMPORTED: "what another auditor found in the trained model: counts and digests, without its texts",
    POLICY: "the rules, as they were given to the gate",
    REPORT: "the report, which opens in a browser without a network; it shows no training text",
    FULL_REPORT: "the report WITH TRAINING TEXT: handle it as you would the texts",
    RESULTS: "every number of the audit; no text, no token ids, no labels",
    VERDICT: "the answer of the gate by the policy, with its time and digests",
    VERSIONS: "versions of tool and formats, and the digests of what went in",
    WAIVERS: "exceptions from the policy, with owners, reasons and ends",
}
"""Name of a member -> what it is. A bundle holds no others, and `SHA256SUMS`."""

REAL = "CONTAINS REAL TRAINING TEXT. Do not share it; delete it as you would the texts."
"""What a bundle with text says of itself, unless its texts were invented."""

FULL_TEXT = "FULL-TEXT"
"""Part of the name of every file that holds training text."""


@dataclass(frozen=True)
class Evidence:
    """What a bundle is made from."""

    results: Results
    """The audit, as it is in the bundle."""
    raw: bytes
    """Bytes of `results.json` in the bundle."""
    policy: Policy
    policy_text: bytes
    """Bytes of the policy's file."""
    now: datetime
    """Time of judgement, with time zone."""
    allowed: bool = False
    """Whether the caller of the gate allowed an undecided verdict."""
    waivers: Waivers | None = None
    waivers_text: bytes | None = None
    """Bytes of the file of waivers."""
    imported: Imported | None = None
    reference: Reference = ABSENT
    baseline_text: bytes | None = None
    """Bytes of the baseline's file."""
    claim: Claim = NO_CLAIM
    subject_text: bytes | None = None
    """Bytes of `subject.json`."""

    @property
    def verdict(self) -> Verdict:
        """The answer of the gate, judged anew at the time of judgement."""
        found = evaluate(
            self.results,
            self.policy,
            now=self.now,
            results_sha256=hashlib.sha256(self.raw).hexdigest(),
            waivers=self.waivers,
            imported=self.imported,
            reference=self.reference,
            claim=self.claim,
        )
        return found.allowing_inconclusive() if self.allowed else found


def shareable(results: Results, raw: bytes, mode: TextMode) -> tuple[Results, bytes]:
    """Return results and their bytes without words that may be private.

    If there are none, they are returned as they are, so that digests which somebody signed still hold.
    """
    found = cleaned(results, TextMode.MASKED if mode is TextMode.FULL else mode)
    if found == results:
        return results, raw
    data = results_to_json(found)
    return found.model_copy(update={"digest": data["digest"]}), (json.dumps(data, indent=1) + "\n").encode()


def built_in_text(policy: Policy) -> bytes:
    """Return the text of a file for a policy that has none. JSON is YAML."""
    data = policy.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude=None if policy.imported else {"imported"}
    )
    return (json.dumps(data, indent=1) + "\n").encode()


def members(
    evidence: Evidence,
    mode: TextMode,
    *,
    origin: Mapping[str, str],
    journal: Iterable[JournalEntry] = (),
    allow_full_in_ci: bool = False,
) -> dict[str, bytes]:
    """Return the members of a bundle: name -> bytes.

    Args:
        evidence: what it is made from.
        mode: how much text the report shows.
        origin: `sha256` and `digest` of the results before words were taken out of them.
        journal: the private journal; only mode full uses it.
        allow_full_in_ci: permits mode full in CI.

    Raises:
        ResultsError: the evidence cannot be judged.
        RedactionError: mode full is not permitted, or has no text.
    """
    verdict = evidence.verdict
    shown = redact(
        evidence.results,
        journal,
        verdict,
        mode,
        allow_full=mode is TextMode.FULL,
        allow_full_in_ci=allow_full_in_ci,
        top_samples=evidence.policy.report.top_samples,
    )
    texts: dict[str, str | bytes | None] = {
        ANNEX: outputs.annex(evidence.results, verdict),
        CARD: outputs.model_card(evidence.results, verdict),
        IMPORTED: evidence.imported.model_dump_json(by_alias=True, indent=1) + "\n" if evidence.imported else None,
        POLICY: evidence.policy_text,
        FULL_REPORT if mode is TextMode.FULL else REPORT: render_html(shown),
        RESULTS: evidence.raw,
        VERDICT: _json(to_json(verdict)),
        VERSIONS: _json(_versions(evidence, verdict, mode, origin)),
        WAIVERS: evidence.waivers_text,
        BASELINE: evidence.baseline_text,
        SUBJECT: evidence.subject_text,
    }
    found = {name: text.encode() if isinstance(text, str) else text for name, text in texts.items() if text is not None}
    invented = evidence.results.subject.data_invented
    found[README] = _readme(verdict, mode, [README, *found], origin, invented=invented).encode()
    found[SUMS] = sums(found).encode()
    return dict(sorted(found.items()))


def _json(data: Any) -> str:
    return json.dumps(data, indent=1) + "\n"


def sums(found: Mapping[str, bytes]) -> str:
    """Return the digests of members, as `sha256sum -c` reads them."""
    return "".join(
        f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(found.items()) if name != SUMS
    )


def zipped(found: Mapping[str, bytes], moment: datetime) -> bytes:
    """Return members as one zip, without compression, dated by `moment` in UTC."""
    file = io.BytesIO()
    at = moment.astimezone(UTC)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(found.items()):
            entry = zipfile.ZipInfo(name, (max(1980, at.year), *at.timetuple()[1:6]))
            entry.create_system = 3  # Unix, on every machine
            entry.external_attr = 0o100600 << 16
            archive.writestr(entry, content)
    return file.getvalue()


def _versions(evidence: Evidence, verdict: Verdict, mode: TextMode, origin: Mapping[str, str]) -> dict[str, Any]:
    formats = {"results": evidence.results.schema_, "policy": evidence.policy.schema_, "verdict": verdict.schema_}
    formats |= {"waivers": evidence.waivers.schema_} if evidence.waivers else {}
    formats |= {"imported": evidence.imported.schema_} if evidence.imported else {}
    return {
        "schema": SCHEMA,
        "leakaudit": __version__,
        "text": mode.value,
        "judged_at": verdict.evaluated_at,
        "formats": formats,
        "results": {
            "sha256": verdict.results_sha256,
            "digest": verdict.results_digest,
            "before": {key: origin.get(key, "") for key in ("sha256", "digest")},
        },
        "policy_digest": verdict.policy_digest,
        "waivers_digest": verdict.waivers_digest,
        "environment": dict(cleaned(evidence.results, TextMode.HASH).run.environment),
    }


def _readme(
    verdict: Verdict, mode: TextMode, names: Sequence[str], origin: Mapping[str, str], *, invented: bool
) -> str:
    full = mode is TextMode.FULL
    until = f", valid until {date_and_time(verdict.valid_until)}" if verdict.valid_until else ""
    same = origin.get("sha256") == verdict.results_sha256
    lines = [
        "# Evidence of a privacy audit" + (f" ({FULL_TEXT})" if full else ""),
        "",
        *([f"**This bundle {INVENTED}.**" if invented else f"**This bundle {REAL}**", ""] if full else []),
        f"Run {markdown_text(verdict.run)}: **{verdict.verdict}** by the policy {markdown_text(verdict.policy)}, judged {date_and_time(verdict.evaluated_at)}{until}.",
        f"{meaning(verdict)} {markdown_text(verdict.sentence)}",
        "",
        "## What is in it",
        "",
        "| file | what it is |",
        "| --- | --- |",
        *(f"| {name} | {MEMBERS[name]} |" for name in sorted(names)),
        f"| {SUMS} | SHA-256 of each file above |",
        "",
        "`results.json` is that of the audit, byte for byte."
        if same
        else f"`results.json` is that of the audit without words that may be private (paths, messages of errors, names of files). Before, its SHA-256 was {origin.get('sha256')}.",
        "",
        "## How to check it without leakaudit",
        "",
        "Unpack it, and in its folder:",
        "",
        f"    sha256sum -c {SUMS}",
        "",
        f"The SHA-256 of `{RESULTS}` is `results_sha256` in `{VERDICT}`. If somebody gave you an attestation or another record of this audit, compare its digests of",
        "results and policy with those in the verdict. The sums show accidents. Whoever changes everything can compute them again, so ask for a signature of the zip.",
        "",
        "## How to check it with leakaudit",
        "",
        f"    pip install leakaudit=={__version__}",
        "    leakaudit bundle verify FILE.zip",
        "",
        "It checks the sums and the digest of the results, judges the results anew by the policy at the recorded time, and compares the verdict"
        + (", annex and card." if full else ", report, annex and card."),
        "",
        "## What the audit does not show",
        "",
        *(f"- {limit}" for limit in LIMITS),
        f"- The section on coverage of the report and `{ANNEX}` name what was not tested.",
        "- The gate does not know whether the results are those of the model that you were given.",
        "",
        "## How long it may be kept",
        "",
        "It holds training text, so it may be kept no longer than the training text itself."
        if full
        else "It holds no training text, no token ids and no label names, so it may be kept as long as records of the release. Policy and waivers name their owners as they were given.",
    ]
    return "\n".join(lines) + "\n"
