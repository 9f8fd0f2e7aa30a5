"""The audit: attacks and defences over recorded steps, one after another.

Only this package has attacks, defences, metrics and the truth together. The folder of an audit (0700) holds:

    journal.jsonl    one line per finished attempt, appended and synced; an audit that was killed resumes from it
    state.json       run key, audited model, audited steps, controls
    results.json     the results (`leakaudit.results/1.4`); `finish` writes them, verdict.json and report.html
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from leakaudit.audit.active_server import WidePooler, observation_sent, on_active_server
from leakaudit.audit.applied_defenses import defenses_found, defenses_left
from leakaudit.audit.as_sent import SentUpdate, copies_of_produced, sent_of
from leakaudit.audit.attempt import AttemptRunner, Scorer, generator
from leakaudit.audit.battery import Plugins, described
from leakaudit.audit.controls import ControlRunner
from leakaudit.audit.entries import AttemptId, EntryBuilder
from leakaudit.audit.publish import check_text_mode, publish
from leakaudit.audit.results import ResultsBuilder, RunEnd
from leakaudit.audit.scoring.score import applied_metrics
from leakaudit.audit.state import JOURNAL, AuditState, Journal, step_id_of
from leakaudit.audit.step_record import lost_record, regime_of, subject_of
from leakaudit.audit.verified_record import verified_record
from leakaudit.client.observation import Observation
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.config.audit import AuditConfig
from leakaudit.errors import AnatomyError, SnapshotError, type_and_place
from leakaudit.plugins.attack_protocol import Attack
from leakaudit.plugins.catalogue import catalogue
from leakaudit.plugins.defense_protocol import Defense
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.journal import JournalEntry
from leakaudit.results.schema import AttemptStatus, Overhead, Results, StepRecord, Verification, VerificationStatus

logger = logging.getLogger(__name__)


class Audit:
    """One audit: a battery applied to one snapshot after another.

    After an interruption, a later process resumes it with the next unfinished attempt.
    """

    def __init__(
        self,
        folder: Path,
        config: AuditConfig,
        tokenizer: Any,
        *,
        device: torch.device | None = None,
        report: Callable[[JournalEntry], None] | None = None,
        command: str = "",
        key: bytes | None = None,
        source: str = "",
    ) -> None:
        """Open the folder of an audit, and resume an unfinished audit in it.

        Args:
            folder: created if it does not exist; only its owner may read it.
            config: attacks, defences, budget, seed, text mode.
            tokenizer: decodes token ids for scoring.
            device: where attacks compute; None for the CPU.
            report: called after every finished attempt.
            command: how the audit was started, for the report.
            key: key of the hashes of private text, never written to disk. None creates a key and keeps it in `state.json` until the
                audit has finished.
            source: digest of the audited model and data. It identifies an unfinished audit of the same model and data.

        Raises:
            ResultsError: the folder holds an audit by another battery, or its state or journal cannot be read.
            RedactionError: the text mode is full and this is a CI machine.
        """
        check_text_mode(config.text)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.config = config
        self.device = device or torch.device("cpu")
        self._on_gpu = self.device.type == "cuda"
        self._report = report or (lambda _entry: None)
        self._plugins = Plugins.of(config)
        self.battery = described(config, self._plugins)
        self._journal = Journal(folder / JOURNAL)
        self._state = AuditState(folder, self.battery.digest, key=key, source=source)
        self._journal.remove_partial_line()
        scorer = Scorer(config, tokenizer)
        self._entries = EntryBuilder(config, tokenizer, self._state)
        self._attempts = AttemptRunner(config, scorer, self._entries)
        self._controls = ControlRunner(config, tokenizer, self._plugins.attacks, scorer)
        described_plugins = catalogue(
            self._plugins.attacks, self._plugins.defenses, applied_metrics(config.sentence_model)
        )
        self._results = ResultsBuilder(folder, config, self.battery, command, described_plugins)

    @property
    def entries(self) -> tuple[JournalEntry, ...]:
        """Every finished attempt so far."""
        return tuple(self._journal.entries)

    @property
    def controls_left(self) -> int:
        """Number of controls that have not run yet."""
        return max(0, self.config.controls - len(self._state.saved.controls))

    def catch_up(self) -> None:
        """Read the journal again.

        A signal may have stopped the audit after a line was written and before the entry was added in memory.
        """
        self._journal.reload()

    def report_to(self, report: Callable[[JournalEntry], None]) -> None:
        """Call `report` after every finished attempt from now on."""
        self._report = report

    def has_audited(self, step: int) -> bool:
        """Return whether all attempts on a step, and its control if due, are finished."""
        step_id = step_id_of(step)
        controlled = self._state.has_control(step_id) or not self.controls_left
        return controlled and not any(True for _ in self._open_attempts(step_id))

    def step(self, snapshot: Snapshot) -> None:
        """Verify one snapshot, run its unfinished attempts, then its control.

        If the GPU runs out of memory, this step and all later ones are audited on the CPU. This is slow but does not disturb training.
        """
        try:
            self._step(snapshot)
        except torch.OutOfMemoryError:
            if not self._on_gpu:
                raise
            logger.warning(
                "the GPU has no room for the audit of step %d: continuing on the CPU", snapshot.provenance.step
            )
            self.device, self._on_gpu = torch.device("cpu"), False
            torch.cuda.empty_cache()
            self._step(snapshot)

    def lose(self, step: int, reason: str) -> None:
        """Record that a step cannot be audited.

        Its unfinished attempts get the status `error`.

        Args:
            step: optimizer step.
            reason: a clause without private text and without a path.
        """
        step_id = step_id_of(step)
        if self._state.record_of(step_id) is None:
            digest = self._state.keyed_hash(f"lost {step_id}".encode(), digits=64)
            self._state.saved.steps.append(lost_record(step, reason, digest=digest))
        self._state.saved.lost[step_id] = reason
        self._state.save()
        self._close_all(self._open_attempts(step_id), AttemptStatus.ERROR, reason)

    def finish(
        self,
        *,
        refused: int = 0,
        not_kept: Sequence[tuple[int, str]] = (),
        total_steps: int | None = None,
        overhead: Overhead | None = None,
        interrupted: bool = False,
    ) -> Results:
        """Write results.json, verdict.json and report.html.

        Unless the audit was interrupted or snapshots are kept, the run's key is deleted.

        Args:
            refused: number of snapshots that could not be audited and whose step is unknown.
            not_kept: pairs of a number of due steps that were not recorded, and the reason.
            total_steps: optimizer steps of the training run.
            overhead: what the audit cost the training process.
            interrupted: whether the audit was stopped before its end. If so, the key is kept for the rest of the audit.

        Raises:
            ResultsError: no step was audited.
            ConfigError: the policy cannot be read, or names an attack, a defence or a metric that does not exist. In this case only
                `results.json` is written.
        """
        if interrupted:
            self.catch_up()
        for entry in copies_of_produced(self._journal.entries) if self._state.saved.as_sent else ():
            self._journal.append(entry)
        end = RunEnd(refused, not_kept, total_steps, overhead or Overhead(), interrupted)
        results = self._results.build(self._state.saved, self._journal.entries, end, self.device)
        publish(self.folder, results, self.config)
        if not interrupted:
            self._state.close(keep_key=self.config.keep_snapshots)
        return results

    def _step(self, snapshot: Snapshot) -> None:
        observation, truth = snapshot.observation.to(self.device), snapshot.truth.to(self.device)
        client = ClientStep(observation.model, truth, snapshot.recipe, observation.facts)
        sent = None if self._plugins.server is not None else sent_of(snapshot.sent, observation, client)
        record = self._verified(snapshot, client, sent)
        shipped = defenses_left(client, record.verification)
        found = defenses_found(client, record.verification, observation.update)
        client = replace(client, facts=client.facts.model_copy(update={"defenses": found}))
        observation = observation.declaring(found)
        server = self._plugins.server
        if reason := _reason_to_skip(record.verification, observation, server):
            self._close_all(self._open_attempts(record.id), AttemptStatus.SKIPPED, reason)
            return
        if server is not None:
            try:
                client = on_active_server(client, server)
                observation = observation_sent(client, shipped, lambda name: self._generator(record.id, name))
            except (AnatomyError, SnapshotError) as error:
                reason = f"the active server {server.name}: {error}"
                self._close_all(self._open_attempts(record.id), AttemptStatus.SKIPPED, reason)
                return
        for label, defense in self._plugins.defenses:
            self._attack_under(label, defense, record.id, client, observation, truth)
        if sent is not None:
            self._run_all(self._open_attempts(record.id, AS_SENT), sent.seen, truth)
        self._control(record.id, client, observation)

    def _verified(self, snapshot: Snapshot, client: ClientStep, sent: SentUpdate | None) -> StepRecord:
        """Return the record of a step; verify the step if it has no record yet."""
        known = self._state.record_of(step_id_of(snapshot.provenance.step))
        if known is not None:
            return known
        record = verified_record(snapshot, client, sent, self.config, self._state)
        saved = self._state.saved
        saved.as_sent = saved.as_sent or sent is not None
        saved.steps.append(record)
        saved.subject = saved.subject or subject_of(snapshot)
        saved.regime = regime_of(snapshot, saved.regime)
        self._state.save()
        return record

    def _attack_under(
        self, label: str, defense: Defense, step_id: str, client: ClientStep, seen: Observation, truth: Truth
    ) -> None:
        """Apply one defence and run every unfinished attempt under it."""
        todo = list(self._open_attempts(step_id, label))
        if not todo:
            return
        if not seen.whole and not defense.is_identity():
            reason = "only parts of this step were kept, and no defence can be tried on them: `keep: all` keeps it"
            self._close_all(todo, AttemptStatus.SKIPPED, reason)
            return
        try:
            defended = defense(client, seen, self._generator(step_id, label))
        except Exception as error:
            if self._on_gpu and isinstance(error, torch.OutOfMemoryError):
                raise
            # Our own messages say what to do and hold no private text.
            reason = str(error) if isinstance(error, SnapshotError) else type_and_place(error)
            self._close_all(todo, AttemptStatus.ERROR, reason)
            return
        self._run_all(todo, defended, truth)

    def _run_all(self, todo: Iterable[tuple[AttemptId, Attack]], seen: Observation, truth: Truth) -> None:
        for which, attack in todo:
            self._append(self._attempts.run(which, attack, seen, truth, raise_out_of_memory=self._on_gpu))

    def _control(self, step_id: str, client: ClientStep, seen: Observation) -> None:
        """Run the control of a step, if it is due."""
        if self._state.has_control(step_id) or not self.controls_left:
            return
        controls = self._state.saved.controls
        outcome = self._controls.run(step_id, len(controls), client, seen, self.device)
        if outcome is not None:
            controls.append(outcome)
            self._state.save()

    def _open_attempts(self, step_id: str, under: str = "") -> Iterable[tuple[AttemptId, Attack]]:
        """Yield the unfinished attempts on a step, ordered by defence, or those under one."""
        record = self._state.record_of(step_id)
        sent = (AS_SENT,) if record is not None and record.sent is not None else ()  # else copies, which `finish` makes
        for defense in (under,) if under else (*(label for label, _ in self._plugins.defenses), *sent):
            for label, attack in self._plugins.attacks:
                if not self._journal.has(step_id, label, defense):
                    yield AttemptId(step_id, label, defense), attack

    def _close_all(self, attempts: Iterable[tuple[AttemptId, Attack]], status: AttemptStatus, reason: str) -> None:
        """Add entries with the same status and reason for all these attempts."""
        for attempt, _ in attempts:
            self._append(self._entries.failed(attempt, status, reason))

    def _append(self, entry: JournalEntry) -> None:
        self._journal.append(entry)
        self._report(entry)

    def _generator(self, *names: str) -> torch.Generator:
        return generator(self.config.seed, *names)


def _reason_to_skip(verification: Verification, seen: Observation, server: WidePooler | None) -> str:
    """Return why a step is not attacked; empty if it is attacked."""
    if verification.status is VerificationStatus.MISMATCH:
        return "the observed update does not come from the batch that was kept: see its verification"
    if server is not None and not seen.whole:
        return "only parts of this step were kept, and an active server needs all of it: `keep: all`"
    return ""
