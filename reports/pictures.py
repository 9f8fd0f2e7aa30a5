"""Pictures that answer one question each: when, how much, how fast, how sure.

All have one grammar: red or brown is what leaked, grey is what did not, hatched is what could not be judged, and nothing is drawn where
nothing was tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from leakaudit.reports.charts import (
    LABELS,
    LEAK,
    LINE_SHAPES,
    NAMES,
    WORDS,
    axis_of_rates,
    clip,
    rate_mark,
    upright_axis_of_rates,
)
from leakaudit.reports.panels import panels
from leakaudit.reports.svg import (
    AXIS_ROOM,
    BAND,
    HAIRLINE,
    INK,
    LETTER,
    MUTED,
    Margins,
    Tick,
    block,
    hairline,
    hatched,
    left_axis,
    line,
    lower_axis,
    middle_text,
    picture,
    polyline,
    symbol,
    text,
)

_AIR = 6
MOST_COLUMNS = 60
"""Most columns of a picture of steps. Our choice: a column then has 10 pixels."""
MOST_CURVES = 6

LEAKED = {"text leaked": LEAK, "words leaked": WORDS, "labels leaked": LABELS}
"""State of a cell -> colour of a leak, the worst first."""
CLEAN_STATE = "no leak event"
UNTRIED = ("not needed", "not applicable", "not run")
"""States in which nothing was tried, so that nothing is drawn."""


@dataclass(frozen=True)
class StepGroup:
    """Neighbouring audited steps, as one column shows them."""

    first: int
    last: int
    states: Mapping[str, Mapping[str, int]]
    """Attack -> state -> number of steps."""
    least: float | None
    """Least share of the text that came back from one of them; None if none has a number."""
    most: float | None
    """Most of it."""
    loss: tuple[float, float] | None
    """Least and largest loss; None if no step has one."""
    rate: tuple[float, float] | None = None
    """Least and largest learning rate; None if no step has one, or if it is not drawn."""


def groups_of(
    steps: Sequence[tuple[int, Mapping[str, str], float | None, float | None, float | None]],
    columns: int = MOST_COLUMNS,
) -> list[StepGroup]:
    """Group audited steps into columns of as many steps each; the last may have fewer.

    Args:
        steps: (step, attack -> state, share that came back, loss, learning rate), in the order of the steps.
        columns: most columns.
    """
    size = -(-len(steps) // columns)
    found = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        counts: dict[str, dict[str, int]] = {}
        for _, states, _, _, _ in part:
            for attack, state in states.items():
                mine = counts.setdefault(attack, {})
                mine[state] = mine.get(state, 0) + 1
        shares = [share for _, _, share, _, _ in part if share is not None]
        losses = [loss for _, _, _, loss, _ in part if loss is not None]
        rates = [rate for *_, rate in part if rate is not None]
        found.append(
            StepGroup(
                part[0][0],
                part[-1][0],
                counts,
                min(shares, default=None),
                max(shares, default=None),
                (min(losses), max(losses)) if losses else None,
                (min(rates), max(rates)) if rates else None,
            )
        )
    return found


def group_chart(groups: Sequence[StepGroup], title: str, share: str) -> Markup:
    """Draw what each attack recovered over many steps, as columns of shares.

    The height of a colour within a column is the share of the column's steps. Above are the least and the most that came back from a step,
    and below the least and the largest loss and learning rate.

    Args:
        groups: two or more.
        title: what the picture says, in a sentence.
        share: title of the axis of the share that came back.
    """
    width, above, row, tall = 640, 90, 34, 26
    wide = width / len(groups)
    drawn = [_rates(share, width, above)]
    for n, one in enumerate(groups):
        if one.most is None or one.least is None:
            drawn.append(hatched(n * wide + 1, 0, wide - 2, above, BAND))
            continue
        top, low = above * (1 - one.most), above * (1 - one.least)
        drawn.append(block(n * wide + 1, top, wide - 2, max(low - top, 1.5), BAND))
        drawn.append(block(n * wide + 1, top - 1, wide - 2, 2.5, INK))
    y = above + 12.0
    for attack in dict.fromkeys(name for one in groups for name in one.states):
        drawn.append(middle_text(clip(attack), (-8, y + tall / 2), "end", MUTED))
        for n, one in enumerate(groups):
            drawn += _column(one.states.get(attack, {}), n * wide + 1, y, wide - 2, tall)
        drawn.append(hairline((0, y + tall), (width, y + tall), HAIRLINE))
        y += row
    middles = [(n + 0.5) * wide for n in range(len(groups))]
    losses = [None if one.loss is None else (x, *one.loss) for x, one in zip(middles, groups, strict=True)]
    rates = [None if one.rate is None else (x, *one.rate) for x, one in zip(middles, groups, strict=True)]
    more, height = panels([("loss", losses), ("learning rate", rates)], width, y)
    drawn.append(more)
    y += height
    every = max(1, -(-len(groups) // 12))
    ticks = [Tick((n + 0.5) * wide, str(one.first)) for n, one in enumerate(groups) if n % every == 0]
    size = sum(groups[0].states[next(iter(groups[0].states))].values()) if groups[0].states else 1
    drawn.append(lower_axis(ticks, width, y, f"training step, {size} audited steps in a column"))
    return picture(drawn, (width, y), Margins(NAMES, 10, _AIR, 2 * AXIS_ROOM + _AIR), title)


def _column(states: Mapping[str, int], x: float, y: float, wide: float, tall: float) -> list[str]:
    """Return one column, the worst leak at its bottom.

    A leak is at least 2 pixels high.
    """
    total = sum(states.values())
    drawn, low = [], y + tall
    unsure = sum(
        n for state, n in states.items() if state not in LEAKED and state not in UNTRIED and state != CLEAN_STATE
    )
    parts = [
        *((LEAKED[state], states.get(state, 0)) for state in LEAKED),
        ("", unsure),
        (BAND, states.get(CLEAN_STATE, 0)),
    ]
    for colour, count in parts:
        if not count:
            continue
        high = min(max(tall * count / total, 2.0), low - y)
        low -= high
        if not colour:
            drawn.append(hatched(x, low, wide, high, MUTED))
        elif colour == BAND:
            drawn.append(block(x, low, wide, high, colour, 0.5))
        else:
            drawn.append(block(x, low, wide, high, colour, 0.6 if colour == WORDS else 1.0))
    return drawn


@dataclass(frozen=True)
class Column:
    """One column of a distribution."""

    name: str
    count: int
    kind: str
    """`text leaked` and the like, `clean`, or `unsure` for what could not be judged."""


def distribution_chart(columns: Sequence[Column], title: str, what: str) -> Markup:
    """Draw how many of something fall into each class, as shares of all.

    Args:
        columns: from the least to the most; at least one has a count.
        title: what the picture says, in a sentence.
        what: what is counted, such as `texts`.
    """
    width, height = 640, 150
    total = sum(one.count for one in columns)
    wide = width / len(columns)
    drawn = [_rates(f"share of {total:,} {what}", width, height)]
    for n, one in enumerate(columns):
        high = height * one.count / total
        x = n * wide + 0.14 * wide
        if one.kind == "unsure":
            drawn.append(hatched(x, height - high, 0.72 * wide, high, MUTED))
        elif one.count:
            drawn.append(block(x, height - high, 0.72 * wide, max(high, 1.5), LEAKED.get(one.kind, BAND)))
        drawn.append(
            text(f"{one.count:,}", ((n + 0.5) * wide, height - high - 4), "middle", INK, bold=one.kind in LEAKED)
        )
        drawn.append(text(one.name, ((n + 0.5) * wide, height + 17), "middle", MUTED))
    drawn.append(hairline((0, height), (width, height), BAND))
    return picture(drawn, (width, height), Margins(NAMES, 22, _AIR, AXIS_ROOM + _AIR), title)


@dataclass(frozen=True)
class Curve:
    """When one attack had its leaks."""

    name: str
    seconds: tuple[float, ...]
    """Seconds until each leak, sorted."""
    steps: int
    """Steps that it searched to an end or until its time was over."""
    longest: float
    """Seconds of its longest search."""
    kind: str
    """State of its worst leak, such as `text leaked`."""
    cut: bool
    """Whether a search without a leak ran out of time, so that more time might have found one."""


def seconds_chart(curves: Sequence[Curve], title: str) -> Markup:
    """Draw the share of steps that had leaked after so many seconds of attack.

    The axis of the seconds is logarithmic. A curve ends at the longest search; a hollow end means that a search was cut off there.

    Args:
        curves: at most `MOST_CURVES`, each with a step or more.
        title: what the picture says, in a sentence.
    """
    width, height = 560, 170
    known = [s for one in curves for s in (*one.seconds, one.longest)]
    low = math.floor(math.log10(max(min(known), 0.001)))
    high = max(math.ceil(math.log10(max(*known, 0.001))), low + 1)

    def at(seconds: float) -> float:
        return width * (math.log10(max(seconds, 10.0**low)) - low) / (high - low)

    ticks = [Tick(width * n / (high - low), _seconds(10.0 ** (low + n))) for n in range(high - low + 1)]
    drawn = [
        _rates("steps that leaked", width, height),
        lower_axis(ticks, width, height, "seconds of attack on one step"),
    ]
    for turn, one in enumerate(curves):
        colour, shape = LEAKED[one.kind], LINE_SHAPES[turn % len(LINE_SHAPES)]
        path = [(at(min(known)), float(height))]
        for n, seconds in enumerate(one.seconds, start=1):
            path += [(at(seconds), path[-1][1]), (at(seconds), height * (1 - n / one.steps))]
        path.append((at(one.longest), path[-1][1]))
        drawn.append(polyline(_thin(path), colour))
        hollow = None if one.cut else colour
        drawn.append(symbol(shape, 60, path[-1], fill=hollow, stroke=colour))
        row = 6 + turn * 17
        drawn.append(symbol(shape, 60, (width + 24, row), fill=hollow, stroke=colour))
        drawn.append(middle_text(f"{clip(one.name)} {len(one.seconds)}/{one.steps}", (width + 36, row), colour=MUTED))
    right = 36 + LETTER * max(len(clip(one.name)) + 2 + 2 * len(str(one.steps)) for one in curves)
    return picture(drawn, (width, height), Margins(NAMES, 12, right, 2 * AXIS_ROOM + _AIR), title)


def _thin(path: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a path without corners that are less than half a pixel from the last one."""
    kept = [path[0]]
    for place in path[1:-1]:
        if abs(place[0] - kept[-1][0]) >= 0.5 or abs(place[1] - kept[-1][1]) >= 0.5:
            kept.append(place)
    return [*kept, path[-1]]


