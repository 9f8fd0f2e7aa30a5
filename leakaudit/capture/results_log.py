"""The log of finished results, which the loggers of the trainer get."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from leakaudit.capture.boundary import from_signal_handler
from leakaudit.results.journal import load_journal
from leakaudit.results.schema import Attempt, Score
from leakaudit.results.short_outputs import in_logs

logger = logging.getLogger(__name__)


@dataclass
class ResultsLog:
    """A log with one entry for each step whose undefended attempts are all finished."""

    journal: Path
    """File in which the side process notes finished attempts."""
    attacks: int
    """Number of attempts on an undefended update: one for each attack of the configuration."""
    send: Callable[[dict[str, float]], None] | None
    """Gives numbers to the trainer's loggers; None where there are none."""
    _size: int = field(default=0, init=False)
    """Bytes of the journal when it was last read."""
    _logged: set[str] = field(default_factory=set, init=False)
    _broken: bool = field(default=False, init=False)
    """Whether a logger failed on our numbers."""

    def update(self) -> None:
        """Log the steps that were finished since the last call."""
        if self.send is None:
            return
        attempts: dict[str, list[Attempt]] = {}
        for attempt in self._new_attempts():
            if attempt.defense == "none":
                attempts.setdefault(attempt.step, []).append(attempt)
        for step, found in attempts.items():
            if step not in self._logged and len(found) == self.attacks:
                self._logged.add(step)
                self._log({"leakaudit/step": int(step.removeprefix("st-")), **strongest(found)})

    def _new_attempts(self) -> list[Attempt]:
        """Return all attempts if there are new ones, else an empty list.

        The list is also empty if the journal cannot be read: it may not exist yet, or somebody removed it.
        """
        try:
            size = self.journal.stat().st_size
            if size == self._size:
                return []
            self._size = size
            return [entry.attempt for entry in load_journal(self.journal)]
        except OSError:
            return []

    def _log(self, numbers: dict[str, float]) -> None:
        """Log some numbers, unless a logger failed on earlier ones.

        A logger that fails ends the logging, not the audit.
        """
        if self._broken or self.send is None:
            return
        try:
            self.send(numbers)
        except Exception as error:
            if from_signal_handler(error):
                raise
            self._broken = True
            logger.warning("leakaudit's numbers are not logged any more: a logger raised %s", type(error).__name__)


def strongest(attempts: list[Attempt]) -> dict[str, float]:
    """Return the highest value of each metric over all attempts, by log name.

    A metric that no attempt measured is left out.
    """
    found: dict[str, float] = {}
    for metric, name in in_logs(dict.fromkeys(name for one in attempts for name in one.scores)).items():
        values = [score.value for one in attempts if isinstance(score := one.scores.get(metric), Score)]
        if values:
            found[f"leakaudit/{name}"] = max(values)
    return found
