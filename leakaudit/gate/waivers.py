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

from pydantic import Field, model_validator

from leakaudit.config.strict_yaml import parse_yaml
from leakaudit.gate.policy import ANY, SHIPPED, Policy, RuleId
from leakaudit.gate.policy_parts import MAX_DAYS, PolicyPart, WaiversFile, Words
from leakaudit.gate.verdict import RuleVerdict, Status, WaiverVerdict
from leakaudit.gate.wording import allowed, percent
from leakaudit.results.schema import Fraction
from leakaudit.results.wording import counted


class WaiverScope(PolicyPart):
    """Where a waiver holds."""

    defense: str = SHIPPED
    """Defence of the rule, as in the rule's own scope."""
    run: str = ANY
    """Id of the one run for which it holds; `any` for every run."""


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
    ceiling: Fraction | None = None
    """Largest upper bound of the rule (or count, or score) up to which it holds; None for no ceiling."""

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


def parse_waivers(text: str, source: str, max_days: int = MAX_DAYS) -> Waivers:
    """Read waivers from text.

    Args:
        text: that of the file.
        source: name of the file in messages.
        max_days: longest life of a waiver that the policy accepts.

    Raises:
        ConfigError: one line for each problem, with the line of the file.
    """
    return parse_yaml(text, Waivers, source, lambda found: _too_long(found, max_days))


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
        state, why = _state(waiver, rule, today, warn)
        said.append(_verdict(waiver, state, why))
        if state == "applies" and rule is not None and number is not None and not rule.waived:
            until = f"waived until {waiver.expires} by {waiver.owner} ({waiver.id}): {waiver.reason}"
            found[number] = rule.model_copy(update={"waived": until})
    return found, tuple(said)


def _is_about(waiver: Waiver, rule: RuleVerdict, run: str) -> bool:
    return waiver.rule == rule.id and waiver.scope.defense in (SHIPPED, rule.defense) and waiver.scope.run in (ANY, run)


State = Literal["applies", "expired", "not yet", "unused", "no such rule", "critical", "undecided", "over its ceiling"]


def _state(waiver: Waiver, rule: RuleVerdict | None, today: date, warn: timedelta) -> tuple[State, str]:
    """Return what becomes of a waiver, and why in words."""
    if rule is None:
        return (
            "no such rule",
            f"no rule {waiver.rule!r} of this policy and run is in its scope; remove it or correct it",
        )
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
    reached = max(one for one in (rule.upper, rule.observed, 0.0) if one is not None)
    if waiver.ceiling is not None and reached > waiver.ceiling:
        return (
            "over its ceiling",
            f"the rule reached {_reached(rule, reached)}, above the ceiling of {percent(waiver.ceiling)}",
        )
    left = waiver.expires - today
    soon = f"; it ends in {counted(left.days, 'day')}" if left <= warn else ""
    return "applies", f"{waiver.owner} accepts it until {waiver.expires}: {waiver.reason}{soon}"


def _reached(rule: RuleVerdict, value: float) -> str:
    return allowed(rule.kind, value) if rule.kind in ("max_count", "claimed_epsilon") else percent(value)


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
