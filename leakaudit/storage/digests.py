"""Digests of files.

A digest begins with the name of its algorithm: `blake3:...`, or `sha256:...` where the package blake3 is not installed and in older
snapshots. docs/decisions/digests.md has the reasons.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from leakaudit.errors import SnapshotVersionError
from leakaudit.files.regular_files import open_regular

try:
    from blake3 import blake3
except ImportError:  # a machine without a network may lack the package
    blake3 = None  # type: ignore[assignment, misc]

PIECE = 1 << 22
"""Bytes that are hashed at a time: 4 MiB, for which the interpreter's lock is free."""

NEW = "sha256" if blake3 is None else "blake3"
"""Name of the algorithm of new digests."""


class Digest:
    """A digest of bytes that are given in pieces."""

    def __init__(self, algorithm: str = NEW) -> None:
        """Begin a digest of no bytes.

        Args:
            algorithm: its name.

        Raises:
            SnapshotVersionError: it is not known, or its package is not installed.
        """
        if algorithm == "blake3" and blake3 is None:
            raise SnapshotVersionError(
                "has a digest of the kind blake3, and the package is missing: pip install blake3"
            )
        if algorithm not in ("blake3", "sha256"):
            raise SnapshotVersionError(
                f"has a digest of the kind {ascii(algorithm[:40])[1:-1]}; this version knows blake3 and sha256. "
                "Audit it with the version of leakaudit that wrote it, or keep a new step"
            )
        self._algorithm = algorithm
        self._state: Any = blake3() if algorithm == "blake3" else hashlib.sha256()

    def update(self, data: Any) -> None:
        """Add the next bytes."""
        self._state.update(memoryview(data).cast("B"))

    def finish(self) -> str:
        """Return the digest with the name of its algorithm."""
        return f"{self._algorithm}:{self._state.hexdigest()}"


def digest_of(path: Path, like: str = "") -> str:
    """Return the digest of a file's bytes with the name of its algorithm.

    Args:
        path: path of the file.
        like: digest whose algorithm is used; empty for the current algorithm.

    Raises:
        OSError: the file cannot be read.
        SnapshotVersionError: `like` names an algorithm that this version does not know.
    """
    try:
        digest = Digest(like.partition(":")[0] or NEW)
    except SnapshotVersionError as error:
        raise SnapshotVersionError(f"{path}: {error}") from None
    with open_regular(path) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.finish()
