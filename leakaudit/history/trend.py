"""The trend over nights: rates with their bounds, breaks, gaps and alarms.

It computes from the records of a history and from a baseline; it reads and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from leakaudit.gate.policy import NightsPolicy
from leakaudit.history.keys import changed, in_words
from leakaudit.history.record import NightRecord, Rate
from leakaudit.results.sequential import confidence_sequence, log_e_change

Series = tuple[str, int | None, str, str]
"""Event, shortest text, defence, attack."""

MOST_ABSENT = 7
"""Most nights in a row without a start that each have a place of their own. Our choice: a week."""

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
"""Names that no locale changes."""


@dataclass(frozen=True)
class Baseline:
    """The audit that nights are compared with."""

    run: str
    keys: Mapping[str, str]
    counts: Mapping[Series, tuple[int, int]]
    """Series -> leaks and steps."""


@dataclass(frozen=True)
class Point:
    """One place on the time axis: a night, or a gap."""

    night: str
    record: NightRecord | None = None
    """None where no night was started."""
    breaks: tuple[str, ...] = ()
    """Keys that changed since the night before; the sequence begins anew here."""
    new_version: bool = False
    """Whether the audited weights differ from those of the night before."""
    problem: str = ""
    """What is wrong with the record of the night; empty if it can be read or if there is none."""
    nights: int = 1
    """Nights that the place stands for: more than one where many in a row were not started."""

    @property
    def gap(self) -> str:
        """Why there is no result; empty if there is one."""
        if self.record is None:
            if self.nights > 1:
                return f"no night was started, {self.nights} in a row"
            return "its record cannot be read" if self.problem else "no night was started"
        return self.record.reason or "no results" if self.record.status == "gap" else ""


@dataclass(frozen=True)
class Trend:
    """The nights on a time axis."""

    points: tuple[Point, ...] = ()
    series: tuple[Series, ...] = field(default=())
    """Every series of the nights, those of the policy's rules first, in its order."""

    def date(self, night: str) -> str:
        """Return the date of a night, such as `2 Nov`.

        The time is added if a day has several nights.
        """
        days = [point.night[:10] for point in self.points]
        time = time_of(night)
        day = f"{time.day} {_MONTHS[time.month - 1]}"
        return f"{day} {time:%H:%M}" if len(days) > len(set(days)) else day

    @property
    def comparable(self) -> tuple[Point, ...]:
        """The points since the last break."""
        start = max((index for index, point in enumerate(self.points) if point.breaks), default=0)
        return self.points[start:]


def trend_of(
    records: Sequence[NightRecord],
    *,
    period: timedelta | None = None,
    last: int = 30,
    unreadable: Mapping[str, str] | None = None,
) -> Trend:
    """Return the last nights as a trend.

    Args:
        records: every night, earliest first.
        period: time from one night to the next; nights that are absent become gaps. None to show no such gaps.
        last: most points.
        unreadable: night -> what is wrong with its file. Such a night is a gap, unless another start of it can be read.
    """
    points: list[Point] = []
    before: NightRecord | None = None
    found: dict[str, NightRecord | str] = dict(unreadable or {}) | {record.night: record for record in records}
    for night in sorted(found):
        record = found[night]
        points += _absent(points[-1].night if points else "", night, period)
        if isinstance(record, str):
            points.append(Point(night, problem=record))
            continue
        if record.status == "gap":
            points.append(Point(record.night, record))
            continue
        breaks = tuple(changed(before.keys, record.keys)) if before else ()
        version = before is not None and bool(record.model_version) and before.model_version != record.model_version
        points.append(Point(record.night, record, breaks, version))
        before = record
    series = dict.fromkeys(rate.series for point in points[-last:] if point.record for rate in point.record.rates)
    return Trend(tuple(points[-last:]), tuple(series))


def with_sequences(
    rates: Sequence[Rate],
    keys: Mapping[str, str],
    before: Sequence[NightRecord],
    policy: NightsPolicy,
    baseline: Baseline | None = None,
) -> tuple[Rate, ...]:
    """Return the rates of a night with what all comparable nights say together.

    Args:
        rates: of the night.
        keys: of the night.
        before: earlier nights, earliest first. The sequence covers those since the last one whose keys differ.
        policy: confidence, prior and margin.
        baseline: the audit to compare with; ignored if its keys differ.
    """
    nights = _since_last_break(before, keys)
    same = baseline is not None and not changed(baseline.keys, keys)
    found = []
    for rate in rates:
        counts = [(old.fresh_k, old.fresh_n) for night in nights if (old := night.rate_of(rate.series)) is not None] + [
            (rate.fresh_k, rate.fresh_n)
        ]
        k, n = sum(leaks for leaks, _ in counts), sum(steps for _, steps in counts)
        interval = confidence_sequence(k, n, confidence=policy.confidence, prior=policy.prior)
        base = baseline.counts.get(rate.series) if same and baseline is not None else None
        log_e = None if base is None else log_e_change(base, counts, margin=policy.margin, prior=policy.prior)
        found.append(
            rate.model_copy(update={"lower": interval.lower, "upper": interval.upper, "so_far": (k, n), "log_e": log_e})
        )
    return tuple(found)


def is_worse(rates: Sequence[Rate], policy: NightsPolicy) -> bool:
    """Return whether the nights are worse than the baseline.

    The rates of all attacks together are tested, each at an equal part of the error, so that the chance of a false alarm over all nights is
    `1 - confidence` at most.
    """
    tested = [rate.log_e for rate in rates if rate.attack == "any" and rate.log_e is not None]
    return bool(tested) and max(tested) >= math.log(len(tested) / (1 - policy.confidence))


def why_not_compared(baseline: Baseline | None, keys: Mapping[str, str]) -> str:
    """Return why a night is not compared with the baseline; empty if it is."""
    if baseline is None:
        return "no baseline is set: `leakaudit baseline set RUN` sets one"
    names = changed(baseline.keys, keys)
    if not names:
        return ""
    verb = "differs" if len(names) == 1 else "differ"
    return f"{in_words(names)} {verb} from the baseline's: `leakaudit baseline set RUN` sets another one"


def _since_last_break(records: Sequence[NightRecord], keys: Mapping[str, str]) -> list[NightRecord]:
    """Return the audited nights at the end of a history whose keys agree."""
    found: list[NightRecord] = []
    for record in reversed(records):
        if record.status == "gap":
            continue
        if changed(record.keys, keys):
            break
        found.insert(0, record)
    return found


def _absent(last: str, this: str, period: timedelta | None) -> list[Point]:
    """Return the nights between two nights that nobody started.

    A long row of them is one place, at its first night. It would hide the nights before it, as after a change of the period.
    """
    if not last or period is None:
        return []
    first = time_of(last) + period
    missing = max(0, math.ceil((time_of(this) - first) / period - 0.5))
    if missing > MOST_ABSENT:
        return [Point(id_of(first), nights=missing)]
    return [Point(id_of(first + number * period)) for number in range(missing)]


def time_of(night: str) -> datetime:
    """Return the beginning of a night's period."""
    return datetime.strptime(night.replace("Z", "+0000"), "%Y-%m-%dT%H%M%z")


def id_of(time: datetime) -> str:
    """Return the id of the night whose period begins at a time in UTC."""
    return f"{time:%Y-%m-%dT%H%MZ}"
