"""The log of finished results, which the trackers of the trainer get."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from leakaudit.capture.notify import notify
from leakaudit.capture.trackers import Trackers, name_of
from leakaudit.config.audit import AuditConfig
from leakaudit.results.journal import load_journal
from leakaudit.results.schema import Attempt, Score, TextMode
from leakaudit.results.short_outputs import in_logs
from leakaudit.results.wording import counted


@dataclass
class ResultsLog:
    """A log with one entry for each step whose undefended attempts are all finished."""

    folder: Path
    """Folder of the audit, where the side process notes finished attempts."""
    attacks: int
    """Number of attempts on an undefended update: one for each attack of the configuration."""
    wanted: bool
    """Whether trackers get numbers."""
    report: bool
    """Whether trackers get the report."""
    trackers: Trackers | None = None
    """Trackers of the trainer; None where there are none, or where they get nothing."""
    _size: int = field(default=0, init=False)
    """Bytes of the journal when it was last read."""
    _logged: set[str] = field(default_factory=set, init=False)

    @classmethod
    def of(cls, config: AuditConfig, trackers: Trackers | None) -> ResultsLog:
        """Return the log of an audit whose folder is known.

        Args:
            config: says what trackers get. A report in text mode full goes to none.
            trackers: of the trainer.
        """
        report = config.trackers == "report" and config.text is not TextMode.FULL
        log = cls(config.out_dir, len(config.attacks), config.trackers is not False, report)
        log.use(trackers)
        return log

    def use(self, trackers: Trackers | None) -> None:
        """Send to other trackers from now on, as a new trainer has them."""
        self.trackers = trackers if self.wanted else None

    def update(self) -> None:
        """Log the steps that were finished since the last call."""
        if self.trackers is None:
            return
        attempts: dict[str, list[Attempt]] = {}
        for attempt in self._new_attempts():
            if attempt.defense == "none":
                attempts.setdefault(attempt.step, []).append(attempt)
        for step, found in attempts.items():
            if step not in self._logged and len(found) == self.attacks:
                self._logged.add(step)
                if numbers := numbers_of(found):
                    self.trackers.send(int(step.removeprefix("st-")), numbers)

    def finish(self, *, report_is_there: bool) -> None:
        """Log the last steps, and send the report if the user wants that.

        Args:
            report_is_there: whether the audit has come to its end, so that the report is about all of it.
        """
        self.update()
        if self.trackers is None:
            return
        report = self.folder / "report.html"
        if self.report and report_is_there and report.is_file():
            sent = self.trackers.keep(report)
            notify(f"{counted(sent, 'tracker has', 'trackers have')} the report (`trackers: report`)")
        self.trackers.end()

    def _new_attempts(self) -> list[Attempt]:
        """Return all attempts if there are new ones, else an empty list.

        The list is also empty if the journal cannot be read: it may not exist yet, or somebody removed it.
        """
        journal = self.folder / "journal.jsonl"
        try:
            size = journal.stat().st_size
            if size == self._size:
                return []
            self._size = size
            return [entry.attempt for entry in load_journal(journal)]
        except OSError:
            return []


def numbers_of(attempts: list[Attempt]) -> dict[str, float]:
    """Return the numbers of a step's attempts, by the name that trackers show.

    A metric that an attack did not measure is left out. Of two attacks with the same name in a tracker, the higher number counts.
    """
    found: dict[str, float] = {}
    for attempt in attempts:
        for metric in in_logs(attempt.scores):
            if isinstance(score := attempt.scores[metric], Score):
                name = name_of(attempt.attack, metric)
                found[name] = max(score.value, found.get(name, 0.0))
    return found
