"""The page: safe with hostile text, complete offline, one with the gate."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
import stat
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from leakaudit.errors import RedactionError, ResultsError
from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import default_policy
from leakaudit.gate.verdict import Status
from leakaudit.gate.verdict import to_json as verdict_json
from leakaudit.reports import charts as drawing
from leakaudit.reports import header, print_audit, print_summary, print_verdict, redact, render_html, write_report
from leakaudit.reports.cells import cell_for
from leakaudit.reports.charts import COLOURS, STATES, RateBar, StepMark, rate_chart, step_chart
from leakaudit.reports.escaping import plain, visible
from leakaudit.reports.page import style
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.strips import strip_in_words, strip_runs
from leakaudit.reports.wording import BANNERS, INVENTED, banner
from leakaudit.results import schema as scores
from leakaudit.results.files import to_json
from leakaudit.results.journal import JournalEntry
from leakaudit.results.schema import (
    Attempt,
    AttemptStatus,
    Coverage,
    Missing,
    NotTested,
    Results,
    Score,
    Subject,
    TextMode,
    ThreatModel,
    Utility,
    VerificationStatus,
)
from tests.gate.test_policy import eight, words
from tests.support.factories import (
    NOW,
    attempt,
    audit,
    changed,
    journal_entry,
    of_sequences,
    policy,
    results,
    step,
    with_scores,
)

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</title><script>alert(1)</script>",
    "</style><style>*{display:none}",
    "<!--<script>",
    "--><b>",
    '"><iframe srcdoc="<script>alert(1)</script>">',
    '<base href="//evil.example/">',
    '<meta http-equiv="refresh" content="0;url=//evil.example">',
    '<form action="//evil.example"><input name=a>',
    "javascript:alert(1)",
    "{{ 7*7 }}{% raw %}",
    "${7*7} $& $` `x`",
    "]]><svg/onload=alert(1)>",
    "&lt;b&gt;&#x3c;script&#x3e;",
    "line\u2028separator\u2029paragraph",
    "nul\x00bell\x07escape\x1b[31mred\x1b]8;;//evil.example\x07link",
    "\u202eSSAP\u202c reversed \u2066isolated\u2069",
    "zero\u200bwidth\u200djoin\ufeff\u00adsoft",
    "private \ue000 use",
    "W" * 5000,
    "[bold red]markup[/bold red]",
    "=cmd|' /C calc'!A0",
    "::error::ci",
    "' onmouseover='alert(1)",
    'style="background:url(//evil.example)"',
    "مرحبا שלום 👩‍👧 e\u0301\u0301\u0301",
]


class Outline(HTMLParser):
    """What a browser would make of the page: elements, attributes, ids, links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def values(self, name: str) -> list[str]:
        return [value or "" for key, value in self.attributes if key == name]


def rich_audit(text: str = "ordinary") -> tuple[Results, list[JournalEntry]]:
    """Return an audit with every section, and `text` in every place for text."""
    attempts: list[Attempt] = []
    entries: list[JournalEntry] = []
    for i in range(4):
        for defense in ("none", "prune", text):
            done = attempt(
                i, "span", defense, leaks=i % 2 == 0 and defense == "none", told_by={text: 0.75, "other": 0.25}
            )
            attempts.append(done)
            entries.append(journal_entry(done, [text, "and", text], [text, "or", text]))
        labels = attempt(i, "llg", kind="labels", leaks=True)
        attempts.append(labels)
        entries.append(journal_entry(labels, counts=((1, 2), (2, 1)), names=(text, "other")))
        attempts.append(attempt(i, text, status=AttemptStatus.NOT_APPLICABLE, reason=text))
        attempts.append(attempt(i, "tag", status=AttemptStatus.ERROR, reason=text))
        attempts.append(attempt(i, "late", status=AttemptStatus.BUDGET_EXHAUSTED, reason=text))
    found = results(
        [
            step(i, shipped=text).model_copy(update={"loss": 1.5 - i / 4, "learning_rate": 2e-4 / (i + 1)})
            for i in range(4)
        ],
        attempts,
        subject=Subject(
            model=text,
            config_digest=text,
            parameters=3,
            code_commit=text,
            base_model=text,
            data=text,
            artifacts=(scores.Artifact(name=text, sha256="ab" * 32),),
        ),
        threat_model=ThreatModel(adversary=text, sees=text, knows=(text,), granted=(text,)),
        coverage=Coverage(
            not_tested=(NotTested(what=text, why=text),),
            not_run=(NotTested(what=f"not {text}", why=text),),
            audited_steps=4,
            total_steps=9,
        ),
        utility=(Utility(defense="prune", metric=text, value=0.8, baseline=0.9),),
    )
    run = found.run.model_copy(update={"id": text, "command": text, "tool": text, "environment": {"torch": text}})
    return found.model_copy(update={"run": run}), entries


