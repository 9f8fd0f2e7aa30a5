"""The report's part on labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from leakaudit.gate import evaluate as gate
from leakaudit.reports.page import render_html
from leakaudit.reports.redaction import RedactedResult, redact
from leakaudit.reports.sections.labels import section
from leakaudit.results.schema import Score, TextMode, VerificationStatus
from tests.support.factories import NOW, attempt, journal_entry, policy, results, step

NAMES = ("HIV positive", "HIV negative", "unknown status")


def _context(redacted: RedactedResult) -> Mapping[str, Any]:
    found = section(redacted)
    assert found is not None
    return found.context


def _shown(
    mode: TextMode, accuracy: tuple[float, ...] = (1.0, 0.75), names: tuple[str, ...] | None = NAMES
) -> RedactedResult:
    """Return an audit with two label attacks, the second right in step 0 only."""
    attempts, entries = [], []
    for number in range(len(accuracy)):
        one = attempt(number, "ilrg", kind="labels", leaks=True)
        two = attempt(number, "llg", kind="labels", leaks=accuracy[number] == 1.0, recall=accuracy[number])
        granted = two.model_copy(update={"granted": ("data_count",)})
        counts = ((1, 3, 0), (1, 3, 0)) if accuracy[number] == 1.0 else ((1, 3, 0), (2, 2, 0))
        attempts += [one, granted]
        entries += [
            journal_entry(one, counts=((1, 3, 0), (1, 3, 0)), names=names),
            journal_entry(granted, counts=counts, names=names),
        ]
    if mode is TextMode.FULL:  # which is refused where there is no text to show
        text = attempt(0, leaks=True)
        attempts.append(text)
        entries.append(journal_entry(text, words=("some", "words")))
    found = results([step(n) for n in range(len(accuracy))], attempts)
    verdict = gate.evaluate(found, policy(), now=NOW)
    return redact(found, entries, verdict, mode, allow_full=True, environ={})


def test_exact_vectors_are_counted_with_their_bounds_and_what_was_granted() -> None:
    """Bounds are Clopper-Pearson: 1 of 2, and 2 of 2 from 22.3 % (rounded down)."""
    rows = {row["attack"]: row for row in _context(_shown(TextMode.HASH))["rows"]}
    assert (rows["llg"]["exact"], rows["llg"]["bounds"]) == ("1 of 2", "2.5% to 97.5%")
    assert (rows["ilrg"]["exact"], rows["ilrg"]["bounds"]) == ("2 of 2", "22.3% to 100%")
    assert (rows["llg"]["granted"], rows["ilrg"]["granted"]) == ("data_count", "nothing")


def test_true_and_recovered_counts_stand_side_by_side_in_mode_full() -> None:
    """They come from the private journal."""
    (one, two) = _context(_shown(TextMode.FULL))["counts"]
    assert one["attacks"] == ["ilrg", "llg"]
    assert one["rows"] == [(NAMES[1], 3, [3, 3]), (NAMES[0], 1, [1, 1]), (NAMES[2], 0, [0, 0])]
    assert two["rows"] == [(NAMES[1], 3, [3, 2]), (NAMES[0], 1, [1, 2]), (NAMES[2], 0, [0, 0])]


def test_an_unverifiable_step_counts_in_a_rate_of_labels_only_where_they_came_back() -> None:
    """It stands beside the rate, because it was chosen by its leak."""
    stamps = [VerificationStatus.VERIFIED, VerificationStatus.UNVERIFIABLE, VerificationStatus.UNVERIFIABLE]
    attempts = [attempt(i, "ilrg", kind="labels", leaks=i < 2, recall=None if i < 2 else 0.5) for i in range(3)]
    found = results([step(i, stamp) for i, stamp in enumerate(stamps)], attempts)
    shown = redact(found, [], gate.evaluate(found, policy(), now=NOW), environ={})
    (row,) = _context(shown)["rows"]
    assert (row["exact"], row["bounds"], row["means"][0]) == ("1 of 1 and 1 unverifiable", "5% to 100%", "100%")


@pytest.mark.parametrize(
    ("leaks", "known", "expected"),
    [
        (True, 0.0, "1 of 1: every label, batch size unknown"),
        (False, 0.0, "0 of 1, batch size unknown"),
        (True, 1.0, "1 of 1"),
    ],
)
def test_labels_of_a_batch_of_unknown_size_are_said_to_be_so(leaks: bool, known: float, expected: str) -> None:
    """The shares of all classes are every label.

    How many examples there were is not known.
    """
    done = attempt(0, "idlg", kind="labels", leaks=leaks, recall=None if leaks else 0.5)
    found = results([step(0)], [done.model_copy(update={"facts": {"batch_size_known": known}})])
    shown = redact(found, [], gate.evaluate(found, policy(), now=NOW), environ={})
    assert [row["exact"] for row in _context(shown)["rows"]] == [expected]


def test_letters_in_place_of_classes_are_explained() -> None:
    """A journal holds no names, because an audit keeps none."""
    said = "Letters stand for the classes, the most frequent first: the audit keeps no names."
    lettered = _context(_shown(TextMode.FULL, names=None))
    assert [row[0] for row in lettered["counts"][0]["rows"]] == ["class A", "class B", "class C"]
    assert said in lettered["lead"] and said not in _context(_shown(TextMode.FULL))["lead"]
    assert said not in _context(_shown(TextMode.MASKED, names=None))["lead"]


@pytest.mark.parametrize("mode", [TextMode.HASH, TextMode.MASKED])
def test_no_class_name_leaves_but_in_full(mode: TextMode) -> None:
    """Class names are masked like text, and counts stand in the private journal."""
    page = render_html(_shown(mode))
    assert not any(name in page for name in NAMES)
    assert "examples of each class</caption>" not in page
    full = render_html(_shown(TextMode.FULL))
    assert NAMES[1] in full and "examples of each class</caption>" in full


def test_leakage_over_the_steps_is_drawn_and_tabled() -> None:
    """From two steps on; one step has no course to draw."""
    shown = _context(_shown(TextMode.MASKED))
    assert shown["chart"] is not None and "<svg" in shown["chart"]
    assert shown["by_step"] == [
        {"step": 0, "cells": ["100%", "100%"]},
        {"step": 1, "cells": ["100%", "75%"]},
    ]
    assert _context(_shown(TextMode.MASKED, (1.0,)))["chart"] is None


def test_means_have_bounds_once_there_are_steps_enough() -> None:
    """Thirty steps make a bootstrap; what has no number says so."""
    accuracy = tuple(1.0 if n % 3 else 0.5 for n in range(30))
    rows = {row["attack"]: row for row in _context(_shown(TextMode.HASH, accuracy))["rows"]}
    assert rows["llg"]["means"][0].startswith("83.3% (") and " to " in rows["llg"]["means"][0]
    assert rows["llg"]["means"][1:] == ["no number", "no number"]


def test_a_run_without_label_attacks_has_no_such_part() -> None:
    """Neither the section nor its entry in the contents."""
    found: Any = results([step(0)], [attempt(0)])
    redacted = redact(found, [], gate.evaluate(found, policy(), now=NOW), TextMode.MASKED, environ={})
    assert section(redacted) is None
    assert 'id="labels"' not in render_html(redacted)
    assert isinstance(attempt(0, kind="labels").scores["label_accuracy"], Score)
