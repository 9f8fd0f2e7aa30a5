"""The evidence for a rule: what the attempts in its scope show at each step.

It has more lines than other modules, because gate and report count steps by it alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

from leakaudit.gate.events import EVENTS
from leakaudit.gate.policy import SHIPPED, Rule
from leakaudit.gate.verdict import Worst
from leakaudit.results.as_sent import seen_under, shipped_column
from leakaudit.results.lengths import bounds_of
from leakaudit.results.schema import Attempt, AttemptStatus, Kind, Results, Score, SequenceScore, StepRecord
from leakaudit.results.wording import counted

REACH = ("unknown", "out of reach", "search gave up", "recovered")
"""What an attack says about a text, in rising order. `unknown`: the text was not recovered, and the attack cannot tell why."""

_RANKS: dict[str | None, int] = {None: 0, **{name: rank for rank, name in enumerate(REACH)}}
"""What `SequenceScore.outcome` is -> its place in `REACH`."""

_WITHOUT_RESULT = (AttemptStatus.ERROR, AttemptStatus.SKIPPED, AttemptStatus.NOT_NEEDED)
"""How attempts end that were due and say nothing. One that was not needed is not due if the rule also asks the attack that recovered the texts."""


OUT_OF_TIME = "out of time"
"""Why a step is not judged on which every attack that could tell ran out of time."""

_WITHOUT_EVIDENCE = {
    AttemptStatus.RAN: "no attack that finished can tell",
    AttemptStatus.BUDGET_EXHAUSTED: OUT_OF_TIME,
    AttemptStatus.ERROR: "crashed",
    AttemptStatus.SKIPPED: "skipped",
    AttemptStatus.NOT_NEEDED: "not needed by another attack",
    AttemptStatus.NOT_APPLICABLE: "no attack applies",
}
"""How attempts ended on a step about which none of them says anything. The first that occurs is the reason."""


@dataclass(frozen=True)
class Evidence:
    """What the attempts in a rule's scope show at each step."""

    values: dict[str, float]
    """Step -> 1.0 (leaked) or 0.0 for a rule on an event, or the highest score of any attack for a rule on a metric."""
    worst: Worst | None
    attacks: tuple[str, ...]
    censored: int
    """Attempts that ran out of time without an event, or without a score above the limit."""
    finished: int
    """Attempts that are evidence, whether they ran to their end or ran out of time."""
    lost: int
    """Attempts that were due and gave no usable result."""
    due: int
    """Attempts that were due."""
    left_out: int
    """Steps whose texts are all too short to have the event."""
    silent: int
    """Steps among the unjudged ones that are unverifiable, or of which words that the rule asks for were not kept."""
    bounding_steps: AbstractSet[str]
    """Steps among `values` that are verified. The others count because something was recovered from them."""
    problem: str
    """Why there is no evidence; empty if there is some."""
    repeated: int = 0
    """Steps that repeat the update of another step; the two are one piece of evidence."""
    beyond: int = 0
    """Steps among `values` without a leak that have as many tokens as the hidden size or more, where `limited` attacks prove nothing."""
    limited: tuple[str, ...] = ()
    """Attacks of the rule that end where a step has as many tokens as the hidden size."""
    reach: Mapping[str, int] = field(default_factory=dict)
    """Number of texts that can have the event, by the highest entry of `REACH` that any attack reports for them. Empty if the rule's sentences do
    not say it (`Event.tells_reach`)."""
    unjudged_steps: Mapping[str, str] = field(default_factory=dict)
    """Steps that could have the event, were attacked and could not be judged -> why, in words."""
    least: Mapping[str, float] = field(default_factory=dict)
    """Verified steps among them -> the score that an attack had reached, for a rule on a metric. More time or a better attack may reach more."""

    texts: int = 0
    """True texts in `bounding_steps` that are long enough for the rule."""

    @property
    def bounding(self) -> int:
        """Number of `bounding_steps`."""
        return len(self.bounding_steps)

    @property
    def unjudged(self) -> int:
        """Steps that could have the event and that no attack could judge."""
        return len(self.unjudged_steps)


