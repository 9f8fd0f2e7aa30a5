"""Models of `verdict.json`, the answer of the gate on an audit.

The module has over 400 lines, because it describes one document, and every key with its None.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from leakaudit.exit_codes import ExitCode
from leakaudit.results.schema import Artifact, Kind

LimitKind = Literal["max_rate", "max_count", "max_value", "versus_baseline", "claimed_epsilon", "membership"]
"""The key of a rule that holds its limit."""


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
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, defer_build=True)


class Worst(_Verdict):
    """The attempt with the strongest evidence against a rule."""

    step: str
    """Id of the step."""
    attack: str
    """Name of the attack, with its options."""
    wall_s: FiniteFloat
    """Seconds that the attack took."""
    value: FiniteFloat | None = None
    """Score, for a rule on a metric; else None."""


class Versus(_Verdict):
    """What a rule on the difference from a baseline compared."""

    run: str
    """Id of the baseline's run."""
    paired: bool
    """Whether both audits attacked the same batches."""
    base_k: int
    """Steps of the baseline that leaked; of the batches that both judged if they are paired."""
    base_n: int
    """Steps of the baseline that were judged."""
    k: int
    """Steps of this audit that leaked, counted in the same way."""
    n: int
    """Steps of this audit that were judged."""


class RuleVerdict(_Verdict):
    """One rule applied to the results."""

    id: str
    """Id of the rule."""
    severity: str
    """`critical`, `high`, `medium` or `low`."""
    level: str
    """`error`: the rule decides the verdict. `warn`: it is only shown."""
    status: Status
    """The answer of this rule."""
    kind: LimitKind
    """Which limit the rule has."""
    subject: str
    """The event, or the statistic and the metric."""
    defense: str
    """Defence that the rule looks at; `shipped` for the update as the run sends it."""
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
    """Steps that leaked; None for a rule on a metric, on a claimed epsilon or on membership."""
    n: int
    """Steps that are evidence; 0 for a rule on a claimed epsilon or on membership."""
    observed: FiniteFloat | None
    """Rate, count or statistic; None without evidence. Of a rule on the difference from a baseline, that difference of the rates, -1 to 1;
    `lower`, `upper` and `threshold` are of the difference, too."""
    lower: FiniteFloat | None
    """Lower bound; None if there is none."""
    upper: FiniteFloat | None
    """Upper bound; None if there is none."""
    threshold: FiniteFloat
    """The limit of the policy."""
    margin: FiniteFloat | None
    """Threshold minus the number that must not exceed it (upper bound, count or maximum). It is negative if that number is too large."""
    more_clean_steps: int | None
    """Further steps without a leak that would make the rule pass; None if that does not apply or no number is enough."""
    confidence: float
    """Confidence of each one-sided bound, 0 to 1; 1 for a rule on a claimed epsilon, which has no bounds."""
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
    """None if nothing leaked, or if the rule looks at no attack."""
    versus: Versus | None = None
    """What was compared, for a rule on the difference from a baseline; None if nothing was."""
    waived: str = ""
    """Until when, by whom and why the rule may fail, if a waiver says so; it then has no part in the verdict."""

    imported: str = ""
    """Who made the results that the rule judges, such as `memaudit`; empty for this audit. `n` then counts canaries, not steps."""

    @property
    def word(self) -> str:
        """The status that outputs show.

        `WARN` for a rule at level warn that fails, `WAIVED` for one that a waiver lets fail.
        """
        if self.waived:
            return "WAIVED"
        return "WARN" if self.level == "warn" and self.status is Status.FAIL else self.status.value


NO_STEPS: Mapping[str, Any] = {
    "more_clean_steps": None,
    "censored": 0,
    "lost": 0,
    "due": 0,
    "left_out": 0,
    "worst": None,
}
"""What a rule says that counts no steps, such as one on a claimed epsilon."""


class ControlVerdict(_Verdict):
    """One control compared with the policy."""

    name: Literal["positive", "negative"]
    """Which control it is."""
    kind: Kind | None = None
    """What a positive control recovers; None for the negative control."""
    by: str = ""
    """The attack that recovered the canary most often; empty if none ran on it."""
    state: Literal["ok", "not run", "failed", "unproven"]
    """`ok`, or why it is not: too few control steps, a wrong result, or too few steps for the bound."""
    k: int
    """Control steps that were recovered."""
    n: int
    """Control steps that ran."""
    sentence: str
    """What was found and what the policy asks for."""


class WaiverVerdict(_Verdict):
    """What became of one waiver."""

    id: str
    """Name of the waiver."""
    rule: str
    """Id of the rule that may fail."""
    owner: str
    """Who accepts it."""
    reason: str
    """Why it is accepted."""
    ticket: str = ""
    """Where the repair is tracked; empty if nobody said it."""
    expires: str
    """Last day, as an ISO date."""
    state: Literal[
        "applies", "expired", "not yet", "unused", "no such rule", "critical", "undecided", "over its ceiling"
    ]
    """Only with `applies` its rule has no part in the verdict."""
    sentence: str
    """The state in words, with its reason."""


class ImportVerdict(_Verdict):
    """Results of another auditor that rules of the policy judge."""

    tool: str
    """Who made them, such as `memaudit`."""
    tool_version: str
    """The version of that tool."""
    created_at: str
    """When they were made, as an ISO time."""
    sha256: str
    """SHA-256 of the file that was read, as `sha256sum` prints it."""
    digest: str
    """Digest of what was kept of it."""


