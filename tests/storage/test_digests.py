"""Digests of files: independent of how the bytes arrive, and checked if old."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from leakaudit.errors import SnapshotVersionError
from leakaudit.storage import digests
from leakaudit.storage.digests import PIECE, Digest, digest_of

OF_NOTHING = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
"""BLAKE3 of no bytes, from the test vectors of its authors."""


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, 3 * PIECE + 17])
def test_the_digest_does_not_depend_on_the_pieces(algorithm: str, size: int, tmp_path: Path) -> None:
    """Neither in memory nor from a file."""
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    digest = Digest(algorithm)
    for start in range(0, size, 1_000_003):
        digest.update(data[start : start + 1_000_003])
    found = digest.finish()
    assert found == digest_of(tmp_path / "f", f"{algorithm}:00")
    if algorithm == "sha256":
        assert found == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_a_new_digest_is_blake3(tmp_path: Path) -> None:
    """By the test vectors of its authors."""
    (tmp_path / "f").write_bytes(b"")
    assert digest_of(tmp_path / "f") == f"blake3:{OF_NOTHING}"


def test_a_bit_a_length_and_an_order_change_it(tmp_path: Path) -> None:
    """Truncation at a boundary of pieces and swapped pieces included."""
    one, two = os.urandom(PIECE), os.urandom(PIECE)
    flipped = bytes([one[0] ^ 1]) + one[1:]
    found = set()
    for number, data in enumerate((one + two, two + one, one, flipped + two, one + two + b"\0")):
        (tmp_path / str(number)).write_bytes(data)
        found.add(digest_of(tmp_path / str(number)))
    assert len(found) == 5


def test_an_unknown_algorithm_is_refused_by_its_name(tmp_path: Path) -> None:
    """A later version may write it, and an earlier one wrote a tree of BLAKE2b."""
    (tmp_path / "f").write_bytes(b"abc")
    for kind in ("md99", "blake2b-tree"):
        with pytest.raises(SnapshotVersionError, match=f"kind {kind}; this version knows blake3 and sha256"):
            digest_of(tmp_path / "f", f"{kind}:00")


def test_a_machine_without_the_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that was written where it is installed cannot be checked."""
    monkeypatch.setattr(digests, "blake3", None)
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(SnapshotVersionError, match="pip install blake3"):
        digest_of(tmp_path / "f", "blake3:00")
    assert Digest("sha256").finish().startswith("sha256:")
