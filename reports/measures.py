"""Metrics in reports: their choice, order and format.

Labels come from the catalogue of the results, so that a new metric needs no line here.
"""

from __future__ import annotations

from collections.abc import Sequence

from leakaudit.gate.wording import number, percent
from leakaudit.results.schema import Attempt, Catalogue, Results, Score, SequenceScore
from leakaudit.results.short_outputs import about_labels, in_cells
from leakaudit.results.summary import pooled, seeds_of, spread_over_seeds, texts_found
from leakaudit.results.wording import counted

_SHARES = ("token_recall", "token_precision", "nerr", "masked_token_recall", "longest_run")
"""Metrics that are shares of tokens or of named entities. They are written as percentages, and come first in the scores of a text."""


def means_of(attempts: Sequence[Attempt], results: Results, *, in_per_cent: bool = True) -> list[str]:
    """Return the mean of every metric that a cell shows, such as `token recall 44%`.

    After a simulation with several seeds the standard deviation over the seeds follows, as in `ROUGE-L 0.44 ± 0.05`.

    Args:
        attempts: attempts of one attack under one defence.
        results: hold the labels of metrics, and the seeds of steps.
        in_per_cent: whether shares of tokens are written as percentages.
    """
    scored = dict.fromkeys(name for attempt in attempts for name in attempt.scores)
    means = {name: pooled(attempt.scores.get(name) for attempt in attempts) for name in in_cells(scored)}
    spread = spread_over_seeds(attempts, seeds_of(results.steps))

    def written(name: str, value: float) -> str:
        return _written(name, value) if in_per_cent else number(value)

    return [
        f"{results.catalogue.metric_label(name)} {written(name, mean)}"
        + (f" ± {written(name, spread[name])}" if name in spread else "")
        for name, mean in means.items()
        if mean is not None
    ]


def found_in(attempts: Sequence[Attempt]) -> str:
    """Return how many texts a guess resembles, such as `1 of 128 texts resembled`.

    Empty if no attempt guessed a text.
    """
    found = texts_found(attempts)
    if found is None:
        return ""
    scored = [score for a in attempts if isinstance(score := a.scores.get("sentences_found"), Score)]
    return f"{found:,} of {counted(sum(score.n for score in scored), 'text')} resembled"


def scores_of(found: SequenceScore, catalogue: Catalogue) -> list[str]:
    """Return every score of one text, such as `ROUGE-L 0.44`.

    `exact` is left out, because the report says it in words, and `sentences_found`, because ROUGE-L says it.
    """
    names = dict.fromkeys([*_SHARES, *sorted(found.scores)])
    hidden = {"exact", "sentences_found", *(["longest_run"] if found.exact else [])}
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
