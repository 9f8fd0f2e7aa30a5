"""The index over many audits: worst first, honest about what it cannot read."""

from __future__ import annotations

import hashlib
import html
import json
import re
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from leakaudit.cli import main
from leakaudit.errors import ResultsError
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.verdict import to_json as verdict_json
from leakaudit.reports.audit_index import IndexRow, index_rows, render_index, write_index
from leakaudit.results.schema import Results
from tests.support.factories import NOW, audit, changed, policy
from tests.support.nights_folder import write_audit


def place(folder: Path, found: Results, *, report: bool = True) -> Path:
    """Write an audit with its verdict, and return the folder."""
    write_audit(folder, found)
    sha256 = hashlib.sha256((folder / "results.json").read_bytes()).hexdigest()
    verdict = evaluate(found, policy(), now=NOW, results_sha256=sha256)
    (folder / "verdict.json").write_text(json.dumps(verdict_json(verdict)), encoding="utf-8")
    if report:
        (folder / "report.html").write_text("<p>", encoding="utf-8")
    return folder


@pytest.fixture
def audits(tmp_path: Path) -> Path:
    """Return a folder with audits of every verdict, at different depths."""
    place(tmp_path / "clean", audit(0, 80))
    place(tmp_path / "nights/nights/2026-11-01T0000Z", audit(20, 60))
    place(tmp_path / "nights/nights/2026-11-02T0000Z", audit(40, 40))
    place(tmp_path / "short", audit(0, 3), report=False)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/results.json").write_text("{", encoding="utf-8")
    return tmp_path


def rows(folder: Path) -> list[IndexRow]:
    """Return the rows of a folder."""
    return index_rows(folder, folder / "index.html", now=NOW)


def test_the_worst_audit_comes_first(audits: Path) -> None:
    """With the same verdict, the higher leak rate."""
    found = [(str(row.folder), row.status.value) for row in rows(audits)]
    assert found == [
        ("broken", "ERROR"),
        ("nights/nights/2026-11-02T0000Z", "FAIL"),
        ("nights/nights/2026-11-01T0000Z", "FAIL"),
        ("short", "INCONCLUSIVE"),
        ("clean", "PASS"),
    ]


def test_a_row_has_the_figures_of_the_deciding_rule_and_the_report(audits: Path) -> None:
    """Links count from the folder of the page."""
    row = next(row for row in rows(audits) if row.folder.name == "2026-11-01T0000Z")
    assert (row.steps, row.seen, row.rule) == ("80", "20 of 80 (25%)", "sentence-rate")
    assert row.model == "BertForSequenceClassification, 22 M parameters"
    assert row.report == "./nights/nights/2026-11-01T0000Z/report.html"
    elsewhere = index_rows(audits / "nights", audits / "pages/index.html", now=NOW)
    assert "./../nights/nights/2026-11-01T0000Z/report.html" in {row.report for row in elsewhere}
    assert next(row for row in rows(audits) if row.folder.name == "short").report == ""


def test_a_verdict_on_other_results_is_no_verdict(audits: Path) -> None:
    """Neither is one that cannot be read."""
    write_audit(audits / "clean", audit(80, 0))
    (audits / "short/verdict.json").write_text("no", encoding="utf-8")
    found = {str(row.folder): row for row in rows(audits)}
    assert (found["clean"].status.value, "belongs to other results" in found["clean"].sentence) == ("ERROR", True)
    assert (found["short"].status.value, "cannot be read" in found["short"].sentence) == ("ERROR", True)


def test_a_run_that_was_not_audited_is_an_error(audits: Path) -> None:
    """The results of an earlier run in its folder say nothing."""
    note = {"schema": "leakaudit.not_audited/1.0", "because": "no step was kept", "when": "2026-11-02T10:00:00Z"}
    (audits / "clean/not_audited.json").write_text(json.dumps(note), encoding="utf-8")
    row = next(row for row in rows(audits) if row.folder.name == "clean")
    assert (row.status.value, "no step was kept" in row.sentence) == ("ERROR", True)


def test_evidence_that_became_too_old_is_named(audits: Path) -> None:
    """A PASS of last year is shown with that."""
    later = index_rows(audits, audits / "index.html", now=NOW + timedelta(days=400))
    assert all("too old" in row.sentence for row in later if row.folder.name != "broken")
    assert not any("too old" in row.sentence for row in rows(audits))


def test_the_page_opens_offline_and_escapes_names(audits: Path) -> None:
    """No script, no address elsewhere; a hostile name of a folder stays text."""
    hostile = "a<img src=x onerror=alert(1)>\u202e"
    place(audits / hostile, changed(audit(1, 1)))
    page = render_index(rows(audits), now=NOW)
    assert "<img" not in page and "\u202e" not in page
    assert "<script" not in page and "http://" not in page and "https://" not in page
    addresses = re.findall(r'<a href="([^"#][^"]*)"', page)
    assert len(addresses) == 4 and all(address.startswith("./") for address in addresses)
    assert "default-src 'none'" in html.unescape(page)


def test_the_command_writes_the_page(audits: Path) -> None:
    """Its line names the worst verdict; a spool is not searched."""
    (audits / "clean/spool").mkdir()
    (audits / "clean/spool/results.json").write_text("{", encoding="utf-8")
    done = CliRunner().invoke(main, ["index", str(audits)])
    assert (done.exit_code, "5 audits, the worst is ERROR" in done.output) == (0, True)
    assert (audits / "index.html").read_text(encoding="utf-8").count("<tr>") == 6


def test_a_folder_without_audits_is_refused(tmp_path: Path) -> None:
    """And one that does not exist."""
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ResultsError):
            write_index(folder, tmp_path / "index.html", now=NOW)
    assert not (tmp_path / "index.html").exists()
