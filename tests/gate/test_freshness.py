"""The age of evidence: clocks that differ, time zones, dates in the future."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from leakaudit.gate import evaluate as gate
from leakaudit.gate.verdict import Status, Verdict
from leakaudit.results.consistency import CLOCK_SLACK
from leakaudit.results.schema import Results
from tests.support.factories import NOW, audit, changed, policy

SECOND = timedelta(seconds=1)
WEEK = timedelta(days=7)


def dated(finished: datetime | str, started: datetime | str | None = None) -> Results:
    """Build a clean audit with these times."""
    found = audit(0, 60)
    begun = finished if started is None else started
    times = {"started": _text(begun), "finished": _text(finished)}
    return changed(found, run=found.run.model_copy(update=times))


def _text(moment: datetime | str) -> str:
    return moment if isinstance(moment, str) else moment.isoformat()


def judged(found: Results, now: datetime = NOW) -> Verdict:
    return gate.evaluate(found, policy(), now=now)


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (-WEEK - SECOND, Status.INCONCLUSIVE),
        (-WEEK, Status.PASS),
        (timedelta(), Status.PASS),
        (CLOCK_SLACK, Status.PASS),
        (CLOCK_SLACK + SECOND, Status.ERROR),
    ],
)
def test_an_audit_is_as_old_as_allowed_and_not_from_the_future(ahead: timedelta, expected: Status) -> None:
    """A clock of the audit may be an hour ahead of that of the gate, and no more."""
    assert judged(dated(NOW + ahead)).verdict is expected


def test_a_clock_that_is_ahead_makes_no_age_below_zero() -> None:
    """The age in the verdict is that of evidence made now."""
    assert judged(dated(NOW + CLOCK_SLACK)).evidence_age_s == 0.0


@pytest.mark.parametrize("hours", [-12, -5.5, 0, 5.75, 14])
def test_the_zone_in_which_a_time_is_written_changes_nothing(hours: float) -> None:
    """Neither that of the audit nor that of the gate."""
    zone = timezone(timedelta(hours=hours))
    old, fresh = NOW - WEEK - SECOND, NOW - WEEK
    for now in (NOW, NOW.astimezone(zone)):
        assert judged(dated(old.astimezone(zone)), now).verdict is Status.INCONCLUSIVE
        assert judged(dated(fresh.astimezone(zone)), now).verdict is Status.PASS
        assert judged(dated(fresh.astimezone(zone)), now).valid_until == "2026-11-02T12:00:00Z"


def test_a_time_without_a_zone_is_in_utc() -> None:
    """As the writer of results has it."""
    assert judged(dated((NOW - WEEK).replace(tzinfo=None))).verdict is Status.PASS
    assert judged(dated((NOW - WEEK - SECOND).replace(tzinfo=None))).verdict is Status.INCONCLUSIVE


@pytest.mark.parametrize(
    ("back", "expected"), [(CLOCK_SLACK, Status.PASS), (CLOCK_SLACK + SECOND, Status.INCONCLUSIVE)]
)
def test_an_audit_that_finished_before_it_started_has_no_age(back: timedelta, expected: Status) -> None:
    """A clock may be set back by an hour while the audit runs."""
    finished = NOW - timedelta(days=1)
    verdict = judged(dated(finished, finished + back))
    assert verdict.verdict is expected
    assert ("so its age is unknown" in verdict.sentence) == (expected is Status.INCONCLUSIVE)


@pytest.mark.parametrize("finished", ["", "2026-11-02", "0001-01-01T00:00:00+14:00", "tomorrow"])
def test_a_time_that_is_none_is_no_age(finished: str) -> None:
    """A date alone begins at midnight; anything else never passes."""
    verdict = judged(dated(finished))
    assert (verdict.verdict is Status.PASS) == (finished == "2026-11-02"), verdict.sentence


def test_an_audit_that_started_in_the_future_does_not_pass() -> None:
    """Whatever it says of its end."""
    for finished in (NOW, ""):
        assert judged(dated(finished, NOW + timedelta(days=3))).verdict is not Status.PASS


def test_the_day_of_a_red_verdict_is_one_day_in_all_zones() -> None:
    """The time of judgement is written in UTC."""
    east = NOW.astimezone(timezone(timedelta(hours=14)))
    assert judged(dated(NOW), east).evaluated_at == NOW.astimezone(UTC).isoformat().replace("+00:00", "Z")
