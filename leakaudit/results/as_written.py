"""A reader of results in the layout of this version, one block at a time.

The file is never held as a whole. `audit/publish.py` writes one value a line, so the list of attempts begins and ends with known lines, and a line break is in no JSON text. This
reader accepts a document or says nothing about it, as `usual.py` does, whose rules it uses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import BinaryIO

from leakaudit.files.strict_json import MAX_BYTES
from leakaudit.results.plain_attempts import read_plain
from leakaudit.results.usual import Attempts, Usual, read_document, unusual

_BLOCK = 256 * 1024
"""Bytes that are read at a time. Our choice: about 200 attempts."""

_BEGIN, _BETWEEN, _END = b'\n "attempts": [', b"\n  },", b"\n ]"
"""What stands before the first attempt, at the end of one that another follows, and after the last one."""


def read_as_written(file: BinaryIO) -> Usual | None:
    """Return the results in a file, with the SHA-256 of its bytes in hex.

    None if anything is unusual, as for `usual.usual_results`.
    """
    parts = _Parts(file)
    try:
        before = parts.head()
        attempts = _Attempts(len(before))
        for written in parts.attempts():
            attempts.add(written)
        text = f"{before}[]{parts.tail().decode()}"
        found = None if unusual(text) else read_document(text, attempts)
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        return None  # another reader says what is wrong
    return found and Usual(found.results, found.data, found.digest, parts.sha256.hexdigest())


class _Parts:
    """The bytes of a file: up to the list of attempts, the list, and the rest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._waiting = b""
        self._size = 0
        self.sha256 = hashlib.sha256()

    def _block(self) -> bytes:
        block = self._file.read(_BLOCK)
        self.sha256.update(block)
        self._size += len(block)
        if self._size > MAX_BYTES:
            raise ValueError("the file is too large")
        return block

    def head(self) -> str:
        """Return the text before the list of attempts.

        Raises:
            ValueError: no line begins such a list, or the text is not UTF-8.
        """
        found = bytearray()
        while (at := found.find(_BEGIN)) < 0:
            block = self._block()
            if not block:
                raise ValueError("no line begins a list of attempts")
            found += block
        after = at + len(_BEGIN)
        self._waiting = bytes(found[after:])
        return found[: after - 1].decode("utf-8-sig")

    def attempts(self) -> Iterator[bytes]:
        """Yield the text of some attempts at a time, without the commas between.

        Raises:
            ValueError: the list has no end.
        """
        while (end := self._waiting.find(_END)) < 0:
            cut = self._waiting.rfind(_BETWEEN) + len(_BETWEEN)
            if cut >= len(_BETWEEN):
                yield self._waiting[: cut - 1]
                self._waiting = self._waiting[cut:]
            block = self._block()
            if not block:
                raise ValueError("the list of attempts has no end")
            self._waiting += block
        yield self._waiting[:end]
        self._waiting = self._waiting[end + len(_END) :]

    def tail(self) -> bytes:
        """Return what follows the list."""
        found = bytearray(self._waiting)
        while block := self._block():
            found += block
        return bytes(found)


class _Attempts(Attempts):
    """The attempts of a document that were read before the rest of it."""

    def __init__(self, place: int) -> None:
        """Begin without attempts; their list stands at a place of the text."""
        super().__init__()
        self._place = place

    def add(self, written: bytes) -> None:
        """Add attempts, given as JSON with commas between them.

        Raises:
            ValueError: they are not as this version writes them.
        """
        plain = read_plain(written)
        if plain is None:
            self.add_text(f"[{written.decode()}]")
            return
        made, text = plain
        if not made:
            raise ValueError("no attempt here")
        self.content.update(b"," * bool(self.made) + text)
        self.made += made

    def add_text(self, text: str) -> None:
        """Add the attempts of a list in JSON."""
        if unusual(text) or super().read(text, 0) != len(text):
            raise ValueError("these are not attempts alone")

    def read(self, text: str, at: int) -> int:
        """Return the place after the list, which is empty in the text.

        Raises:
            ValueError: it is not the list that was read.
        """
        if at != self._place or not text.startswith("[]", at):
            raise ValueError("the attempts stand elsewhere")
        return at + 2
