"""Results of other auditors, judged as further rules of the same verdict.

Only memaudit is read. It audits what leakaudit does not: the trained model. It plants canaries in the training data, and asks whether the model
tells them from others (membership) and whether it completes them (regurgitation).

Of its report (schema 1.2.0) these keys are read, and no others:

    schema_version, tool_version, created_at, report_sha256
    membership:         n_members, n_detected, n_controls, target_fpr, headline_valid, tpr_at_1pct_fpr
    regurgitation:      overall: n, n_regurgitated, rate
    negative_controls:  n, regurgitation_rate
    provenance:         resolved_config: skip_generation

No text of the report is kept. Bounds are computed here from the counts, at the confidence of the policy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leakaudit.config.duration import length_of
from leakaudit.errors import ResultsError
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.gate.policy import ImportedRule, Policy
from leakaudit.gate.verdict import NO_STEPS, ImportVerdict, RuleVerdict, Status
from leakaudit.gate.wording import number, percent
from leakaudit.results import bounds as stats
from leakaudit.results.consistency import CLOCK_SLACK, moment
from leakaudit.results.schema import Count, Fraction

VERSIONS = ("1.2.0",)
"""Schema versions of memaudit that are read: that of memaudit 0.2.0. Another one may mean something else by the same key."""

MIN_CONTROLS = 100
"""Fewest canaries outside the training data that fix a rate of false alarms of 1 %: one of 100."""

MAX_BYTES = 64 * 1024 * 1024
"""Largest report. Our choice: memaudit writes about 2 KB for a canary."""

SUBJECTS = {"membership_tpr": "membership TPR at 1% FPR", "regurgitation_rate": "regurgitation rate"}
"""Measure of a rule -> what it is about, in outputs."""
_METHOD = "Clopper-Pearson, one-sided"


class _Imported(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=True)


class Share(_Imported):
    """k of n canaries."""

    k: Count
    n: Annotated[int, Field(ge=1)]


class Imported(_Imported):
    """What is kept of a report of memaudit: counts, versions and digests."""

    schema_: Literal["leakaudit.imported/1"] = Field(default="leakaudit.imported/1", alias="schema")
    """Format of this document."""
    tool: Literal["memaudit"] = "memaudit"
    """Who made the report."""
    tool_version: Annotated[str, Field(pattern=r"^[0-9A-Za-z.+-]{1,40}$")]
    """Its version."""
    report_schema: Literal["1.2.0"]
    """Schema of the report."""
    created_at: Annotated[str, Field(pattern=r"^[0-9T:.+Z-]{10,40}$")]
    """When it was made, as an ISO time."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the report's file, in hex."""
    membership: Share | None
    """Canaries of the training data that were told from others at 1 % false alarms; None if that was not measured."""
    membership_gap: str = ""
    """Why membership was not measured; empty if it was."""
    regurgitation: Share | None
    """Canaries of the training data that the model completed, exactly or nearly; None if that was not measured."""
    controls: Count
    """Canaries outside the training data."""
    controls_regurgitated: Fraction | None
    """Share of these that the model completed nevertheless; None if unknown."""

    @property
    def digest(self) -> str:
        """SHA-256 of this document, as the verdict records it."""
        return f"sha256:{hashlib.sha256(self.model_dump_json(by_alias=True).encode()).hexdigest()}"

    def verdict(self) -> ImportVerdict:
        """Return what the verdict records of these results."""
        return ImportVerdict(
            tool=self.tool,
            tool_version=self.tool_version,
            created_at=self.created_at,
            sha256=self.sha256,
            digest=self.digest,
        )


def load_imported(path: Path) -> Imported:
    """Read a report of memaudit, or what `leakaudit bundle` kept of one.

    Raises:
        ResultsError: the file is missing, is not strict JSON, has another version, contradicts itself, or was changed after it was written.
    """
    try:
        raw = read_bounded(path, MAX_BYTES)
        data = parse_json(raw)
        data = data if isinstance(data, dict) else {}
        if data.get("schema") == "leakaudit.imported/1":
            return Imported.model_validate_json(raw)
        return _from_memaudit(data, hashlib.sha256(raw).hexdigest())
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise ResultsError(f"{path.name}: is no report of memaudit that can be read: {where} does not fit") from None
    except (OSError, ValueError) as error:
        why = error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
        raise ResultsError(f"{path.name}: {why}") from None


