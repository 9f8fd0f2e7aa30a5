"""Whether one policy is looser than another, key by key.

`DIRECTIONS` is the one place that says of a key which way is looser. Of a key that is not in it nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import Any, get_args

from pydantic import BaseModel

from leakaudit.config.duration import length_of
from leakaudit.gate.policy import ImportedRule, Policy, Rule
from leakaudit.gate.policy_parts import MAX_DAYS, Grant


class Direction(StrEnum):
    """What a change does to a policy."""

    LOOSER = "looser"
    """Something that did not pass may pass now, or the report may show more."""
    TIGHTER = "tighter"
    NEITHER = "neither"
    """Neither can be said."""


@dataclass(frozen=True)
class Change:
    """One difference between two policies."""

    key: str
    """The key, such as `evidence.min_steps`, or `rules.max_rate`; `rules` for a rule as a whole."""
    rule: str
    """Id of the rule; empty outside rules."""
    old: Any
    """Plain value; None if not set."""
    new: Any
    direction: Direction
    why: str = ""
    """Why nothing can be said; empty if it is plain."""

    @property
    def sentence(self) -> str:
        """The change in words.

        >>> Change("rules.max_rate", "sentence-rate", 0.05, 0.1, Direction.LOOSER).sentence
        'max_rate of sentence-rate 0.05 -> 0.1: looser'
        """
        of = f" of {self.rule}" if self.rule else ""
        key = self.key.partition(".")[2] if self.rule else self.key
        why = f" ({self.why})" if self.why else ""
        if self.key == "rules":
            return f"{self.old or self.new}{why}: {self.direction}"
        return f"{key}{of} {_shown(self.old)} -> {_shown(self.new)}: {self.direction}{why}"


Measure = Callable[[Any], float | None]


@dataclass(frozen=True)
class _Key:
    """What a key's value means."""

    rising: Direction
    """What a higher measure does."""
    measure: Measure


def _number(unset: float | None = None) -> Measure:
    """Return the measure of a number.

    `unset` is the measure of no value; None if it cannot be compared.
    """
    return lambda value: unset if value is None else float(value)


def _seconds(value: Any) -> float:
    return length_of(value).total_seconds()


def _place_in(*words: str) -> Measure:
    """Return the measure of a word: its place in an order."""
    return lambda value: float(words.index(value)) if value in words else None


def _given(value: Any) -> float:
    return float(bool(value))


def _day(value: Any) -> float:
    return float(date.fromisoformat(value).toordinal())


def _longest_waiver(value: Any) -> float:
    """Return the days that a waiver may live; 0 where the policy names no waivers."""
    if not value:
        return 0.0
    return float(MAX_DAYS if isinstance(value, str) else value["max_days"])


def _looser(measure: Measure | None = None) -> _Key:
    return _Key(Direction.LOOSER, measure or _number())


def _tighter(measure: Measure | None = None) -> _Key:
    return _Key(Direction.TIGHTER, measure or _number())


def _unsaid() -> _Key:
    return _Key(Direction.NEITHER, _number())


DIRECTIONS: Mapping[str, _Key] = {
    "evidence.min_steps": _tighter(),
    "evidence.min_steps_per_phase.early": _tighter(),
    "evidence.min_steps_per_phase.middle": _tighter(),
    "evidence.min_steps_per_phase.late": _tighter(),
    "evidence.min_texts": _tighter(),
    "evidence.runs": _unsaid(),  # more runs bring more evidence, and another number is another plan
    "evidence.max_error_share": _looser(),
    "evidence.max_censored": _looser(),
    "evidence.max_unjudged": _looser(_number(0.0)),  # without it each unjudged step counts as a leak, as with 0
    "evidence.min_tokens": _looser(),  # audits that count longer texts only are accepted
    "evidence.max_age": _looser(_seconds),
    "controls.positive.steps": _tighter(),
    "controls.positive.rate_lower": _tighter(),
    "controls.negative.steps": _tighter(),
    "controls.negative.rate_upper": _looser(),
    "statistics.confidence": _tighter(),  # a pass takes more evidence; what then does not fail is INCONCLUSIVE
    "requires.budget_s": _tighter(_number(0.0)),
    "requires.adaptive": _tighter(),
    "requires.verified": _tighter(),
    "requires.attacks_share": _tighter(_number(0.0)),
    "subject.require_artifact_digest": _tighter(),
    "subject.require_clean_tree": _tighter(),
    "subject.require_policy_of_run": _tighter(),
    "subject.data": _tighter(_given),
    "subject.base_model": _tighter(_given),
    "requires.threat_model.adversary": _tighter(_given),
    "requires.threat_model.sees": _tighter(_given),
    "on_inconclusive": _looser(_given),
    "on_inconclusive.since": _tighter(_day),
    "on_inconclusive.until": _looser(_day),
    "waivers": _looser(_longest_waiver),
    "waivers.max_days": _looser(),
    "imported.level": _looser(_place_in("error", "warn")),
    "imported.severity": _tighter(lambda value: float(value == "critical")),
    "imported.max_value": _looser(),
    "rules.on_not_comparable": _looser(_place_in("inconclusive", "warn")),
    "rules.level": _looser(_place_in("error", "warn")),
    "rules.severity": _tighter(lambda value: float(value == "critical")),  # a critical rule cannot be waived
    "rules.min_tokens": _looser(_number(1.0)),
    "rules.max_rate": _looser(),
    "rules.max_count": _looser(),
    "rules.max_value": _looser(),
    "rules.versus_baseline.margin": _looser(),
    "rules.claimed_epsilon.max": _looser(),
    "rules.claimed_epsilon.delta_max": _looser(),
    "rules.membership.max_tpr": _looser(),
    "rules.membership.false_rate": _tighter(),  # a lower threshold names more texts, and the limit stays
    "report.text": _looser(_place_in("hash", "masked", "full")),
    "report.allow_full": _looser(),
    "report.top_samples": _unsaid(),
    "nights.confidence": _unsaid(),  # an alarm takes more nights, and so does a bound
    "nights.prior": _unsaid(),
    "nights.margin": _looser(),
    "nights.level": _looser(_place_in("error", "warn")),
}
"""Key -> what a higher value does. Every number of a policy is here (a test says so)."""

