"""The state of an audit on disk; a later process can resume the audit from it.

`journal.jsonl` has one line for each finished attempt. `state.json` has everything else. Only their owner may read the two files.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leakaudit.audit.conformance.log import ConformanceLog
from leakaudit.config.audit import AuditConfig
from leakaudit.config.shard import Shard
from leakaudit.errors import ResultsError
from leakaudit.files.json_lines import split_lines
from leakaudit.files.private_files import append_line, write_atomic
from leakaudit.files.regular_files import read_regular
from leakaudit.results.journal import JournalEntry, load_journal
from leakaudit.results.origin import Origin
from leakaudit.results.schema import Attempt, Kind, Regime, StepRecord, Subject

JOURNAL, STATE = "journal.jsonl", "state.json"
"""File names in the folder of an audit."""


class ControlOutcome(BaseModel):
    """Outcome of the controls on one step."""

    step: str
    sought: tuple[Kind, ...]
    """What the attacks of the battery look for."""
    found: dict[str, tuple[Kind, ...]]
    """Label of an attack that ran on the canary -> what it recovered."""
    matched_other: bool | None = None
    """Whether the canary's reconstruction matched the real batch.

    None if no attack on text was scored.
    """


class SavedShard(BaseModel):
    """What `leakaudit merge` must know of an audit that is one shard of a larger one."""

    model_config = ConfigDict(frozen=True)

    shard: Shard
    total: int
    """Steps of the whole audit."""
    audit: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """Mark of the whole audit's model, data and options, under the key of the marks of steps: the same for all its shards."""
    command: str
    """How the shard was started, without private values and without its number."""
    config: AuditConfig
    pairing: str
    """Id of the key of the marks of steps."""
    environment: dict[str, str]
    """Versions and hardware, as in the results."""


