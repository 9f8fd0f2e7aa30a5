"""The audit: attacks and defences over recorded steps, one after another.

Only this package has attacks, defences, metrics and the truth together. The folder of an audit (0700) holds:

    journal.jsonl    one line per finished attempt, appended and synced; an audit that was killed resumes from it
    state.json       run key, audited model, audited steps, controls
    conformance.jsonl  what was measured of each step's declared noise
    membership.jsonl  scores of the candidates of each step, without texts
    results.json     the results (`leakaudit.results/1.8`); `finish` writes them, verdict.json and report.html
"""

from __future__ import annotations

import copy
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from leakaudit.audit.active_server import WidePooler, observation_sent, on_active_server
from leakaudit.audit.applied_defenses import defenses_found, defenses_left
from leakaudit.audit.as_sent import SentUpdate, copies_of_produced, sent_of
from leakaudit.audit.attacks_on_step import Attacks
from leakaudit.audit.attempt import AttemptRunner, Scorer, generator
from leakaudit.audit.battery import Plugins, described, is_slow
from leakaudit.audit.controls import ControlRunner
from leakaudit.audit.due_attempts import DueAttempts
from leakaudit.audit.entries import AttemptId, EntryBuilder
from leakaudit.audit.membership.measure import MembershipMeasure
from leakaudit.audit.own_loss import has_own_loss
from leakaudit.audit.pairing import Pairing
from leakaudit.audit.publish import check_text_mode, publish
from leakaudit.audit.results import ResultsBuilder, RunEnd
from leakaudit.audit.scoring.score import applied_metrics
from leakaudit.audit.state import JOURNAL, AuditState, Journal, SavedShard, step_id_of
from leakaudit.audit.step_record import lost_record, regime_of, subject_of
from leakaudit.audit.verified_record import verified_record
from leakaudit.client.observation import Observation
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import AuditConfig
from leakaudit.config.secret_book import SecretBook
from leakaudit.errors import AnatomyError, SnapshotError
from leakaudit.plugins.catalogue import catalogue
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.journal import JournalEntry
from leakaudit.results.origin import Origin
from leakaudit.results.schema import (
    AttemptStatus,
    Overhead,
    Privacy,
    Results,
    StepRecord,
    Verification,
    VerificationStatus,
)
from leakaudit.storage.attempt_deaths import AttemptDeaths

logger = logging.getLogger(__name__)


