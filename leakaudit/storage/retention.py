"""Retention: how long snapshots are kept, and who may remove them.

A snapshot holds the private batch. It is removed after its audit, or, if the configuration keeps it, after `retention_days`, unless it is on
hold. Results are kept: they hold private text only as keyed hashes, whose key is destroyed with the last snapshot.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from leakaudit.errors import LeakAuditError, SpoolError
from leakaudit.files.private_files import append_line, write_atomic
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.storage.disk_use import size_of
from leakaudit.storage.spool import STATES, TOKENIZER, Spool, forget_tokenizer
from leakaudit.storage.spool_files import HOLD, MAX_JSON_BYTES, forget_salt

PURGED = "purged.jsonl"
"""File beside the results with one line for every snapshot that was removed for its age or by a user."""

MAX_MANIFEST = 16 * 1024 * 1024
"""Most bytes of `snapshot.json` that are read. `leakaudit.storage.snapshot_content` has the same number, but needs torch, and listing files
must not load torch."""

CLOCK_SLACK = timedelta(days=1)
"""Largest difference by which a snapshot's time may be in the future; beyond it, the age is unknown. Clocks of machines differ."""


LONGEST_PAUSE = timedelta(days=365)
"""Longest time from the newest file of an audit to the date at which a run or worker removes snapshots for their age. Our choice: beyond it, a
wrong clock is likelier than a pause."""


@dataclass(frozen=True)
class Item:
    """One snapshot of a spool."""

    path: Path
    step: int | None
    """Optimizer step; None if the name does not contain it."""
    state: str
    created: datetime | None
    """Time of creation; None if it cannot be read."""
    size: int
    """Size in bytes."""
    encrypted_to: tuple[str, ...]
    held: str
    """Why it must not be removed; empty if it may be removed."""
    why: str = ""
    """Why it is not audited; empty if it was audited, or if a trainer or a worker uses the spool."""
    sealed: bool = True
    """Whether its `snapshot.json` has a digest of itself."""

    def age(self, now: datetime) -> timedelta | None:
        """Return the age; None if it is unknown, or if it is far below zero."""
        if self.created is None or self.created > now + CLOCK_SLACK:
            return None
        return max(now - self.created, timedelta())


def items(spool: Spool) -> list[Item]:
    """Return the snapshots of a spool, ordered by step."""
    return sorted(
        (_item(spool, path) for path in spool.entries()), key=lambda item: (len(item.path.stem), item.path.name)
    )


def _item(spool: Spool, path: Path) -> Item:
    manifest = _manifest(path)
    created = None
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        created = datetime.fromisoformat(_below(manifest, "provenance").get("created", ""))
        created = (created if created.tzinfo else created.replace(tzinfo=UTC)).astimezone(UTC)
    return Item(
        path=path,
        step=int(path.stem) if path.stem.isdecimal() else None,
        state=STATES[path.suffix],
        created=created or _modified(path),
        size=size_of(path),
        encrypted_to=_words(manifest.get("encrypted_to")),
        held=_reason(path / HOLD) or _reason(spool.root / HOLD),
        why=spool.why(path),
        sealed="digest" in manifest,
    )


def _below(manifest: dict[str, Any], key: str) -> dict[str, Any]:
    found = manifest.get(key)
    return found if isinstance(found, dict) else {}


def _words(found: Any) -> tuple[str, ...]:
    return tuple(word for word in found if isinstance(word, str)) if isinstance(found, list) else ()


def _manifest(path: Path) -> dict[str, Any]:
    """Return `snapshot.json`, or an empty dictionary if it cannot be read.

    Damaged snapshots are listed and purged as well.
    """
    try:
        found = parse_json(read_bounded(path / "snapshot.json", MAX_MANIFEST))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _modified(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except (OSError, OverflowError, ValueError):
        return None


def _reason(hold: Path) -> str:
    """Return why something is on hold; a file that cannot be read also counts."""
    try:
        return str(parse_json(read_bounded(hold, MAX_JSON_BYTES))["reason"])
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError, LookupError, TypeError):
        return "hold.json cannot be read"


def counted(found: Sequence[Item]) -> str:
    """Return the number of snapshots as text: `1 snapshot`, `3 snapshots`."""
    return "1 snapshot" if len(found) == 1 else f"{len(found)} snapshots"


# ---------------------------------------------------------------------- hold