DEMANDS = frozenset({"requires.attacks", "requires.defenses", "requires.granted", "requires.kinds"})
"""Lists of which every further entry asks for more."""

ALLOWANCES: Mapping[str, frozenset[str]] = {"requires.threat_model.granted_at_most": frozenset(get_args(Grant))}
"""Lists of which every further entry allows more -> all entries, which no list allows."""


def compare_policies(old: Policy, new: Policy) -> list[Change]:
    """Return the differences between two policies, in the order of the new one's keys.

    Rules are compared by their ids; their order does not matter.
    """
    return list(_of_models(old, new, ""))


def _of_models(old: BaseModel, new: BaseModel, above: str) -> Iterator[Change]:
    plain = [model.model_dump(mode="json", by_alias=True) for model in (old, new)]
    for name, info in type(new).model_fields.items():
        key = info.alias or name
        full, one, other = f"{above}{key}", getattr(old, name), getattr(new, name)
        if isinstance(one, BaseModel) and isinstance(other, BaseModel):
            yield from _of_models(one, other, f"{full}.")
        elif full in ("rules", "imported"):
            yield from _of_rules(one, other, full)
        elif plain[0][key] != plain[1][key]:
            yield Change(full, "", plain[0][key], plain[1][key], _direction(full, plain[0][key], plain[1][key]))


def _direction(key: str, old: Any, new: Any) -> Direction:
    """Return what the change of one key does."""
    if key in DEMANDS:
        return _of_demands(set(old), set(new))
    if key in ALLOWANCES:
        return _of_demands(*(set(ALLOWANCES[key] if value is None else value) for value in (new, old)))
    meaning = DIRECTIONS.get(key)
    if meaning is None or meaning.rising is Direction.NEITHER:
        return Direction.NEITHER
    before, after = meaning.measure(old), meaning.measure(new)
    if before is None or after is None or before == after:
        return Direction.NEITHER
    if after > before:
        return meaning.rising
    return Direction.TIGHTER if meaning.rising is Direction.LOOSER else Direction.LOOSER


def _of_demands(old: set[str], new: set[str]) -> Direction:
    """Return what a change of a set does of which every entry asks for more."""
    gone, more = old - new, new - old
    if bool(gone) == bool(more):
        return Direction.NEITHER
    return Direction.LOOSER if gone else Direction.TIGHTER


AnyRule = Rule | ImportedRule


def _of_rules(old: tuple[AnyRule, ...], new: tuple[AnyRule, ...], key: str) -> Iterator[Change]:
    before = {_asked(rule): rule for rule in old}
    after = {_asked(rule) for rule in new}
    gone = [rule for rule in old if _asked(rule) not in after]
    for rule in new:
        if _asked(rule) in before:
            yield from _of_rule(before[_asked(rule)], rule, key)
            continue
        renamed = next((other for other in gone if other.model_copy(update={"id": rule.id}) == rule), None)
        if renamed is not None:
            gone.remove(renamed)
            yield Change(f"{key}.id", rule.id, renamed.id, rule.id, Direction.NEITHER, "its limit is the same")
        else:
            yield _whole(rule, added=True)
    yield from (_whole(rule, added=False) for rule in gone)


def _asked(rule: AnyRule) -> tuple[str, object]:
    """Return what makes two rules the same one: id, and who finds its number."""
    if not isinstance(rule, Rule):
        return rule.id, rule.measure
    return rule.id, "" if rule.of_attacks else rule.limit


def _whole(rule: AnyRule, *, added: bool) -> Change:
    """Return the change that a rule is added or removed."""
    word = f"rule {rule.id} {'added' if added else 'removed'}"
    decides = rule.level == "error"
    direction = Direction.NEITHER if not decides else Direction.TIGHTER if added else Direction.LOOSER
    old, new = (None, word) if added else (word, None)
    return Change("rules", rule.id, old, new, direction, "" if decides else "it only warns")


def _of_rule(old: AnyRule, new: AnyRule, key: str) -> Iterator[Change]:
    """Yield the changes of a rule.

    Only the limit of a rule that decides before and after can get looser.
    """
    decides = old.level == new.level == "error"
    for change in _of_models(old, new, f"{key}."):
        if not decides and change.key != f"{key}.level":
            yield Change(change.key, new.id, change.old, change.new, Direction.NEITHER, "it only warns")
        else:
            yield Change(change.key, new.id, change.old, change.new, change.direction)


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "not set" if value is None else '""'
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
