"""The page in a real browser: accessible, nothing cut off, no request, no script.

The browser is Chromium as the system has it (`chromium`, `chromium-browser` or `google-chrome` on the path), driven by Playwright; axe-core is
the copy in `axe-playwright-python`. Without one of the three every test here is skipped and says which one is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from leakaudit.gate import evaluate as gate
from leakaudit.gate.verdict import Status
from leakaudit.reports import redact, render_html
from leakaudit.results.schema import Results, TextMode
from tests.benchmarks.report_size import invented
from tests.gate.test_way_out import utility
from tests.reports.test_frontier import audited, leaking
from tests.reports.test_page import shown
from tests.reports.test_trend import RUN, page_of
from tests.support.factories import NOW, audit, policy, results, step
from tests.support.nights import thirty_nights

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
axe = pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python, which holds axe-core")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on the path"),
]

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
LOOKS: dict[str, dict[str, str]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "forced colours": {"forced_colors": "active"},
}
WIDTHS = (1280, 390)

OPEN = "for (const one of document.querySelectorAll('details')) one.open = true"

CUT_OFF = """() => {
  const found = [];
  for (const one of document.querySelectorAll("td, th, dd, dt, li, h1, h2, h3, p, code, .tile, .next, .banner, summary"))
    if (one.clientWidth && one.scrollWidth > one.clientWidth + 1 && !one.closest(".strip"))
      found.push(one.tagName + " " + one.className + ": " + one.textContent.trim().slice(0, 60));
  for (const one of document.querySelectorAll("svg text")) {
    const text = one.getBoundingClientRect(), all = one.closest("svg").getBoundingClientRect();
    if (text.width && (text.left < all.left - 1 || text.right > all.right + 1 || text.top < all.top - 1 || text.bottom > all.bottom + 1))
      found.push("text of a picture: " + one.textContent);
  }
  return found;
}"""
"""Lists elements whose content is wider than they are, and texts outside their picture."""


def _judged(found: Results, mode: TextMode = TextMode.MASKED) -> str:
    return render_html(redact(found, [], gate.evaluate(found, policy(), now=NOW), mode))


PAGES: dict[str, Callable[[Path], str]] = {
    "PASS": lambda _: _judged(audit(0, 60)),
    "FAIL": lambda _: _judged(invented(6, 10, 10)),
    "INCONCLUSIVE": lambda _: _judged(audit(0, 6)),
    "ERROR": lambda _: _judged(results([step(0), step(0)], [])),
    "FAIL, every section": lambda _: render_html(shown()),
    "FAIL, full text": lambda _: render_html(shown(TextMode.FULL)),
    "FAIL, prices": lambda _: _judged(
        audited(leaking("prune", 3) | leaking("noise(scale=1)", 0), utility=(utility("prune", -0.1, (-0.2, 0.0)),))
    ),
    "FAIL, thirty nights": lambda folder: page_of(folder, thirty_nights(RUN)),
}
"""Verdict and what the page has beside it -> writer of the page."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium once for all tests."""
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write every page once."""
    written = {}
    for name, write in PAGES.items():
        folder = tmp_path_factory.mktemp("page")
        written[name] = folder / "page.html"
        written[name].write_text(write(folder), encoding="utf-8")
    return written


@contextmanager
def opened(browser: Any, page: Path, width: int = 1280, **look: Any) -> Iterator[tuple[Any, list[str]]]:
    """Open a page in a context of its own; give it and what it asked for."""
    context = browser.new_context(viewport={"width": width, "height": 800}, **look)
    tab = context.new_page()
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(page.as_uri())
    yield tab, asked
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_the_page_has_the_verdict_of_its_name(name: str, pages: dict[str, Path]) -> None:
    """The pages below are of all four verdicts."""
    assert {name.partition(",")[0] for name in PAGES} == {status.value for status in Status}
    assert f"<title>{name.partition(',')[0]}:" in pages[name].read_text(encoding="utf-8")


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(name: str, width: int, look: str, browser: Any, pages: dict[str, Path]) -> None:
    """With everything unfolded, WCAG 2.0 to 2.2, A and AA."""
    source = files(axe).joinpath("axe.min.js").read_text(encoding="utf-8")
    with opened(browser, pages[name], width, **LOOKS[look]) as (tab, _):
        tab.evaluate(OPEN)
        tab.evaluate(source)
        said = tab.evaluate("tags => axe.run({runOnly: {type: 'tag', values: tags}})", RULES)
    assert len(said["passes"]) > 10
    found = [(one["id"], node["target"], node["failureSummary"]) for one in said["violations"] for node in one["nodes"]]
    assert found == []


@pytest.mark.parametrize("unfolded", [False, True])
@pytest.mark.parametrize("width", [*WIDTHS, 320, 768, 1920])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_cut_off(name: str, width: int, unfolded: bool, browser: Any, pages: dict[str, Path]) -> None:
    """The page does not scroll sideways.

    No cell is narrower than its text, and no text leaves its picture.
    """
    with opened(browser, pages[name], width) as (tab, _):
        if unfolded:
            tab.evaluate(OPEN)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate(CUT_OFF) == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("text", ["W" * 5000, "word " * 500, "\u0645\u0631\u062d\u0628\u0627 " * 100])
def test_long_names_do_not_break_the_layout(text: str, width: int, browser: Any, tmp_path: Path) -> None:
    """In every field, full text: the page still does not scroll sideways."""
    path = tmp_path / "page.html"
    path.write_text(render_html(shown(TextMode.FULL, text)), encoding="utf-8")
    with opened(browser, path, width) as (tab, _):
        tab.evaluate(OPEN)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", PAGES)
def test_the_page_asks_for_nothing_but_itself(name: str, browser: Any, pages: dict[str, Path]) -> None:
    """No request leaves the file, even when everything is unfolded and printed."""
    with opened(browser, pages[name]) as (tab, asked):
        tab.evaluate(OPEN)
        tab.pdf()
        assert [url for url in asked if not url.startswith("data:")] == [pages[name].as_uri()]


def test_without_scripts_everything_can_be_opened(browser: Any, pages: dict[str, Path]) -> None:
    """A section unfolds, and a cell of the heat map shows its details."""
    with opened(browser, pages["FAIL"], java_script_enabled=False) as (tab, _):
        body = tab.locator("#steps svg").first
        assert not body.is_visible()
        tab.locator("#steps > details > summary").click()
        assert body.is_visible()
        cell = tab.locator(".matrix td a").first
        detail = tab.locator(cell.get_attribute("href"))
        assert not detail.is_visible()
        cell.click()
        assert detail.is_visible()


def test_the_first_screen_holds_what_decides(browser: Any, pages: dict[str, Path]) -> None:
    """Verdict, tiles, heat map, what to do and the identity fit 1,280 x 800."""
    with opened(browser, pages["FAIL"]) as (tab, _):
        for part in ("h1", ".sentence", ".tiles", ".matrix", ".next", ".facts"):
            box = tab.locator(part).first.bounding_box()
            assert box["y"] + box["height"] <= 800, part
