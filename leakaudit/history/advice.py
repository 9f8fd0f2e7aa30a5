"""What a reader of a trend should do, in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from leakaudit.gate.wording import at_least, at_most, percent
from leakaudit.history.keys import in_words
from leakaudit.history.record import NightRecord, Rate
from leakaudit.history.trend import Point, Series, Trend
from leakaudit.results.sequential import PRIOR, clean_steps_for
from leakaudit.results.wording import counted


@dataclass(frozen=True)
class Advice:
    """What to do, and about which rate."""

    text: str
    """One to four sentences."""
    series: Series | None = None
    """The rate that they are about; None if no night has one."""


@dataclass(frozen=True)
class _Night:
    """A comparable night with a rate."""

    point: Point
    record: NightRecord
    rate: Rate


def advice(trend: Trend, *, confidence: float = 0.95, prior: tuple[float, float] = PRIOR) -> Advice:
    """Say what to do after the last night.

    An alarm comes first, then the rate that is worst against its limit.

    Args:
        trend: the nights; their rates have the bounds of the sequence.
        confidence: of the sequence.
        prior: of the sequence.
    """
    before = _without_results(trend)
    by_series = {series: nights for series in trend.series if (nights := _comparable(trend, series))}
    if not by_series:
        return Advice(f"{before}No night could be judged: the table gives the reasons.".strip())
    last = max((nights[-1] for nights in by_series.values()), key=lambda night: night.point.night).record
    if last.worse:
        series = max(by_series, key=lambda one: _alarm(by_series[one][-1].rate))
        return Advice(before + _worse(trend, by_series[series]), series)
    limited = [one for one in by_series if by_series[one][-1].rate.limit is not None] or list(by_series)
    series = max(limited, key=lambda one: _urgency(by_series[one][-1].rate))
    said = [before.strip(), _began(trend), _state(trend, by_series[series], confidence, prior)]
    return Advice(" ".join(filter(None, said)), series)


def _comparable(trend: Trend, series: Series) -> list[_Night]:
    """Return the nights since the last break that have a rate."""
    return [
        _Night(point, point.record, rate)
        for point in trend.comparable
        if point.record is not None and (rate := point.record.rate_of(series)) is not None
    ]


def _without_results(trend: Trend) -> str:
    """Return a sentence on the nights at the end that have no results."""
    gaps = 0
    while gaps < len(trend.points) and trend.points[-1 - gaps].gap:
        gaps += 1
    if not gaps:
        return ""
    which = "The last night has" if gaps == 1 else f"The last {gaps} nights have"
    return f"{which} no results ({trend.points[-1].gap}): see to that first. "


def _began(trend: Trend) -> str:
    """Return a sentence on the last break; empty without one."""
    first = trend.comparable[0]
    if not first.breaks:
        return ""
    what = in_words(list(first.breaks)) if len(first.breaks) <= 2 else f"{len(first.breaks)} settings"
    return f"The comparison began anew on {trend.date(first.night)}, with a change of {what}."


# ------------------------------------------------------------------------------------------------------------- the alarm
def _alarm(rate: Rate) -> float:
    """Return how strong the alarm of a rate is.

    Only the rates of all attacks together raise one.
    """
    return -math.inf if rate.log_e is None or rate.attack != "any" else rate.log_e


def _worse(trend: Trend, nights: Sequence[_Night]) -> str:
    since = next((night for night in nights if night.record.worse), nights[-1])
    onset = _onset(nights)
    when = trend.date(since.point.night)
    same = onset.point.night == since.point.night
    began = "" if same else f"; the change most likely came on {trend.date(onset.point.night)}"
    return f"Worse than the baseline since the night of {when}{began}. {_look(trend, onset)}"


def _onset(nights: Sequence[_Night]) -> _Night:
    """Return the night from which a higher rate is most likely.

    It is the night with the largest likelihood of one rate before it and another one from it on.
    """

    def likelihood(start: int) -> float:
        before, after = ([night.rate for night in part] for part in (nights[:start], nights[start:]))
        if start and _rate(before) >= _rate(after):
            return -math.inf
        return _log_likelihood(before) + _log_likelihood(after)

    return nights[max(range(len(nights)), key=likelihood)]


def _log_likelihood(rates: Sequence[Rate]) -> float:
    k, n = sum(rate.k for rate in rates), sum(rate.n for rate in rates)
    return sum(count * math.log(count / n) for count in (k, n - k) if count)


def _rate(rates: Sequence[Rate]) -> float:
    return sum(rate.k for rate in rates) / max(1, sum(rate.n for rate in rates))


def _look(trend: Trend, night: _Night) -> str:
    """Return where to look for the cause of a change that came in a night."""
    date = trend.date(night.point.night)
    if night.point.breaks:
        return f"Look at what changed on {date}: {in_words(list(night.point.breaks))}."
    if night.point.new_version:
        return f"Look at the new model version of {date}: no other recorded setting changed."
    return f"No recorded setting changed on {date}: look at the code and the data of that training."


# -------------------------------------------------------------------------------------------------------- without alarm
def _urgency(rate: Rate) -> int:
    """Return how bad a rate is against its limit."""
    k, _ = rate.so_far or (rate.k, rate.n)
    if rate.limit is not None and ((rate.lower or 0.0) > rate.limit or (k and not rate.limit)):
        return 3
    if k:
        return 2
    return int(rate.limit is not None and (1.0 if rate.upper is None else rate.upper) > rate.limit)


def _state(trend: Trend, nights: Sequence[_Night], confidence: float, prior: tuple[float, float]) -> str:
    rate = nights[-1].rate
    k, n = rate.so_far or (rate.k, rate.n)
    began_before = n > sum(night.rate.fresh_n for night in nights)
    since = (
        f" since before {trend.date(nights[0].point.night)}"
        if began_before
        else f" since {trend.date(nights[0].point.night)}"
    )
    seen = f"{k} of {counted(n, 'step')} leaked{since}" if k else f"No night leaked{since}"
    if not n:
        return f"No step could be judged{since}: the rules of the night say why."
    upper = "" if rate.upper is None else f"the leak rate is at most {at_most(rate.upper)}, however often you look"
    if rate.limit is not None and k and _urgency(rate) == 3:
        lower = f", a rate of at least {at_least(rate.lower or 0.0)}, however often you look" if rate.limit else ""
        allows = f"the policy allows {percent(rate.limit)}" if rate.limit else "the policy allows no leak"
        return f"{seen}{lower}; {allows}. {_look(trend, _onset(nights))}"
    said = f"{seen}; {upper}" if upper else seen
    return said + _until_the_limit(rate, (k, n), nights, confidence, prior)


def _until_the_limit(
    rate: Rate, so_far: tuple[int, int], nights: Sequence[_Night], confidence: float, prior: tuple[float, float]
) -> str:
    """Return the end of the sentence: whether the limit is met, and what it takes."""
    if not rate.limit:
        return ". The policy allows no leak." if rate.limit == 0 else "."
    limit = f"the limit of {percent(rate.limit)}"
    steps = clean_steps_for(rate.limit, so_far=so_far, confidence=confidence, prior=prior)
    if steps == 0:
        return f", within {limit}. There is nothing to do."
    fresh = sum(night.rate.fresh_n for night in nights) / len(nights)
    if not nights[-1].rate.fresh_n or not fresh:
        return f". The last night repeated steps of earlier nights, which is no new evidence: audit other steps until {limit} can be met."
    if steps is None:
        return f". No number of nights like these can meet {limit}."
    more = counted(math.ceil(steps / fresh), "more night")
    return f". It takes {more} like these without a leak until {limit} can be met."
