"""Rounds on the disk that wait for word of what was sent.

A kept round is first `NNN.held`. Whoever sends the update then says what left the machine, which is added to the folder, and one rename to
`NNN.ready` gives the round to the worker. If nobody says anything, the next round, the end of the audit or the worker releases it: what
was sent is then what the training produced.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.snapshot import MANIFEST, SENT, SentUpdate
from leakaudit.errors import SnapshotError
from leakaudit.files.private_files import write_atomic
from leakaudit.storage.snapshot_files import write_tensors
from leakaudit.storage.snapshots import read_manifest
from leakaudit.storage.spool_files import HELD

HELD_SECONDS = 120.0
"""Seconds after which the worker takes a round about which nobody said anything. Our choice: what changes an update before it is sent runs
within seconds, and encryption of a large one within a minute or two."""


def held_rounds(root: Path) -> list[Path]:
    """Return the folders of the rounds that wait, oldest first."""
    return sorted(root.glob(f"*{HELD}"), key=lambda path: (len(path.name), path.name))


def release(folder: Path) -> bool:
    """Give a held round to the worker; return False if somebody did it before."""
    try:
        folder.rename(folder.with_suffix(".ready"))
    except OSError:
        return False
    return True


def release_stale(root: Path) -> None:
    """Release the rounds that have waited for `HELD_SECONDS`."""
    for folder in held_rounds(root):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > HELD_SECONDS:
                release(folder)


def add_sent(
    folder: Path,
    weights: Mapping[str, Tensor],
    own: Sequence[DeclaredDefense],
    declared: Sequence[DeclaredDefense],
    recipients: Sequence[str],
    *,
    differences: bool = False,
) -> None:
    """Add to a held round the weights that were sent, and release it.

    Args:
        folder: of the held round.
        weights: parameter name -> value as it was sent; only parameters of which the round has an update.
        own: declared defences that are in the produced update already, such as a private optimizer.
        declared: the defences that the sent update went through after that, as the protocol declares them.
        recipients: public keys to which the tensors are encrypted; empty for no encryption.
        differences: whether `weights` holds differences from the weights before the round.

    Raises:
        SnapshotError: the round was given to the worker before, or the disk is full. The round is then audited as it was produced.
    """
    try:
        os.utime(folder)  # the worker counts from here
        manifest = read_manifest(folder)
        name, digest = write_tensors(folder / SENT, weights, recipients)
        facts = manifest.facts.model_copy(update={"defenses": tuple(own)})
        sent = SentUpdate(defenses=(*own, *declared), differences=differences)
        digests = {**manifest.digests, name: digest}
        complete = manifest.model_copy(update={"facts": facts, "sent": sent, "digests": digests})
        write_atomic(folder / MANIFEST, complete.model_dump_json(by_alias=True, indent=1))
    except OSError as error:
        release(folder)
        raise SnapshotError(
            f"what was sent of round {int(folder.stem)} is not audited ({error.strerror or type(error).__name__}): say it within "
            f"{HELD_SECONDS:g} s after the round, and before the next one begins"
        ) from None
    release(folder)
