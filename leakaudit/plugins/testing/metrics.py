"""Checks of what every metric promises."""

from __future__ import annotations

from typing import Any, get_args

from leakaudit.plugins.metric_protocol import Batch, LabelCounts, Level, Pair, TaggedEntities
from leakaudit.plugins.testing.promises import can_be_shown, describes_itself, instance, promise


def check_metric(metric: Any) -> None:
    """Check a metric against what every metric promises.

    Args:
        metric: the class, or an instance if a knob has to be set.

    Raises:
        AssertionError: a promise is broken. The message says what was asked and what was found.
    """
    metric = instance(metric)
    describes_itself(metric)
    can_be_shown(metric)
    levels = get_args(Level)
    promise(metric.level in levels, metric, f"`level` is one of {', '.join(levels)}", repr(metric.level))
    promise(
        metric.higher_is_better is True, metric, "a higher number is better for the attacker", metric.higher_is_better
    )
    perfect, partial, empty = (metric(outcome) for outcome in _outcomes(metric.level))
    promise(perfect == 1.0, metric, "the perfect guess scores 1", perfect)
    promise(
        partial is not None and 0 <= partial <= 1, metric, "a guess that is partly right scores from 0 to 1", partial
    )
    if metric.needs_guess:
        promise(
            empty is None, metric, "without a guess there is nothing to measure, as `needs_guess` says: None", empty
        )
    else:
        promise(empty == 0.0, metric, "no guess at all scores 0, unless `needs_guess` is stated", empty)


def _outcomes(level: str) -> tuple[Any, Any, Any]:
    """Return a perfect guess, a partly right guess and an empty guess."""
    if level == "step":
        perfect, partial, empty = (LabelCounts((2, 1), guess) for guess in ((2, 1), (1, 2), (0, 0)))
        return perfect, partial, empty
    if level == "batch":
        whole, part, nothing = _pairs()
        return Batch((whole,), 1), Batch((part,), 1), Batch((nothing,), 0)
    return _pairs()


def _pairs() -> tuple[Pair, Pair, Pair]:
    return _pair((5, 6, 7), "old dog ran"), _pair((7, 5), "ran old"), _pair((), "")


def _pair(guess: tuple[int, ...], text: str) -> Pair:
    names, tagged = ("dog", "ran"), TaggedEntities(("dog", "ran"), tuple(text.split()[-2:]))
    return Pair((5, 6, 7), guess, "old dog ran", text, masked_ids=(5, 7), entities=names, tagged=tagged)