class Index:
    """The attempts of an audit, grouped once for all rules and defences."""

    def __init__(self, results: Results) -> None:
        """Group the attempts of `results`."""
        self.attempts = results.attempts
        self.known = list(dict.fromkeys([*results.run.battery.attacks, *(a.attack for a in results.attempts)]))
        self.of_defense: dict[str, list[Attempt]] = {}
        for attempt in results.attempts:
            self.of_defense.setdefault(attempt.defense, []).append(attempt)
        self._able: dict[str, frozenset[str]] = {}
        self._short: dict[tuple[bool, int | None], frozenset[str]] = {}
        self._texts: dict[tuple[bool, int | None], dict[str, int]] = {}
        self._by_step: dict[tuple[str, tuple[str, ...]], dict[str, list[Attempt]]] = {}
        self._ran: dict[str, frozenset[str]] = {}
        self._recovered: dict[tuple[str, tuple[str, ...]], frozenset[str]] = {}
        self._reach: dict[Hashable, dict[str, int]] = {}
        self._whole: dict[tuple[str, tuple[str, ...]], frozenset[str]] = {}

    def by_step(
        self, steps: Iterable[StepRecord], defense: str, attacks: tuple[str, ...]
    ) -> Mapping[str, Sequence[Attempt]]:
        """Return step -> its attempts by some attacks.

        Steps with the same update are one step.
        """
        about = defense, attacks
        if about not in self._by_step:
            first = _first_of_its_kind(steps)
            found: dict[str, list[Attempt]] = {name: [] for name in first.values()}
            asked = {*attacks}
            for attempt in self.of_defense.get(defense, ()):
                if attempt.attack in asked:
                    found[first[attempt.step]].append(attempt)
            self._by_step[about] = found
        return self._by_step[about]

    def ran(self, defense: str) -> frozenset[str]:
        """Return the attacks that ran to their end under a defence on at least one step."""
        if defense not in self._ran:
            mine = self.of_defense.get(defense, ())
            self._ran[defense] = frozenset(a.attack for a in mine if a.status is AttemptStatus.RAN)
        return self._ran[defense]

    def recovered(self, defense: str, attacks: tuple[str, ...]) -> frozenset[str]:
        """Return the steps of which one of some attacks recovered every text."""
        about = defense, attacks
        if about not in self._recovered:
            wanted, mine = {*attacks}, self.of_defense.get(defense, ())
            self._recovered[about] = frozenset(a.step for a in mine if a.attack in wanted and a.recovers_every_text)
        return self._recovered[about]

    def whole(self, steps: Iterable[StepRecord], defense: str, attacks: tuple[str, ...]) -> frozenset[str]:
        """Return the steps on which each of some attacks ran to its end once."""
        about = defense, attacks
        if about not in self._whole:
            by_step = self.by_step(steps, defense, attacks)
            names = [name for name, found in by_step.items() if len(found) == len(attacks)]
            self._whole[about] = frozenset(name for name in names if _all_ran(by_step[name]))
        return self._whole[about]

    def reach(self, rule: Rule, judged: Iterable[str], by_step: Mapping[str, Sequence[Attempt]]) -> dict[str, int]:
        """Count the texts of judged steps by the best that any attack says of them.

        What it says is an entry of `REACH`.

        Rules that count the same texts of the same attempts share the answer.
        """
        about = id(by_step), _about_long_texts(rule), rule.min_tokens, frozenset(judged)
        if about not in self._reach:
            self._reach[about] = _reach((a for name in about[-1] for a in by_step[name]), rule)
        return dict(self._reach[about])

    def able(self, rule: Rule) -> frozenset[str]:
        """Return the attacks that could show a rule's event or score on at least one step."""
        about = f"event {rule.event}" if rule.event is not None else f"metric {rule.metric}"
        if about not in self._able:
            self._able[about] = frozenset(self._attacks_that_show(rule))
        return self._able[about]

    def _attacks_that_show(self, rule: Rule) -> set[str]:
        if rule.event is None:
            return {a.attack for a in self.attempts if _has_score(rule, a)}
        asked = _DECIDED[rule.event]
        kinds = {(a.attack, bits) for a, bits in zip(self.attempts, self._shown.values(), strict=True)}
        return {attack for attack, bits in kinds if bits & asked}

    def showing(self, rule: Rule, attempts: Iterable[Attempt]) -> frozenset[int]:
        """Return the identities of the attempts that could show what a rule asks for."""
        if rule.event is None:
            return frozenset(id(a) for a in attempts if _has_score(rule, a))
        shown, asked = self._shown, _DECIDED[rule.event]
        return frozenset([key for key in map(id, attempts) if shown[key] & asked])

    def having(self, event: str, attempts: Iterable[Attempt]) -> list[Attempt]:
        """Return those of the attempts that had an event."""
        shown, asked = self._shown, _HAPPENED[event]
        return [a for a in attempts if shown[id(a)] & asked]

    @cached_property
    def _shown(self) -> dict[int, int]:
        """Identity of each attempt -> bits of `_HAPPENED` and `_DECIDED`."""
        few: dict[int, int] = {}  # so that equal numbers are one object
        codes = ((id(attempt), _bits(attempt)) for attempt in self.attempts)
        return {key: few.setdefault(code, code) for key, code in codes}

    def texts(self, rule: Rule) -> dict[str, int]:
        """Return the number of true texts of each step that are long enough for a rule."""
        about = _about_long_texts(rule), rule.min_tokens
        if about not in self._texts:
            found: dict[str, set[str]] = {}
            for attempt in self.attempts:
                names = found.setdefault(attempt.step, set())
                for sequence in attempt.sequences:
                    if sequence.id not in names and _counts(rule, sequence):
                        names.add(sequence.id)
            self._texts[about] = {step: len(names) for step, names in found.items()}
        return self._texts[about]

    def short(self, rule: Rule) -> frozenset[str]:
        """Return the steps whose texts are all too short for a rule.

        Steps without texts are not among them.
        """
        about = _about_long_texts(rule), rule.min_tokens
        if about not in self._short:
            texts, long_ones = set(), set()
            for attempt in self.attempts:
                if attempt.step in long_ones or not (attempt.sequences or attempt.events):
                    continue
                texts.add(attempt.step)
                if "exact_sentence" in attempt.events or any(_counts(rule, s) for s in attempt.sequences):
                    long_ones.add(attempt.step)
            self._short[about] = frozenset(texts - long_ones)
        return self._short[about]


