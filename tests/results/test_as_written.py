"""Results in the layout of this version are read as the general reader reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest

from leakaudit.files.strict_json import parse_json
from leakaudit.results import as_written
from leakaudit.results.as_written import read_as_written
from leakaudit.results.files import general_results, to_json, usual_from
from leakaudit.results.plain_attempts import INSTALLED, read_plain
from leakaudit.results.schema import Results
from leakaudit.results.usual import canonical_text, usual_results
from tests.gate.test_mutations import edits_of, resealed
from tests.support.factories import attempt, results, step, unguessed
from tests.support.leaking import LEAKS
from tests.support.undecided import FAILING

needs_msgspec = pytest.mark.skipif(not INSTALLED, reason="needs the extra `fast` (msgspec)")


def laid_out(data: Any) -> bytes:
    """Return data in the layout of `results.json`."""
    return json.dumps(data, indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass")


def by_the_general_reader(raw: bytes) -> Results | None:
    """Return the results, or None if they are refused."""
    try:
        return general_results(parse_json(raw))
    except ValueError:
        return None


@pytest.mark.parametrize("case", FAILING)
def test_what_is_as_written_is_read_as_by_the_general_reader(case: str) -> None:
    """The file, and every edit of it that is accepted."""
    found, accepted = FAILING[case], 0
    raw = laid_out(to_json(found[0]))
    assert (first := read_as_written(BytesIO(raw))) is not None
    assert first.results == by_the_general_reader(raw) and first.digest == first.results.digest
    for number, (_, data) in enumerate(edits_of(found, LEAKS, 7).many(12)):
        raw = laid_out(json.loads(resealed(data)))
        usual = usual_from(raw)
        accepted += usual is not None
        assert usual is None or usual == by_the_general_reader(raw), number
    assert accepted


def small() -> bytes:
    """Return an audit of three steps by two attacks in the layout of a file."""
    made = [attempt(i, name, recall=0.25) for i in range(3) for name in ("span", "tag")]
    return laid_out(to_json(results([step(i) for i in range(3)], made)))


@pytest.mark.parametrize("size", [1, 7, 100, 5000])
def test_the_size_of_a_block_does_not_matter(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a block ends in the middle of a line that begins or ends the list."""
    monkeypatch.setattr(as_written, "_BLOCK", size)
    found, other = read_as_written(BytesIO(small())), usual_results(small().decode())
    assert found is not None and other is not None
    assert (found.results, found.data, found.digest) == (other.results, other.data, other.digest)


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "a key twice in an attempt": lambda raw: raw.replace(b'"stop": ', b'"stop": "x",\n   "stop": ', 1),
    "a key twice in a score": lambda raw: raw.replace(b'"value": ', b'"value": 0.5, "value": ', 1),
    "a key that nobody knows": lambda raw: raw.replace(b'"stop": ', b'"more": 1, "stop": ', 1),
    "a key less": lambda raw: raw.replace(b'   "stop": "done",\n', b"", 1),
    "a score that is also missing": lambda raw: raw.replace(b'"n": 1', b'"n": 1, "missing": "x"', 1),
    "a number of sequences that is not there": lambda raw: raw.replace(b'"n": 1', b'"n": null', 1),
    "a key that contradicts a score": lambda raw: raw.replace(b'"r1": 0.25', b'"r1": 0.5', 1),
    "a number of too many digits": lambda raw: raw.replace(b'"wall_s": 1.5', b'"wall_s": ' + b"1" * 25, 1),
    "a number that is not finite": lambda raw: raw.replace(b'"wall_s": 1.5', b'"wall_s": 1e999', 1),
    "a share above one": lambda raw: raw.replace(b'"value": 0.25', b'"value": 1.25', 1),
    "a text for a number": lambda raw: raw.replace(b'"wall_s": 1.5', b'"wall_s": "1.5"', 1),
    "a fraction for a whole number": lambda raw: raw.replace(b'"seed": 0', b'"seed": 0.5', 1),
    "half a character": lambda raw: raw.replace(b'"stop": "done"', b'"stop": "\\ud800"', 1),
    "a byte that is not UTF-8": lambda raw: raw.replace(b'"stop": "done"', b'"stop": "\xff"', 1),
    "another status": lambda raw: raw.replace(b'"status": "ran"', b'"status": "won"', 1),
    "no attempt between two commas": lambda raw: raw.replace(b"\n  },", b"\n  },\n  ,", 1),
    "a comma after the last attempt": lambda raw: raw.replace(b"\n ],", b",\n ],", raw.count(b"\n ],")),
    "another list first": lambda raw: raw.replace(b'\n "attempts": [', b'\n "attempts": [\n ],\n "attempts": [', 1),
    "the list in another object": lambda raw: raw.replace(b'"run": {', b'"run": {\n "attempts": [\n ],', 1),
    "text after the document": lambda raw: raw + b"{}",
    "the end is missing": lambda raw: raw[:-1],
    "the list has no end": lambda raw: raw[: raw.rindex(b"\n  }")],
    "another seed": lambda raw: raw.replace(b'"seed": 0', b'"seed": 1', 1),
}
"""What -> an edit; the digest is not computed again where the edit is of a kind that no reader takes."""