def shown(mode: TextMode = TextMode.MASKED, text: str = "ordinary") -> RedactedResult:
    found, entries = rich_audit(text)
    verdict = gate.evaluate(found, policy(name=text, owner=text), now=NOW)
    return redact(found, entries, verdict, mode, allow_full=True, environ={})


@pytest.mark.parametrize("mode", list(TextMode))
def test_the_page_is_well_formed_and_closed_in_itself(mode: TextMode) -> None:
    """Elements nest, ids are unique, links have targets, nothing is fetched."""
    outline = Outline(render_html(shown(mode)))
    assert (outline.unbalanced, outline.open) == ([], [])
    ids = outline.values("id")
    assert len(ids) == len(set(ids))
    links = [link for link in outline.values("href") if link != "data:,"]
    assert links and {link[1:] for link in links} <= set(ids) and all(link.startswith("#") for link in links)
    assert {
        "rules",
        "risk",
        "steps",
        "samples",
        "labels",
        "matrix",
        "defences",
        "coverage",
        "cost",
        "provenance",
    } <= set(ids)
    names = {name for name, _ in outline.attributes}
    assert not names & {"style", "src", "srcset", "srcdoc", "action", "background"}
    assert not [name for name in names if name.startswith("on")]
    assert not set(outline.tags) & {"script", "iframe", "form", "base", "object", "embed", "img"}
    assert outline.tags.count("h1") == outline.tags.count("style") == outline.tags.count("main") == 1


@pytest.mark.parametrize("mode", list(TextMode))
def test_the_content_policy_comes_first_and_allows_the_one_style_sheet(mode: TextMode) -> None:
    """The hash is that of the style element as it stands in the page."""
    page = render_html(shown(mode))
    first = re.search(r"<head>\s*<(\w+) ([^>]*)>", page)
    assert first is not None and first[1] == "meta" and "Content-Security-Policy" in first[2]
    rules = html.unescape(first[2])
    assert "default-src 'none'" in rules and "script-src" not in rules and "unsafe" not in rules
    sheet = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(sheet[0].encode()).digest()).decode()
    assert re.findall(r"'sha256-([^']+)'", rules) == [digest]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("mode", list(TextMode))
def test_hostile_text_stays_text(mode: TextMode, text: str) -> None:
    """Elements and attributes are the same as with an ordinary word."""
    page = render_html(shown(mode, text))
    page.encode("utf-8")
    clean, dirty = Outline(render_html(shown(mode))), Outline(page)
    charts = {"path", "text", "g", "span"}  # ticks and chips may differ in number
    assert [tag for tag in dirty.tags if tag not in charts] == [tag for tag in clean.tags if tag not in charts]
    assert {name for name, _ in dirty.attributes} <= {name for name, _ in clean.attributes} | {"class"}
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]", page
    )


def test_what_could_act_is_shown_as_its_code() -> None:
    """A reversed word is not reversed; the reader sees what was there."""
    assert visible("\u202ea<\x1b") == ('<span class="chip">U+202E</span>a&lt;<span class="chip">U+001B</span>')
    assert plain("a\u202eb\n") == "a[U+202E]b[↵]"
    assert plain("\ud800") == "[U+D800]"  # pydantic refuses lone surrogates, so only other callers meet them


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_the_terminal_shows_hostile_text_as_text(text: str) -> None:
    """No escape sequence, no markup, no direction mark reaches the terminal."""
    out = io.StringIO()
    print_audit(shown(text=text), Console(file=out, width=120, no_color=True), report=Path("report.html"))
    printed = out.getvalue()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", printed)
    assert "FAIL" in printed and "report.html" in printed
    if text.startswith("[bold"):
        assert "[bold" in printed