def _seconds(value: float) -> str:
    return f"{value:g} s" if value < 1000 else f"{value / 1000:g},000 s"


@dataclass(frozen=True)
class Limited:
    """A rate against its own limit."""

    name: str
    rate: float
    lower: float
    upper: float
    limit: float
    note: str
    found: Literal["leak", "clean", "open"]


def limits_chart(rows: Sequence[Limited], title: str) -> Markup:
    """Draw rates with their bounds, each against a limit of its own.

    A row has a band from the lower to the upper bound, a dot at the rate, and an upright line at its limit.
    """
    width, tall = 430, 34
    height = tall * len(rows)
    drawn = [axis_of_rates(width, height)]
    for n, one in enumerate(rows):
        y = tall * (n + 0.5)
        drawn.append(rate_mark(one.rate, (one.lower, one.upper), one.found, y, width, 110))
        drawn.append(line((width * one.limit, y - 13), (width * one.limit, y + 13), INK, 2.5))
        drawn.append(middle_text(clip(one.name), (-12, y), "end", MUTED))
        drawn.append(middle_text(one.note, (width + 12, y)))
    right = 16 + LETTER * max(len(one.note) for one in rows)
    return picture(drawn, (width, height), Margins(NAMES, 8, right, AXIS_ROOM + _AIR), title)


