"""The policy: the rules that an audit must satisfy, read from YAML.

The module has over 400 lines, because it describes one document in the order in which a reader needs its parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from leakaudit.config.duration import Duration
from leakaudit.config.strict_yaml import parse_yaml, problem_at
from leakaudit.config.yaml_document import Document, compose, read_text
from leakaudit.gate.claims import ClaimedEpsilon
from leakaudit.gate.events import EVENTS
from leakaudit.gate.membership import MembershipLimit
from leakaudit.gate.policy_parts import (
    AllowedUndecided,
    FileName,
    Grant,
    PolicyPart,
    RequiredCoverage,
    StepsPerPhase,
    WaiversFile,
)
from leakaudit.gate.verdict import LimitKind
from leakaudit.plugins import names as plugin_names
from leakaudit.results.lengths import STARTS
from leakaudit.results.schema import Amount, Fraction, TextMode
from leakaudit.results.sequential import PRIOR

SHIPPED = "shipped"
"""The word in a scope for the update that the training run sends."""
OBSERVED = "none"
"""The defence name of attempts on the observed update, which already contains the run's own defence."""
ANY = "any"
"""The word in a scope for every attack."""

if TYPE_CHECKING:
    EventName = str
else:
    EventName = Literal[*EVENTS]
    """An event that a policy may limit. The type is made from the table of events, so that a new event needs no line here."""

RuleId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]


_Policy = PolicyPart


class EvidencePolicy(_Policy):
    """The evidence floor: with less evidence than this a rule cannot pass.

    A rule can still fail, because an observed leak is a fact.
    """

    min_steps: int = Field(default=59, ge=1)
    """Least number of verified steps that must be evidence for a rule. 59 steps without a leak bound the rate by 5 % at 95 % confidence."""
    min_steps_per_phase: StepsPerPhase = StepsPerPhase.model_construct()
    """Least number of such steps in each third of the training run, such as {early: 15, middle: 15, late: 15}."""
    min_texts: int = Field(default=0, ge=0)
    """Least number of true texts in these steps that can have the event of a rule. A text shorter than the rule asks for does not count."""
    max_error_share: Fraction = 0.02
    """Largest share of the attempts due for a rule that may be lost. An attempt is lost if it crashed, was skipped or was never made, or
    if the update of its step does not come from the kept batch."""
    max_censored: Fraction = 0.20
    """Largest share of the attempts that may run out of time without an event. A step on which no other attack ran to its end was not judged
    (`max_unjudged`)."""
    max_unjudged: Fraction | None = None
    """Largest share of the audited steps that no attack could judge and that then do not count as leaks. Without this key each such step counts
    as a leak where a rule is to pass. A step is not judged if no attack applies to it, if it has as many tokens as the hidden size and no attack
    reads beyond, if its attacks ran out of time, if it cannot be verified, or if only attacks that did not read their canary found nothing."""
    min_tokens: int = Field(default=8, ge=1)
    """Number of tokens from which a text must count in the rules on long texts. Where the audit counts longer texts only (its own `min_tokens`
    is larger), these rules do not pass."""
    max_age: Duration = "7d"
    """Largest age of the results: a number and d, h, m or s, such as 7d."""
    runs: int | None = Field(default=None, ge=1)
    """Number of runs that are judged together; with fewer or more no rule passes. Choose it before the first run: whoever judges again after
    each run, until the verdict is PASS, finds a pass by luck. Without this key any number of runs is judged."""


class PositiveControl(_Policy):
    """An undefended step with known text, which must be recovered.

    If it is not recovered, the audit may be unable to find leaks.
    """

    steps: int = Field(default=1, ge=0)
    """Fewest control steps that must have run."""
    rate_lower: Fraction = 0.90
    """Least share of the control steps that must be recovered. With enough control steps (29 for 0.90) the lower bound must reach this
    number; with fewer, the plain share must reach it."""


class NegativeControl(_Policy):
    """An update of another batch, from which the text must not be recovered.

    If it is recovered, the scores are wrong.
    """

    steps: int = Field(default=1, ge=0)
    """Fewest control steps that must have run."""
    rate_upper: Fraction = 0.10
    """Largest share of the control steps that may be "recovered". The plain share must not exceed it. With enough control steps (29 for
    0.10) the upper bound must not exceed it either."""