def hold(spool: Spool, steps: tuple[int, ...], reason: str, *, now: datetime) -> list[Item]:
    """Put snapshots on hold, so that no worker, age limit or user removes them.

    Args:
        spool: the spool of the snapshots.
        steps: their steps; empty for the whole spool, including later snapshots.
        reason: text for users who want to remove them.
        now: the time.

    Returns:
        The snapshots that are now on hold.

    Raises:
        SpoolError: a step has no snapshot.
    """
    text = json.dumps({"reason": reason, "since": now.isoformat(timespec="seconds")})
    chosen = _chosen(spool, steps)
    for folder in [item.path for item in chosen] if steps else [spool.root]:
        try:
            write_atomic(folder / HOLD, text)
        except FileNotFoundError:  # the worker has renamed it in the meantime
            (again,) = _chosen(spool, (int(folder.stem),))
            write_atomic(again.path / HOLD, text)
    return chosen


def unhold(spool: Spool, steps: tuple[int, ...]) -> list[Item]:
    """Remove the holds of these steps, or all holds.

    Returns:
        The snapshots that were on hold and may be removed now.

    Raises:
        SpoolError: a step has no snapshot, or steps are given although the whole spool is on hold.
    """
    before = [item for item in _chosen(spool, steps) if item.held]
    if steps and (spool.root / HOLD).exists():
        raise SpoolError(f"{spool.root}: the whole spool is held; release it as a whole (without --step)")
    for item in _chosen(spool, steps):
        (item.path / HOLD).unlink(missing_ok=True)
    if not steps:
        (spool.root / HOLD).unlink(missing_ok=True)
    return before


def _chosen(spool: Spool, steps: tuple[int, ...]) -> list[Item]:
    found = items(spool)
    if not steps:
        return found
    there = {item.step for item in found}
    missing = [step for step in steps if step not in there]
    if missing:
        listed = ", ".join(str(item.step) for item in found) or "none"
        raise SpoolError(f"{spool.root}: no snapshot of step {missing[0]}; there are: {listed}")
    return [item for item in found if item.step in steps]


# ---------------------------------------------------------------------- purge


@dataclass(frozen=True)
class Purged:
    """Result of a purge, or of a dry run."""

    removed: tuple[Item, ...]
    held: tuple[Item, ...]
    """Not removed because of a hold."""
    in_use: tuple[Item, ...]
    """Not removed because a trainer or a worker uses it."""
    key_destroyed: bool = False

    @property
    def bytes(self) -> int:
        """Size of the removed snapshots in bytes."""
        return sum(item.size for item in self.removed)


def purge(
    spool: Spool,
    *,
    now: datetime,
    older_than: timedelta | None,
    steps: tuple[int, ...] = (),
    finished_only: bool = False,
    dry_run: bool = False,
) -> Purged:
    """Remove snapshots; with the last one, also the key of the run's hashes.

    Args:
        spool: the spool of the snapshots.
        now: the time.
        older_than: remove only older snapshots; None for any age. A snapshot of unknown age is never older.
        steps: remove only snapshots of these steps; empty for all.
        finished_only: keep snapshots that still wait for their audit.
        dry_run: remove nothing, and return what would be removed.

    Raises:
        SpoolError: a step has no snapshot.
    """
    wanted = [item for item in _chosen(spool, steps) if older_than is None or _is_older(item, now, older_than)]
    if finished_only:
        wanted = [item for item in wanted if item.path.suffix in (".kept", ".bad")]
    busy = _in_use(spool)
    held = tuple(item for item in wanted if item.held)
    in_use = tuple(item for item in wanted if not item.held and item.path.suffix in busy)
    removed = tuple(item for item in wanted if not item.held and item.path.suffix not in busy)
    if dry_run:
        return Purged(removed, held, in_use)
    for item in removed:
        why = "asked for" if older_than is None else f"older than {older_than / timedelta(days=1):g} days"
        _remove(spool, item, why, now)
    spool.tidy()
    return Purged(removed, held, in_use, key_destroyed=bool(removed) and _destroy_key(spool))


def purge_old_runs(spool: Spool, *, now: datetime) -> Iterator[str]:
    """Remove snapshots older than their audit's `retention_days`.

    It looks in this spool and in the spools of earlier runs beside it. If the date is far beyond all files there, the clock may be wrong, and
    nothing is removed.

    Yields:
        One line for each spool from which a snapshot was removed, or a line that says why nothing is removed.
    """
    folder = spool.root.absolute().parent
    name = folder.name.partition(".")[0]
    beside = [path for path in folder.parent.glob(f"{name}*") if path == folder or _is_numbered(path.name, name)]
    newest = _newest(beside)
    if newest is not None and now > newest + LONGEST_PAUSE:
        yield (
            f"no old snapshot is removed: the clock says {now:%Y-%m-%d}, more than a year after the newest file here ({newest:%Y-%m-%d}); "
            "set the clock, or remove them with `leakaudit snapshots purge`"
        )
        return
    for path in sorted(beside):
        try:
            other, audit = Spool.open(path / "spool")
            limit = timedelta(days=audit.config.retention_days)
            done = purge(other, now=now, older_than=limit, finished_only=other.under_way() or path == folder)
        except (LeakAuditError, OSError):
            continue  # not a spool of ours, or not readable
        if done.removed:
            key = "; the key of its hashes is destroyed" if done.key_destroyed else ""
            yield f"{path.name}: removed {counted(done.removed)} older than {limit.days} days{key}"


