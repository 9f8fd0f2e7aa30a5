"""Digests of files, computed with several threads.

A digest begins with the name of its algorithm: `blake2b-tree:...`, or `sha256:...` in older snapshots.

`blake2b-tree` is BLAKE2b in tree mode (not in RFC 7693; Aumasson et al. 2013, "BLAKE2", Sec. 2.10): leaves of 4 MiB,
any number of them below one root, depth 2, 64 bytes from each leaf, 32 bytes from the root. docs/decisions/digests.md has the reasons.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from leakaudit.errors import SnapshotVersionError

LEAF = 1 << 22
"""Bytes of a leaf. Our choice: one thread needs 3 ms, much longer than a change of threads and much shorter than for a whole file."""

MOST_THREADS = 4
"""Largest number of threads. Our choice: four threads with 1.4 GB/s each are faster than the disks."""

WAITING = 4
"""Largest number of leaves that wait for each thread.

The limit keeps waiting leaves from filling the memory. Our choice: 64 MiB in all.
"""

INNER, OUTER = 64, 32
"""Bytes of a leaf's digest and of the root's."""


class TreeDigest:
    """A digest of bytes that are given in pieces.

    The pieces must not change before `finish`.
    """

    def __init__(self) -> None:
        """Begin a digest of no bytes."""
        self._threads = max(
            1, min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        )
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="leakaudit-digest")
        self._pending: deque[Future[bytes]] = deque()
        self._root = _node(depth=1, last=True, size=OUTER)
        self._parts: list[memoryview] = []
        self._held = 0
        self._leaves = 0

    def update(self, data: Any) -> None:
        """Add the next bytes."""
        left = memoryview(data).cast("B")
        while len(left):
            if self._held == LEAF:  # not earlier, because the last leaf is hashed with a flag
                self._hand_over(last=False)
            part, left = left[: LEAF - self._held], left[LEAF - self._held :]
            self._parts.append(part)
            self._held += len(part)

    def finish(self) -> str:
        """Return the digest with the name of its algorithm."""
        self._hand_over(last=True)
        while self._pending:
            self._root.update(self._pending.popleft().result())
        self._pool.shutdown()
        return f"blake2b-tree:{self._root.hexdigest()}"

    def _hand_over(self, *, last: bool) -> None:
        self._pending.append(self._begun(self._parts, self._leaves, last))
        self._parts, self._held, self._leaves = [], 0, self._leaves + 1
        while len(self._pending) > WAITING * self._threads:
            self._root.update(self._pending.popleft().result())

    def _begun(self, parts: list[memoryview], number: int, last: bool) -> Future[bytes]:
        """Begin to hash a leaf.

        It is hashed here if the interpreter ends and takes no more work for its threads.
        """
        try:
            return self._pool.submit(_leaf, parts, number, last)
        except RuntimeError:
            done: Future[bytes] = Future()
            done.set_result(_leaf(parts, number, last))
            return done


def _leaf(parts: list[memoryview], number: int, last: bool) -> bytes:
    node = _node(depth=0, last=last, size=INNER, number=number)
    for part in parts:
        node.update(part)
    return bytes(node.digest())


def _node(*, depth: int, last: bool, size: int, number: int = 0) -> Any:
    return hashlib.blake2b(
        digest_size=size,
        fanout=0,
        depth=2,
        leaf_size=LEAF,
        node_offset=number,
        node_depth=depth,
        inner_size=INNER,
        last_node=last,
    )


def digest_of(path: Path, like: str = "") -> str:
    """Return the digest of a file's bytes with the name of its algorithm.

    Args:
        path: path of the file.
        like: digest whose algorithm is used; empty for the current algorithm.

    Raises:
        OSError: the file cannot be read.
        SnapshotVersionError: `like` names an algorithm that this version does not know.
    """
    name = like.partition(":")[0] if like else "blake2b-tree"
    with path.open("rb") as file:
        if name == "sha256":
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        if name != "blake2b-tree":
            raise SnapshotVersionError(
                f"{path}: has a digest of the kind {ascii(name[:40])[1:-1]}; this version knows blake2b-tree and sha256. Upgrade leakaudit."
            )
        digest = TreeDigest()
        while piece := file.read(LEAF):
            digest.update(piece)
        return digest.finish()
