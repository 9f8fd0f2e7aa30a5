"""The section on labels: how well, how surely and when they were recovered.

It prepares data for `templates/sections/labels.html.j2`. Redaction has decided what may be shown: class counts come only from
`LabelView`s, which hold them in mode full only; everything else is rates. A step that cannot be verified is shown only if its label
counts were recovered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from statistics import fmean
from typing import Any

from markupsafe import Markup

from leakaudit.gate.wording import percent, rate_between
from leakaudit.reports.cells import OBSERVED
from leakaudit.reports.charts import SharePoint, share_chart
from leakaudit.reports.escaping import plain
from leakaudit.reports.measures import label_metrics
from leakaudit.reports.pictures import counts_chart
from leakaudit.reports.redaction import LabelView, RedactedResult
from leakaudit.reports.section import MOST_ROWS, Section
from leakaudit.results import bounds as stats
from leakaudit.results.schema import Attempt, Score, TextMode

MOST_STEPS = 24
"""Most steps whose class counts are shown."""

UNKNOWN = "An attack to which the batch size is unknown is judged by the share of each class."
LEADS = {
    TextMode.HASH: "How many examples each class had is private; a report in text mode full shows it.",
    TextMode.MASKED: "How many examples each class had is private; a report in text mode full shows it.",
    TextMode.FULL: "The tables below show how many examples of each class the batch held, and how many were recovered.",
}


def section(redacted: RedactedResult) -> Section | None:
    """Show how well the labels were recovered; None if no attack guessed labels."""
    steps = {step.id: step.step for step in redacted.results.steps}
    bounding = {step.id for step in redacted.results.steps if step.verification.status.bounds}
    attempts = [
        a
        for a in redacted.results.attempts
        if a.defense == OBSERVED
        and isinstance(a.scores.get("label_accuracy"), Score)
        and (a.step in bounding or "label_counts" in a.events)
    ]
    if not attempts:
        return None
    verified = [a for a in attempts if a.step in bounding]
    views = [view for view in redacted.labels if view.defense == OBSERVED]
    tables = _tables(views, steps)
    catalogue = redacted.results.catalogue
    metrics = label_metrics(catalogue)
    hidden = len(tables) - len(tables[:MOST_STEPS])
    return Section(
        "labels",
        "Labels",
        {
            "rows": _rates(attempts, bounding, metrics, {view.attack for view in views if not view.size_known}),
            "head": [catalogue.metric_label(name) for name in metrics],
            "lead": f"How well attacks recovered the number of examples of each class. {UNKNOWN} {LEADS[redacted.mode]}{_letters(views)}",
            "chart": _chart(verified, steps, catalogue.metric_label("label_accuracy")),
            "by_step": _by_step(verified, steps)[:MOST_ROWS],
            "attacks": list(dict.fromkeys(a.attack for a in verified)),
            "counts": tables[:MOST_STEPS],
            "pictures": _pictures([view for view in views if view.step in bounding]),
            "more": f"{hidden} more steps are in the private journal." if hidden else "",
        },
    )


def _letters(views: Sequence[LabelView]) -> str:
    """Return what letters for classes mean; empty where no table has them."""
    lettered = any(name.startswith("class ") for view in views for name, _, _ in view.rows or ())
    return " Letters stand for the classes, the most frequent first: the audit keeps no names." if lettered else ""


def _rates(
    attempts: Sequence[Attempt], bounding: AbstractSet[str], metrics: Sequence[str], unsized: AbstractSet[str]
) -> list[dict[str, Any]]:
    """Return one row per attack: exact label counts and means, with bounds.

    A mean has bounds if there are enough steps.

    Rates and means use the verified steps only. An unverifiable step is here only because it leaked, so such steps are counted
    separately.
    """
    rows = []
    for attack in dict.fromkeys(a.attack for a in attempts):
        mine = [a for a in attempts if a.attack == attack and a.step in bounding]
        others = sum(a.attack == attack and a.step not in bounding for a in attempts)
        exact = sum("label_counts" in a.events for a in mine)
        whole = ": every label, batch size unknown" if exact else ", batch size unknown"
        low, high = stats.lower_bound(exact, len(mine)), stats.upper_bound(exact, len(mine))
        rows.append(
            {
                "attack": attack,
                "granted": ", ".join(sorted({name for a in mine for name in a.granted})) or "nothing",
                "exact": f"{exact} of {len(mine)}"
                + (whole if attack in unsized else "")
                + (f" and {others} unverifiable" if others else ""),
                "bounds": rate_between(low, high),
                "means": [_mean([a.scores.get(name) for a in mine]) for name in metrics],
            }
        )
    return rows


def _mean(found: Sequence[Any]) -> str:
    values = [score.value for score in found if isinstance(score, Score)]
    if not values:
        return "no number"
    bounds = stats.mean_bounds(values)
    if bounds is None or bounds.lower is None or bounds.upper is None:
        return percent(fmean(values))
    return f"{percent(fmean(values))} ({rate_between(bounds.lower, bounds.upper)})"


def _chart(attempts: Sequence[Attempt], steps: Mapping[str, int], label: str) -> Markup | None:
    """Draw the label accuracy of each attack; None with fewer than two steps."""
    points = [SharePoint(steps[a.step], a.attack, a.scores["label_accuracy"].value) for a in attempts]  # type: ignore[union-attr]  # filtered above
    if len({point.step for point in points}) < 2:
        return None
    return share_chart(points, "Share of the labels that each attack got right, by training step", plain(label))


def _pictures(views: Sequence[LabelView]) -> list[dict[str, Any]]:
    """Return true against recovered counts of each attack, over all steps.

    Only mode full has them.
    """
    found: dict[str, dict[tuple[int, int], int]] = {}
    for view in views:
        for _, true, guess in view.rows or ():
            mine = found.setdefault(view.attack, {})
            mine[true, guess] = mine.get((true, guess), 0) + 1
    made = []
    for attack, points in found.items():
        total, right = sum(points.values()), sum(n for (true, guess), n in points.items() if true == guess)
        said = f"{attack}: {right:,} of {total:,} class counts are right ({percent(right / total)})"
        off = [abs(true - guess) for (true, guess), n in points.items() for _ in range(n) if true != guess]
        said += f"; the others are wrong by {fmean(off):.1f} examples on average." if off else "."
        made.append(
            {
                "said": said,
                "chart": counts_chart(points, plain(said)),
                "rows": [(*pair, n) for pair, n in sorted(points.items())],
            }
        )
    return made


def _by_step(attempts: Sequence[Attempt], steps: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the chart as a table: one row per step, one cell per attack."""
    attacks = list(dict.fromkeys(a.attack for a in attempts))
    found = {(a.step, a.attack): a.scores["label_accuracy"].value for a in attempts}  # type: ignore[union-attr]  # filtered by the caller
    return [
        {
            "step": steps[step],
            "cells": [percent(found[step, name]) if (step, name) in found else "no number" for name in attacks],
        }
        for step in dict.fromkeys(a.step for a in attempts)
    ]


def _tables(views: Sequence[LabelView], steps: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return one table per step: each class with its true and guessed counts."""
    tables = []
    for step in dict.fromkeys(view.step for view in views):
        mine = [view for view in views if view.step == step and view.rows is not None]
        if not mine:
            continue
        held: dict[str, int] = {}
        guessed: dict[str, dict[str, int]] = {view.attack: {} for view in mine}
        for view in mine:
            for name, true, guess in view.rows or ():
                held[name] = true
                guessed[view.attack][name] = guess
        names = sorted(held, key=lambda name: (-held[name], len(name), name))
        rows = [(name, held[name], [guessed[view.attack].get(name, 0) for view in mine]) for name in names]
        tables.append({"title": f"Step {steps[step]}", "attacks": [view.attack for view in mine], "rows": rows})
    return tables
