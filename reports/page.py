"""The report: one HTML file that opens offline, loads nothing and needs no script.

`redaction.py` decides what the report may show, `leakaudit.gate` gives the verdict, and each file of `sections/` fills one section.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import stat
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from leakaudit.errors import RedactionError
from leakaudit.files.private_files import write_atomic
from leakaudit.files.regular_files import read_regular
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.policy import Policy, default_policy
from leakaudit.gate.verdict import Verdict
from leakaudit.history.saved_trend import load_trend
from leakaudit.reports.contents import ORDER, sections_of
from leakaudit.reports.escaping import finalize, plain
from leakaudit.reports.header import facts, headline, identity
from leakaudit.reports.next_actions import next_actions
from leakaudit.reports.redaction import RedactedResult, banner_of, redact
from leakaudit.reports.section import Section
from leakaudit.reports.strips import strip_in_words, strip_runs
from leakaudit.reports.tiles import tiles
from leakaudit.reports.wording import date_and_time, meaning, rounded
from leakaudit.results.files import load_results
from leakaudit.results.journal import load_journal
from leakaudit.results.schema import LENGTHS, TextMode

_FOLDER = Path(__file__).parent / "templates"

_HEAT_MAP = "matrix"
"""Anchor of the section that stands on the first screen."""

_FOLDED = frozenset(ORDER) - {_HEAT_MAP, "trend", "rules", "coverage"}
"""Anchors of sections that are closed on a screen and open on paper: they answer questions that come after the decision."""


def render_html(redacted: RedactedResult) -> str:
    """Return the report as one HTML document.

    The same input always gives the same text: the page does not use a clock, random ids or the locale.
    """
    css = packed(style(banner_of(redacted)))
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    csp = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    return templates().get_template("report.html.j2").render(page=_page(redacted) | {"css": Markup(css), "csp": csp})


def write_report(
    run_dir: Path,
    mode: TextMode | None = None,
    *,
    now: datetime,
    policy: Policy | None = None,
    verdict: Verdict | None = None,
    output: Path | None = None,
    allow_full: bool = False,
    allow_full_in_ci: bool = False,
) -> Path:
    """Write the report of the run in `run_dir`; only its owner can read the file.

    Args:
        run_dir: folder with `results.json`, for mode full `journal.jsonl`, and after several nights `trend.json`.
        mode: how much text to show; the policy's choice if None.
        now: the time of judgement, with time zone; used only if no verdict is given.
        policy: the rules; the built-in policy if None.
        verdict: the verdict, if it exists already; None to evaluate `policy`.
        output: the file; `run_dir/report.html` if None.
        allow_full: permits mode full even if the policy does not.
        allow_full_in_ci: permits mode full in CI as well.

    Returns:
        Path of the report.

    Raises:
        ResultsError: the results or the journal cannot be read.
        RedactionError: mode full is not permitted, has no text, or its folder is writable by everybody.
    """
    policy = policy or default_policy()
    mode = mode or policy.report.text
    target = output or run_dir / "report.html"
    results = load_results(run_dir / "results.json")
    if verdict is None:
        digest = hashlib.sha256(read_regular(run_dir / "results.json")).hexdigest()
        verdict = evaluate(results, policy, now=now, results_sha256=digest)
    redacted = redact(
        results,
        load_journal(run_dir / "journal.jsonl") if mode is TextMode.FULL else [],
        verdict,
        mode,
        allow_full=allow_full or policy.report.allow_full,
        allow_full_in_ci=allow_full_in_ci,
        top_samples=policy.report.top_samples,
        trend=load_trend(run_dir),
        folder=run_dir,
    )
    if mode is TextMode.FULL:
        refuse_open_folder(target)
    write_atomic(target, render_html(redacted))
    return target


def refuse_open_folder(target: Path) -> None:
    """Refuse to write training text into a folder that everybody can write to.

    Raises:
        RedactionError: everybody can.
    """
    if os.name == "posix" and target.parent.stat().st_mode & stat.S_IWOTH:
        raise RedactionError(f"{target.parent} can be written to by everybody; write a full report somewhere private")


@cache
def templates() -> Environment:
    """Return the environment of all templates, which escapes every text."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": plain, "strip_in_words": strip_in_words, "strip_runs": strip_runs}
    return environment


@cache
def style(banner: str) -> str:
    """Return the style sheet.

    It prints the start of the banner, which says how to handle the report, on every page.
    """
    margin = banner.partition(":")[0]
    pages = f'@page {{ margin: 18mm 16mm; @top-center {{ content: "{margin}"; font: 600 8pt sans-serif }} '
    pages += '@bottom-right { content: counter(page) " / " counter(pages); font: 8pt sans-serif } }\n'
    return (_FOLDER / "style.css").read_text(encoding="utf-8") + pages


def packed(css: str) -> str:
    """Return a style sheet without comments and needless blanks.

    Texts in quotes stay as they are.

    >>> packed('/* why */ a > b { color: red; content: "a: b" }')
    'a > b{color:red;content:"a: b"}'
    """
    parts = re.split(r'("[^"]*")', re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL))
    outside = [re.sub(r"\s*([{};,])\s*", r"\1", re.sub(r"\s+", " ", part).replace(": ", ":")) for part in parts[::2]]
    return "".join(x for pair in zip(outside, [*parts[1::2], ""], strict=True) for x in pair).strip()


def _page(redacted: RedactedResult) -> dict[str, Any]:
    """Return the variables of the template of the whole page."""
    results, verdict = redacted.results, redacted.verdict
    sections = [_rendered(section) for section in sections_of(redacted)]
    return {
        "mode": redacted.mode.value,
        "banner": banner_of(redacted),
        "handling": "invented" if results.subject.data_invented else redacted.mode.value,
        "run": results.run,
        "verdict": verdict,
        "subject": f"{results.subject.model}, {rounded(results.subject.parameters)} parameters",
        "when": f", finished {date_and_time(results.run.finished)}" if results.run.finished else "",
        "meaning": meaning(verdict),
        "headline": headline(verdict),
        "facts": [*identity(results), *facts(results, verdict)],
        "tiles": tiles(results, verdict),
        "actions": next_actions(results, verdict),
        "heat": next((section for section in sections if section["anchor"] == _HEAT_MAP), None),
        "sections": [section for section in sections if section["anchor"] != _HEAT_MAP],
        "sources": "results.json and the private journal" if redacted.mode is TextMode.FULL else "results.json alone",
        "lengths": LENGTHS,
    }


def _rendered(section: Section) -> dict[str, Any]:
    template = templates().get_template(f"sections/{section.anchor}.html.j2")
    return {
        "anchor": section.anchor,
        "title": section.title,
        "heading": section.heading or section.title,
        "folded": section.anchor in _FOLDED and not section.urgent,
        "body": Markup(template.render(section.context)),
    }