def gather(
    results: Results,
    rule: Rule,
    defense: str,
    trusted: AbstractSet[str] | None = None,
    index: Index | None = None,
) -> Evidence:
    """Collect the evidence for a rule. Gate and report count by it.

    Args:
        results: the audit.
        rule: the rule.
        defense: a defence of the audit.
        trusted: attacks that have read a canary; None for all. A step on which only other attacks found nothing is not judged. If none of the
            attacks behind the rule is trusted, they all count, and the caller says so. A step on which no attack ran to its end and nothing came
            back is not judged either.
        index: the attempts of `results`; None to group them here.
    """
    index = index or Index(results)
    results = seen_under(results, defense)
    scope = _RuleScope(results, rule, defense, index)
    tried = {step.id: scope.of_step(step) for step in results.steps if step.id in scope.by_step}
    made = [attempt for found in tried.values() for attempt in found.attempts]
    attacks = {attempt.attack for attempt in made}
    readers = (attacks if trusted is None else trusted & attacks) or attacks
    steps = {name: scope.judged(found, readers) for name, found in tried.items()}
    attempts = [attempt for found in steps.values() for attempt in found.attempts]
    out_of_time = AttemptStatus.BUDGET_EXHAUSTED
    values = {name: scope.highest(found.attempts) for name, found in steps.items() if found.attempts}
    left_out, silent = sum(found.left_out for found in steps.values()), sum(found.silent for found in steps.values())
    unjudged = {name: found.unjudged for name, found in steps.items() if found.unjudged}
    bounding = frozenset(name for name, found in steps.items() if found.bounding)
    return Evidence(
        values=values,
        worst=_worst(attempts, scope),
        attacks=tuple(name for name in scope.known if name in attacks),
        censored=len([a for a in made if a.status is out_of_time and not scope.settles(a)]),
        finished=len(made),
        lost=sum(found.lost for found in steps.values()),
        due=sum(found.due for found in steps.values()),
        left_out=left_out,
        silent=silent,
        bounding_steps=bounding,
        texts=scope.texts(bounding),
        problem="" if values else _why_nothing(scope, left_out, silent, {*unjudged.values()}),
        repeated=len(results.steps) - len(scope.by_step),
        beyond=sum(
            not any(a.leaked for a in found.attempts)
            for name, found in steps.items()
            if name in scope.beyond & values.keys()
        ),
        limited=tuple(name for name in scope.asked if name in scope.limited),
        reach=index.reach(rule, values, scope.by_step) if rule.event and EVENTS[rule.event].tells_reach else {},
        unjudged_steps=unjudged,
        least=scope.reached(unjudged) if rule.metric is not None else {},
    )