@pytest.mark.parametrize("what", EDITS)
def test_what_is_not_as_written_is_left_to_the_general_reader(what: str) -> None:
    """None of these is accepted."""
    raw = EDITS[what](small())
    assert raw != small()
    assert usual_from(raw) is None


def test_a_list_without_attempts_and_a_file_without_a_layout_are_read_elsewhere() -> None:
    """The reader says nothing about them."""
    empty, compact = laid_out(to_json(results([], []))), json.dumps(to_json(results([], []))).encode()
    assert read_as_written(BytesIO(empty)) is read_as_written(BytesIO(compact)) is None
    assert usual_from(empty) is None and by_the_general_reader(empty) is not None


@needs_msgspec
@pytest.mark.parametrize("case", FAILING)
def test_plain_attempts_are_those_of_the_other_reader(case: str) -> None:
    """The same models with the same fields, and the same text for the digest."""
    data = to_json(FAILING[case][0])["attempts"]
    found = read_plain(laid_out(data)[1:-1])
    assert found is not None and found[1] == canonical_text(canonical(data))[1:-1]
    assert found[0] == [*FAILING[case][0].attempts]
    assert [a.model_dump(mode="json") for a in found[0]] == data
    assert all(a.model_fields_set == {*type(a).model_fields} for a in found[0])


@needs_msgspec
def test_numbers_of_every_size_have_the_text_of_the_digest() -> None:
    """Or they are not plain."""
    rng = random.Random(3)
    numbers = [0.0, 1.0, 10.0, 1e15, 123456789012345.0, 1e-5, 9.9e-5, 1e-4, 1e-7, 5e-324, 0.1, 1 / 3, 99999.5]
    numbers += [10 ** rng.uniform(-20, 15) for _ in range(300)] + [float(10**n) for n in range(16)]
    for number in numbers:
        one = attempt(0, wall_s=number, facts={"a": -number or 0.0, "b e-1": number, "c:1.0,d": -2.0})
        data = to_json(results([step(0)], [one]))["attempts"]
        found = read_plain(laid_out(data)[1:-1])
        assert found is not None and found[1] == canonical_text(canonical(data))[1:-1], number
    assert read_plain(laid_out([attempt(0, wall_s=1e16).model_dump(mode="json")])[1:-1]) is None


@needs_msgspec
def test_text_that_is_not_plain_is_left_to_the_other_reader() -> None:
    """Its escapes differ; the results are the same."""
    for reason in (":1.0,", "caf\u00e9", 'a "word"', "a\\b", "a\nb", "\x7f"):
        made = [attempt(i, "span", reason=reason, recall=0.25) for i in range(3)]
        raw = laid_out(to_json(results([step(i) for i in range(3)], made)))
        assert read_plain(laid_out([made[0].model_dump(mode="json")])[1:-1]) is None
        found = read_as_written(BytesIO(raw))
        assert found is not None and found.digest == found.results.digest
        assert found.results == by_the_general_reader(raw)


@needs_msgspec
def test_an_attempt_without_numbers_is_plain() -> None:
    """Labels only, and a `Missing` for each kind of number."""
    missing = {"missing": "no test"}
    one = attempt(0, kind="label", sequences=(unguessed(),), reachable_tokens=missing, guess_perplexity=missing)
    data = [one.model_dump(mode="json")]
    found = read_plain(laid_out(data)[1:-1])
    assert found is not None and found[0] == [one]


def canonical(data: Any) -> Any:
    """Return data in which a number without a fraction is a whole one."""
    if isinstance(data, dict):
        return {key: canonical(value) for key, value in data.items()}
    if isinstance(data, list):
        return [canonical(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data
