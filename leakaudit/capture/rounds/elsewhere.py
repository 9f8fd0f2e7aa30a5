"""A round that another process trained, for the process that sends it.

The rounds in the spool are all that the two processes share. A round leaves once: what is sent is added to its folder, which one rename
then takes away from both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from leakaudit.capture.plan import Plan
from leakaudit.capture.refusals import policy_of
from leakaudit.capture.results_log import ResultsLog
from leakaudit.capture.rounds.audit import RoundAudit
from leakaudit.capture.rounds.sent import OpenRound
from leakaudit.capture.worker.shared_process import SharedSideProcess
from leakaudit.errors import RoundError
from leakaudit.storage.held_rounds import held_rounds
from leakaudit.storage.round_tensors import TENSORS, read_round_tensors
from leakaudit.storage.rounds_file import read_rounds
from leakaudit.storage.run_folders import join_rounds

LOOK_SECONDS = 0.05
"""Seconds between two looks at the folder. Our choice: a small round is written in a tenth of a second."""


@dataclass(frozen=True)
class Moment:
    """How far the audit in a folder was, to tell later which rounds are newer."""

    spool: int
    """Identity of the spool's folder; 0 if there was none."""
    begun: int
    """Rounds that had begun."""

    @classmethod
    def now(cls, folder: Path) -> Moment:
        """Return how far the audit in a folder is."""
        return cls(_identity(folder), read_rounds(folder / "spool").begun)

    def first_after(self, folder: Path) -> int:
        """Return the number of the first round that began, or will begin, after it."""
        return self.begun if _identity(folder) == self.spool else 0


def joined(folder: Path) -> RoundAudit:
    """Take part in the audit that another process began.

    Args:
        folder: of the audit.

    Raises:
        RoundError: there is none, or it is not open to this process.
    """
    spool = join_rounds(folder)
    spool.holds = True
    config = spool.config.model_copy(update={"out_dir": folder, "sent_elsewhere": False})
    return RoundAudit(
        config=config,
        spool=spool,
        plan=Plan.of(config, policy_of(config), config.rounds),
        side=SharedSideProcess(spool, "cpu"),
        log=ResultsLog.of(config, None),
        architecture=read_rounds(spool.root).architecture,
        note="",
        trains_elsewhere=True,
    )


def open_held(audit: RoundAudit, since: Moment, timeout_s: float) -> OpenRound:
    """Return the round that began after a moment and waits for what is sent of it.

    Args:
        audit: in which this process takes part.
        since: before the training of the round.
        timeout_s: most seconds to wait until the round is on the disk.

    Raises:
        RoundError: no such round is there, or several.
        SnapshotError: the list of its tensors is damaged.
    """
    root, deadline = audit.spool.root, time.monotonic() + timeout_s
    first = since.first_after(audit.config.out_dir)
    while True:
        rounds = read_rounds(root)
        found = [path for path in held_rounds(root) if int(path.stem) >= first]
        if len(found) > 1:
            raise RoundError(
                f"{len(found)} rounds in {audit.config.out_dir} wait for what is sent of them; give each training its own folder"
            )
        if found and (found[0] / TENSORS).is_file():
            break
        if rounds.begun <= first:
            raise RoundError(
                "no training that is audited began after this task came, so what is sent is older, or nobody's"
            )
        if rounds.ended >= rounds.begun:
            raise RoundError(
                "the round of this task was not kept, or was sent already; the log of the training says more"
            )
        if time.monotonic() > deadline:
            raise RoundError(f"the round of this task was not on the disk after {timeout_s:g} s")
        time.sleep(LOOK_SECONDS)
    tensors = read_round_tensors(found[0])
    return OpenRound(
        int(found[0].stem), audit.config.out_dir, tensors, audit.spool, tensors.own, tensors.declared, audit.tasks.add,
        kept=lambda: True,
    )  # fmt: skip


def _identity(folder: Path) -> int:
    try:
        return (folder / "spool").stat().st_ino
    except OSError:
        return 0
