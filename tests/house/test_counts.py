"""The house stays as it is drawn: counts that are 0 stay 0."""

from __future__ import annotations

import ast

import pytest

from tests.house.counts import KINDS, SHIPPED, Finding, circle, docstring_of, findings, findings_of_node

AT_ZERO = (
    "file in a plugin folder that is not one plugin",
    "private name across modules",
    "class over 250 lines",
    "docstring first line over 80 columns",
)


@pytest.mark.parametrize("kind", AT_ZERO)
@pytest.mark.parametrize("folders", [SHIPPED, ("tests",)], ids=["shipped", "tests"])
def test_a_count_stays_at_zero(kind: str, folders: tuple[str, ...]) -> None:
    """`python -m tests.house.counts --list` names the same places."""
    assert kind in KINDS
    assert [str(finding) for finding in findings(folders) if finding.kind == kind] == []


def test_no_rooms_import_each_other_in_a_circle() -> None:
    """Data and imports go one way."""
    assert circle() == []


def test_a_module_over_400_lines_gives_its_reason_in_its_first_lines() -> None:
    """The reason is the word "lines" in the module's docstring."""
    long = [finding.place.split(" ")[0] for finding in findings() if finding.kind == "module over 400 lines"]
    assert [place for place in long if "lines" not in docstring_of(place)] == []


def test_the_counter_finds_what_it_counts() -> None:
    """A counter that sees nothing would pass everything."""
    source = 'from leakaudit.errors import _x\n\nclass A:\n    """' + "w" * 81 + '"""\n' + "    x = 1\n" * 260
    kinds = {finding.kind for finding in findings_in(source)}
    assert {"private name across modules", "class over 250 lines", "docstring first line over 80 columns"} <= kinds


def findings_in(source: str) -> list[Finding]:
    """Return the findings of a source."""
    return [found for node in ast.walk(ast.parse(source)) for found in findings_of_node(node, "x.py")]
