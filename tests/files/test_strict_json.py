"""JSON is read in one way or not at all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from leakaudit.files import strict_json


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"a": 1, "a": 1}', "the key 'a' occurs twice at the top"),
        (b'{"x": [{"y": {"b": 1, "b": 2}}]}', r"the key 'b' occurs twice in x\[0\]\.y"),
        (b'{"a": NaN}', "NaN is not a finite number"),
        (b"[-Infinity]", "-Infinity is not a finite number"),
        (b"[1e999]", "1e999' is not a finite number"),
        (b"[" * 100_000 + b"]" * 100_000, "nested more than 30 levels deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested more than 30 levels deep"),
        (b"[" * 40 + b"]" * 40, "nested more than 30 levels deep"),
        (b"[" * 100_000, "nested more than 30 levels deep"),
        (b"9" * 5_000, "a whole number of 5000 digits; at most 19 are read"),
        (b'{"a": -' + b"9" * 5_000 + b"}", "a whole number of 5000 digits"),
        (rb'["\ud800"]', r"the text in \[0\] holds half a surrogate pair"),
        (rb'{"\udfff": 1}', "a key at the top holds half a surrogate pair"),
        (b'{"a": 1}\n\xff', "line 2 is not UTF-8 text"),
        (b'{"a": 1,\n}', r"not readable as JSON \(line 2: "),
        (b"{} {}", r"not readable as JSON \(line 1: Extra data\)"),
        (b"", "not readable as JSON"),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(raw: bytes, message: str) -> None:
    """Each with the reason and, where it has one, its place."""
    with pytest.raises(ValueError, match=message) as caught:
        strict_json.parse_json(raw)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "data"),
    [
        (b'\xef\xbb\xbf{"a": [1, 2.5, true, null, "x"]}', {"a": [1, 2.5, True, None, "x"]}),
        ('"a\u2028b\u0085c"'.encode(), "a\u2028b\u0085c"),
        (rb'"\ud83d\ude00"', "\U0001f600"),
        (b"1234567890123456789", 1234567890123456789),
    ],
)
def test_what_is_plain_json_is_read(raw: bytes, data: object) -> None:
    """A byte order mark, separators inside texts and surrogate pairs are fine."""
    assert strict_json.parse_json(raw) == data


def test_a_file_that_is_too_large_or_no_file_is_not_read(tmp_path: Path) -> None:
    """A limit on the bytes, and nothing that could wait for a writer without end."""
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(strict_json.MAX_BYTES + 1)
    with pytest.raises(ValueError, match="is larger than 256 MiB"):
        strict_json.read_bounded(path)
    if os.name == "posix":
        with pytest.raises(ValueError, match="is not a regular file"):
            strict_json.read_bounded(Path("/dev/zero"))


def test_a_key_that_stands_twice_among_many_is_found_at_once() -> None:
    """Counting each of them anew would take hours."""
    many = b", ".join(b'"%d": 0' % number for number in range(200_000))
    start = time.perf_counter()
    with pytest.raises(ValueError, match="the key '199999' occurs twice at the top"):
        strict_json.parse_json(b"{" + many + b', "199999": 1}')
    assert time.perf_counter() - start < 30
