"""The replay of one attempt on a kept snapshot.

It shows whether the attempt gives the same again.

The attempt is made by the code of the side process, with the audit's configuration. The audit's own folder is only read, and
no text and no key is written: the journal is in memory, and a temporary folder has the other state.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_bytes
from typing import Any

from pydantic import ValidationError

from leakaudit.audit.battery import battery_of
from leakaudit.audit.entries import AttemptId
from leakaudit.audit.spool_audit import WorkerOptions, audit_in
from leakaudit.audit.state import STATE, JournalInMemory, SavedState, number_of
from leakaudit.files.regular_files import read_regular
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.journal import JournalEntry
from leakaudit.results.replay_command import kept_snapshot
from leakaudit.results.schema import Attempt, AttemptStatus, Results, StepRecord, TextMode
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import AuditFile

OTHERS = "not replayed"
"""Reason under which the other attempts of the battery count as finished."""

_TIMES = ("wall_s", "gpu_s")
"""What differs each time: the seconds of an attempt."""


@dataclass(frozen=True)
class Difference:
    """A value that is not the same again."""

    what: str
    """Its name, such as `scores.exact`."""
    stored: Any
    again: Any


@dataclass(frozen=True)
class Replayed:
    """An attempt as the results hold it, and the same attempt again."""

    stored: Attempt
    again: JournalEntry
    compared: int
    """Number of values that were compared."""
    differences: tuple[Difference, ...]
    causes: tuple[str, ...]
    """Circumstances that are not the same and may be the cause of a difference, as clauses."""

    @property
    def equal(self) -> bool:
        """Whether every compared value is the same."""
        return not self.differences


def replay(
    spool: Spool, audit_file: AuditFile, results: Results, which: AttemptId, options: WorkerOptions, text: TextMode
) -> Replayed:
    """Make an attempt again and compare it with the stored one.

    Args:
        spool: holds the kept snapshot.
        audit_file: configuration of the audit.
        results: the results, which hold the attempt.
        which: the labels of the attempt.
        options: options of a worker.
        text: how much text the new attempt holds.

    Raises:
        SnapshotError: the snapshot cannot be read.
        ConfigError: a plugin or the device does not exist.
        RedactionError: the text mode is full, and this is a CI machine.
    """
    from leakaudit.storage.snapshots import read_snapshot

    stored = next(a for a in results.attempts if (a.step, a.attack, a.defense) == which)
    step = number_of(which.step)
    key = _key_of(spool.root.parent)
    config = audit_file.config.model_copy(
        update={"controls": 0, "attack_recovered_steps": True, "text": text, "conformance": False, "membership": None}
    )
    journal = JournalInMemory(JournalEntry(attempt=other) for other in _others(which, audit_file))
    with tempfile.TemporaryDirectory(prefix="leakaudit-replay-") as temporary:
        file = audit_file.model_copy(update={"config": config})
        audit = audit_in(
            Path(temporary),
            spool,
            file,
            options,
            report=lambda _entry: None,
            key=key or token_bytes(32),
            journal=journal,
        )
        audit.step(read_snapshot(kept_snapshot(spool.root.parent, step), options.identities, options.build))
        again = next(entry for entry in audit.entries if entry.attempt.reason != OTHERS)
        new: Results = audit.results_so_far()
    record = next(one for one in results.steps if one.id == which.step)
    public = next(a for a in new.attempts if (a.step, a.attack, a.defense) == which)
    pairs = [
        *_values(stored, public, with_hashes=key is not None, with_strips=_both_show(audit_file.config.text, text)),
        *_stamps(record, new.steps[0], with_hashes=key is not None),
    ]
    found = tuple(one for one in pairs if one.stored != one.again)
    return Replayed(stored, again, len(pairs), found, tuple(_causes(stored, results, new)))


def _others(which: AttemptId, audit_file: AuditFile) -> Iterator[Attempt]:
    """Yield the other attempts on the step, as if they were finished."""
    battery = battery_of(audit_file.config)
    for defense in (*battery.defenses, AS_SENT):
        for attack in battery.attacks:
            if (attack, defense) != (which.attack, which.defense):
                yield Attempt(
                    step=which.step,
                    attack=attack,
                    defense=defense,
                    seed=audit_file.config.seed,
                    status=AttemptStatus.SKIPPED,
                    reason=OTHERS,
                )


def _key_of(folder: Path) -> bytes | None:
    """Return the key of the audit's hashes.

    None if it is destroyed or was never written.
    """
    try:
        key = SavedState.model_validate_json(read_regular(folder / STATE)).key
    except (OSError, ValidationError):
        return None
    return bytes.fromhex(key) or None


def _both_show(one: TextMode, other: TextMode) -> bool:
    return TextMode.HASH not in (one, other)


def _values(stored: Attempt, again: Attempt, *, with_hashes: bool, with_strips: bool) -> Iterator[Difference]:
    """Yield every value of an attempt but its seconds, stored and again."""
    hidden = {name for name, shown in (("hmac", with_hashes), ("strip", with_strips)) if not shown}
    old, new = (dict(_flat(attempt.model_dump(mode="json", exclude={*_TIMES}), hidden)) for attempt in (stored, again))
    for name in dict.fromkeys((*old, *new)):
        yield Difference(name, old.get(name), new.get(name))


def _flat(data: Any, hidden: set[str], name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every leaf of a JSON document.

    A list of words is one value.
    """
    plain_list = isinstance(data, list) and not any(isinstance(one, dict | list) for one in data)
    if plain_list or not isinstance(data, dict | list) or not data:
        yield name, data
        return
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if key not in hidden:
            yield from _flat(value, hidden, f"{name}.{key}" if name else str(key))


def _stamps(stored: StepRecord, again: StepRecord, *, with_hashes: bool) -> Iterator[Difference]:
    """Yield the stamp of the step, and the keyed hash of its update."""
    yield Difference("step.verification", stored.verification.status.value, again.verification.status.value)
    if with_hashes:
        yield Difference("step.snapshot", stored.snapshot, again.snapshot)


def _causes(stored: Attempt, results: Results, new: Results) -> Iterator[str]:
    """Yield what may be the cause of a difference."""
    if stored.stop == "budget":
        yield "the stored attempt stopped at its time budget, so it depends on the speed of the machine"
    if results.run.tool != new.run.tool:
        yield f"the run was audited by version {results.run.tool}, and this is {new.run.tool}"
    old, now = results.run.environment, new.run.environment
    for name in sorted(old.keys() & now.keys()):
        if old[name] != now[name]:
            yield f"{name} was {old[name]} and is {now[name]}"
