"""The measured steps of an audit in its private folder, one line for each."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import ValidationError

from leakaudit.audit.conformance.measure import Measurement
from leakaudit.audit.conformance.measured import Measured, Sketch, StepMeasured
from leakaudit.errors import ResultsError
from leakaudit.files.json_lines import split_lines
from leakaudit.files.private_files import append_line
from leakaudit.files.regular_files import read_regular

LOG_FILE = "conformance.jsonl"
"""Name of the file."""


class _Line(Measured):
    """One step: its sums and its sketch, or why it has none."""

    step: str
    measured: StepMeasured | None = None
    sketch: Mapping[str, str] = {}
    """Parameter name -> float32 numbers in base64."""
    why_not: str = ""


class ConformanceLog:
    """The measured steps of one audit."""

    def __init__(self, folder: Path) -> None:
        """Open the log of an audit's folder."""
        self._path = folder / LOG_FILE

    def add(self, found: Measurement) -> None:
        """Append a measured step."""
        rows = {
            name: base64.b64encode(row.contiguous().numpy().tobytes()).decode()
            for name, row in found.sketch.rows.items()
        }
        self._append(_Line(step=found.step.step, measured=found.step, sketch=rows))

    def leave_out(self, step: str, why: str) -> None:
        """Append a step that could not be measured, with a clause that says why."""
        self._append(_Line(step=step, why_not=why))

    def _append(self, line: _Line) -> None:
        append_line(self._path, line.model_dump_json())

    def read(self) -> tuple[list[Measurement], list[str]]:
        """Return the measured steps, and why others were not measured.

        A step that was measured twice counts once. A line that was cut off is left out.

        Raises:
            ResultsError: the file cannot be read.
        """
        try:
            content = read_regular(self._path)
        except FileNotFoundError:
            return [], []
        except OSError as error:
            raise ResultsError(f"{self._path}: cannot be read ({type(error).__name__})") from None
        lines: dict[str, _Line] = {}
        for text in split_lines(content):
            try:
                line = _Line.model_validate_json(text)
            except ValidationError:
                continue
            lines[line.step] = line
        found = [_measurement(line) for line in lines.values() if line.measured is not None]
        return found, [line.why_not for line in lines.values() if line.measured is None]


def _measurement(line: _Line) -> Measurement:
    assert line.measured is not None
    rules = 1 + len(line.measured.rules)
    rows = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32).reshape(rules, -1)
        for name, text in line.sketch.items()
    }
    return Measurement(line.measured, Sketch(line.step, rows))
