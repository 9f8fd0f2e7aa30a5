"""Models of `verdict.json`, the answer of the gate on an audit."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from leakaudit.exit_codes import ExitCode
from leakaudit.results.schema import Kind


class Status(StrEnum):
    """The answer of one rule or of all rules, ordered from best to worst."""

    PASS = "PASS"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"
    ERROR = "ERROR"

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of `leakaudit gate` for this answer."""
        return ExitCode[self.name]


class _Verdict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, use_attribute_docstrings=True)


class Worst(_Verdict):
    """The attempt with the strongest evidence against a rule."""

    step: str
    attack: str
    wall_s: FiniteFloat
    """Seconds that the attack took."""
    value: FiniteFloat | None = None
    """Score, for a rule on a metric; else None."""


class RuleVerdict(_Verdict):
    """One rule applied to the results."""

    id: str
    severity: str
    level: str
    status: Status
    kind: Literal["max_rate", "max_count", "max_value", "claimed_epsilon"]
    subject: str
    """The event, or the statistic and the metric."""
    defense: str
    scope: tuple[str, ...] = ()
    """Attacks that the rule names; empty for any."""
    attacks: tuple[str, ...]
    """Attacks with an attempt that is evidence: it could have shown the event, or ran out of time."""
    trusted: tuple[str, ...] = ()
    """Attacks of the battery that recovered what the rule is about from their canary. A step on which only other attacks found nothing was not
    judged."""
    min_tokens: int | None = None
    """Number of tokens from which the rule counts a text, if the rule says it."""
    max_unjudged: FiniteFloat | None = None
    """Share of the steps that the policy lets be unjudged."""
    k: int | None
    """Steps that leaked; None for a rule on a metric."""
    n: int
    """Steps that are evidence."""
    observed: FiniteFloat | None
    """Rate, count or statistic; None without evidence."""
    lower: FiniteFloat | None
    upper: FiniteFloat | None
    threshold: FiniteFloat
    margin: FiniteFloat | None
    """Threshold minus the number that must not exceed it (upper bound, count or maximum). It is negative if that number is too large."""
    more_clean_steps: int | None
    """Further steps without a leak that would make the rule pass; None if that does not apply or no number is enough."""
    confidence: float
    method: str
    """Method of the bounds."""
    censored: int
    """Attempts that ran out of time without an event."""
    lost: int
    """Attempts that were due and gave no usable result."""
    due: int
    """Attempts that were due."""
    left_out: int
    """Steps without a text that is long enough to have the event."""
    silent: int = 0
    """Steps among the unjudged ones that are unverifiable, or of which words were not kept."""
    unjudged: int = 0
    """Steps that could have the event and that no attack could judge. `lower` counts them as clean; `upper` counts them as leaks, unless the
    policy accepts as many (`max_unjudged`)."""
    reasons: tuple[str, ...]
    """Reasons, besides its own numbers, why the rule could not pass."""
    sentence: str
    """What was observed and what the policy allows, in numbers."""
    worst: Worst | None
    waived: str = ""
    """Until when, by whom and why the rule may fail, if a waiver says so; it then has no part in the verdict."""

    @property
    def word(self) -> str:
        """The status that outputs show.

        `WARN` for a rule at level warn that fails, `WAIVED` for one that a waiver lets fail.
        """
        if self.waived:
            return "WAIVED"
        return "WARN" if self.level == "warn" and self.status is Status.FAIL else self.status.value


class ControlVerdict(_Verdict):
    """One control compared with the policy."""

    name: Literal["positive", "negative"]
    kind: Kind | None = None
    """What a positive control recovers; None for the negative control."""
    by: str = ""
    """The attack that recovered the canary most often; empty if none ran on it."""
    state: Literal["ok", "not run", "failed", "unproven"]
    k: int
    n: int
    sentence: str


class WaiverVerdict(_Verdict):
    """What became of one waiver."""

    id: str
    rule: str
    owner: str
    reason: str
    ticket: str = ""
    expires: str
    """Last day, as an ISO date."""
    state: Literal[
        "applies", "expired", "not yet", "unused", "no such rule", "critical", "undecided", "over its ceiling"
    ]
    """Only with `applies` its rule has no part in the verdict."""
    sentence: str


class Figures(_Verdict):
    """The numbers of one rule under a defence that is not shipped."""

    id: str
    status: Status
    k: int | None
    n: int
    observed: FiniteFloat | None
    lower: FiniteFloat | None
    upper: FiniteFloat | None


class Alternative(_Verdict):
    """The verdict if the run shipped another defence of the audit."""

    defense: str
    status: Status
    open_rules: tuple[str, ...]
    """Ids of the rules at level error that would not pass."""
    naive: bool
    """Whether all attacks ran without knowing the defence."""
    rules: tuple[Figures, ...]


class Verdict(_Verdict):
    """The answer of the gate on an audit.

    `leakaudit schema verdict` prints the JSON Schema of this class.
    """

    schema_: str = Field(default="leakaudit.verdict/1", alias="schema")
    verdict: Status
    exit_code: int
    sentence: str
    """The verdict in numbers; the sentence of the rule that decides it."""
    deciding_rule: str | None
    texts_back: int = 0
    """Texts of the shipped update that came back word for word, or with every word."""
    run: str
    policy: str
    policy_owner: str
    policy_digest: str
    results_sha256: str | None
    """SHA-256 of results.json, as `sha256sum` prints it."""
    results_digest: str | None = None
    """The verified digest that the results name. It does not depend on the layout of the file."""
    evaluated_at: str
    evidence_age_s: FiniteFloat | None
    valid_until: str | None
    """Time from which the evidence is too old for the policy."""
    steps: int
    """Audited steps."""
    unverified_steps: int
    """Steps that are not counted, because their update does not come from the kept batch."""
    unverifiable_steps: int = 0
    """Steps that were attacked although they could not be verified. A text recovered from such a step is proof; without one, the
    step is not evidence."""
    rules: tuple[RuleVerdict, ...]
    """Rules at level error first; within a level the worst first."""
    controls: tuple[ControlVerdict, ...]
    alternatives: tuple[Alternative, ...]
    waivers: tuple[WaiverVerdict, ...] = ()
    """What became of each waiver that was given."""
    waivers_digest: str = ""
    """Digest of the file of waivers; empty without one."""
    problems: tuple[str, ...]
    """Problems with the evidence, for ERROR."""
    allowed: bool = False
    """Whether the caller (`--allow inconclusive`) or the policy (`on_inconclusive`) accepts that nothing is decided; the verdict itself stays
    INCONCLUSIVE."""

    def allowing_inconclusive(self, said: str = "The caller allows an undecided verdict.") -> Verdict:
        """Return this verdict where an undecided one is accepted.

        Only missing evidence is accepted: where texts came back, or where anything else than INCONCLUSIVE was found, nothing changes.

        Args:
            said: who accepts it, in a sentence.
        """
        if self.verdict is not Status.INCONCLUSIVE or self.texts_back or self.allowed:
            return self
        sentence = f"{self.sentence} {said}"
        return self.model_copy(update={"allowed": True, "exit_code": ExitCode.PASS, "sentence": sentence})


def to_json(verdict: Verdict) -> dict[str, Any]:
    """Return `verdict` as plain JSON data."""
    return verdict.model_dump(mode="json", by_alias=True)
