"""The attempts during which side processes died.

A side process that dies (killed, out of memory, crashed) is charged to the attempt that it was making. After `MAX_DEATHS` deaths the
attempt is not made again, and the rest of its step is audited.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leakaudit.files.private_files import write_atomic
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.storage.spool_files import CRASHES

STARTED = "started.json"
"""File in the spool with the attempt that is being made: step, attack and defence."""

DEATHS = "attempt_deaths.json"
"""File in the spool with the attempts during which a process died, and how often."""

MAX_DEATHS = 2
"""Deaths after which an attempt is not made again. Our choice: one may be chance, because the system ends the side process first when
memory runs out."""


class AttemptDeaths:
    """Notes the attempt that is being made, and counts the deaths during each."""

    def __init__(self, root: Path) -> None:
        """Remember the spool's folder; no file is read or written."""
        self._root = root

    @contextmanager
    def during(self, attempt: Sequence[str]) -> Iterator[None]:
        """Note on the disk, for the time of the block, that an attempt is being made.

        Only a process that dies in the block leaves the note. The snapshot could be read, so earlier deaths are not charged to it any more.

        Args:
            attempt: step, attack and defence.

        Raises:
            OSError: the note cannot be written.
        """
        write_atomic(self._root / STARTED, json.dumps(list(attempt)))
        for crashes in self._root.glob(f"*.run/{CRASHES}"):
            crashes.unlink(missing_ok=True)
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove the note of the attempt that is being made."""
        with contextlib.suppress(OSError):
            (self._root / STARTED).unlink()

    def started(self) -> tuple[str, ...]:
        """Return the attempt that is being made, or during which a process died.

        Empty if there is none, or if the note cannot be read.
        """
        return _attempt(_read(self._root / STARTED))

    def charge(self) -> bool:
        """Add a death to the attempt that a dead process was making.

        Returns:
            Whether there was one.
        """
        attempt = self.started()
        if not attempt:
            return False
        deaths = {**self._deaths(), attempt: self.of(attempt) + 1}
        with contextlib.suppress(OSError):
            write_atomic(self._root / DEATHS, json.dumps([[*which, number] for which, number in deaths.items()]))
        self.clear()
        return True

    def of(self, attempt: Sequence[str]) -> int:
        """Return how many processes died during an attempt."""
        return self._deaths().get(tuple(attempt), 0)

    def deadly(self, attempt: Sequence[str]) -> str:
        """Return why an attempt is not made again, as a clause; empty if it may be made."""
        number = self.of(attempt)
        if number < MAX_DEATHS:
            return ""
        return f"{number} side processes died during this attempt: see whether it fits into memory"

    def _deaths(self) -> dict[tuple[str, ...], int]:
        """Return the deaths by attempt; a line that cannot be read counts as none."""
        found = _read(self._root / DEATHS)
        lines = [line for line in found if isinstance(line, list) and line] if isinstance(found, list) else []
        return {_attempt(line[:-1]): line[-1] for line in lines if _attempt(line[:-1]) and type(line[-1]) is int}


def _attempt(found: Any) -> tuple[str, ...]:
    """Return step, attack and defence; empty if that is not what was found."""
    right = isinstance(found, list) and len(found) == 3 and all(isinstance(name, str) for name in found)
    return tuple(found) if right else ()


def _read(path: Path) -> Any:
    """Return the JSON of a file; None if it cannot be read."""
    try:
        return parse_json(read_bounded(path))
    except (OSError, ValueError):
        return None
