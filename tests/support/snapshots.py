"""Snapshots of client steps, written without a training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leakaudit.client.snapshot import MANIFEST, Manifest, Provenance
from leakaudit.client.step import ClientStep
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.tensors import state_of
from leakaudit.storage.manifest_seal import UNSEALED, sealed
from leakaudit.storage.snapshots import write_snapshot


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a snapshot's manifest and its digest, as a forger would.

    With the schema of an earlier version it is written as that version did, without a digest.
    """
    raw = json.loads((folder / MANIFEST).read_text())
    del raw["digest"]
    change(raw)
    text = json.dumps(raw, indent=1).encode()
    (folder / MANIFEST).write_bytes(text if raw["schema"] in UNSEALED else sealed(text))


def write_step(folder: Path, step: ClientStep, number: int, recipients: Sequence[str] = ()) -> None:
    """Write the snapshot of a step into a folder, as the recorder would.

    Args:
        folder: must not exist.
        step: its update is computed here.
        number: optimizer step.
        recipients: public keys to which it is encrypted.
    """
    write_snapshot(
        folder,
        update=step.update(),
        weights=state_of(step.model),
        truth=step.truth,
        manifest=Manifest(
            model=ModelRecipe.of(step.model),
            facts=step.facts,
            recipe=step.recipe,
            provenance=Provenance(framework="test", step=number),
        ),
        recipients=recipients,
    )