def test_the_same_audit_gives_the_same_page() -> None:
    """Twice in one process, and in another with another hash seed and time zone."""
    found, entries = rich_audit()
    page = render_html(redact(found, entries, gate.evaluate(found, policy(), now=NOW)))
    assert page == render_html(redact(found, entries, gate.evaluate(found, policy(), now=NOW)))
    code = (
        "import hashlib\n"
        "from tests.reports.test_page import *\n"
        "f, e = rich_audit()\n"
        "page = render_html(redact(f, e, gate.evaluate(f, policy(), now=NOW)))\n"
        "print(hashlib.sha256(page.encode()).hexdigest())"
    )
    root = Path(__file__).parents[2]
    found_there = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "PYTHONPATH": str(root), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert found_there.stdout.strip() == hashlib.sha256(page.encode()).hexdigest()


statuses = st.sampled_from([AttemptStatus.RAN] * 6 + list(AttemptStatus))


@st.composite
def audits(draw: st.DrawFn) -> Results:
    """Draw an audit of any size, state and outcome."""
    n = draw(st.integers(0, 70))
    leaky = draw(st.sampled_from([0, 1, 5, 100]))
    marks = [draw(statuses) if i % 10 == 0 else AttemptStatus.RAN for i in range(n)]
    attempts = [
        attempt(i, status=mark, leaks=mark is AttemptStatus.RAN and i * 37 % 100 < leaky)
        for i, mark in enumerate(marks)
    ]
    return results(
        [
            step(i, draw(st.sampled_from(VerificationStatus)) if i == 1 else VerificationStatus.VERIFIED)
            for i in range(n)
        ],
        attempts,
        positive=draw(st.sampled_from([(1, 1), (0, 1), (0, 0), (2, 1)])),
        negative=draw(st.sampled_from([(0, 1), (1, 1), (0, 0)])),
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(audits(), st.sampled_from([0.05, 0.5]))
def test_exit_code_json_and_first_screen_agree(found: Results, limit: float) -> None:
    """One evaluator: whatever the audit, the three say the same."""
    rules = policy(
        {"id": "rate", "event": "exact_sentence", "max_rate": limit},
        {"id": "warning", "level": "warn", "event": "exact_sequence", "max_count": 0},
    )
    verdict = gate.evaluate(found, rules, now=NOW)
    page = render_html(redact(found, [], verdict))
    data = verdict_json(verdict)
    headline = re.search(r"<h1 class=\"(\w+)\">.*?<span>(\w+)</span></h1>", page, flags=re.DOTALL)
    sentence = re.search(r'<p class="sentence">(.*?)</p>', page, flags=re.DOTALL)
    title = re.search(r"<title>(\w+):", page)
    assert headline is not None and sentence is not None and title is not None
    assert {headline[1], headline[2], title[1], data["verdict"]} == {verdict.verdict.value}
    assert data["exit_code"] == verdict.verdict.exit_code
    assert html.unescape(sentence[1]) == data["sentence"]
    worst = max((rule.status for rule in verdict.rules if rule.level == "error"), key=list(Status).index, default=None)
    assert worst in (verdict.verdict, None)


def test_one_step_is_shown_with_what_it_tells() -> None:
    """One bar as long as what is not known, and no rate in a cell."""
    found = audit(0, 1)
    page = render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW)))
    assert "The rate may be anything up to 95%." in page
    assert "none from 1 step" in page and "rate at most" not in page
    assert "0 of 1 step, 95% bounds 0% to 95%" in page


