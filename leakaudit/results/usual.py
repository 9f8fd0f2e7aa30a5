"""A reader of results that are as this version writes them, in little memory.

The attempts are most of a file, so they are parsed, checked and counted into the digest a few at a time. This reader accepts a document, or says
nothing about it: whatever is unusual is left to the general reader in `files.py`, which alone decides what is refused and why.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from leakaudit.results import former_keys
from leakaudit.results.schema import Attempt, Measured, Missing, Results, Score, SequenceScore

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Half a surrogate pair."""

_DIGITS = re.compile(r"[0-9]{20,}")
"""More digits than `strict_json` reads in a whole number; digests have them, too."""

_SPACE = re.compile(r"[ \t\n\r]*")

_CHUNK = 256
"""Attempts that are held as plain data at a time. Our choice: about 2 MB."""

OF_ATTEMPTS, OF_SEQUENCES = {*Attempt.model_fields}, {*SequenceScore.model_fields, *former_keys.OF_SEQUENCES}
"""Keys that are written for an attempt and for a sequence."""

_SETS = [{*Score.model_fields}, {*Missing.model_fields}]
"""Keys of what was measured, or is missing."""


@dataclass(frozen=True)
class Usual:
    """Results that are as this version writes them."""

    results: Results
    data: dict[str, Any]
    """The data of the file without `attempts`; a number without a fraction is a whole one."""
    digest: str
    """That of `files.digest_of`; the caller compares it, the keys of the data, and the version."""
    sha256: str = ""
    """Of the bytes of the file, in hex; empty if only a text was read."""


def usual_results(text: str) -> Usual | None:
    """Return the results in a JSON text.

    None if anything is unusual: the text may not be JSON, hold a key twice or a number that is not finite, lack a key or have one too many, or
    hold a value that does not fit.
    """
    if unusual(text):
        return None
    try:
        return read_document(text, Attempts())
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        return None  # the general reader says what is wrong


def unusual(text: str) -> bool:
    """Return whether a text may hold half a character or a too long number."""
    return bool("\\u" in text and _HALF.search(text)) or long_number_in(text)


def read_document(text: str, attempts: Attempts) -> Usual | None:
    """Return the results in a JSON text; `attempts` reads its list of attempts.

    Raises:
        Exception: one of those that `usual_results` catches.
    """
    data: dict[str, Any] = {}
    written: dict[str, str] = {}
    at = _after(text, 0, "{")
    while True:
        key, at = _scan(text, at)
        at = _after(text, at, ":")
        if not isinstance(key, str) or key in written:
            return None
        if key == "attempts":
            written[key], at = "[]", attempts.read(text, at)
        else:
            data[key], end = _scan(text, at)
            written[key], at = text[at:end], end
        at = _space(text, at)
        if text[at] != ",":
            break
        at = _after(text, at, ",")
    if _after(text, at, "}") != len(text) or "attempts" not in written or min(data) < "attempts":
        return None
    content = attempts.content
    content.update(b"]," + canonical_text({key: value for key, value in data.items() if key != "digest"})[1:])
    members = ",".join(f"{json.dumps(key)}:{value}" for key, value in written.items())
    results = Results.model_validate_json(f"{{{members}}}", strict=True)
    return Usual(results.model_copy(update={"attempts": tuple(attempts.made)}), data, f"sha256:{content.hexdigest()}")


class Attempts:
    """The attempts of a document; equal parts of them are one object."""

    def __init__(self) -> None:
        """Begin without attempts."""
        self.made: list[Attempt] = []
        self.content = hashlib.sha256(b'{"attempts":[')
        """Of the canonical text of the document, as far as it was read."""
        self._known: dict[tuple[float, int] | tuple[str], Measured] = {}
        self._sets: dict[frozenset[str], set[str]] = {}

    def read(self, text: str, at: int) -> int:
        """Read the list that begins at a place, and return the place after it.

        Raises:
            ValueError: an attempt is not as this version writes it.
        """
        at = _after(text, at, "[")
        begin, chunk = at, []
        while True:
            one, at = _scan(text, at)
            chunk.append(one)
            end, at = at, _space(text, at)
            more = text[at] == ","
            if len(chunk) == _CHUNK or not more:
                self.content.update(b"," * bool(self.made) + canonical_text(chunk)[1:-1])
                self._add(chunk, text[begin:end])
                begin, chunk = at + 1, []
            if not more:
                return _after(text, at, "]")
            at = _after(text, at, ",")

    def _add(self, chunk: list[Any], written: str) -> None:
        """Add attempts, given as data and as JSON text without the brackets."""
        if not all(map(self._has_every_key, chunk)):
            raise ValueError("an attempt has other keys than this version writes")
        for attempt in _attempts().validate_json(f"[{written}]", strict=True):
            for name, found in attempt.scores.items():
                key = (
                    (found.value, found.n) if isinstance(found, Score) else (found.missing,)
                )  # a model takes long to hash
                attempt.scores[name] = self._known.setdefault(key, found)
            for model in (attempt, *attempt.sequences):
                fields = model.model_fields_set
                object.__setattr__(model, "__pydantic_fields_set__", self._sets.setdefault(frozenset(fields), fields))
            self.made.append(attempt)

    def _has_every_key(self, one: dict[str, Any]) -> bool:
        """Return whether the data of an attempt have the keys that are written."""
        measured = (
            *one["scores"].values(),
            one["reachable_tokens"],
            one["reachable_sequences"],
            one["guess_perplexity"],
        )
        return (
            one.keys() == OF_ATTEMPTS
            and all(sequence.keys() == OF_SEQUENCES for sequence in one["sequences"])
            and all(value.keys() in _SETS for value in measured if isinstance(value, dict))
        )


@cache
def _attempts() -> TypeAdapter[tuple[Attempt, ...]]:
    return TypeAdapter(tuple[Attempt, ...])


def long_number_in(text: str) -> bool:
    """Return whether a JSON text may hold a whole number of 20 digits or more.

    Digits of a text after a blank or a comma may be one as well; then the text is unusual.
    """
    starts = (text[max(0, found.start() - 3) : found.start()].removesuffix("-") for found in _DIGITS.finditer(text))
    return any(before.endswith((" ", "\t", "\n", "\r", ",", "[", '":')) for before in starts)


def _space(text: str, at: int) -> int:
    """Return the place after blanks."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _after(text: str, at: int, sign: str) -> int:
    """Return the place after a sign and the blanks around it.

    Raises:
        ValueError: another sign is there.
    """
    at = _space(text, at)
    if not text.startswith(sign, at):
        raise ValueError(f"no {sign} here")
    return _space(text, at + 1)


def canonical_text(data: Any) -> bytes:
    """Return the text of data of which the digest is made, in ASCII.

    A number without a fraction has to be a whole one in the data.
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _number(digits: str) -> float:
    number = float(digits)
    return int(number) if number.is_integer() else number


_scan = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number).raw_decode
"""Reader of the JSON value at a place of a text; it returns the value and the place after it."""