class ControlsPolicy(_Policy):
    """Requirements on the two controls."""

    positive: PositiveControl = PositiveControl.model_construct()
    """An undefended step with known text, which must be recovered."""
    negative: NegativeControl = NegativeControl.model_construct()
    """An update of another batch, from which the text must not be recovered."""


class StatisticsPolicy(_Policy):
    """Confidence of the bounds."""

    confidence: float = Field(default=0.95, ge=0.5, lt=1.0)
    """Confidence of each one-sided bound."""


HIGHEST_LIMIT = 0.99
"""Highest limit on a rate or a score. Our choice: 299 steps that all leak are needed to show a rate above it, and a score of 1 is the highest, so
a rule with a higher limit could hardly ever fail."""


class Requirements(RequiredCoverage):
    """What the audit must have tried, so that a rule can pass.

    Each key may be left out.
    """

    attacks: tuple[str, ...] = ()
    """Attacks that must have run to their end on at least one step, with any options unless they are named."""
    budget_s: Amount | None = None
    """Least time limit of each attempt, in seconds."""
    adaptive: bool = False
    """Whether every attack on a defended update must have known the defence."""
    granted: tuple[Grant, ...] = ()
    """What the threat model must have given the attacks: `labels`, `lengths`, `words`, `longest`, `counts`."""
    verified: Fraction = 0.0
    """Least share of the audited steps whose update was verified."""

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        most = self.threat_model.granted_at_most
        if most is not None and (more := [name for name in self.granted if name not in most]):
            raise ValueError(f"granted requires {more[0]}, which granted_at_most does not allow; no audit could pass")
        if self.attacks_share is not None and not (self.attacks or self.kinds):
            raise ValueError("attacks_share says on how many steps attacks or kinds must have run; name one of them")
        return self


class SubjectPolicy(_Policy):
    """What the audit must be bound to, so that a rule can pass.

    Each key may be left out.
    """

    require_artifact_digest: bool = False
    """Whether the run, or `leakaudit bind`, must name the files that it made, with their digests."""
    require_clean_tree: bool = False
    """Whether git must have known the commit of the code, without changes, when the run began."""
    require_policy_of_run: bool = False
    """Whether the policy must be the one that the run began with."""
    data: str = ""
    """Name that the run must give its data set (`data_name`); empty for any."""
    base_model: Annotated[str, Field(pattern=r"^(|sha256:[0-9a-f]{64}|hub:\S+@[0-9a-f]{40})$")] = ""
    """The weights that training must begin with: `sha256:` and a digest, or `hub:NAME@REVISION`; empty for any."""


class Scope(_Policy):
    """The attempts that a rule looks at."""

    defense: str = SHIPPED
    """`shipped` for the update as the run sends it, or the name of a defence of the audit."""
    attack: str | tuple[str, ...] = ANY
    """The name of an attack, a list of names, or `any`."""

    @property
    def attacks(self) -> tuple[str, ...] | None:
        """The names of the attacks; None for any attack."""
        if self.attack == ANY:
            return None
        return (self.attack,) if isinstance(self.attack, str) else self.attack


class VersusBaseline(_Policy):
    """How much more may leak than in the baseline."""

    margin: float = Field(gt=0.0, le=HIGHEST_LIMIT)
    """How much higher than the baseline's rate the rate of the event may be: 0.03 allows 3 % of the steps more. The rule passes if the upper bound
    of the difference is at or below it and fails if the lower bound is above it. Above 0, because no audit shows that two rates are equal."""


class BaselinePolicy(_Policy):
    """Where the baseline is, for rules with `versus_baseline`."""

    file: Path = Path("leakaudit.baseline.json")
    """File that `leakaudit baseline set RUN` writes, from the folder of the policy's file."""


_LIMITS: Mapping[LimitKind, frozenset[str]] = {
    "max_rate": frozenset({"event"}),
    "max_count": frozenset({"event"}),
    "max_value": frozenset({"metric", "statistic"}),
    "versus_baseline": frozenset({"event"}),
    "claimed_epsilon": frozenset(),
    "membership": frozenset(),
}
"""Key of a limit -> the keys that go with it."""


