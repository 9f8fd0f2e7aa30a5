"""The list of the report's sections, in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from leakaudit.errors import PluginError
from leakaudit.reports import sections
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section

ORDER = (
    "matrix",
    "trend",
    "rules",
    "risk",
    "steps",
    "samples",
    "labels",
    "defences",
    "secrets",
    "frontier",
    "membership",
    "conformance",
    "confidence",
    "coverage",
    "cost",
    "provenance",
    "glossary",
)
"""Modules of `sections/`, in the order of the page."""


def sections_of(redacted: RedactedResult) -> list[Section]:
    """Return the sections that have something to show."""
    found = [section(redacted) for section in section_functions()]
    return [section for section in found if section is not None]


@cache
def section_functions() -> tuple[Callable[[RedactedResult], Section | None], ...]:
    """Return the function `section` of every module in `ORDER`.

    Raises:
        PluginError: a file of the folder is not in `ORDER`.
    """
    unlisted = {module.name for module in iter_modules(sections.__path__)} - {*ORDER}
    if unlisted:
        raise PluginError(
            f"reports/sections/{min(unlisted)}.py is not in ORDER (reports/contents.py), so no report would show it"
        )
    return tuple(import_module(f"{sections.__name__}.{name}").section for name in ORDER)