def test_the_states_of_a_cell_have_a_word_and_a_pattern_each() -> None:
    """From a sentence that leaked down to an attack that did not run."""
    attempts = [
        attempt(0, "a", leaks=True),
        attempt(0, "a2", kind="bag", recall=1.0, events=("all_words",)),
        attempt(0, "a3", kind="labels", leaks=True),
        told(0, 1.0, True, attack="b2"),
        attempt(0, "b"),
        attempt(1, "g"),
        attempt(0, "c", status=AttemptStatus.BUDGET_EXHAUSTED, kind="labels", scores={}),
        attempt(0, "d", status=AttemptStatus.ERROR, reason="ValueError at d.py:3"),
        attempt(0, "e", status=AttemptStatus.NOT_APPLICABLE, reason="embeddings are tied"),
        attempt(0, "f", status=AttemptStatus.SKIPPED, reason="the run was interrupted"),
        attempt(0, "h", status=AttemptStatus.NOT_NEEDED, reason="a had recovered every text"),
        attempt(0, "i"),
    ]
    found = results([step(0), step(1, VerificationStatus.UNVERIFIABLE)], attempts)
    text = found.controls.kinds["text"]
    blind = text.model_copy(update={"by": {name: own for name, own in text.by.items() if name != "i"}})
    found = changed(found, controls=found.controls.model_copy(update={"kinds": found.controls.kinds | {"text": blind}}))
    page = render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW)))
    cells = [
        (css, page.partition(f'<div id="{anchor}"')[2].partition("</h3>")[0].rpartition(": ")[2])
        for css, anchor in re.findall(r'<td class="s-([a-z-]+) ships"><a href="#([^"]+)"><b>[^<]+</b>', page)
    ]
    assert [state for _, state in cells[:12]] == [
        "text leaked",
        "words leaked",
        "labels leaked",
        "in reach, not found",
        "no leak event",
        "unverifiable",
        "out of time",
        "error",
        "not applicable",
        "not run",
        "not needed",
        "not judged",
    ]
    sheet = style(BANNERS[TextMode.MASKED])
    for css, state in cells:
        assert css == state.replace(",", "").replace(" ", "-")
        assert f".s-{css}" in sheet
    assert "embeddings are tied" in page and "ValueError at d.py:3" in page and "the run was interrupted" in page
    assert set(STATES) == {state for _, state in cells}


def reach_page(*attempts: Attempt) -> str:
    found = results([step(i) for i in range(2)], attempts)
    return html.unescape(render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW))))


def told(number: int, reachable: float | None, passes: bool | None, **extra: object) -> Attempt:
    """Build an attempt whose attack said what was in reach of its one text."""
    done = attempt(number, **extra)  # type: ignore[arg-type]
    sequences = tuple(s.model_copy(update={"reachable": reachable, "passes": passes}) for s in done.sequences)
    silent = Missing(missing="cannot say")
    return done.model_copy(
        update={
            "sequences": sequences,
            "reachable_tokens": silent if reachable is None else Score(value=reachable),
            "reachable_sequences": silent if passes is None else Score(value=float(passes)),
        }
    )


def test_a_cell_tells_a_search_that_gave_up_from_what_these_attacks_cannot_find() -> None:
    """With the rates of both, and each sample says which it was."""
    page = reach_page(told(0, 1.0, True), told(1, 0.5, False))
    assert "in reach: 75% of the tokens, 50% of the texts" in page
    assert "did not come back: 1 in reach, but the search gave up; 1 not by these attacks" in page
    assert "out of reach" not in page.casefold()
    captions = re.findall(r'<div class="small muted">(span, [^<]*)</div>', page)
    assert sorted(re.split(r"ROUGE-L [0-9.]+, ", caption)[-1] for caption in captions) == [
        "in reach, but the search gave up",
        "not by these attacks",
    ]


def test_a_cell_without_an_answer_says_so_and_names_no_rate() -> None:
    """Unknown is not zero: no rate, and no word on what was not asked at all."""
    page = reach_page(told(0, None, None), told(1, None, None))
    assert "what was in reach is not known" in page and "in reach:" not in page
    assert "not known" not in reach_page(attempt(0), attempt(1))
    tokens_only = reach_page(told(0, 0.25, None))
    assert "in reach: 25% of the tokens<" in tokens_only and "did not come back: 1 not by these attacks" in tokens_only


def test_a_search_that_ran_out_of_time_shows_what_was_in_reach() -> None:
    """That is where it matters most."""
    page = reach_page(told(0, 1.0, True, status=AttemptStatus.BUDGET_EXHAUSTED))
    assert "out of time on 1 of 1 step; until then 10% of the tokens came back" in page
    assert "did not come back: 1 in reach, but the search gave up" in page and "nothing in time" not in page


def test_every_cell_says_what_came_back() -> None:
    """Overlap, recall and precision, also of attacks that ran out of time."""
    attempts = [
        attempt(i, name, recall=0.44, status=state)
        for i in range(2)
        for name, state in (("span", AttemptStatus.RAN), ("late", AttemptStatus.BUDGET_EXHAUSTED))
    ]
    attempts = [of_sequences(a, [with_scores(s, token_precision=0.6) for s in a.sequences]) for a in attempts]
    found = results([step(0), step(1)], attempts)
    for name in ("span", "late"):
        assert "mean ROUGE-L 0.44, token recall 44%, token precision 60%" in cell_for(found, name, "none").lines
    late = "out of time on 2 of 2 steps; until then 44% of the tokens came back, and 60% of the guess is right"
    assert late in cell_for(found, "late", "none").lines
    assert cell_for(found, "late", "none").state == "out of time"


