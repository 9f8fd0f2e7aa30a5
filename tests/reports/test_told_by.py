"""The picture of the parameters that told, and the learning rate beside the loss."""

from __future__ import annotations

from typing import Any

import pytest

from leakaudit.reports import redact
from leakaudit.reports.charts import LEAK
from leakaudit.reports.sections import steps
from leakaudit.reports.told_by import MOST_PARAMETERS, ToldBy, in_words, told_by, told_by_chart
from leakaudit.results.schema import Results
from tests.reports.test_charts import drawn
from tests.support.factories import attempt, results, step
from tests.support.judging import RED_LINE, judge

TABLE, KEY = "embeddings.weight", "layer.0.key.weight"


def context(found: Results) -> dict[str, Any]:
    """Return what the template of the section gets."""
    return dict(steps.section(redact(found, [], judge(found, RED_LINE))).context)


def leaky() -> Results:
    """Build three steps of which two leak.

    What did not leak told nothing, whatever an attack read.
    """
    tried = [
        attempt(0, leaks=True, told_by={TABLE: 0.5, KEY: 0.5}),
        attempt(1, leaks=True, told_by={KEY: 1.0}),
        attempt(2, told_by={"unread.weight": 1.0}),
        attempt(0, "tag", leaks=True),
        attempt(0, "span", "prune", leaks=True, told_by={"under.a.defence": 1.0}),
    ]
    return results([step(i) for i in range(3)], tried)


def test_shares_are_means_over_the_leaks_of_the_update_as_it_was_sent() -> None:
    """An attack that does not say it is named, and has no bar."""
    told, silent = told_by(leaky())
    assert told == [ToldBy("span", 2, ((KEY, 0.75), (TABLE, 0.25)))] and silent == ["tag"]
    assert context(leaky())["told"] == (
        f"span read 2 leaks from 2 parameters, most from {KEY} (75%). tag does not say which parameters told it."
    )


def test_nothing_is_drawn_where_nobody_says_it() -> None:
    """As in results of earlier versions."""
    shown = context(results([step(0)], [attempt(0, leaks=True)]))
    assert (shown["told"], shown["told_chart"], shown["told_rows"]) == ("", None, [])


def test_a_single_parameter_is_named_alone() -> None:
    """The plural is for several."""
    assert in_words([ToldBy("llg", 1, (("head.bias", 1.0),))], []) == "llg read 1 leak from head.bias alone."


def test_bars_are_as_long_as_the_shares_and_many_parameters_are_few_rows() -> None:
    """The last row holds the others, so that all rows sum to 1."""
    many = ToldBy("span", 3, tuple((f"layer.{n}.weight", 0.1) for n in range(10)))
    name, share = many.drawn[-1]
    assert (name, round(share, 9), len(many.drawn)) == ("5 other parameters", 0.5, MOST_PARAMETERS + 1)
    bars = drawn(told_by_chart([many], "t"), "rect", fill=LEAK)
    assert [round(float(bar["width"]) / 300, 3) for bar in bars] == [0.1] * MOST_PARAMETERS + [0.5]
    name += "a" * 80 + ".query.weight"
    chart = told_by_chart([ToldBy("span", 1, ((name, 1.0),))], "t")
    assert name not in chart and ".query.weight<" in chart and "…" in chart


@pytest.mark.parametrize("count", [3, 70])
def test_a_learning_rate_that_changes_is_drawn_below_the_loss(count: int) -> None:
    """One by one, and as columns."""
    every = [step(i).model_copy(update={"loss": 1.0, "learning_rate": 1e-4 * (i + 1)}) for i in range(count)]
    shown = context(results(every, [attempt(i) for i in range(count)]))
    assert shown["rate"] == "" and ">learning<" in shown["chart"] and ">loss<" in shown["chart"]
    assert f">{1e-4 * count:.3g}<" in shown["chart"] and shown["table"][1]["rate"] == "0.0002"


def test_a_learning_rate_that_is_the_same_is_a_sentence() -> None:
    """A level line would say nothing; an unknown rate has neither."""
    same = [step(i).model_copy(update={"learning_rate": 5e-5}) for i in range(3)]
    tried = [attempt(i) for i in range(3)]
    shown = context(results(same, tried))
    assert shown["rate"] == "The learning rate was 5e-05 at every audited step." and ">learning<" not in shown["chart"]
    unknown = context(results([step(i) for i in range(3)], tried))
    assert not unknown["rate"] and not unknown["with_rate"] and ">loss<" not in unknown["chart"]