class Figures(_Verdict):
    """The numbers of one rule under a defence that is not shipped."""

    id: str
    """Id of the rule."""
    status: Status
    """The answer of the rule under this defence."""
    k: int | None
    """As of a rule."""
    n: int
    """As of a rule."""
    observed: FiniteFloat | None
    """As of a rule."""
    lower: FiniteFloat | None
    """As of a rule."""
    upper: FiniteFloat | None
    """As of a rule."""


class Alternative(_Verdict):
    """The verdict if the run shipped another defence of the audit."""

    defense: str
    """The defence, with its options."""
    status: Status
    """The verdict that this defence would have."""
    open_rules: tuple[str, ...]
    """Ids of the rules at level error that would not pass."""
    naive: bool
    """Whether all attacks that are evidence for a rule at level error ran without knowing the defence. Such a PASS does not make the defence
    effective."""
    rules: tuple[Figures, ...]
    """Each rule of the policy under this defence."""


class BaselineUsed(_Verdict):
    """The baseline that the verdict was made with."""

    run: str
    """Id of its run."""
    results_digest: str
    """Digest of its results."""
    digest: str
    """Digest of its file; empty if the results themselves were given."""


class PooledRun(_Verdict):
    """One of several runs that were judged together."""

    run: str
    """Id of the run; empty if its results cannot be read."""
    results_sha256: str | None
    """SHA-256 of its results.json; None if it cannot be read."""
    results_digest: str | None
    """The digest that its results name; None if they cannot be read."""
    steps: int
    """Audited steps of this run."""
    repeated: int = 0
    """Steps among them that another step repeats. They do not count again."""
    counted: bool = True
    """Whether its steps count; they do not if the same run was given before."""
    verdict: Status
    """What the policy says of this run alone."""
    sentence: str
    """The verdict on this run alone, in words."""


class About(_Verdict):
    """What the verdict is about, as the results or `leakaudit bind` say it."""

    artifacts: tuple[Artifact, ...] = ()
    """Files that the run made."""
    compared: tuple[Artifact, ...] = ()
    """Files that the caller gave, of which each is one of these."""
    base_model: str = ""
    """The weights that training began with: `sha256:` and a digest, or `hub:NAME@REVISION`; empty if unknown."""
    data: str = ""
    """Name of the data set; empty without one."""
    code_commit: str | None = None
    """Commit of the code when the run began; None if unknown."""
    code_dirty: bool | None = None
    """Whether that code had changes that were not committed; None if unknown."""


class WayOut(_Verdict):
    """The tested defence that passes at the smallest cost to the model."""

    defense: str = ""
    """Its label; empty if no defence passes, or if several pass and the cost of none was measured."""
    passing: tuple[str, ...] = ()
    """All defences that pass against attacks that knew them."""
    seen: str = ""
    """What was found under it: `no sentence in 60 steps (at most 4.9%)`."""
    cost: str = ""
    """The difference of the model's utility, such as `accuracy -0.3 points [-0.9, +0.2]`; empty if it was not measured."""
    sentence: str
    """The above, or what is missing."""


class Verdict(_Verdict):
    """The answer of the gate on an audit, or on several that it judged together.

    `leakaudit schema verdict` prints the JSON Schema of this class.
    """

    schema_: str = Field(default="leakaudit.verdict/1", alias="schema")
    """Format of the document."""
    verdict: Status
    """The answer."""
    exit_code: int
    """The exit code of `leakaudit gate`: 0 where an undecided verdict is allowed."""
    sentence: str
    """The verdict in numbers; the sentence of the rule that decides it."""
    deciding_rule: str | None
    """Id of the rule that decides; None for ERROR, and where runs cannot be pooled."""
    texts_back: int = 0
    """Texts of the shipped update that came back word for word, or with every word."""
    run: str
    """Id of the run, or how many runs were judged together; empty if the results cannot be read."""
    policy: str
    """Name of the policy."""
    policy_owner: str
    """Who may change the policy; empty if it does not say it."""
    policy_digest: str
    """`sha256:` over what the policy demands."""
    policy_of_run: str = ""
    """Digest of the policy that the run began with; empty if the results do not say it."""
    policy_changed: bool = False
    """Whether that is another policy than the one that judges."""
    policy_ref: str = ""
    """Where the policy was read in git (`--policy-ref`); empty if it was read from a file."""
    policy_commit: str = ""
    """The commit that this was."""
    about: About = About.model_construct()
    """What the verdict is about."""
    results_sha256: str | None
    """SHA-256 of results.json, as `sha256sum` prints it."""
    results_digest: str | None = None
    """The verified digest that the results name. It does not depend on the layout of the file."""
    evaluated_at: str
    """Time of judgement in UTC, in ISO 8601."""
    evidence_age_s: FiniteFloat | None
    """Age of the results at that time, in seconds; None if unknown."""
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
    """The positive control of each kind that a rule is about, and the negative one."""
    alternatives: tuple[Alternative, ...]
    """The same policy on every other defence of the audit."""
    way_out: WayOut | None = None
    """The cheapest of the alternatives; None for ERROR, and in a verdict of an earlier version."""
    waivers: tuple[WaiverVerdict, ...] = ()
    """What became of each waiver that was given."""
    waivers_digest: str = ""
    """Digest of the file of waivers; empty without one."""
    baseline: BaselineUsed | None = None
    """The baseline; None if there was none, or if no rule asks for it."""
    imports: tuple[ImportVerdict, ...] = ()
    """Results of other auditors that were judged."""
    problems: tuple[str, ...]
    """Problems with the evidence, for ERROR."""
    runs: tuple[PooledRun, ...] = ()
    """The runs that were judged together; empty for one run. `steps` counts each step once, `results_sha256` is None, and `results_digest` is
    the SHA-256 of the runs' digests in ascending order, one a line."""
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
