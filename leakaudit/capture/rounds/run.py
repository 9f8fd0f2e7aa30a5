"""One round of training, recorded as a whole.

It has the methods of `leakaudit.capture.run.AuditRun` that an adapter calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from leakaudit.capture.context import StepContext, TrainerContext
from leakaudit.capture.describe import RunDescription
from leakaudit.capture.notify import notify
from leakaudit.capture.plan import Plan
from leakaudit.capture.recording.recorder import Recorder
from leakaudit.capture.rounds.before_round import BeforeRound
from leakaudit.capture.worker.process import SideProcess
from leakaudit.config.audit import AuditConfig
from leakaudit.results.schema import Overhead
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import Totals

if TYPE_CHECKING:
    from leakaudit.capture.rounds.audit import RoundAudit


@dataclass(eq=False)
class RoundRun:
    """A round that is due: one training, from its first step to its end."""

    audit: RoundAudit
    number: int
    """Number of the round in its audit, counted from 0."""
    recorder: Recorder
    description: RunDescription
    started: float = field(default_factory=time.monotonic)
    trained: int = 0
    """Optimizer steps of this round so far."""
    blocked_s: float = 0.0
    """Seconds of the training thread, without those in the recorder."""
    before: BeforeRound | None = field(default=None, init=False)
    """The model's tensors before the first step; None if there was no step."""
    _begun: bool = field(default=False, init=False)

    # ------------------------------------------------------------------ what an adapter asks

    @property
    def config(self) -> AuditConfig:
        """The configuration, with the folder of the audit."""
        return self.audit.config

    @property
    def spool(self) -> Spool:
        """The spool of the audit."""
        return self.audit.spool

    @property
    def side(self) -> SideProcess:
        """The side process of the audit."""
        return self.audit.side

    @property
    def plan(self) -> Plan:
        """Which rounds are due."""
        return self.audit.plan

    @property
    def trainer(self) -> TrainerContext:
        """What the adapter knew of the round when it began."""
        return self.description.trainer

    @property
    def kept(self) -> int:
        """Number of rounds of the audit that are kept so far, in all processes."""
        return self.audit.kept()

    def untouched(self) -> bool:
        """Return whether this round left nothing on the disk; it does so at its end only."""
        return True

    # ------------------------------------------------------------------ the training

    def decide(self, now: Callable[[], StepContext], _step: int) -> None:
        """Begin to record at the first step; later steps belong to the same round."""
        if self._begun:
            return
        self._begun = True
        start = time.perf_counter()
        self.before = BeforeRound.of(self.description.model, self.trainer.optimizer)
        context = replace(now(), step=self.number, total_steps=self.config.rounds)
        self.recorder.start(self.number, self.description.manifest(context, 0))
        self.blocked_s += time.perf_counter() - start

    def after_step(self) -> None:
        """Log new results of earlier rounds."""
        start = time.perf_counter()
        self.trained += 1
        self.audit.log.update()
        self.blocked_s += time.perf_counter() - start

    # ------------------------------------------------------------------ the end

    def end(self, _steps: int) -> None:
        """End the round; nothing is waited for."""
        self.recorder.end_round()  # counts its own seconds
        start = time.perf_counter()
        self.recorder.remove(patience_s=0.0)
        self.blocked_s += time.perf_counter() - start
        self.audit.round_ended(self, completely=True)

    def interrupt(self, what: str) -> None:
        """End a round that an exception ended; it is not kept, because it was not sent.

        Args:
            what: what happened, as the beginning of a sentence.
        """
        self.recorder.remove(patience_s=0.0)
        self.audit.round_ended(self, completely=False)
        notify(f"{what}; round {self.number} is not kept, and the audit goes on with the next one")

    def stop(self) -> None:
        """Remove the hooks, and count the round as if it had not begun."""
        self.recorder.remove(patience_s=0.0)
        self.audit.give_back(self)

    def totals(self, training_s: float) -> Totals:
        """Return what this round adds to the totals of its audit.

        Args:
            training_s: how long the training took, in seconds.
        """
        counters = self.recorder.counters
        return Totals(
            kept=counters.kept,
            not_finite=counters.not_finite,
            failed=counters.failed,
            privacy=self.description.privacy(self.config.privacy, self.trained),
            overhead=Overhead(
                blocked_s=round(counters.blocked_s + self.blocked_s, 4),
                training_s=round(training_s, 4),
                writer_s=round(counters.writer_s, 4),
                memory_mb=round(self.recorder.bytes_held() / 1e6, 3),
                disk_mb=round(counters.written / 1e6, 3),
            ),
        )
