"""The section on the nights up to this audit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from leakaudit.gate.events import EVENTS
from leakaudit.gate.wording import at_least, at_most, percent
from leakaudit.history.keys import in_words
from leakaudit.history.record import Rate
from leakaudit.history.trend import Point, Series, Trend, time_of
from leakaudit.reports.escaping import plain
from leakaudit.reports.nights import Nights
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.reports.trend_chart import NARROW, SMALL, WIDE, NightMark, trend_chart
from leakaudit.results.wording import counted

MOST_SMALL = 8
"""Most small charts. Our choice: two rows of four on a wide screen."""
_LONGEST_NAME = 18
"""Letters of the name of a break in the chart."""


def section(redacted: RedactedResult) -> Section | None:
    """Show the leak rate of each night, and say what to do; None without other nights."""
    nights = redacted.nights
    if nights is None:
        return None
    trend, main = nights.trend, nights.advice.series
    further = [series for series in trend.series if series != main]
    marks = _marks(trend, main) if main is not None else []
    words = _in_words(trend, main) if main is not None else ""
    caption = f"Share of the steps of each night in which {series_in_words(main)}" if main is not None else ""
    draw = (nights.period, plain(caption), plain(words))
    return Section(
        "trend",
        "Night by night",
        {
            "lead": nights.advice.text,
            "not_compared": nights.not_compared,
            "caption": caption,
            "wide": trend_chart(marks, WIDE, *draw) if main is not None else "",
            "narrow": trend_chart(marks, NARROW, *draw) if main is not None else "",
            "legend": _legend(marks, nights),
            "gaps": _gaps(trend),
            "breaks": [f"{trend.date(point.night)}: {in_words(list(point.breaks))}" for point in _breaks(trend)],
            "small": [_small(nights, series) for series in further[:MOST_SMALL]],
            "more": max(0, len(further) - MOST_SMALL),
            "rows": [_row(point, main) for point in reversed(trend.points)],
            "series": [_series_row(trend, series) for series in trend.series],
        },
    )


def series_in_words(series: Series) -> str:
    """Return what a rate is of, such as `a sentence came back (shipped, any attack)`."""
    event, min_tokens, defense, attack = series
    what = EVENTS[event].short if event in EVENTS else event
    length = f"{min_tokens}+ tokens, " if min_tokens is not None else ""
    return f"{what} ({length}{defense}, {'any attack' if attack == 'any' else attack})"


def _rate(point: Point, series: Series) -> Rate | None:
    return point.record.rate_of(series) if point.record is not None else None


def _breaks(trend: Trend) -> list[Point]:
    return [point for point in trend.points if point.breaks]


# ------------------------------------------------------------------------------------------------------------ the charts
def _marks(trend: Trend, series: Series) -> list[NightMark]:
    return [_mark(point, _rate(point, series)) for point in trend.points]


def _mark(point: Point, rate: Rate | None) -> NightMark:
    name = plain(", ".join(point.breaks))
    return NightMark(
        at=time_of(point.night),
        rate=rate.k / rate.n if rate is not None and rate.n else None,
        state="clean" if rate is None else "leak" if rate.k else "open" if rate.unjudged else "clean",
        lower=rate.lower if rate is not None else None,
        upper=rate.upper if rate is not None else None,
        limit=rate.limit if rate is not None else None,
        gap=bool(point.gap) or rate is None or not rate.n,
        changed=name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…",
        new_version=point.new_version,
        worse=point.record is not None and point.record.worse,
    )


def _in_words(trend: Trend, series: Series) -> str:
    """Return what a chart shows, for people who do not see it."""
    first, last = (trend.date(point.night) for point in (trend.points[0], trend.points[-1]))
    rates = [(point, rate) for point in trend.points if (rate := _rate(point, series)) is not None and rate.n]
    leaks = [f"{trend.date(point.night)} {rate.k} of {rate.n}" for point, rate in rates if rate.k]
    said = [f"{counted(len(trend.points), 'night')} from {first} to {last}, {len(rates)} with a rate."]
    said.append(f"Nights with a leak: {', '.join(leaks)}." if leaks else "No night had a leak.")
    if rates and rates[-1][1].upper is not None:
        said.append(f"The last bounds are {_bounds(rates[-1][1])}.")
    said += [
        f"New comparison on {trend.date(point.night)}: {in_words(list(point.breaks))}." for point in _breaks(trend)
    ]
    said += [f"No results on {line}." for line in _gaps(trend)]
    return " ".join(said)


def _small(nights: Nights, series: Series) -> dict[str, Any]:
    words = _in_words(nights.trend, series)
    name = series_in_words(series)
    chart = trend_chart(_marks(nights.trend, series), SMALL, nights.period, plain(name), plain(words))
    return {"name": name, "chart": chart}


def _legend(marks: Sequence[NightMark], nights: Nights) -> list[dict[str, str]]:
    """Return the marks that are drawn and what they mean."""
    states = {mark.state for mark in marks if mark.rate is not None}
    sure = percent(nights.confidence)
    limits = {mark.limit for mark in marks if mark.limit is not None}
    found = [
        ("leak", "a night with a leak", "leak" in states),
        ("clean", "a night without a leak", "clean" in states),
        ("open", "a night without a leak, in which some steps could not be judged", "open" in states),
        ("band", f"bounds over the nights so far, {sure} however often you look", any(m.upper is not None for m in marks)),
        ("limit", f"limit of the policy ({', '.join(map(percent, sorted(limits)))})", bool(limits)),
        ("break", "something changed, named above the line: the bounds begin anew", any(m.changed for m in marks)),
        ("gap", "no result", any(m.gap for m in marks)),
        ("version", "new version of the model", any(m.new_version for m in marks)),
        ("worse", "worse than the baseline", any(m.worse for m in marks)),
    ]  # fmt: skip
    return [{"mark": mark, "words": words} for mark, words, drawn in found if drawn]


# ------------------------------------------------------------------------------------------------------------ the tables
def _gaps(trend: Trend) -> list[str]:
    """Return the nights without results, with the reason.

    Neighbours with the same reason share a line.
    """
    lines = []
    for reason, group in groupby(trend.points, key=lambda point: point.gap):
        if reason:
            nights = [trend.date(point.night) for point in group]
            lines.append(f"{nights[0]}{f' to {nights[-1]}' if len(nights) > 1 else ''}: {reason}")
    return lines


def _row(point: Point, series: Series | None) -> dict[str, str]:
    record = point.record
    rate = _rate(point, series) if series is not None else None
    changes = [f"changed: {in_words(list(point.breaks))}"] if point.breaks else []
    changes += ["new version of the model"] if point.new_version else []
    if record is not None:
        changes += ["worse than the baseline"] if record.worse else []
        changes += [f"{record.repeated} of {counted(record.steps, 'step')} repeated"] if record.repeated else []
        changes += [record.since_last] if record.since_last else []
    return {
        "night": point.night.replace("T", " ").removesuffix("Z").removesuffix(" 0000"),
        "verdict": "no results" if record is None or record.verdict is None else record.verdict.value,
        "count": "no rate" if rate is None or not rate.n else f"{rate.k} of {rate.n}",
        "bounds": _bounds(rate) if rate is not None else "none",
        "changes": "; ".join([point.gap] if point.gap else changes),
    }


def _bounds(rate: Rate) -> str:
    if rate.lower is None or rate.upper is None:
        return "none"
    return f"{at_least(rate.lower)} to {at_most(rate.upper)}"


def _series_row(trend: Trend, series: Series) -> dict[str, str]:
    rates = [(point, rate) for point in trend.points if (rate := _rate(point, series)) is not None]
    last = rates[-1][1]
    leaks = [f"{trend.date(point.night)}: {rate.k} of {rate.n}" for point, rate in rates if rate.k]
    so_far = f"{last.so_far[0]} of {last.so_far[1]}" if last.so_far is not None else "none"
    return {
        "name": series_in_words(series),
        "limit": "none" if last.limit is None else percent(last.limit),
        "so_far": so_far,
        "bounds": _bounds(last),
        "leaks": ", ".join(leaks) or "none",
    }
