"""The gate: policy + results -> verdict.

One evaluator, `evaluate`, feeds the exit code, `verdict.json` and the report, so that they cannot disagree.

What a verdict rests on:

- The unit is one client step. A step leaks if any attack in the rule's scope had the event.
- Success proves, failure bounds. One recovered text is a fact; that nothing was recovered only bounds the leak rate.
- A step is evidence only if an attack that could have shown the event really ran on it. Not applicable, crashed,
  skipped and not run are no evidence, and so never a pass. Neither is a step that fails verification.
- A step that cannot be verified is attacked all the same: what comes back from it is proof, and where nothing comes back it
  counts as nothing.
- Verdict = the worst of the rules at level `error`: ERROR > FAIL > INCONCLUSIVE > PASS. Rules at level `warn` are shown
  and never change it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from leakaudit.config.strict_yaml import problem_at, read_yaml
from leakaudit.plugins import names as catalogue
from leakaudit.results import bounds as stats
from leakaudit.results.consistency import CLOCK_SLACK, contradictions, moment, unexplained_steps
from leakaudit.results.recovery import LEAST_SHARE, in_words, recovered
from leakaudit.results.schema import (
    Attempt,
    AttemptStatus,
    Control,
    Fraction,
    Results,
    Score,
    SequenceScore,
    StepRecord,
    TextMode,
)
from leakaudit.results.wording import counted

SHIPPED = "shipped"
"""The scope word for what the training run really sends."""
_OBSERVED = "none"
"""Attempts on the update as observed: the run's own defence is in it already."""
ANY = "any"

_AGE = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_AGE_UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}


# ---------------------------------------------------------------------------------------------------------------- policy


def _check_age(text: str) -> str:
    if not _AGE.fullmatch(text):
        raise ValueError(f"{text!r} is no length of time; write a whole number and m, h or d, such as 7d")
    return text


Age = Annotated[str, AfterValidator(_check_age)]
Event = Literal["exact_sentence", "exact_sequence", "all_words", "most_words", "in_reach", "label_counts"]
"""`in_reach` is the gate's own: a sentence came back, or a search gave up that would have accepted it. The others stand in the
attempts."""
RuleId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]


class _Policy(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, use_attribute_docstrings=True)


class EvidencePolicy(_Policy):
    """The floor: evidence below it cannot pass a rule. It can still fail one, because a leak that was seen is a fact."""

    min_steps: int = Field(default=59, ge=1)
    """Steps that must be evidence for a rule. 59 steps without a leak are what bounds the rate by 5 % at 95 %."""
    max_error_share: Fraction = 0.02
    """Share of the attempts due for a rule that may be lost: crashed, skipped, never made, or on a step whose update
    does not come from the batch that was kept."""
    max_censored: Fraction = 0.20
    """Share of the attempts that may have ended for want of time. They count as "no event"."""
    max_age: Age = "7d"
    """How old the results may be: a number and m, h or d."""


class PositiveControl(_Policy):
    """An undefended step with known text, which must be recovered. Otherwise the audit is blind."""

    steps: int = Field(default=1, ge=0)
    """Control steps that must have run."""
    rate_lower: Fraction = 0.90
    """Share of them that must be recovered. Compared with the 95 % lower bound where there are enough control steps
    for that (29 of 29 for 0.90), and with the plain share where there are fewer."""


class NegativeControl(_Policy):
    """An update of another batch, from which the text must not be recovered. Otherwise the scores are broken."""

    steps: int = Field(default=1, ge=0)
    """Control steps that must have run."""
    rate_upper: Fraction = 0.10
    """Share of them that may be "recovered". Compared with the upper bound where there are enough control steps for
    that (29 for 0.10), and with the plain share where there are fewer."""


class ControlsPolicy(_Policy):
    """Both controls."""

    positive: PositiveControl = PositiveControl()
    negative: NegativeControl = NegativeControl()


class StatisticsPolicy(_Policy):
    """How sure a bound must be."""

    confidence: float = Field(default=0.95, ge=0.5, lt=1.0)
    """Of each one-sided bound."""


class Scope(_Policy):
    """Which attempts a rule looks at."""

    defense: str = SHIPPED
    """`shipped` is the update as the run sends it; otherwise the name of a defence of the battery."""
    attack: str | tuple[str, ...] = ANY
    """The name of an attack, a list of names, or `any`."""

    @property
    def attacks(self) -> tuple[str, ...] | None:
        """The attacks by name, None for any."""
        if self.attack == ANY:
            return None
        return (self.attack,) if isinstance(self.attack, str) else self.attack


class Rule(_Policy):
    """One limit: `event` with `max_rate` or `max_count`, or `metric` and `statistic` with `max_value`."""

    id: RuleId
    """Lower-case letters, digits and hyphens; the report links to it."""
    severity: Literal["critical", "high", "medium", "low"] = "high"
    """Decides the order in the report."""
    level: Literal["error", "warn"] = "error"
    """`warn` rules are shown and never change the verdict."""
    scope: Scope = Scope()
    event: Event | None = None
    """What counts as a leak of a step."""
    max_rate: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Share of steps that may leak. Passes when the upper bound is at or below it, fails when the lower bound is above."""
    max_count: int | None = Field(default=None, ge=0)
    """Audited steps that may leak. 0 is a red line: one leak is proof, no statistics."""
    metric: str | None = None
    """A score of the battery, such as rougeL or token_recall. A step's score is that of its worst attack."""
    statistic: Literal["mean", "p95", "max"] | None = None
    """Over steps. `mean` and `p95` are bounded and need 30 steps (p95 needs 59 to pass); `max` is what was seen."""
    max_value: Fraction | None = None
    """Largest value of the statistic."""

    @property
    def threshold(self) -> float:
        """The limit, whichever kind it is."""
        return next(float(x) for x in (self.max_rate, self.max_count, self.max_value) if x is not None)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        limits = [name for name in ("max_rate", "max_count", "max_value") if getattr(self, name) is not None]
        if len(limits) != 1:
            found = " and ".join(limits) or "none"
            raise ValueError(f"rule {self.id!r} needs exactly one of max_rate, max_count, max_value; found {found}")
        wanted = {"metric", "statistic"} if limits == ["max_value"] else {"event"}
        given = {name for name in ("event", "metric", "statistic") if getattr(self, name) is not None}
        if given != wanted:
            need, found = " and ".join(sorted(wanted)), " and ".join(sorted(given)) or "none"
            raise ValueError(f"rule {self.id!r}: {limits[0]} goes with {need}; found {found}")
        if self.scope.attack == ():
            raise ValueError(f"rule {self.id!r}: an empty list of attacks would switch the rule off; write any")
        return self


