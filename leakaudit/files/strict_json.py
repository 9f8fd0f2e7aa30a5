"""A strict reader of JSON; its errors say in one sentence what is wrong.

Python's own reader keeps the last of two equal keys, reads NaN as a number and fails on deep nesting with a RecursionError. A file
that decides about a training run must have exactly one meaning.
"""

from __future__ import annotations

import json
import math
import stat
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from leakaudit.files.regular_files import open_regular

MAX_BYTES = 256 * 1024 * 1024
"""Largest file. Our choice: a thousand steps of eight sequences under twenty attacks fill about a quarter of it."""
MAX_DEPTH = 30
"""Most levels of nesting, as in `strict_yaml`. Our choice: our own files have eight."""
MAX_DIGITS = 19
"""Most digits of a whole number, so that it fits into 64 bits."""

_Path = tuple[str | int, ...]


def read_bounded(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        ValueError: the file is larger, or is not a regular file.
        OSError: the file cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("is not a regular file")
    with open_regular(path) as file:  # it may have been replaced since
        raw = file.read(limit + 1)
    if len(raw) > limit:
        most = f"{limit // 1024**2} MiB" if limit >= 1024**2 else f"{limit // 1024} KiB"
        raise ValueError(f"is larger than {most}; is it the right file?")
    return raw


def parse_json(raw: bytes) -> Any:
    """Return the data of a JSON document in UTF-8.

    Raises:
        ValueError: the document is not JSON, or is ambiguous or invalid: an object has a key twice, a number is not finite or has more than
            `MAX_DIGITS` digits, a text holds half a surrogate pair, or there are more than `MAX_DEPTH` levels.

    >>> parse_json(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ...
    ValueError: the key 'a' occurs twice at the top
    """
    try:
        text = raw.decode("utf-8-sig")
        data = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_int=_whole,
            parse_float=_fraction,
        )
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(f"line {line} is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not readable as JSON (line {error.lineno}: {error.msg})") from None
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None
    _check(data)
    return data


class _Twice(dict[str, Any]):
    """An object that has a key twice; `walk` finds its place later."""

    key = ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    twice = _Twice(found)
    twice.key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    return twice


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a finite number")


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(digits.lstrip('-'))} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _fraction(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{short(digits)} is not a finite number")
    return number


def _check(data: Any) -> None:
    if all(map(_sound, _values(data))):
        return  # nearly always true; only a problem needs the slower walk, which finds its place
    for path, value in walk(data):
        problem = _problem(value, path)
        if problem:
            raise ValueError(problem)


def _values(data: Any) -> Iterator[Any]:
    """Yield every object, list and text in `data`, and None for too deep nesting."""
    level, depth = [data] if isinstance(data, dict | list | str) else [], 0
    while level:
        if depth > MAX_DEPTH:
            yield None
            return
        yield from level
        below = chain.from_iterable(
            value.values() if isinstance(value, dict) else value for value in level if not isinstance(value, str)
        )
        level, depth = [value for value in below if isinstance(value, dict | list | str)], depth + 1


def _sound(value: Any) -> bool:
    if isinstance(value, str):
        return _is_text(value)
    if isinstance(value, dict):
        return not isinstance(value, _Twice) and all(map(str.isascii, value))
    return value is not None


def _problem(value: Any, path: _Path) -> str:
    if len(path) > MAX_DEPTH:
        return f"nested more than {MAX_DEPTH} levels deep"
    if isinstance(value, _Twice):
        return f"the key {short(value.key)} occurs twice {place(path)}"
    if isinstance(value, str) and not _is_text(value):
        return f"the text {place(path)} holds half a surrogate pair, which is not a character"
    if isinstance(value, dict) and not all(map(_is_text, value)):
        return f"a key {place(path)} holds half a surrogate pair, which is not a character"
    return ""


def _is_text(word: str) -> bool:
    return word.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in word)


def walk(data: Any) -> Iterator[tuple[_Path, Any]]:
    """Yield every value of `data` with its path, the outermost first."""
    waiting: list[tuple[_Path, Any]] = [((), data)]
    while waiting:
        path, value = waiting.pop()
        yield path, value
        if isinstance(value, dict):
            waiting += [((*path, key), below) for key, below in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [((*path, index), value[index]) for index in range(len(value) - 1, -1, -1)]


def place(path: _Path) -> str:
    """Return a path as words in a sentence.

    >>> place(("attempts", 3, "events")), place(())
    ('in attempts[3].events', 'at the top')
    """
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return f"in {short(text)[1:-1]}" if text else "at the top"


def short(word: object) -> str:
    """Return `repr(word)`, shortened, so that a message stays on one line."""
    text = repr(word)
    return text if len(text) <= 60 else text[:56] + "..." + text[0]
