"""The exit codes of the commands and of the side process."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Every exit code of this package; a number means the same for each command.

    A process that a signal stopped ends with 128 and the signal's number (`stopped_by`), as shells count.
    """

    PASS = 0
    """The command is done; for `leakaudit gate`: the policy holds."""
    CRASH = 1
    """An error of our own, with a traceback (Python's own code for it)."""
    USAGE = 2
    """A wrong option, configuration or policy, a missing private key, or a machine that does not fit; trying again does not help."""
    FAIL = 3
    """The policy does not hold."""
    INCONCLUSIVE = 4
    """The evidence is not enough for PASS or for FAIL. Nothing else ends with this code, so a pipeline can rely on it."""
    ERROR = 5
    """Results or snapshots cannot be read, trusted or written."""
    ORPHANED = 6
    """The side process ended because its trainer ended; the next one audits the steps that it did not finish."""
    INTERRUPTED = 130
    """Ctrl-C; results of what was finished are written."""


def stopped_by(number: int) -> int:
    """Return the exit code of a process that a signal stopped.

    >>> stopped_by(2) == ExitCode.INTERRUPTED, stopped_by(15)
    (True, 143)
    """
    return 128 + number
