"""The three tiles of the first screen: leaked sentences, words and labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from leakaudit.gate.events import EVENTS, Event
from leakaudit.gate.policy import SHIPPED
from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.gate.wording import allowed, at_least, at_most
from leakaudit.reports.charts import CLEAN, LATE, LEAK
from leakaudit.reports.comparison import outcomes
from leakaudit.reports.escaping import plain
from leakaudit.reports.svg import BAND, INK, MUTED, Margins, bar, line, picture, symbol
from leakaudit.results.as_sent import shipped_column
from leakaudit.results.schema import Kind, Results
from leakaudit.results.wording import counted

_KINDS: tuple[tuple[str, Kind, str], ...] = (
    ("Sentences", "text", "exact_sequence"),
    ("Words", "words", "all_words"),
    ("Labels", "labels", "label_counts"),
)
"""Title of a tile, what was recovered, and the event that it counts if no rule asks about one."""

_WIDTH = 200
"""Width of the axis of a tile's picture, in pixels."""

_WORST_FIRST = (Status.FAIL, Status.ERROR, Status.INCONCLUSIVE, Status.PASS)


@dataclass(frozen=True)
class Tile:
    """How many steps leaked one kind of thing, and what the policy allows."""

    title: str
    count: str
    """Such as `3 of 60`; `no evidence` if no step shows it."""
    what: str
    """What happened in these steps."""
    bound: str
    """The bound that decides: the lower one if the limit is exceeded, else the upper one; empty if there is none."""
    limit: str
    """What the policy allows, and which rule says it."""
    word: str
    """The answer of this rule; empty without one."""
    state: Literal["leak", "clean", "open"]
    picture: Markup | None
    """The interval against the limit; None without evidence."""


def tiles(results: Results, verdict: Verdict) -> list[Tile]:
    """Return a tile each for sentences, words and labels."""
    return [_tile(results, verdict, *kind) for kind in _KINDS]


def _is_about(event: Event, kind: Kind) -> bool:
    """Return whether an event is that something of a kind came back whole."""
    return event.kind == kind and (kind != "text" or event.every_word)


def _about(verdict: Verdict, kind: Kind) -> list[RuleVerdict]:
    """Return the rules on what is shipped that limit a kind."""
    return [
        rule
        for rule in verdict.rules
        if rule.kind in ("max_rate", "max_count")
        and rule.defense == SHIPPED
        and not rule.imported
        and rule.subject in EVENTS
        and _is_about(EVENTS[rule.subject], kind)
    ]


def _forbidding(verdict: Verdict, kind: Kind, shown: RuleVerdict) -> RuleVerdict | None:
    """Return another rule with the same answer that allows no step at all.

    It is None if there is none.
    """
    found = (rule for rule in _about(verdict, kind) if rule.kind == "max_count" and not rule.threshold)
    return next((rule for rule in found if rule is not shown and rule.status is shown.status), None)


def _judging(verdict: Verdict, kind: Kind) -> RuleVerdict | None:
    """Return the rule on what is shipped that judges a kind.

    Of several it is the one with the worst answer, and of these one on a rate.
    """
    about = _about(verdict, kind)
    order = {status: at for at, status in enumerate(_WORST_FIRST)}
    return min(about, key=lambda r: (r.n == 0, r.level != "error", order[r.status], r.kind != "max_rate"), default=None)


def _tile(results: Results, verdict: Verdict, title: str, kind: Kind, event: str) -> Tile:
    rule = _judging(verdict, kind)
    if rule is None or rule.k is None:
        return _unjudged(results, title, event)
    what = EVENTS[rule.subject].short
    limit = f"limit {allowed(rule.kind, rule.threshold)}, rule {rule.id}"
    if strict := _forbidding(verdict, kind, rule):
        limit = f"limit {allowed(strict.kind, strict.threshold)}, rule {strict.id}; {limit.removeprefix('limit ')}"
    if not rule.n:
        return Tile(title, "no evidence", f"whether {what}", "", limit, rule.word, "open", None)
    state: Literal["leak", "clean", "open"] = (
        "leak" if rule.k else "clean" if rule.status is Status.PASS and not rule.censored else "open"
    )
    # a limit on a count has no place on an axis of rates, unless it is no step at all
    threshold = rule.threshold if rule.kind == "max_rate" or not rule.threshold else None
    interval = None if rule.lower is None or rule.upper is None else (rule.lower, rule.upper)
    bound = _bound(interval, exceeded=rule.status is Status.FAIL, n=rule.n)
    return Tile(
        title,
        f"{rule.k} of {rule.n}",
        f"{'step' if rule.n == 1 else 'steps'} in which {what}",
        bound,
        limit,
        rule.word,
        state,
        _picture(f"{title}: {rule.k} of {counted(rule.n, 'step')}", rule.k / rule.n, interval, threshold, state),
    )


def _unjudged(results: Results, title: str, event: str) -> Tile:
    """Return the tile of something that no rule of the policy limits."""
    found = outcomes(results, shipped_column(results), event)
    n, k, what = len(found.by_step), found.leaked, EVENTS[event].short
    if not n:
        return Tile(title, "no evidence", f"whether {what}", "", "no rule limits it", "", "open", None)
    state: Literal["leak", "clean", "open"] = "leak" if k else "open"
    interval = (found.lower, found.upper)
    return Tile(
        title,
        f"{k} of {n}",
        f"{'step' if n == 1 else 'steps'} in which {what}",
        _bound(interval, exceeded=k > 0, n=n),
        "no rule limits it",
        "",
        state,
        _picture(f"{title}: {k} of {counted(n, 'step')}", k / n, interval, None, state),
    )


def _bound(interval: tuple[float, float] | None, *, exceeded: bool, n: int) -> str:
    if interval is None or n < 2:
        return "one step gives no bound" if n == 1 else ""
    bound = f"at least {at_least(interval[0])}" if exceeded else f"at most {at_most(interval[1])}"
    return f"true rate {bound} (95%)"


def _picture(title: str, rate: float, interval: tuple[float, float] | None, limit: float | None, state: str) -> Markup:
    """Draw a rate with its interval on an axis from 0 to 100 %, and the limit."""
    colour = {"leak": LEAK, "clean": CLEAN, "open": LATE}[state]
    middle = 9.0
    drawn = [line((0, middle), (_WIDTH, middle), MUTED, 1)]
    said = title
    if interval is not None:
        low, high = (end * _WIDTH for end in interval)
        drawn.append(bar(low, max(high, low + 2), middle, 8, BAND))
        said += f"; interval {at_least(interval[0])} to {at_most(interval[1])}"
    if limit is not None:
        drawn.append(line((limit * _WIDTH, 0), (limit * _WIDTH, 2 * middle), INK, 2))
        said += f"; limit {limit:.1%}"
    shape = {"leak": "square", "clean": "circle", "open": "diamond"}[state]
    hollow = state == "open"
    mark = symbol(
        shape, 90, (rate * _WIDTH, middle), fill=None if hollow else colour, stroke=colour if hollow else None
    )
    drawn.append(mark)
    return picture(drawn, (_WIDTH, 2 * middle), Margins(7, 1, 7, 1), plain(said))
