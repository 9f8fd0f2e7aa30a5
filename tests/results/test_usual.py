"""Usual results are read as the general reader reads them."""

from __future__ import annotations

import json

import pytest

from leakaudit.files.strict_json import parse_json
from leakaudit.results.files import general_results, to_json, usual_from
from leakaudit.results.schema import Results
from tests.gate.test_mutations import edits_of, resealed
from tests.support.leaking import LEAKS
from tests.support.undecided import FAILING

EDITS = 8
"""Edits of each audit."""


def read_by_the_general_reader(raw: bytes) -> Results | None:
    """Return the results, or None if they are refused."""
    try:
        return general_results(parse_json(raw))
    except ValueError:
        return None


@pytest.mark.parametrize("case", FAILING)
def test_what_is_usual_is_read_as_by_the_general_reader(case: str) -> None:
    """The file as written is usual.

    Every edit that is accepted as usual gives the same results.
    """
    found = FAILING[case]
    raw = json.dumps(to_json(found[0]), indent=1).encode()
    assert (usual := usual_from(raw)) is not None and usual == read_by_the_general_reader(raw)
    for number, (_, data) in enumerate(edits_of(found, LEAKS, 3).many(EDITS)):
        raw = resealed(data).encode("utf-8", "surrogatepass")
        usual = usual_from(raw)
        assert usual is None or usual == read_by_the_general_reader(raw), number


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"attempts": [', '"attempts": [], "attempts": ['),
        ('"seed": 0', '"seed": 0, "seed": 0'),
        ('"wall_s": ', '"wall_s": 1e999, "gpu_s": '),
        ('"min_tokens": 8', '"min_tokens": 8.0'),
        ('"stop": ', '"unknown": 1, "stop": '),
        ('"adaptive": true', '"adaptive": NaN'),
        ('"command": "', '"command": "\\ud800'),
        ('"min_tokens": 8', '"min_tokens": 10000000000000000000000'),
    ],
)
def test_what_is_not_as_written_is_left_to_the_general_reader(old: str, new: str) -> None:
    """Each unusual file is left to the general reader."""
    text = json.dumps(to_json(next(iter(FAILING.values()))[0]))
    assert old in text
    assert usual_from(text.replace(old, new, 1).encode()) is None


@pytest.mark.parametrize("end", ["]", "{}", ",", "x"])
def test_what_follows_the_document_is_unusual(end: str) -> None:
    """Only one document is in a file."""
    text = json.dumps(to_json(next(iter(FAILING.values()))[0]))
    assert usual_from((text + end).encode()) is None and usual_from(text[:-1].encode()) is None
