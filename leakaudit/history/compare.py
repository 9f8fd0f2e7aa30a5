"""The comparison of two audits: better, worse, or not to be compared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from leakaudit.gate.controls import trusted
from leakaudit.gate.evidence import gather_own
from leakaudit.gate.policy import Policy, Rule
from leakaudit.gate.regression import by_batch, leaks_of, outcomes, pairs_of
from leakaudit.gate.wording import change_in_words
from leakaudit.history.keys import changed, differences_in_words, in_words, keys_of
from leakaudit.history.record import Rate
from leakaudit.results.bounds import sign_test
from leakaudit.results.differences import difference_of_pairs, difference_of_rates
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted

Answer = Literal["better", "worse", "no difference shown", "cannot be compared"]


@dataclass(frozen=True)
class Difference:
    """One event in both audits."""

    event: str
    defense: str
    attack: str
    min_tokens: int | None
    """Number of tokens from which a text counts, if the rule says it."""
    level: Literal["error", "warn"]
    """Level of the policy's rule on the event; the stricter one of several."""
    answer: Answer
    base: tuple[int, int]
    """Leaks and judged steps of the first audit; of the shared steps if they are paired."""
    new: tuple[int, int]
    """The same of the second audit."""
    paired: bool
    """Whether both audited the same batches."""
    lower: float | None
    """Lower end of the difference of the rates, new - base; None if one of the two is unknown."""
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

    @property
    def answer(self) -> Literal["worse", "no worse", "cannot be compared"]:
        """The answer on all events.

        `no worse` needs at least one event, and that each is compared. Only an event of level `warn` that neither audit judged may lack.
        """
        if self.worse:
            return "worse"
        needed = [one for one in self.differences if one.level == "error" or one.base[1] or one.new[1]]
        whole = bool(needed) and all(one.answer != "cannot be compared" for one in needed)
        return "no worse" if whole and not self.refused else "cannot be compared"


@dataclass(frozen=True)
class Counted:
    """An audit of which only the counts are left: a night's record, or the baseline."""

    run: str
    keys: Mapping[str, str]
    rates: Sequence[Rate]

    def counts(self, rule: Rule) -> tuple[int, int]:
        """Return leaks and judged steps of a rule; (0, 0) if it was not judged."""
        series = (rule.event, rule.min_tokens, rule.scope.defense, _attacks(rule))
        return next(((rate.k, rate.n) for rate in self.rates if rate.series == series), (0, 0))


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
    start = _side_by_side(base.run.id, new.run.id, mine, despite)
    if start.refused:
        return start
    notes = list(start.notes)
    if _marks(base, "unit") & _marks(new, "unit"):
        shared = len(_marks(base, "unit") & _marks(new, "unit"))
        notes.append(f"{counted(shared, 'step')} of the second audit repeat the first one's: they are no new evidence.")
    differences = tuple(_difference(rule, base, new, policy) for rule in _rules(policy))
    return replace(start, differences=differences, notes=tuple(notes))


def compare_counts(base: Counted, new: Counted, policy: Policy, *, despite: Collection[str] = ()) -> Comparison:
    """Compare the counts of two audits event by event.

    The answer comes from an interval of the difference of the rates.

    Args:
        base: the earlier audit.
        new: the later one.
        policy: as for `compare`.
        despite: comparability keys that may differ.
    """
    start = _side_by_side(base.run, new.run, (base.keys, new.keys), despite)
    if start.refused:
        return start
    differences = tuple(
        _unpaired(rule, _attacks(rule), base.counts(rule), new.counts(rule), policy.statistics.confidence)
        for rule in _rules(policy)
    )
    return replace(start, differences=differences)


def _side_by_side(
    base: str, new: str, keys: tuple[Mapping[str, str], Mapping[str, str]], despite: Collection[str]
) -> Comparison:
    """Return a comparison without differences, which is refused if keys differ."""
    names = changed(*keys)
    open_names = [name for name in names if name not in despite]
    if not open_names:
        notes = [f"Compared although they differ in {in_words(names)}."] if names else []
        if not any(side.get("data") for side in keys):
            notes.append("Neither audit names its data set; they are compared as if it were the same.")
        return Comparison(base, new, tuple(names), "", notes=tuple(notes))
    hint = " ".join(f"--despite {name}" for name in open_names)
    return Comparison(
        base,
        new,
        tuple(names),
        f"The two audits cannot be compared: they differ in {differences_in_words(open_names, *keys)}. If that is what you want to compare, add {hint}.",
    )


