"""The command that makes an attempt again on a kept snapshot."""

from __future__ import annotations

import shlex
from pathlib import Path

from leakaudit.results.as_sent import AS_SENT, PRODUCED
from leakaudit.results.schema import Attempt, Results, StepRecord


def kept_snapshot(folder: Path, step: int) -> Path:
    """Return the place of the kept snapshot of a step.

    Args:
        folder: the audit's folder.
        step: optimizer step.
    """
    return folder / "spool" / f"{step:06d}.kept"


def attacked_defense(record: StepRecord, defense: str) -> str:
    """Return the defence under which the attack really ran.

    The attempts on what was sent are copies of those on the produced update, if the two updates are the same.
    """
    return PRODUCED if defense == AS_SENT and record.sent is None else defense


def replay_command(results: Results, attempt: Attempt, folder: Path, named: str = "RUN") -> str | None:
    """Return the command that makes an attempt again.

    Args:
        results: the results that hold the attempt.
        attempt: an attempt.
        folder: the audit's folder, which is asked for the snapshot.
        named: the name of the folder in the command. The default shows no path.

    Returns:
        The command; None if the folder does not hold the step's snapshot, or the attack did not run.
    """
    record = next((step for step in results.steps if step.id == attempt.step), None)
    if record is None or not attempt.finished or not kept_snapshot(folder, record.step).is_dir():
        return None
    words = ["--step", str(record.step), "--attack", attempt.attack]
    words += ["--defense", attacked_defense(record, attempt.defense)]
    return f"leakaudit replay {named if named == 'RUN' else shlex.quote(named)} {shlex.join(words)}"
