"""The index of many audits: one HTML page with a row for each, worst first.

It holds numbers, names of folders and of models, and links to the reports. It opens offline and needs no script.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from pydantic import ValidationError

from leakaudit.errors import ResultsError
from leakaudit.files.private_files import write_atomic
from leakaudit.files.strict_json import read_bounded
from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.gate.wording import number, percent
from leakaudit.reports.page import style, templates
from leakaudit.reports.wording import BANNERS, date_and_time, rounded, rule_bounds
from leakaudit.results.files import read_results
from leakaudit.results.not_audited import NOT_AUDITED
from leakaudit.results.schema import TextMode

WORST_FIRST = (Status.ERROR, Status.FAIL, Status.INCONCLUSIVE, Status.PASS)

NEVER_ENTERED = frozenset({"spool", "history"})
"""Folders without audits: a spool may hold thousands of snapshots, and a history has records only."""


@dataclass(frozen=True)
class IndexRow:
    """One audit in the index."""

    folder: Path
    status: Status
    sentence: str
    """The verdict in numbers, or why there is none."""
    finished: str = ""
    """When the audit ended, in ISO 8601; empty if unknown."""
    model: str = ""
    steps: str = "unknown"
    rule: str = ""
    """The rule that decides the verdict."""
    seen: str = "no evidence"
    bounds: str = "none"
    rate: float = 0.0
    """What the rule observed; it orders audits with the same verdict."""
    report: str = ""
    """Address of the report, relative to the index; empty if there is none."""

    @property
    def day(self) -> str:
        """The day on which the audit ended."""
        return date_and_time(self.finished).partition(" ")[0]

    @property
    def time(self) -> str:
        """The time of day at which the audit ended, with its zone; empty if unknown."""
        return date_and_time(self.finished).partition(" ")[2]


def audits_below(folder: Path) -> list[Path]:
    """Return the folders of audits in and below a folder, without following links.

    A folder whose latest run was not audited counts as well.
    """
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - NEVER_ENTERED)
        if {"results.json", NOT_AUDITED} & set(files):
            found.append(Path(place))
    return found


def index_rows(folder: Path, output: Path, *, now: datetime) -> list[IndexRow]:
    """Return the rows of all audits below a folder, worst first.

    Audits with the same verdict are ordered by what the deciding rule observed, then by time, newest first.

    Args:
        folder: the folder.
        output: the page; links count from its folder.
        now: the time, with time zone; evidence may be too old by then.
    """
    rows = [_row(place, folder, output, now) for place in audits_below(folder)]
    newest_first = sorted(sorted(rows, key=lambda row: str(row.folder)), key=lambda row: row.finished, reverse=True)
    return sorted(newest_first, key=lambda row: (WORST_FIRST.index(row.status), -row.rate))


def write_index(folder: Path, output: Path, *, now: datetime) -> Sequence[IndexRow]:
    """Write the index of all audits below a folder; only its owner can read it.

    Args:
        folder: the folder.
        output: the HTML file.
        now: the time, with time zone.

    Returns:
        The rows, worst first.

    Raises:
        ResultsError: there is no such folder, or no audit in it.
    """
    if not folder.is_dir():
        raise ResultsError(f"{folder}: no such folder; give the folder that holds the audits")
    rows = index_rows(folder, output, now=now)
    if not rows:
        raise ResultsError(f"{folder}: no results.json in it or below; `leakaudit simulate` or a callback writes one")
    write_atomic(output, render_index(rows, now=now))
    return rows


def render_index(rows: Sequence[IndexRow], *, now: datetime) -> str:
    """Return the page of rows as one HTML document."""
    css = style(BANNERS[TextMode.HASH])
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    counts = Counter(row.status for row in rows)
    page = {
        "css": Markup(css),
        "csp": f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'",
        "banner": BANNERS[TextMode.HASH],
        "worst": rows[0].status.value,
        "counts": [(status.value, counts[status]) for status in WORST_FIRST if counts[status]],
        "total": len(rows),
        "when": date_and_time(now.isoformat(timespec="minutes")),
        "rows": rows,
    }
    return templates().get_template("index.html.j2").render(page=page)


def _row(place: Path, root: Path, output: Path, now: datetime) -> IndexRow:
    """Return the row of one audit; what cannot be read is an ERROR with its reason."""
    name = place.relative_to(root)
    try:
        results, sha256 = read_results(place)
    except ResultsError as error:
        why = str(error).removeprefix(f"{place}/").removeprefix(f"{place}: ").removeprefix("results.json: ")
        return IndexRow(name, Status.ERROR, f"The results cannot be used: {why}")
    made = IndexRow(
        name,
        Status.ERROR,
        "",
        finished=results.run.finished,
        model=f"{results.subject.model}, {rounded(results.subject.parameters)} parameters",
        steps=_steps(len(results.steps), results.coverage.total_steps),
        report=_link(place / "report.html", output),
    )
    try:
        verdict = Verdict.model_validate_json(read_bounded(place / "verdict.json"))
    except (OSError, ValidationError, ValueError):
        return replace(made, sentence="verdict.json cannot be read; `leakaudit gate` judges the results again.")
    if verdict.results_sha256 != sha256:
        return replace(made, sentence="verdict.json belongs to other results; `leakaudit gate` judges these.")
    rule = next((one for one in verdict.rules if one.id == verdict.deciding_rule), next(iter(verdict.rules), None))
    judged = replace(made, status=verdict.verdict, sentence=" ".join(_sentences(verdict, now)))
    return judged if rule is None else replace(judged, **_figures(rule))


def _figures(rule: RuleVerdict) -> dict[str, Any]:
    """Return what a rule observed, as the fields of a row."""
    if rule.observed is None or not rule.n:
        return {"rule": rule.id}
    if rule.k is None:
        return {"rule": rule.id, "seen": number(rule.observed), "bounds": rule_bounds(rule), "rate": rule.observed}
    rate = rule.k / rule.n
    seen = f"{rule.k} of {rule.n} ({percent(rate)})"
    return {"rule": rule.id, "seen": seen, "bounds": rule_bounds(rule), "rate": rate}


def _sentences(verdict: Verdict, now: datetime) -> Iterable[str]:
    yield verdict.sentence
    yield from _too_old(verdict, now)


def _too_old(verdict: Verdict, now: datetime) -> Iterator[str]:
    """Yield a sentence if the evidence is too old, or has no readable time."""
    if verdict.valid_until is None:
        return
    try:
        old = datetime.fromisoformat(verdict.valid_until) <= now
    except (ValueError, TypeError):
        old = True
    if old:
        yield f"The evidence is too old since {date_and_time(verdict.valid_until)}; the verdict may no longer hold."


def _steps(audited: int, total: int | None) -> str:
    return f"{audited} of {total}" if total and total != audited else str(audited)


def _link(report: Path, output: Path) -> str:
    """Return the address of a report from the folder of the index; empty without one."""
    if not report.is_file():
        return ""
    return "./" + quote(Path(os.path.relpath(report.absolute(), output.absolute().parent)).as_posix())
