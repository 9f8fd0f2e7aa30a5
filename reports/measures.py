"""Metrics in reports: which are shown, in which order and how.

Labels come from the catalogue of the results, so that a new metric is shown without a line here.
"""

from __future__ import annotations

from collections.abc import Sequence

from leakaudit.gate.wording import number, percent
from leakaudit.results.schema import Attempt, Catalogue, SequenceScore
from leakaudit.results.summary import pooled

_FIRST = ("rougeL", "token_recall", "token_precision", "masked_token_recall", "label_accuracy")
"""Metrics that a cell names before all others, in this order."""

_LEFT_OUT = frozenset(
    {"rouge1", "rouge2", "exact", "longest_run", "label_exact", "label_classes", "label_excess", "label_hellinger"}
)
"""Metrics that a cell leaves out, because another one says nearly the same. The sections on texts and on labels show them."""

_SHARES = frozenset({"token_recall", "token_precision", "masked_token_recall", "longest_run"})
"""Metrics that are shares of tokens, which are read in per cent."""

_ABOUT_LABELS = ("label_accuracy", "label_classes", "label_excess")
"""Metrics in the section on labels, in this order; `label_exact` stands there as a count of steps."""


def means_of(attempts: Sequence[Attempt], catalogue: Catalogue, *, in_per_cent: bool = True) -> list[str]:
    """Return the mean of every metric that a cell shows, such as `token recall 44%`.

    Args:
        attempts: of one attack under one defence.
        catalogue: holds the labels.
        in_per_cent: whether shares of tokens are written in per cent.
    """
    measured = (name for attempt in attempts for name in attempt.scores)
    names = [name for name in dict.fromkeys([*_FIRST, *measured]) if name not in _LEFT_OUT]
    means = {name: pooled(attempt.scores.get(name) for attempt in attempts) for name in names}
    return [
        f"{catalogue.metric_label(name)} {_written(name, mean) if in_per_cent else number(mean)}"
        for name, mean in means.items()
        if mean is not None
    ]


def scores_of(found: SequenceScore, catalogue: Catalogue) -> list[str]:
    """Return every score of one text, such as `ROUGE-L 0.44`.

    `exact` is left out, because the report says it in words.
    """
    shares = [name for name in _FIRST if name in _SHARES]
    names = dict.fromkeys([*shares, "longest_run", *sorted(found.scores)])
    hidden = {"exact", *(["longest_run"] if found.exact else [])}
    return [
        f"{catalogue.metric_label(name)} {_written(name, found.scores[name])}"
        for name in names
        if name in found.scores and name not in hidden
    ]


def label_metrics(catalogue: Catalogue) -> list[str]:
    """Return the metrics of a section on labels."""
    others = [name for name, entry in catalogue.metrics.items() if entry.level == "step" and name not in _LEFT_OUT]
    return list(dict.fromkeys([*_ABOUT_LABELS, *others]))


def _written(name: str, value: float) -> str:
    return percent(value) if name in _SHARES else number(value)