class ReportPolicy(_Policy):
    """What the report may show."""

    text: TextMode = TextMode.MASKED
    """Text mode where the command line names none."""
    allow_full: bool = False
    """Whether a report with the private text may be made at all."""
    top_samples: int = Field(default=20, ge=1, le=1000)
    """Sequences shown in detail, worst first."""


class Policy(_Policy):
    """What must hold of an audit. `leakaudit schema policy` prints the JSON Schema of this class."""

    schema_: Literal["leakaudit.policy/1"] = Field(alias="schema")
    name: str = Field(min_length=1)
    """Shown beside the verdict."""
    owner: str = ""
    """Who may change it."""
    evidence: EvidencePolicy = EvidencePolicy()
    controls: ControlsPolicy = ControlsPolicy()
    statistics: StatisticsPolicy = StatisticsPolicy()
    rules: tuple[Rule, ...] = Field(min_length=1)
    report: ReportPolicy = ReportPolicy()

    @model_validator(mode="after")
    def _rules_decide(self) -> Self:
        ids = [rule.id for rule in self.rules]
        twice = sorted({name for name in ids if ids.count(name) > 1})
        if twice:
            second = ids.index(twice[0], ids.index(twice[0]) + 1)
            raise problem_at(("rules", second, "id"), f"two rules are called {twice[0]!r}; each needs its own id")
        if all(rule.level == "warn" for rule in self.rules):
            raise problem_at(
                ("rules",),
                "every rule is at level warn, so the policy could never fail; set at least one rule to level: error",
            )
        return self

    @property
    def digest(self) -> str:
        """SHA-256 over the policy's content, defaults included; comments and layout do not count."""
        plain = json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(plain.encode()).hexdigest()


def load_policy(path: Path, names: catalogue.Names | None = None) -> Policy:
    """Read a policy from a YAML file.

    Args:
        path: the file.
        names: the attacks, defences and metrics that there are; None to leave the policy's names unchecked.

    Raises:
        ConfigError: every problem at once, each with file, line and what to write instead.
    """
    return read_yaml(path, Policy, check=None if names is None else lambda policy: _unknown_names(policy, names))


def _unknown_names(policy: Policy, names: catalogue.Names) -> Iterable[tuple[tuple[str | int, ...], str]]:
    """Yield place and problem of every name that no plugin has.

    A rule on such a name could never be decided.
    """
    for index, rule in enumerate(policy.rules):
        at: tuple[str | int, ...] = ("rules", index)
        attacks = () if rule.scope.attacks is None else rule.scope.attacks
        asked = [((*at, "scope", "attack"), "attack", name, names.attacks) for name in attacks]
        asked.append(((*at, "scope", "defense"), "defence", rule.scope.defense, names.defenses | {SHIPPED}))
        if rule.metric is not None:
            asked.append(((*at, "metric"), "metric", rule.metric, names.metrics))
        for path, kind, name, known in asked:
            problem = catalogue.unknown(name, known)
            if problem:
                yield path, f"rule {rule.id!r}: the {kind} {problem}"


def default_policy() -> Policy:
    """Return the policy used where none is given, for what is shipped.

    No sentence verbatim at all. In at most 5 % of the steps (our choice: what 59 clean steps can show at 95 %) may a sentence come
    back, every word of the batch, most words of a text, or a text be in reach of a search that gave up. Label counts only warn,
    because how much they tell depends on what the classes are. Where no attack can tell what was in reach, the verdict is open.

    `overlap` asks for the 95th percentile of ROUGE-L instead of the largest value, because text can overlap by chance: of 1,000
    sentences of each of seven public corpora, the best of seven unrelated texts overlapped by more than 0.5 for 0 to 0.6 % (a maximum over 60
    steps would so fail one clean run in six), and for up to 6 % of sentences made from templates.
    """
    return Policy(
        schema="leakaudit.policy/1",
        name="built-in default",
        rules=(
            Rule(id="no-sentence-verbatim", severity="critical", event="exact_sentence", max_count=0),
            Rule(id="sentence-rate", severity="high", event="exact_sentence", max_rate=0.05),
            Rule(id="all-words-rate", severity="high", event="all_words", max_rate=0.05),
            Rule(id="most-words-rate", severity="high", event="most_words", max_rate=0.05),
            Rule(id="in-reach-rate", severity="high", event="in_reach", max_rate=0.05),
            Rule(id="overlap", severity="medium", metric="rougeL", statistic="p95", max_value=0.5),
            Rule(id="label-counts", severity="medium", level="warn", event="label_counts", max_rate=0.20),
        ),
    )


# --------------------------------------------------------------------------------------------------------------- verdict


class Status(StrEnum):
    """What a rule, or all of them, came to; from best to worst."""

    PASS = "PASS"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"
    ERROR = "ERROR"


EXIT_CODES = {Status.PASS: 0, Status.FAIL: 3, Status.INCONCLUSIVE: 4, Status.ERROR: 5}
_BADNESS = {status: rank for rank, status in enumerate(Status)}
_SEVERITY = {"critical": 0, "high": 1, "medium": 2, "low": 3}


class _Verdict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, use_attribute_docstrings=True)


class Worst(_Verdict):
    """The attempt that speaks most against a rule."""

    step: str
    attack: str
    wall_s: FiniteFloat
    """Seconds the attack took."""
    value: FiniteFloat | None = None
    """Score, for a rule on a metric."""