def counts_chart(points: Mapping[tuple[int, int], int], title: str) -> Markup:
    """Draw recovered against true numbers of examples, over classes and steps.

    The area of a mark grows with the number of class counts; marks on the diagonal are right.

    Args:
        points: (true, recovered) -> how many classes of how many steps.
        title: what the picture says, in a sentence.
    """
    size = 240
    most = max(1, *(n for pair in points for n in pair))
    largest = max(points.values())

    def at(count: int) -> float:
        return size * (count + 0.5) / (most + 1)

    every = -(-(most + 1) // 9)
    marks = [n for n in range(most + 1) if n % every == 0]
    left = left_axis([Tick(size - at(n), str(n)) for n in marks], size, size)
    below = lower_axis([Tick(at(n), str(n)) for n in marks], size, size, "examples of a class, true")
    drawn = [left, below, middle_text("recovered", (-30, size / 2), "end", MUTED)]
    drawn.append(line((0, size), (size, 0), BAND, 1.5, "5,4"))
    most_area = (0.8 * size / (most + 1)) ** 2
    for (true, guess), count in sorted(points.items()):
        place, area = (at(true), size - at(guess)), max(16.0, min(most_area, 900.0) * count / largest)
        right = true == guess
        drawn.append(
            symbol(
                "square" if right else "circle",
                area,
                place,
                fill=LEAK if right else None,
                stroke=LEAK if right else MUTED,
            )
        )
    return picture(drawn, (size, size), Margins(NAMES, 12, 40, 2 * AXIS_ROOM + _AIR), title)


def _rates(title: str, width: float, height: float) -> str:
    words = title.split(" ")
    lines = [" ".join(words[:2]), " ".join(words[2:])] if len(words) > 2 else [title]
    named = [
        middle_text(part, (-48, height / 2 + 16 * (n - (len(lines) - 1) / 2)), "end", MUTED)
        for n, part in enumerate(lines)
    ]
    return upright_axis_of_rates(width, height) + "".join(named)
