"""The exit codes of the commands and of the side process."""

from __future__ import annotations

from enum import IntEnum

from leakaudit.explanation import Explanation


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


EXPLAINED: dict[ExitCode, Explanation] = {
    ExitCode.PASS: Explanation(
        what="The command succeeded. For `leakaudit gate`: every rule at level error is satisfied.",
        tells="The attacks that ran recovered no more than the policy allows, on enough steps.",
        tells_not="Anything about other attacks, longer time limits, or updates that were not audited.",
        do="Ship with this verdict, and audit the next release anew.",
    ),
    ExitCode.CRASH: Explanation(
        what="A defect of leakaudit or of a library, with a traceback on stderr.",
        tells="The command did not end as planned.",
        tells_not="Whether anything leaks: nothing was judged.",
        do="Report the traceback. A pipeline must not go on.",
    ),
    ExitCode.USAGE: Explanation(
        what="A wrong option, configuration or policy, a missing private key, or an unsuitable machine.",
        tells="The line on stderr says what was asked, what was found and what to write instead.",
        tells_not="Whether anything leaks: nothing was judged. The same command fails again.",
        do="Correct what the line names. `leakaudit doctor` checks the machine.",
    ),
    ExitCode.FAIL: Explanation(
        what="The policy is violated: more was recovered than it allows. For `compare` and `nightly` also: worse than before. "
        "For `replay`: the attempt is not the same again.",
        tells="A recovered text is proof, whatever else the audit missed.",
        tells_not="How much other attacks or more time would recover: it may be more.",
        do="Do not ship. `leakaudit report RUN` shows what came back; try a defence that passes.",
    ),
    ExitCode.INCONCLUSIVE: Explanation(
        what="The evidence is not enough for PASS or for FAIL. For `compare`: the two audits cannot be compared. "
        "For `replay`: the attempt is not the same again, nor are the machine, the versions or its time.",
        tells="Steps, controls or attacks are missing, or the rate lies too near its limit. The verdict says which.",
        tells_not="That the updates are safe: not tested is not a pass. Texts may have come back all the same.",
        do="Audit more steps or correct what the reasons name, and judge again. `--allow inconclusive` ends with 0 "
        "while evidence is collected.",
    ),
    ExitCode.ERROR: Explanation(
        what="Results or snapshots cannot be read, trusted or written.",
        tells="The files are incomplete, changed, of another version, or contradict themselves. The message says which.",
        tells_not="Whether anything leaks: nothing was judged.",
        do="Restore the files, or audit again. Do not repair results by hand: their digest would not match.",
    ),
    ExitCode.ORPHANED: Explanation(
        what="The side process ended because its trainer ended.",
        tells="Steps are left that it did not audit. They stay in their folder.",
        tells_not="That the training failed: a trainer that ends early leaves steps as well.",
        do="Nothing, if a next run uses the folder; else `leakaudit run FOLDER` audits what is left.",
    ),
    ExitCode.BUSY: Explanation(
        what="Another process is at work on the same folder.",
        tells="That process audits the steps of the folder, and this one changed nothing.",
        tells_not="That anything is broken.",
        do="Wait for the other process, or give this one a folder of its own.",
    ),
    ExitCode.TIME_LIMIT: Explanation(
        what="The time limit of the command was reached, as for timeout(1).",
        tells="Results, verdict and report of the finished attempts are written.",
        tells_not="What the attempts that are left would have found.",
        do="Judge what is there with `leakaudit gate`, or start again with more time.",
    ),
    ExitCode.INTERRUPTED: Explanation(
        what="Somebody pressed Ctrl-C (128 plus the number of the signal, 2).",
        tells="The results of the finished attempts are written, and say that they were interrupted.",
        tells_not="What the attempts that are left would have found.",
        do="Start the command again, or judge what is there with `leakaudit gate`.",
    ),
}
"""Exit code -> what `leakaudit explain` says of it."""

STOPPED = Explanation(
    what="A signal stopped the process: the code is 128 plus the number of the signal.",
    tells="137 is SIGKILL, often for want of memory; 143 is SIGTERM, as from a scheduler at its limit.",
    tells_not="Whether anything leaks. A killed process judged nothing.",
    do="Start the command again. If it was killed for its memory, give it fewer attacks at a time or more memory.",
)
"""What `leakaudit explain` says of the exit code of a process that a signal stopped."""
