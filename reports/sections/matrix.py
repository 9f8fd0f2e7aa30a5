"""The section with a table of attacks against defences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leakaudit.gate.evidence import Index
from leakaudit.reports.cells import OBSERVED, SHORT, Cell, attack_names, cell_for, cell_of, defense_names, shown_name
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.results.as_sent import shipped_column

_IN_KEY = {"out of time": "out of time, which decides nothing"}
"""State of a cell -> what the key says instead."""


def section(redacted: RedactedResult) -> Section:
    """Show the outcome of each attack, and of all together, under each defence."""
    results = redacted.results
    attacks, defenses, index = attack_names(results), defense_names(results), Index(results)
    table: list[dict[str, Any]] = []
    for attack in attacks:
        cells = [cell_for(results, attack, d, index) for d in defenses]
        table.append({"name": attack, "cells": cells, "worst": False})
    if len(attacks) > 1:
        cells = [cell_of(results, index.of_defense.get(d, ()), d, index, whole=True) for d in defenses]
        table.append({"name": "any of them", "cells": cells, "worst": True})
    shipped = sorted({step.shipped_defense for step in results.steps} - {OBSERVED})
    note = f"as the run ships it: {', '.join(shipped)}" if shipped else "as the run ships it"
    lead = "What came back, and in how many steps. Choose a cell for its bounds and details. The outlined column is what the run ships."
    if not table:
        lead = "No attack was run."
    ships = shipped_column(results)
    names = [shown_name(results, d) for d in defenses]
    columns = [
        {"name": name, "ships": d == ships} | _head(name, shipped) for d, name in zip(defenses, names, strict=True)
    ]
    for n, row in enumerate(table, start=1):
        row |= _details(row["name"], row["cells"], names, note, f"c-{n}")
    found = {cell.state for row in table for cell in row["cells"]}
    key = [
        {"word": word, "state": _IN_KEY.get(state, state), "css": Cell(state, (), ships=False).css}
        for state, word in SHORT.items()
        if state in found
    ]
    context = {"lead": lead, "columns": columns, "rows": table, "key": key}
    return Section("matrix", "Attacks against defences", context)


def _details(attack: str, cells: Sequence[Cell], defenses: Sequence[str], note: str, anchor: str) -> dict[str, Any]:
    """Return the details of a row; cells with the same details share one entry.

    Args:
        attack: name of the row.
        cells: of the row.
        defenses: names of the columns.
        note: what to say beside the shipped one.
        anchor: start of the anchors of the details.

    Returns:
        `anchors`, one a cell, and `details`, each with anchor, title and lines.
    """
    same: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for at, cell in enumerate(cells):
        same.setdefault((cell.state, cell.lines), []).append(at)
    anchors, details = [""] * len(cells), []
    for n, ((state, lines), places) in enumerate(same.items(), start=1):
        for at in places:
            anchors[at] = f"{anchor}-{n}"
        under = ", ".join(defenses[at] + (f" ({note})" if cells[at].ships else "") for at in places)
        details.append({"anchor": f"{anchor}-{n}", "title": f"{attack} under {under}: {state}", "lines": lines})
    return {"anchors": anchors, "details": details}


def _head(name: str, shipped: Sequence[str]) -> dict[str, object]:
    """Return the head of a column; the update as the run made it gets words.

    Args:
        name: of the defence.
        shipped: defences that are in the update as the run made it.
    """
    if name != OBSERVED:
        return short_label(name)
    return {"short": "as shipped", "knobs": [*shipped]} if shipped else {"short": "no defence", "knobs": []}


def short_label(defense: str) -> dict[str, object]:
    """Return the name of a defence for a narrow column, and its knobs.

    >>> short_label("soteria(share=0.4, layers=2)")
    {'short': 'soteria', 'knobs': ['share 0.4', 'layers 2']}
    """
    name, _, knobs = defense.removesuffix(")").partition("(")
    return {"short": name, "knobs": [knob.strip().replace("=", " ") for knob in knobs.split(",") if knob.strip()]}