class Audit:
    """One audit: a battery on one snapshot after another; it goes on where it stopped."""

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
        deaths: AttemptDeaths | None = None,
        pairing: Pairing | None = None,
        shard: SavedShard | None = None,
        origin: Origin | None = None,
        journal: Journal | None = None,
        secrets: SecretBook | None = None,
    ) -> None:
        """Open the folder of an audit, and resume an unfinished audit in it.

        Args:
            folder: created if it does not exist; only its owner may read it.
            config: attacks, defences, budget, seed, text mode.
            tokenizer: decodes token ids for scoring.
            device: where attacks compute; None for the CPU.
            report: called after every finished attempt.
            command: how the audit was started, for the report.
            key: key of the hashes of private text, never written to disk. None creates one, kept in `state.json` until the audit ends.
            source: digest of the audited model and data. It identifies an unfinished audit of the same model and data.
            deaths: counts the processes that died during an attempt; None where nobody starts a new one.
            pairing: key of the marks that let another audit find the steps that it shares with this one; None for no marks.
            shard: what this audit is a part of; None for a whole audit.
            origin: what is known when the run begins; a resumed audit keeps the first one.
            journal: the finished attempts; None for those in the folder's file.
            secrets: the secrets in the batches; None if there are none.

        Raises:
            ResultsError: the folder holds an audit by another battery, or its state or journal cannot be read.
            RedactionError: the text mode is full and this is a CI machine.
        """
        check_text_mode(config.text)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self.config = folder, config
        self.device = device or torch.device("cpu")
        self._on_gpu, self._pairing = self.device.type == "cuda", pairing
        self._membership = MembershipMeasure(folder, config, tokenizer)
        self._plugins = Plugins.of(config)
        self.battery = described(config, self._plugins)
        self._journal = journal or Journal(folder / JOURNAL)
        self._state = AuditState(folder, self.battery.digest, key=key, source=source, shard=shard, origin=origin)
        self._journal.remove_partial_line()
        scorer = Scorer(config, tokenizer)
        entries = EntryBuilder(config, tokenizer, self._state)
        heard = report or (lambda _entry: None)
        again = config.attack_recovered_steps
        self._due = DueAttempts(self._plugins, self._journal, self._state, entries, heard, again)
        runner = AttemptRunner(config, scorer, entries, deaths, secrets)
        self._attacks = Attacks(self._due, runner, config.seed, on_gpu=lambda: self._on_gpu)
        quick_first = sorted(self._plugins.attacks, key=lambda labelled: is_slow(labelled[1]))
        self._controls = ControlRunner(config, tokenizer, quick_first, scorer, self._state.shard)
        plugins = catalogue(self._plugins.attacks, self._plugins.defenses, applied_metrics(config.sentence_model))
        self._results = ResultsBuilder(folder, config, self.battery, command, plugins, pairing.id if pairing else "")

    @property
    def entries(self) -> tuple[JournalEntry, ...]:
        """Every finished attempt so far."""
        return tuple(self._journal.entries)

    @property
    def audited(self) -> int:
        """Number of steps that were begun."""
        return len(self._state.saved.steps)

    @property
    def controls_left(self) -> int:
        """Number of controls that have not run yet."""
        return self._controls.left(self._state)

    def catch_up(self) -> None:
        """Read the journal again, because a signal may have stopped the audit in between."""
        self._journal.reload()

    def report_to(self, report: Callable[[JournalEntry], None]) -> None:
        """Call `report` after every finished attempt from now on."""
        self._due.report = report

    def has_audited(self, step: int) -> bool:
        """Return whether all attempts on a step, and its control if due, are finished."""
        step_id = step_id_of(step)
        return not self._controls.is_due(self._state, step_id) and not any(self._due.of(step_id))

    def only_slow_left(self, step: int) -> bool:
        """Return whether a step was begun and waits for slow attacks only."""
        step_id = step_id_of(step)
        return self._state.record_of(step_id) is not None and not any(self._due.of(step_id, slow=False))

    def step(self, snapshot: Snapshot, others_wait: Callable[[], bool] = lambda: False) -> bool:
        """Verify one snapshot, run its unfinished attempts, then its control.

        Quick attacks come first. If the GPU runs out of memory, this step and all later ones are audited on the CPU.

        Args:
            snapshot: the step.
            others_wait: returns whether other steps wait for quick attacks. If so, the slow attacks on this one are left to a later call.

        Returns:
            Whether nothing is left to do on this step.
        """
        try:
            return self._step(snapshot, others_wait)
        except torch.OutOfMemoryError:
            if not self._on_gpu:
                raise
            logger.warning("the GPU is full: the audit of step %d continues on the CPU", snapshot.provenance.step)
            self.device, self._on_gpu = torch.device("cpu"), False
            torch.cuda.empty_cache()
            return self._step(snapshot, others_wait)

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
        self._due.close(self._due.of(step_id), AttemptStatus.ERROR, reason)

    def unlose(self, step: int) -> None:
        """Forget that a step could not be audited, so that it can be audited again."""
        lost = (step_id_of(step), AttemptStatus.ERROR, self._state.unlose(step_id_of(step)))
        self._journal.remove(lambda made: (made.step, made.status, made.reason) == lost)

    def leave_out(self, reason: str) -> int:
        """Close every attempt that is still due on the steps so far.

        Args:
            reason: a clause without private text.

        Returns:
            Number of these attempts.
        """
        before = len(self._journal.entries)
        for one in self._state.saved.steps:
            self._due.close(self._due.of(one.id), AttemptStatus.SKIPPED, reason)
        return len(self._journal.entries) - before

    def results_so_far(self) -> Results:
        """Return the results of the finished attempts; nothing is written."""
        return self._results.build(self._state.saved, self._journal.entries, RunEnd(simulated=True), self.device)

    def finish(
        self,
        *,
        refused: int = 0,
        not_kept: Sequence[tuple[int, str]] = (),
        total_steps: int | None = None,
        overhead: Overhead | None = None,
        privacy: tuple[Privacy, ...] = (),
        interrupted: bool = False,
        simulated: bool = False,
    ) -> Results:
        """Write results.json, verdict.json and report.html.

        Unless the audit was interrupted or snapshots are kept, the run's key is deleted.

        Args:
            refused: number of snapshots that could not be audited and whose step is unknown.
            not_kept: pairs of a number of due steps that were not recorded, and the reason.
            total_steps: optimizer steps of the training run.
            overhead: what the audit cost the training process.
            privacy: what the accountant of the training said.
            interrupted: whether the audit was stopped before its end. If so, the key is kept for the rest of the audit.
            simulated: whether no training run made the steps.

        Raises:
            ResultsError: no step was audited.
            ConfigError: the policy cannot be read, or names something that does not exist. Only `results.json` is written then.
        """
        if interrupted:
            self.catch_up()
        saved = self._state.saved
        for entry in copies_of_produced(self._journal.entries, saved.steps) if saved.as_sent else ():
            self._journal.append(entry)
        cost = overhead or Overhead()
        end = RunEnd(refused, not_kept, total_steps, cost, interrupted, simulated, final=True, privacy=privacy)
        results = self._results.build(saved, self._journal.entries, end, self.device)
        publish(self.folder, results, self.config)
        if not interrupted:
            self._state.close(keep_key=self.config.keep_snapshots)
        return results

    def _step(self, snapshot: Snapshot, others_wait: Callable[[], bool]) -> bool:
        observation, truth = snapshot.observation.to(self.device), snapshot.truth.to(self.device)
        client = ClientStep(observation.model, truth, snapshot.recipe, observation.facts)
        served = self._plugins.server is not None
        sent = None if served else sent_of(snapshot, observation, client)
        record = self._verified(snapshot, client, sent)
        shipped = defenses_left(client, record.verification)
        client, observation = _declaring(client, observation, record.verification)
        server = self._plugins.server
        if reason := _reason_to_skip(record.verification, observation, server):
            self._due.close(self._due.of(record.id), AttemptStatus.SKIPPED, reason)
            return True
        if server is not None:
            try:
                client = on_active_server(client, server)
                observation = observation_sent(client, shipped, partial(generator, self.config.seed, record.id))
            except (AnatomyError, SnapshotError) as error:
                reason = f"the active server {server.name}: {error}"
                self._due.close(self._due.of(record.id), AttemptStatus.SKIPPED, reason)
                return True
        self._membership.measure(record.id, observation if sent is None else sent.seen, truth)
        begun = self.only_slow_left(snapshot.provenance.step)
        for slow in (False, True):
            slow_left = self._due.needed(self._due.of(record.id, slow=True), observation)
            if slow and not begun and any(slow_left) and others_wait():
                return False
            for label, defense in self._plugins.defenses:
                todo = self._due.needed(self._due.of(record.id, label, slow=slow), observation)
                self._attacks.under(label, defense, todo, client, observation, truth)
            if sent is not None:
                todo = self._due.needed(self._due.of(record.id, AS_SENT, slow=slow), sent.seen)
                self._attacks.run_all(todo, sent.seen, truth)
        self._controls.run_if_due(self._state, record.id, client, observation, self.device)
        return True

    def _verified(self, snapshot: Snapshot, client: ClientStep, sent: SentUpdate | None) -> StepRecord:
        """Return the record of a step; verify the step if it has no record yet."""
        if (known := self._state.record_of(step_id_of(snapshot.provenance.step))) is not None:
            return known
        record = verified_record(snapshot, client, sent, self.config, self._state, self._pairing)
        saved = self._state.saved
        saved.as_sent = saved.as_sent or sent is not None
        saved.steps.append(record)
        saved.subject = saved.subject or subject_of(snapshot)
        saved.regime = regime_of(snapshot, saved.regime)
        self._state.save()
        return record


