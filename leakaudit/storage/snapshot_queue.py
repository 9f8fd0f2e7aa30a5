"""The queue of snapshots that wait for their attacks.

A process takes or returns a snapshot by one rename.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from leakaudit.files.private_files import write_atomic
from leakaudit.files.regular_files import read_regular
from leakaudit.storage.attempt_deaths import AttemptDeaths
from leakaudit.storage.parent_watch import ORPHANED
from leakaudit.storage.spool_files import CRASHES, HOLD, REASON

MAX_CRASHES = 2
"""Number of worker crashes outside of attempts after which a snapshot is set aside. Our choice: the trainer starts a worker three times,
so the last one can still audit the other snapshots."""


class SnapshotQueue:
    """The snapshots of one spool that a worker takes and returns."""

    def __init__(self, root: Path) -> None:
        """Remember the spool's folder; no file is read or written."""
        self._root = root
        self.attempts = AttemptDeaths(root)
        """The attempts during which workers died."""

    def ready(self) -> list[Path]:
        """Return the waiting snapshots, the oldest first."""
        found = (path for path in self._root.glob("*.ready") if path.is_dir() and not path.is_symlink())
        return sorted(found, key=lambda path: (len(path.name), path.name))

    def claim(self, last: Callable[[Path], bool] | None = None) -> Path | None:
        """Claim and return the oldest waiting snapshot, or return None.

        Those for which `last` is true come after all others, and those over which a worker died at the very end: a second death costs the
        snapshot, so the others are audited first.
        """
        for path in sorted(self.ready(), key=lambda path: ((path / CRASHES).exists(), last is not None and last(path))):
            claimed = path.with_suffix(".run")
            try:
                path.rename(claimed)
            except OSError:
                continue  # the snapshot was removed in the meantime
            return claimed
        return None

    def give_back(self, claimed: Path) -> None:
        """Return a claimed snapshot that the worker has not audited to the end."""
        if claimed.is_dir():
            _replace(claimed, claimed.with_suffix(".ready"))

    def discard_or_keep(self, claimed: Path, *, keep: bool) -> None:
        """Remove an audited snapshot, or keep it if configured or on hold."""
        if keep or self.held(claimed):
            _replace(claimed, claimed.with_suffix(".kept"))
        else:
            shutil.rmtree(claimed, ignore_errors=True)

    def set_aside(self, claimed: Path, *, keep: bool, reason: str = "") -> None:
        """Remove a snapshot that cannot be audited.

        If snapshots are kept, or it is on hold, it is kept with the reason.
        """
        if keep or self.held(claimed):
            with contextlib.suppress(OSError):
                write_atomic(claimed / REASON, json.dumps({"reason": reason or "it could not be audited"}))
            _replace(claimed, claimed.with_suffix(".bad"))
        else:
            shutil.rmtree(claimed, ignore_errors=True)

    def held(self, snapshot: Path) -> bool:
        """Return whether a snapshot, or the whole spool, is on hold.

        If so, nothing may remove it.
        """
        return (self._root / HOLD).exists() or (snapshot / HOLD).exists()

    def requeue(self) -> None:
        """Return the snapshots that a killed worker had claimed to the queue.

        The journal has the worker's finished attempts, so they are not repeated.

        A crash during an attempt is charged to the attempt. A snapshot on which `MAX_CRASHES` workers crashed outside of attempts is set
        aside. A worker that ended with its trainer does not count.
        """
        orphaned = (self._root / ORPHANED).exists()
        charged = not orphaned and self.attempts.charge()
        for path in sorted(path for path in self._root.glob("*.run") if path.is_dir() and not path.is_symlink()):
            crashes = 0 if orphaned or charged else _count_crash(path / CRASHES)
            path.rename(path.with_suffix(".bad" if crashes >= MAX_CRASHES else ".ready"))
        self.attempts.clear()
        (self._root / ORPHANED).unlink(missing_ok=True)

    def poisonous(self) -> list[Path]:
        """Return the snapshots to set aside because workers crashed on them."""
        found = (path for path in self._root.glob("*.bad") if (path / CRASHES).exists())
        return sorted(path for path in found if not (path / REASON).exists())

    def at_work_on(self) -> str:
        """Return the claimed snapshot and the attempt on it; empty if none is claimed."""
        claimed = next((path.stem for path in self.pending() if path.suffix == ".run"), "")
        return ", ".join([f"snapshot {claimed}", *self.attempts.started()[1:]]) if claimed else ""

    def set_aside_before(self) -> list[Path]:
        """Return the snapshots that were set aside, in order."""
        return sorted(path for path in self._root.glob("*.bad") if path.is_dir() and not path.is_symlink())

    def retry(self, path: Path, forget: Callable[[], None]) -> None:
        """Return a snapshot that was set aside to the queue.

        Args:
            path: the snapshot.
            forget: removes from the results that the step is lost. If this process is killed before the snapshot is back in the queue, the
                next worker records the loss again.
        """
        write_atomic(path / CRASHES, str(MAX_CRASHES))
        (path / REASON).unlink(missing_ok=True)
        forget()
        ready = path.with_suffix(".ready")
        path.rename(ready)
        (ready / CRASHES).unlink(missing_ok=True)

    def pending(self) -> list[Path]:
        """Return the snapshots that are not audited yet, in order.

        The claimed snapshot is first.
        """
        try:
            found = [path for path in self._root.iterdir() if path.suffix in (".run", ".ready")]
        except OSError:  # somebody removed the spool
            return []
        return sorted(
            (path for path in found if path.stem.isdecimal()),
            key=lambda path: (path.suffix == ".ready", int(path.stem)),
        )


def _replace(source: Path, target: Path) -> None:
    """Rename a folder, and replace a folder with the new name.

    If the folder was removed meanwhile, no rename takes place.
    """
    if target != source:
        shutil.rmtree(target, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        source.rename(target)


def _count_crash(counter: Path) -> int:
    """Add one to the number in a file and return it.

    A file that cannot be read counts as 0.
    """
    try:
        crashes = int(read_regular(counter)) + 1
    except (OSError, ValueError):
        crashes = 1
    with contextlib.suppress(OSError):
        write_atomic(counter, str(crashes))
    return crashes