class RuleVerdict(_Verdict):
    """One rule applied to the results."""

    id: str
    severity: str
    level: str
    status: Status
    kind: Literal["max_rate", "max_count", "max_value"]
    subject: str
    """The event, or statistic and metric."""
    defense: str
    attacks: tuple[str, ...]
    """Attacks that are evidence: they ran and could have shown the event."""
    k: int | None
    """Steps that leaked; None for a rule on a metric."""
    n: int
    """Steps that are evidence."""
    observed: FiniteFloat | None
    """Rate, count or statistic; None where there is no evidence."""
    lower: FiniteFloat | None
    upper: FiniteFloat | None
    threshold: FiniteFloat
    margin: FiniteFloat | None
    """Threshold less what must stay below it to pass (upper bound, count or maximum). Negative: too much."""
    more_clean_steps: int | None
    """Further steps without a leak that would make it pass; None where that is no question or no number."""
    confidence: float
    method: str
    """Where the bounds come from."""
    censored: int
    """Attempts that ran out of time without an event."""
    lost: int
    """Attempts that were due and gave nothing usable."""
    due: int
    """Attempts that were due."""
    left_out: int
    """Steps that hold nothing the event could be about (no sentence long enough)."""
    silent: int = 0
    """Unverifiable steps from which nothing came back that the rule is about: no evidence, and in no other number here."""
    reasons: tuple[str, ...]
    """Why the rule could not pass, beside its own numbers."""
    sentence: str
    """What was seen and what the policy allows, in numbers."""
    worst: Worst | None

    @property
    def word(self) -> str:
        """The status, or `WARN` where a rule at level warn does not hold.

        Such a rule never fails a run.
        """
        return "WARN" if self.level == "warn" and self.status is Status.FAIL else self.status.value


class ControlVerdict(_Verdict):
    """One control against the policy."""

    name: Literal["positive", "negative"]
    state: Literal["ok", "not run", "failed", "unproven"]
    k: int
    n: int
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
    """What the verdict would be if the run shipped another defence of the battery."""

    defense: str
    status: Status
    open_rules: tuple[str, ...]
    """Error-level rules that would not pass."""
    naive: bool
    """Measured only with attacks that were not told of the defence."""
    rules: tuple[Figures, ...]


class Verdict(_Verdict):
    """What the gate says of an audit: `verdict.json`. `leakaudit schema verdict` prints its JSON Schema."""

    schema_: str = Field(default="leakaudit.verdict/1", alias="schema")
    verdict: Status
    exit_code: int
    sentence: str
    """The verdict in numbers: that of the rule that decides it."""
    deciding_rule: str | None
    run: str
    policy: str
    policy_owner: str
    policy_digest: str
    results_sha256: str | None
    """Of the file, as `sha256sum` prints it."""
    results_digest: str | None = None
    """The digest that the results name and that was found to be right; it does not depend on the layout of the file."""
    evaluated_at: str
    evidence_age_s: FiniteFloat | None
    valid_until: str | None
    """When the evidence is too old for the policy."""
    steps: int
    """Audited steps."""
    unverified_steps: int
    """Steps left out because their update does not come from the batch that was kept."""
    unverifiable_steps: int = 0
    """Steps that were attacked although they could not be verified: proof where text came back, else no evidence."""
    rules: tuple[RuleVerdict, ...]
    """Worst first."""
    controls: tuple[ControlVerdict, ...]
    alternatives: tuple[Alternative, ...]
    problems: tuple[str, ...]
    """For ERROR: what is wrong with the evidence."""


def exit_code(verdict: Verdict) -> int:
    """Return the exit code of a verdict: 0 PASS, 3 FAIL, 4 INCONCLUSIVE, 5 ERROR."""
    return EXIT_CODES[verdict.verdict]


def to_json(verdict: Verdict) -> dict[str, Any]:
    """Return `verdict` as plain JSON data."""
    return verdict.model_dump(mode="json", by_alias=True)


# -------------------------------------------------------------------------------------------------------------- evaluate


def evaluate(results: Results, policy: Policy, *, now: datetime, results_sha256: str | None = None) -> Verdict:
    """Apply `policy` to `results`.

    A positive control that fails, or any other gap in the evidence, keeps every rule from passing. It does not undo a
    FAIL: a text that was recovered was recovered, by an audit that is otherwise blind as well. A negative control that
    "leaks" does: then the scores themselves cannot be believed, and every rule is INCONCLUSIVE.

    Args:
        results: the audit.
        policy: the rules.
        now: the time of judgement, with time zone.
        results_sha256: digest of the file that `results` were read from, to be recorded.

    Returns:
        The verdict; ERROR where the results contradict themselves.
    """
    problems = (*contradictions(results), *_from_the_future(results, now))
    if problems:
        return _error(policy, now, problems, results, results_sha256=results_sha256)
    controls = _judge_controls(results, policy)
    age, age_gap = _judge_age(results, policy, now)
    gaps = [c.sentence for c in controls if c.state in ("not run", "failed", "unproven")]
    gaps += [age_gap] if age_gap else []
    gaps += _absent(results)
    broken = next((c.sentence for c in controls if c.name == "negative" and c.state == "failed"), None)

    rules = _judge_rules(results, policy, SHIPPED, gaps, broken)
    overall, deciding = _overall(rules)
    finished = moment(results.run.finished)
    return Verdict(
        verdict=overall,
        exit_code=EXIT_CODES[overall],
        sentence=" ".join([deciding.sentence, *_also_came_back(results, deciding), *deciding.reasons]),
        deciding_rule=deciding.id,
        run=results.run.id,
        policy=policy.name,
        policy_owner=policy.owner,
        policy_digest=policy.digest,
        results_sha256=results_sha256,
        results_digest=results.digest,
        evaluated_at=_stamp(now),
        evidence_age_s=age.total_seconds() if age is not None else None,
        valid_until=_stamp(finished + _duration(policy.evidence.max_age)) if finished else None,
        steps=len(results.steps),
        unverified_steps=sum(not _usable(step) for step in results.steps),
        unverifiable_steps=sum(_usable(step) and not step.verification.status.bounds for step in results.steps),
        rules=tuple(sorted(rules, key=_order)),
        controls=controls,
        alternatives=tuple(_alternatives(results, policy, gaps, broken)),
        problems=(),
    )


def unreadable(problem: str, policy: Policy, *, now: datetime, run: str = "") -> Verdict:
    """Return the ERROR verdict for evidence that cannot be read at all, so that machines still get one document."""
    return _error(policy, now, (problem,), None, run=run)


