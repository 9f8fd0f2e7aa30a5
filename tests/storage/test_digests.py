"""Digests of files: independent of how the bytes arrive, and checked if old."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from leakaudit.errors import SnapshotVersionError
from leakaudit.storage.digests import INNER, LEAF, OUTER, TreeDigest, digest_of


def by_hand(data: bytes) -> str:
    """Return the digest by the parameters of BLAKE2's authors, leaf after leaf."""
    leaves = [data[start : start + LEAF] for start in range(0, len(data), LEAF)] or [b""]
    common = {"fanout": 0, "depth": 2, "leaf_size": LEAF, "inner_size": INNER}
    root = hashlib.blake2b(digest_size=OUTER, node_depth=1, last_node=True, **common)  # type: ignore[arg-type]
    for number, leaf in enumerate(leaves):
        last = number == len(leaves) - 1
        root.update(hashlib.blake2b(leaf, digest_size=INNER, node_offset=number, last_node=last, **common).digest())  # type: ignore[arg-type]
    return f"blake2b-tree:{root.hexdigest()}"


@pytest.mark.parametrize("size", [0, 1, LEAF - 1, LEAF, LEAF + 1, 3 * LEAF, 5 * LEAF + 17])
@pytest.mark.parametrize("piece", [LEAF, LEAF + 1, 1_000_003])
def test_the_digest_does_not_depend_on_the_pieces_or_the_threads(size: int, piece: int) -> None:
    """Leaves are cut by their place in the file."""
    data = os.urandom(size)
    digest = TreeDigest()
    for start in range(0, size, piece):
        digest.update(data[start : start + piece])
    assert digest.finish() == by_hand(data)


def test_a_bit_a_length_and_an_order_of_leaves_change_it(tmp_path: Path) -> None:
    """Truncation at a boundary of leaves and swapped leaves included."""
    one, two = os.urandom(LEAF), os.urandom(LEAF)
    flipped = bytes([one[0] ^ 1]) + one[1:]
    found = set()
    for number, data in enumerate((one + two, two + one, one, flipped + two, one + two + b"\0")):
        (tmp_path / str(number)).write_bytes(data)
        found.add(digest_of(tmp_path / str(number)))
    assert len(found) == 5


def test_a_digest_of_before_is_computed_as_before(tmp_path: Path) -> None:
    """Snapshots of schema 1.0 and 1.1 hold SHA-256; an algorithm of later is named."""
    (tmp_path / "f").write_bytes(b"abc")
    assert digest_of(tmp_path / "f", "sha256:00") == f"sha256:{hashlib.sha256(b'abc').hexdigest()}"
    with pytest.raises(SnapshotVersionError, match="kind md99"):
        digest_of(tmp_path / "f", "md99:00")
