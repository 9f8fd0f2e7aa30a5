"""Attacks x defences over snapshots: the only room where attacks, defences and metrics meet the truth.

An `Audit` is one run folder (0700):

    journal.jsonl    one line per finished attempt, appended and synced; what a killed audit resumes from
    state.json       run key, what is audited, audited steps, controls
    results.json     the product (`leakaudit.results/1.3`), verdict.json, report.html: written by `finish`
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import logging
import math
import platform
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leakaudit import __version__
from leakaudit.audit.active_server import named_server, on_active_server
from leakaudit.audit.applied_defenses import defenses_found, defenses_left
from leakaudit.audit.canaries import CANARIES
from leakaudit.audit.scoring.patterns import strip
from leakaudit.audit.scoring.reachability import Reached, ReachedSequence, reachability, unknown
from leakaudit.audit.scoring.score import Scored, ScoredSequence, score, with_similarity
from leakaudit.audit.verification import verify
from leakaudit.client.array_batches import array_batch
from leakaudit.client.facts import DeclaredDefense, Granted
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep, make_batch, with_random_state
from leakaudit.client.truth import Truth, reading_of
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.config.invocation import public_label, public_reason
from leakaudit.errors import AnatomyError, ResultsError, SnapshotError, type_and_place
from leakaudit.files.json_lines import split_lines
from leakaudit.files.private_files import append_line, write_atomic
from leakaudit.metrics.semantic_similarity import SemanticSimilarity
from leakaudit.models.array_classifier import ArrayClassifier
from leakaudit.models.loading import Task
from leakaudit.plugins.attack_protocol import APPLIES, Attack, Reconstruction, not_applicable
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attacks as attack_registry
from leakaudit.registry import defenses as defense_registry
from leakaudit.results.files import to_json, with_digest
from leakaudit.results.journal import JournalEntry, LabelSample, Sample, load_journal
from leakaudit.results.schema import (
    Attempt,
    AttemptStatus,
    Battery,
    Control,
    Controls,
    Coverage,
    Missing,
    NotTested,
    Overhead,
    Regime,
    Results,
    RunInfo,
    SequenceScore,
    StepRecord,
    Subject,
    TextMode,
    ThreatModel,
    Verification,
    VerificationStatus,
)
from leakaudit.results.summary import summarise
from leakaudit.results.wording import counted

logger = logging.getLogger(__name__)

NEVER_TESTED = (
    ("aggregated updates", "one client's update was audited, not a sum over clients"),
    ("membership and attribute inference", "only text and labels of the batch are attacked"),
)
"""What no audit of this version says anything about."""

JOURNAL, STATE = "journal.jsonl", "state.json"
"""What an audit that goes on is made of again."""

PARTS_ONLY = not_applicable(
    "only what attacks on the first blocks read was kept of this step (`keep: auto`), and this attack reads everything: `keep: all` keeps it"
)
NO_TEXT_TO_READ = not_applicable("the model classifies arrays: its batches hold no text")


class _Controls(BaseModel):
    """Outcome of one step's controls."""

    step: str
    recovered: bool
    by: str = ""
    """The attack that recovered the canary."""
    matched_other: bool | None = None
    """The canary's reconstruction matched the real batch; None where no attack guessed text."""


class _State(BaseModel):
    """`state.json`: what the journal does not hold."""

    model_config = ConfigDict(extra="ignore")

    run: str
    started: str
    battery: str
    key: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Hex of the run's HMAC key; destroyed when the audit finishes."""
    source: str = ""
    """Digest of what is audited, where that is known before the first step; destroyed when the audit finishes: of a text that is
    guessed the same digest can be made."""
    finished: bool = False
    """The audit came to its end; what is added later is another part of it."""
    steps: list[StepRecord] = []
    controls: list[_Controls] = []
    lost: dict[str, str] = {}
    """Steps that were kept and could not be audited to the end -> why."""
    subject: Subject | None = None
    regime: Regime | None = None


@dataclass(frozen=True)
class Unfinished:
    """An audit that did not come to its end, or one that is to run: what tells whether two are the same."""

    battery: str
    """Digest of attacks, defences, knobs, budget, seed and version."""
    source: str
    """Digest of what is audited."""
    attempts: int
    """Those that are finished; of one that is to run, all."""

    def same_as(self, other: Unfinished) -> bool:
        """Return whether one is the rest of the other."""
        return bool(self.source) and (self.battery, self.source) == (other.battery, other.source)


def unfinished(folder: Path) -> Unfinished | None:
    """Return the unfinished audit in a folder.

    None where there is none, or none that can be read.
    """
    try:
        state = _State.model_validate_json((folder / STATE).read_bytes())
        done = len(load_journal(folder / JOURNAL))
    except (OSError, ValidationError, ResultsError):
        return None
    return None if state.finished else Unfinished(state.battery, state.source, done)


def battery_of(config: AuditConfig) -> Battery:
    """Return the battery of a configuration: its members and the digest over all knobs.

    Raises:
        ConfigError: a plugin or an option does not exist.
    """
    attacks = _create(attack_registry, config.attacks, by_name=True)
    return _battery(config, attacks, _create(defense_registry, config.defenses, by_name=False))


