"""The measured steps of an audit in its private folder, one line for each."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

import torch

from leakaudit.audit.conformance.measure import Measurement
from leakaudit.audit.conformance.measured import Measured, Sketch, StepMeasured
from leakaudit.audit.step_lines import StepLines

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
        self._lines = StepLines(folder / LOG_FILE, _Line)

    def add(self, found: Measurement) -> None:
        """Append a measured step."""
        rows = {
            name: base64.b64encode(row.contiguous().numpy().tobytes()).decode()
            for name, row in found.sketch.rows.items()
        }
        self._lines.append(_Line(step=found.step.step, measured=found.step, sketch=rows))

    def leave_out(self, step: str, why: str) -> None:
        """Append a step that could not be measured, with a clause that says why."""
        self._lines.append(_Line(step=step, why_not=why))

    def read(self) -> tuple[list[Measurement], list[str]]:
        """Return the measured steps, and why others were not measured.

        A step that was measured twice counts once. A line that was cut off is left out.

        Raises:
            ResultsError: the file cannot be read.
        """
        lines = {line.step: line for line in self._lines.read()}
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
