"""What may leave the journal, and what may not."""

from __future__ import annotations

import html
import random
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from leakaudit.errors import RedactionError
from leakaudit.gate import evaluate as gate
from leakaudit.reports import redact, render_html
from leakaudit.reports.allowlist import PUBLIC, allowed, clean_command
from leakaudit.reports.redaction import RedactedResult, runs
from leakaudit.results.journal import JournalEntry, Sample, TokenMatch
from leakaudit.results.lengths import without_counts
from leakaudit.results.schema import (
    LENGTHS,
    Attempt,
    AttemptStatus,
    Results,
    RunInfo,
    SequenceScore,
    StepRecord,
    TextMode,
    VerificationStatus,
)
from tests.support.factories import NOW, attempt, journal_entry, policy, results, step, with_scores
from tests.support.spellings import spellings

CANARIES = ["Zwetschgenkuchen", "Ærøskøbing-7", "+49 171 5550199", 'q"uo<te>&tail', "квартира"]
NAMES = ["Borreliosis-canary", "Tetanus-canary"]
PRIVATE: dict[type[BaseModel], set[str]] = {
    Attempt: {"facts"},
    RunInfo: {"pairing"},
    SequenceScore: {"longest_run"},
    StepRecord: {"batch", "unit"},
}
"""Fields that no report shows: what an attack says of itself may be anything, and the run of earlier results is a length."""


def audited(guess: list[str] | None = None) -> tuple[Results, list[JournalEntry]]:
    """Return an audit of two steps whose text and labels are canaries."""
    text, labels = attempt(0, leaks=True), attempt(0, "llg", kind="labels", leaks=True)
    entries = [
        journal_entry(text, CANARIES, guess),
        journal_entry(labels, counts=((1, 2), (1, 2)), names=NAMES),
    ]
    broken = attempt(1, "tag", status=AttemptStatus.ERROR, reason=f"ValueError at tag.py:12: bad token {CANARIES[0]!r}")
    return results([step(0), step(1)], [text, labels, broken]), entries


def redacted(mode: TextMode, **extra: Any) -> RedactedResult:
    found, entries = audited()
    return redact(found, entries, gate.evaluate(found, policy(), now=NOW), mode, environ={}, **extra)


@pytest.mark.parametrize("mode", [TextMode.HASH, TextMode.MASKED])
@pytest.mark.parametrize("canary", CANARIES + NAMES)
def test_no_text_and_no_class_name_is_in_a_report_that_hides_them(mode: TextMode, canary: str) -> None:
    """Neither in the page nor anywhere in the data it was made from, in any spelling."""
    shown = redacted(mode)
    page, data = render_html(shown), repr(shown)
    assert not [spelling for spelling in spellings(canary) if spelling in page or spelling in data]


def test_a_wrong_guess_is_as_private_as_the_text() -> None:
    """Wrong guesses hold real fragments."""
    found, entries = audited(guess=["Geheimnis", *CANARIES[1:]])
    shown = redact(found, entries, gate.evaluate(found, policy(), now=NOW), TextMode.MASKED)
    assert "Geheimnis" not in render_html(shown) + repr(shown)


def test_the_text_is_there_in_mode_full() -> None:
    """The same canaries prove that the test above would find them."""
    page = render_html(redacted(TextMode.FULL, allow_full=True))
    assert all(
        html.escape(canary, quote=False) in html.unescape(page) or canary in html.unescape(page) for canary in CANARIES
    )
    assert all(name in page for name in NAMES)


def test_masked_tells_which_parts_came_back_and_hash_does_not() -> None:
    """Neither tells a length, a text or a class count."""
    masked, hashed = redacted(TextMode.MASKED), redacted(TextMode.HASH)
    assert [shown.sequences[0].recovered[0].strip for shown in (masked, hashed)] == ["4" * 16, None]
    assert {s.strip for a in hashed.results.attempts for s in a.sequences} == {None}
    for shown in (masked, hashed):
        assert (shown.sequences[0].length, shown.sequences[0].recovered[0].true) == ("9-16", None)
        assert shown.labels[0].rows is None


