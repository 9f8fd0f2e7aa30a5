"""The history on the disk, and the trend that is computed from it."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import pytest

from leakaudit.errors import ResultsError
from leakaudit.gate.policy import NightsPolicy
from leakaudit.history.baseline import baseline_of, load, save
from leakaudit.history.keys import NAMES, changed, in_words, keys_of
from leakaudit.history.nights import History
from leakaudit.history.rates import rates_of, repeated_steps
from leakaudit.history.trend import is_worse, trend_of, why_not_compared, with_sequences
from tests.support.factories import audit, policy
from tests.support.factories import changed as with_fields
from tests.support.judging import RATE, judge
from tests.support.nights import KEYS, gap, night, night_id, rate


def test_a_night_is_written_once_and_read_by_anyone(tmp_path: Path) -> None:
    """Each file is one line of JSON; what is there is never written again."""
    history = History(tmp_path / "history").append(night(0)).append(night(1, k=3))
    files = sorted(history.folder.glob("*.json"))
    assert [json.loads(file.read_text())["exit_code"] for file in files] == [0, 3]
    assert all(file.read_text().count("\n") == 1 and file.stat().st_mode & 0o077 == 0 for file in files)
    assert History.load(history.folder) == history
    with pytest.raises(ResultsError, match="recorded once"):
        history.append(night(1))


def test_what_cannot_be_read_is_named_and_stays(tmp_path: Path) -> None:
    """A later version, a half file, a foreign night: the other nights are read."""
    history = History(tmp_path).append(night(0))
    wrong = {
        night_id(1): json.dumps({"schema": "leakaudit.night/2.0", "tool": "3.1.0"}),
        night_id(2): '{"schema": "leakaudit.ni',
        night_id(3): (tmp_path / f"{night_id(0)}.json").read_text(),
        night_id(4): "{}",
    }
    for name, text in wrong.items():
        (tmp_path / f"{name}.json").write_text(text)
    found = History.load(tmp_path)
    assert found.records == history.records
    assert [bad.night for bad in found.unreadable] == list(wrong)
    assert "newer leakaudit wrote it (leakaudit.night/2.0, leakaudit 3.1.0)" in found.unreadable[0].problem
    assert all((tmp_path / f"{name}.json").read_text() == text for name, text in wrong.items())
    with pytest.raises(ResultsError, match="recorded once"):
        found.append(night(1))


def test_a_thousand_nights_open_in_a_second(tmp_path: Path) -> None:
    """As many as three years have."""
    for number in range(1000):
        record = night(number, units=tuple(f"{number:08x}{step:08x}" for step in range(20)))
        (tmp_path / f"{record.night}.json").write_text(record.model_dump_json(by_alias=True))
    start = time.perf_counter()
    history = History.load(tmp_path)
    trend_of(history.records, period=timedelta(days=1))
    assert len(history.records) == 1000 and len(history.units) == 20_000
    assert time.perf_counter() - start < 1.0


def test_the_key_of_the_marks_outlives_a_process(tmp_path: Path) -> None:
    """Else no later night could find a repeated step."""
    key = History(tmp_path / "h").key()
    assert History.load(tmp_path / "h").key() == key and len(key) == 32
    assert (tmp_path / "h" / "key").stat().st_mode & 0o077 == 0
    (tmp_path / "h" / "key").write_text("no key")
    with pytest.raises(ResultsError, match="remove the file"):
        History(tmp_path / "h").key()


def test_steps_that_an_earlier_night_had_are_no_new_evidence() -> None:
    """They count in the night's own rate, and not over nights."""
    found = audit(2, 8)
    marked = tuple(step.model_copy(update={"unit": f"{step.step:016x}"}) for step in found.steps)
    found = with_fields(found, steps=marked)
    [first] = [one for one in rates_of(found, policy(RATE)) if one.attack == "any"]
    assert (first.k, first.n, first.fresh_k, first.fresh_n) == (2, 10, 2, 10)
    known = {step.unit for step in marked[:5]}
    [again] = [one for one in rates_of(found, policy(RATE), known) if one.attack == "any"]
    assert (again.k, again.n, again.fresh_k, again.fresh_n) == (2, 10, 0, 5)
    assert repeated_steps(found, known) == 5