def reloaded(audit: Audit) -> Audit:
    """Return an audit as its files are on the disk.

    Another thread can finish it while `audit` goes on.

    Raises:
        ResultsError: a file cannot be read.
    """
    other = copy.copy(audit)
    other._journal = Journal(audit.folder / JOURNAL)  # before the steps, so that none is missing
    other._state = audit._state.reloaded()
    other._due = replace(audit._due, journal=other._journal, state=other._state)
    return other


def announce_to(audit: Audit, begin: Callable[[AttemptId], None]) -> None:
    """Call `begin` before every attempt from now on."""
    audit._due.begin = begin


def seconds_left(audit: Audit, steps: Iterable[int]) -> float | None:
    """Return about how long the attempts on steps will take.

    It is None until every attack that is still due has been made once.

    Args:
        audit: the audit, which has made some attempts.
        steps: the optimizer steps that wait.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for entry in audit.entries:
        times[entry.attempt.attack].append(entry.attempt.wall_s)
    due = Counter(which.attack for step in steps for which, _ in audit._due.of(step_id_of(step)))
    if any(attack not in times for attack in due):
        return None
    return sum(n * fmean(times[attack]) for attack, n in due.items())


def _declaring(client: ClientStep, seen: Observation, stamp: Verification) -> tuple[ClientStep, Observation]:
    """Return a step and what is seen of it with the defences that were found in it."""
    found = defenses_found(client, stamp, seen.update)
    own = has_own_loss(client, stamp) if seen.whole else None
    client = replace(client, facts=client.facts.model_copy(update={"defenses": found, "own_loss": own}))
    return client, seen.declaring(found, own_loss=own)


def _reason_to_skip(verification: Verification, seen: Observation, server: WidePooler | None) -> str:
    """Return why a step is not attacked; empty if it is attacked."""
    if verification.status is VerificationStatus.MISMATCH:
        return "the observed update does not come from the batch that was kept: see its verification"
    if server is not None and not seen.whole:
        return "only parts of this step were kept, and an active server needs all of it: `keep: all`"
    return ""
