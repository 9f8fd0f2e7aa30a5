"""Release situations, drawn at random, and what a careful person says.

A `Situation` describes an audit in words: what each attack did on each step, which canary it read, which rule judges. `results_of` writes it
down as results. `opinion` judges the description itself, step by step, and calls no code of the gate.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, get_args

from scipy.stats import beta

from leakaudit.results.schema import (
    AttackEntry,
    Attempt,
    AttemptStatus,
    Catalogue,
    Kind,
    KindControl,
    Results,
    StepRecord,
    Tally,
    VerificationStatus,
)
from tests.support.factories import attempt, changed, of_sequences, results, step, unguessed

GOALS: dict[str, Kind] = {"span": "text", "tag": "text", "rows": "words", "llg": "labels"}
"""Attack -> what it looks for. `span` ends at the hidden size and knows what was in reach of it."""
ENDS = {
    "crash": AttemptStatus.ERROR,
    "skip": AttemptStatus.SKIPPED,
    "refuse": AttemptStatus.NOT_APPLICABLE,
    "late": AttemptStatus.BUDGET_EXHAUSTED,
    "late high": AttemptStatus.BUDGET_EXHAUSTED,
    "late leak": AttemptStatus.BUDGET_EXHAUSTED,
}
"""What an attack did -> its status; every other word stands for an attack that ran to its end."""
SHARES = {"clean": 0.1, "late": 0.1, "high": 0.9, "late high": 0.9, "leak": 1.0, "late leak": 1.0}
"""What an attack did -> the share of the words, in order, that it recovered."""
EVENTS: dict[str, Kind] = {
    "exact_sentence": "text",
    "exact_sequence": "text",
    "in_reach": "text",
    "all_words": "words",
    "most_words": "words",
    "label_counts": "labels",
}
OF_LONG_TEXTS = ("exact_sentence", "most_words", "in_reach")
OF_EVERY_WORD = ("exact_sentence", "exact_sequence", "in_reach", "all_words", "rougeL")


@dataclass
class Step:
    """One step: what is known of it, and what each attack did under each defence."""

    stamp: VerificationStatus = VerificationStatus.VERIFIED
    beyond: bool = False
    in_part: bool = False
    short: bool = False
    did: dict[tuple[str, str], str] = field(default_factory=dict)
    """(attack, defence) -> what the attack did; a pair is absent if the attempt was never made."""


@dataclass
class Situation:
    """An audit and a policy."""

    attacks: list[str]
    defenses: list[str]
    steps: list[Step]
    rule: dict[str, Any]
    canary: dict[tuple[Kind, str], tuple[int, int]]
    """(kind, attack) -> canaries that it read, of those on which it ran."""
    negative: tuple[int, int] = (0, 3)
    interrupted: bool = False
    simulated: bool = False
    minor: int = 6
    days: float = 0.1
    """Age of the results."""
    max_unjudged: float | None = None
    min_steps: int = 59

    @property
    def column(self) -> str:
        """The defence that the rule looks at."""
        name: str = self.rule.get("scope", {}).get("defense", "shipped")
        return "none" if name == "shipped" else name

    @property
    def asked(self) -> list[str]:
        """The attacks that the rule looks at and that can show what it asks."""
        named = self.rule.get("scope", {}).get("attack", "any")
        return [name for name in self.attacks if named in ("any", name) and can_show(name, subject_of(self.rule))]

    @property
    def policy(self) -> dict[str, Any]:
        """The evidence floor of its policy."""
        more = {} if self.max_unjudged is None else {"max_unjudged": self.max_unjudged}
        return {"evidence": {"min_steps": self.min_steps} | more}


def subject_of(rule: dict[str, Any]) -> str:
    """Return the event or the metric of a rule."""
    name: str = rule.get("event") or rule["metric"]
    return name


def can_show(attack: str, subject: str) -> bool:
    """Return whether an attack can show an event or has a metric."""
    if subject == "label_counts":
        return attack == "llg"
    if subject in ("all_words", "most_words"):
        return attack != "llg"
    return GOALS[attack] == "text"


# ---------------------------------------------------------------------------------------------------------- at random


def situation(draw: random.Random) -> Situation:
    """Draw a situation: a clean audit with up to four things changed."""
    attacks = draw.choice([["span"], ["tag"], ["span", "tag"], ["span", "tag", "rows", "llg"], ["llg"], ["tag", "llg"]])
    defenses = draw.choice([["none"], ["none"], ["none", "prune"]])
    n = draw.choice([0, 3, 5, 60, 60, 60, 64, 100])
    pairs = [(attack, defense) for attack in attacks for defense in defenses]
    steps = [Step(did=dict.fromkeys(pairs, "clean")) for _ in range(n)]
    canary = {(kind, name): (3, 3) for name in attacks for kind in _kinds_of(name)}
    found = Situation(attacks, defenses, steps, _rule(draw, attacks, defenses), canary)
    for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 4])):
        _disturb(found, draw)
    return found


def _kinds_of(attack: str) -> tuple[Kind, ...]:
    return ("text", "words") if GOALS[attack] == "text" else (GOALS[attack],)


def _rule(draw: random.Random, attacks: list[str], defenses: list[str]) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    if draw.random() < 0.2:
        scope["attack"] = draw.choice(attacks)
    if draw.random() < 0.3:
        scope["defense"] = draw.choice(defenses)
    rule: dict[str, Any] = {"id": "rule", "scope": scope} if scope else {"id": "rule"}
    if draw.random() < 0.3:
        return rule | {
            "metric": "rougeL",
            "statistic": draw.choice(["mean", "p95", "max"]),
            "max_value": draw.choice([0.3, 0.5]),
        }
    event = draw.choice(list(EVENTS))
    return (
        rule
        | {"event": event}
        | draw.choice([{"max_count": 0}, {"max_count": 3}, {"max_rate": 0.05}, {"max_rate": 0.2}])
    )


def _disturb(found: Situation, draw: random.Random) -> None:
    """Change one thing of an audit, on some of its steps."""
    what = draw.choice(
        ["attempts"] * 6 + ["leak"] * 3 + ["canary"] * 3 + ["stamp", "audit", "policy", "all late"] + _OF_STEPS
    )
    if what == "canary":
        _other_canary(found, draw)
    elif what == "audit":
        key, value = draw.choice(_OF_AUDITS)
        setattr(found, key, value)
    elif what == "policy":
        found.max_unjudged, found.min_steps = draw.choice([0.02, 0.1, None]), draw.choice([4, 59])
    else:
        _disturb_steps(found, what, draw)


_OF_STEPS = ["beyond", "in_part", "short"]
_OF_AUDITS: list[tuple[str, Any]] = [
    ("negative", (0, 0)),
    ("negative", (2, 3)),
    ("interrupted", True),
    ("simulated", True),
    ("days", 9.0),
    *(("minor", minor) for minor in (3, 4, 5)),
]


def _other_canary(found: Situation, draw: random.Random) -> None:
    attack = draw.choice(found.attacks)
    kinds = [kind for kind, name in found.canary if name == attack]
    for kind in draw.choice([kinds, kinds[:1]]):
        found.canary[kind, attack] = draw.choice([(0, 3), (2, 3), (1, 1), (0, 0), (0, 0)])


def _disturb_steps(found: Situation, what: str, draw: random.Random) -> None:
    some = draw.sample(found.steps, min(len(found.steps), draw.choice([1, 1, 2, 5, 20, 60, 100])))
    attack, defense = draw.choice(found.attacks), draw.choice(found.defenses)
    if what in ("attempts", "leak"):
        end = "leak" if what == "leak" else draw.choice([*ENDS, "high", "blank", "missing"])
        for one in some:
            _do(one, attack, defense, end)
    elif what == "all late":
        for one in some:
            for name in found.attacks:
                _do(one, name, defense, "late")
    elif what == "stamp":
        stamp = draw.choice(["mismatch", "unverifiable", "rescaled", "stochastic", "scaled"])
        for one in some:
            one.stamp = VerificationStatus(stamp)
            one.did = {pair: "skip" if stamp == "mismatch" else end for pair, end in one.did.items()}
    else:
        for one in some:
            setattr(one, what, True)


def _do(one: Step, attack: str, defense: str, end: str) -> None:
    if one.stamp is VerificationStatus.MISMATCH:
        return  # nothing is attacked there
    if end == "missing":
        one.did.pop((attack, defense), None)
    else:
        one.did[attack, defense] = end


# --------------------------------------------------------------------------------------------------------- as results


def results_of(found: Situation) -> Results:
    """Write a situation down as results."""
    steps = [_record(i, one) for i, one in enumerate(found.steps)]
    attempts = [
        _attempt(i, attack, defense, end, one)
        for i, one in enumerate(found.steps)
        for (attack, defense), end in one.did.items()
    ]
    n = max((of for _, of in found.canary.values()), default=0)
    n = n if found.steps else 0
    canary = found.canary if found.steps else {}
    made = results(steps, attempts, positive=(n, n), negative=found.negative if found.steps else (0, 0))
    kinds: dict[Kind, KindControl] = {}
    for kind in get_args(Kind):
        by = {name: Tally(k=k, n=of) for (what, name), (k, of) in canary.items() if what == kind and of}
        if by:
            kinds[kind] = KindControl(k=max(own.k for own in by.values()), n=n, by=by)
    described = {
        name: AttackEntry(label=name, meaning="", source="", goal=goal, threat_model="", token_limit=name == "span")
        for name, goal in GOALS.items()
        if name in found.attacks
    }
    battery = made.run.battery.model_copy(update={"attacks": tuple(found.attacks), "defenses": tuple(found.defenses)})
    run = made.run.model_copy(
        update={"battery": battery, "interrupted": found.interrupted, "simulated": found.simulated}
    )
    controls = made.controls.model_copy(update={"kinds": kinds if found.minor >= 5 else {}})
    catalogue = Catalogue(attacks=described, metrics=made.catalogue.metrics)
    return changed(made, run=run, controls=controls, catalogue=catalogue, schema_=f"leakaudit.results/1.{found.minor}")


def _record(number: int, one: Step) -> StepRecord:
    tokens = "5-8" if one.short else "9-16"
    more = {"n_tokens_bucket": tokens, "beyond_hidden": one.beyond, "words_not_kept": one.in_part}
    return step(number, one.stamp).model_copy(update=more)


def _attempt(number: int, attack: str, defense: str, end: str, one: Step) -> Attempt:
    kind = {"text": "text", "words": "bag", "labels": "labels"}[GOALS[attack]]
    status = ENDS.get(end, AttemptStatus.RAN)
    if end == "blank":
        nothing = (unguessed(long_enough=not one.short),)
        return attempt(number, attack, defense, kind=kind, sequences=nothing, scores={}, events=())
    share = SHARES.get(end, 0.0)
    done = attempt(number, attack, defense, kind=kind, status=status, recall=share, long_enough=not one.short)
    if attack == "span" and done.finished:
        return of_sequences(done, [s.model_copy(update={"passes": bool(s.exact)}) for s in done.sequences])
    return done


# ------------------------------------------------------------------------------------------------- a careful person


@dataclass(frozen=True)
class Opinion:
    """What a careful person says of a situation."""

    passes: bool
    """Whether the evidence shows that the limit is kept."""
    fails: bool
    """Whether the evidence shows that the limit is exceeded."""
    reasons: frozenset[str]
    """Words of which a sentence on an undecided rule has one."""


def opinion(found: Situation) -> Opinion:
    """Judge the description of a situation."""
    known = [_of_step(one, found) for one in found.steps]
    clean = sum(state == "clean" for state, _ in known)
    leaked = sum(state == "leaked" for state, _ in known)
    unknown = {why for state, why in known if state == "unknown"}
    not_known = sum(state == "unknown" for state, _ in known)
    accepted = found.max_unjudged is not None and not_known <= found.max_unjudged * (clean + leaked + not_known)
    feared = 0 if accepted else not_known
    kept, exceeded = _numbers(found, known, clean, leaked, not_known, feared)
    trouble = _trouble(found, known)
    broken = found.negative == (2, 3) and bool(found.steps)
    return Opinion(
        passes=kept and not trouble and not broken,
        fails=exceeded and not broken,
        reasons=frozenset({*unknown, *trouble, "bound", "evidence", "Policy allows"}),
    )


def _of_step(one: Step, found: Situation) -> tuple[str, str]:
    """Return what is known of a step, and why it is not known more.

    `leaked`, `clean`, `unknown`, or `none`: it has nothing to lose, or nobody tried.
    """
    subject = subject_of(found.rule)
    tried = {name: one.did[name, found.column] for name in found.asked if (name, found.column) in one.did}
    if one.stamp is VerificationStatus.MISMATCH:
        return "unknown", "another batch"
    if any(_shows(end, subject, one, found.rule, name) for name, end in tried.items()):
        return "leaked", ""
    if (
        one.short
        and subject in OF_LONG_TEXTS
        and any(end not in ("crash", "skip", "refuse") for end in one.did.values())
    ):
        return "none", ""
    if not tried:
        named = found.rule.get("scope", {}).get("attack", "any")
        others = any(d == found.column and named in ("any", a) for a, d in one.did)
        return ("unknown", "no attack") if others else ("none", "")
    if one.stamp in (VerificationStatus.UNVERIFIABLE, VerificationStatus.RESCALED, VerificationStatus.STOCHASTIC):
        return "unknown", "verif"
    if one.in_part and subject in OF_EVERY_WORD:
        return "unknown", "not kept"
    kind = EVENTS.get(subject, "text")
    for name, end in tried.items():
        reads = found.canary.get((kind, name), (0, 0)) == (3, 3) or found.canary.get((kind, name)) == (1, 1)
        tells = subject != "in_reach" or name == "span"
        if reads and tells and end in ("clean", "high", "leak") and not (one.beyond and name == "span"):
            return "clean", ""
    return "unknown", "could not be judged"


def _shows(end: str, subject: str, one: Step, rule: dict[str, Any], attack: str) -> bool:
    """Return whether what an attack did shows the event, or a score above the maximum."""
    share = SHARES.get(end, 0.0)
    if subject == "rougeL":
        firm = one.stamp.bounds and not one.in_part and rule["statistic"] == "p95"
        limit: float = rule["max_value"]
        return (firm or rule["statistic"] == "max") and share > limit
    if one.short and subject in OF_LONG_TEXTS:
        return False
    needed = 0.5 if subject == "most_words" else 1.0
    return share >= needed


def _numbers(
    found: Situation, known: list[tuple[str, str]], clean: int, leaked: int, unknown: int, feared: int
) -> tuple[bool, bool]:
    """Return whether the limit is surely kept, and whether it is surely exceeded."""
    rule, n = found.rule, clean + leaked
    if "max_count" in rule:
        return n > 0 and leaked + feared <= rule["max_count"], leaked > rule["max_count"]
    if "max_rate" in rule:
        kept = n > 0 and _upper(leaked + feared, n + feared) <= rule["max_rate"]
        return kept, n > 0 and _lower(leaked, n + unknown) > rule["max_rate"]
    scores = [_score(one, found) for one in found.steps]
    limit = rule["max_value"]
    least = [score if state != "none" else None for (state, _), score in zip(known, scores, strict=True)]
    low = [score or 0.0 for (state, _), score in zip(known, least, strict=True) if state != "none"]
    high = [score or 0.0 for (state, _), score in zip(known, least, strict=True) if state in ("clean", "leaked")]
    high += [1.0] * feared
    if rule["statistic"] == "max":
        return n > 0 and max(high, default=1.0) <= limit, any(state == "leaked" for state, _ in known)
    if rule["statistic"] == "mean":
        return n > 0 and fmean(high) <= limit, bool(low) and fmean(low) > limit
    over = sum(value > limit for value in low)
    kept = n > 0 and _upper(sum(value > limit for value in high), len(high)) <= 0.05
    return kept, bool(low) and _lower(over, len(low)) > 0.05


def _score(one: Step, found: Situation) -> float | None:
    """Return the score that a verified step has at least; None if it has none."""
    if not one.stamp.bounds:
        return None
    ends = [one.did.get((name, found.column), "") for name in found.asked]
    return max((SHARES[end] for end in ends if end in SHARES), default=None)


def _trouble(found: Situation, known: list[tuple[str, str]]) -> set[str]:
    """Return what keeps an audit from being trusted, in words of a sentence."""
    trouble = set()
    tells = [name for name in found.asked if not _cannot_tell(found, name)]
    ends = [one.did.get((name, found.column), "missing") for one in found.steps for name in tells]
    lost = sum(end in ("crash", "skip", "missing") for end in ends)
    if lost > 0.02 * len(ends):
        trouble.add("crashed, were skipped")
    if sum(end == "late" for end in ends) > 0.2 * len(ends):
        trouble.add("ran out of time")
    due = len(found.attacks) * len(found.defenses)
    lacking = sum(len(one.did) < due for one in found.steps)
    if lacking > found.interrupted:
        trouble.add("attempts that were due")
    sure = sum(
        state == "clean" or (state == "leaked" and one.stamp.bounds)
        for (state, _), one in zip(known, found.steps, strict=True)
    )
    if sure < found.min_steps:
        trouble.add("steps of evidence")
    if found.days > 7:
        trouble.add("days old")
    if found.minor < 5:
        trouble.add("audit again")
    if found.negative[1] == 0 and found.attacks != ["llg"]:
        trouble.add("negative control")
    if found.column != "none" and not found.simulated:
        trouble.add("the run ships")
    return trouble


def _cannot_tell(found: Situation, attack: str) -> bool:
    """Return whether an attack ran and could say nothing about the rule on any step.

    Only `span` knows what was in reach of it; what another one recovered was in reach.
    """
    ends = {end for one in found.steps for (name, _), end in one.did.items() if name == attack}
    here = {one.did.get((attack, found.column), "") for one in found.steps}
    leaked = bool(ends & {"leak", "late leak"})
    return (
        subject_of(found.rule) == "in_reach"
        and attack != "span"
        and not leaked
        and bool(here & {"clean", "high", "blank"})
    )


def _upper(k: int, n: int) -> float:
    return 1.0 if k >= n else float(beta.ppf(0.95, k + 1, n - k))


def _lower(k: int, n: int) -> float:
    return 0.0 if k == 0 else float(beta.ppf(0.05, k, n - k + 1))
