"""Metrics in reports: their choice, order and format.

Labels come from the catalogue of the results, so that a new metric needs no line here.
"""

from __future__ import annotations

from collections.abc import Sequence

from leakaudit.gate.wording import number, percent
from leakaudit.results.schema import Attempt, Catalogue, SequenceScore
from leakaudit.results.short_outputs import about_labels, in_cells
from leakaudit.results.summary import pooled

_SHARES = ("token_recall", "token_precision", "masked_token_recall", "longest_run")
"""Metrics that are shares of tokens. They are written as percentages, and come first in the scores of a text."""


def means_of(attempts: Sequence[Attempt], catalogue: Catalogue, *, in_per_cent: bool = True) -> list[str]:
    """Return the mean of every metric that a cell shows, such as `token recall 44%`.

    Args:
        attempts: attempts of one attack under one defence.
        catalogue: holds the labels.
        in_per_cent: whether shares of tokens are written as percentages.
    """
    scored = dict.fromkeys(name for attempt in attempts for name in attempt.scores)
    means = {name: pooled(attempt.scores.get(name) for attempt in attempts) for name in in_cells(scored)}
    return [
        f"{catalogue.metric_label(name)} {_written(name, mean) if in_per_cent else number(mean)}"
        for name, mean in means.items()
        if mean is not None
    ]


def scores_of(found: SequenceScore, catalogue: Catalogue) -> list[str]:
    """Return every score of one text, such as `ROUGE-L 0.44`.

    `exact` is left out, because the report says it in words.
    """
    names = dict.fromkeys([*_SHARES, *sorted(found.scores)])
    hidden = {"exact", *(["longest_run"] if found.exact else [])}
    return [
        f"{catalogue.metric_label(name)} {_written(name, found.scores[name])}"
        for name in names
        if name in found.scores and name not in hidden
    ]


def label_metrics(catalogue: Catalogue) -> list[str]:
    """Return the metrics that the section on labels shows."""
    return about_labels(name for name, entry in catalogue.metrics.items() if entry.level == "step")


def _written(name: str, value: float) -> str:
    return percent(value) if name in _SHARES else number(value)
