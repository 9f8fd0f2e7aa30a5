"""The section on what each defence costs the model, and what leaks under it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from leakaudit.gate.events import EVENTS
from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.gate.wording import at_least, at_most, percent
from leakaudit.reports.cells import shown_name
from leakaudit.reports.escaping import plain
from leakaudit.reports.frontier import (
    Compared,
    best_attack,
    command_for,
    compared_defences,
    compared_rule,
    cost_in_words,
    family,
    way_out,
)
from leakaudit.reports.frontier_chart import BROAD, SLIM, FrontierPoint, dominated, frontier_chart
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.reports.wording import run_time
from leakaudit.results.schema import Results
from leakaudit.results.utility import Loss, signed
from leakaudit.results.wording import counted

MOST_IN_HEADING = 2
"""Defences whose cost stands in the heading, which shows while the section is closed. Our choice: two fit two lines."""


def section(redacted: RedactedResult) -> Section | None:
    """Show each tested defence by its price and by what leaks under it."""
    results, verdict = redacted.results, redacted.verdict
    rows = compared_defences(results, verdict)
    if len(rows) == 1:
        return None
    rule = compared_rule(verdict)
    drawn = [row for row in rows[1:] if not row.why_not]
    chosen = _chosen(verdict)
    context = {
        "way_out": way_out(results, verdict),
        "line": f"LeakAuditCallback(defense={json.dumps(plain(chosen), ensure_ascii=False)})" if chosen else "",
        "command": "" if any(row.loss for row in rows) else plain(command_for(results)),
        "rows": [_row(results, row, rule, chosen) for row in rows],
        "left_out": _left_out(results, rows[1:]),
        "priced": bool(results.prices),
        "claimed": bool(results.privacy),
        "caption_of_table": _under_the_table(results),
    }
    title = "What each defence costs"
    costs = [f"{shown_name(results, row.defense)}: {row.loss.words}" for row in rows[1:] if row.loss][:MOST_IN_HEADING]
    heading = f"{title} ({'; '.join(costs)})" if costs else title
    return Section("frontier", title, context | _chart(results, rule, rows[0], drawn, chosen), heading=heading)


def _left_out(results: Results, rows: Sequence[Compared]) -> list[tuple[str, str]]:
    """Return the defences that the chart does not show, by reason.

    Those with the same reason are one item.
    """
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.why_not:
            reasons.setdefault(row.why_not, []).append(shown_name(results, row.defense))
    return [(", ".join(names), why) for why, names in reasons.items()]


def _chosen(verdict: Verdict) -> str:
    """Return the defence that the panel recommends; empty for none."""
    return "" if verdict.verdict is Status.PASS or verdict.way_out is None else verdict.way_out.defense


def _chart(
    results: Results, rule: RuleVerdict | None, without: Compared, drawn: list[Compared], chosen: str
) -> dict[str, Any]:
    """Return the chart in two sizes, its words, its key and its table.

    The chart is None without a point.
    """
    if rule is None or not drawn:
        return {"chart": None}
    anchor = [without] if without.figures is not None and without.figures.upper is not None else []
    shown = [*anchor, *drawn]
    points = _points(results, shown, chosen)
    loss = next(row.loss for row in drawn if row.loss is not None)
    limit = rule.threshold if rule.kind == "max_rate" else None
    title = plain(
        f"Loss of {loss.utility.metric} and leak rate (rule {rule.id}) under {counted(len(drawn), 'defence')}"
    )
    description = plain(" ".join(_in_words(row, point) for row, point in zip(shown, points, strict=True)))
    axis = plain(_axis(loss))
    broad, slim = (frontier_chart(points, limit, axis, size, title, description) for size in (BROAD, SLIM))
    return {
        "chart": broad,
        "slim": slim,
        "caption": _caption(results, rule, loss),
        "key": _key(points, limit, chosen),
        "table": [_data(row, point) for row, point in zip(shown, points, strict=True)],
        "unit": plain(_unit(loss)),
    }


def _points(results: Results, rows: list[Compared], chosen: str) -> list[FrontierPoint]:
    found = []
    for row in rows:
        assert row.figures is not None and row.figures.upper is not None  # only such rows are drawn
        within = None if row.loss is None else row.loss.interval
        unit = 1.0 if row.loss is None else row.loss.unit
        found.append(
            FrontierPoint(
                label=_label(results, row),
                lost=0.0 if row.loss is None else row.loss.lost / unit,
                within=None if within is None else (within[0] / unit, within[1] / unit),
                upper=row.figures.upper,
                lower=row.figures.lower,
                state=row.state,
                family=family(row.defense),
                chosen=bool(row.number) and row.defense == chosen,
            )
        )
    worse = dominated([(point.lost, point.upper) for point in found])
    return [
        replace(point, dominated=hollow and row.number > 0)
        for row, point, hollow in zip(rows, found, worse, strict=True)
    ]


def _label(results: Results, row: Compared) -> str:
    """Return the name beside a mark: the number of its row.

    Epsilon follows where an accountant gave one.
    """
    epsilon = _epsilon(results, row.defense)
    return f"{row.number or 'none'}{f', ε {epsilon:.3g}' if epsilon is not None else ''}"


def _epsilon(results: Results, defense: str) -> float | None:
    return next((p.epsilon for p in results.privacy if p.defense == defense and p.epsilon is not None), None)


def _axis(loss: Loss) -> str:
    name = loss.utility.metric if len(loss.utility.metric) <= 24 else loss.utility.metric[:23] + "…"
    what = f"loss of {name}" if loss.utility.higher_is_better else f"increase of {name}"
    return f"{what}, in points" if loss.points else what


def _unit(loss: Loss) -> str:
    return "Loss, in points" if loss.points else "Loss"


def _caption(results: Results, rule: RuleVerdict, loss: Loss) -> str:
    """Return how to read the chart."""
    what = EVENTS[rule.subject].short
    points = f" A point is a hundredth of {loss.utility.metric}." if loss.points else ""
    trained = loss.utility.steps
    after = f", after trainings of {counted(trained, 'step')}" if trained is not None else ""
    allowed = percent(rule.threshold) if rule.kind == "max_rate" else counted(int(rule.threshold), "step")
    return (
        f"To the right: how much worse the model is than without a defence{after}, with the 95% interval.{points} Upwards: the share of steps "
        f"in which {what} (rule {rule.id}, which allows {allowed}); the mark stands at the upper bound, and its line goes down to the lower bound. The lower left "
        f"corner is best. Marks that would cover each other are moved apart by a few pixels. Each attack was allowed {run_time(results.run.battery.budget_s)} a step. The upright axis is stretched near 0%."
    )


def _key(points: list[FrontierPoint], limit: float | None, chosen: str) -> list[dict[str, str]]:
    """Return the entries of the key for what is drawn."""
    words = {
        "passes": "would pass the policy",
        "fails": "would fail",
        "open": "undecided",
        "none": "no defence",
    }
    entries = [{"mark": state, "words": words[state]} for state in words if any(p.state == state for p in points)]
    if any(p.dominated for p in points):
        entries.append({"mark": "hollow", "words": "hollow: another one is at least as good in both"})
    if limit is not None:
        entries.append({"mark": "region", "words": "within the limit"})
    if len({p.family for p in points}) < len(points):
        entries.append({"mark": "line", "words": "one defence at several strengths"})
    if chosen and any(p.chosen for p in points):
        entries.append({"mark": "", "words": "bold number: the cheapest that passes"})
    return entries


def _in_words(row: Compared, point: FrontierPoint) -> str:
    """Return one point in words, for people who use a screen reader."""
    loss = "no loss, by definition" if row.loss is None else row.loss.words
    return f"{row.number or ''} {row.defense}: {loss}, leak rate at most {at_most(point.upper)}.".strip()


def _data(row: Compared, point: FrontierPoint) -> dict[str, str]:
    """Return the numbers of one point as they are drawn."""
    numbers = [point.lost, *(point.within or ())]
    return {
        "name": f"{row.number}. {row.defense}" if row.number else row.defense,
        "lost": signed(point.lost, numbers),
        "within": "none" if point.within is None else " to ".join(signed(end, numbers) for end in point.within),
        "rates": f"{at_least(point.lower) if point.lower is not None else '?'} to {at_most(point.upper)}",
        "hollow": "yes" if point.dominated else "no",
    }


# ----------------------------------------------------------------------------------------------------------- the table
def _row(results: Results, row: Compared, rule: RuleVerdict | None, chosen: str) -> dict[str, Any]:
    first = row.number == 0
    return {
        "number": str(row.number) if row.number else "",
        "name": "no defence" if first else shown_name(results, row.defense),
        "chosen": not first and row.defense == chosen,
        "leak": _leak(row),
        "attack": _attack(results, row, rule),
        "utility": _without(results) if first else cost_in_words(results, row.defense),
        "seconds": _price(results, row, "seconds"),
        "traffic": _price(results, row, "traffic"),
        "epsilon": _claim(results, row.defense),
        "status": "" if row.alternative is None else row.alternative.status.value,
        "passes": _passes(row, rule),
    }


def _under_the_table(results: Results) -> str:
    """Return what the columns on prices and on epsilon mean, or why there are none."""
    prices = "Step time and traffic " + (
        "are multiples of those without a defence." if results.prices else "were not measured."
    )
    if not results.privacy:
        return f"{prices} No accountant stated an epsilon."
    return f"{prices} An epsilon is what an accountant states; the audit does not confirm it."


def _leak(row: Compared) -> str:
    found = row.figures
    if found is None or found.k is None or not found.n:
        return "no evidence"
    bound = f", at most {at_most(found.upper)}" if found.upper is not None and found.n > 1 else ""
    return f"{found.k} of {counted(found.n, 'step')}{bound}"


def _attack(results: Results, row: Compared, rule: RuleVerdict | None) -> str:
    """Return the strongest attack and whether it knew the defence."""
    best = None if rule is None else best_attack(results, row.defense, rule)
    if best is None:
        return "none could have shown it"
    names = ", ".join(best.attacks[:4]) + (f" and {len(best.attacks) - 4} more" if len(best.attacks) > 4 else "")
    said = f"{names} ({best.leaked} of {counted(best.steps, 'step')})" if best.leaked else f"none of {names}"
    if row.number == 0:
        return said
    many = len(best.attacks) > 1
    knew = "knew the defence" if best.knew else ("did not all know the defence" if many else "did not know the defence")
    return f"{said}; {'they' if many else 'it'} {knew}"


def _without(results: Results) -> str:
    """Return the utility without a defence, with which the others are compared."""
    found = dict.fromkeys(f"{u.metric} {u.baseline:.3g}" for u in results.utility if u.baseline is not None)
    return ", ".join(found) or "not measured"


def _price(results: Results, row: Compared, name: str) -> str:
    """Return a price as a multiple of that without a defence."""
    if row.number == 0:
        return "1"
    found = (getattr(p, name) for p in results.prices if p.defense == row.defense)
    value = next((value for value in found if value is not None), None)
    return "not measured" if value is None else f"{value:.2f}" if value >= 0.01 else f"{value:.1g}"


def _claim(results: Results, defense: str) -> str:
    """Return what an accountant states, or why there is no epsilon."""
    found = next((p for p in results.privacy if p.defense == defense), None)
    if found is None or found.epsilon is None:
        return "none" if found is None or not found.why_not else f"none: {found.why_not}"
    delta = f", delta {found.delta:.1g}" if found.delta is not None else ""
    by = f" ({found.accountant})" if found.accountant else ""
    return f"{found.epsilon:.3g}{delta}{by}"


def _passes(row: Compared, rule: RuleVerdict | None) -> str:
    """Return what keeps a defence from passing besides the compared rule."""
    if row.number == 0:
        return ""
    if row.alternative is None:
        return "not judged"
    if row.alternative.naive and row.alternative.status is Status.PASS:
        return "only against attacks that did not know it"
    opened = [name for name in row.alternative.open_rules if rule is None or name != rule.id]
    return f"open: {', '.join(opened)}" if opened and row.alternative.status is not Status.PASS else ""
