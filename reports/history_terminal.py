"""The printed form of the nights: a table, a small chart and one sentence.

The chart is plain text. `ASCII` replaces `BLOCKS` where the terminal's encoding cannot show them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from leakaudit.gate.wording import at_least, at_most
from leakaudit.history.keys import in_words
from leakaudit.history.record import Rate
from leakaudit.history.trend import Point, Series, Trend
from leakaudit.reports.escaping import plain
from leakaudit.results.wording import counted

_HEIGHT = 6
"""Lines of the chart. Our choice: table, chart and sentence of two weeks fit a screen of 24 lines."""

_LABEL = 8
"""Columns of the chart's axis."""

_LEAST_TEXT = 20
"""Columns that the last column of the table gets in the narrowest terminal."""

_COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "ERROR": "magenta"}


@dataclass(frozen=True)
class Marks:
    """The characters of a chart."""

    bar: str
    """A cell of a bar, from empty to full."""
    upper: str
    limit: str
    axis: str
    gap: str
    unjudged: str
    break_: str
    version: str

    @property
    def all(self) -> str:
        """Every character, to try an encoding."""
        return "".join(vars(self).values())


BLOCKS = Marks(bar=" ▁▂▃▄▅▆▇█", upper="━", limit="┄", axis="─", gap="x", unjudged="?", break_="│", version="▲")
ASCII = Marks(bar=" :#", upper="=", limit=".", axis="-", gap="x", unjudged="?", break_="|", version="^")


def marks_for(encoding: str) -> Marks:
    """Return the characters that an encoding can show."""
    try:
        BLOCKS.all.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def history_lines(trend: Trend, *, width: int, marks: Marks, confidence: float | None) -> list[Text]:
    """Return table, chart and sentence, line by line.

    Args:
        trend: the nights.
        width: columns of the terminal.
        marks: characters of the chart.
        confidence: of the bounds; None if it is unknown.
    """
    first = trend.series[0] if trend.series else None
    lines = [*_table(trend.points, first, width), Text("")]
    if first is not None:
        lines += [Text(line) for line in [*chart(trend.points, first, width, marks), ""]]
    return [*lines, *(Text(line) for line in textwrap.wrap(bound_sentence(trend, confidence), max(_LEAST_TEXT, width)))]


def subject_of(series: Series) -> str:
    """Return what a rate is of, such as "exact_sentence (shipped, any attack)"."""
    event, min_tokens, defense, attack = series
    length = "" if min_tokens is None else f", {min_tokens} tokens or more"
    return f"{event} ({defense}, {'any attack' if attack == 'any' else attack}{length})"


# ------------------------------------------------------------------------------------------------------------- table
def _table(points: Sequence[Point], first: Series | None, width: int) -> list[Text]:
    """Return the table; its last column is wrapped."""
    head = ("night", "verdict", "leaks", "at most", "weights", "exit", "what changed")
    rows = [_row(point, first) for point in points]
    widths = [max(cell_len(row[at]) for row in (head, *rows)) for at in range(len(head) - 1)]
    indent = sum(widths) + 2 * len(widths)
    found = []
    for number, row in enumerate((head, *rows)):
        cells = [cell + " " * (size - cell_len(cell)) for cell, size in zip(row, widths, strict=False)]
        text = textwrap.wrap(row[-1], max(_LEAST_TEXT, width - indent)) or [""]
        line = Text("  ".join([*cells, text[0]]).rstrip(), style="" if number else "bold")
        if number and row[1] in _COLOURS:
            line.stylize(_COLOURS[row[1]], widths[0] + 2, widths[0] + 2 + len(row[1]))
        found += [line, *(Text(" " * indent + more) for more in text[1:])]
    return found


def _row(point: Point, first: Series | None) -> tuple[str, ...]:
    record, rate = point.record, _rate(point, first)
    changes = [point.gap] if point.gap else []
    changes += [f"{in_words(list(point.breaks))}: not compared with the nights before"] if point.breaks else []
    if record is not None and not point.gap:
        changes += ["worse than the baseline"] if record.worse else []
        changes += [f"{counted(record.repeated, 'step')} repeated, no new evidence"] if record.repeated else []
        changes += [f"{counted(rate.unjudged, 'step')} not judged"] if rate is not None and rate.unjudged else []
    cells = (
        point.night,
        "gap" if point.gap else str(record.verdict) if record is not None and record.verdict else "none",
        "" if point.gap else f"{rate.k}/{rate.n}" if rate is not None and rate.n else "not judged",
        at_most(rate.upper) if rate is not None and rate.upper is not None else "",
        "new" if point.new_version else "",
        str(record.exit_code) if record is not None else "",
        "; ".join(changes),
    )
    return tuple(plain(cell) for cell in cells)


def _rate(point: Point, series: Series | None) -> Rate | None:
    return point.record.rate_of(series) if point.record is not None and series is not None else None


