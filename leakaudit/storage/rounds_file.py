"""The counts of one audit of rounds, which several processes share.

`rounds.json` in the spool holds them. A process changes it while it holds a lock on the folder of the spool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from leakaudit.errors import SpoolError
from leakaudit.files.private_files import write_atomic
from leakaudit.files.strict_json import read_bounded
from leakaudit.results.schema import Overhead
from leakaudit.storage.locks import folder_lock
from leakaudit.storage.spool_files import AUDIT_FILE, HELD, MAX_JSON_BYTES, Totals

ROUNDS = "rounds.json"


class RoundsFile(BaseModel):
    """The rounds of an audit so far, over all its processes."""

    model_config = ConfigDict(extra="ignore")

    architecture: str = ""
    """Digest of the model's parameters by name, shape and dtype; the rounds of one audit have the same."""
    begun: int = 0
    """Rounds that began. The number of the next round."""
    ended: int = 0
    """Rounds that came to an end, kept or not."""
    worker_pid: int = 0
    """Process that started a side process last; 0 if none did."""
    worker_started: float = 0.0
    """When it did, in seconds since 1970."""
    totals: Totals = Totals()
    """Sums over the rounds that ended."""


def read_rounds(root: Path) -> RoundsFile:
    """Return the counts of a spool; all are 0 if there is no file, or a broken one."""
    try:
        return RoundsFile.model_validate_json(read_bounded(root / ROUNDS, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return RoundsFile()


@contextmanager
def changing_rounds(root: Path) -> Iterator[RoundsFile]:
    """Yield the counts of a spool, and write what the block changes in them.

    Other processes wait meanwhile.

    Raises:
        SpoolError: somebody removed the spool, or it cannot be written.
    """
    if not (root / AUDIT_FILE).is_file():
        raise SpoolError(f"somebody removed {root}")
    with folder_lock(root):
        found = read_rounds(root)
        before = found.model_copy()
        yield found
        if found != before:
            try:
                write_atomic(root / ROUNDS, found.model_dump_json(indent=1))
            except OSError as error:
                raise SpoolError(f"{root / ROUNDS}: cannot be written ({error.strerror}); free some space") from None


def totals_so_far(root: Path) -> Totals:
    """Return the totals of the rounds that ended; empty for an audit of steps."""
    rounds = read_rounds(root)
    return rounds.totals.model_copy(update={"total_steps": rounds.begun or None})


def totals_of_planned(root: Path, planned: int | None) -> Totals | None:
    """Return the totals when all planned rounds have ended and none is held any more.

    None before that, and if no number of rounds is planned.
    """
    if planned is None or read_rounds(root).ended < planned or any(root.glob(f"*{HELD}")):
        return None
    return totals_so_far(root)


def added(one: Totals, other: Totals) -> Totals:
    """Return the sum of the totals of two parts of an audit.

    What an accountant said last counts. The memory of the copies is the larger one, because no two rounds of a process hold copies at the same time.
    """
    numbers = {name: getattr(one, name) + getattr(other, name) for name in _SUMMED}
    return Totals(**numbers, overhead=_sum_of(one.overhead, other.overhead), privacy=other.privacy or one.privacy)


_SUMMED = ("kept", "skipped", "too_full", "not_finite", "failed")


def _sum_of(one: Overhead, other: Overhead) -> Overhead:
    names = ("blocked_s", "training_s", "check_s", "writer_s", "disk_mb")
    sums = {name: round((getattr(one, name) or 0.0) + (getattr(other, name) or 0.0), 4) for name in names}
    return Overhead(**sums, memory_mb=max(one.memory_mb or 0.0, other.memory_mb or 0.0))
