"""An in-toto Simple Verification Result: what a verdict of PASS has shown.

Statement v1 with the predicate svr v0.2 of the in-toto Attestation Framework. It is unsigned. The predicate can only name properties that hold,
so there is none unless the verdict is PASS and the run names the artefacts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta

from leakaudit import __version__
from leakaudit.gate.policy import SHIPPED
from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.reports.escaping import plain
from leakaudit.reports.outputs.attestation import STATEMENT
from leakaudit.results.schema import Artifact

PREDICATE = "https://in-toto.io/attestation/svr/v0.2"
"""Type of the predicate."""

VERIFIER = f"https://pypi.org/project/leakaudit/{__version__}/"
"""Who verified: this version, because another one may judge in another way."""


def svr(verdict: Verdict, artifacts: Sequence[Artifact]) -> str:
    """Return an unsigned in-toto Statement with the properties that were shown.

    Raises:
        ValueError: `not_shown` says why there is none.
    """
    if why := not_shown(verdict, artifacts):
        raise ValueError(f"there is no verification result: {why}")
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": plain(one.name), "digest": {"sha256": one.sha256}} for one in artifacts],
        "predicateType": PREDICATE,
        "predicate": {
            "verifier": {
                "id": VERIFIER,
                "policies": [
                    {"name": plain(verdict.policy), "digest": {"sha256": verdict.policy_digest.rpartition(":")[2]}}
                ],
            },
            "timeCreated": verdict.evaluated_at,
            "properties": list(dict.fromkeys(properties(verdict))),
        },
    }
    return json.dumps(statement, indent=1) + "\n"


def not_shown(verdict: Verdict, artifacts: Sequence[Artifact]) -> str:
    """Return why nothing was shown of `artifacts`; empty if something was.

    A statement of an audit about files that it does not name would clear any file.
    """
    if not artifacts:
        return "no artefact is given"
    if verdict.verdict is not Status.PASS:
        return f"the verdict is {verdict.verdict}"
    named = {one.sha256 for one in verdict.about.compared}
    unnamed = ", ".join(plain(one.name) for one in artifacts if one.sha256 not in named)
    return f"the run does not name {unnamed} (`leakaudit bind RUN FILE` does)" if unnamed else ""


def properties(verdict: Verdict) -> Iterable[str]:
    """Yield the name of each property that a PASS has shown.

    A name says what is limited, the limit, the confidence in percent, and how long after `timeCreated` the evidence is young enough for the policy:
    `LEAKAUDIT_EXACT_SENTENCE_RATE_LE_5PCT_95_7D`. The policy as a whole passes no longer than its waivers hold. Rules on an update that is not shipped, and rules that do not pass, have none.
    """
    until = _time_left(verdict)
    waived = "_WITH_WAIVERS" if any(rule.waived for rule in verdict.rules) else ""
    yield f"LEAKAUDIT_POLICY_PASS{waived}_{_time_left(verdict, _waivers_end(verdict))}"
    for rule in verdict.rules:
        if rule.status is Status.PASS and (rule.defense == SHIPPED or rule.imported):
            yield "_".join(["LEAKAUDIT", *_words(rule), until])


def _words(rule: RuleVerdict) -> list[str]:
    """Return what a rule limits, and how."""
    found = [*([rule.imported] if rule.imported else []), rule.subject.replace("%", "PCT")]
    found += [f"{rule.min_tokens}TOK"] if rule.min_tokens is not None else []
    found += ["BY", *rule.scope] if rule.scope else []
    limits = {
        "max_rate": ["RATE_LE", f"{100 * rule.threshold:g}PCT"],
        "max_count": ["COUNT_LE", f"{rule.threshold:g}"],
        "versus_baseline": ["RATE_INCREASE_SINCE_BASELINE_LE", f"{100 * rule.threshold:g}PCT"],
    }
    found += limits.get(rule.kind, ["LE", f"{rule.threshold:g}"])
    observed_only = rule.kind in ("max_count", "claimed_epsilon") or rule.subject.startswith("max ")
    found += [] if observed_only else [f"{100 * rule.confidence:g}"]
    return [_word(one) for one in found]


def _word(text: str) -> str:
    return re.sub(r"[^A-Z0-9]+", "_", text.upper().replace(".", "P")).strip("_")


def _waivers_end(verdict: Verdict) -> list[datetime]:
    """Return the end of each waiver that lets a rule fail.

    It is the day after its last one, in UTC.
    """
    last = [date.fromisoformat(one.expires) for one in verdict.waivers if one.state == "applies"]
    return [datetime.combine(day + timedelta(days=1), time(), UTC) for day in last]


def _time_left(verdict: Verdict, ends: Iterable[datetime] = ()) -> str:
    """Return how long a pass holds, rounded down: `7D`, or `5H`.

    Args:
        verdict: says until when the evidence is young enough.
        ends: other times at which the pass ends.
    """
    left = timedelta()
    if verdict.valid_until:
        end = min([datetime.fromisoformat(verdict.valid_until), *ends])
        left = end - datetime.fromisoformat(verdict.evaluated_at)
    hours = max(0, int(left.total_seconds() // 3600))
    return f"{hours // 24}D" if hours >= 24 else f"{hours}H"