def _rules(policy: Policy) -> list[Rule]:
    """Return one rule for each event, shortest text and scope: the strictest."""
    rules = sorted((rule for rule in policy.rules if rule.event is not None), key=lambda rule: rule.level == "error")
    strictest = {(rule.event, rule.min_tokens, rule.scope): rule for rule in rules}
    return [rule for rule in policy.rules if rule in strictest.values()]


def _attacks(rule: Rule) -> str:
    return "any" if rule.scope.attacks is None else ", ".join(rule.scope.attacks)


def _difference(rule: Rule, base: Results, new: Results, policy: Policy) -> Difference:
    first, second = (outcomes(gather_own(found, rule, trusted(found, policy, rule))) for found in (base, new))
    confidence = policy.statistics.confidence
    attack = _attacks(rule)
    pairs = _pairs(base, new, first, second)
    if pairs:
        return _paired(rule, attack, pairs, confidence)
    counts = [leaks_of(found.values()) for found in (first, second)]
    return _unpaired(rule, attack, counts[0], counts[1], confidence)


def _paired(rule: Rule, attack: str, pairs: list[tuple[bool, bool]], confidence: float) -> Difference:
    stopped = sum(before and not after for before, after in pairs)
    opened = sum(after and not before for before, after in pairs)
    p_value = sign_test(max(stopped, opened), min(stopped, opened)) if stopped + opened else 1.0
    answer: Answer = "no difference shown"
    if p_value <= 1 - confidence:
        answer = "worse" if opened > stopped else "better"
    bounds = difference_of_pairs(opened, stopped, len(pairs), confidence)
    said = (
        f"On {counted(len(pairs), 'shared batch', 'shared batches')} {opened} leaked only in the second audit and {stopped} only in the first "
        f"(exact sign test, p = {p_value:.2g}): {change_in_words((opened - stopped) / len(pairs), bounds, confidence)}."
    )
    return Difference(
        event=rule.event or "",
        defense=rule.scope.defense,
        attack=attack,
        min_tokens=rule.min_tokens,
        level=rule.level,
        answer=answer,
        base=(sum(before for before, _ in pairs), len(pairs)),
        new=(sum(after for _, after in pairs), len(pairs)),
        paired=True,
        lower=bounds[0],
        upper=bounds[1],
        p_value=p_value,
        sentence=said,
    )


def _unpaired(rule: Rule, attack: str, base: tuple[int, int], new: tuple[int, int], confidence: float) -> Difference:
    (k0, n0), (k1, n1) = base, new
    answer: Answer = "cannot be compared"
    lower = upper = None
    if not n0 and not n1:
        said = "Neither audit has a step that could be judged."
    elif not n0 or not n1:
        said = f"No step could be judged in the {'second' if n0 else 'first'} audit."
    else:
        lower, upper = difference_of_rates(base, new, confidence)
        answer = "worse" if lower > 0 else "better" if upper < 0 else "no difference shown"
        said = (
            f"{k1} of {n1} steps now, {k0} of {n0} before: "
            f"{change_in_words(k1 / n1 - k0 / n0, (lower, upper), confidence)}."
        )
    return Difference(
        event=rule.event or "",
        defense=rule.scope.defense,
        attack=attack,
        min_tokens=rule.min_tokens,
        level=rule.level,
        answer=answer,
        base=base,
        new=new,
        paired=False,
        lower=lower,
        upper=upper,
        p_value=None,
        sentence=said,
    )


def _pairs(
    base: Results, new: Results, first: Mapping[str, bool | None], second: Mapping[str, bool | None]
) -> list[tuple[bool, bool]]:
    """Return the outcomes of both audits on each batch that both judged."""
    if not base.run.pairing or base.run.pairing != new.run.pairing:
        return []
    found = pairs_of(by_batch(base, first), by_batch(new, second), len(second))
    return [(before, after) for before, after in found if before is not None and after is not None]


def _marks(results: Results, kind: Literal["unit", "batch"]) -> set[str]:
    return {mark for step in results.steps if (mark := getattr(step, kind))}
