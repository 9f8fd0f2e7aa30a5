"""Pages of measurements: each section says how to repeat it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.page import Facts, numbers_of_rows, section, with_section

ROOT = Path(__file__).parents[2]
FACTS = Facts("python -m x", "abc", "2026-01-01", "1, 2", "48", "torch 2", "2 CPU cores")
PAGES = sorted((ROOT / "docs" / "measurements").glob("*.md"))


def test_a_section_is_replaced_by_its_name_and_the_rest_stays() -> None:
    """A second run of the same measurement leaves one section."""
    page = with_section("# Title\n\nText.\n", "One", section("One", FACTS, "| first |"))
    page = with_section(page, "Two", section("Two", FACTS, "| other |"))
    page = with_section(page, "One", section("One", FACTS, "| second |"))
    assert page.startswith("# Title\n\nText.")
    assert "first" not in page
    assert page.index("second") < page.index("other")


def test_a_section_says_how_to_repeat_it() -> None:
    """Command, commit, date, seeds and n stand before the table."""
    written = section("One", FACTS, "| x |")
    for fact in ("command: python -m x", "commit: abc", "date: 2026-01-01", "seeds: 1, 2", "n: 48"):
        assert fact in written


def test_without_a_column_n_the_text_says_it() -> None:
    """Not every benchmark prints a table with n."""
    assert numbers_of_rows("nothing here") == "see the text"


def test_a_benchmark_writes_its_page(tmp_path: Path) -> None:
    """The page has what the module prints, and no absolute path."""
    (tmp_path / "bench.py").write_text(
        "import sys; sys.stdout.isatty(); sys.stdout.flush()\nprint('seeds [3, 4]\\n| B | n |\\n| - | - |\\n| 1 | 7 |')"
    )
    page = tmp_path / "page.md"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.benchmarks.page",
            str(page),
            "--section",
            "S",
            "--",
            "bench",
            str(tmp_path / "data"),
        ],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "seeds: 3, 4" in text
    assert "n: 7" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_page_names_its_command(page: Path) -> None:
    """A figure without a command is no measurement."""
    text = page.read_text(encoding="utf-8")
    assert "command: " in text
    assert "n: " in text
    assert "seeds: " in text
