"""The comparison of two audits: better, worse, or not to be compared."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from leakaudit.gate.controls import trusted
from leakaudit.gate.evidence import gather_own
from leakaudit.gate.policy import Policy, Rule
from leakaudit.history.keys import changed, in_words, keys_of
from leakaudit.results.bounds import lower_bound, sign_test, upper_bound
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted

Answer = Literal["better", "worse", "no difference shown", "cannot be compared"]


@dataclass(frozen=True)
class Difference:
    """One event in both audits."""

    event: str
    defense: str
    attack: str
    answer: Answer
    base: tuple[int, int]
    """Leaks and judged steps of the first audit; of the shared steps if they are paired."""
    new: tuple[int, int]
    """The same of the second audit."""
    paired: bool
    """Whether both audited the same batches."""
    lower: float | None
    """Lower end of the difference of the rates, new - base; None if the steps are paired."""
    upper: float | None
    """Upper end of it."""
    p_value: float | None
    """Of the exact one-sided sign test in the direction that was seen; None if the steps are not paired."""
    sentence: str


@dataclass(frozen=True)
class Comparison:
    """Two audits side by side."""

    base: str
    """Run of the first audit."""
    new: str
    """Run of the second one."""
    changed: tuple[str, ...]
    """Comparability keys that differ."""
    refused: str
    """Why the two cannot be compared; empty if they are."""
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def worse(self) -> bool:
        """Whether an event happens more often in the second audit."""
        return any(one.answer == "worse" for one in self.differences)


def compare(
    base: Results,
    new: Results,
    policy: Policy,
    *,
    despite: Collection[str] = (),
    data: tuple[str, str] = ("", ""),
    keys: tuple[Mapping[str, str], Mapping[str, str]] | None = None,
) -> Comparison:
    """Compare two audits event by event.

    Steps on the same batches are compared in pairs by the exact sign test; else the two rates are compared, with an interval of their
    difference.

    Args:
        base: the earlier audit.
        new: the later one.
        policy: names the events; its confidence is that of each one-sided bound.
        despite: comparability keys that may differ.
        data: names of the two data sets, or marks of them.
        keys: comparability keys of both, if they were recorded; None to take them from the results.
    """
    mine = keys or (keys_of(base, policy, data[0]), keys_of(new, policy, data[1]))
    names = changed(*mine)
    shown = {name: (mine[0].get(name, ""), mine[1].get(name, "")) for name in names}
    if open_names := [name for name in names if name not in despite]:
        verb = "differs" if len(open_names) == 1 else "differ"
        values = "; ".join(
            f"{name}: {_short(a)} and {_short(b)}" for name, (a, b) in shown.items() if name in open_names
        )
        hint = " ".join(f"--despite {name}" for name in open_names)
        return Comparison(
            base.run.id,
            new.run.id,
            tuple(names),
            f"The two audits cannot be compared: {in_words(open_names)} {verb} ({values}). If that is what you want to compare, add {hint}.",
        )
    rules = {(rule.event, rule.min_tokens, rule.scope): rule for rule in policy.rules if rule.event is not None}
    notes = [f"Compared although {in_words(names)} {'differs' if len(names) == 1 else 'differ'}."] if names else []
    if _marks(base, "unit") & _marks(new, "unit"):
        shared = len(_marks(base, "unit") & _marks(new, "unit"))
        notes.append(f"{counted(shared, 'step')} of the second audit repeat the first one's: they are no new evidence.")
    differences = tuple(_difference(rule, base, new, policy) for rule in rules.values())
    return Comparison(base.run.id, new.run.id, tuple(names), "", differences, tuple(notes))


def _difference(rule: Rule, base: Results, new: Results, policy: Policy) -> Difference:
    first, second = (_outcomes(found, rule, policy) for found in (base, new))
    confidence = policy.statistics.confidence
    attack = "any" if rule.scope.attacks is None else ", ".join(rule.scope.attacks)
    pairs = _pairs(base, new, first, second)
    if pairs:
        return _paired(rule, attack, pairs, confidence)
    return _unpaired(rule, attack, list(first.values()), list(second.values()), confidence)


def _paired(rule: Rule, attack: str, pairs: list[tuple[bool, bool]], confidence: float) -> Difference:
    stopped = sum(before and not after for before, after in pairs)
    opened = sum(after and not before for before, after in pairs)
    p_value = sign_test(max(stopped, opened), min(stopped, opened)) if stopped + opened else 1.0
    answer: Answer = "no difference shown"
    if p_value <= 1 - confidence:
        answer = "worse" if opened > stopped else "better"
    said = (
        f"On {counted(len(pairs), 'shared batch', 'shared batches')} {opened} leaked only in the second audit and {stopped} only in the first "
        f"(exact sign test, p = {p_value:.2g})."
    )
    return Difference(
        event=rule.event or "",
        defense=rule.scope.defense,
        attack=attack,
        answer=answer,
        base=(sum(before for before, _ in pairs), len(pairs)),
        new=(sum(after for _, after in pairs), len(pairs)),
        paired=True,
        lower=None,
        upper=None,
        p_value=p_value,
        sentence=said,
    )


def _unpaired(rule: Rule, attack: str, first: list[bool], second: list[bool], confidence: float) -> Difference:
    counts = ((sum(first), len(first)), (sum(second), len(second)))
    answer: Answer = "cannot be compared"
    lower = upper = None
    if not first or not second:
        which = "neither audit" if not first and not second else "the first audit" if not first else "the second audit"
        said = (
            f"No step could be judged in {which}."
            if which != "neither audit"
            else "Neither audit has a step that could be judged."
        )
    else:
        lower, upper = difference_of_rates(*counts, confidence)
        answer = "worse" if lower > 0 else "better" if upper < 0 else "no difference shown"
        (k0, n0), (k1, n1) = counts
        said = (
            f"{k1} of {n1} steps now, {k0} of {n0} before: the rate changed by {100 * (k1 / n1 - k0 / n0):+.1f} points, "
            f"{100 * confidence:.0f}% bounds {100 * lower:+.1f} to {100 * upper:+.1f}."
        )
    return Difference(
        event=rule.event or "",
        defense=rule.scope.defense,
        attack=attack,
        answer=answer,
        base=counts[0],
        new=counts[1],
        paired=False,
        lower=lower,
        upper=upper,
        p_value=None,
        sentence=said,
    )


def difference_of_rates(base: tuple[int, int], new: tuple[int, int], confidence: float = 0.95) -> tuple[float, float]:
    """Bound the difference new - base of two independent rates.

    The bounds of both rates are combined by the square-and-add rule. Source: Newcombe 1998, method 10; Zou and Donner 2008 for any pair of
    bounds. We use Clopper-Pearson bounds, so the interval errs on the wide side.

    Args:
        base: leaks and steps.
        new: leaks and steps.
        confidence: of each one-sided bound.

    >>> lower, upper = difference_of_rates((0, 20), (20, 20))
    >>> lower > 0.8, upper
    (True, 1.0)
    """
    (k0, n0), (k1, n1) = base, new
    p0, p1 = k0 / n0, k1 / n1
    l0, u0 = lower_bound(k0, n0, confidence), upper_bound(k0, n0, confidence)
    l1, u1 = lower_bound(k1, n1, confidence), upper_bound(k1, n1, confidence)
    difference = p1 - p0
    return (
        max(-1.0, difference - math.hypot(p1 - l1, u0 - p0)),
        min(1.0, difference + math.hypot(u1 - p1, p0 - l0)),
    )


def _outcomes(results: Results, rule: Rule, policy: Policy) -> dict[str, bool]:
    found = gather_own(results, rule, trusted(results, policy, rule))
    return {name: value > 0 for name, value in found.values.items()}


def _pairs(
    base: Results, new: Results, first: Mapping[str, bool], second: Mapping[str, bool]
) -> list[tuple[bool, bool]]:
    """Return the outcomes of both audits on each batch that both judged once."""
    if not base.run.pairing or base.run.pairing != new.run.pairing:
        return []
    before, after = _by_batch(base, first), _by_batch(new, second)
    return [(before[mark], after[mark]) for mark in before.keys() & after.keys()]


def _by_batch(results: Results, outcomes: Mapping[str, bool]) -> dict[str, bool]:
    """Return the outcome of each batch; a batch that several steps had is left out."""
    marks = [step.batch for step in results.steps]
    return {
        step.batch: outcomes[step.id]
        for step in results.steps
        if step.batch and step.id in outcomes and marks.count(step.batch) == 1
    }


def _marks(results: Results, kind: Literal["unit", "batch"]) -> set[str]:
    return {mark for step in results.steps if (mark := getattr(step, kind))}


def _short(value: str) -> str:
    return value if len(value) <= 60 else value[:57] + "..."
