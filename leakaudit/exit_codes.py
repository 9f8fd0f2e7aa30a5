"""The exit codes of the commands and of the side process."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Every exit code of this package; a number means the same for each command.

    A process that a signal stopped ends with 128 plus the signal's number (`stopped_by`), as in shells.
    """

    PASS = 0
    """The command succeeded. For `leakaudit gate`: the policy is satisfied."""
    CRASH = 1
    """A defect of leakaudit, with a traceback. Python itself uses this code for an uncaught exception."""
    USAGE = 2
    """A wrong option, configuration or policy, a missing private key, or an unsuitable machine. Another try does not help."""
    FAIL = 3
    """The policy is violated. For `leakaudit policy diff`: something is looser."""
    INCONCLUSIVE = 4
    """The evidence is not enough for PASS or for FAIL. Nothing else uses this code, so a pipeline can rely on it."""
    ERROR = 5
    """Results or snapshots cannot be read, trusted or written."""
    ORPHANED = 6
    """The side process ended because its trainer ended; the next side process audits the steps that it did not finish."""
    BUSY = 7
    """Another side process is at work on the folder, and audits its steps."""
    TIME_LIMIT = 124
    """The time limit of the command was reached, as for timeout(1). Results and report of finished attempts are written before."""
    INTERRUPTED = 130
    """Ctrl-C. The command writes the results of finished attempts before it ends."""


def stopped_by(number: int) -> int:
    """Return the exit code of a process that a signal stopped.

    >>> stopped_by(2) == ExitCode.INTERRUPTED, stopped_by(15)
    (True, 143)
    """
    return 128 + number