def gather_own(results: Results, rule: Rule, trusted: AbstractSet[str] | None = None) -> Evidence:
    """Collect the evidence for a rule under the defence that its scope names."""
    defense = rule.scope.defense
    return gather(results, rule, shipped_column(results) if defense == SHIPPED else defense, trusted)


def usable(step: StepRecord) -> bool:
    """Return whether a text that is recovered from a step counts."""
    return step.verification.status.attacked


@dataclass(frozen=True)
class _StepEvidence:
    """What one step contributes to the evidence."""

    attempts: tuple[Attempt, ...] = ()
    """Attempts that are evidence."""
    due: int = 0
    """Attempts that were due."""
    lost: int = 0
    """Attempts that were due and gave no usable result."""
    left_out: bool = False
    """Whether all texts of the step are too short to have the event."""
    silent: bool = False
    """Whether the step cannot be verified, or lacks words that the rule asks for, and proves nothing."""
    unjudged: str = ""
    """Why the step could not be judged; empty if it was, if it could not have the event, or if no attack was tried."""
    bounding: bool = False
    """Whether the step is verified and is evidence."""


@dataclass(frozen=True)
class _Asked:
    """The attempts that a rule looks at, and what each of them says."""

    results: Results
    rule: Rule
    defense: str
    index: Index

    @property
    def known(self) -> list[str]:
        """Attacks of the battery, then further attacks that attempts name."""
        return self.index.known

    @property
    def mine(self) -> Sequence[Attempt]:
        """The attempts under the defence."""
        return self.index.of_defense.get(self.defense, ())

    @cached_property
    def wanted(self) -> tuple[str, ...]:
        """Attacks that the rule names; all known ones if it names none."""
        return self.rule.scope.attacks or tuple(self.known)

    @property
    def able(self) -> frozenset[str]:
        """Attacks that could show the event on at least one step."""
        return self.index.able(self.rule)

    @cached_property
    def asked(self) -> list[str]:
        """Attacks that are due on every step.

        These are the wanted attacks, except those that look for something else, or ran under this defence, and could not show the event on any
        step.
        """
        goals = _goals(self.rule, self.results)
        others = {name for name, entry in self.results.catalogue.attacks.items() if entry.goal not in goals}
        ran = self.index.ran(self.defense)
        return [name for name in self.wanted if name in self.able or name not in ran | others]

    @cached_property
    def by_step(self) -> Mapping[str, Sequence[Attempt]]:
        """Step -> its attempts; steps with the same update are one step."""
        return self.index.by_step(self.results.steps, self.defense, tuple(self.asked))

    @cached_property
    def whole(self) -> AbstractSet[str]:
        """Steps on which every asked attack ran to its end once."""
        return self.index.whole(self.results.steps, self.defense, tuple(self.asked))

    @cached_property
    def recovered(self) -> AbstractSet[str]:
        """Steps whose texts an attack of the rule recovered.

        No other attack on these texts was needed.
        """
        return self.index.recovered(self.defense, self.wanted)

    @cached_property
    def attempts(self) -> list[Attempt]:
        """The attempts of `by_step`."""
        return [attempt for attempts in self.by_step.values() for attempt in attempts]

    @cached_property
    def showing(self) -> frozenset[int]:
        """Identities of the `attempts` that could have shown what the rule asks for."""
        return self.index.showing(self.rule, self.attempts)

    @cached_property
    def positive(self) -> frozenset[int]:
        """Identities of the `attempts` that have the event, or a score above 0."""
        rule = self.rule
        if rule.event is None:
            return frozenset(key for key, value in self.scores.items() if value > 0)
        had = self.index.having(rule.event, self.attempts)
        long_enough = rule.min_tokens is None
        return frozenset(id(a) for a in had if long_enough or any(s.exact and _counts(rule, s) for s in a.sequences))

    @cached_property
    def settling(self) -> frozenset[int]:
        """Identities of the `attempts` for which `settles` is true."""
        if self.rule.metric is None:
            return self.positive
        if self.rule.statistic not in ("max", "p95"):
            return frozenset()
        return frozenset(key for key, value in self.scores.items() if value > self.rule.threshold)

    @cached_property
    def scores(self) -> dict[int, float]:
        """Identity of each of the `attempts` with a score -> its score of the metric."""
        metric = self.rule.metric or ""
        asked = ((a, a.scores.get(metric)) for a in self.attempts)
        return {id(a): score.value for a, score in asked if isinstance(score, Score)}

    def value(self, attempt: Attempt) -> float:
        """Return 1.0 or 0.0 for an event, the score for a metric."""
        if self.rule.event is not None:
            return float(id(attempt) in self.positive)
        return self.scores.get(id(attempt), 0.0)

    def highest(self, attempts: Iterable[Attempt]) -> float:
        """Return the highest value of at least one attempt."""
        return max(map(self.value, attempts)) if self.positive else 0.0

    def could_show(self, attempt: Attempt) -> bool:
        """Return whether an attempt could have shown the rule's event or score."""
        return id(attempt) in self.showing


