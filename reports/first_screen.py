"""The first screen of a report for a notebook: verdict, sentence and three tiles.

It stands inside the page of a notebook, so it has no style sheet, no id and no script. Text has the notebook's own colour; only marks are
coloured, in tones that are seen on a light and on a dark page.
"""

from __future__ import annotations

from markupsafe import Markup

from leakaudit.reports.charts import CLEAN, LATE, LEAK
from leakaudit.reports.page import templates
from leakaudit.reports.redaction import RedactedResult, banner_of
from leakaudit.reports.svg import BAND, INK, MUTED
from leakaudit.reports.tiles import tiles
from leakaudit.reports.wording import meaning, rounded

TONES = {"leak": "#d0453f", "clean": "#2b8a57", "open": "#b3741d", "muted": "#808080"}
"""State of a tile -> colour of its marks. Each has a contrast of at least 3 to 1 on white and on #111111, which WCAG 2.2 asks for marks."""

_STATES = {"PASS": "clean", "FAIL": "leak", "INCONCLUSIVE": "open", "ERROR": "muted"}

_ON_ANY_PAGE = {
    INK: "currentColor",
    LEAK: TONES["leak"],
    CLEAN: TONES["clean"],
    LATE: TONES["open"],
    MUTED: TONES["muted"],
    BAND: TONES["muted"],
}
"""Colour of a picture on the report's own paper -> colour on a page that is light or dark."""


def first_screen(redacted: RedactedResult) -> str:
    """Return the first screen as a piece of HTML."""
    results, verdict = redacted.results, redacted.verdict
    shown = [(tile, _on_any_page(tile.picture)) for tile in tiles(results, verdict)]
    page = templates().get_template("first_screen.html.j2")
    return page.render(
        banner=banner_of(redacted),
        meaning=meaning(verdict),
        run=results.run.id,
        subject=f"{results.subject.model}, {rounded(results.subject.parameters)} parameters",
        tiles=shown,
        tone=TONES[_STATES[verdict.verdict.value]],
        tones=TONES,
        verdict=verdict,
    )


def _on_any_page(picture: Markup | None) -> Markup:
    drawn = str(picture or "")
    for paper, anywhere in _ON_ANY_PAGE.items():
        drawn = drawn.replace(f'"{paper}"', f'"{anywhere}"')
    return Markup(drawn)
