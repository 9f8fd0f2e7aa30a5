"""The scores of every tested step in the audit's private folder, one line each.

They are numbers without texts. Still, results and reports hold counts of them only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from leakaudit.audit.step_lines import StepLines

FILE = "membership.jsonl"
"""Name of the file."""

Numbers = tuple[float, ...]


class Scored(BaseModel):
    """Scores of the candidates of one step.

    Their unit is the standard deviation of the scores of texts of no step.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    members: Numbers
    """Of the texts of the step."""
    others: Numbers
    """Of the other candidates."""
    calibration: Numbers
    """Of the calibration texts."""
    numbers: tuple[int, ...]
    """Places of the calibration texts in the file of non-members."""
    base_members: Numbers
    """Minus the loss before the step, in the same order; so are the next two."""
    base_others: Numbers
    base_calibration: Numbers
    null: Literal["another step", "known batch", "none"]
    """Which update without the candidates they were also compared with."""
    null_members: Numbers = ()
    """Scores of members of this step, with that update."""
    null_others: Numbers = ()
    known_batch: Numbers = ()
    """Scores of the texts of the known batch, with its own update; empty if this step did not try it."""
    labelled: bool
    """Whether the attacker was given the labels."""
    overlapped: int
    """Texts of the file of non-members that the step holds."""


class _Line(BaseModel):
    """One step: its scores, or a clause that says why it has none."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    step: str
    scored: Scored | None = None
    why_not: str = ""


class MembershipLog:
    """The tested steps of one audit."""

    def __init__(self, folder: Path) -> None:
        """Open the log of an audit's folder."""
        self._lines = StepLines(folder / FILE, _Line)

    def add(self, step: str, scored: Scored) -> None:
        """Append the scores of a step."""
        self._lines.append(_Line(step=step, scored=scored))

    def leave_out(self, step: str, why: str) -> None:
        """Append a step that could not be tested, with a clause that says why."""
        self._lines.append(_Line(step=step, why_not=why))

    def has(self, step: str) -> bool:
        """Return whether a step was tested or left out."""
        return any(line.step == step for line in self._lines.read())

    def read(self) -> tuple[dict[str, Scored], list[str]]:
        """Return step id -> scores, and why other steps were not tested.

        The latest line of a step counts. A line that was cut off is left out.

        Raises:
            ResultsError: the file cannot be read.
        """
        lines = {line.step: line for line in self._lines.read()}
        found = {step: line.scored for step, line in lines.items() if line.scored is not None}
        return found, [line.why_not for line in lines.values() if line.scored is None]
