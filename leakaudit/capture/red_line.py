"""The request to stop a training at a red line (`stop_on`)."""

from __future__ import annotations

from leakaudit.capture.run import AuditRun
from leakaudit.storage.spool_files import RedLine, read_red_line


def red_line_alone(run: AuditRun) -> RedLine | None:
    """Return the red line that stops a training in one process; None without one."""
    if run.config.stop_on is None or run.trainer.peers is not None:
        return None
    return read_red_line(run.spool.root)


def red_line_of_all(run: AuditRun, step: int) -> RedLine | None:
    """Return the red line that stops all processes of a distributed run before a step.

    Only the process that writes knows of it. A process that stopped alone would let the others wait for it, so they agree, at due steps,
    where they speak to each other anyway. Without an agreement nobody stops.
    """
    peers = run.trainer.peers
    if run.config.stop_on is None or peers is None or peers.over or not run.plan.due(step):
        return None
    line = read_red_line(run.spool.root) if run.trainer.writes else RedLine(rule="", sentence="")
    return line if peers.agree(f"stopping before step {step}", line is not None) else None
