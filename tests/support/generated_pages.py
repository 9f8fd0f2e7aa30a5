"""Generated parts of pages."""

from __future__ import annotations

from pathlib import Path


def write_between(page: Path, begin: str, end: str, made: str) -> None:
    """Replace what stands between two marks of a page."""
    text = page.read_text(encoding="utf-8")
    before, after = text[: text.index(begin)], text[text.index(end) :]
    page.write_text(f"{before}{begin}\n{made}\n{after}", encoding="utf-8")