def _newest(folders: Sequence[Path]) -> datetime | None:
    """Return when the newest file of some audits was written."""
    times = (_modified(path) for folder in folders for path in (*folder.glob("*"), *folder.glob("spool/*")))
    return max(filter(None, times), default=None)


def _is_numbered(name: str, stem: str) -> bool:
    """Return whether a folder has a name as `archive_previous` gives: `audit.3`."""
    rest = name.removeprefix(stem)
    return rest[:1] in (".", "-") and rest[1:].isdecimal()


def _is_older(item: Item, now: datetime, limit: timedelta) -> bool:
    age = item.age(now)
    return age is not None and age > limit


def _in_use(spool: Spool) -> tuple[str, ...]:
    """Return the suffixes of snapshots that a trainer or a worker uses."""
    _, audit = Spool.open(spool.root)
    writing = () if spool.trainer_gone(audit) else (".tmp",)
    attacking = (".run",) if spool.attended() else ()
    return (*writing, *attacking)


def _remove(spool: Spool, item: Item, why: str, now: datetime) -> None:
    """Write a line in `purged.jsonl`, then remove the files.

    With this order, a crash between the two leaves an extra line; no line is missing.
    """
    line: dict[str, Any] = {
        "snapshot": item.path.stem,
        "state": item.state,
        "created": item.created.isoformat(timespec="seconds") if item.created else None,
        "purged": now.isoformat(timespec="seconds"),
        "why": why,
        "bytes": item.size,
    }
    if item.encrypted_to:  # anyone who tries texts could confirm one with a digest of unencrypted bytes
        line["digests"] = _below(_manifest(item.path), "digests")
    append_line(spool.root.parent / PURGED, json.dumps(line))
    if item.path.is_dir() and not item.path.is_symlink():
        shutil.rmtree(item.path)
    else:
        item.path.unlink()  # no snapshot, although its name looks like one


def _destroy_key(spool: Spool) -> bool:
    """Remove the key of the run's hashes with its salt, and the tokenizer.

    Nothing is removed while the spool has a snapshot or the audit is in progress.

    Returns:
        Whether there was a key or salt. The file does not hold it any more, but the disk may still have the old bytes.
    """
    if spool.entries() or spool.under_way():
        return False
    forget_tokenizer(spool)
    salted = forget_salt(spool.root)
    path = spool.root.parent / "state.json"
    try:
        state = parse_json(read_bounded(path))
    except (OSError, ValueError):
        return salted
    if not isinstance(state, dict) or not state.get("key"):
        return salted
    write_atomic(path, json.dumps(state | {"key": ""}))
    return True


# ---------------------------------------------------------------------- check


def check_folder(spool: Spool) -> Iterator[str]:
    """Yield the problems of the spool's own folder and files."""
    tokenizer = spool.root / TOKENIZER
    for path in (spool.root, *spool.root.glob("*.json"), tokenizer, *tokenizer.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            if (mode := path.lstat().st_mode & 0o777) & 0o077 and not path.is_symlink():
                yield f"others can read {path.relative_to(spool.root.parent)} (mode {mode:o}): chmod go= it"


def check_snapshot(spool: Spool, item: Item, identities: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the problems of a snapshot.

    Others can read it, it is not encrypted although it should be, it is incomplete or changed, or no key opens it.

    Args:
        spool: the spool that holds it.
        item: the snapshot; a snapshot that is being written is not checked.
        identities: private keys; without a key, encrypted files are not opened.
    """
    from leakaudit.storage.snapshot_files import read_tensors, stored_name
    from leakaudit.storage.snapshots import check_files

    if item.path.suffix == ".tmp":
        return
    try:
        for path in (item.path, *item.path.iterdir()):
            mode = path.lstat().st_mode
            if path.is_symlink():
                yield f"{path.name} is a link; nothing of ours is"
            elif mode & 0o077:
                yield f"others can read {path.name} (mode {mode & 0o777:o}): chmod go= it"
        manifest = check_files(item.path)
        if spool.config.encrypt_to and not manifest.encrypted_to:
            yield "lies in clear, although the audit is configured to encrypt"
        if not manifest.encrypted_to or identities:
            for name in manifest.files():
                read_tensors(item.path / (stored_name(item.path, name) or name), identities, manifest.encrypted_to)
    except LeakAuditError as error:
        yield str(error)
    except OSError as error:
        yield f"cannot be read ({error.strerror}); somebody may have taken it meanwhile"
