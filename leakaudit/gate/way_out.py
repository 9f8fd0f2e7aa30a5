"""The choice of the defence with which a policy is met at the smallest cost.

A defence is called effective only if its own verdict is PASS and if the attacks that decide it knew the defence. A search that ran out of
time, a step that failed verification and an attack that did not apply make that verdict INCONCLUSIVE, so none of them makes a defence
effective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from leakaudit.gate.events import EVENTS
from leakaudit.gate.policy import SHIPPED
from leakaudit.gate.verdict import Alternative, Figures, RuleVerdict, Status, WayOut
from leakaudit.gate.wording import at_most, percent
from leakaudit.results.schema import Results
from leakaudit.results.utility import Loss, losses
from leakaudit.results.wording import counted

_MOST_NAMES = 5
"""Most defences that a sentence names. Our choice: a longer list is a table, and the report has one."""


def effective(alternatives: Iterable[Alternative]) -> list[Alternative]:
    """Return the defences that pass against attacks that knew them, in their order."""
    return [one for one in alternatives if one.status is Status.PASS and not one.naive]


def rate_rule(rules: Sequence[RuleVerdict], deciding: str | None) -> RuleVerdict | None:
    """Return the rule by whose leak rate defences are compared.

    It is None if no rule on what is shipped limits how many steps leak. Else it is the rule that decides the verdict, or else the first one on a rate, or
    else the first one on a count. A rule on the difference from a baseline is none: its bounds are those of a difference.
    """
    counting = [r for r in rules if r.level == "error" and r.defense == SHIPPED and r.kind in ("max_rate", "max_count")]
    return min(counting, key=lambda r: (r.id != deciding, r.kind != "max_rate"), default=None)


def figures_of(alternative: Alternative, rule: RuleVerdict | None) -> Figures | None:
    """Return the numbers of a rule under a defence; None without a rule."""
    return next((found for found in alternative.rules if rule is not None and found.id == rule.id), None)


def seen_in_words(rule: RuleVerdict, figures: Figures) -> str:
    """Return what was found under a defence: `no sentence in 60 steps (at most 4.9%)`."""
    if not figures.n or figures.k is None:
        return "no evidence"
    noun = EVENTS[rule.subject].noun
    if figures.k == 0 and noun.startswith("a "):
        said = f"no {noun[2:]} in {counted(figures.n, 'step')}"
    else:
        said = f"{noun} in {figures.k} of {counted(figures.n, 'step')}"
    return said if figures.upper is None else f"{said} (at most {at_most(figures.upper)})"


def way_out(
    results: Results, rules: Sequence[RuleVerdict], deciding: str | None, alternatives: Sequence[Alternative]
) -> WayOut:
    """Return the defence that passes at the smallest cost, or what is missing.

    The cost is the upper end of the interval of the loss of utility. A loss without an interval stands after those with one, because its
    upper end is unknown. Of equal losses, the shorter training step decides. Nothing is chosen if several defences pass and none was measured.
    """
    rule = rate_rule(rules, deciding)
    passing = effective(alternatives)
    names = tuple(one.defense for one in passing)
    if not passing:
        return WayOut(sentence=_what_is_missing(rule, alternatives))
    known = losses(results)
    measured = sorted((one for one in passing if one.defense in known), key=lambda one: _cost(results, known, one))
    if measured:
        best = measured[0]
        cost = known[best.defense].words
    elif len(passing) == 1:
        best, cost = passing[0], ""
    else:
        return WayOut(passing=names, sentence=f"These pass: {_listed(names)}. {_UNMEASURED}")
    seen = _seen(rule, best)
    said = f"{best.defense}: {', '.join(filter(None, [seen, cost]))}." if seen or cost else f"{best.defense}."
    unmeasured = "" if measured else f" {_UNMEASURED}"
    return WayOut(defense=best.defense, passing=names, seen=seen, cost=cost, sentence=said + unmeasured)


_UNMEASURED = "What this costs the model was not measured."


def _cost(results: Results, known: dict[str, Loss], alternative: Alternative) -> tuple[bool, float, float]:
    """Return the sort key of a defence: the upper end of its loss, then its time."""
    loss = known[alternative.defense]
    seconds = [p.seconds for p in results.prices if p.defense == alternative.defense and p.seconds is not None]
    end = loss.lost if loss.interval is None else loss.interval[1]
    return loss.interval is None, end, min(seconds, default=math.inf)


def _seen(rule: RuleVerdict | None, alternative: Alternative) -> str:
    figures = figures_of(alternative, rule)
    return "" if rule is None or figures is None else seen_in_words(rule, figures)


def _what_is_missing(rule: RuleVerdict | None, alternatives: Sequence[Alternative]) -> str:
    """Return why no defence can be named."""
    if not alternatives:
        return "No other defence than the one that the run ships was tested."
    said = ["No tested defence passes."]
    naive = [one.defense for one in alternatives if one.status is Status.PASS]
    if naive:
        said.append(
            f"Only attacks that did not know the defence were stopped by {_listed(naive)}: audit with attacks that know it."
        )
    undecided = [one for one in alternatives if one.status is Status.INCONCLUSIVE]
    if undecided:
        limit = f" The rule {rule.id} allows {percent(rule.threshold)}." if rule and rule.kind == "max_rate" else ""
        each = [
            " with ".join(filter(None, [one.defense, _seen(rule, one)])) + _others_open(rule, one) for one in undecided
        ]
        said.append(f"Undecided for lack of evidence: {_listed(each)}.{limit}")
    return " ".join(said)


def _others_open(rule: RuleVerdict | None, alternative: Alternative) -> str:
    """Return which rules are open under a defence if the rule that is shown is not."""
    if rule is None or rule.id in alternative.open_rules:
        return ""
    return f" (open: {', '.join(alternative.open_rules)})"


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return ", ".join([*names[:_MOST_NAMES], *more])
