"""A finished audit in a notebook: results, verdict, tables and what is shown."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import leakaudit
from leakaudit.errors import MissingPartError, ResultsError
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.verdict import Verdict
from leakaudit.gate.verdict import to_json as verdict_json
from leakaudit.notebook.columns import TABLES
from leakaudit.notebook.loaded import LoadedAudit
from leakaudit.reports.first_screen import TONES
from leakaudit.results.files import load_results, to_json
from leakaudit.results.schema import AttackEntry, AttemptStatus, Results, VerificationStatus
from tests.support.factories import attempt, audit, changed, policy, results, step

PAGE = Path(__file__).parents[2] / "docs" / "notebook.md"


def written(folder: Path, found: Results) -> Path:
    """Write results into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(to_json(found)), encoding="utf-8")
    return folder


@pytest.fixture
def leaky(tmp_path: Path) -> LoadedAudit:
    """Return an audit of 4 leaking and 2 clean steps.

    It has attempts on words and labels, too.
    """
    steps = [step(i) for i in range(6)]
    attempts = [attempt(i, leaks=i < 4) for i in range(6)]
    attempts += [
        attempt(0, "target-tokens", kind="bag", recall=0.5),
        attempt(0, "idlg", kind="labels", leaks=True),
        attempt(1, "idlg", kind="labels", status=AttemptStatus.NOT_APPLICABLE),
    ]
    entry = AttackEntry(
        label="iDLG", meaning="Guesses labels.", source="a paper", goal="labels", threat_model="a server"
    )
    found = results(steps, attempts)
    others = {name: entry.model_copy(update={"label": name, "goal": "text"}) for name in ("span", "target-tokens")}
    named = found.catalogue.model_copy(update={"attacks": {**others, "idlg": entry}})
    return leakaudit.load(written(tmp_path / "audit", changed(found, catalogue=named)))


def test_the_results_are_those_of_the_file(leaky: LoadedAudit) -> None:
    """Only how they are shown differs."""
    assert to_json(leaky.results) == to_json(load_results(leaky.folder))
    assert isinstance(leaky.verdict, Verdict) and leaky.verdict.verdict == "FAIL"


def test_a_written_verdict_is_read(tmp_path: Path) -> None:
    """It is the answer of the run's own policy, not of the built-in one."""
    folder = written(tmp_path / "audit", audit(1, 60))
    found = leakaudit.load(folder).results
    sha256 = leakaudit.load(folder).verdict.results_sha256
    mild = evaluate(found, policy(name="mild"), now=datetime.now(UTC), results_sha256=sha256)
    (folder / "verdict.json").write_text(json.dumps(verdict_json(mild)))
    assert leakaudit.load(folder).verdict.policy == "mild"
    assert verdict_json(leakaudit.load(folder).verdict) == verdict_json(mild)


@pytest.mark.parametrize("text", ["", "{}", None])
def test_a_verdict_on_other_results_is_not_taken(text: str | None, tmp_path: Path) -> None:
    """Then the built-in policy judges these results."""
    folder = written(tmp_path / "audit", audit(0, 60))
    other = evaluate(audit(0, 60), policy(name="other"), now=datetime.now(UTC), results_sha256="0" * 64)
    (folder / "verdict.json").write_text(json.dumps(verdict_json(other)) if text is None else text)
    found = leakaudit.load(folder).verdict
    assert found.policy != "other" and found.verdict == "INCONCLUSIVE"


def test_a_named_policy_judges_now(leaky: LoadedAudit) -> None:
    """Its name is in the verdict."""
    file = Path(__file__).parents[2] / "examples" / "policy.yaml"
    judged = leakaudit.load(leaky.folder / "results.json", file).verdict
    assert judged.policy != leaky.verdict.policy and judged.policy in file.read_text(encoding="utf-8")


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    """The message says what writes them."""
    with pytest.raises(ResultsError, match="no such file"):
        leakaudit.load(tmp_path)


def test_each_object_says_itself_on_one_line(leaky: LoadedAudit) -> None:
    """None of them prints pages of fields."""
    lines = [repr(leaky), repr(leaky.results), repr(leaky.verdict), str(leaky.verdict)]
    assert all("\n" not in line and len(line) < 400 for line in lines)
    assert "FAIL" in lines[0] and "6 steps" in lines[0] and lines[2] == lines[3] and lines[2].startswith("FAIL: ")


def test_the_screen_has_verdict_sentence_and_three_tiles(leaky: LoadedAudit) -> None:
    """The same from each of the three objects."""
    html = leaky._repr_html_()
    assert html == leaky.verdict._repr_html_() == leaky.results._repr_html_()
    assert all(word in html for word in ("FAIL", "Sentences", "Words", "Labels", "4 of 6", "no training text"))
    assert not re.search(
        r"<script|<style|<link|<img|\bid=|\bclass=|\bon\w+=|url\(|https?:",
        html.replace("http://www.w3.org/2000/svg", ""),
    )
    assert len(html) < 12_000


