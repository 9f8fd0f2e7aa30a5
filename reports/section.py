"""The type of a section of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_ROWS = 200
"""Most rows of a table of steps. Our choice: a browser shows them without delay, and nobody reads more."""


@dataclass(frozen=True)
class Section:
    """One section of the report.

    The template `templates/sections/<anchor>.html.j2` prints its context.
    """

    anchor: str
    """Name of the section's module, of its template and of its HTML anchor."""
    title: str
    """Entry in the list of contents."""
    context: Mapping[str, Any]
    """Variables of the template, by name."""
    heading: str = ""
    """Heading above the section; if it is empty, the title is used."""
    urgent: bool = False
    """Whether it stays open where other sections are closed, because it holds a finding."""