def test_a_cell_names_a_bound_only_where_it_says_something() -> None:
    """A bound of 100 % says nothing, and unfinished steps bound nothing."""
    five = results([step(i) for i in range(5)], [attempt(i, leaks=True) for i in range(5)])
    assert cell_for(five, "span", "none").lines[:2] == ("5 of 5 steps", "rate at least 54.9%")
    labels = results([step(i) for i in range(5)], [attempt(i, "llg", kind="labels") for i in range(5)])
    assert cell_for(labels, "llg", "none").lines == ("0 of 5 steps", "rate at most 45.1%", "mean label accuracy 0.10")
    late = results([step(i) for i in range(5)], [attempt(i, status=AttemptStatus.BUDGET_EXHAUSTED) for i in range(5)])
    assert not [line for line in cell_for(late, "span", "none").lines if "rate" in line]


def test_a_page_says_how_many_steps_cannot_be_verified_and_why() -> None:
    """What came back from them is a leak; otherwise they are not counted."""
    stamp = scores.Verification(status=VerificationStatus.UNVERIFIABLE, note="the loss cannot be computed again")
    steps = [step(i) if i < 3 else step(i).model_copy(update={"verification": stamp}) for i in range(8)]
    found = results(steps, [attempt(i, leaks=i in (0, 3)) for i in range(8)])
    verdict = gate.evaluate(found, policy(), now=NOW)
    page = html.unescape(render_html(redact(found, [], verdict)))
    assert "5 of 8 steps cannot be verified: the loss cannot be computed again (5 steps)." in page
    assert "Where there was no leak event, they are not counted" in page and "5 unverifiable" in page
    assert "2 of 4 audited steps leaked, the first at step 0, the last at step 3: a sentence in 2." in page
    assert "4 unverifiable steps without a leak event are not counted." in page
    lines = cell_for(found, "span", "none").lines
    assert lines[0] == "1 of 3 steps and 1 unverifiable step"
    assert "4 unverifiable steps without a leak: no evidence" in lines
    assert "3 client steps were verified and audited." in page


def test_a_defence_that_only_stopped_the_search_stopped_no_leak() -> None:
    """Unfinished steps get no p-value and no green dot; the page counts them."""
    for under in (
        [told(i, None, None, defense="noise", status=AttemptStatus.BUDGET_EXHAUSTED, recall=0.44) for i in range(6)],
        [told(i, 1.0, True, defense="noise") for i in range(6)],
    ):
        found = results([step(i) for i in range(6)], [*(attempt(i, leaks=True) for i in range(6)), *under])
        page = html.unescape(render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW))))
        section = page.partition('id="defences"')[2].partition("</section>")[0]
        assert "sign test p" not in section and "stopped" not in section.partition("</thead>")[2]
        assert "nothing is known about what it stops; not finished on 6 of 6 steps" in section
        counts = ("0 of 6, 6 not finished", "none judged, 6 not finished")
        assert any(said in section for said in counts) and f'fill="{drawing.CLEAN}"' not in section
        assert f'stroke="{drawing.LATE}"' in section
    clean = [attempt(i, defense="noise") for i in range(6)]
    found = results([step(i) for i in range(6)], [*(attempt(i, leaks=True) for i in range(6)), *clean])
    page = html.unescape(render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW))))
    assert "stopped 6 of 6 leaks (sign test p = 0.016)" in page
    assert f'fill="{drawing.CLEAN}"' in page.partition('id="defences"')[2].partition("</section>")[0]


def test_words_and_labels_that_came_back_are_not_called_clean() -> None:
    """Headline, steps, matrix and terminal say that every word came back."""
    found = results([eight(0)], words(0))
    shown = redact(found, [], gate.evaluate(found, default_policy(), now=NOW))
    page = html.unescape(render_html(shown))
    out = io.StringIO()
    print_audit(shown, Console(file=out, width=4000))
    for text in (page, out.getvalue()):
        assert "But every word of 8 of 8 texts and all labels came back." in text
        assert "no leak seen" not in text.casefold()
    assert "One step was audited, step 0, and it leaked words." in page
    assert {view.recovered[0].attack for view in shown.sequences} == {"rows"}


