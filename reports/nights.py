"""The nights up to an audit, reduced to what its report may show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from leakaudit.history.advice import Advice, advice
from leakaudit.history.saved_trend import SavedTrend
from leakaudit.history.trend import Point, Trend
from leakaudit.reports.allowlist import allowed, without_paths


@dataclass(frozen=True)
class Nights:
    """A trend without marks, keys and paths."""

    trend: Trend
    advice: Advice
    period: timedelta
    confidence: float
    not_compared: str
    """Why the last night is not compared with a baseline; empty if it is."""


def nights_of(saved: SavedTrend, run: str) -> Nights | None:
    """Return the nights that a report may show.

    None if the audit is not one of them, or if it is the only one.

    Args:
        saved: the trend in the folder of the audit.
        run: id of the audit.
    """
    trend = saved.trend()
    if len(trend.points) < 2 or run not in [point.record.run for point in trend.points if point.record]:
        return None
    clean = replace(trend, points=tuple(_allowed(point) for point in trend.points))
    return Nights(
        trend=clean,
        advice=advice(clean, confidence=saved.confidence, prior=saved.prior),
        period=timedelta(seconds=saved.period_s),
        confidence=saved.confidence,
        not_compared=without_paths(saved.not_compared),
    )


def _allowed(point: Point) -> Point:
    """Return a point with its public fields.

    The sentence on a change of keys may name the data, so it is left out.
    """
    if point.record is None:
        return point
    since = "" if point.breaks else without_paths(point.record.since_last)
    clean = {"reason": without_paths(point.record.reason), "since_last": since}
    return replace(point, record=allowed(point.record.model_copy(update=clean)))
