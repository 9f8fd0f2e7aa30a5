"""Starts workers one after another and kills each at a random moment.

    python -m tests.support.killed_workers SPOOL KILLS JOURNAL

The workers are forks of this process, so that none spends its life on the import of torch. The last one is not killed. The last line of
the output says how many were killed, and how often a line of the journal was changed or lost.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import leakaudit.audit.audit
import leakaudit.reports.page  # noqa: F401
from leakaudit.audit.worker import run_worker

LIVES = (0.05, 1.5)
"""Shortest and longest life of a killed worker, in seconds. An attempt of the test takes up to 0.8."""


def started(spool: Path) -> int:
    """Return the id of a new process that audits a spool."""
    if child := os.fork():
        return child
    os._exit(run_worker(spool))


def lines(journal: Path) -> list[bytes]:
    """Return the complete lines of a journal."""
    content = journal.read_bytes() if journal.exists() else b""
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


def main(spool: Path, kills: int, journal: Path) -> None:
    """Kill workers, then let one finish."""
    torch.set_num_threads(1)
    rng = random.Random(7)
    killed = changed = 0
    while killed < kills:
        worker, before = started(spool), lines(journal)
        time.sleep(rng.uniform(*LIVES))
        os.kill(worker, signal.SIGKILL)
        killed += os.waitpid(worker, 0)[1] == signal.SIGKILL
        changed += lines(journal)[: len(before)] != before
    before = lines(journal)
    _, status = os.waitpid(started(spool), 0)
    changed += lines(journal)[: len(before)] != before
    print(json.dumps({"kills": killed, "changed": changed, "last": status}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
