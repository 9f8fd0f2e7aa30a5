"""`make demo`, with a shorter training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leakaudit.reports.wording import banner
from leakaudit.results.files import load_results
from leakaudit.results.schema import TextMode
from tests.house.test_packaging import ROOT

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1200)]
PRINTED = "read out of an update, word for word (the notes are invented): "


@pytest.mark.parametrize("masked", [False, True])
def test_the_demo_shows_its_notes_unless_told_not_to(tmp_path: Path, masked: bool) -> None:
    """It attacks under two defences, prices them, and prints one recovered note."""
    quiet = {name: value for name, value in os.environ.items() if name != "CI"}
    words = [sys.executable, "examples/quickstart.py", "--steps", "3", "--out", str(tmp_path)]
    done = subprocess.run(
        [*words, *(["--masked"] if masked else [])],
        cwd=ROOT,
        check=False,
        env={**quiet, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    folder = tmp_path / "undefended"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert banner(TextMode.MASKED if masked else TextMode.FULL, invented=True) in page
    assert (PRINTED in done.stdout) is not masked
    found = load_results(folder)
    measured = {row.defense for row in found.utility} & {row.defense for row in found.prices}
    assert len(measured) == 3 and {a.defense for a in found.attempts} == measured
    assert '<section id="frontier"' in page