def percent(value: float, beside: float | None = None) -> str:
    """Write a share as a percentage, with as many digits as it takes to tell it from `beside`.

    >>> percent(0.11667), percent(0.05), percent(0.0504, beside=0.05), percent(0.0001)
    ('11.7%', '5%', '5.04%', '<0.1%')
    """
    if 0 < value < 0.0005 and beside is None:
        return "<0.1%"
    if 0.9995 < value < 1 and beside is None:
        return ">99.9%"
    text = _distinct(100 * value, None if beside is None else 100 * beside, 1)
    return (text.rstrip("0").rstrip(".") if "." in text else text) + "%"


def number(value: float, beside: float | None = None) -> str:
    """Write a score from 0 to 1 with two digits, or as many as it takes to tell it from `beside`.

    >>> number(0.5), number(0.501, beside=0.5)
    ('0.50', '0.501')
    """
    return _distinct(value, beside, 2)


def _distinct(value: float, beside: float | None, digits: int) -> str:
    while beside is not None and value != beside and digits < 6 and round(value, digits) == round(beside, digits):
        digits += 1
    return f"{value:.{digits}f}"


# ---------------------------------------------------------------------------------------------------------- the evidence


@dataclass(frozen=True)
class _Evidence:
    """What the attempts in a rule's scope say, step by step."""

    values: dict[str, float]
    """Step -> 1.0 or 0.0 for an event (leaked or not), the worst attack's score for a metric."""
    worst: Worst | None
    attacks: tuple[str, ...]
    censored: int
    finished: int
    """Attempts that ran, in time or not."""
    lost: int
    due: int
    left_out: int
    silent: int
    """Unverifiable steps that prove nothing."""
    bounding: int
    """Steps among `values` that are verified; the others count because something came back from them."""
    problem: str
    """Why there is no evidence at all, where there is none."""
    repeated: int = 0
    """Steps whose update is that of another step: both are one piece of evidence."""
    fates: Mapping[str, int] = field(default_factory=dict)
    """What became of the texts that the event could be about; see `_fates`."""


def _gather(results: Results, rule: Rule, defense: str) -> _Evidence:
    """Collect the evidence for `rule` under `defense` (a column of the battery)."""
    everywhere = results.attempts
    known = list(dict.fromkeys([*results.run.battery.attacks, *(a.attack for a in everywhere)]))
    wanted = rule.scope.attacks or tuple(known)
    able = {a.attack for a in everywhere if _could_show(a, rule)}
    unable = {a.attack for a in everywhere if a.status is AttemptStatus.RAN} - able
    asked = [name for name in wanted if name not in unable]

    first = _first_of_its_kind(results.steps)
    by_step: dict[str, list[Attempt]] = {name: [] for name in first.values()}
    for attempt in everywhere:
        if attempt.defense == defense and attempt.attack in asked:
            by_step[first[attempt.step]].append(attempt)
    values: dict[str, float] = {}
    worst: tuple[tuple[float, float, float], Worst] | None = None
    censored = finished = lost = due = left_out = silent = bounding = 0
    attacks: set[str] = set()
    at_risk = _steps_at_risk(results, rule)
    for step in (step for step in results.steps if step.id in by_step):
        attempts = by_step[step.id]
        broken = bool(attempts) and all(a.status in (AttemptStatus.ERROR, AttemptStatus.SKIPPED) for a in attempts)
        if _usable(step) and not step.verification.status.bounds and not broken:  # a broken one is lost, not silent
            attempts = [a for a in attempts if _could_show(a, rule) and _proves(a, rule)]
            if not attempts:
                silent += 1
                continue
        else:
            due += len(asked)
            lost += sum(_lost([a for a in attempts if a.attack == name], step, rule, able) for name in asked)
        if not _usable(step):
            continue
        evidence = [a for a in attempts if _is_evidence(a, rule, able)]
        if evidence and step.id not in at_risk:
            left_out += 1
            continue
        bounding += bool(evidence) and step.verification.status.bounds
        for attempt in evidence:
            value = _value(attempt, rule)
            finished += 1
            censored += attempt.status is AttemptStatus.BUDGET_EXHAUSTED and value == 0
            attacks.add(attempt.attack)
            values[step.id] = max(values.get(step.id, 0.0), value)
            longest = max((s.scores.get("longest_run", 0.0) for s in attempt.sequences), default=0.0)
            rank = (value, longest, -attempt.wall_s)
            if value > 0 and (worst is None or rank > worst[0]):
                shown = value if rule.metric else None
                worst = (rank, Worst(step=attempt.step, attack=attempt.attack, wall_s=attempt.wall_s, value=shown))
    return _Evidence(
        values=values,
        worst=worst[1] if worst else None,
        attacks=tuple(name for name in known if name in attacks),
        censored=censored,
        finished=finished,
        lost=lost,
        due=due,
        left_out=left_out,
        silent=silent,
        bounding=bounding,
        problem="" if values else _why_nothing(results, rule, defense, wanted, known, left_out, silent),
        repeated=len(results.steps) - len(by_step),
        fates=_fates([a for step in by_step if step in values for a in by_step[step]], rule),
    )


def _first_of_its_kind(steps: Iterable[StepRecord]) -> dict[str, str]:
    """Map each step to the first one with the same update.

    The same evidence under two names is one piece of evidence.
    """
    names: dict[tuple[str, str, int, int | None], str] = {}
    return {
        s.id: names.setdefault((s.snapshot, s.verification.status, s.n_sequences, s.n_sentences), s.id) for s in steps
    }


def _fates(attempts: Iterable[Attempt], rule: Rule) -> dict[str, int]:
    """Count texts by what became of them under the attack that got furthest.

    `unknown` are those that did not come back, and of which no attack can tell whether they were in reach.
    """
    order = ("unknown", "out of reach", "search gave up", "recovered")
    best: dict[tuple[str, str], int] = {}
    for attempt in attempts:
        for sequence in attempt.sequences:
            if sequence.exact is None or (rule.event in _ABOUT_SENTENCES and not sequence.long_enough):
                continue
            key = (attempt.step, sequence.id)
            best[key] = max(best.get(key, 0), order.index(sequence.fate or "unknown"))
    return {name: sum(rank == i for rank in best.values()) for i, name in enumerate(order)}


