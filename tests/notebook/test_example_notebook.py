"""The notebook of the examples, executed by a kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.executed_notebook import NOTEBOOK, executed


def _output(notebook: dict[str, object], name: str) -> str:
    """Return what a cell shows, as one text."""
    cells = notebook["cells"]
    assert isinstance(cells, list)
    [cell] = [cell for cell in cells if cell["id"] == name]
    return json.dumps(cell["outputs"])


@pytest.mark.integrations
def test_the_notebook_runs_and_shows_the_first_screen(tmp_path: Path) -> None:
    """Every cell runs; the outputs hold a verdict, tables and no note."""
    for package in ("nbclient", "ipykernel", "pandas"):
        pytest.importorskip(package)
    found = executed(tmp_path)
    assert "FAIL" in _output(found, "load") and "text/html" in _output(found, "load")
    assert "FAIL" in _output(found, "verdict")
    assert "embedding-rows" in _output(found, "attempts") and "score_token_recall" in _output(found, "texts")
    lines = (NOTEBOOK.parent / "data" / "clinic_notes.jsonl").read_text(encoding="utf-8").splitlines()
    notes = [json.loads(line)["text"] for line in lines]
    assert not any(note in json.dumps(found) for note in notes)


def test_the_notebook_in_the_repository_was_executed() -> None:
    """Its outputs are there, without an error and without a path of a machine."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    outputs = json.dumps([cell["outputs"] for cell in code])
    assert (
        '"error"' not in outputs
        and "/tmp/" not in outputs
        and "site-packages" not in outputs
        and "Traceback" not in outputs
    )