def test_the_masked_report_needs_no_journal() -> None:
    """Whoever has results.json alone sees the same page as whoever ran the audit."""
    found, entries = audited()
    verdict = gate.evaluate(found, policy(), now=NOW)
    for mode in (TextMode.MASKED, TextMode.HASH):
        assert render_html(redact(found, entries, verdict, mode)) == render_html(redact(found, [], verdict, mode))


def test_the_length_in_results_of_before_is_not_shown() -> None:
    """A run of 21 tokens beside "exact" is the length of the text."""
    found, _ = audited()
    old = with_scores(found.attempts[0].sequences[0], longest_run=None).model_copy(
        update={"longest_run": 21, "strip": None}
    )
    before = found.model_copy(update={"attempts": (found.attempts[0].model_copy(update={"sequences": (old,)}),)})
    page = render_html(redact(before, [], gate.evaluate(before, policy(), now=NOW)))
    assert (
        "21"
        not in re.sub(
            r"<style>.*?</style>|<svg.*?</svg>", "", page.partition('id="samples"')[2], flags=re.DOTALL
        ).partition("</section>")[0]
    )
    assert "these results do not say which parts" in page


def test_every_text_says_the_same_of_lengths() -> None:
    """One sentence: in the documents, on the page and in the schema."""
    root = Path(__file__).parents[2]
    for name in ("README.md", "docs/methods/scoring.md"):
        assert LENGTHS in " ".join((root / name).read_text(encoding="utf-8").split()), name
    for mode in (TextMode.MASKED, TextMode.HASH):
        page = html.unescape(render_html(redacted(mode)))
        assert LENGTHS in page.partition("<footer>")[2] and LENGTHS in page.partition('id="glossary"')[2]


def test_the_attack_that_got_most_by_any_measure_is_shown() -> None:
    """A bag of every word beats a few words in order.

    A bag of the whole vocabulary does not.
    """

    def best(precision: float) -> str:
        rows = attempt(0, "embedding-rows", kind="bag", recall=1.0)
        bag = tuple(with_scores(s, token_precision=precision) for s in rows.sequences)
        found = results([step(0)], [rows.model_copy(update={"sequences": bag}), attempt(0, "tag", recall=0.07)])
        return redact(found, [], gate.evaluate(found, policy(), now=NOW)).sequences[0].recovered[0].attack

    assert (best(0.9), best(0.001)) == ("embedding-rows", "tag")


def test_classes_are_lettered_by_size_not_by_number() -> None:
    """The larger class is A, although its number is 1."""
    found, entries = audited()
    nameless = [
        e if e.labels is None else e.model_copy(update={"labels": e.labels.model_copy(update={"names": None})})
        for e in entries
    ]
    shown = redact(found, nameless, gate.evaluate(found, policy(), now=NOW), TextMode.FULL, allow_full=True, environ={})
    assert shown.labels[0].rows == (("class A", 2, 2), ("class B", 1, 1))


def test_full_text_of_a_model_without_text_is_its_class_counts() -> None:
    """A classifier of arrays has no text that the journal could lack."""
    labels = attempt(0, "llg", kind="labels", leaks=True)
    found = results([step(0)], [labels])
    entry = journal_entry(labels, counts=((1, 2), (1, 2)), names=NAMES)
    verdict = gate.evaluate(found, policy(), now=NOW)
    shown = redact(found, [entry], verdict, TextMode.FULL, allow_full=True, environ={})
    assert shown.labels[0].rows is not None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "the policy does not allow it"),
        ({"allow_full": True, "environ": {"CI": "true"}}, "asked for in CI"),
    ],
)
def test_full_text_needs_permission(extra: dict[str, Any], message: str) -> None:
    """From the policy, and again in CI."""
    found, entries = audited()
    verdict = gate.evaluate(found, policy(), now=NOW)
    with pytest.raises(RedactionError, match=message):
        redact(found, entries, verdict, TextMode.FULL, **({"environ": {}} | extra))
    assert redact(
        found, entries, verdict, TextMode.FULL, allow_full=True, allow_full_in_ci=True, environ={"CI": "1"}
    ).sequences


