"""Usual results are read as the general reader reads them."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from leakaudit.files.strict_json import parse_json
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.evidence import Index, gather
from leakaudit.gate.policy import default_policy
from leakaudit.gate.verdict import to_json as verdict_json
from leakaudit.results.files import general_results, to_json, usual_from
from leakaudit.results.schema import Results
from leakaudit.results.usual import OF_ATTEMPTS, OF_SEQUENCES, long_number_in
from tests.gate.test_mutations import edits_of, resealed
from tests.support.factories import attempt
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


def test_the_keys_are_those_that_are_written() -> None:
    """They are known without a validator, which takes a tenth of a start to build."""
    one = attempt(0)
    assert {*one.model_dump(mode="json", by_alias=True)} == OF_ATTEMPTS
    assert {*one.sequences[0].model_dump(mode="json", by_alias=True)} == OF_SEQUENCES


@pytest.mark.parametrize("end", ["]", "{}", ",", "x"])
def test_what_follows_the_document_is_unusual(end: str) -> None:
    """Only one document is in a file."""
    text = json.dumps(to_json(next(iter(FAILING.values()))[0]))
    assert usual_from((text + end).encode()) is None and usual_from(text[:-1].encode()) is None


NOW = datetime(2026, 11, 2, 12, tzinfo=UTC)
"""When the verdicts are made."""


def verdict_on(found: Results) -> str:
    """Return the verdict of the built-in policy as it is written."""
    return json.dumps(verdict_json(evaluate(found, default_policy(), now=NOW)))


@pytest.mark.parametrize("case", [*FAILING][:6])
def test_both_readers_lead_to_the_same_verdict(case: str) -> None:
    """Byte for byte, on every edit of an audit that both read."""
    found, compared = FAILING[case], 0
    for _, data in edits_of(found, LEAKS, 7).many(EDITS):
        raw = resealed(data).encode("utf-8", "surrogatepass")
        if (usual := usual_from(raw)) is not None:
            general = read_by_the_general_reader(raw)
            assert general is not None and verdict_on(usual) == verdict_on(general)
            compared += 1
    assert compared


@pytest.mark.parametrize("case", [*FAILING])
def test_rules_that_share_an_index_find_what_each_finds_alone(case: str) -> None:
    """An index keeps what one rule asked; another rule or defence must not get it."""
    found = FAILING[case][0]
    index = Index(found)
    for defense in found.run.battery.defenses:
        for rule in default_policy().rules:
            assert gather(found, rule, defense, index=index) == gather(found, rule, defense), (rule.id, defense)


@pytest.mark.parametrize(("digits", "usual"), [("1" * 19, True), ("-" + "1" * 20, False), ("1" * 20, False)])
def test_a_number_of_too_many_digits_is_left_to_the_general_reader(digits: str, usual: bool) -> None:
    """In a list, after a colon, and with blanks; digits within a digest are no number."""
    for text in (f'["a", {digits}]', f'{{"a":{digits}}}', f"[{digits}]", f"[\n{digits}]"):
        assert long_number_in(text) != usual, text
    assert not long_number_in('{"a": "sha256:%s"}' % ("1" * 40))
