"""Progress: the plan before an audit, and estimates from measured times."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from leakaudit.cli import threads
from leakaudit.cli.progress import Pace, plan, shown
from leakaudit.cli.threads import idle_cores, idle_of, threads_to_take
from leakaudit.results.journal import JournalEntry
from tests.support import factories

PAIRS = [(attack, defense) for defense in ("none", "round") for attack in ("span", "tag")]


class Clock:
    """A clock that stands until it is told how much time passes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def _step(pace: Pace, clock: Clock, seconds: float = 10.0, tail: float = 0.0) -> None:
    pace.begin_step()
    for pair in PAIRS:
        clock.passes(seconds)
        pace.finish(pair)
    clock.passes(tail)
    pace.end_step()


def test_the_plan_counts_everything_and_bounds_the_time() -> None:
    """Singular where there is one."""
    assert plan(60, 4, 3, 60) == "plan: 60 steps x 4 attacks x 3 defences = 720 attempts, at most 12 h at 60 s each"
    assert plan(60, 4, 3, 60, 7200.0).endswith("720 attempts, at most 2 h and 60 s each"), "not more than the limit"
    assert plan(1, 1, 1, 0.5, 7200.0).endswith("at most 1 s at 0.5 s each")
    assert plan(1, 1, 1, 0.5) == "plan: 1 step x 1 attack x 1 defence = 1 attempt, at most 1 s at 0.5 s each"


def test_nothing_is_estimated_before_every_attempt_was_seen_once() -> None:
    """The slowest attack may come last."""
    clock = Clock()
    pace = Pace(60, PAIRS, clock=clock)
    pace.begin_step()
    for pair in PAIRS[:-1]:
        clock.passes(1.0)
        pace.finish(pair)
    assert (pace.left_s(), pace.left()) == (None, "")
    clock.passes(600.0)
    pace.finish(PAIRS[-1])
    assert pace.left_s() == pytest.approx(59 * 603.0)
    assert pace.left() == "about 9 h 53 min left"


def test_recomputation_and_controls_are_in_the_estimate() -> None:
    """A step costs more than its attacks; controls run after the first steps only."""
    clock = Clock()
    pace = Pace(10, PAIRS, controls=2, clock=clock)
    _step(pace, clock, seconds=10.0, tail=7.0)
    assert pace.left_s() == pytest.approx(9 * 40.0 + 7.0)
    _step(pace, clock, seconds=10.0, tail=7.0)
    _step(pace, clock, seconds=10.0, tail=0.0)
    assert pace.left_s() == pytest.approx(7 * 40.0)
    clock.passes(1000.0)  # what passes between two steps belongs to none
    _step(pace, clock)
    assert pace.left_s() == pytest.approx(6 * 40.0)


def test_a_resumed_audit_counts_what_is_done_and_measures_anew() -> None:
    """Times of another night say nothing about this one."""
    clock = Clock()
    pace = Pace(3, PAIRS, clock=clock)
    pace.resume([*PAIRS, *PAIRS[:1]])
    assert (pace.done, pace.total, pace.left_s()) == (5, 12, None)
    pace.begin_step()
    for pair in PAIRS[1:]:
        clock.passes(2.0)
        pace.finish(pair)
    assert pace.left_s() is None  # the first pair has not run tonight
    _step(pace, clock, 2.0)
    assert (pace.done, pace.left_s()) == (12, 0.0)


def _entries(n: int) -> list[JournalEntry]:
    pairs = itertools.islice(itertools.cycle(PAIRS), n)
    return [JournalEntry(attempt=factories.attempt(0, attack, defense)) for attack, defense in pairs]


def test_a_plain_log_gets_the_first_estimate_at_once_and_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits half a minute to learn that it takes four hours."""
    from leakaudit.cli import progress as cli_progress

    clock = Clock()
    monkeypatch.setattr(cli_progress, "time", SimpleNamespace(monotonic=clock))
    pace = Pace(100, PAIRS, clock=clock)
    with shown(pace) as finished:
        for entry in _entries(40):
            clock.passes(5.0)
            finished(entry)
    lines = capsys.readouterr().err.strip().split("\n")
    assert lines[0] == "4 of 400 attempts done, 0 with a leak event, the last one tag on st-000000; about 33 min left"
    assert len(lines) == 1 + 36 * 5 // 30
    assert all(re.fullmatch(r"\d+ of 400 attempts done, .*; about \d+ min left", line) for line in lines)


def test_a_plain_log_has_a_line_for_each_finished_step(capsys: pytest.CaptureFixture[str]) -> None:
    """It says how many attempts leaked, those before an interruption too.

    A step that was just reported has no second line.
    """
    pace = Pace(3, PAIRS)
    pace.resume(PAIRS, leaks=2)
    with shown(pace) as finished:
        for _ in range(2):
            pace.begin_step()
            for attack, defense in PAIRS:
                finished(JournalEntry(attempt=factories.attempt(0, attack, defense, events=("exact_sentence",))))
            pace.end_step()
    lines = capsys.readouterr().err.strip().split("\n")
    assert [line.partition(", the last")[0] for line in lines] == [
        "8 of 12 attempts done, 6 with a leak event",
        "12 of 12 attempts done, 10 with a leak event",
    ]


def test_a_terminal_of_eighty_columns_shows_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is running, how many are done and leaked, and the time left are not cut."""
    clock = Clock()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    pace = Pace(360, PAIRS, clock=clock)
    with shown(pace) as finished:
        for entry in _entries(4):
            clock.passes(25.0)
            finished(entry.model_copy(update={"attempt": factories.attempt(0, *PAIRS[pace.done % 4], leaks=True)}))
        pace.begin("update-difference")
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"update-difference [━╸╺ ]+ +4/1440 4 leaks 0:00:00 about 9 h 58 min left", drawn), drawn


# ---------------------------------------------------------------------- threads


@pytest.mark.parametrize(
    ("cores", "allowed", "load", "taken"),
    [(8, 8, 0.0, 8), (8, 8, 7.6, 1), (2, 2, 1.0, 1), (2, 2, 0.4, 2), (64, 4, 40.0, 4), (1, 1, 30.0, 1)],
)
def test_busy_cores_are_left_to_others(cores: int, allowed: int, load: float, taken: int) -> None:
    """And there is always one to compute with."""
    assert idle_of(cores, allowed, load) == taken


def test_an_explicit_number_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets it knows better."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads_to_take() is None
    for name in threads.EXPLICIT:
        monkeypatch.delenv(name, raising=False)
    assert threads_to_take() in range(1, 1 + len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("quota", "most"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None), ("junk", None)]
)
def test_a_containers_share_of_the_cpu_is_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, most: int | None
) -> None:
    """A container sees all cores of its host and may use a few."""
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    assert idle_cores() >= 1 and (most is None or idle_cores() <= most)