@pytest.mark.parametrize("entries", [[], [journal_entry(attempt(0, leaks=True), ["a"], full=False)]])
def test_full_text_needs_a_journal_that_holds_it(entries: list[JournalEntry]) -> None:
    """An audit in mode masked kept no text; the message says what to do."""
    found, _ = audited()
    with pytest.raises(RedactionError, match="the journal holds no text; run the audit again with text mode full"):
        redact(found, entries, gate.evaluate(found, policy(), now=NOW), TextMode.FULL, allow_full=True, environ={})


def test_nothing_is_shown_of_a_step_that_fails_verification() -> None:
    """Its update comes from another batch, so every number of it would be wrong."""
    found = results([step(0, VerificationStatus.MISMATCH)], [attempt(0, leaks=True)])
    shown = redact(found, [], gate.evaluate(found, policy(), now=NOW))
    assert (shown.results.attempts, shown.sequences) == ((), ())


def models(model: type[BaseModel]) -> set[type[BaseModel]]:
    """Return every model that can be reached from `model`."""
    found: set[type[BaseModel]] = set()
    waiting: list[Any] = [model]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if kind not in found:
                found.add(kind)
                waiting += [info.annotation for info in kind.model_fields.values()]
        else:
            waiting += list(get_args(kind))
    return found


def test_every_field_of_the_results_was_rated() -> None:
    """A new field is private until somebody lists it in PUBLIC or PRIVATE."""
    for model in models(Results):
        assert set(model.model_fields) == PUBLIC[model] | PRIVATE.get(model, set()), (
            f"rate the fields of {model.__name__}"
        )


def test_a_field_that_nobody_rated_is_not_copied() -> None:
    """With a default it falls back to that; reading one without fails."""
    noisy = attempt(0, facts={"rank": 3.0})
    assert allowed(noisy).facts == {}
    assert allowed(noisy).model_dump(exclude={"facts"}) == noisy.model_dump(exclude={"facts"})


def test_an_exceptions_message_is_cut_off() -> None:
    """Type and place stay, what was read goes."""
    reasons = {a.reason for a in redacted(TextMode.MASKED).results.attempts}
    assert "ValueError at tag.py:12" in reasons

    def shown(reason: str) -> str:
        found = results([step(0)], [attempt(0, status=AttemptStatus.ERROR, reason=reason)])
        return redact(found, [], gate.evaluate(found, policy(), now=NOW)).results.attempts[0].reason

    assert shown("CUDA ran out of memory") == "error"
    assert shown("IndexError") == "IndexError"
    assert shown("patient in room.py:4 died") == "error"
    assert shown("Zwetschgenkuchen") == "error"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/home/ann/.venv/bin/leakaudit run /data/ward7/spool --seed 7", "leakaudit run <path> --seed 7"),
        ("leakaudit simulate --data=ward7.jsonl --token abc", "leakaudit simulate --data=<path> --token <secret>"),
        ("leakaudit run --api-key=abc 'C:\\data\\ward 7'", "leakaudit run --api-key=<secret> <path>"),
        ("leakaudit 'unclosed", "<not shown>"),
        ("", ""),
    ],
)
def test_a_command_is_shown_without_paths_and_secrets(command: str, expected: str) -> None:
    """File names are private, and so are keys."""
    assert clean_command(command) == expected


def test_only_rated_entries_of_the_environment_are_shown() -> None:
    """Versions and hardware; a user's name is dropped and counted."""
    found, entries = audited()
    run = found.run.model_copy(update={"environment": {"torch": "2.13", "user": "ann", "python": "3.11"}})
    shown = redact(found.model_copy(update={"run": run}), entries, gate.evaluate(found, policy(), now=NOW))
    assert (shown.results.run.environment, shown.hidden_environment) == ({"python": "3.11", "torch": "2.13"}, 1)


def test_neighbouring_tokens_of_a_class_are_joined_into_text() -> None:
    """Sub-words go on with the word before, in the three usual ways of writing them."""
    texts = [run.text for run in runs("bbu.", ("chest", "##ness", "pain", "now"))]
    assert texts == [" chestness", " pain", " now"]
    assert [run.text for run in runs("bbb", ("\u0120chest", "ness", "\u0120pain"))] == [" chestness pain"]
    assert [run.text for run in runs("bb", ("\u2581chest", "ness"))] == [" chestness"]


