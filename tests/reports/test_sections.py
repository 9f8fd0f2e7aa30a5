"""Sections of the report: each file is listed and has a template."""

from __future__ import annotations

from pathlib import Path

import pytest

from leakaudit.errors import PluginError
from leakaudit.gate import evaluate as gate
from leakaudit.reports import contents, sections
from leakaudit.reports.contents import ORDER, sections_of
from leakaudit.reports.page import render_html
from leakaudit.reports.redaction import redact
from leakaudit.results.schema import Privacy
from tests.support.factories import NOW, audit, policy

ROOT = Path(__file__).parents[2] / "reports"


def test_each_section_is_one_file_and_one_template() -> None:
    """They have the same name, and the list holds each of them once."""
    files = {path.stem for path in (ROOT / "sections").glob("*.py")} - {"__init__"}
    templates = {path.name.partition(".")[0] for path in (ROOT / "templates" / "sections").glob("*.html.j2")}
    assert sorted(ORDER) == sorted(files) == sorted(templates) == list(sections.__all__)


def test_a_file_that_is_not_listed_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever forgets the list learns where it is."""
    (tmp_path / "forgotten.py").touch()
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(tmp_path)])
    contents.section_functions.cache_clear()
    with pytest.raises(PluginError, match=r"reports/sections/forgotten\.py is not in ORDER \(reports/contents\.py\)"):
        contents.section_functions()


def test_the_list_of_contents_is_the_list_of_sections() -> None:
    """In the same order, each by the name of its file."""
    found = audit(1, 3)
    shown = redact(found, [], gate.evaluate(found, policy(), now=NOW))
    names = [section.anchor for section in sections_of(shown)]
    page = render_html(shown)
    places = [page.index(f'<section id="{name}"') for name in names]
    links = [page.index(f'<li><a href="#{name}">') for name in names]
    assert names == [name for name in ORDER if name in names]
    assert places == sorted(places) and links == sorted(links)
    assert page.count("<section id=") == len(names)


def test_the_report_repeats_an_epsilon_as_the_accountants() -> None:
    """Wrong: a page without it, or with one where no accountant is."""
    told = Privacy(epsilon=3.1, delta=1e-5, accountant="opacus rdp", origin="accountant", steps=400, sampling="poisson")
    said = "The accountant (opacus rdp) says epsilon = 3.1 at delta = 1e-05 for 400 steps. The audit does not confirm this number."
    for privacy, line in (((told,), said), ((), "no accountant: no epsilon")):
        found = audit(1, 3, privacy=privacy)
        page = render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW)))
        assert f"<dt>Differential privacy</dt><dd>{line}</dd>" in page
