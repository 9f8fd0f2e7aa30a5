"""Waivers: exceptions from a policy, each with an owner, a reason and an end.

A waiver lets one rule fail until a day. Nothing else is let through: a rule of severity critical, missing evidence and a leak above the waiver's
ceiling count as before, and so does every rule from the day after the waiver's last one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from leakaudit.config.strict_yaml import parse_yaml
from leakaudit.gate.policy import ANY, HIGHEST_LIMIT, SHIPPED, Policy, RuleId
from leakaudit.gate.policy_parts import MAX_DAYS, PolicyPart, WaiversFile, Words
from leakaudit.gate.verdict import LimitKind, RuleVerdict, Status, WaiverVerdict
from leakaudit.gate.wording import allowed, percent
from leakaudit.results.schema import Amount
from leakaudit.results.wording import counted


def _run_id(text: str) -> str:
    if not text or any(letter.isspace() for letter in text):
        raise ValueError("is no id of a run; write `run: any` for every run and for several together")
    return text


class WaiverScope(PolicyPart):
    """Where a waiver holds."""

    defense: str = SHIPPED
    """Defence of the rule, as in the rule's own scope."""
    run: Annotated[str, AfterValidator(_run_id)] = ANY
    """Id of the one run for which it holds; `any` for every run, and for several that are judged together."""


class Waiver(PolicyPart):
    """One exception."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name of the waiver in outputs, such as W-2026-014."""
    rule: RuleId
    """Id of the rule that may fail."""
    scope: WaiverScope = WaiverScope.model_construct()
    """Where it holds."""
    reason: Words
    """Why the leak is accepted."""
    owner: Words
    """Who accepts it."""
    ticket: str = ""
    """Where the repair is tracked."""
    created: date
    """First day on which it holds, in UTC."""
    expires: date
    """Last day on which it holds, in UTC; at most 90 days after `created`."""
    ceiling: Amount | None = None
    """Largest upper bound of the rule (or count, score or epsilon) up to which it holds; None for no ceiling. Of a rate or a score it is below 1,
    because nothing is above 1."""

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.expires < self.created:
            raise ValueError(f"waiver {self.id!r}: expires on {self.expires}, before it is created on {self.created}")
        if self.expires - self.created > timedelta(days=MAX_DAYS):
            last = self.created + timedelta(days=MAX_DAYS)
            raise ValueError(f"waiver {self.id!r}: lives longer than {MAX_DAYS} days; the last day allowed is {last}")
        return self


