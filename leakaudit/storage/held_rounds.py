"""Rounds on the disk that wait for word of what was sent.

A kept round is first `NNN.held`. Whoever sends the update then says what left the machine, which is added to the folder, and one rename to
`NNN.ready` gives the round to the worker. If nobody says anything, the next round or the end of the audit releases it, or the worker once
all training processes have ended: what was sent is then what the training produced. No round is released by time: what is sent late would
leave without its audit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.snapshot import MANIFEST, SENT, SentUpdate
from leakaudit.errors import SnapshotError
from leakaudit.files.private_files import write_atomic
from leakaudit.storage.snapshot_files import write_tensors
from leakaudit.storage.snapshots import manifest_bytes, read_manifest
from leakaudit.storage.spool_files import HELD


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


def add_sent(
    folder: Path,
    weights: Mapping[str, Tensor],
    own: Sequence[DeclaredDefense],
    declared: Sequence[DeclaredDefense],
    recipients: Sequence[str],
    *,
    differences: bool = False,
    beside: int = 0,
) -> None:
    """Add to a held round the weights that were sent, and release it.

    Args:
        folder: of the held round.
        weights: parameter name -> value as it was sent; only parameters of which the round has an update.
        own: declared defences that are in the produced update already, such as a private optimizer.
        declared: the defences that the sent update went through after that, as the protocol declares them.
        recipients: public keys to which the tensors are encrypted; empty for no encryption.
        differences: whether `weights` holds differences from the weights before the round.
        beside: number of other tensors that left, which nobody audits.

    Raises:
        SnapshotError: the round was given to the worker before, or the disk is full. The round is then audited as it was produced.
    """
    try:
        manifest = read_manifest(folder)
        name, digest = write_tensors(folder / SENT, weights, recipients)
        facts = manifest.facts.model_copy(update={"defenses": tuple(own)})
        sent = SentUpdate(defenses=(*own, *declared), differences=differences, beside=beside)
        digests = {**manifest.digests, name: digest}
        complete = manifest.model_copy(update={"facts": facts, "sent": sent, "digests": digests})
        write_atomic(folder / MANIFEST, manifest_bytes(complete).decode())
    except OSError as error:
        release(folder)
        raise SnapshotError(
            f"what was sent of round {int(folder.stem)} is not audited ({error.strerror or type(error).__name__}): say it "
            "before the next round begins, and keep some space free in `out_dir`"
        ) from None
    if not release(folder):
        raise SnapshotError(
            f"what was sent of round {int(folder.stem)} is not audited: the round was given to the worker before"
        )
