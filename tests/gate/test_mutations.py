"""No edit of a failing results.json makes it pass, be it accident or forgery."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leakaudit.errors import ResultsError
from leakaudit.files.strict_json import walk
from leakaudit.gate import evaluate as gate
from leakaudit.gate.verdict import Status
from leakaudit.results.files import digest_of, read_results, to_json
from tests.support.factories import NOW
from tests.support.leaking import CASES, LEAKS

EDITS = 120
"""Random edits of each case: 720 in all."""

Data = dict[str, Any]


def judge(folder: Path, text: str, case: str) -> Status:
    """Write a results.json and judge it as `leakaudit gate` does."""
    path = folder / "results.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        found, sha256 = read_results(path)
    except ResultsError as error:
        problem = str(error)
    else:
        problem = ""
    assert "\n" not in problem
    if problem:
        return Status.ERROR
    return gate.evaluate(found, CASES[case][1], now=NOW, results_sha256=sha256).verdict


def written(case: str) -> Data:
    return copy.deepcopy(to_json(CASES[case][0]))


def resealed(data: Any) -> str:
    """Return the text of edited results whose digest fits again."""
    if isinstance(data, dict) and "digest" in data:
        data["digest"] = digest_of(data)
    return json.dumps(data)


# ---------------------------------------------------------------------------------------------------------------- edits


def places(data: Data) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value; those of the leaking step three times."""
    found = []
    for _, value in walk(data):
        keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        found += [(value, key) for key in keys]
    name = f"st-{LEAKS:06d}"
    guilty = [a for a in data["attempts"] if a["step"] == name] + [s for s in data["steps"] if s["id"] == name]
    near = [
        (v, key)
        for g in guilty
        for _, v in walk(g)
        if isinstance(v, dict | list)
        for key in (v if isinstance(v, dict) else range(len(v)))
    ]
    return found + near * max(1, 2 * len(found) // len(near))


def change(data: Data, draw: random.Random) -> None:
    container, key = draw.choice(places(data))
    container[key] = other(container[key], draw)


def other(value: Any, draw: random.Random) -> Any:
    """Return another value of the same type, or of another."""
    if draw.random() < 0.15:
        return draw.choice([None, True, False, 0, 1, -1, 0.5, "", "none", "1.0", [], {}, [value], str(value)])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice(
            [0, 1, -value, value + 1, value - 1, value * 0.5, value * 10, 0.0, 1.0, -1e-9, 1e308, 10**18]
        )
    if isinstance(value, str):
        states = ["ran", "error", "skipped", "not_applicable", "budget_exhausted", "verified", "mismatch", "stochastic"]
        steps = [f"st-{i:06d}" for i in (0, LEAKS, LEAKS + 1, 99)]
        more = [
            "none",
            "prune",
            "span",
            "tag",
            "leakaudit.results/1.1",
            "leakaudit.results/1.9",
            "33-64",
            "1",
            "unverifiable",
        ]
        return draw.choice([*states, *steps, *more, value[:-1], value.upper(), ""])
    if isinstance(value, list):
        return draw.choice([[], value[1:], value[:-1], value + value[-1:], value[::-1], ["exact_sentence"], None])
    return draw.choice([{}, None, [], value]) if isinstance(value, dict) else draw.choice([0.0, 1.0, True, "", []])


def delete(data: Data, draw: random.Random) -> None:
    container, key = draw.choice(places(data))
    del container[key]


def rename(data: Data, draw: random.Random) -> None:
    container, key = draw.choice([(c, k) for c, k in places(data) if isinstance(c, dict)])
    container[draw.choice([f"{key}_", key.upper(), f"x-{key}"])] = container.pop(key)


def repeat(data: Data, draw: random.Random) -> None:
    container, key = draw.choice([(c, k) for c, k in places(data) if isinstance(c, list)])
    container.insert(draw.randrange(len(container) + 1), copy.deepcopy(container[key]))


def transplant(data: Data, draw: random.Random) -> None:
    """Replace a value by another one under the same key, such as a clean score."""
    container, key = draw.choice([(c, k) for c, k in places(data) if isinstance(c, dict)])
    donors = [c for c, k in places(data) if isinstance(c, dict) and k == key]
    container[key] = copy.deepcopy(draw.choice(donors)[key])


def replace_item(data: Data, draw: random.Random) -> None:
    """Replace an item of a list by a copy of another, such as a clean step."""
    container, key = draw.choice([(c, k) for c, k in places(data) if isinstance(c, list)])
    container[key] = copy.deepcopy(draw.choice(container))


def drop_leak(data: Data, draw: random.Random) -> None:
    name = f"st-{LEAKS:06d}"
    what = draw.choice(["attempts", "step", "both", "one"])
    if what == "one":
        mine = [a for a in data["attempts"] if a["step"] == name]
        data["attempts"].remove(draw.choice(mine))
    if what in ("attempts", "both"):
        data["attempts"] = [a for a in data["attempts"] if a["step"] != name]
    if what in ("step", "both"):
        data["steps"] = [s for s in data["steps"] if s["id"] != name]


KINDS: list[Callable[[Data, random.Random], None]] = [
    *[change] * 4,
    delete,
    rename,
    repeat,
    transplant,
    replace_item,
    drop_leak,
]


def edits(case: str, seed: int) -> Iterator[tuple[str, Data]]:
    draw = random.Random(seed)
    for number in range(EDITS):
        kind, data = draw.choice(KINDS), written(case)
        kind(data, draw)
        yield f"{number} {kind.__name__}", data


@pytest.mark.parametrize("case", CASES)
def test_results_as_written_fail(tmp_path: Path, case: str) -> None:
    """The starting point of every edit, and edits that change nothing of the matter."""
    assert judge(tmp_path, json.dumps(written(case)), case) is Status.FAIL
    data = written(case)
    data["run"]["command"], data["steps"][0]["verification"]["note"] = "leakaudit run", "as declared"
    data["coverage"]["skipped_snapshots"] = 3
    assert judge(tmp_path, resealed(data), case) is Status.FAIL


@pytest.mark.parametrize("case", CASES)
def test_no_edit_with_a_fitting_digest_passes(tmp_path: Path, case: str) -> None:
    """Somebody changed one thing and computed the digest again."""
    passed = [name for name, data in edits(case, seed=15) if judge(tmp_path, resealed(data), case) is Status.PASS]
    assert passed == []


@pytest.mark.parametrize("case", CASES)
def test_an_edit_without_a_fitting_digest_is_an_error(tmp_path: Path, case: str) -> None:
    """An accident: whatever was changed, the file is not the one that was written."""
    before = digest_of(written(case))
    for name, data in list(edits(case, seed=16))[:40]:
        if isinstance(data, dict) and (digest_of(data) != before or data.get("digest") != before):
            assert judge(tmp_path, json.dumps(data), case) is Status.ERROR, name


@pytest.mark.parametrize("case", CASES)
def test_a_key_that_stands_twice_hides_nothing(tmp_path: Path, case: str) -> None:
    """Readers differ in which of two keys they take, so neither is taken."""
    text, draw = json.dumps(written(case)), random.Random(17)
    keys = sorted({key for _, value in walk(written(case)) if isinstance(value, dict) for key in value})
    for key in draw.sample(keys, 15):
        twice = text.replace(f'"{key}": ', f'"{key}": [], "{key}": ', 1)
        assert judge(tmp_path, twice, case) is Status.ERROR, key
    assert judge(tmp_path, f'{text[:-1]}, "attempts": []}}', case) is Status.ERROR


@pytest.mark.parametrize("case", CASES)
def test_a_torn_file_is_an_error(tmp_path: Path, case: str) -> None:
    """Cut anywhere, or with a byte changed."""
    text, draw = json.dumps(written(case)), random.Random(18)
    for _ in range(10):
        cut = draw.randrange(len(text))
        assert judge(tmp_path, text[:cut], case) is Status.ERROR
        swapped = text[:cut] + draw.choice('"{}[]:,\\') + text[cut + 1 :]
        assert swapped == text or judge(tmp_path, swapped, case) is Status.ERROR