def _could_show(attempt: Attempt, rule: Rule) -> bool:
    """Whether this attempt would have shown the rule's event or score, had it been there.

    A bag of words cannot show that a sentence came back in order, and an attack on text says nothing of labels:
    counting them would turn attacks of another kind into clean steps.
    """
    if not attempt.finished:
        return False
    if rule.metric is not None:
        return isinstance(attempt.scores.get(rule.metric), Score)
    if rule.event in attempt.events:
        return True
    if rule.event == "label_counts":
        return isinstance(attempt.scores.get("label_accuracy"), Score)
    if rule.event == "all_words":
        return isinstance(attempt.scores.get("token_recall"), Score)
    return any(_tells(sequence, rule.event) for sequence in attempt.sequences)


def _tells(sequence: SequenceScore, event: str | None) -> bool:
    """Whether what is known of a sequence decides an event on sequences."""
    if event == "in_reach":
        return sequence.fate is not None
    if event == "most_words":  # where less than half came back, or nothing was guessed, precision decides nothing
        recall = sequence.token_recall
        return recall is not None and (sequence.token_precision is not None or recall < LEAST_SHARE)
    return sequence.exact is not None


def _is_evidence(attempt: Attempt, rule: Rule, able: set[str]) -> bool:
    """Whether `attempt` counts: it could show the event, or ran out of time in an attack that elsewhere could."""
    if _could_show(attempt, rule):
        return True
    out_of_time = attempt.status is AttemptStatus.BUDGET_EXHAUSTED
    return out_of_time and rule.event is not None and attempt.attack in able


def _proves(attempt: Attempt, rule: Rule) -> bool:
    """Say whether what came back proves something by itself.

    An event does, and so does a score above the limit on the largest one.

    Means and percentiles need the steps that did not leak as well, so one score proves nothing of them.
    """
    if rule.metric is None:
        return _value(attempt, rule) > 0
    return rule.statistic == "max" and _value(attempt, rule) > rule.threshold


def _value(attempt: Attempt, rule: Rule) -> float:
    if rule.event == "in_reach":
        return float(any(s.long_enough and s.fate in ("recovered", "search gave up") for s in attempt.sequences))
    if rule.metric is None:
        return float(rule.event in attempt.events)
    score = attempt.scores.get(rule.metric)
    return score.value if isinstance(score, Score) else 0.0


def _steps_at_risk(results: Results, rule: Rule) -> set[str]:
    """Return the steps that the event could be about.

    For an event on sentences, these are the steps with a text that is long enough.

    A step of short texts has nothing to lose, so counting it as clean would dilute the rate.
    """
    everything = {step.id for step in results.steps}
    if rule.event not in _ABOUT_SENTENCES:
        return everything
    short: dict[str, bool] = {}
    for attempt in results.attempts:
        if attempt.sequences or attempt.events:
            long_one = "exact_sentence" in attempt.events or any(s.long_enough for s in attempt.sequences)
            short[attempt.step] = short.get(attempt.step, True) and not long_one
    return {step for step in everything if not short.get(step, False)}


def _lost(attempts: Sequence[Attempt], step: StepRecord, rule: Rule, able: set[str]) -> bool:
    """Whether one attack gave nothing usable on one step, though it was due."""
    return not _usable(step) or all(
        a.status in (AttemptStatus.ERROR, AttemptStatus.SKIPPED)
        or (a.status is AttemptStatus.BUDGET_EXHAUSTED and not _is_evidence(a, rule, able))
        for a in attempts
    )


def _usable(step: StepRecord) -> bool:
    return step.verification.status.attacked


def _why_nothing(
    results: Results, rule: Rule, defense: str, wanted: Sequence[str], known: Sequence[str], left_out: int, silent: int
) -> str:
    unknown = [name for name in wanted if name not in known]
    attempts = [a for a in results.attempts if a.defense == defense and a.attack in wanted]
    metrics = sorted({name for a in results.attempts for name in a.scores})
    if not results.steps:
        return "no client step was audited"
    if not any(_usable(step) for step in results.steps):
        return "no update comes from the batch that was kept with it"
    if unknown and len(unknown) == len(wanted):
        return f"attack {unknown[0]!r} is not in this battery{_near(unknown[0], known)}"
    if rule.metric is not None and rule.metric not in metrics:
        return f"nothing was scored by {rule.metric!r}{_near(rule.metric, metrics)}"
    if not attempts:
        columns = sorted({a.defense for a in results.attempts})
        return f"defence {defense!r} was not tested{_near(defense, columns)}"
    if silent:
        return f"{counted(silent, 'step')} cannot be verified, and nothing of the kind came back from {'it' if silent == 1 else 'them'}"
    if rule.event == "in_reach" and attempts and not left_out:
        return "no attack that finished can tell what was in reach of its search"
    if left_out:
        return f"no audited step holds a sentence of {results.min_tokens}+ tokens"
    states: dict[str, int] = {}
    for attempt in attempts:
        ran = attempt.status is AttemptStatus.RAN
        word = "ran but of another kind" if ran else attempt.status.value.replace("_", " ")
        states[word] = states.get(word, 0) + 1
    return "no attack that could show it finished (" + ", ".join(f"{n} {word}" for word, n in states.items()) + ")"


