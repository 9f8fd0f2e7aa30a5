"""What a section of the report is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_ROWS = 200
"""Rows of a table of steps. Our choice: a browser shows them at once, and a reader does not read more."""


@dataclass(frozen=True)
class Section:
    """One section of the report.

    `templates/sections/<anchor>.html.j2` prints its context.
    """

    anchor: str
    """Name of the section's file, of its template, and of its place in the page."""
    title: str
    """Entry in the list of contents."""
    context: Mapping[str, Any]
    """What the template prints, by name."""
    heading: str = ""
    """Heading above the section; the title where it is empty."""