class Rule(_Policy):
    """One limit: on how often an event happens, or on a statistic of a metric.

    A rule has `event` with `max_rate`, `max_count` or `versus_baseline`, or `metric` and `statistic` with `max_value`, or
    `claimed_epsilon` or `membership` alone.
    """

    id: RuleId
    """Lower-case letters, digits and hyphens; the report links to it."""
    severity: Literal["critical", "high", "medium", "low"] = "high"
    """Severity. Of rules with the same status, the report shows the most severe first."""
    level: Literal["error", "warn"] = "error"
    """`error`: the rule decides the verdict. `warn`: the rule is shown and never changes the verdict."""
    scope: Scope = Scope.model_construct()
    """The attempts that the rule looks at."""
    event: EventName | None = None
    """The event that counts as a leak of a step."""
    min_tokens: int | None = None
    """For `exact_sequence`: number of tokens from which a text counts; without this key every text does. 1, 2, 3, 5, 9 or a later start of a
    range of lengths, because results hold lengths as such ranges."""
    max_rate: float | None = Field(default=None, gt=0.0, le=HIGHEST_LIMIT)
    """Largest share of steps that may leak. The rule passes if the upper bound is at or below it and fails if the lower bound is above it."""
    max_count: int | None = Field(default=None, ge=0)
    """Largest number of audited steps that may leak, below `min_steps`. At 0 a single leak fails the rule, without statistics."""
    metric: str | None = None
    """A metric, such as rougeL, token_recall, best_rl or nerr. The score of a step is the highest score of any attack on it. `rougeL` is the mean
    over the texts of a step; `best_rl` is that of its best text, so it shows one recovered text among many."""
    statistic: Literal["mean", "p95", "max"] | None = None
    """Statistic over the steps. `mean` and `p95` have bounds and need 30 steps (`p95` needs 59 to pass). `max` is the largest observed
    value."""
    max_value: float | None = Field(default=None, ge=0.0, le=HIGHEST_LIMIT)
    """Largest value of the statistic."""
    versus_baseline: VersusBaseline | None = None
    """Limit on how much more steps leak than in the baseline."""
    on_not_comparable: Literal["inconclusive", "warn"] = "inconclusive"
    """What a rule with `versus_baseline` is if the baseline was made in another way. `inconclusive`: undecided. `warn`: undecided and at level
    `warn` for this verdict. Without a baseline it is undecided in both cases."""

    claimed_epsilon: ClaimedEpsilon | None = None
    """Largest epsilon of differential privacy that an accountant may give, such as `{max: 8, delta_max: 1e-5}`. The audit does not confirm the
    accountant's number."""

    membership: MembershipLimit | None = None
    """Largest share of the texts of the steps that the update may name, such as `{max_tpr: 0.1, false_rate: 0.01}`. The audit needs texts of no step
    (`membership` in its configuration)."""

    @property
    def limit(self) -> LimitKind:
        """The name of the limit that the rule has."""
        return next(name for name in _LIMITS if getattr(self, name) is not None)

    @property
    def of_attacks(self) -> bool:
        """Whether the attacks of the battery decide the rule.

        A claimed epsilon is the accountant's, and membership is asked beside the battery.
        """
        return self.claimed_epsilon is None and self.membership is None

    @property
    def threshold(self) -> float:
        """The number of the limit, whatever its key is."""
        if self.versus_baseline is not None:
            return self.versus_baseline.margin
        if self.claimed_epsilon is not None:
            return self.claimed_epsilon.max
        if self.membership is not None:
            return self.membership.max_tpr
        return next(float(x) for x in (self.max_rate, self.max_count, self.max_value) if x is not None)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        limits = [name for name in _LIMITS if getattr(self, name) is not None]
        if len(limits) != 1:
            found = " and ".join(limits) or "none"
            raise ValueError(f"rule {self.id!r} needs exactly one of {', '.join(_LIMITS)}; found {found}")
        if self.on_not_comparable == "warn" and self.versus_baseline is None:
            raise ValueError(f"rule {self.id!r}: on_not_comparable goes with versus_baseline")
        wanted = _LIMITS[limits[0]]
        given = {name for name in ("event", "metric", "statistic") if getattr(self, name) is not None}
        if given != wanted:
            need, found = (
                " and ".join(sorted(wanted)) or "no event and no metric",
                " and ".join(sorted(given)) or "none",
            )
            raise ValueError(f"rule {self.id!r}: {limits[0]} goes with {need}; found {found}")
        if self.min_tokens is not None and (self.event is None or not EVENTS[self.event].any_length):
            events = ", ".join(name for name, event in EVENTS.items() if event.any_length)
            raise ValueError(f"rule {self.id!r}: min_tokens goes with the event {events}")
        if self.min_tokens is not None and self.min_tokens not in STARTS:
            raise ValueError(
                f"rule {self.id!r}: min_tokens is {self.min_tokens}; results hold lengths as ranges, so write one of "
                f"{', '.join(map(str, STARTS[:6]))}"
            )
        if self.scope.attack == ():
            raise ValueError(f"rule {self.id!r}: an empty list of attacks would switch the rule off; write any")
        return self