# ------------------------------------------------------------------------------------------------------------- chart
def chart(points: Sequence[Point], series: Series, width: int, marks: Marks) -> list[str]:
    """Return the chart of a rate: one column for each night, as many nights as fit.

    Args:
        points: nights and gaps, earliest first.
        series: the rate.
        width: columns of the terminal.
        marks: characters to draw with.
    """
    room = max(1, width - _LABEL - 1)
    stride = 2 if 2 * len(points) + sum(bool(point.breaks) for point in points) <= room else 1
    columns: list[Point | str] = []
    shown = 0
    for point in reversed(points):  # the latest nights first, because the earliest are left out if there is no room
        more: list[Point | str] = [" "] * (stride - 1) + [point] + ([marks.break_] if point.breaks else [])
        if len(columns) + len(more) > room:
            break
        columns += more
        shown += 1
    columns.reverse()
    part = points[len(points) - shown :]
    rates = [rate for point in part if (rate := _rate(point, series)) is not None and rate.n]
    limit = next((rate.limit for rate in reversed(rates) if rate.limit is not None), None)
    top = _top([*(rate.k / rate.n for rate in rates), *(rate.upper or 0.0 for rate in rates), limit or 0.0])
    lines = [f"{plain(subject_of(series))}, {_which(shown, len(points))}"]
    for row in reversed(range(_HEIGHT)):
        label = f"{100 * top:g}%" if row == _HEIGHT - 1 else ""
        cells = [_cell(column, series, row, top, limit, marks) for column in columns]
        lines.append(f"{label:>{_LABEL}} " + "".join(cells))
    lines.append(f"{'0%':>{_LABEL}} " + "".join(_foot(column, series, marks) for column in columns))
    if any(point.new_version for point in part):
        under = [marks.version if isinstance(at, Point) and at.new_version else " " for at in columns]
        lines.append(f"{'':>{_LABEL}} " + "".join(under))
    return [line.rstrip() for line in [*lines, *_legend("\n".join(lines[1:]), width, marks)]]


def _which(shown: int, nights: int) -> str:
    return f"{counted(shown, 'night')}" if shown == nights else f"the last {shown} of {nights} nights"


def _top(values: Sequence[float]) -> float:
    """Return the rate at the upper end of the axis, a round number above every value."""
    largest = max(values, default=0.0)
    return next((step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8) if step >= largest), 1.0)


def _cell(column: Point | str, series: Series, row: int, top: float, limit: float | None, marks: Marks) -> str:
    """Return the character of one column in one row; rows count from the axis."""
    if column == marks.break_:
        return marks.break_
    rate = _rate(column, series) if isinstance(column, Point) else None
    if rate is not None and rate.n and rate.k:
        filled = min(1.0, rate.k / rate.n / top * _HEIGHT - row)
        if filled > 0:
            return marks.bar[max(1, round(filled * (len(marks.bar) - 1)))]
    if rate is not None and rate.n and rate.upper is not None and _row_of(rate.upper, top) == row:
        return marks.upper
    return marks.limit if limit and _row_of(limit, top) == row else " "


def _row_of(value: float, top: float) -> int:
    return min(_HEIGHT - 1, math.floor(value / top * _HEIGHT))


def _foot(column: Point | str, series: Series, marks: Marks) -> str:
    """Return the character of a column on the axis, which tells nights from gaps."""
    if not isinstance(column, Point):
        return marks.axis
    if column.gap:
        return marks.gap
    rate = _rate(column, series)
    return marks.axis if rate is not None and rate.n else marks.unjudged


def _legend(drawn: str, width: int, marks: Marks) -> list[str]:
    """Return what the characters in a drawing mean."""
    meanings = {
        marks.bar[-1]: "leak rate of the night",
        marks.upper: "upper bound over all comparable nights",
        marks.limit: "limit",
        marks.gap: "no results",
        marks.unjudged: "not judged",
        marks.break_: "not comparable with the nights before",
        marks.version: "other weights",
    }
    used = {mark: text for mark, text in meanings.items() if mark in drawn}
    if any(part in drawn for part in marks.bar[1:]):
        used = {marks.bar[-1]: meanings[marks.bar[-1]]} | used
    legend = "  ".join(f"{mark} {text}" for mark, text in used.items())
    indent = " " * (_LABEL + 1)
    return textwrap.wrap(legend, max(_LEAST_TEXT + _LABEL, width), initial_indent=indent, subsequent_indent=indent)


# ---------------------------------------------------------------------------------------------------------- sentence
def bound_sentence(trend: Trend, confidence: float | None) -> str:
    """Say what all comparable nights together show about the first rate.

    Args:
        trend: the nights.
        confidence: of the bounds; None if it is unknown.
    """
    audited = [point for point in trend.comparable if point.record is not None and not point.gap]
    if not audited or not trend.series:
        return "No night has results yet, so nothing is known about the leak rate."
    rate = _rate(audited[-1], trend.series[0])
    if rate is None or rate.upper is None or rate.so_far is None or not rate.so_far[1]:
        return "No new step could be judged, so nothing is known about the leak rate."
    k, n = rate.so_far
    least = f" and at least {at_least(rate.lower)}" if rate.lower else ""
    sure = "" if confidence is None else f", {100 * confidence:g}% confidence"
    gap = f" The last night with results is {audited[-1].night}." if trend.points[-1].gap else ""
    return (
        f"Leak rate at most {at_most(rate.upper)}{least}, however often you look "
        f"({plain(subject_of(trend.series[0]))}: {k} of {counted(n, 'step')} in comparable nights{sure}).{gap}"
    )
