"""Exit codes: what the end of a command or of the side process tells whoever started it."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Every exit code of this package; each number has one meaning, whichever command ends with it.

    A process that a signal stopped ends with 128 and the signal's number (`stopped_by`), as shells count.
    """

    PASS = 0
    """The command is done; of `leakaudit gate`: the policy holds."""
    CRASH = 1
    """An error of our own, with a traceback (Python's own code for it)."""
    USAGE = 2
    """A wrong option, configuration or policy, a missing key or a machine that does not fit: trying again does not help."""
    FAIL = 3
    """The policy does not hold."""
    INCONCLUSIVE = 4
    """The evidence is enough neither for PASS nor for FAIL. No other ending has this code, so that a pipeline can rely on it."""
    ERROR = 5
    """Results or snapshots cannot be read, trusted or written."""
    ORPHANED = 6
    """The side process ended because its trainer is gone; what it had begun is audited by the next one."""
    INTERRUPTED = 130
    """Ctrl-C: what was finished is written."""


def stopped_by(number: int) -> int:
    """Return the exit code of a process that a signal stopped.

    >>> stopped_by(2) == ExitCode.INTERRUPTED, stopped_by(15)
    (True, 143)
    """
    return 128 + number