class ImportedRule(_Policy):
    """A limit on what another auditor found in the trained model.

    The gate gets these results with `--memaudit FILE`. Without them the rule is INCONCLUSIVE.
    """

    id: RuleId
    """As of a rule; no two rules of a policy have the same."""
    severity: Literal["critical", "high", "medium", "low"] = "high"
    """As of a rule."""
    level: Literal["error", "warn"] = "error"
    """As of a rule."""
    import_: Literal["memaudit"] = Field(alias="import")
    """Who made the results."""
    measure: Literal["membership_tpr", "regurgitation_rate"]
    """`membership_tpr`: share of the canaries of the training data that are told from others, at 1 % false alarms. `regurgitation_rate`: share of
    them that the model completes."""
    max_value: float = Field(ge=0.0, le=HIGHEST_LIMIT)
    """Largest share. The rule passes if the upper bound is at or below it and fails if the lower bound is above it."""


class NightsPolicy(_Policy):
    """How rates over several nights are judged; choose it before the first night.

    The bounds hold however often somebody looks at them.
    """

    confidence: float = Field(default=0.95, ge=0.5, lt=1.0)
    """Confidence over all nights together, of the sequence of each rate and of the alarm."""
    prior: tuple[Annotated[FiniteFloat, Field(gt=0.0)], Annotated[FiniteFloat, Field(gt=0.0)]] = PRIOR
    """Beta prior of the confidence sequence. The default is narrow near small rates."""
    margin: Fraction = 0.0
    """How much higher than the baseline's rate a rate may be before nights count as worse."""
    level: Literal["error", "warn"] = "error"
    """What a night that is worse than the baseline does. `error`: the command ends with FAIL. `warn`: it is shown only."""


class ReportPolicy(_Policy):
    """What the report may show."""

    text: TextMode = TextMode.MASKED
    """Text mode of the report if the caller does not name one."""
    allow_full: bool = False
    """Whether a report may show private text (text mode `full`)."""
    top_samples: int = Field(default=20, ge=1, le=1000)
    """Largest number of sequences that the report shows in detail, worst first."""


DEFAULTS = 1
"""Version of the defaults of all keys; whoever changes a default raises it, because digests of policies hold it in place of them."""


