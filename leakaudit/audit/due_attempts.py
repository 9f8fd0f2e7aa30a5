"""The attempts of an audit that are still due, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from leakaudit.audit.battery import Plugins, is_slow
from leakaudit.audit.entries import AttemptId, EntryBuilder
from leakaudit.audit.state import AuditState, Journal
from leakaudit.client.observation import Observation
from leakaudit.plugins.attack_protocol import Attack
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.journal import JournalEntry
from leakaudit.results.schema import AttemptStatus

Labelled = tuple[AttemptId, Attack]
"""The labels of an attempt, and its attack."""


@dataclass
class DueAttempts:
    """The attempts that the journal of one audit does not hold yet."""

    plugins: Plugins
    journal: Journal
    state: AuditState
    entries: EntryBuilder
    report: Callable[[JournalEntry], None]
    """Called after every finished attempt."""
    all_needed: bool
    """Whether an attempt is needed even if another one has recovered every text (`attack_recovered_steps`)."""
    begin: Callable[[AttemptId], None] = lambda _which: None
    """Called before every attempt, and before its defence is applied."""

    def of(self, step_id: str, under: str = "", *, slow: bool | None = None) -> Iterator[Labelled]:
        """Yield the unfinished attempts on a step, ordered by defence.

        Args:
            step_id: id of the step.
            under: the only defence; empty for all.
            slow: whether to yield slow attacks or the others; None for all.
        """
        record = self.state.record_of(step_id)
        sent = (AS_SENT,) if record is not None and record.sent is not None else ()  # else copies, which `finish` makes
        for defense in (under,) if under else (*(label for label, _ in self.plugins.defenses), *sent):
            for label, attack in self.plugins.attacks:
                if slow in (None, is_slow(attack)) and not self.journal.has(step_id, label, defense):
                    yield AttemptId(step_id, label, defense), attack

    def needed(self, attempts: Iterable[Labelled], seen: Observation) -> Iterator[Labelled]:
        """Yield the attempts that can add something, and close the others.

        Take them one by one: each attempt decides whether the next one is needed.
        """
        granted = seen.facts.granted.names()
        for which, attack in attempts:
            reads_texts = attack.goal != "labels" and not self.all_needed
            found = self.journal.recovery(which.step, which.defense, granted) if reads_texts else None
            if found is None:
                self.begin(which)
                yield which, attack
            else:
                reason = f"{found.attack} had recovered every text of this step"
                self.close([(which, attack)], AttemptStatus.NOT_NEEDED, reason)

    def close(self, attempts: Iterable[Labelled], status: AttemptStatus, reason: str) -> None:
        """Add entries with the same status and reason for all these attempts."""
        for attempt, _ in attempts:
            self.append(self.entries.failed(attempt, status, reason))

    def append(self, entry: JournalEntry) -> None:
        """Write a finished attempt to the journal and report it."""
        self.journal.append(entry)
        self.report(entry)
