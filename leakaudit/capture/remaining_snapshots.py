"""The description of the snapshots that remain on the disk after training."""

from __future__ import annotations

import shlex

from leakaudit.config.audit import in_a_night
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import HELD


def command_to_continue(spool: Spool, *options: str) -> str:
    """Return the command that attacks the steps that wait in a spool."""
    from leakaudit.models.factories import vouched

    makers = [word for name in vouched() for word in ("--allow-factory", name)]
    key = ("--identity FILE",) if spool.config.encrypt_to else ()
    return f"`{' '.join(('leakaudit worker', shlex.quote(str(spool.root)), *key, *makers, *options))}`"


def remaining_snapshots(spool: Spool) -> str:
    """Return one sentence on the remaining snapshots; empty if there are none.

    It names their steps, their folder and their content, and says how they are audited or removed.
    """
    waiting = _steps(spool, HELD, ".ready", ".run")
    refused = _steps(spool, ".bad")
    if not waiting and not refused:
        return ""
    if in_a_night():
        return "the night attacks the kept steps when this training has ended, and removes them"
    states = []
    if waiting:
        states.append(
            f"not audited to the end: step {', '.join(waiting)} ({command_to_continue(spool)} continues with them)"
        )
    if refused:
        states.append(
            f"set aside: step {', '.join(refused)} ({command_to_continue(spool, '--retry')} tries them again)"
        )
    inside = "encrypted" if spool.config.encrypt_to else "in clear"
    folder = shlex.quote(str(spool.root))
    return (
        f"snapshots that stay in {folder}: {'; '.join(states)}. Each holds the private batch and its labels, by design, {inside}; "
        f"`leakaudit snapshots purge {folder} --all` removes them, or the next run does when they are older than {spool.config.retention_days:g} days"
    )


def _steps(spool: Spool, *states: str) -> list[str]:
    """Return the steps of the snapshots in some states, in order."""
    found = {path.stem for path in spool.entries() if path.suffix in states}
    return [name.lstrip("0") or "0" for name in sorted(found, key=lambda name: (len(name), name))]