class Policy(_Policy):
    """The rules that an audit must satisfy.

    `leakaudit schema policy` prints the JSON Schema of this class.
    """

    schema_: Literal["leakaudit.policy/1"] = Field(alias="schema")
    """Format of the file."""
    name: str = Field(min_length=1)
    """Name of the policy, shown beside the verdict."""
    owner: str = ""
    """Who may change the policy."""
    evidence: EvidencePolicy = EvidencePolicy.model_construct()
    """The evidence that a rule needs to pass."""
    controls: ControlsPolicy = ControlsPolicy.model_construct()
    """Requirements on the two controls."""
    statistics: StatisticsPolicy = StatisticsPolicy.model_construct()
    """Confidence of the bounds."""
    requires: Requirements = Requirements.model_construct()
    """What the audit must have tried, so that a rule can pass."""
    on_inconclusive: AllowedUndecided | None = None
    """A time in which the gate ends with exit code 0 where nothing is decided; without this key it ends with 4."""
    waivers: FileName | WaiversFile | None = None
    """The file of waivers, relative to the policy's folder. `--waivers` names another one."""
    subject: SubjectPolicy = SubjectPolicy.model_construct()
    """What the audit must be bound to, so that a rule can pass."""
    rules: tuple[Rule, ...]
    """The limits. The verdict is the worst status of the rules at level `error`."""
    imported: tuple[ImportedRule, ...] = ()
    """Limits on what other auditors found."""
    report: ReportPolicy = ReportPolicy.model_construct()
    """What the report may show."""
    nights: NightsPolicy = NightsPolicy.model_construct()
    """How rates over several nights are judged."""
    baseline: BaselinePolicy = BaselinePolicy.model_construct()
    """Where the baseline is, for rules with `versus_baseline`."""

    @property
    def compares(self) -> bool:
        """Whether a rule asks for a baseline."""
        return any(rule.versus_baseline is not None for rule in self.rules)

    @model_validator(mode="after")
    def _rules_decide(self) -> Self:
        ids = [*(rule.id for rule in self.rules), *(rule.id for rule in self.imported)]
        twice = sorted({name for name in ids if ids.count(name) > 1})
        if twice:
            second = ids.index(twice[0], ids.index(twice[0]) + 1)
            of_others = second - len(self.rules)
            at = ("rules", second, "id") if of_others < 0 else ("imported", of_others, "id")
            raise problem_at(at, f"two rules are called {twice[0]!r}; each needs its own id")
        if not self.rules:
            raise problem_at(("rules",), "the policy has no rule, so it could never fail; write at least one")
        for index, rule in enumerate(self.rules):
            if rule.max_count is not None and rule.max_count >= self.evidence.min_steps:
                raise problem_at(
                    ("rules", index, "max_count"),
                    f"rule {rule.id!r} allows {rule.max_count} leaks, and {self.evidence.min_steps} steps are enough to pass it (min_steps), "
                    "so it could pass where every step leaks; lower max_count, raise min_steps or write max_rate",
                )
        deciding = [rule for rule in self.rules if rule.level == "error"]
        if deciding and not any(rule.of_attacks for rule in deciding):
            raise problem_at(
                ("rules",),
                "every rule at level error is about a claimed epsilon or membership, so no recovered text could fail the policy; add a rule with an "
                "event",
            )
        if not deciding:
            raise problem_at(
                ("rules",),
                "every rule is at level warn, so the policy could never fail; set at least one rule to level: error",
            )
        if all(rule.level == "warn" or rule.on_not_comparable == "warn" for rule in self.rules):
            raise problem_at(
                ("rules",),
                "every rule at level error has on_not_comparable: warn, so with another baseline the policy could never fail; add a rule that "
                "needs no baseline",
            )
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the policy's content, without comments, layout and defaults.

        What is left out of a file counts like its default that is written out, and keys that a new version adds change no digest. A version
        that changes a default raises `DEFAULTS`.
        """
        content = self.model_dump(mode="json", by_alias=True, exclude_defaults=True) | {"defaults": DEFAULTS}
        plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(plain.encode()).hexdigest()


def load_policy(path: Path, names: plugin_names.Names | None = None) -> Policy:
    """Read a policy from a YAML file.

    Args:
        path: the file.
        names: the known attacks, defences and metrics; None to accept every name.

    Raises:
        ConfigError: the message names every problem with file, line and what to write instead.
    """
    return parse_policy(read_text(path), str(path), names)


def parse_policy(text: str, source: str, names: plugin_names.Names | None = None) -> Policy:
    """Read a policy from text; see `load_policy`. Messages call the text `source`."""
    return parse_yaml(text, Policy, source, None if names is None else lambda policy: unknown_names(policy, names))


def unknown_names(policy: Policy, names: plugin_names.Names) -> Iterable[tuple[tuple[str | int, ...], str]]:
    """Yield the place and the problem of every name that no plugin has.

    A rule with such a name would always be inconclusive.
    """
    for name in policy.requires.attacks:
        if problem := plugin_names.unknown(name, names.attacks):
            yield ("requires", "attacks"), f"the attack {problem}"
    for name in policy.requires.defenses:
        if problem := plugin_names.unknown(name, names.defenses):
            yield ("requires", "defenses"), f"the defence {problem}"
    for index, rule in enumerate(policy.rules):
        at: tuple[str | int, ...] = ("rules", index)
        attacks = () if rule.scope.attacks is None else rule.scope.attacks
        asked = [((*at, "scope", "attack"), "attack", name, names.attacks) for name in attacks]
        asked.append(((*at, "scope", "defense"), "defence", rule.scope.defense, names.defenses | {SHIPPED}))
        if rule.metric is not None:
            asked.append(((*at, "metric"), "metric", rule.metric, names.metrics))
        for path, kind, name, known in asked:
            problem = plugin_names.unknown(name, known)
            if problem:
                yield path, f"rule {rule.id!r}: the {kind} {problem}"


def default_policy() -> Policy:
    """Return the built-in policy, which judges the update as the run sends it.

    No sentence may be recovered verbatim, and no text of three tokens or more. At most 5 % of the steps may leak a sentence, every word of the batch or most words of a
    text, or have a text in reach of an attack (our choice: 59 clean steps show 5 % at 95 % confidence). Label counts only warn, because
    the classes decide how much the counts reveal. If no attack can tell what was in reach, the verdict is inconclusive.

    `overlap` limits the 95th percentile of ROUGE-L, not the largest value, because texts overlap by chance. We compared 1,000 sentences
    of each of seven public corpora with the best of seven unrelated texts. 0 to 0.6 % of them overlapped by more than 0.5, so a limit
    on the maximum over 60 steps would fail one clean run in six. Of sentences made from templates, up to 6 % overlapped by that much.

    `no-text-verbatim` counts from three tokens, because shorter texts come back by luck. A guess of n words by their frequency is a text of n
    words with probability (sum p^2)^n at most: in eight public corpora 1 in 2,900 to 17,000 for two words, and 1 in 155,000 to 2,300,000 for
    three (`python -m tests.benchmarks.short_texts FOLDER`). 59 steps of eight texts with eight guesses are 3,776 pairs, so two words come back
    by luck in up to every other clean run, and three in one of 40 at most.
    """
    return Policy(
        schema="leakaudit.policy/1",
        name="built-in default",
        rules=(
            Rule(id="no-sentence-verbatim", severity="critical", event="exact_sentence", max_count=0),
            Rule(id="no-text-verbatim", severity="critical", event="exact_sequence", min_tokens=3, max_count=0),
            Rule(id="sentence-rate", severity="high", event="exact_sentence", max_rate=0.05),
            Rule(id="all-words-rate", severity="high", event="all_words", max_rate=0.05),
            Rule(id="most-words-rate", severity="high", event="most_words", max_rate=0.05),
            Rule(id="in-reach-rate", severity="high", event="in_reach", max_rate=0.05),
            Rule(id="overlap", severity="medium", metric="rougeL", statistic="p95", max_value=0.5),
            Rule(id="label-counts", severity="medium", level="warn", event="label_counts", max_rate=0.20),
        ),
    )


def rule_lines(text: str) -> dict[str, int]:
    """Return rule id -> line in the text of a policy, counted from 1.

    Raises:
        ConfigError: the text is no YAML.
    """
    document = Document("policy")
    node = compose(text, "policy")
    data = None if node is None else document.build(node, (), 0)
    return {
        str(rule["id"]): document.lines[(key, number)]
        for key in ("rules", "imported")
        for number, rule in enumerate(data.get(key, []) if isinstance(data, dict) else [])
        if isinstance(rule, dict) and "id" in rule
    }


def round_policy() -> Policy:
    """Return the built-in policy for one transmission: one round passes or is blocked.

    Nothing may be recovered from it: no whole text, and not every word of the batch. The audit must have been able to find something: an
    attack that reads texts ran on the round to its end, the update of the round comes from its batch, and the audit found the known text
    of its control step. One clean round says nothing about the next one: the default policy bounds the rate of leaks over many.
    """
    return Policy(
        schema="leakaudit.policy/1",
        name="built-in for one round",
        evidence=EvidencePolicy(min_steps=1),
        rules=(
            Rule(id="no-text-verbatim", severity="critical", event="exact_sequence", max_count=0),
            Rule(id="not-all-words", severity="high", event="all_words", max_count=0),
            Rule(id="not-most-words", severity="medium", level="warn", event="most_words", max_count=0),
        ),
    )
