"""The report's part on labels: how many of each class were recovered, how surely, and when in the run.

Shapes data for `templates/labels.html.j2`. What may be shown was decided by redaction: class counts come only from `LabelView`s, whose
names are letters unless the mode is full; everything else is rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from markupsafe import Markup

from leakaudit import stats
from leakaudit.gate import percent
from leakaudit.reports.charts import SharePoint, share_chart
from leakaudit.reports.redaction import LabelView, RedactedResult
from leakaudit.scores import Attempt, Score, TextMode

OBSERVED = "none"
"""The defence of what the run shipped."""

MOST_STEPS = 24
"""Steps whose counts are shown in full."""

LEADS = {
    TextMode.HASH: "Class counts are not shown in this mode.",
    TextMode.MASKED: "Classes are named by how often they occur; their real names are private.",
    TextMode.FULL: "",
}

READINGS = (("label_accuracy", "labels right"), ("label_classes", "by class"), ("label_excess", "above chance"))
"""Metric -> heading of its column."""


def label_section(redacted: RedactedResult) -> dict[str, Any]:
    """Return what the template needs; `labels` is empty where no attack guessed labels."""
    steps = {step.id: step.step for step in redacted.results.steps}
    attempts = [
        a
        for a in redacted.results.attempts
        if a.defense == OBSERVED and isinstance(a.scores.get("label_accuracy"), Score)
    ]
    views = [view for view in redacted.labels if view.defense == OBSERVED]
    tables = _tables(views, steps)
    hidden = len(tables) - len(tables[:MOST_STEPS])
    return {
        "labels": _rates(attempts),
        "labels_head": [heading for _, heading in READINGS],
        "labels_lead": f"How many examples of each class the batch held, true and recovered. {LEADS[redacted.mode]}",
        "labels_chart": _chart(attempts, steps),
        "labels_by_step": _by_step(attempts, steps)[:200],
        "labels_attacks": list(dict.fromkeys(a.attack for a in attempts)),
        "labels_counts": tables[:MOST_STEPS],
        "labels_more": f"{hidden} more steps are in the private journal." if hidden else "",
    }


def _rates(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Return one row an attack: exact count vectors with their bounds, and means with theirs where there are steps enough."""
    rows = []
    for attack in dict.fromkeys(a.attack for a in attempts):
        mine = [a for a in attempts if a.attack == attack]
        exact = sum("label_counts" in a.events for a in mine)
        low, high = stats.lower_bound(exact, len(mine)), stats.upper_bound(exact, len(mine))
        rows.append(
            {
                "attack": attack,
                "granted": ", ".join(sorted({name for a in mine for name in a.granted})) or "nothing",
                "exact": f"{exact} of {len(mine)}",
                "bounds": f"{percent(low)} to {percent(high)}",
                "means": [_mean([a.scores.get(name) for a in mine]) for name, _ in READINGS],
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
    return f"{percent(fmean(values))} ({percent(bounds.lower)} to {percent(bounds.upper)})"


def _chart(attempts: Sequence[Attempt], steps: Mapping[str, int]) -> Markup | None:
    """Draw the share of labels that each attack got right against the training step, from two steps on."""
    points = [SharePoint(steps[a.step], a.attack, a.scores["label_accuracy"].value) for a in attempts]  # type: ignore[union-attr]  # filtered above
    if len({point.step for point in points}) < 2:
        return None
    return share_chart(points, "Share of the labels that each attack got right, by training step", "labels right")


def _by_step(attempts: Sequence[Attempt], steps: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the chart as a table: one row a step, one cell an attack."""
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
    """Return one table a step: a row for each class, its true count, and what each attack made of it."""
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
