"""A reader of JSON lines: one JSON value per line, in UTF-8 (jsonlines.org).

Only a line feed ends a line. `str.splitlines` also splits at U+2028, U+0085 and six more characters, which a JSON string may contain
unescaped. Errors name the file and the number of the line, never its content.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from leakaudit.errors import DataError
from leakaudit.files.strict_json import read_bounded

MAX_DATA_BYTES = 1024**3
"""Largest file. Our choice: it is read as a whole, and corpora that language models of this size are trained on have half of it."""

MOST_NAMES = 8
"""Most field names in a message. Our choice: enough to recognise the file."""


def split_lines(content: bytes) -> list[bytes]:
    r"""Return the lines of a file, without an empty line after the last line feed.

    >>> len(split_lines(b'{"text": "one\xe2\x80\xa8row"}\n{}\n'))
    2
    """
    lines = content.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every line that is not blank with its number, counted from 1.

    A byte order mark at the start is skipped.

    Raises:
        DataError: the file is missing, larger than `MAX_DATA_BYTES` or no regular file, or a line is not UTF-8.
    """
    try:
        content = read_bounded(path, MAX_DATA_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give a file with one JSON object per line, or a text file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or type(error).__name__})") from None
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    for number, line in enumerate(split_lines(content.removeprefix(b"\xef\xbb\xbf")), start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            raise DataError(f"{path}:{number}: is not UTF-8; save the file as UTF-8 text") from None
        if text.strip():
            yield number, text


def numbered_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every JSON object of a file with the number of its line, counted from 1.

    Raises:
        DataError: the file is missing, or a line is not a JSON object.
    """
    for number, line in numbered_lines(path):
        yield number, _object(path, number, line)


def text_of(path: Path, number: int, row: dict[str, Any], field: str = "text") -> str:
    """Return the text of a row.

    Args:
        path: of the file, for the message.
        number: of the row, counted from 1.
        row: field -> value.
        field: name of the field with the text.

    Raises:
        DataError: the field is missing, is not a string, or holds half of a surrogate pair, which no tokenizer can read.
    """
    text = row.get(field)
    if not isinstance(text, str):
        raise DataError(f"{path}:{number}: looked for the field {field!r} with a string, found {field_names(row)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            f"{path}:{number}: the text holds half of a surrogate pair (an escape such as \\ud83d without its other half), "
            "which is not a character; repair or remove the row"
        ) from None
    return text


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError:
        raise DataError(f"{path}:{number}: is not a JSON object; each line must hold one") from None
    except RecursionError:
        raise DataError(f"{path}:{number}: is nested too deeply; a row must be one flat object") from None
    except ValueError:  # Python's limit on the digits of a whole number
        raise DataError(
            f"{path}:{number}: holds a number with too many digits; shorten it or write it as text"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: is not a JSON object; found {type(row).__name__}")
    return row


def field_names(row: Mapping[str, Any]) -> str:
    """Return the names of a row's fields in ASCII.

    A name may hold anything, and a terminal executes control characters.
    """
    names = sorted(row)
    shown = ", ".join(ascii(name)[1:-1] for name in names[:MOST_NAMES])
    return (shown + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")) or "no fields"
