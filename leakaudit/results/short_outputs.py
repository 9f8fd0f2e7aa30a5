"""Metrics in short outputs: cells of tables and lines of the trainer's log.

They show a few of our own metrics, and every metric of another package, so that a new one needs no line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

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

_IN_LOGS: Mapping[str, str] = MappingProxyType(
    {"exact": "exact_rate", "rouge1": "r1", "token_recall": "token_recall", "label_accuracy": "label_accuracy"}
)
"""Metric -> its name in the trainer's log."""


def in_cells(scored: Iterable[str]) -> list[str]:
    """Return the metrics that a cell shows, in its order.

    >>> in_cells(["exact", "newest", "rougeL"])
    ['rougeL', 'newest']
    """
    scored = list(scored)
    ours = [name for name in _IN_CELLS if name in scored]
    return list(dict.fromkeys([*ours, *_others(scored)]))


def in_logs(scored: Iterable[str]) -> dict[str, str]:
    """Return metric -> name in the log, for the metrics that a log shows.

    >>> in_logs(["rouge1", "newest", "rougeL"])
    {'rouge1': 'r1', 'newest': 'newest'}
    """
    scored = list(scored)
    return {name: key for name, key in _IN_LOGS.items() if name in scored} | {name: name for name in _others(scored)}


def about_labels(metrics: Iterable[str]) -> list[str]:
    """Return the metrics that the section on labels shows.

    `metrics` are all that score labels. `label_exact` is left out because it is a count of steps there, and `label_hellinger`
    because it says nearly the same as `label_classes`.
    """
    return ["label_accuracy", "label_classes", "label_excess", *_others(metrics)]


def _others(names: Iterable[str]) -> list[str]:
    """Return the metrics that are not ours."""
    return [name for name in names if name not in _NOT_IN_CELLS and name not in _IN_CELLS]
