"""The page on the history: its examples run, and its table names every key."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from leakaudit.history.nights import History
from leakaudit.history.record import SCHEMA, NightRecord, Rate
from tests.support.nights import gap, night, night_id, rate

PAGE = (Path(__file__).parents[2] / "docs" / "nights_history.md").read_text(encoding="utf-8")
GOLDEN = Path(__file__).parent / "night_1_0.json"


def example(language: str) -> str:
    """Return the one example of a language on the page."""
    [found] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of three nights, one of them a gap, and start in it."""
    history = History(tmp_path / "history")
    span = rate(9, 9, attack="span")
    for record in (night(0, k=2, rates=(rate(2, 20, upper=0.3), span)), gap(1), night(2)):
        history = history.append(record)
    history.key()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("nights")
def test_the_query_for_duckdb_gives_the_rates() -> None:
    """Of audited nights only, in order."""
    duckdb = pytest.importorskip("duckdb")
    found = duckdb.sql(example("sql")).fetchall()
    first, second = night_id(0), night_id(2)
    assert found == [(first, "FAIL", "exact_sentence", 2, 20, 0.3), (second, "PASS", "exact_sentence", 0, 20, None)]


@pytest.mark.usefixtures("nights")
def test_the_example_for_pandas_gives_the_rates() -> None:
    """The same as the query's."""
    pytest.importorskip("pandas")
    script = Path("example.py")
    script.write_text(example("python"))
    table: Any = runpy.run_path(str(script))["rates"]
    assert (list(table["night"]), list(table["rate"])) == ([night_id(0), night_id(2)], [0.1, 0.0])


def test_the_table_names_every_key() -> None:
    """A key without a line is an undocumented one."""
    named = set(re.findall(r"`(\w+)`", PAGE))
    keys = {field.alias or name for name, field in NightRecord.model_fields.items()}
    own = {"k", "n", "unjudged", "limit", "fresh_k", "fresh_n", "lower", "upper", "so_far", "log_e"}
    assert keys - named == set() and own - named == set()
    assert own | {"event", "min_tokens", "defense", "attack"} == set(Rate.model_fields)
    assert SCHEMA in PAGE


def test_a_record_of_version_1_0_is_read_as_it_was_written(tmp_path: Path) -> None:
    """The file is never changed: a later version reads every key of it."""
    written = json.loads(GOLDEN.read_text(encoding="utf-8"))
    (tmp_path / f"{written['night']}.json").write_bytes(GOLDEN.read_bytes())
    history = History.load(tmp_path)
    assert history.unreadable == () and history.last is not None
    read = history.last.model_dump(mode="json", by_alias=True)
    assert {name: read[name] for name in written} == written
    assert set(written["rates"][0]) <= set(read["rates"][0])


def test_a_later_minor_version_may_add_keys(tmp_path: Path) -> None:
    """This version ignores them."""
    written = json.loads(GOLDEN.read_text(encoding="utf-8")) | {"schema": "leakaudit.night/1.9", "mood": 7}
    (tmp_path / f"{written['night']}.json").write_text(json.dumps(written))
    history = History.load(tmp_path)
    assert history.unreadable == () and history.last is not None and history.last.worse