def _from_memaudit(data: Mapping[str, Any], sha256: str) -> Imported:
    """Return what is kept of a report.

    Raises:
        ValueError: it cannot be trusted; the message says why.
    """
    version = data.get("schema_version")
    if version not in VERSIONS:
        raise ValueError(
            f"is no report of memaudit with the schema {' or '.join(VERSIONS)}; write it with memaudit 0.2.0"
        )
    if data.get("report_sha256") != memaudit_digest(data):
        raise ValueError("was changed after memaudit wrote it: its content does not have the digest that it names")
    membership, controls = _object(data, "membership"), _object(data, "negative_controls")
    found, gap = _membership(membership)
    return Imported(
        tool_version=data.get("tool_version", ""),
        report_schema=version,
        created_at=data.get("created_at", ""),
        sha256=sha256,
        membership=found,
        membership_gap=gap,
        regurgitation=_regurgitation(data),
        controls=_count(controls, "n"),
        controls_regurgitated=controls.get("regurgitation_rate"),
    )


def memaudit_digest(data: Mapping[str, Any]) -> str:
    """Return the digest that a report of memaudit names in `report_sha256`.

    It is the SHA-256 of the JSON text in UTF-8 without that key, with sorted keys and without spaces.
    """
    content = {key: value for key, value in data.items() if key != "report_sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _membership(found: Mapping[str, Any]) -> tuple[Share | None, str]:
    """Return the detected canaries, or None and why there is no such number."""
    n, k, controls = (_count(found, key) for key in ("n_members", "n_detected", "n_controls"))
    if not n:
        return None, "no canary was in the training data"
    if found.get("target_fpr") != 0.01:
        return None, "it was measured at another rate of false alarms than 1%"
    if found.get("headline_valid") is not True or controls < MIN_CONTROLS:
        return None, f"{controls} canaries outside the training data do not fix a rate of false alarms of 1%"
    return _share(k, n, found.get("tpr_at_1pct_fpr"), "membership"), ""


def _regurgitation(data: Mapping[str, Any]) -> Share | None:
    """Return the completed canaries; None if the model was not asked to complete any.

    memaudit writes 0 of n where generation was skipped, so its configuration must say that it was not.
    """
    configuration = _object(_object(data, "provenance"), "resolved_config")
    found = _object(_object(data, "regurgitation"), "overall")
    n, k = _count(found, "n"), _count(found, "n_regurgitated")
    if not n or configuration.get("skip_generation") is not False:
        return None
    return _share(k, n, found.get("rate"), "regurgitation")


def _share(k: int, n: int, rate: Any, where: str) -> Share:
    if not isinstance(rate, int | float) or k > n or abs(rate - k / n) > 1e-9:
        raise ValueError(f"contradicts itself: in {where} the rate is not that of the counts")
    return Share(k=k, n=n)


def _object(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key)
    if isinstance(found, dict):
        return found
    raise ValueError(f"is no report of memaudit that can be read: it lacks {key}")


def _count(data: Mapping[str, Any], key: str) -> int:
    found = data.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ValueError(f"is no report of memaudit that can be read: {key} is no count")
    return found


def judge_imported(policy: Policy, imported: Imported | None, now: datetime) -> list[RuleVerdict]:
    """Judge the rules on results of other auditors.

    A rule passes if the upper bound of the share is at or below its limit, and fails if the lower bound is above it. Without the results, without
    the measure, with results that are too old, and where canaries came back that the model never saw, it is INCONCLUSIVE.

    Args:
        policy: the rules.
        imported: what memaudit found; None if nobody gave it.
        now: the time of judgement, with time zone.
    """
    return [_judge(policy, rule, imported, now) for rule in policy.imported]


def _judge(policy: Policy, rule: ImportedRule, imported: Imported | None, now: datetime) -> RuleVerdict:
    confidence = policy.statistics.confidence
    share, missing = _measured(rule, imported)
    lower = upper = None
    status, reasons = Status.INCONCLUSIVE, []
    if share is not None and imported is not None:
        lower, upper = stats.lower_bound(share.k, share.n, confidence), stats.upper_bound(share.k, share.n, confidence)
        doubt = _doubt(policy, imported)
        reasons = [*doubt, *_old(policy, imported, now)]
        if upper <= rule.max_value and not reasons:
            status = Status.PASS
        elif lower > rule.max_value and not doubt:
            status, reasons = Status.FAIL, []
    return RuleVerdict(
        id=rule.id,
        severity=rule.severity,
        level=rule.level,
        status=status,
        kind="max_value",
        subject=SUBJECTS[rule.measure],
        defense=RELEASED,
        attacks=(rule.import_,) if share else (),
        imported=rule.import_,
        k=None,
        n=share.n if share else 0,
        observed=share.k / share.n if share else None,
        lower=lower,
        upper=upper,
        threshold=rule.max_value,
        margin=None if upper is None else rule.max_value - upper,
        confidence=confidence,
        method=_METHOD if share else "",
        reasons=tuple(reasons),
        sentence=_sentence(rule, share, missing, imported, lower, upper, confidence),
        **NO_STEPS,
    )


RELEASED = "trained model"
"""What a rule on imported results looks at: no update, and no defence of one."""


def _measured(rule: ImportedRule, imported: Imported | None) -> tuple[Share | None, str]:
    """Return the share that a rule is about, or None and why there is none."""
    if imported is None:
        return None, "the gate was called without the results of memaudit (--memaudit FILE)"
    if rule.measure == "membership_tpr":
        return imported.membership, imported.membership_gap
    return imported.regurgitation, "memaudit did not ask the model to complete a canary"


def _doubt(policy: Policy, imported: Imported) -> list[str]:
    """Return a sentence if memaudit's own negative controls do not hold."""
    if imported.controls_regurgitated is None or not imported.controls:
        return ["memaudit has no negative control."]
    most = policy.controls.negative.rate_upper
    if imported.controls_regurgitated <= most:
        return []
    found = percent(imported.controls_regurgitated, most)
    return [f"The model completed {found} of the canaries that it never saw; the policy allows {percent(most)}."]


def _old(policy: Policy, imported: Imported, now: datetime) -> list[str]:
    made = moment(imported.created_at)
    if made is None or made - now > CLOCK_SLACK:
        return ["It is not known how old the results of memaudit are."]
    age: timedelta = now - made
    if age <= length_of(policy.evidence.max_age):
        return []
    return [
        f"The results of memaudit are {age.total_seconds() / 86400:.1f} days old; the policy allows {policy.evidence.max_age}."
    ]


def _sentence(
    rule: ImportedRule,
    share: Share | None,
    missing: str,
    imported: Imported | None,
    lower: float | None,
    upper: float | None,
    confidence: float,
) -> str:
    if share is None or imported is None or upper is None or lower is None:
        return f"There is no evidence on the {SUBJECTS[rule.measure]}: {missing}. Not tested is not a pass."
    sure, limit = percent(confidence), rule.max_value
    did = "told from others" if rule.measure == "membership_tpr" else "completed"
    return (
        f"By memaudit {imported.tool_version}, {share.k} of {share.n} canaries of the training data were {did} ({number(share.k / share.n, limit)}; "
        f"{sure} bounds {number(lower, limit)} to {number(upper, limit)}). Policy allows {number(limit)}. "
        "Nobody checked that memaudit looked at the model of this run."
    )


def imports(imported: Imported | None) -> Sequence[ImportVerdict]:
    """Return what the verdict records of the imported results."""
    return [] if imported is None else [imported.verdict()]
