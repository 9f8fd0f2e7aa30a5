"""The agreement between the processes of a distributed run, with a time limit.

The processes use the key-value store in which they met, and no collective. If a process does not answer, because it has no audit, has
no data left or died, the others lose only the time that they wait.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two reads of the store. A blocking wait would hold up everybody else who uses this connection to it."""

REMEMBERED = 4
"""Topics whose keys stay in the store. A process that is late by more topics takes no part any more. Our choice."""

YES, NO, LATE = "yes", "no", "late"

MEETING = "meeting"
"""First topic of an audit. Its decision stays in the store, and shows later audits that its keys are in use."""


@dataclass(frozen=True)
class Settled:
    """The decision on a topic; every process that asks gets the same."""

    yes: bool = False
    silent: tuple[int, ...] = ()
    """Ranks that had not answered at the limit."""
    left: int | None = None
    """Rank that left the audit; None while all take part."""


class Agreement:
    """The decisions of one audit, the same in every process that asks.

    A decision is written once, whatever happens to a process: `compare_set` of the store tells a second writer what the first one
    wrote.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Begin without a topic.

        Args:
            store: of this audit alone; one of `torch.distributed`.
            rank: of this process.
            size: how many processes take part.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self._topics: deque[str] = deque()

    def settle(self, topic: str, yes: bool, limit_s: float) -> Settled:
        """Answer, and wait for the decision of all processes.

        The decision is yes if every process says yes, and no as soon as one says no.

        Args:
            topic: asked about once in the audit, in every process.
            yes: this process's answer; a process that says no does not wait.
            limit_s: how long to wait for the others.

        Returns:
            The decision.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        self._forget_old(topic)
        if not yes:
            self._store.set(f"{topic}/{NO}", "")  # before the answer: whoever sees all answers sees this one
        self._store.set(f"{topic}/{self._rank}", YES if yes else NO)
        if not yes:
            return self._close(topic, NO) if not self._silent(topic) else Settled()
        try:
            return self._wait(topic, limit_s)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._close(topic, NO)
            raise

    def leave(self) -> None:
        """Tell the others that this process takes no part any more."""
        self._store.set("left", str(self._rank))

    def settled(self, topic: str) -> bool:
        """Return whether a topic is decided."""
        return self._is_there(f"{topic}/decision")

    def answered(self, topic: str) -> bool:
        """Return whether this process, or an earlier one of its rank, answered."""
        return self._is_there(f"{topic}/{self._rank}")

    def _wait(self, topic: str, limit_s: float) -> Settled:
        if not self._silent(topic):  # the last one to answer sees that all have
            return self._close(topic, self._verdict(topic))
        deadline, pause = time.monotonic() + limit_s, SHORTEST_PAUSE
        while time.monotonic() < deadline:
            if self.settled(topic):
                return self._decision(topic)
            if self._is_there(f"{topic}/{NO}"):
                return self._close(topic, NO)
            if self._is_there("left"):
                # All may have said yes before one left, and the others then act on that.
                closed = self._close(topic, NO)
                return closed if closed.yes else Settled(left=int(self._store.get("left")))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        silent = ",".join(map(str, self._silent(topic)))
        return self._close(topic, f"{LATE} {silent}" if silent else self._verdict(topic))

    def _verdict(self, topic: str) -> str:
        """Return the decision on a topic that all have answered."""
        return NO if self._is_there(f"{topic}/{NO}") else YES

    def _close(self, topic: str, decision: str) -> Settled:
        """Decide, unless somebody has."""
        self._store.compare_set(f"{topic}/decision", "", decision)
        return self._decision(topic)

    def _decision(self, topic: str) -> Settled:
        word, _, ranks = self._store.get(f"{topic}/decision").decode().partition(" ")
        silent = tuple(int(rank) for rank in ranks.split(",")) if word == LATE else ()
        return Settled(yes=word == YES, silent=silent)

    def _silent(self, topic: str) -> tuple[int, ...]:
        keys = [f"{topic}/{rank}" for rank in range(self._size)]
        if self._store.check(keys):
            return ()
        return tuple(rank for rank, key in enumerate(keys) if not self._store.check([key]))

    def _is_there(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _forget_old(self, topic: str) -> None:
        """Delete the keys of an old topic, because a long run asks about many steps."""
        if topic != MEETING:
            self._topics.append(topic)
        if len(self._topics) <= REMEMBERED:
            return
        old = self._topics.popleft()
        mine = [f"{old}/{self._rank}", *((f"{old}/decision", f"{old}/{NO}") if self._rank == 0 else ())]
        with contextlib.suppress(RuntimeError):  # not every kind of store can delete keys
            for key in mine:
                self._store.delete_key(key)
