"""The record of one night in the history, schema `leakaudit.night/1.0`.

A record is one small JSON file. It holds numbers and marks only: no text, no token, no label and no path. It says what was said that morning, so
it is never written again.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from leakaudit.config.duration import length_of
from leakaudit.gate.verdict import Status
from leakaudit.results.schema import Amount, Count, Fraction, Mark

SCHEMA = "leakaudit.night/1.0"
"""Version of the schema. 1.x adds keys; a reader ignores those that it does not know."""

NIGHT_PATTERN = r"^\d{4}-\d{2}-\d{2}T\d{4}Z$"
"""Form of a night's id: the beginning of its period in UTC, to the minute."""

NightId = Annotated[str, Field(pattern=NIGHT_PATTERN)]


class NightModel(BaseModel):
    """The base of all models of the history, which are frozen and ignore unknown keys."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, defer_build=True)


class Rate(NightModel):
    """How often one event happened in one night."""

    event: str
    """Event of the policy, such as `exact_sentence`."""
    min_tokens: Count | None = None
    """Number of tokens from which a text counts; None if every text does, or if the event says it."""
    defense: str
    """Defence of the audit; `shipped` is what the run sends."""
    attack: str = "any"
    """An attack, or `any` for all of them."""
    limit: Fraction | None = None
    """Largest rate that the policy allows; 0 for a rule that allows no leak, None if no rule limits the rate."""
    k: Count
    """Steps that leaked."""
    n: Count
    """Steps that were judged."""
    unjudged: Count = 0
    """Steps that could leak and that no attack could judge."""
    fresh_k: Count
    """Steps among `k` that no earlier night had."""
    fresh_n: Count
    """Steps among `n` that no earlier night had. A step that an earlier night had is no new evidence."""
    lower: Fraction | None = None
    """Lower end of the confidence sequence over this night and the comparable nights before it."""
    upper: Fraction | None = None
    """Upper end of the same sequence."""
    so_far: tuple[Count, Count] | None = None
    """Leaks and steps of that sequence."""
    log_e: FiniteFloat | None = None
    """Logarithm of the e-value against "not worse than the baseline"; None without a comparable baseline."""

    @property
    def series(self) -> tuple[str, int | None, str, str]:
        """What the rate is of: event, shortest text, defence, attack."""
        return self.event, self.min_tokens, self.defense, self.attack


class NightRecord(NightModel):
    """What one night found, or why there was no night."""

    schema_: str = Field(default=SCHEMA, alias="schema")
    """Format of the file."""
    night: NightId
    """Beginning of the night's period in UTC."""
    status: Literal["audited", "gap"]
    """`gap`: the night was started and has no results."""
    reason: str = ""
    """Why there are no results, without private text."""
    started: str
    """Time of the beginning in UTC, in ISO 8601."""
    finished: str
    """Time of the end in UTC, in ISO 8601."""
    exit_code: Count
    """Exit code of the command."""
    verdict: Status | None = None
    """Verdict of the night's policy; None for a gap."""
    sentence: str = ""
    """The verdict in a sentence."""
    run: str = ""
    """Id of the run in `results.json`."""
    results_sha256: str = ""
    """SHA-256 of `results.json`."""
    tool: str = ""
    """Version of leakaudit."""
    keys: dict[str, str] = {}
    """Comparability keys: nights are compared only where all of them agree."""
    model_version: str = ""
    """Mark of the weights as they are stored; empty if a run trains them."""
    steps: Count = 0
    """Audited steps."""
    planned: Count = 0
    """Steps that the night planned."""
    repeated: Count = 0
    """Audited steps that an earlier night had, so that they are no new evidence."""
    saved: str = ""
    """What the night did not do because its policy was decided or its budget used up, in a sentence."""
    seconds: Amount = 0.0
    """Duration of the night, in seconds of a clock that no change of the time moves."""
    baseline: str = ""
    """Run of the baseline that the night was compared with; empty without one."""
    since_last: str = ""
    """How the night differs from the one before, in a sentence; empty if there is none with results."""
    worse: bool = False
    """Whether the e-value of a rate reached the policy's level: the night is worse than the baseline."""
    rates: tuple[Rate, ...] = ()
    """Rate of each rule of the night."""
    units: tuple[Mark, ...] = ()
    """Marks of the audited steps; they tell whether a later night repeats one."""

    def rate_of(self, series: tuple[str, int | None, str, str]) -> Rate | None:
        """Return the rate of a series; None if the night has none."""
        return next((rate for rate in self.rates if rate.series == series), None)


def as_of(record: NightRecord, max_age: str, now: datetime) -> NightRecord:
    """Return a recorded night as it counts now: a pass on old evidence is none.

    So a job that always names the same night does not pass forever.

    Args:
        record: an audited night.
        max_age: largest age of the evidence, such as 7d.
        now: the time, with time zone.
    """
    age = now - datetime.fromisoformat(record.finished)
    if record.exit_code != Status.PASS.exit_code or age <= length_of(max_age):
        return record
    said = f"The evidence is {age.total_seconds() / 86400:.1f} days old; the policy allows {max_age}."
    return record.model_copy(
        update={
            "verdict": Status.INCONCLUSIVE,
            "exit_code": int(Status.INCONCLUSIVE.exit_code),
            "sentence": f"{said} {record.sentence}".strip(),
        }
    )