def test_a_pattern_of_another_length_marks_nothing() -> None:
    """Better no mark than one on the wrong word."""
    assert {run.match for run in runs("bbb", ("one", "two"))} == {TokenMatch.WRONG}
    assert [(run.match, run.tokens) for run in runs("b?u", ("a", "b", "c"))] == [("b", 1), (".", 1), ("u", 1)]


def test_the_worst_sequence_comes_first_and_the_rest_is_counted() -> None:
    """Exact before partial; what is left out for length is said."""
    attempts = [attempt(i, recall=share) for i, share in enumerate((0.2, 1.0, 0.6))]
    found = results([step(i) for i in range(3)], attempts)
    shown = redact(found, [], gate.evaluate(found, policy(), now=NOW), top_samples=2)
    assert [view.step for view in shown.sequences] == ["st-000001", "st-000002"]
    assert shown.hidden_sequences == 1


def test_a_sample_belongs_to_its_own_attempt() -> None:
    """Each sequence is shown with the text of the seed that was scored."""
    first, second = attempt(0, recall=0.2, seed=1), attempt(0, recall=0.9, seed=2)
    entries = [journal_entry(first, ["a", "b"], ["x", "y"]), journal_entry(second, ["a", "b"], ["a", "b"])]
    assert isinstance(entries[0].samples[0], Sample)
    verdict = gate.evaluate(results(), policy(), now=NOW)
    found = results([step(0)], [first, second])
    shown = redact(found, entries, verdict, TextMode.FULL, allow_full=True, environ={}).sequences[0].recovered[0]
    assert shown.true is not None and shown.guess == shown.true


SAYINGS = (
    "found none among {}: every word occurs several times",
    "{} of 2 rows of a {}-token batch",
    "the table of layer.3.weight has {} rows ({} texts)",
    "on average {}.5 tokens a text, {:,} in all",
)


@pytest.mark.parametrize("mode", [TextMode.HASH, TextMode.MASKED])
def test_no_count_inside_what_an_attack_says_is_exact(mode: TextMode) -> None:
    """Whatever the sentence is: a length is a range on the page, here as everywhere."""
    rng = random.Random(0)
    for saying in SAYINGS:
        count = rng.randrange(1025, 2000)
        reason = saying.format(count, count)
        found = results([step(0)], [attempt(0, status=AttemptStatus.NOT_APPLICABLE, reason=reason)])
        shown = redact(found, [], gate.evaluate(found, policy(), now=NOW), mode).results.attempts[0].reason
        assert "1025-2048" in shown
        assert not re.search(rf"{count}|{count:,}", shown)
    assert "2 rows" in without_counts(SAYINGS[1].format(9, 9)) and "layer.3.weight" in without_counts(SAYINGS[2])


def test_a_full_report_shows_the_words_of_a_bag() -> None:
    """They are what leaked: those of the text, sorted.

    Of a bag that is mostly wrong they are behind a summary that says so.
    """
    words = ("pain", "chest", "pain", "now")
    expected = [" chest", " pain"]
    for precision in (0.9, 0.2):
        rows = attempt(0, "embedding-rows", kind="bag", recall=0.6)
        bag = tuple(with_scores(s, token_precision=precision) for s in rows.sequences)
        rows = rows.model_copy(update={"sequences": bag})
        entry = journal_entry(rows, words)
        (sample,) = entry.samples
        unordered = sample.model_copy(update={"true_pattern": "uuu.", "guess_pattern": None, "guess_tokens": None})
        found = results([step(0)], [rows])
        shown = redact(
            found,
            [entry.model_copy(update={"samples": (unordered,)})],
            gate.evaluate(found, policy(), now=NOW),
            TextMode.FULL,
            allow_full=True,
            environ={},
        )
        guess = shown.sequences[0].recovered[0].guess
        assert (None if guess is None else [run.text for run in guess]) == expected
        page = render_html(shown)
        assert '<mark class="u">chest</mark> <mark class="u">pain</mark>' in page
        assert ("a bag of words, most of them wrong" in page) is (precision < 0.5)
