"""Progress of an audit, with an estimate of the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from leakaudit.cli.common import say
from leakaudit.results.wording import counted, duration

if TYPE_CHECKING:
    from leakaudit.results.journal import JournalEntry

PLAIN_LINE_SECONDS = 30.0
"""Seconds between two lines on a step that takes long, if stderr is not a terminal. Our choice: a log shows that the audit runs and stays short."""

UNKNOWN = "time left not known"
"""Words on a terminal until every attack has run once."""

Pair = tuple[str, str]
"""Attack and defence."""


def plan(steps: int, attacks: int, defenses: int, budget_s: float, limit_s: float | None = None) -> str:
    """Return a line on the size of an audit and the longest time of its attacks.

    Args:
        steps: of the audit.
        attacks: on each step.
        defenses: under each of which they run.
        budget_s: seconds for one attempt.
        limit_s: seconds for the whole command; None for no limit.

    >>> plan(60, 4, 3, 60.0)
    'plan: 60 steps x 4 attacks x 3 defences = 720 attempts, at most 12 h at 60 s each'
    >>> plan(60, 4, 3, 60.0, limit_s=7200.0)
    'plan: 60 steps x 4 attacks x 3 defences = 720 attempts, at most 2 h and 60 s each'
    """
    factors = [counted(steps, "step"), counted(attacks, "attack"), counted(defenses, "defence")]
    total = steps * attacks * defenses
    most = duration(min(total * budget_s, limit_s or total * budget_s))
    each = f"at {budget_s:g} s each" if limit_s is None or limit_s >= total * budget_s else f"and {budget_s:g} s each"
    return f"plan: {' x '.join(factors)} = {counted(total, 'attempt')}, at most {most} {each}"


class Pace:
    """A measurement of attempts that estimates the time that is left.

    The wall time of a step is split at every finished attempt, so the time for recomputation, scoring and files belongs to the attempt
    that finishes next.
    """

    def __init__(
        self, steps: int, pairs: Sequence[Pair], controls: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the measurement before the first step.

        Args:
            steps: number of steps of the audit.
            pairs: attack and defence of every attempt on one step.
            controls: number of control steps that are still due; each runs after a step.
            clock: returns seconds since any fixed time.
        """
        self.steps = steps
        self._done = dict.fromkeys(pairs, 0)
        self._times: dict[Pair, list[float]] = {pair: [] for pair in pairs}
        self._tails: list[float] = []
        self._controls = controls
        self._clock = clock
        self._last = clock()
        self.leaks = 0
        """Attempts with a leak event."""
        self.step_ended: Callable[[], None] = lambda: None
        """Called when a step is audited to its end."""
        self.begin: Callable[[str], None] = lambda _attack: None
        """Called with the name of an attack before each of its attempts."""

    @property
    def total(self) -> int:
        """Attempts of the whole audit."""
        return self.steps * len(self._done)

    @property
    def done(self) -> int:
        """Attempts that are finished."""
        return sum(self._done.values())

    def resume(self, finished: Sequence[Pair], leaks: int = 0) -> None:
        """Count attempts that an earlier run finished, and those with a leak event.

        Their times are not used for the estimate.
        """
        self.leaks += leaks
        for pair in finished:
            self._done[pair] = self._done.get(pair, 0) + 1

    def begin_step(self) -> None:
        """Start the measurement of a step."""
        self._last = self._clock()

    def finish(self, pair: Pair) -> None:
        """Count a finished attempt."""
        self._done[pair] = self._done.get(pair, 0) + 1
        self._times.setdefault(pair, []).append(self._lap())

    def end_step(self) -> None:
        """Record the time after the last attempt, which the control step took."""
        self._tails.append(self._lap())
        self._controls = max(0, self._controls - 1)
        self.step_ended()

    def left_s(self) -> float | None:
        """Return the estimated seconds that are left.

        It is None until every pair that is still due was measured once.
        """
        rest = {pair: self.steps - done for pair, done in self._done.items() if done < self.steps}
        if any(not self._times.get(pair) for pair in rest):
            return None
        return sum(n * _mean(self._times[pair]) for pair, n in rest.items()) + self._controls * _mean(self._tails)

    def left(self) -> str:
        """Return the estimate in words; empty while it is unknown."""
        seconds = self.left_s()
        return "" if seconds is None else f"about {duration(seconds)} left"

    def _lap(self) -> float:
        last, self._last = self._last, self._clock()
        return self._last - last


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@contextmanager
def shown(pace: Pace) -> Iterator[Callable[[JournalEntry], None]]:
    """Show progress on stderr: a bar on a terminal, else a line for each step.

    A step that takes long has a line every `PLAIN_LINE_SECONDS`.

    Yields:
        The function to call after every finished attempt.
    """
    with _bar(pace) if sys.stderr.isatty() else _lines(pace) as show:

        def finished(entry: JournalEntry) -> None:
            pace.finish((entry.attempt.attack, entry.attempt.defense))
            pace.leaks += entry.attempt.leaked
            show(entry)

        yield finished


@contextmanager
def _bar(pace: Pace) -> Iterator[Callable[[JournalEntry], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description:17}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[leaks]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]:21}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task("first step", total=pace.total, completed=pace.done, leaks=_leaks(pace), left=UNKNOWN)

        def show(_entry: JournalEntry) -> None:
            bar.update(task, completed=pace.done, leaks=_leaks(pace), left=pace.left() or UNKNOWN)

        pace.begin = lambda attack: bar.update(task, description=attack[:17])
        yield show


def _leaks(pace: Pace) -> str:
    return counted(pace.leaks, "leak")


@contextmanager
def _lines(pace: Pace) -> Iterator[Callable[[JournalEntry], None]]:
    last, estimated, said, where = time.monotonic(), False, 0, ""

    def show(entry: JournalEntry) -> None:
        nonlocal where
        where = f"{entry.attempt.attack} on {entry.attempt.step}"
        first_estimate = bool(pace.left()) and not estimated and pace.done < pace.total
        if first_estimate or time.monotonic() - last >= PLAIN_LINE_SECONDS:
            line()

    def line() -> None:
        nonlocal last, estimated, said
        if pace.done == said:
            return  # the last attempt of the step has its line
        left = pace.left()
        last, estimated, said = time.monotonic(), bool(left), pace.done
        done = f"{pace.done} of {counted(pace.total, 'attempt')} done, {pace.leaks} with a leak event, the last one {where}"
        say(f"{done}; {left}" if left else done)

    pace.step_ended = line
    yield show