class Waivers(PolicyPart):
    """All exceptions, as a file holds them.

    `leakaudit schema waivers` prints the JSON Schema of this class.
    """

    schema_: Literal["leakaudit.waivers/1"] = Field(default="leakaudit.waivers/1", alias="schema")
    """Format of the file."""
    waivers: tuple[Waiver, ...] = ()
    """The exceptions."""

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        names = [one.id for one in self.waivers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two waivers are named {twice[0]!r}")
        return self

    @property
    def digest(self) -> str:
        """Digest of the content, as the verdict records it."""
        return f"sha256:{hashlib.sha256(self.model_dump_json(by_alias=True).encode()).hexdigest()}"


def _too_long(found: Waivers, max_days: int) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for index, waiver in enumerate(found.waivers):
        last = waiver.created + timedelta(days=max_days)
        if waiver.expires > last:
            said = f"waiver {waiver.id!r}: lives longer than the {max_days} days of the policy; the last day allowed is {last}"
            yield ("waivers", index, "expires"), said


def _no_ceiling(found: Waivers, policy: Policy) -> Iterator[tuple[tuple[str | int, ...], str]]:
    kinds: dict[str, LimitKind] = {rule.id: rule.limit for rule in policy.rules}
    kinds |= dict.fromkeys((rule.id for rule in policy.imported), "max_value")
    for index, waiver in enumerate(found.waivers):
        kind = kinds.get(waiver.rule)
        if kind is not None and (said := _above_all(kind, waiver.ceiling)):
            yield ("waivers", index, "ceiling"), f"waiver {waiver.id!r}: {said}"


def _above_all(kind: LimitKind, ceiling: float | None) -> str:
    """Return why a ceiling of a share would let everything through; else empty."""
    if ceiling is None or kind in _NO_SHARE or ceiling <= HIGHEST_LIMIT:
        return ""
    return f"its ceiling of {ceiling:g} would hold however much leaks; write a share such as 0.6, or leave it out"


_NO_SHARE = frozenset({"max_count", "claimed_epsilon"})
"""Limits that are no share."""


def limits_of(policy: Policy) -> WaiversFile:
    """Return the policy's file of waivers with its limits; `.` for no file."""
    named = policy.waivers
    return named if isinstance(named, WaiversFile) else WaiversFile(file=named or ".")


def waivers_file(policy: Policy, policy_file: Path | None, given: Path | None = None) -> Path | None:
    """Return the file of waivers that holds for a policy; None if there is none.

    Args:
        policy: it may name a file.
        policy_file: where the policy was read from; None for a built-in one.
        given: a file that the caller names in place of the policy's.
    """
    if given is None and policy.waivers is not None and policy_file is not None:
        return policy_file.parent / limits_of(policy).file
    return given


def parse_waivers(text: str, source: str, policy: Policy | None = None) -> Waivers:
    """Read waivers from text.

    Args:
        text: that of the file.
        source: name of the file in messages.
        policy: the policy whose limits hold for the waivers; None to check them by themselves only.

    Raises:
        ConfigError: one line for each problem, with the line of the file.
    """
    if policy is None:
        return parse_yaml(text, Waivers, source)
    limits = limits_of(policy)
    return parse_yaml(
        text, Waivers, source, lambda found: (*_too_long(found, limits.max_days), *_no_ceiling(found, policy))
    )


def waived(
    rules: Sequence[RuleVerdict], waivers: Waivers, run: str, now: datetime, warn: timedelta
) -> tuple[list[RuleVerdict], tuple[WaiverVerdict, ...]]:
    """Apply waivers to judged rules.

    Args:
        rules: as the policy judges them.
        waivers: the exceptions.
        run: id of the run.
        now: the time of judgement, with time zone.
        warn: time before its end from which a waiver is announced to end.

    Returns:
        The rules, of which waived ones say so, and what became of each waiver.
    """
    today, found, said = now.astimezone(UTC).date(), list(rules), []
    for waiver in waivers.waivers:
        number = next((n for n, rule in enumerate(found) if _is_about(waiver, rule, run)), None)
        rule = None if number is None else found[number]
        state, why = _state(waiver, rule, today, warn) if rule is not None else _about_nothing(waiver, found, run)
        said.append(_verdict(waiver, state, why))
        if state == "applies" and rule is not None and number is not None and not rule.waived:
            until = f"waived until {waiver.expires} by {waiver.owner} ({waiver.id}): {waiver.reason}"
            found[number] = rule.model_copy(update={"waived": until})
    return found, tuple(said)


def _is_about(waiver: Waiver, rule: RuleVerdict, run: str) -> bool:
    return waiver.rule == rule.id and waiver.scope.defense in (SHIPPED, rule.defense) and waiver.scope.run in (ANY, run)


State = Literal["applies", "expired", "not yet", "unused", "no such rule", "critical", "undecided", "over its ceiling"]


def _about_nothing(waiver: Waiver, rules: Sequence[RuleVerdict], run: str) -> tuple[State, str]:
    """Return why no rule is in the scope of a waiver."""
    of_any_run = waiver.model_copy(update={"scope": waiver.scope.model_copy(update={"run": ANY})})
    if any(_is_about(of_any_run, rule, run) for rule in rules):
        return "no such rule", f"it holds for the run {waiver.scope.run} alone, and this verdict is about {run}"
    return "no such rule", f"no rule {waiver.rule!r} of this policy is in its scope; remove it or correct it"


def _state(waiver: Waiver, rule: RuleVerdict, today: date, warn: timedelta) -> tuple[State, str]:
    """Return what becomes of a waiver, and why in words."""
    if today > waiver.expires:
        return "expired", f"it expired on {waiver.expires}, so the rule counts again"
    if today < waiver.created:
        return "not yet", f"it holds from {waiver.created} on"
    if rule.severity == "critical":
        return "critical", "a rule of severity critical cannot be waived"
    if rule.status is Status.PASS or rule.level == "warn":
        return "unused", "the rule does not need it; remove it"
    if rule.status is not Status.FAIL:
        return "undecided", "the rule is undecided, and missing evidence cannot be waived"
    if said := _above_all(rule.kind, waiver.ceiling):
        return "over its ceiling", said
    reached = max(one for one in (rule.upper, rule.observed, 0.0) if one is not None)
    if waiver.ceiling is not None and reached > waiver.ceiling:
        return (
            "over its ceiling",
            f"the rule reached {_reached(rule, reached)}, above the ceiling of {_reached(rule, waiver.ceiling)}",
        )
    left = waiver.expires - today
    soon = f"; it ends in {counted(left.days, 'day')}" if left <= warn else ""
    return "applies", f"{waiver.owner} accepts it until {waiver.expires}: {waiver.reason}{soon}"


def _reached(rule: RuleVerdict, value: float) -> str:
    return allowed(rule.kind, value) if rule.kind in _NO_SHARE else percent(value)


def _verdict(waiver: Waiver, state: State, why: str) -> WaiverVerdict:
    return WaiverVerdict(
        id=waiver.id,
        rule=waiver.rule,
        owner=waiver.owner,
        reason=waiver.reason,
        ticket=waiver.ticket,
        expires=str(waiver.expires),
        state=state,
        sentence=f"Waiver {waiver.id} of {waiver.rule}: {why}.",
    )