def test_rates_are_those_of_the_gate() -> None:
    """Gate and history count by one function."""
    found = audit(3, 17)
    [mine] = rates_of(found, policy(RATE))
    rule = judge(found, RATE).rules[0]
    assert (mine.k, mine.n, mine.limit) == (rule.k, rule.n, 0.05)


def test_nights_are_joined_only_while_every_key_agrees() -> None:
    """The break names the key, and the sequence begins anew."""
    for name in KEYS:
        records = [night(0), night(1, keys=KEYS | {name: "another"})]
        trend = trend_of(records)
        assert [point.breaks for point in trend.points] == [(), (name,)]
        assert trend.comparable == trend.points[1:]
        [joined] = with_sequences([rate(0, 20)], KEYS, records, NightsPolicy())
        assert joined.so_far == (0, 20), "the night before differs"
        [joined] = with_sequences([rate(0, 20)], KEYS, records[:1], NightsPolicy())
        assert joined.so_far == (0, 40)


def test_a_night_that_is_absent_or_failed_is_a_gap() -> None:
    """Neither looks as if nothing had happened."""
    trend = trend_of([night(0), gap(1), night(4)], period=timedelta(days=1))
    assert [bool(point.gap) for point in trend.points] == [False, True, True, True, False]
    assert trend.points[1].gap == "the data file is missing"
    assert trend.points[2].gap == "no night was started"
    assert trend.points[4].breaks == (), "a gap is no break"


def test_a_long_row_of_absent_nights_does_not_hide_the_nights_before_it() -> None:
    """As after a change of the period from a day to a minute."""
    trend = trend_of([night(0), night(40)], period=timedelta(minutes=1))
    first, absent, last = trend.points
    assert (first.night, last.night) == (night_id(0), night_id(40))
    assert (absent.night, absent.gap) == ("2026-11-01T0001Z", f"no night was started, {40 * 1440 - 1} in a row")
    assert len(trend_of([night(0), night(8)], period=timedelta(days=1)).points) == 9, (
        "a week has a place for each night"
    )


def test_a_night_whose_record_cannot_be_read_is_no_night_that_nobody_started() -> None:
    """Nor is it a gap if another start of it can be read."""
    problems = {night_id(1): "half a file", night_id(2): "half a file", night_id(5): "half a file"}
    trend = trend_of([night(0), night(2), night(4)], period=timedelta(days=1), unreadable=problems)
    assert [point.gap for point in trend.points] == [
        "",
        "its record cannot be read",
        "",
        "no night was started",
        "",
        "its record cannot be read",
    ]


def test_a_night_worse_than_the_baseline_is_an_alarm(tmp_path: Path) -> None:
    """The baseline is kept in a file that holds numbers only."""
    rules = policy(RATE)
    base = baseline_of(audit(0, 60), rules, judge(audit(0, 60), RATE))
    save(base, tmp_path / "baseline.json")
    loaded = load(tmp_path / "baseline.json")
    assert loaded == base and load(tmp_path / "none.json") is None
    assert loaded is not None
    keys = dict(base.keys)
    clean = [night(number, keys=keys) for number in range(10)]
    quiet = with_sequences([rate(0, 20)], keys, clean, NightsPolicy(), loaded.counts())
    loud = with_sequences([rate(12, 20)], keys, clean, NightsPolicy(), loaded.counts())
    assert not is_worse(quiet, NightsPolicy()) and is_worse(loud, NightsPolicy())
    other = with_sequences([rate(12, 20)], keys | {"data": "other"}, clean, NightsPolicy(), loaded.counts())
    assert not is_worse(other, NightsPolicy()) and other[0].log_e is None
    assert "the data set differs" in why_not_compared(loaded.counts(), keys | {"data": "other"})
    (tmp_path / "baseline.json").write_text("{")
    with pytest.raises(ResultsError, match="set it again"):
        load(tmp_path / "baseline.json")


def test_every_key_has_words_and_comes_from_the_results() -> None:
    """A key without words could not be named in a report."""
    found = keys_of(audit(0, 3), policy(RATE), "notes")
    assert list(found) == list(NAMES)
    assert changed(found, found) == []
    assert in_words(changed(found, found | {"data": "x", "policy": "y"})) == "the data set and the policy"