@dataclass(frozen=True)
class _RuleScope(_Asked):
    """What the attempts that a rule looks at under one defence say of each step."""

    @cached_property
    def at_risk(self) -> set[str]:
        """Steps that could have the event.

        For an event of long texts these are the steps with a long text. A step of short texts cannot leak a long one: if it counted as
        clean, the rate would be too low.
        """
        everything = {step.id for step in self.results.steps}
        long_texts = _about_long_texts(self.rule)
        if not long_texts and self.rule.min_tokens is None:
            return everything
        none = {step.id for step in self.results.steps if long_texts and step.n_sentences == 0}
        return everything - none - self.index.short(self.rule)

    @cached_property
    def beyond(self) -> set[str]:
        """Steps with as many tokens as the hidden size or more, or that may have as many."""
        hidden = self.results.regime.hidden
        return {step.id for step in self.results.steps if _beyond(step, hidden)}

    @cached_property
    def limited(self) -> set[str]:
        """Attacks that can read nothing on such steps; none for a rule on labels."""
        if not _about_texts(self.rule, self.results):
            return set()
        described = self.results.catalogue.attacks
        return {name for name in self.known if (entry := described.get(name)) and entry.token_limit}

    def of_step(self, step: StepRecord) -> _StepEvidence:
        """Return what one step contributes."""
        tried = attempts = self.by_step[step.id]
        due, lost = 0, 0
        bounds = step.verification.status.bounds and not self.kept_in_part(step)
        if usable(step) and not bounds and not _all_failed(attempts):
            attempts = [a for a in attempts if self.could_show(a) and self._proves(a)]
            if not attempts:
                return _StepEvidence(silent=True, unjudged=self._why_unjudged(step, tried))
        else:
            due, lost = self._due_and_lost(step, attempts)
        evidence = self._evidence(attempts) if usable(step) else ()
        if evidence and step.id not in self.at_risk:
            return _StepEvidence(due=due, lost=lost, left_out=True)
        unjudged = "" if evidence else self._why_unjudged(step, tried)
        return _StepEvidence(evidence, due, lost, bounding=bool(evidence) and bounds, unjudged=unjudged)

    def _evidence(self, attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
        """Return the attempts that count as evidence."""
        if self.limited:
            return tuple(filter(self._is_evidence, attempts))
        showing = self.showing  # nearly always all of them
        return tuple([a for a in attempts if id(a) in showing or self._is_evidence(a)])

    def _due_and_lost(self, step: StepRecord, attempts: Sequence[Attempt]) -> tuple[int, int]:
        """Return how many attempts were due, and how many of them gave no result."""
        if step.id in self.whole:  # nearly always true
            return len(self.asked), 0 if usable(step) else len(self.asked)
        spared = {a.attack for a in attempts if a.status is AttemptStatus.NOT_NEEDED and a.step in self.recovered}
        asked = [name for name in self.asked if name not in spared]
        by_attack: dict[str, list[Attempt]] = {}
        for attempt in attempts:
            by_attack.setdefault(attempt.attack, []).append(attempt)
        return len(asked), sum(self._lost(by_attack.get(name, ()), step) for name in asked)

    def judged(self, found: _StepEvidence, readers: AbstractSet[str]) -> _StepEvidence:
        """Return what a step contributes if only `readers` can show that it is clean.

        They can if they ran to their end.
        """
        if not found.attempts or (self.settling and any(map(self.settles, found.attempts))):
            return found
        if any(a.status is AttemptStatus.RAN and a.attack in readers for a in found.attempts):
            return found
        mine = [a for a in found.attempts if a.attack in readers]
        why = OUT_OF_TIME if mine else "only attacks that did not read their canary could tell"
        return _StepEvidence(due=found.due, lost=found.lost, unjudged=why)

    def reached(self, steps: Iterable[str]) -> dict[str, float]:
        """Return the highest score of each verified step, for steps that have one."""
        bounding = {step.id for step in self.results.steps if step.verification.status.bounds}
        found = {name: [self.value(a) for a in self.by_step[name] if self.could_show(a)] for name in steps}
        return {name: max(values) for name, values in found.items() if values and name in bounding}

    def texts(self, steps: AbstractSet[str]) -> int:
        """Count the true texts of some steps that are long enough for the rule."""
        found = self.index.texts(self.rule)
        return sum(found.get(step, 0) for step in steps)

    def _why_unjudged(self, step: StepRecord, tried: Sequence[Attempt]) -> str:
        """Return why a step without evidence could not be judged.

        Empty if no attack was tried: what was not done for an interruption or a refusal is counted as lost.
        """
        if not usable(step):
            return "the update comes from another batch"
        if not tried or step.id not in self.at_risk:
            return ""
        if self.kept_in_part(step):
            return "words were not kept, `keep: auto`"
        if not step.verification.status.bounds:
            return "unverifiable"
        if step.id in self.beyond and any(a.attack in self.limited for a in tried):
            return "as many tokens as the hidden size or more"
        ends = {attempt.status for attempt in tried}
        return next((said for status, said in _WITHOUT_EVIDENCE.items() if status in ends), "")

    def kept_in_part(self, step: StepRecord) -> bool:
        """Return whether a verified step lacks words that the rule asks for."""
        event = self.rule.event
        every_word = _about_texts(self.rule, self.results) if event is None else EVENTS[event].every_word
        return step.words_not_kept and step.verification.status.bounds and every_word

    def _is_evidence(self, attempt: Attempt) -> bool:
        """Return whether an attempt counts as evidence.

        It counts if it could have shown the event, or if it ran out of time and its attack could show the event on another step. An attack
        that ends at the hidden size proves nothing beyond it, unless it found something.
        """
        if self.limited and attempt.attack in self.limited and attempt.step in self.beyond:
            found = attempt.leaked if self.rule.event is None else self.value(attempt) > 0
            if not found:
                return False
        if self.could_show(attempt):
            return True
        out_of_time = attempt.status is AttemptStatus.BUDGET_EXHAUSTED
        return out_of_time and self.rule.event is not None and attempt.attack in self.able

    def _proves(self, attempt: Attempt) -> bool:
        """Return whether one attempt is proof: an event, or a score above a maximum.

        Means and percentiles also depend on the steps that did not leak, so one score proves nothing about them.
        """
        if self.rule.metric is None:
            return self.value(attempt) > 0
        return self.rule.statistic == "max" and self.value(attempt) > self.rule.threshold

    def settles(self, attempt: Attempt) -> bool:
        """Return whether one attempt shows on which side of the limit a verified step is.

        A score above a limit on the 95th percentile does: only the number of such steps matters. A mean depends on the score itself.
        """
        return id(attempt) in self.settling

    def _lost(self, attempts: Sequence[Attempt], step: StepRecord) -> bool:
        """Return whether one attack was due on a step and gave no usable result."""
        return not usable(step) or all(
            a.status in _WITHOUT_RESULT or (a.status is AttemptStatus.BUDGET_EXHAUSTED and not self._is_evidence(a))
            for a in attempts
        )


def _has_score(rule: Rule, attempt: Attempt) -> bool:
    """Return whether a finished attempt has a score of a rule's metric."""
    return isinstance(attempt.scores.get(rule.metric or ""), Score) and attempt.finished


_HAPPENED = {name: 1 << 2 * place for place, name in enumerate(EVENTS)}
"""Event -> a bit that says that it happened."""

_DECIDED = {name: 2 << 2 * place for place, name in enumerate(EVENTS)}
"""Event -> a bit that says that a finished attempt could have shown it."""


_ASKED = tuple((_HAPPENED[name], _DECIDED[name], event) for name, event in EVENTS.items())


def _bits(attempt: Attempt) -> int:
    """Return what an attempt says about each event."""
    bits, finished = 0, attempt.finished
    for had, told, event in _ASKED:
        if event.happened(attempt):
            bits |= had | told if finished else had
        elif finished and event.decided(attempt):
            bits |= told
    return bits


def _all_ran(attempts: Sequence[Attempt]) -> bool:
    """Return whether attempts of different attacks all ran to their end."""
    ran = {a.attack for a in attempts if a.status is AttemptStatus.RAN}
    return len(ran) == len(attempts)


def _first_of_its_kind(steps: Iterable[StepRecord]) -> dict[str, str]:
    """Map each step to the first step with the same update.

    The same update in two steps is one piece of evidence.
    """
    names: dict[str, str] = {}
    return {step.id: names.setdefault(step.snapshot, step.id) for step in steps}


def _all_failed(attempts: Sequence[Attempt]) -> bool:
    """Return whether every attempt failed; such a step is lost, not silent."""
    return bool(attempts) and all(a.status in _WITHOUT_RESULT for a in attempts)


def _about_long_texts(rule: Rule) -> bool:
    return rule.event is not None and EVENTS[rule.event].long_texts


def _beyond(step: StepRecord, hidden: int | None) -> bool:
    """Return whether a step has as many inputs as the hidden size.

    If it does not say so, return whether its tokens may be as many.
    """
    tokens = bounds_of(step.n_tokens_bucket)
    if step.beyond_hidden is not None or hidden is None or tokens is None:
        return bool(step.beyond_hidden)
    return tokens[1] >= hidden


def _counts(rule: Rule, sequence: SequenceScore) -> bool:
    """Return whether a text is long enough for a rule."""
    if _about_long_texts(rule):
        return sequence.long_enough
    bounds = bounds_of(sequence.min_tokens_bucket)
    return rule.min_tokens is None or (bounds is not None and bounds[0] >= rule.min_tokens)


def _goals(rule: Rule, results: Results) -> tuple[Kind, ...]:
    """Return what attacks must look for to tell something about a rule.

    A bag of words has no order, so it shows no whole text.
    """
    if not _about_texts(rule, results):
        return ("labels",)
    return ("text",) if rule.event is not None and EVENTS[rule.event].kind == "text" else ("text", "words")


def _about_texts(rule: Rule, results: Results) -> bool:
    """Return whether a rule is about texts and not about labels."""
    if rule.event is not None:
        return EVENTS[rule.event].of_texts
    described = results.catalogue.metrics.get(rule.metric or "")
    return described is None or described.level != "step"


def _worst(attempts: Iterable[Attempt], scope: _RuleScope) -> Worst | None:
    """Return the attempt with the strongest evidence against the rule.

    The highest value decides, then the longest run, then the shortest time.
    """

    def rank(attempt: Attempt) -> tuple[float, float]:
        longest = max((s.scores.get("longest_run", 0.0) for s in attempt.sequences), default=0.0)
        return longest, -attempt.wall_s

    against = [a for a in attempts if id(a) in scope.positive] if scope.positive else []
    most = max(map(scope.value, against), default=0.0)
    found = max((a for a in against if scope.value(a) == most), key=rank, default=None)
    if found is None:
        return None
    value = scope.value(found) if scope.rule.metric else None
    return Worst(step=found.step, attack=found.attack, wall_s=found.wall_s, value=value)


def _reach(attempts: Iterable[Attempt], rule: Rule) -> dict[str, int]:
    """Count texts by the highest entry of `REACH` that any attack reports."""
    best: dict[tuple[str, str], int] = {}
    for attempt in attempts:
        for sequence in attempt.sequences:
            if sequence.exact is not None and _counts(rule, sequence):
                key, rank = (attempt.step, sequence.id), _RANKS[sequence.outcome]
                if rank >= best.get(key, 0):
                    best[key] = rank
    return {name: sum(rank == i for rank in best.values()) for i, name in enumerate(REACH)}


def _why_nothing(scope: _RuleScope, left_out: int, silent: int, reasons: AbstractSet[str]) -> str:
    """Return why there is no evidence: the first reason that applies."""
    results, rule, defense = scope.results, scope.rule, scope.defense
    wanted, known = scope.wanted, scope.known
    unknown = [name for name in wanted if name not in known]
    attempts = [a for a in scope.mine if a.attack in wanted]
    metrics = [] if rule.metric is None else sorted({name for a in results.attempts for name in a.scores})
    if not results.steps:
        return "no client step was audited"
    if not any(usable(step) for step in results.steps):
        return "no update comes from the batch that was kept with it"
    if unknown and len(unknown) == len(wanted):
        return f"attack {unknown[0]!r} is not in this battery{_near(unknown[0], known)}"
    if rule.metric is not None and rule.metric not in metrics:
        return f"nothing was scored by {rule.metric!r}{_near(rule.metric, metrics)}"
    if not attempts:
        columns = sorted({a.defense for a in results.attempts})
        return f"defence {defense!r} was not tested{_near(defense, columns)}"
    if silent:
        return _why_silent(results, silent)
    if left_out:
        return f"no audited step holds a text of {rule.min_tokens or results.min_tokens}+ tokens"
    if scope.beyond and any(attempt.attack in scope.limited for attempt in attempts):
        return _beyond_their_limit(scope, attempts)
    if reasons == {OUT_OF_TIME}:
        return "every attack that could show it ran out of time"
    return (EVENTS[rule.event].undecided if rule.event else "") or _how_they_ended(attempts)


def _why_silent(results: Results, silent: int) -> str:
    """Say that steps were kept in part, or cannot be verified."""
    them = "it" if silent == 1 else "them"
    if any(usable(step) and not step.verification.status.bounds for step in results.steps):
        return f"{counted(silent, 'step')} cannot be verified, and nothing of the kind came back from {them}"
    return (
        f"of {counted(silent, 'step')} the words that a language model only predicts were not kept (`keep: auto`), and nothing of the "
        f"kind came back from {them}"
    )


def _beyond_their_limit(scope: _RuleScope, attempts: Iterable[Attempt]) -> str:
    """Say that attacks end where a step has as many tokens as the hidden size."""
    names = ", ".join(dict.fromkeys(a.attack for a in attempts if a.attack in scope.limited))
    verb = "has" if len(scope.beyond) == 1 else "have"
    return (
        f"{counted(len(scope.beyond), 'step')} {verb} as many tokens as the hidden size or more, about which {names} can say nothing; that "
        "is no protection, and no other attack that could show it finished"
    )


def _how_they_ended(attempts: Iterable[Attempt]) -> str:
    """Return in words how attempts ended that could not show the event."""
    ends: dict[str, int] = {}
    for attempt in attempts:
        ran = attempt.status is AttemptStatus.RAN
        word = "ran but of another kind" if ran else attempt.status.value.replace("_", " ")
        ends[word] = ends.get(word, 0) + 1
    return "no attack that could show it finished (" + ", ".join(f"{n} {word}" for word, n in ends.items()) + ")"


def _near(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f" ({', '.join(known) or 'none'})"
