"""Prints size, length and load time of reports on invented audits.

    python -m tests.benchmarks.page docs/measurements/report_size.md --section "One page" -- tests.benchmarks.report_size --steps 1,6

Heights are those of the page in a frame of 1,280 and of 390 pixels in a headless Chromium, with everything folded as on opening. The copy that
is measured has no content security policy, because a script in it tells the height. "ms to load" is the time from the start of loading the
local file to its load event, in the wider frame.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from pathlib import Path

from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import default_policy
from leakaudit.reports import redact, render_html
from leakaudit.results.schema import Attempt, AttemptStatus, Coverage, NotTested, Results
from tests.support.factories import NOW, attempt, results, step

WIDTHS = (1280, 390)

_TELL = """<script>addEventListener("load", () => setTimeout(() => parent.postMessage([document.documentElement.scrollHeight,
performance.getEntriesByType("navigation")[0].loadEventStart], "*"), 0))</script></body>"""

_FRAME = """<!DOCTYPE html><body><script>addEventListener("message", (said) => document.body.dataset.said = said.data.join(" "))</script>
<iframe src="page.html" style="width: {width}px; height: 800px; border: 0"></iframe></body>"""


def invented(steps: int, attacks: int, defenses: int) -> Results:
    """Return an audit with attempts that leak, do not apply and are late."""
    tried = [_attempt(s, i, j) for s in range(steps) for i in range(attacks) for j in range(defenses)]
    gaps = (
        NotTested(what="malicious server", why="the battery only reads updates of honest training"),
        NotTested(what="aggregated updates", why="one client's update was audited"),
    )
    unused = (NotTested(what="another-attack", why="known to the tool, not in this battery"),)
    coverage = Coverage(audited_steps=steps, total_steps=10 * steps, not_tested=gaps, not_run=unused)
    return results([step(i) for i in range(steps)], tried, coverage=coverage)


def _attempt(number: int, attack: int, defense: int) -> Attempt:
    status = AttemptStatus.RAN
    if (attack + defense) % 7 == 6:
        status = AttemptStatus.NOT_APPLICABLE
    elif (attack + defense) % 9 == 8:
        status = AttemptStatus.BUDGET_EXHAUSTED
    leaks = (
        status is AttemptStatus.RAN and (attack + defense) % 3 == 0 and defense < 4 and (7 * number + attack) % 5 != 4
    )
    kind = ("text", "bag", "text", "labels")[attack % 4]
    under = f"defence-{defense}(strength=0.{defense})" if defense else "none"
    return attempt(number, f"attack-{attack}", under, kind=kind, status=status, leaks=leaks)


def measured(page: str, browser: str) -> tuple[list[int], float]:
    """Return the heights of a page in pixels, one a width.

    The second value is the milliseconds to load it.
    """
    heights, load = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        copy = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", _TELL)
        Path(folder, "page.html").write_text(copy, encoding="utf-8")
        for width in WIDTHS:
            frame = Path(folder, "frame.html")
            frame.write_text(_FRAME.format(width=width), encoding="utf-8")
            words = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width + 200},900"]
            words += ["--virtual-time-budget=5000", "--dump-dom", frame.as_uri()]
            printed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout
            said = re.search(r'data-said="(\d+) ([\d.]+)"', printed)
            if said is None:
                raise SystemExit(f"{browser} did not tell the height of the page; is it a Chromium?")
            heights.append(int(said[1]))
            load = load or float(said[2])
    return heights, load


def main() -> None:
    """Print one row for each audit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", default="1,6,1000")
    parser.add_argument("--attacks", type=int, default=10)
    parser.add_argument("--defenses", type=int, default=10)
    parser.add_argument("--browser", default="chromium")
    options = parser.parse_args()
    print(f"{options.attacks} attacks x {options.defenses} defences, the built-in policy, text mode masked\n")
    print("| n | KiB | words | px high at 1,280 | px high at 390 | ms to load | s to render |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for n in map(int, options.steps.split(",")):
        found = invented(n, options.attacks, options.defenses)
        shown = redact(found, [], gate.evaluate(found, default_policy(), now=NOW))
        began = time.monotonic()
        page = render_html(shown)
        seconds = time.monotonic() - began
        heights, load = measured(page, options.browser)
        words = len(re.sub(r"<(style|svg).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL).split())
        print(
            f"| {n} | {len(page.encode()) / 1024:.0f} | {words} | {heights[0]} | {heights[1]} | {load:.0f} | {seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
