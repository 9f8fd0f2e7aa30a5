"""The reports of `examples/reports` are as their command writes them."""

from __future__ import annotations

import pytest

from leakaudit.reports.wording import BANNERS
from leakaudit.results.schema import TextMode
from tests.benchmarks.example_reports import EXAMPLES, FOLDER, page_of

VERDICTS = {
    "pass": "PASS",
    "fail_texts": "FAIL",
    "fail_labels": "FAIL",
    "inconclusive": "INCONCLUSIVE",
    "error": "ERROR",
    "frontier": "FAIL",
}
MOST_BYTES = 300_000
"""Size of one report; our choice, so that the folder stays a small part of a checkout."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_report_is_as_its_command_writes_it(name: str) -> None:
    """If the page was changed, the command writes the reports again."""
    page = (FOLDER / f"{name}.html").read_text(encoding="utf-8")
    made = page_of(name)
    assert page == made, "run `python -m tests.benchmarks.example_reports` and commit examples/reports"
    assert f"<title>{VERDICTS[name]}: " in page and len(page.encode()) < MOST_BYTES
    assert BANNERS[TextMode.MASKED] in page and BANNERS[TextMode.FULL] not in page


def test_every_report_stands_in_the_readme() -> None:
    """The folder holds no other report."""
    said = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {path.stem for path in FOLDER.glob("*.html")} == set(EXAMPLES) == set(VERDICTS)
    for name, verdict in VERDICTS.items():
        assert f"| [{name}.html]({name}.html) | {verdict} |" in said


def test_the_report_of_several_defences_has_the_frontier() -> None:
    """Its panel draws every defence, and names one that passes."""
    page = page_of("frontier")
    panel = page.partition('<section id="frontier"')[2].partition("</section>")[0]
    assert panel.count("<svg") >= 1 and "gaussian-noise" in panel and "freeze-embeddings" in panel
    assert 'id="frontier"' not in page_of("pass")
