"""What the trend tells its reader to do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from leakaudit.gate.policy import NightsPolicy
from leakaudit.gate.wording import at_most
from leakaudit.history.advice import advice
from leakaudit.history.record import NightRecord
from leakaudit.history.trend import Baseline, is_worse, trend_of, with_sequences
from leakaudit.results.sequential import clean_steps_for, confidence_sequence
from tests.support.nights import FIRST, KEYS, gap, night, rate


def sequence(
    leaks: Sequence[int], *, first: int = 0, base: Baseline | None = None, limit: float | None = 0.05
) -> list[NightRecord]:
    """Build nights of twenty steps with the bounds that a night records."""
    found: list[NightRecord] = []
    for number, k in enumerate(leaks, first):
        rates = with_sequences([rate(k, 20, limit=limit)], KEYS, found, NightsPolicy(), base)
        found.append(night(number, k, rates=rates, worse=is_worse(rates, NightsPolicy())))
    return found


def said(records: Sequence[NightRecord]) -> str:
    """Return the advice on nights."""
    return advice(trend_of(records)).text


def test_nights_within_the_limit_need_nothing() -> None:
    """The bound is that of the sequence, which is computed elsewhere."""
    upper = confidence_sequence(0, 100).upper
    text = said(sequence([0] * 5))
    assert text.startswith(f"No night leaked since 1 Nov; the leak rate is at most {at_most(upper)}, however often")
    assert text.endswith("within the limit of 5%. There is nothing to do.")


@pytest.mark.parametrize("nights", [1, 2, 3])
def test_the_advice_counts_the_nights_until_the_limit_can_be_met(nights: int) -> None:
    """That many clean nights do meet it, and one fewer does not."""
    steps = clean_steps_for(0.05)
    assert steps == 69
    more = -(-(steps - 20 * nights) // 20)
    assert f"It takes {more} more night" in said(sequence([0] * nights))
    assert "within the limit" in said(sequence([0] * (nights + more)))
    assert "within the limit" not in said(sequence([0] * (nights + more - 1)))


def test_a_break_says_why_the_comparison_began_anew() -> None:
    """Only the nights since then count."""
    records = [*sequence([0] * 9), *(old for old in sequence([0], first=9))]
    changed = records[-1].model_copy(update={"keys": KEYS | {"policy": "cd"}})
    text = said([*records[:-1], changed])
    assert text.startswith(
        "The comparison began anew on 10 Nov, with a change of the policy. No night leaked since 10 Nov;"
    )
    assert "It takes 3 more nights" in text
    many = records[-1].model_copy(update={"keys": {name: "other" for name in KEYS}})
    assert f"with a change of {len(KEYS)} settings." in said([*records[:-1], many])


def test_an_alarm_names_its_night_and_what_changed_when_the_leaks_began() -> None:
    """A new version of the model, else the training itself."""
    base = Baseline("base", KEYS, {rate(0, 20).series: (0, 200)})
    records = sequence([0] * 10 + [2, 3, 4], base=base)
    alarm = next(number for number, record in enumerate(records) if record.worse)
    assert alarm in (11, 12)
    text = said(records)
    assert text.startswith(
        f"Worse than the baseline since the night of {alarm + 1} Nov; the change most likely came on 11 Nov."
    )
    assert "No recorded setting changed on 11 Nov" in text
    versions = [record.model_copy(update={"model_version": "a" if n < 10 else "b"}) for n, record in enumerate(records)]
    assert "Look at the new model version of 11 Nov" in said(versions)


def test_a_rate_above_its_limit_is_worse_than_one_that_is_not_bounded() -> None:
    """The advice is about the worst rate."""
    two = [
        record.model_copy(update={"rates": (record.rates[0], *other.rates)})
        for record, other in zip(
            sequence([0] * 4),
            [
                r.model_copy(update={"rates": (r.rates[0].model_copy(update={"event": "all_words"}),)})
                for r in sequence([9] * 4)
            ],
            strict=True,
        )
    ]
    found = advice(trend_of(two))
    assert found.series is not None and found.series[0] == "all_words"
    assert (
        "36 of 80 steps leaked since 1 Nov, a rate of at least" in found.text and "the policy allows 5%" in found.text
    )


def test_one_leak_breaks_a_policy_that_allows_none() -> None:
    """However low the rate is."""
    assert "1 of 400 steps leaked since 1 Nov; the policy allows no leak." in said(
        sequence([0] * 10 + [1] + [0] * 9, limit=0)
    )
    assert said(sequence([0] * 5, limit=0)).endswith("The policy allows no leak.")
    assert "limit" not in said(sequence([0] * 5, limit=None))


def test_nights_that_repeat_their_steps_do_not_get_nearer_to_the_limit() -> None:
    """No number of them is named."""
    records = sequence([0] * 2)
    last = records[-1]
    stale = last.rates[0].model_copy(update={"fresh_n": 0, "so_far": (0, 20)})
    text = said([records[0], last.model_copy(update={"rates": (stale,)})])
    assert "repeated steps of earlier nights" in text and "more night" not in text


def test_nights_without_results_at_the_end_come_first() -> None:
    """Nobody must think that all is well."""
    assert said([*sequence([0] * 5), gap(5)]).startswith(
        "The last night has no results (the data file is missing): see to"
    )
    assert said([*sequence([0] * 5), gap(5), gap(6)]).startswith("The last 2 nights have no results")
    assert "No night could be judged" in said([gap(0), gap(1)])


def test_dates_have_a_time_where_a_day_has_several_nights() -> None:
    """Else two nights would have one name."""
    later = FIRST.replace("T0000", "T1200")
    trend = trend_of([night(0), night(0, night=later)])
    assert [trend.date(point.night) for point in trend.points] == ["1 Nov 00:00", "1 Nov 12:00"]
    assert trend_of([night(0), night(1)]).date(FIRST) == "1 Nov"


def test_leaks_before_the_shown_nights_are_not_dated_into_them() -> None:
    """The sequence may begin before the first night that the trend shows."""
    trend = trend_of(sequence([3, 0, 0, 0]), last=2)
    assert "3 of 80 steps leaked since before 3 Nov" in advice(trend).text
    assert "3 of 80 steps leaked since 1 Nov" in said(sequence([3, 0, 0, 0]))