def test_a_warning_that_does_not_hold_is_no_failure() -> None:
    """It reads WARN: the verdict is not its business."""
    rules = (
        {"id": "rate", "event": "exact_sentence", "max_rate": 0.05},
        {"id": "w", "level": "warn", "event": "exact_sequence", "max_count": 0},
    )
    found = results([step(0)], [attempt(0, leaks=True, long_enough=False)])
    page = render_html(redact(found, [], gate.evaluate(found, policy(*rules), now=NOW)))
    row = page.partition('<li id="r-w">')[2].partition("</tr>")[0]
    assert 'class="status WARN"' in row and "</svg>WARN</span>" in row and "FAIL" not in row


def test_a_strip_is_read_aloud_and_drawn_in_bars() -> None:
    """Bars by quarters, and which of them came back in order."""
    assert strip_runs("4410dd00" * 2)[:4] == [("b", "██▂"), (".", "▁"), ("u", "██"), (".", "▁▁")]
    assert (
        strip_in_words("4410dd00" * 2)
        == "of 16 equal parts of the text 8 came back, 2 in part, 6 not; 6 of them in order"
    )


def test_the_report_of_a_folder_with_results_alone_is_the_same(tmp_path: Path) -> None:
    """results.json is what travels: the masked page needs nothing else."""
    found, entries = rich_audit()
    (tmp_path / "results.json").write_text(json.dumps(to_json(found)), encoding="utf-8")
    alone = write_report(tmp_path, now=NOW).read_bytes()
    (tmp_path / "journal.jsonl").write_text("".join(entry.model_dump_json() + "\n" for entry in entries))
    assert write_report(tmp_path, now=NOW).read_bytes() == alone
    assert b"from results.json alone" in alone


def test_what_was_not_tested_is_never_folded_away() -> None:
    """Each group's sentence is a summary, which shows; only lists are folded."""
    page = render_html(shown())
    section = page.partition('<section id="coverage"')[2].partition("</section>")[0]
    open_text = re.sub(r"</summary>.*?</details>", "", section, flags=re.DOTALL)
    assert "Only a correct accountant of differential privacy bounds attacks that nobody has tried." in open_text
    assert "(5 of 9, 55.6%, were not audited)" in open_text
    assert open_text.count("<li><details><summary>An adversary could ") >= 2
    assert section.count("<details>") == open_text.count("</li>")


def test_the_cheapest_way_to_green_names_a_defence_that_passes() -> None:
    """With its cost to the model, where that was measured."""
    leaks = {"none": True, "prune": False, "noise": False}
    attempts = [attempt(i, defense=name, leaks=leak) for i in range(60) for name, leak in leaks.items()]
    costs = (
        Utility(defense="prune", metric="f1", value=0.8, baseline=0.9),
        Utility(defense="noise", metric="f1", value=0.88, baseline=0.9),
    )
    found = results([step(i) for i in range(60)], attempts, utility=costs)
    page = render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW)))
    assert "</b> noise: no sentence in 60 steps (at most 4.9%), f1 -2.0 points.</li>" in page
    assert "stopped 60 of 60 leaks (sign test p = 8.7e-19)" in page


