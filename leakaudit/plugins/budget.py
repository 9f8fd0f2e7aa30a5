"""The time that an attack may take.

The clock is an argument, so that tests can replace it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Seconds that one attempt may use, counted from its creation."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            seconds: wall-clock seconds, above 0.
            clock: function that returns seconds; tests replace it.
        """
        if seconds <= 0:
            raise ValueError(f"a budget must be positive, got {seconds} s")
        self.seconds = seconds
        self._clock = clock
        self._start = clock()

    def spent(self) -> float:
        """Return the seconds used so far."""
        return self._clock() - self._start

    def left(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self.seconds - self.spent())

    def part(self, share: float) -> Budget:
        """Return a new budget over a share of the seconds left.

        It keeps the remaining time free for a later stage of the attack.

        Args:
            share: above 0, at most 1.
        """
        return Budget(max(share * self.left(), 1e-9), self._clock)

    def exhausted(self) -> bool:
        """Return whether no time is left.

        The attack then stops and returns its best guess so far.
        """
        return self.spent() >= self.seconds
