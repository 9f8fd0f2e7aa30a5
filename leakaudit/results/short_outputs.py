"""Metrics in short outputs: cells of tables and experiment trackers.

They show a few of our own metrics, and every metric of another package, so that a new one needs no line here.
"""

from __future__ import annotations

from collections.abc import Iterable

_IN_CELLS = (
    "rougeL",
    "best_rl",
    "token_recall",
    "token_precision",
    "nerr",
    "masked_token_recall",
    "label_accuracy",
)
"""Metrics that a cell shows first, in this order."""

_NOT_IN_CELLS = frozenset(
    {
        "rouge1",
        "rouge2",
        "exact",
        "longest_run",
        "nerr_f1",
        "sentences_found",
        "sentence_precision",
        "label_exact",
        "label_classes",
        "label_excess",
        "label_hellinger",
    }
)
"""Metrics that a cell leaves out, because another metric or line says nearly the same. The sections on texts and on labels show
most of them."""

_IN_LOGS = ("exact", "rouge1", "token_recall", "label_accuracy")
"""Metrics that experiment trackers get first, in this order."""


def in_cells(scored: Iterable[str]) -> list[str]:
    """Return the metrics that a cell shows, in its order.

    >>> in_cells(["exact", "newest", "rougeL"])
    ['rougeL', 'newest']
    """
    scored = list(scored)
    ours = [name for name in _IN_CELLS if name in scored]
    return list(dict.fromkeys([*ours, *_others(scored)]))


def in_logs(scored: Iterable[str]) -> list[str]:
    """Return the metrics that experiment trackers get.

    >>> in_logs(["rougeL", "newest", "rouge1"])
    ['rouge1', 'newest']
    """
    scored = list(scored)
    return [*(name for name in _IN_LOGS if name in scored), *_others(scored)]


def about_labels(metrics: Iterable[str]) -> list[str]:
    """Return the metrics that the section on labels shows.

    `metrics` are all that score labels. `label_exact` is left out because it is a count of steps there, and `label_hellinger`
    because it says nearly the same as `label_classes`.
    """
    return ["label_accuracy", "label_classes", "label_excess", *_others(metrics)]


def _others(names: Iterable[str]) -> list[str]:
    """Return the metrics that are not ours."""
    return [name for name in names if name not in _NOT_IN_CELLS and name not in _IN_CELLS]