class SavedState(BaseModel):
    """The content of `state.json`: what the journal does not hold."""

    model_config = ConfigDict(extra="ignore")

    run: str
    started: str
    battery: str
    """Digest of the battery."""
    key: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Hex of the run's HMAC key.

    Empty if the audit was given a key, and after it has finished unless it keeps snapshots.
    """
    source: str = ""
    """Digest of the audited model and data, if known before the first step.

    It is deleted when the audit has finished, because anyone who guesses the data can confirm the guess with it.
    """
    finished: bool = False
    """Whether the audit has finished once.

    Steps that are added later continue the same audit.
    """
    steps: list[StepRecord] = []
    controls: list[ControlOutcome] = []
    as_sent: bool = False
    """Whether something changed an update between the training and its transmission; every step then has attempts on what was sent."""
    lost: dict[str, str] = {}
    """Step id -> why the step could not be audited completely."""
    subject: Subject | None = None
    regime: Regime | None = None
    shard: SavedShard | None = None
    """The shard that this audit is; None for a whole audit."""
    origin: Origin = Origin()
    """What was known when the run began."""


@dataclass(frozen=True)
class Unfinished:
    """Identity and progress of an audit that has not finished or not started."""

    battery: str
    """Digest of attacks, defences, options, budget, seed and version."""
    source: str
    """Digest of the audited model and data."""
    attempts: int
    """Number of finished attempts, or of all attempts before the audit starts."""

    def same_as(self, other: Unfinished) -> bool:
        """Return whether the two are the same audit."""
        return bool(self.source) and (self.battery, self.source) == (other.battery, other.source)


def unfinished(folder: Path) -> Unfinished | None:
    """Return the unfinished audit in a folder.

    None if the folder has no unfinished audit, or if it cannot be read.
    """
    try:
        state = SavedState.model_validate_json(read_regular(folder / STATE))
        done = len(load_journal(folder / JOURNAL))
    except (OSError, ValidationError, ResultsError):
        return None
    return None if state.finished else Unfinished(state.battery, state.source, done)


def is_finished(folder: Path) -> bool:
    """Return whether a folder holds an audit that has finished."""
    try:
        return SavedState.model_validate_json(read_regular(folder / STATE)).finished
    except (OSError, ValidationError):
        return False


class Journal:
    """The finished attempts of an audit, in a file with one line for each."""

    def __init__(self, path: Path) -> None:
        """Read the journal at `path`, if it exists.

        Raises:
            ResultsError: the journal cannot be read.
        """
        self._path = path
        self._load()

    def reload(self) -> None:
        """Read the file again.

        A signal may have stopped the process after a line was written and before its entry was added here.

        Raises:
            ResultsError: the journal cannot be read.
        """
        self._load()
        self.remove_partial_line()

    def has(self, step: str, attack: str, defense: str) -> bool:
        """Return whether the attempt is finished."""
        return (step, attack, defense) in self._finished

    def recovery(self, step: str, defense: str, granted: Collection[str]) -> Attempt | None:
        """Return an attempt on a step that recovered every text, if there is one.

        Args:
            step: id of the step.
            defense: label of the defence.
            granted: what every attack on the step was granted. An attempt that was granted more proves nothing about the others.
        """
        mine = (e.attempt for e in self.entries if (e.attempt.step, e.attempt.defense) == (step, defense))
        return next((a for a in mine if a.recovers_every_text and set(a.granted) <= set(granted)), None)

    def append(self, entry: JournalEntry) -> None:
        """Append one line and sync the file.

        On a full disk nothing is appended. If the process is killed, at most the last line is incomplete.

        Raises:
            OSError: the line cannot be written.
        """
        append_line(self._path, entry.model_dump_json())
        self.entries.append(entry)
        self._finished.add(_names(entry.attempt))

    def remove(self, unwanted: Callable[[Attempt], bool]) -> None:
        """Remove attempts, which are then made again.

        Raises:
            OSError: the journal cannot be written; it is unchanged.
        """
        kept: list[JournalEntry] = [entry for entry in self.entries if not unwanted(entry.attempt)]
        if len(kept) < len(self.entries):
            write_atomic(self._path, "".join(entry.model_dump_json() + "\n" for entry in kept))
            self._load()

    def remove_partial_line(self) -> None:
        """Remove the incomplete last line that a killed process may have left.

        The next entry then begins a new line.
        """
        if not self._path.exists():
            return
        content = read_regular(self._path)
        kept = "".join(entry.model_dump_json() + "\n" for entry in self.entries)
        if len(split_lines(content)) != len(self.entries) or (content and not content.endswith(b"\n")):
            write_atomic(self._path, kept)

    def _load(self) -> None:
        self.entries = load_journal(self._path)
        self._finished = {_names(entry.attempt) for entry in self.entries}


class JournalInMemory(Journal):
    """A journal without a file, for an audit that leaves no trace."""

    def __init__(self, entries: Iterable[JournalEntry]) -> None:
        """Begin with entries, which count as finished."""
        self.entries = list(entries)
        self._finished = {_names(entry.attempt) for entry in self.entries}

    def reload(self) -> None:
        """Do nothing: no other process writes entries."""

    def append(self, entry: JournalEntry) -> None:
        """Add an entry."""
        self.entries.append(entry)
        self._finished.add(_names(entry.attempt))

    def remove(self, unwanted: Callable[[Attempt], bool]) -> None:
        """Remove attempts, which are then made again."""
        self.entries = [entry for entry in self.entries if not unwanted(entry.attempt)]
        self._finished = {_names(entry.attempt) for entry in self.entries}

    def remove_partial_line(self) -> None:
        """Do nothing: every entry is complete."""


def _names(attempt: Attempt) -> tuple[str, str, str]:
    return attempt.step, attempt.attack, attempt.defense


class AuditState:
    """The saved state of one audit, and its key for hashes of private text."""

    def __init__(
        self,
        folder: Path,
        battery: str,
        *,
        key: bytes | None = None,
        source: str = "",
        shard: SavedShard | None = None,
        origin: Origin | None = None,
    ) -> None:
        """Load the state in a folder, or create it.

        Args:
            folder: folder of the audit, which exists.
            battery: digest of the audit's battery.
            key: key of the hashes of private text, never written to disk. None creates a key and keeps it in `state.json` until the
                audit has finished.
            source: digest of the audited model and data, if known.
            shard: what a new audit is a part of; None for a whole one.
            origin: what is known when a new audit begins. An audit that is resumed keeps the first one.

        Raises:
            ResultsError: the state cannot be read, or belongs to another battery.
        """
        self._path = folder / STATE
        self._given_key = key
        if self._path.exists():
            self.saved = self._load(battery)
            return
        self.saved = SavedState(
            run=f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}",
            started=now(),
            battery=battery,
            key=self._new_key(),
            source=source,
            shard=shard,
            origin=origin or Origin(),
        )
        self.save()

    @property
    def shard(self) -> Shard | None:
        """The shard that the audit is; None for a whole one."""
        return None if self.saved.shard is None else self.saved.shard.shard

    @property
    def conformance(self) -> ConformanceLog:
        """What was measured of the steps' declared noise."""
        return ConformanceLog(self._path.parent)

    def save(self) -> None:
        """Write `state.json`."""
        write_atomic(self._path, self.saved.model_dump_json())

    def unlose(self, step_id: str) -> str:
        """Forget that a step is lost; return why it was, or an empty string.

        The record of a step that was verified before it was lost stays.
        """
        saved = self.saved
        reason = saved.lost.pop(step_id, "")
        saved.steps = [record for record in saved.steps if record.id != step_id or record.n_sequences or not reason]
        self.save()
        return reason

    def reloaded(self) -> AuditState:
        """Return the state as it is on the disk, for another thread.

        Raises:
            ResultsError: it cannot be read.
        """
        other = copy.copy(self)
        other.saved = self._load(self.saved.battery)
        return other

    def close(self, *, keep_key: bool) -> None:
        """Mark the audit as finished and save it.

        Args:
            keep_key: whether to keep the key for steps that are added later.
        """
        self.saved.finished, self.saved.source = True, ""
        self.saved.key = self.saved.key if keep_key else ""
        self.save()

    def record_of(self, step_id: str) -> StepRecord | None:
        """Return the record of a step; None if it has none yet."""
        return next((record for record in self.saved.steps if record.id == step_id), None)

    def has_control(self, step_id: str) -> bool:
        """Return whether the controls ran on a step."""
        return any(control.step == step_id for control in self.saved.controls)

    def keyed_hash(self, private: bytes, digits: int) -> str:
        """Return the first hex digits of a keyed SHA-256.

        With a hash without a key, anyone could confirm a guessed text. The same is true for the hash of an update, which can be computed
        from the text.
        """
        key = self._given_key or bytes.fromhex(self.saved.key)
        return hmac.new(key, private, hashlib.sha256).hexdigest()[:digits]

    def _load(self, battery: str) -> SavedState:
        try:
            saved = SavedState.model_validate_json(read_regular(self._path))
        except (OSError, ValueError) as error:
            raise ResultsError(
                f"{self._path}: cannot be read ({type(error).__name__}); give another folder, or remove this file: "
                "finished attempts are then audited again"
            ) from None
        saved.key = (
            saved.key or self._new_key()
        )  # a finished audit has no key, so steps that are added later use a new one
        if saved.battery != battery:
            raise ResultsError(
                f"{self._path.parent}: holds an audit by another battery (attacks, defences, options, budget or seed differ); "
                "give another folder, or remove this one"
            )
        return saved

    def _new_key(self) -> str:
        """Return a new key in hex; empty if the audit was given a key."""
        return "" if self._given_key else secrets.token_hex(32)


def step_id_of(step: int) -> str:
    """Return the id of an optimizer step; ids sort in the order of steps.

    >>> step_id_of(40)
    'st-000040'
    """
    return f"st-{step:06d}"


def number_of(step_id: str) -> int:
    """Return the optimizer step of an id.

    >>> number_of("st-000040")
    40
    """
    return int(step_id.removeprefix("st-"))


def now() -> str:
    """Return the current time in UTC, in ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
