"""Events of the gate: one table, and nothing elsewhere to change for a new one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from leakaudit.gate import policy as policies
from leakaudit.gate.events import EVENTS
from leakaudit.results.events import EVENTS as RECORDED
from tests.support.factories import attempt

ROOT = Path(__file__).parents[2]

ADD_AN_EVENT = """
from leakaudit.gate.events import EVENTS, Event

EVENTS["half_in_order"] = Event(
    happened=lambda attempt: any((s.scores.get("rougeL") or 0.0) >= 0.5 for s in attempt.sequences),
    decided=lambda attempt: any("rougeL" in s.scores for s in attempt.sequences),
    clause="half of a text came back in order",
    inverted="did half of a text come back in order",
    denial="no half of a text came back in order",
    short="half of a text came back in order",
    noun="half of a text",
    verb="leaked half of a text",
    tells="Half of the words of a text are known in their order.",
    tells_not="That nothing leaked: single words do not count here.",
)
"""

USE_IT = """
from leakaudit.capture.outcome import headline
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.policy import Policy
from leakaudit.reports import redact, render_html
from leakaudit.reports.comparison import outcomes
from tests.support.factories import NOW, audit, policy

found = audit(7, 53)
rules = policy({"id": "halves", "event": "half_in_order", "max_rate": 0.05})
verdict = evaluate(found, rules, now=NOW)
print(verdict.sentence)
print(headline(verdict, found))
print("half of a text came back in order" in render_html(redact(found, [], verdict)))
print(outcomes(found, "none", "half_in_order", ["span"]).leaked)
print("half_in_order" in Policy.model_json_schema()["$defs"]["Rule"]["properties"]["event"]["anyOf"][0]["enum"])
"""


def test_a_new_event_is_one_entry_of_one_table() -> None:
    """Policy, verdict, report and last line of training know a new event."""
    code = ADD_AN_EVENT + USE_IT
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    sentence, headline, *rest = done.stdout.splitlines()
    assert sentence.startswith(
        "In 7 of 60 audited client steps (11.7%, 95% lower bound 5.6%) half of a text came back in order"
    )
    assert headline == "7 of 60 steps leaked half of a text"
    assert rest == ["True", "7", "True"]


def test_a_policy_may_name_every_event_of_the_table() -> None:
    """The type of the key is made of the table."""
    [names, _] = get_args(get_type_hints(policies.Rule)["event"])
    assert get_args(names) == tuple(EVENTS)


@pytest.mark.parametrize("name", EVENTS)
def test_the_words_of_an_event_are_parts_of_sentences(name: str) -> None:
    """They fit into a sentence: no capital at the start and no full stop."""
    event = EVENTS[name]
    for words in (event.clause, event.inverted, event.denial, event.short, event.noun, event.verb):
        shown = words.format(tokens=8, any_length="")
        assert shown and shown[0].islower() and shown[-1] not in ".?!"


@pytest.mark.parametrize("name", RECORDED)
def test_an_event_that_scoring_recorded_happened(name: str) -> None:
    """The gate relies on the results; contradictions were refused before."""
    assert EVENTS[name].happened(attempt(0).model_copy(update={"events": (name,)}))


def test_only_attacks_of_the_kind_decide_an_event() -> None:
    """A bag of words says nothing about sentences, and labels nothing about words."""
    of_text, of_words, of_labels = (attempt(0, kind=kind) for kind in ("text", "bag", "labels"))
    decided = {name for name, event in EVENTS.items() if event.decided(of_labels)}
    assert decided == {"label_counts"}
    assert EVENTS["exact_sentence"].decided(of_text) and not EVENTS["exact_sentence"].decided(of_words)
    assert EVENTS["all_words"].decided(of_words)
