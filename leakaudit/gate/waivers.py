"""Waivers: exceptions from a policy, each with an owner, a reason and an end.

A waiver lets one rule fail until a day. Nothing else is let through: a rule of severity critical, missing evidence and a leak above the waiver's
ceiling count as before, and so does every rule from the day after the waiver's last one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from leakaudit.config.strict_yaml import parse_yaml
from leakaudit.config.yaml_document import read_text
from leakaudit.gate.policy import ANY, SHIPPED, RuleId
from leakaudit.gate.verdict import RuleVerdict, Status, WaiverVerdict
from leakaudit.gate.wording import percent
from leakaudit.results.schema import Fraction

MAX_DAYS = 90
"""Longest life of a waiver in days. Our choice: a quarter, after which somebody has to decide again."""

WARN_DAYS = 14
"""Days before its end from which a waiver is announced to end. Our choice."""


def _said(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank; say it in words")
    return text.strip()


Words = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_said)]


class _Waivers(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, use_attribute_docstrings=True)


class WaiverScope(_Waivers):
    """Where a waiver holds."""

    defense: str = SHIPPED
    """Defence of the rule, as in the rule's own scope."""
    run: str = ANY
    """Id of the one run for which it holds; `any` for every run."""


class Waiver(_Waivers):
    """One exception."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name of the waiver in outputs, such as W-2026-014."""
    rule: RuleId
    """Id of the rule that may fail."""
    scope: WaiverScope = WaiverScope()
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


class Waivers(_Waivers):
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


def load_waivers(path: Path) -> Waivers:
    """Read a file of waivers.

    Raises:
        ConfigError: one line for each problem, with the line of the file.
    """
    return parse_waivers(read_text(path), str(path))


def parse_waivers(text: str, source: str) -> Waivers:
    """Read waivers from text; see `load_waivers`. Messages call the text `source`."""
    return parse_yaml(text, Waivers, source)


def waived(
    rules: Sequence[RuleVerdict], waivers: Waivers, run: str, now: datetime
) -> tuple[list[RuleVerdict], tuple[WaiverVerdict, ...]]:
    """Apply waivers to judged rules.

    Args:
        rules: as the policy judges them.
        waivers: the exceptions.
        run: id of the run.
        now: the time of judgement, with time zone.

    Returns:
        The rules, of which waived ones say so, and what became of each waiver.
    """
    today, found, said = now.astimezone(UTC).date(), list(rules), []
    for waiver in waivers.waivers:
        number = next((n for n, rule in enumerate(found) if _is_about(waiver, rule, run)), None)
        rule = None if number is None else found[number]
        state, why = _state(waiver, rule, today)
        said.append(_verdict(waiver, state, why))
        if state == "applies" and rule is not None and number is not None and not rule.waived:
            until = f"waived until {waiver.expires} by {waiver.owner} ({waiver.id}): {waiver.reason}"
            found[number] = rule.model_copy(update={"waived": until})
    return found, tuple(said)


def _is_about(waiver: Waiver, rule: RuleVerdict, run: str) -> bool:
    return waiver.rule == rule.id and waiver.scope.defense in (SHIPPED, rule.defense) and waiver.scope.run in (ANY, run)


State = Literal["applies", "expired", "not yet", "unused", "no such rule", "critical", "undecided", "over its ceiling"]


def _state(waiver: Waiver, rule: RuleVerdict | None, today: date) -> tuple[State, str]:
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
            f"the rule reached {percent(reached)}, above the ceiling of {percent(waiver.ceiling)}",
        )
    left = (waiver.expires - today).days
    soon = f"; it ends in {left} days" if left <= WARN_DAYS else ""
    return "applies", f"{waiver.owner} accepts it until {waiver.expires}: {waiver.reason}{soon}"


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