def _near(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f" ({', '.join(known) or 'none'})"


# ------------------------------------------------------------------------------------------------------------- the rules


def _judge_rules(
    results: Results, policy: Policy, shipped_as: str, gaps: Sequence[str], broken: str | None
) -> list[RuleVerdict]:
    """Judge every rule; `shipped_as` is the defence that rules on `shipped` are judged for."""
    return [
        _judge(results, policy, rule, shipped_as if rule.scope.defense == SHIPPED else rule.scope.defense, gaps, broken)
        for rule in policy.rules
    ]


def _judge(
    results: Results, policy: Policy, rule: Rule, defense: str, gaps: Sequence[str], broken: str | None
) -> RuleVerdict:
    evidence = _gather(results, rule, _OBSERVED if defense == SHIPPED else defense)
    confidence = policy.statistics.confidence
    if rule.metric is None:
        outcome = _judge_event(rule, list(evidence.values.values()), confidence, evidence.silent)
    else:
        outcome = _judge_metric(rule, list(evidence.values.values()), confidence)
    unmet = [*_shortfalls(evidence, policy), *gaps] if evidence.values else list(gaps)
    status = outcome.status
    if broken is not None or (status is Status.PASS and unmet):
        status = Status.INCONCLUSIVE
    reasons = unmet if status is Status.INCONCLUSIVE else []
    if broken is not None:
        reasons = [broken, *(gap for gap in reasons if gap != broken)]
    where = _where(results, defense)
    said = _sentence(results, rule, outcome, evidence, confidence, where, status)
    return RuleVerdict(
        id=rule.id,
        severity=rule.severity,
        level=rule.level,
        status=status,
        kind="max_rate" if rule.max_rate is not None else "max_count" if rule.max_count is not None else "max_value",
        subject=rule.event or f"{rule.statistic} {rule.metric}",
        defense=defense,
        attacks=evidence.attacks,
        k=outcome.k,
        n=outcome.n,
        observed=outcome.observed,
        lower=outcome.lower,
        upper=outcome.upper,
        threshold=rule.threshold,
        margin=None if outcome.compared is None else rule.threshold - outcome.compared,
        more_clean_steps=outcome.more if status is Status.INCONCLUSIVE else None,
        confidence=confidence,
        method=outcome.method,
        censored=evidence.censored,
        lost=evidence.lost,
        due=evidence.due,
        left_out=evidence.left_out,
        silent=evidence.silent,
        reasons=tuple(reasons),
        sentence=" ".join(said),
        worst=evidence.worst,
    )


@dataclass(frozen=True)
class _Outcome:
    """A rule's numbers, before evidence floor and controls."""

    status: Status
    n: int
    k: int | None = None
    observed: float | None = None
    lower: float | None = None
    upper: float | None = None
    compared: float | None = None
    """What must stay at or below the threshold to pass."""
    more: int | None = None
    method: str = ""


def _judge_event(rule: Rule, leaked: Sequence[float], confidence: float, silent: int = 0) -> _Outcome:
    """Judge a rule on an event.

    Silent steps count against a FAIL only: they may be clean, and nothing shows that they are.
    """
    n, k = len(leaked), sum(value > 0 for value in leaked)
    if n == 0:
        return _Outcome(Status.INCONCLUSIVE, n=0, k=0)
    lower, upper = stats.lower_bound(k, n + silent, confidence), stats.upper_bound(k, n, confidence)
    method = "Clopper-Pearson, one-sided"
    if rule.max_rate is None:
        status = Status.FAIL if k > rule.threshold else Status.PASS
        return _Outcome(status, n, k, float(k), lower, upper, compared=float(k), method=method)
    if upper <= rule.max_rate:
        status = Status.PASS
    else:
        status = Status.FAIL if lower > rule.max_rate else Status.INCONCLUSIVE
    more = stats.more_clean_steps(k, n, rule.max_rate, confidence) if status is Status.INCONCLUSIVE else None
    return _Outcome(status, n, k, k / n, lower, upper, compared=upper, more=more, method=method)


def _judge_metric(rule: Rule, values: Sequence[float], confidence: float) -> _Outcome:
    n = len(values)
    if n == 0:
        return _Outcome(Status.INCONCLUSIVE, n=0)
    if rule.statistic == "max":
        most = max(values)
        status = Status.FAIL if most > rule.threshold else Status.PASS
        return _Outcome(status, n, observed=most, compared=most, method="the largest value seen")
    if rule.statistic == "mean":
        observed, bounds = sum(values) / n, stats.mean_bounds(values, confidence)
    else:
        observed, bounds = stats.percentile(values), stats.quantile_bounds(values, 0.95, confidence)
    if bounds is None:
        missing = f"no bounds below {stats.MIN_STEPS_FOR_BOOTSTRAP} steps"
        return _Outcome(Status.INCONCLUSIVE, n, observed=observed, method=missing)
    status = Status.INCONCLUSIVE
    if bounds.upper is not None and bounds.upper <= rule.threshold:
        status = Status.PASS
    elif bounds.lower is not None and bounds.lower > rule.threshold:
        status = Status.FAIL
    return _Outcome(status, n, None, observed, bounds.lower, bounds.upper, compared=bounds.upper, method=bounds.method)


def _shortfalls(evidence: _Evidence, policy: Policy) -> list[str]:
    """Say where a rule's evidence stays below the policy's floor."""
    floor, found = policy.evidence, []
    n = evidence.bounding
    if n < floor.min_steps:
        found.append(f"The policy asks for {floor.min_steps} steps of evidence; there {_are(n)}.")
        if evidence.repeated:
            repeat = "step repeats" if evidence.repeated == 1 else "steps repeat"
            found.append(f"{evidence.repeated} {repeat} the update of another step and did not count again.")
    if evidence.due and evidence.lost / evidence.due > floor.max_error_share:
        share = percent(evidence.lost / evidence.due, floor.max_error_share)
        found.append(
            f"{evidence.lost} of {counted(evidence.due, 'attempt')} ({share}) crashed, were skipped or had no usable update; "
            f"the policy allows {percent(floor.max_error_share)}."
        )
    if evidence.finished and evidence.censored / evidence.finished > floor.max_censored:
        share = percent(evidence.censored / evidence.finished, floor.max_censored)
        found.append(
            f"{evidence.censored} of {counted(evidence.finished, 'attempt')} ({share}) ran out of time; "
            f"the policy allows {percent(floor.max_censored)}."
        )
    return found


_EVENT_WORDS = {
    "exact_sentence": (
        "at least one sentence of {tokens}+ tokens was recovered exactly",
        "was a sentence of {tokens}+ tokens recovered exactly",
        "no sentence of {tokens}+ tokens was recovered exactly",
    ),
    "exact_sequence": (
        "at least one whole text was recovered exactly",
        "was a whole text recovered exactly",
        "no whole text was recovered exactly",
    ),
    "all_words": (
        "every word of the batch was named",
        "was every word of the batch named",
        "not every word of the batch was named",
    ),
    "most_words": (
        "at least half of the words of a text of {tokens}+ tokens came back",
        "did half of the words of a text of {tokens}+ tokens come back",
        "less than half of the words of each text of {tokens}+ tokens came back",
    ),
    "in_reach": (
        "a text of {tokens}+ tokens was in reach of an attack",
        "was a text of {tokens}+ tokens in reach of an attack",
        "no text of {tokens}+ tokens was in reach of an attack",
    ),
    "label_counts": (
        "the label counts were recovered exactly",
        "were the label counts recovered exactly",
        "the label counts were not recovered exactly",
    ),
}
"""Event -> what happened, the same after "in none of the steps", and what did not happen in the only step."""
_ABOUT_SENTENCES = ("exact_sentence", "most_words", "in_reach")
"""Events that only texts of at least `min_tokens` tokens can have."""
_METRIC_WORDS = {
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "token_recall": "token recall",
    "token_precision": "token precision",
    "masked_token_recall": "recall of masked words",
    "label_accuracy": "label accuracy",
    "exact": "exact-match rate",
}


def _sentence(
    results: Results,
    rule: Rule,
    outcome: _Outcome,
    evidence: _Evidence,
    confidence: float,
    where: str,
    status: Status,
) -> list[str]:
    """Say what was seen and what the policy allows, in sentences made of numbers."""
    sure = percent(confidence)
    if outcome.n == 0:
        return [f"There is no evidence {where}: {_ended(evidence.problem)} Not tested is not a pass."]
    if rule.metric is not None:
        return _metric_sentence(rule, outcome, sure, where, status)
    seen, unseen, none_seen = (words.format(tokens=results.min_tokens) for words in _EVENT_WORDS[rule.event or ""])
    k, n, limit = outcome.k or 0, outcome.n, rule.max_rate
    low, high = percent(outcome.lower or 0.0, limit), percent(outcome.upper or 0.0, limit)
    if n == 1 and k == 0:
        observed = f"1 client step audited: {none_seen} {where}. The rate may be anything up to {sure}."
    elif n == 1:
        observed = f"In the one audited client step {seen} {where}."
    elif k == 0:
        observed = f"In none of {n} audited client steps {unseen} {where}; {sure} upper bound {high}."
    else:
        bounds = {
            Status.FAIL: f"{sure} lower bound {low}",
            Status.PASS: f"{sure} upper bound {high}",
        }.get(status, f"{sure} bounds {low} to {high}")
        observed = f"In {k} of {n} audited client steps ({percent(k / n)}, {bounds}) {seen} {where}."
    allowed = percent(limit) if limit is not None else (f"{rule.max_count}" if rule.max_count else "none")
    said = [observed, f"Policy allows {allowed}."]
    if evidence.left_out:
        said.insert(1, f"Not counted: {counted(evidence.left_out, 'step')} without a sentence that long.")
    if evidence.silent:
        said.insert(
            1, f"Not counted: {counted(evidence.silent, 'unverifiable step')} from which nothing of the kind came back."
        )
    if status is Status.INCONCLUSIVE and outcome.more:
        said.append(f"{outcome.more} more clean steps would decide.")
    if status is not Status.FAIL and rule.event in ("exact_sentence", "exact_sequence"):
        said += _reach_sentence(evidence.fates)
    return said


def _reach_sentence(fates: Mapping[str, int]) -> list[str]:
    """Say whether these attacks could have found what did not come back.

    The answer is empty where no attack can tell.
    """
    gave_up, out = fates.get("search gave up", 0), fates.get("out of reach", 0)
    missed = gave_up + out + fates.get("unknown", 0)
    if gave_up:
        verb = "was" if gave_up == 1 else "were"
        which = f"{gave_up} of the {missed} texts" if missed > 1 else "The text"
        return [
            f"{which} that did not come back {verb} in reach of an attack whose search gave up: that is no protection."
        ]
    if 0 < out < missed:
        return [
            f"{out} of the {missed} texts that did not come back cannot be found by these attacks; another may find them."
        ]
    if out:
        return ["What did not come back cannot be found by these attacks; another attack may find it."]
    return []


def _also_came_back(results: Results, deciding: RuleVerdict) -> list[str]:
    """Say what came back where the deciding rule saw nothing."""
    if deciding.defense != SHIPPED or deciding.k:
        return []
    found = in_words(recovered(results))
    return [f"But {found} came back."] if found else []


def _metric_sentence(rule: Rule, outcome: _Outcome, sure: str, where: str, status: Status) -> list[str]:
    metric = _METRIC_WORDS.get(rule.metric or "", rule.metric or "")
    name = {"mean": f"mean {metric}", "p95": f"95th percentile of {metric}", "max": f"highest {metric}"}
    steps = "the one audited client step" if outcome.n == 1 else f"{outcome.n} audited client steps"
    limit = rule.threshold
    bound = ""
    if status is Status.FAIL and outcome.lower is not None:
        bound = f", {sure} lower bound {number(outcome.lower, limit)}"
    elif outcome.upper is not None:
        bound = f", {sure} upper bound {number(outcome.upper, limit)}"
    observed = number(outcome.observed or 0.0, limit)
    said = [f"The {name[rule.statistic or 'max']} of {steps} is {observed}{bound}, {where}."]
    said.append(f"Policy allows {number(limit)}.")
    if status is Status.INCONCLUSIVE and outcome.upper is None and rule.statistic != "max":
        needed = 59 if rule.statistic == "p95" else stats.MIN_STEPS_FOR_BOOTSTRAP
        said.append(f"An upper bound needs {needed} steps or more.")
    return said


def _where(results: Results, defense: str) -> str:
    if defense != SHIPPED:
        return f"under the defence {defense}" if defense != _OBSERVED else "with no defence added"
    shipped = sorted({step.shipped_defense for step in results.steps})
    if shipped in ([], [_OBSERVED]):
        return "from the updates you ship (no defence)"
    return f"under the defence you ship ({', '.join(shipped)})"


# ------------------------------------------------------------------------------------------------ controls, age, overall


def _judge_controls(results: Results, policy: Policy) -> tuple[ControlVerdict, ...]:
    confidence = policy.statistics.confidence
    return (
        _judge_positive(results.controls.positive, policy.controls.positive, confidence),
        _judge_negative(results.controls.negative, policy.controls.negative, confidence),
    )


def _judge_positive(control: Control, asked: PositiveControl, confidence: float) -> ControlVerdict:
    k, n = control.k, control.n
    state: Literal["ok", "not run", "failed"] = "ok"
    if n < asked.steps:
        state = "not run"
        said = f"The positive control ran on {counted(n, 'step')}; the policy asks for {asked.steps}."
    elif n == 0:
        said = "No positive control was run, and the policy asks for none."
    else:
        # with few control steps even full marks cannot reach the bound: there the plain share is all there is
        bounded = stats.lower_bound(n, n, confidence) >= asked.rate_lower
        reached = stats.lower_bound(k, n, confidence) if bounded else k / n
        state = "ok" if reached >= asked.rate_lower else "failed"
        what = f"{percent(confidence)} lower bound {percent(reached, asked.rate_lower)}" if bounded else "plain share"
        said = f"The positive control was recovered in {k} of {n} control steps ({what})"
        blind = f"; the policy asks for {percent(asked.rate_lower)}, so this audit may be blind."
        said += "." if state == "ok" else blind
    return ControlVerdict(name="positive", state=state, k=k, n=n, sentence=said)


def _judge_negative(control: Control, asked: NegativeControl, confidence: float) -> ControlVerdict:
    k, n = control.k, control.n
    state: Literal["ok", "not run", "failed", "unproven"] = "ok"
    if n and k / n > asked.rate_upper:
        state = "failed"
        said = f"The negative control leaked in {k} of {n} control steps: the scores of this audit cannot be believed."
    elif n < asked.steps:
        state = "not run"
        said = f"The negative control ran on {counted(n, 'step')}; the policy asks for {asked.steps}."
    elif n == 0:
        said = "No negative control was run, and the policy asks for none."
    else:
        bounded = stats.upper_bound(0, n, confidence) <= asked.rate_upper
        upper = stats.upper_bound(k, n, confidence)
        state = "unproven" if bounded and upper > asked.rate_upper else "ok"
        bound = f"{percent(confidence)} upper bound {percent(upper, asked.rate_upper)}"
        said = f"The negative control leaked in {k} of {n} control steps ({bound if bounded else 'plain share'})"
        said += "." if state == "ok" else f"; the policy allows {percent(asked.rate_upper)}."
    return ControlVerdict(name="negative", state=state, k=k, n=n, sentence=said)


def _judge_age(results: Results, policy: Policy, now: datetime) -> tuple[timedelta | None, str]:
    """Return the age of the evidence, and what is wrong with it."""
    finished = moment(results.run.finished)
    if finished is None:
        return None, "The results do not say when the audit finished, so their age is unknown."
    age = now - finished
    started = moment(results.run.started)
    if started is not None and finished < started - CLOCK_SLACK:  # no contradiction: a clock may be set back meanwhile
        return age, "By its own clock the audit finished before it started, so its age is unknown."
    if age > _duration(policy.evidence.max_age):
        old = f"{age.total_seconds() / 86400:.1f} days"
        return age, f"The evidence is {old} old; the policy allows {policy.evidence.max_age}."
    return age, ""


def _overall(rules: Sequence[RuleVerdict]) -> tuple[Status, RuleVerdict]:
    """Return the verdict and the rule that decides it: the worst at level error, then the most severe."""
    deciding = min((rule for rule in rules if rule.level == "error"), key=_order)
    return deciding.status, deciding


def _order(rule: RuleVerdict) -> tuple[int, int, int]:
    """Return the key by which rules are sorted.

    Rules that decide come before warnings, then the worst status, then severity; equal ones keep the policy's order.
    """
    return rule.level != "error", -_BADNESS[rule.status], _SEVERITY[rule.severity]


def _alternatives(results: Results, policy: Policy, gaps: Sequence[str], broken: str | None) -> Iterable[Alternative]:
    """Judge the policy as if each other defence of the battery were shipped."""
    if not any(rule.scope.defense == SHIPPED and rule.level == "error" for rule in policy.rules):
        return
    for defense in dict.fromkeys(a.defense for a in results.attempts):
        if defense == _OBSERVED:
            continue
        rules = _judge_rules(results, policy, defense, gaps, broken)
        still_open = tuple(r.id for r in rules if r.level == "error" and r.status is not Status.PASS)
        naive = not any(a.adaptive for a in results.attempts if a.defense == defense)
        figures = tuple(
            Figures.model_validate({name: getattr(r, name) for name in Figures.model_fields}) for r in rules
        )
        overall = _overall(rules)[0]
        yield Alternative(defense=defense, status=overall, open_rules=still_open, naive=naive, rules=figures)


def _from_the_future(results: Results, now: datetime) -> Iterable[str]:
    finished = moment(results.run.finished)
    if finished is not None and finished - now > CLOCK_SLACK:
        yield "the results are dated in the future"


def _absent(results: Results) -> list[str]:
    """Say how many steps lack attempts that were due.

    Steps that an interruption or a refused snapshot explains are left out.
    """
    lacking = unexplained_steps(results)
    if not lacking:
        return []
    verb = "lacks" if lacking == 1 else "lack"
    return [f"{counted(lacking, 'step')} {verb} attempts that were due, and nothing in the results explains it."]


def _error(
    policy: Policy,
    now: datetime,
    problems: Sequence[str],
    results: Results | None,
    *,
    run: str = "",
    results_sha256: str | None = None,
) -> Verdict:
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    return Verdict(
        verdict=Status.ERROR,
        exit_code=EXIT_CODES[Status.ERROR],
        sentence=_ended(f"The evidence cannot be judged: {problems[0]}{more}"),
        deciding_rule=None,
        run=run if results is None else results.run.id,
        policy=policy.name,
        policy_owner=policy.owner,
        policy_digest=policy.digest,
        results_sha256=results_sha256,
        results_digest=None if results is None else results.digest,
        evaluated_at=_stamp(now),
        evidence_age_s=None,
        valid_until=None,
        steps=0,
        unverified_steps=0,
        rules=(),
        controls=(),
        alternatives=(),
        problems=tuple(problems),
    )


def _duration(age: str) -> timedelta:
    found = _AGE.fullmatch(age)
    assert found is not None  # the policy was validated
    return int(found[1]) * _AGE_UNITS[found[2]]


def _stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _ended(sentence: str) -> str:
    """End a sentence with a full stop where it has no end of its own."""
    return sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."


def _are(n: int) -> str:
    return "is 1" if n == 1 else f"are {n}"
