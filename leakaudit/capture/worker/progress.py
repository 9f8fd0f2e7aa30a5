"""The progress of the attacks, with an estimate of the time that remains.

The worker writes once which attempts it makes on each step, and it writes each attempt when it is finished. These files show the current
attempt and how many attempts are still to come. The times of earlier attempts tell how long those will take.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from leakaudit.errors import ResultsError
from leakaudit.results.journal import load_journal
from leakaudit.results.schema import Attempt, AttemptStatus, Battery
from leakaudit.results.wording import counted, duration
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import read_battery

_OBSERVED = "none"
"""Name of the defence that leaves the update as it was sent."""


@dataclass(frozen=True)
class _Due:
    """An attempt that is still to come."""

    step: str
    attack: str
    defense: str
    slow: bool


class Progress:
    """The progress of a worker, read from its spool and journal.

    Files that have not changed are not read again.
    """

    def __init__(self, spool: Spool, clock: Callable[[], float] = time.time) -> None:
        """Prepare; nothing is read.

        Args:
            spool: as the trainer made it.
            clock: seconds, in the time of the file system.
        """
        self._spool = spool
        self._clock = clock
        self._size = -1
        self._finished: list[Attempt] = []
        self._battery: Battery | None = None

    def look(self) -> tuple[str, float | None]:
        """Return what the worker does now, and how many seconds remain.

        The seconds are None if they cannot be estimated.
        """
        self._read()
        pending = self._spool.queue.pending()
        waiting = [path.stem for path in pending]
        if self._battery is None:
            return f"the side process is starting, {counted(len(waiting), 'kept step')} to attack", None
        todo = self._todo(waiting, self._battery)
        claimed = pending[0].stem if pending and pending[0].suffix == ".run" else ""
        at_work = any(due.step == claimed and not due.slow for due in todo)
        # The claimed snapshot first; of the others, slow attacks last.
        todo.sort(key=lambda due: (due.slow and (at_work or due.step != claimed), due.step != claimed))
        if not todo:
            return "the last control step and the report", None
        now = todo[0]
        done = len(self._finished)
        under = "" if now.defense == _OBSERVED else f" under {now.defense}"
        what = f"attempt {done + 1} of {done + len(todo)}: {now.attack}{under} on step {int(now.step)}, up to {self._battery.budget_s:g} s"
        seconds, measured = self._left(todo, self._battery.budget_s)
        return f"{what}; {'about' if measured else 'at most'} {duration(seconds)} left", seconds

    def _read(self) -> None:
        journal = self._spool.root.parent / "journal.jsonl"
        try:
            self._battery = self._battery or read_battery(self._spool.root)
            size = journal.stat().st_size
            if size != self._size:
                self._finished = [entry.attempt for entry in load_journal(journal)]
                self._size = size
        except (OSError, ResultsError):
            return  # nothing is finished yet, or a line is just being written

    def _todo(self, waiting: Sequence[str], battery: Battery) -> list[_Due]:
        done = {(attempt.step, attempt.attack, attempt.defense) for attempt in self._finished}
        every = [
            _Due(step, attack, defense, attack in battery.slow)
            for step in waiting
            for slow in (False, True)
            for defense in battery.defenses
            for attack in battery.attacks
            if (attack in battery.slow) is slow
        ]
        return [due for due in every if (f"st-{due.step}", due.attack, due.defense) not in done]

    def _left(self, todo: Sequence[_Due], budget_s: float) -> tuple[float, bool]:
        """Return the seconds that attempts will take, and whether they are measured.

        They are measured if every attack among them has finished before without an error. An attack that has not counts with its budget.
        """
        seen: dict[str, list[float]] = defaultdict(list)
        for attempt in self._finished:
            if attempt.status is not AttemptStatus.ERROR:
                seen[attempt.attack].append(attempt.wall_s)
        takes = [fmean(seen[due.attack]) if seen[due.attack] else budget_s for due in todo]
        return max(0.0, sum(takes) - min(takes[0], self._since_last())), all(seen[due.attack] for due in todo)

    def _since_last(self) -> float:
        """Return the seconds since the last finished attempt; 0 without one."""
        journal = self._spool.root.parent / "journal.jsonl"
        try:
            return max(0.0, self._clock() - journal.stat().st_mtime)
        except OSError:
            return 0.0