class Audit:
    """One audit: a battery applied to one snapshot after another, resumable at every attempt."""

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
        """Open a run folder, or go on with one.

        Args:
            folder: made if missing, private to its owner.
            config: attacks, defences, budget, seed, text mode.
            tokenizer: decodes token ids for scoring.
            device: where attacks compute.
            report: called after every finished attempt.
            command: how the audit was started, for the report.
            key: of the hashes of private text; it is never written down. None to make one and keep it in `state.json` until
                the audit is over.
            source: digest of what is audited, by which an unfinished audit of the same is known.

        Raises:
            ResultsError: the folder holds the results of another battery, or a state or a journal that cannot be read.
            RedactionError: text mode full on a CI machine.
        """
        from leakaudit.reports.redaction import refuse_full_in_ci

        if config.text is TextMode.FULL:
            refuse_full_in_ci()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.config = config
        self.tokenizer = tokenizer
        self.device = device or torch.device("cpu")
        self._on_gpu = self.device.type == "cuda"
        self._report = report or (lambda entry: None)
        self._command = command
        self._given_key = key
        self._source = source
        self._attacks = _create(attack_registry, config.attacks, by_name=True)
        self._defenses = _create(defense_registry, config.defenses, by_name=False)
        self._server = None if config.server is None else named_server(config.server.name, config.server.options)
        self.battery = _battery(config, self._attacks, self._defenses)
        self._entries = load_journal(self._journal_path)
        self._state = self._load_state()
        self._cut_torn_line()

    @property
    def _journal_path(self) -> Path:
        return self.folder / JOURNAL

    @property
    def _state_path(self) -> Path:
        return self.folder / STATE

    @property
    def entries(self) -> tuple[JournalEntry, ...]:
        """Every finished attempt so far."""
        return tuple(self._entries)

    @property
    def controls_left(self) -> int:
        """Control steps that are still to be run."""
        return max(0, self.config.controls - len(self._state.controls))

    def catch_up(self) -> None:
        """Read the journal again.

        What stopped the audit may have come between writing a line and noting it here.
        """
        self._entries = load_journal(self._journal_path)
        self._cut_torn_line()

    def report_to(self, report: Callable[[JournalEntry], None]) -> None:
        """Call `report` after every finished attempt from now on."""
        self._report = report

    def has_audited(self, step: int) -> bool:
        """Return whether every attempt on a step is finished, and its control if it has one."""
        name = f"st-{step:06d}"
        controls = {control.step for control in self._state.controls}
        controlled = name in controls or len(controls) >= self.config.controls
        pairs = ((attack, defense) for defense, _ in self._defenses for attack, _ in self._attacks)
        return controlled and all(self._done(name, *pair) for pair in pairs)

    def step(self, snapshot: Snapshot) -> None:
        """Verify one snapshot, then run every attempt on it that the journal does not hold yet, then the controls.

        Where a GPU has no more room for it, this and all that comes computes on the CPU: slowly, but not at training's cost.
        """
        try:
            self._step(snapshot)
        except torch.OutOfMemoryError:
            if not self._on_gpu:
                raise
            logger.warning(
                "the GPU has no room for the audit of step %d: going on on the CPU", snapshot.provenance.step
            )
            self.device, self._on_gpu = torch.device("cpu"), False
            torch.cuda.empty_cache()
            self._step(snapshot)

    def _step(self, snapshot: Snapshot) -> None:
        observation = snapshot.observation.to(self.device)
        truth = snapshot.truth.to(self.device)
        client = ClientStep(observation.model, truth, snapshot.recipe, observation.facts)
        record = self._record(snapshot, client)
        left = defenses_left(client, record.verification)
        found = defenses_found(client, record.verification, observation.update)
        client = replace(client, facts=client.facts.model_copy(update={"defenses": found}))
        observation = observation.declaring(found)
        if record.verification.status is VerificationStatus.MISMATCH:
            self._skip_all(
                record, "the observed update does not come from the batch that was kept: see its verification"
            )
            return
        if self._server is not None and not observation.whole:
            self._skip_all(
                record, "only parts of this step were kept, and an active server needs all of it: `keep: all`"
            )
            return
        if self._server is not None:
            try:
                client = on_active_server(client, self._server)
                observation = self._sent(client, left, record.id)
            except (AnatomyError, SnapshotError) as error:
                self._skip_all(record, f"the active server {self._server.name}: {error}")
                return
        for defense_label, defense in self._defenses:
            todo = [
                (label, attack) for label, attack in self._attacks if not self._done(record.id, label, defense_label)
            ]
            if not todo:
                continue
            if not observation.whole and not defense.is_identity():
                why = "only parts of this step were kept, and no defence can be tried on them: `keep: all` keeps it"
                for label, _ in todo:
                    self._append(self._failed(record.id, label, defense_label, AttemptStatus.SKIPPED, why))
                continue
            try:
                seen = defense(client, observation, self._generator(record.id, defense_label))
            except Exception as error:
                if self._on_gpu and isinstance(error, torch.OutOfMemoryError):
                    raise
                why = str(error) if isinstance(error, SnapshotError) else type_and_place(error)  # ours say what to do
                for label, _ in todo:
                    self._append(self._failed(record.id, label, defense_label, AttemptStatus.ERROR, why))
                continue
            for label, attack in todo:
                self._append(self._attempt(record.id, label, attack, defense_label, seen, truth))
        self._run_controls(record, client, truth, observation)

    def _sent(self, client: ClientStep, shipped: tuple[DeclaredDefense, ...], step_id: str) -> Observation:
        """Return what would be sent of a step that nobody recorded: with the defences that the run ships.

        Raises:
            SnapshotError: a declared defence is not registered, so nobody knows what it would send.
        """
        bare = replace(client, facts=client.facts.model_copy(update={"defenses": ()}))
        seen = bare.observe()
        for declared in shipped:
            defense = declared.known()
            if defense is None:
                raise SnapshotError(
                    f"the declared {declared.name} is not registered here, so what it sends is not known"
                )
            seen = defense(bare, seen, self._generator(step_id, declared.name))
        return seen

    def lose(self, step: int, reason: str) -> None:
        """Note a step that was kept and cannot be audited.

        Every attempt on it that is still due has the status `error`.

        Args:
            step: optimizer step.
            reason: in a clause, without text of the batch and without a path.
        """
        step_id = f"st-{step:06d}"
        if all(record.id != step_id for record in self._state.steps):
            self._state.steps.append(
                StepRecord(
                    id=step_id,
                    step=step,
                    phase=_phase(step, None),
                    snapshot=f"hmac-{self._keyed(f'lost {step_id}'.encode(), digits=64)}",
                    n_sequences=0,
                    n_tokens_bucket="unknown",
                    verification=Verification(status=VerificationStatus.UNVERIFIABLE, note=reason),
                )
            )
        self._state.lost[step_id] = reason
        self._save_state()
        for defense, _ in self._defenses:
            for label, _ in self._attacks:
                if not self._done(step_id, label, defense):
                    self._append(self._failed(step_id, label, defense, AttemptStatus.ERROR, reason))

    def finish(
        self,
        *,
        refused: int = 0,
        not_kept: Sequence[tuple[int, str]] = (),
        total_steps: int | None = None,
        overhead: Overhead | None = None,
        interrupted: bool = False,
        code: tuple[str, bool] | None = None,
    ) -> Results:
        """Write results.json, verdict.json and report.html, and destroy the run's key.

        Args:
            refused: snapshots that could not be audited, of which nobody knows what step they were.
            not_kept: how many steps that were due were not kept, with the reason.
            total_steps: optimizer steps of the training run.
            overhead: what the audit cost the training process.
            interrupted: the audit was stopped before it was through.
            code: commit of the audited code and whether its tree had changes.

        Raises:
            ResultsError: not a single step was audited.
            ConfigError: the policy cannot be read, or names an attack, a defence or a metric that does not exist; then `results.json`
                is written, and neither verdict nor report.
        """
        from leakaudit.gate.evaluate import evaluate
        from leakaudit.gate.policy import default_policy, load_policy
        from leakaudit.gate.verdict import to_json as verdict_json
        from leakaudit.plugins.names import names_for, registered_names
        from leakaudit.reports.page import write_report

        if interrupted:
            self.catch_up()
        results = with_digest(
            self._results(self._coverage(refused, not_kept, total_steps), overhead or Overhead(), interrupted, code)
        )
        text = json.dumps(to_json(results), indent=1, ensure_ascii=False, allow_nan=False)
        write_atomic(self.folder / "results.json", text)
        names = names_for(results) | registered_names()
        policy = load_policy(self.config.policy, names) if self.config.policy else default_policy()
        now = datetime.now(UTC)
        verdict = evaluate(results, policy, now=now, results_sha256=hashlib.sha256(text.encode()).hexdigest())
        write_atomic(self.folder / "verdict.json", json.dumps(verdict_json(verdict), indent=1))
        write_report(
            self.folder,
            self.config.text,
            now=now,
            policy=policy,
            verdict=verdict,
            allow_full=self.config.allow_full,
        )
        if not interrupted:  # an interrupted audit goes on under the same key
            self._state.finished, self._state.source = True, ""
            self._state.key = self._state.key if self.config.keep_snapshots else ""
            self._save_state()
        return results

    # ------------------------------------------------------------------ attempts

    def _attempt(
        self, step: str, label: str, attack: Attack, defense: str, seen: Observation, truth: Truth
    ) -> JournalEntry:
        """Run one attack and score it. A crash becomes the status `error`, with its type and place only."""
        start = time.perf_counter()
        try:
            fits = (
                APPLIES if attack.goal == "labels" or not isinstance(seen.model, ArrayClassifier) else NO_TEXT_TO_READ
            )
            fits = fits and (attack.applies(seen) if _reads(attack, seen) else PARTS_ONLY)
            if not fits:
                return self._failed(
                    step, label, defense, AttemptStatus.NOT_APPLICABLE, public_reason(fits.reason, attack), start
                )
            guess = attack(seen, self._generator(step, label, defense), Budget(self.config.budget_s))
            seconds = time.perf_counter() - start
            scored = self._score(guess, truth, seen)
        except AnatomyError as error:
            reason = public_reason(str(error), attack)
            return self._failed(step, label, defense, AttemptStatus.NOT_APPLICABLE, reason, start)
        except Exception as error:
            if self._on_gpu and isinstance(error, torch.OutOfMemoryError):
                raise
            return self._failed(step, label, defense, AttemptStatus.ERROR, type_and_place(error), start)
        reached = self._reached(guess, truth, seen)
        return self._entry(step, label, defense, guess, scored, reached, seconds, seen)

    def _score(self, guess: Reconstruction, truth: Truth, seen: Observation) -> Scored:
        labels = truth.labels() if seen.facts.task == "classification" else None
        vocabulary = seen.facts.vocabulary
        texts = truth.texts()
        scored = score(
            guess,
            _texts(truth, seen),
            labels,
            seen.facts.num_labels,
            self.tokenizer,
            vocabulary.wordless_ids,
            self.config.min_tokens,
            [text.masked for text in texts] if _texts(truth, seen) else None,
        )
        likeness = self.config.sentence_model
        return scored if likeness is None else with_similarity(scored, SemanticSimilarity(likeness))

    def _reached(self, guess: Reconstruction, truth: Truth, seen: Observation) -> Reached:
        """Ask what was in reach. Where an attack's answer fails, that number is missing, and the scores stand."""
        sequences = _texts(truth, seen)
        try:
            return reachability(guess.reach, sequences, seen.facts.vocabulary.wordless_ids)
        except Exception as error:
            reason = Missing(
                missing=f"the attack's account of what it could have reached failed: {type_and_place(error)}"
            )
            return unknown(reason, len(sequences))

    def _failed(
        self, step: str, attack: str, defense: str, status: AttemptStatus, reason: str, start: float | None = None
    ) -> JournalEntry:
        seconds = 0.0 if start is None else time.perf_counter() - start
        return JournalEntry(
            attempt=Attempt(
                step=step,
                attack=attack,
                defense=defense,
                seed=self.config.seed,
                status=status,
                reason=reason,
                wall_s=round(seconds, 4),
            )
        )

    def _entry(
        self,
        step: str,
        label: str,
        defense: str,
        guess: Reconstruction,
        scored: Scored,
        reached: Reached,
        seconds: float,
        seen: Observation,
    ) -> JournalEntry:
        exhausted = guess.stop == "budget"
        both = zip(scored.sequences, reached.by_sequence, strict=True)
        sequences = tuple(self._sequence_score(step, i, found, reach) for i, (found, reach) in enumerate(both))
        attempt = Attempt(
            step=step,
            attack=label,
            defense=defense,
            seed=self.config.seed,
            status=AttemptStatus.BUDGET_EXHAUSTED if exhausted else AttemptStatus.RAN,
            reason=f"stopped after {self.config.budget_s:g} s with its best guess so far" if exhausted else "",
            stop=guess.stop,
            granted=(*seen.facts.granted.names(), *_grants_of(self._attacks, label)),
            wall_s=round(seconds, 4),
            gpu_s=round(seconds, 4) if self.device.type == "cuda" else 0.0,
            events=scored.events,
            sequences=sequences,
            scores=dict(scored.scores),
            facts={name: float(value) for name, value in guess.diagnostics.items() if abs(float(value)) < float("inf")},
            reachable_tokens=reached.tokens,
            reachable_sequences=reached.sequences,
        )
        if self.config.text is TextMode.HASH:
            return JournalEntry(attempt=attempt)
        names = ("sequences", "tokens")
        guessed_text = any(getattr(guess, name) is not None for name in names)
        samples = (
            tuple(self._sample(attempt, s, found) for s, found in zip(sequences, scored.sequences, strict=True))
            if guessed_text
            else ()
        )
        return JournalEntry(attempt=attempt, samples=samples, labels=self._label_sample(attempt, scored))

    def _sequence_score(self, step: str, index: int, found: ScoredSequence, reach: ReachedSequence) -> SequenceScore:
        ids = found.pair.true_ids
        return SequenceScore(
            id=f"{step.replace('st-', 's-')}-{index}",
            hmac=self._hmac(ids),
            scores={name: number for name, number in found.numbers.items() if number is not None},
            min_tokens_bucket=bucket(len(ids)),
            long_enough=found.long_enough,
            confidence=found.pair.confidence,
            proved=found.pair.proved,
            reachable=reach.share,
            passes=reach.passes,
            strip=self._strip(found),
        )

    def _strip(self, found: ScoredSequence) -> str | None:
        """Return which parts of a sequence came back; None where text mode hash hides that, or nothing was guessed."""
        guessed = found.guess_pattern is not None or found.numbers.get("token_recall") is not None
        return strip(found.true_pattern) if guessed and self.config.text is not TextMode.HASH else None

    def _sample(self, attempt: Attempt, scored: SequenceScore, found: ScoredSequence) -> Sample:
        full = self.config.text is TextMode.FULL
        return Sample(
            step=attempt.step,
            attack=attempt.attack,
            defense=attempt.defense,
            sequence=scored.id,
            true_pattern=found.true_pattern,
            guess_pattern=found.guess_pattern,
            true_tokens=self._display(found.pair.true_ids) if full else None,
            guess_tokens=self._display(found.pair.guess_ids) if full and found.guess_pattern is not None else None,
        )

    def _label_sample(self, attempt: Attempt, scored: Scored) -> LabelSample | None:
        if scored.labels is None:
            return None
        return LabelSample(
            step=attempt.step,
            attack=attempt.attack,
            defense=attempt.defense,
            true_counts=scored.labels.true,
            guess_counts=scored.labels.guess,
        )

    def _display(self, ids: Iterable[int]) -> tuple[str, ...]:
        return tuple(str(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids)))

    def _skip_all(self, record: StepRecord, reason: str) -> None:
        for defense, _ in self._defenses:
            for label, _ in self._attacks:
                if not self._done(record.id, label, defense):
                    self._append(self._failed(record.id, label, defense, AttemptStatus.SKIPPED, reason))

    def _done(self, step: str, attack: str, defense: str) -> bool:
        mine = (step, attack, defense)
        return any((e.attempt.step, e.attempt.attack, e.attempt.defense) == mine for e in self._entries)

    def _append(self, entry: JournalEntry) -> None:
        """Append an attempt to the journal and wait until it is on the disk."""
        append_line(self._journal_path, entry.model_dump_json())
        self._entries.append(entry)
        self._report(entry)

    def _cut_torn_line(self) -> None:
        """Drop what a killed worker left of its last line, so that the next one starts on a line of its own."""
        if not self._journal_path.exists():
            return
        content = self._journal_path.read_bytes()
        kept = "".join(entry.model_dump_json() + "\n" for entry in self._entries)
        if len(split_lines(content)) != len(self._entries) or (content and not content.endswith(b"\n")):
            write_atomic(self._journal_path, kept)

    # ------------------------------------------------------------------ steps and controls

    def _record(self, snapshot: Snapshot, client: ClientStep) -> StepRecord:
        """Return the record of a step, verified once."""
        provenance = snapshot.provenance
        step_id = f"st-{provenance.step:06d}"
        known = next((record for record in self._state.steps if record.id == step_id), None)
        if known is not None:
            return known
        sequences = snapshot.truth.sequences()
        # `check: rebuilt` takes nobody's word for it, the word of whoever wrote the snapshot included.
        stamped = snapshot if self.config.check == "in_place" else replace(snapshot, checked=None)
        verification = _stamp(stamped, client)
        shipped = defenses_left(
            client, verification
        )  # as declared: numbers of one step would give each step another name
        record = StepRecord(
            id=step_id,
            step=provenance.step,
            epoch=provenance.epoch,
            phase=_phase(provenance.step, provenance.total_steps),
            snapshot=f"hmac-{self._keyed(snapshot.observation.digest().encode(), digits=64)}",
            n_sequences=len(sequences),
            n_tokens_bucket=bucket(sum(map(len, sequences))),
            verification=verification,
            loss=_finite(provenance.loss),
            shipped_defense="+".join(map(_with_strength, shipped)) or "none",
            n_sentences=_sentences(snapshot, self.config.min_tokens),
        )
        self._state.steps.append(record)
        self._state.subject = self._state.subject or _subject(snapshot)
        self._state.regime = _regime(snapshot, len(sequences), self._state.regime)
        self._save_state()
        return record

    def _run_controls(self, record: StepRecord, client: ClientStep, truth: Truth, seen: Observation) -> None:
        """Attack an undefended canary step with known text: it must be recovered, and must not match the real batch."""
        done = {control.step for control in self._state.controls}
        if record.id in done or len(done) >= self.config.controls:
            return
        canary, batch = self._canary(client, len(done))
        if canary is None:
            return
        recovered, by, matched = False, "", None
        for label, attack in self._attacks:
            budget = Budget(self.config.budget_s)
            try:
                # An attack that did not run on the step itself is no positive control of it.
                if getattr(attack, "blind", False) or not _reads(attack, seen) or not attack.applies(canary):
                    continue
                guess = attack(canary, self._generator(record.id, label, "canary"), budget)
                own, other = self._score(guess, batch, canary), self._score(guess, truth, canary)
            except Exception:  # a crashing attack is no positive control; its real attempt reports the error
                continue
            wanted = "exact_sequence" if attack.goal == "text" else "label_counts"
            if attack.goal == "text":
                matched = bool(matched) or "exact_sequence" in other.events
            if wanted in own.events and not by:
                recovered, by = True, label
            if recovered and matched is not None:
                break
        self._state.controls.append(_Controls(step=record.id, recovered=recovered, by=by, matched_other=matched))
        self._save_state()

    def _canary(self, client: ClientStep, turn: int) -> tuple[Observation | None, Truth]:
        """Return an undefended one-sentence step on the run's own model and mode, and its batch."""
        facts = client.facts.model_copy(update={"defenses": (), "local_steps": 1, "own_loss": None})
        # Labels that are words are the canary's own words: a masked language model then predicts what it is shown.
        words = ("causal-lm", "masked-lm", "encoder-decoder")
        task: Task = "causal-lm" if facts.task in words else "classification"
        text = CANARIES[turn % len(CANARIES)]
        label = turn % max(1, facts.num_labels or 1)
        if isinstance(client.model, ArrayClassifier):
            # Two, because batch normalisation does not train on one.
            noise = torch.rand((2, *(facts.input_shape or ())), generator=self._generator("canary", str(turn)))
            batch = array_batch(noise, torch.tensor([label, label]))
        else:
            batch = make_batch(self.tokenizer, [text], [label], task, facts.vocabulary.max_length)
        # What was granted or public of the real batch is wrong for this one, which has a single sequence.
        lengths, labels = facts.granted.lengths, facts.granted.labels
        own = Granted(
            lengths=None if lengths is None else (int(batch.inputs["input_ids"].shape[1]),),
            labels=None if labels is None else (label,),
        )
        bound = None if facts.batch_size_bound is None else len(batch.inputs["input_ids"])
        facts = facts.model_copy(update={"granted": own, "batch_size_bound": bound})
        batch = with_random_state(batch, self.config.seed + turn)
        truth = Truth((batch,), reading_of(facts)).to(self.device)
        recipe = StepRecipe(training=client.recipe.training, max_grad_norm=client.recipe.max_grad_norm)
        try:
            return ClientStep(client.model, truth, recipe, facts).observe(), truth
        except (SnapshotError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None, truth  # the report then says that the control did not run

    # ------------------------------------------------------------------ results

    def _results(
        self,
        coverage: Coverage,
        overhead: Overhead,
        interrupted: bool,
        code: tuple[str, bool] | None,
    ) -> Results:
        state = self._state
        if state.subject is None or state.regime is None:
            raise ResultsError(
                f"{self.folder}: no step was audited, so there are no results; "
                "was the run shorter than `first_step`, or was every snapshot skipped?"
            )
        attempts = tuple(entry.attempt for entry in self._entries)
        subject = state.subject
        if code is not None:
            subject = subject.model_copy(update={"code_commit": code[0], "code_dirty": code[1]})
        granted = tuple(sorted({name for attempt in attempts for name in attempt.granted}))
        return Results(
            run=RunInfo(
                id=state.run,
                started=state.started,
                finished=_now(),
                tool=__version__,
                battery=self.battery,
                text_mode=TextMode.HASH,
                seed=self.config.seed,
                command=self._command,
                environment=_environment(self.device),
                interrupted=interrupted,
            ),
            subject=subject,
            threat_model=_threat_model(self.config.server, granted),
            regime=state.regime,
            steps=tuple(state.steps),
            attempts=attempts,
            summaries=summarise(attempts),
            controls=_count(state.controls),
            coverage=coverage,
            overhead=overhead,
            min_tokens=self.config.min_tokens,
        )

    def _coverage(self, refused: int, not_kept: Sequence[tuple[int, str]], total_steps: int | None) -> Coverage:
        ran = {spec.name for spec in self.config.attacks}
        lost = [(f"step {int(step[3:])}", why) for step, why in self._state.lost.items()]
        missed = [(f"{counted(number, 'step')} that should have been kept", why) for number, why in not_kept]
        servers = _servers_not_tested(self.config.server)
        partly = Counter(e.attempt.attack for e in self._entries if e.attempt.reason == PARTS_ONLY.reason)
        lost += [(f"{attack}, on {counted(n, 'step')}", PARTS_ONLY.reason) for attack, n in partly.items()]
        return Coverage(
            not_tested=tuple(NotTested(what=what, why=why) for what, why in (*lost, *missed, *servers, *NEVER_TESTED)),
            not_run=tuple(
                NotTested(what=name, why="known to the tool, not in this battery")
                for name in attack_registry.names()
                if name not in ran
            ),
            audited_steps=len(self._state.steps),
            skipped_snapshots=refused,
            total_steps=total_steps,
        )

    # ------------------------------------------------------------------ state

    def _load_state(self) -> _State:
        if not self._state_path.exists():
            state = _State(
                run=f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}",
                started=_now(),
                battery=self.battery.digest,
                key=self._fresh_key(),
                source=self._source,
            )
            write_atomic(self._state_path, state.model_dump_json())
            return state
        try:
            state = _State.model_validate_json(self._state_path.read_bytes())
        except (OSError, ValueError) as error:
            raise ResultsError(
                f"{self._state_path}: cannot be read ({type(error).__name__}); give another folder, or remove this file: "
                "what is finished is then audited anew"
            ) from None
        state.key = state.key or self._fresh_key()  # destroyed at the end: what is added later has another key
        if state.battery != self.battery.digest:
            raise ResultsError(
                f"{self.folder}: holds an audit by another battery (attacks, defences, knobs, budget or seed differ); "
                "give another folder, or remove this one"
            )
        return state

    def _fresh_key(self) -> str:
        """Return a new key to be written down, in hex; nothing where one was given."""
        return "" if self._given_key else secrets.token_hex(32)

    def _save_state(self) -> None:
        write_atomic(self._state_path, self._state.model_dump_json())

    def _hmac(self, ids: tuple[int, ...]) -> str:
        return self._keyed(",".join(map(str, ids)).encode(), digits=16).removeprefix("sha256:")

    def _keyed(self, private: bytes, digits: int) -> str:
        """Return a hash that nobody can try texts against without the run's key; an update can be computed of a text, too."""
        key = self._given_key or bytes.fromhex(self._state.key)
        return f"sha256:{hmac.new(key, private, hashlib.sha256).hexdigest()[:digits]}"

    def _generator(self, *names: str) -> torch.Generator:
        """Return the random generator of one attempt: the same in every run with the same seed, whatever ran before."""
        digest = hashlib.sha256("/".join((str(self.config.seed), *names)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _create(registry: Any, specs: Iterable[PluginSpec], *, by_name: bool) -> list[tuple[str, Any]]:
    """Build plugins under the labels that the results use: the bare name where that is unambiguous and `by_name`.

    Paths and free texts among the knobs are not shown; where that makes two labels alike, the later ones are numbered.
    """
    specs = list(specs)
    names = [spec.name for spec in specs]
    built: list[tuple[str, Any]] = []
    for spec in specs:
        made = registry.create(spec.name, spec.options)
        label = spec.name if by_name and names.count(spec.name) == 1 else public_label(spec, made)
        taken = {known for known, _ in built}
        others = (f"{label} #{number}" for number in itertools.count(2))
        built.append((label if label not in taken else next(name for name in others if name not in taken), made))
    return built


def _battery(config: AuditConfig, attacks: list[tuple[str, Any]], defenses: list[tuple[str, Any]]) -> Battery:
    members = {
        "attacks": {label: asdict(plugin) for label, plugin in attacks},
        "defenses": {label: asdict(plugin) for label, plugin in defenses},
        "budget_s": config.budget_s,
        "seed": config.seed,
        "server": None if config.server is None else config.server.label,
        "min_tokens": config.min_tokens,
        "tool": __version__,
    }
    digest = hashlib.sha256(json.dumps(members, sort_keys=True, default=str).encode()).hexdigest()
    return Battery(
        digest=f"sha256:{digest}",
        attacks=tuple(label for label, _ in attacks),
        defenses=tuple(label for label, _ in defenses),
        budget_s=config.budget_s,
    )


def _with_strength(defense: DeclaredDefense) -> str:
    """Return a declared defence with its numbers, such as `gaussian-noise(scale=0.1)`."""
    numbers = {
        key: value
        for key, value in defense.parameters.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return (
        f"{defense.name}({', '.join(f'{key}={value:g}' for key, value in numbers.items())})"
        if numbers
        else defense.name
    )


def _threat_model(server: PluginSpec | None, granted: tuple[str, ...]) -> ThreatModel:
    if server is None:
        return ThreatModel(granted=granted)
    adversary = f"an active server, which changed the model before it sent it out ({server.label})"
    return ThreatModel(adversary=adversary, sees="one client's update of the changed model", granted=granted)


def _servers_not_tested(server: PluginSpec | None) -> tuple[tuple[str, str], ...]:
    if server is None:
        return (
            ("malicious server", "the battery only reads updates of honest training; crafted weights are out of scope"),
        )
    return (
        (
            "honest server",
            f"every step was computed anew on the model of {server.label}; the run's own updates were not attacked",
        ),
        ("other malicious servers", f"only {server.label} was tried"),
    )


def _texts(truth: Truth, seen: Observation) -> list[tuple[int, ...]]:
    """Return the true sequences, none where the batch holds arrays: there is no text to compare."""
    return [] if isinstance(seen.model, ArrayClassifier) else truth.sequences()


def _grants_of(attacks: list[tuple[str, Any]], label: str) -> tuple[str, ...]:
    """Return what an attack's own knobs grant it beyond the update, such as auxiliary data; most have none."""
    return next((tuple(getattr(attack, "grants", ())) for name, attack in attacks if name == label), ())


def bucket(count: int) -> str:
    """Return the power-of-two range that a count falls into.

    >>> bucket(1), bucket(9), bucket(16), bucket(17)
    ('1', '9-16', '9-16', '17-32')
    """
    if count <= 1:
        return str(count)
    top = 1 << (count - 1).bit_length()
    return f"{top // 2 + 1}-{top}" if top > 2 else "2"


def _sentences(snapshot: Snapshot, min_tokens: int) -> int:
    """Count the texts that are long enough for a sentence event.

    They are measured as in scoring.
    """
    special = snapshot.observation.facts.vocabulary.wordless_ids
    texts = _texts(snapshot.truth, snapshot.observation)
    return sum(sum(token not in special for token in ids) >= min_tokens for ids in texts)


def _phase(step: int, total: int | None) -> Any:
    if not total:
        return "simulated"
    return ("early", "middle", "late")[min(2, 3 * step // total)]


def _reads(attack: Attack, seen: Observation) -> bool:
    """Return whether what was kept of a step is all that an attack reads."""
    return seen.whole or getattr(attack, "needs", "everything") == "named parts"


def _stamp(snapshot: Snapshot, client: ClientStep) -> Verification:
    """Return the stamp of the check in place, or of the rebuilt model.

    The latter computes the step again if all of it is there.

    Where only parts of a step were kept, what does not come back is no evidence: attacks that read everything did not run, and `span`
    cannot read what only later layers tell, such as the last word of a decoder's text.
    """
    checked = snapshot.checked
    if snapshot.parts is None:
        return verify(client, snapshot.observation.update) if checked is None else _of_one_model(snapshot, client)
    if checked is not None and not checked.status.attacked:
        return checked
    note = "only what attacks on the first blocks read, and a sketch of the rest, was kept (`keep: auto`): `keep: all` keeps everything"
    if checked is not None and checked.status.bounds:
        note += "; the whole update was checked in place and comes from this batch"
    return Verification(status=VerificationStatus.UNVERIFIABLE, note=note)


def _of_one_model(snapshot: Snapshot, client: ClientStep) -> Verification:
    """Return the stamp of the check in place, without its worth as evidence where attacks are given another model than the client's.

    The check in place is one of the live model. What a user's function makes (`rebuilt_by`), and what hooks and functions around parts of the
    model compute, is held against that here and nowhere else.
    """
    checked, maker = snapshot.checked, snapshot.model_recipe.made_by
    assert checked is not None
    patched = snapshot.recipe.patched
    if not checked.status.bounds or not (maker or patched):
        return checked
    again = verify(client, snapshot.observation.update)
    if again.status is not VerificationStatus.MISMATCH:
        return checked
    other = f"the model that {maker!r} makes" if maker else "the model without the hooks and functions on its parts"
    first = "" if maker else f" (first {patched[0]!r})"
    note = (
        f"the update comes from this batch, as was checked in place, but {other}{first} gives another one, so attacks were given another "
        "model than the client's, or one that chance or its own state leads elsewhere"
    )
    return checked.model_copy(update={"status": VerificationStatus.UNVERIFIABLE, "note": note})


def _subject(snapshot: Snapshot) -> Subject:
    config = json.dumps(snapshot.model_recipe.config, sort_keys=True, default=str)
    return Subject(
        model=snapshot.model_recipe.class_name,
        config_digest=f"sha256:{hashlib.sha256(config.encode()).hexdigest()}",
        parameters=snapshot.parts.parameters
        if snapshot.parts
        else sum(p.numel() for p in snapshot.observation.model.parameters()),
    )


def _regime(snapshot: Snapshot, batch_size: int, before: Regime | None) -> Regime:
    facts, recipe = snapshot.observation.facts, snapshot.recipe
    size = max(batch_size, before.batch_size or 0) if before else batch_size
    config: Any = getattr(snapshot.observation.model, "config", None)
    return Regime(
        dtype=recipe.autocast or facts.dtype,
        training_mode=recipe.training,
        dropout=max(facts.dropout.values(), default=0.0),
        hidden=getattr(config, "hidden_size", None),
        trainable=_trainable(facts.shared, facts.frozen),
        accumulation=max(1, len(snapshot.truth.micro_batches)),
        max_grad_norm=_finite(recipe.max_grad_norm),
        batch_size=size,
        declared_defenses=tuple(
            dict.fromkeys([*((before and before.declared_defenses) or ()), *(d.name for d in facts.defenses)])
        ),
    )


def _finite(number: float | None) -> float | None:
    """Return a number that results can hold, None for any other.

    A trainer may log a loss of NaN, or clip at infinity to read the norm.
    """
    return number if number is not None and math.isfinite(number) else None


def _trainable(shared: tuple[str, ...], frozen: tuple[str, ...]) -> str:
    if not frozen:
        return "all"
    kinds = sorted({"embeddings" if "embed" in name else name.rsplit(".", 1)[0] for name in frozen})
    shown = ", ".join(kinds[:3]) + (f" and {len(kinds) - 3} more" if len(kinds) > 3 else "")
    return f"{len(shared)} of {len(shared) + len(frozen)} parameters; frozen: {shown}"


def _count(controls: list[_Controls]) -> Controls:
    if not controls:
        return Controls()
    scored = [control for control in controls if control.matched_other is not None]
    by = sorted({control.by for control in controls if control.by})
    return Controls(
        positive=Control(
            k=sum(control.recovered for control in controls),
            n=len(controls),
            note=f"undefended canary steps recovered by {', '.join(by)}" if by else "no canary step was recovered",
        ),
        negative=Control(
            k=sum(bool(control.matched_other) for control in scored),
            n=len(scored),
            note="reconstructions of another batch's update that matched the real batch",
        ),
    )


def _environment(device: torch.device) -> dict[str, str]:
    import transformers

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": f"{device.type} ({name})",
        "threads": str(torch.get_num_threads()),
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
