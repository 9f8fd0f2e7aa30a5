"""Snapshots of client steps, written without a training."""

from __future__ import annotations

from pathlib import Path

from leakaudit.client.snapshot import Manifest, Provenance
from leakaudit.client.step import ClientStep
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.tensors import state_of
from leakaudit.storage.snapshots import write_snapshot


def write_step(folder: Path, step: ClientStep, number: int) -> None:
    """Write the snapshot of a step into a folder, as the recorder would.

    Args:
        folder: must not exist.
        step: its update is computed here.
        number: optimizer step.
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
    )
