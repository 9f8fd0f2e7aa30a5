"""Parts of a policy: floors, the adversary, and exceptions that end on a day.

They stand apart from `policy`, because the files of waivers share their limits.
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from leakaudit.config.duration import Duration
from leakaudit.results.schema import Kind

MAX_DAYS = 90
"""Longest life of an exception in days. Our choice: a quarter, after which somebody has to decide again."""

WARN_DAYS = 14
"""Days before its end from which an exception is announced to end. Our choice."""


def _said(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank; say it in words")
    return text.strip()


Words = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_said)]
"""Words of a person, such as a reason; not blank."""

FileName = Annotated[str, Field(min_length=1)]
"""The path of a file, relative to the folder of the file that names it."""

Grant = Literal["labels", "lengths", "words", "longest", "counts"]
"""What a threat model may give an attack besides the update."""

ACTIVE = "active server"
"""The adversary that changes the model before it sends it out."""


class PolicyPart(BaseModel):
    """The base of all parts of a policy, which refuse unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=True)


class StepsPerPhase(PolicyPart):
    """Least numbers of steps of evidence in each third of the training run."""

    early: int = Field(default=0, ge=0)
    """In the first third."""
    middle: int = Field(default=0, ge=0)
    """In the second third."""
    late: int = Field(default=0, ge=0)
    """In the last third."""

    @property
    def asked(self) -> dict[str, int]:
        """Phase -> least number of steps, for phases with one."""
        return {name: least for name in StepsPerPhase.model_fields if (least := getattr(self, name))}

    @property
    def spread(self) -> int:
        """Number of steps, spread evenly over the run, that reach each number."""
        return len(StepsPerPhase.model_fields) * max(self.asked.values(), default=0)


class RequiredThreatModel(PolicyPart):
    """The adversary of the audit that the policy is about."""

    adversary: Literal["honest-but-curious server", "active server"] | None = None
    """Who attacks. `active server`: one that changes the model before it sends it out."""
    sees: Literal["one client's transmitted update", "one client's update of the changed model"] | None = None
    """What the adversary sees."""
    granted_at_most: tuple[Grant, ...] | None = None
    """What attacks may be given at most: `labels`, `lengths`, `words`, `longest`, `counts`. An empty list: nothing. What they must be given at least is
    `requires.granted`."""


class RequiredCoverage(PolicyPart):
    """What the audit must have covered. Each key may be left out."""

    defenses: tuple[str, ...] = ()
    """Defences under which an attack must have run to its end on at least one step, with any options unless they are named."""
    kinds: tuple[Kind, ...] = ()
    """What attacks must look for: `text`, `words`, `labels`. Of each kind an attack must have run to its end on at least one step."""
    attacks_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Least share of the audited steps on which each attack of `attacks`, and some attack of each kind of `kinds`, must have run to its end, under
    each defence that a rule at level error looks at. An attack that was not needed counts, because another one recovered every text."""
    threat_model: RequiredThreatModel = RequiredThreatModel.model_construct()
    """The adversary of the audit."""


class AllowedUndecided(PolicyPart):
    """A time in which the gate ends with exit code 0 where nothing is decided.

    The verdict stays INCONCLUSIVE. Where texts came back, nothing is allowed.
    """

    since: date
    """First day, in UTC."""
    until: date
    """Last day, in UTC; at most 90 days after `since`."""
    owner: Words
    """Who allows it."""
    reason: Words
    """Why it is allowed."""

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.until < self.since:
            raise ValueError(f"ends on {self.until}, before it begins on {self.since}")
        if self.until - self.since > timedelta(days=MAX_DAYS):
            last = self.since + timedelta(days=MAX_DAYS)
            raise ValueError(f"lasts longer than {MAX_DAYS} days; the last day allowed is {last}")
        return self


class WaiversFile(PolicyPart):
    """The file of waivers of a policy, and stricter limits for its waivers."""

    file: FileName
    """The file, relative to the policy's folder."""
    max_days: int = Field(default=MAX_DAYS, ge=1, le=MAX_DAYS)
    """Longest life of a waiver in days; at most 90."""
    warn_before: Duration = f"{WARN_DAYS}d"
    """Time before its end from which a waiver is announced to end."""