def test_the_screen_escapes_what_it_is_told(tmp_path: Path) -> None:
    """A model may be called anything."""
    found = audit(1, 1)
    hostile = found.subject.model_copy(update={"model": "<script>alert(1)</script>\u202e"})
    html = leakaudit.load(written(tmp_path / "audit", changed(found, subject=hostile)))._repr_html_()
    assert "<script" not in html and "\u202e" not in html and "&lt;script&gt;" in html


def test_its_colours_are_seen_on_light_and_dark_pages(leaky: LoadedAudit) -> None:
    """Marks need 3 to 1 on both (WCAG 2.2, 1.4.11); text has the page's own colour."""
    html = leaky._repr_html_()
    used = set(re.findall(r"#[0-9a-fA-F]{6}\b", html))
    assert used <= set(TONES.values()) and "currentColor" in html
    assert all(contrast(tone, page) >= 3.0 for tone in TONES.values() for page in ("#ffffff", "#111111"))


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, as WCAG 2.2 defines it."""

    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


# ---------------------------------------------------------------------- tables


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_its_columns_with_their_dtypes(table: str, leaky: LoadedAudit, tmp_path: Path) -> None:
    """Also where no row is."""
    pytest.importorskip("pandas")
    empty = leakaudit.load(written(tmp_path / "empty", results([], [])))
    for loaded in (leaky, empty):
        found: Any = getattr(loaded, table)
        dtypes = {name: str(kind) for name, kind in found.dtypes.items()}
        assert {c.name: c.dtype for c in TABLES[table]}.items() <= dtypes.items()
        assert {name for name in dtypes if name.startswith("score_")} == dtypes.keys() - {c.name for c in TABLES[table]}
        assert (found["run"] == loaded.results.run.id).all()


def test_the_tables_hold_what_was_measured(leaky: LoadedAudit) -> None:
    """Missing is `<NA>` and never zero."""
    pytest.importorskip("pandas")
    attempts, texts, labels = leaky.attempts, leaky.texts, leaky.labels
    assert len(leaky.runs) == 1 and leaky.runs["verdict"].tolist() == ["FAIL"]
    assert attempts.groupby("attack")["leaked"].sum()["span"] == 4
    unused = attempts[attempts["status"] == "not_applicable"].iloc[0]
    assert unused[["leaked", "score_exact", "score_rougeL"]].isna().all()
    assert texts.groupby("attack")["exact"].sum()["span"] == 4 and set(texts["attack"]) == {"span", "target-tokens"}
    assert texts[texts["attack"] == "target-tokens"]["exact"].isna().all()
    assert labels["attack"].tolist() == ["idlg", "idlg"]
    assert labels["recovered"].isna().tolist() == [False, True] and labels["score_label_accuracy"][0] == 1.0


def test_a_step_of_another_batch_has_no_row(tmp_path: Path) -> None:
    """No leakage number may be told of it."""
    pytest.importorskip("pandas")
    steps = [step(0), step(1, VerificationStatus.MISMATCH)]
    loaded = leakaudit.load(written(tmp_path / "audit", results(steps, [attempt(0), attempt(1, leaks=True)])))
    assert loaded.attempts["step"].tolist() == loaded.texts["step"].tolist() == [steps[0].id]


def test_a_reason_names_no_path(tmp_path: Path) -> None:
    """The tables are redacted as a report is."""
    pytest.importorskip("pandas")
    failed = attempt(0, status=AttemptStatus.ERROR, reason="KeyError: '/home/ann/secret' a private word")
    loaded = leakaudit.load(written(tmp_path / "audit", results([step(0)], [failed])))
    assert "secret" not in loaded.attempts.to_csv() and loaded.attempts["reason"].tolist() == ["KeyError"]


def test_without_pandas_the_error_says_what_to_install(leaky: LoadedAudit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and verdict need no pandas."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPartError, match=re.escape('pip install "leakaudit[pandas]"')):
        _ = leaky.attempts


def test_the_page_names_every_column() -> None:
    """With its dtype and its unit."""
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for column in (column for table in TABLES.values() for column in table):
        unit = f", {column.unit}" if column.unit else ""
        assert f"`{column.name}` ({column.dtype}{unit})" in page, column


def test_the_import_stays_light() -> None:
    """`import leakaudit` reads neither the gate nor pandas."""
    code = "import sys, leakaudit; print(sorted({m for m in sys.modules if m.startswith('leakaudit.')} | {'pandas'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert "load" in dir(leakaudit) or "load" in leakaudit.__all__
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        _ = leakaudit.lode