@pytest.mark.parametrize(("steps", "found"), [(2, "open"), (60, "clean")])
def test_the_dot_of_the_headline_is_green_only_where_the_rule_passes(
    steps: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clean steps decide nothing, so they are drawn hollow."""
    drawn: list[RateBar] = []

    def look(bars: list[RateBar], *rest: Any) -> Any:
        drawn.extend(bars)
        return rate_chart(bars, *rest)

    monkeypatch.setattr(header, "rate_chart", look)
    clean = audit(0, steps)
    render_html(redact(clean, [], gate.evaluate(clean, policy(), now=NOW)))
    assert [bar.found for bar in drawn] == [found]


def test_a_hollow_dot_is_explained_wherever_one_is_drawn() -> None:
    """Also where all steps were finished, but are too few."""
    attempts = [attempt(i, defense=d, leaks=d == "none") for i in range(3) for d in ("none", "prune")]
    found = results([step(i) for i in range(3)], attempts)
    page = render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW)))
    assert "A hollow dot shows no protection: it has unfinished steps, or fewer than 5 steps." in page
    reach = policy({"id": "reach", "event": "in_reach", "max_rate": 0.05})
    page = render_html(redact(found, [], gate.evaluate(found, reach, now=NOW)))
    assert "Share of steps in which a text was in reach (rule reach)." in page


def test_results_that_contradict_themselves_still_get_a_page() -> None:
    """ERROR, with what is wrong."""
    found = results([step(0), step(0)], [])
    page = render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW)))
    assert "The evidence cannot be judged: step st-000000 is recorded twice." in page


def test_attempts_on_steps_that_nobody_recorded_still_get_a_page() -> None:
    """ERROR, with what is wrong, and no crash."""
    found = results([step(0)], [attempt(0), attempt(9, leaks=True), attempt(9, "llg", leaks=True, kind="labels")])
    page = render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW)))
    assert "attempts on step st-000009, which is not recorded" in page


@pytest.mark.parametrize("mode", list(TextMode))
def test_the_handling_banner_is_on_the_page_and_on_every_printed_one(mode: TextMode) -> None:
    """On screen first, on paper in the margin."""
    page = render_html(shown(mode))
    assert BANNERS[mode] in page.partition("<main>")[0]
    assert f'@top-center {{ content: "{BANNERS[mode].partition(":")[0]}"' in style(BANNERS[mode])


@pytest.mark.parametrize("mode", list(TextMode))
def test_invented_text_is_not_called_real(mode: TextMode) -> None:
    """If the owner says so; other modes show no text and say the same as ever."""
    found, entries = rich_audit("ordinary")
    invented = found.model_copy(update={"subject": found.subject.model_copy(update={"data_invented": True})})
    verdict = gate.evaluate(invented, policy(), now=NOW)
    page = render_html(redact(invented, entries, verdict, mode, allow_full=True, environ={}))
    said = INVENTED if mode is TextMode.FULL else BANNERS[mode]
    assert banner(mode, False) == BANNERS[mode] and banner(mode, True) == said
    assert '<div class="banner full"' not in page and ('<div class="banner full"' in render_html(shown(mode))) is (
        mode is TextMode.FULL
    )
    assert page.count(said) == 2 and ("REAL TRAINING TEXT" in page) is False
    assert f'@top-center{{content:"{said.partition(":")[0]}"' in page
    assert ("Treat it like the training data" in render_html(shown(mode))) is (mode is TextMode.FULL)
    assert "Treat it like the training data" not in page


def luminance(colour: str) -> float:
    """Relative luminance by the formula of WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_in_both_colour_schemes(scheme: int) -> None:
    """Contrast of at least 4.5 for every text colour on every ground it stands on."""
    blocks = re.findall(r":root \{([^}]*)\}", style(BANNERS[TextMode.FULL]))
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", blocks[scheme]))
    grounds = {
        name: ("paper", "soft") for name in ("ink", "muted", "leak", "words", "labels", "clean", "late", "crash")
    }
    pairs = [(name, ground) for name, under in grounds.items() for ground in under]
    pairs += [
        ("ink", "took"),
        ("ink", "word"),
        ("ink", "wash"),
        ("leak", "wash"),
        ("words", "wash"),
        ("muted", "wash"),
        ("paper", "leak"),
    ]
    for name, ground in pairs:
        bright, dim = sorted((luminance(colours[name]), luminance(colours[ground])), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5, (name, ground)


def test_every_colour_of_the_charts_has_a_dark_one() -> None:
    """The style sheet replaces colours by value, so it must know each."""
    sheet = style(BANNERS[TextMode.MASKED])
    for colour in COLOURS:
        assert f'svg [fill="{colour}"]' in sheet and f'svg [stroke="{colour}"]' in sheet
    bars = [RateBar("none", 0.5, 0.2, 0.8, "3 of 6", "leak"), RateBar("prune", 0.0, None, None, "0 of 1", "clean")]
    marks = [StepMark(i, "span", state) for i, state in enumerate(STATES)]
    drawn = rate_chart(bars, 0.05, "limit", "title") + step_chart(marks, [(0, None), (1, 0.5)], "title", "ROUGE-L")
    assert set(re.findall(r"#[0-9a-fA-F]{3,8}\b", drawn)) <= set(COLOURS)
    assert " style=" not in drawn and "<style" not in drawn and 'role="img" aria-label="title"' in drawn


def test_a_report_is_written_from_a_run(tmp_path: Path) -> None:
    """It is one private file, with the digest of the results in it."""
    found, entries = rich_audit()
    results_file = tmp_path / "results.json"
    results_file.write_text(json.dumps(to_json(found)), encoding="utf-8")
    (tmp_path / "journal.jsonl").write_text("".join(entry.model_dump_json() + "\n" for entry in entries))
    path = write_report(tmp_path, now=NOW)
    assert path == tmp_path / "report.html"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    page = path.read_text(encoding="utf-8")
    assert hashlib.sha256(results_file.read_bytes()).hexdigest() in page
    assert BANNERS[TextMode.MASKED] in page
    with pytest.raises(RedactionError, match="the policy does not allow it"):
        write_report(tmp_path, TextMode.FULL, now=NOW)
    full = write_report(
        tmp_path, TextMode.FULL, now=NOW, output=tmp_path / "full.html", allow_full=True, allow_full_in_ci=True
    )
    assert "ordinary and ordinary" not in full.read_text() and "ordinary" in full.read_text()


def test_a_run_is_summed_up_on_the_terminal(tmp_path: Path) -> None:
    """From the files of the run; without a verdict the message says what writes one."""
    found, _ = rich_audit()
    (tmp_path / "results.json").write_text(json.dumps(to_json(found)))
    with pytest.raises(ResultsError, match=r"verdict\.json: cannot be read; `leakaudit gate` writes one"):
        print_summary(tmp_path)
    verdict = gate.evaluate(found, policy(), now=NOW)
    (tmp_path / "verdict.json").write_text(json.dumps(verdict_json(verdict)))
    out = io.StringIO()
    print_summary(tmp_path, Console(file=out, width=200))
    assert verdict.sentence in out.getvalue() and str(tmp_path / "report.html") in out.getvalue()
    assert "text leaked, 2 of 4 steps" in out.getvalue()


def test_a_quiet_verdict_is_one_line() -> None:
    """For scripts that show it to people."""
    out = io.StringIO()
    verdict = gate.evaluate(audit(7, 53), policy(), now=NOW)
    print_verdict(verdict, quiet=True, console=Console(file=out, width=40))
    assert out.getvalue() == f" FAIL  {verdict.sentence}\n"


def test_a_full_report_is_not_written_where_everybody_may_write(tmp_path: Path) -> None:
    """Somebody else could replace it."""
    found, entries = rich_audit()
    (tmp_path / "results.json").write_text(json.dumps(to_json(found)))
    (tmp_path / "journal.jsonl").write_text("".join(entry.model_dump_json() + "\n" for entry in entries))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(RedactionError, match="can be written to by everybody"):
        write_report(
            tmp_path,
            TextMode.FULL,
            now=NOW,
            output=shared / "report.html",
            allow_full=True,
            allow_full_in_ci=True,
        )


@pytest.mark.parametrize("n", [0, 1, 2, 59, 1000])
def test_the_page_stays_small(n: int) -> None:
    """Within the budgets of the design: 60 KiB for one step, 600 KiB for a thousand."""
    found = audit(n // 10, n - n // 10)
    page = render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW)))
    assert len(page.encode()) < (60 if n <= 1 else 600) * 1024


def test_reports_are_made_without_torch() -> None:
    """On any machine of a CI."""
    code = "import sys, leakaudit.reports; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_every_stamp_says_its_number_and_why() -> None:
    """Factor and noise stand in the stamp, and what is known of them beside it."""
    stamps = [
        scores.Verification(status=VerificationStatus.VERIFIED, relative_error=1e-7, scale=1.0),
        scores.Verification(status=VerificationStatus.SCALED, scale=0.25, note="as if clipped to a norm of 1"),
        scores.Verification(status=VerificationStatus.NOISED, sigma=0.000251, scale=1.0, note="as declared"),
        scores.Verification(
            status=VerificationStatus.VERIFIED, note="the declared dp-sgd is not in the update: it was sent undefended"
        ),
    ]
    steps = [step(number).model_copy(update={"verification": stamp}) for number, stamp in enumerate(stamps)]
    found, _ = rich_audit()
    found = found.model_copy(update={"steps": tuple(steps)})
    page = render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW)))
    for shown in (
        "verified</td>",
        "scaled(0.25): as if clipped to a norm of 1",
        "noised(0.000251): as declared",
        "verified: the declared dp-sgd is not in the update: it was sent undefended",
    ):
        assert shown in page
