"""The snapshot: one training step recorded for audit.

`Observation` and `Truth` are two types in two files. Attacks get the first; only scoring, verification and defences get the second.
`leakaudit.storage.snapshots` writes and reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, Field
from torch import Tensor

from leakaudit.client.facts import DeclaredDefense, Facts, PublicFacts
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.truth import Truth
from leakaudit.models.recipe import ModelRecipe

SCHEMA = "leakaudit.snapshot/1.5"
"""Version of the snapshot format that this leakaudit writes."""

OBSERVED, TRUTH, MANIFEST = "observed.safetensors", "truth.safetensors", "snapshot.json"
"""File names in the folder of a snapshot."""

SENT = "sent.safetensors"
"""File name of the weights that a client sent, where something changed them after the training."""

BASE = "base.safetensors"
"""File name of the frozen weights, which the snapshots of a run share."""

RETIRED = {
    "facts": frozenset({"stage"}),
    "recipe": frozenset({"label_smoothing", "pass_num_items", "patched"}),
    "provenance": frozenset({"check_seconds", "not_in_place"}),
}
"""Part of a manifest -> keys of earlier versions, which are ignored when it is read."""

OTHER_LOSS = "an earlier version recorded its loss in a form that this one cannot compute"
"""Note of a step whose loss was described only by retired keys."""


class Provenance(Facts):
    """Origin of a snapshot; nothing in it is private."""

    framework: str
    versions: dict[str, str] = Field(default={})
    """Library -> version."""
    step: int = 0
    """Optimizer step, counted from 0."""
    seed: int | None = None
    """Seed of the simulation that made the step, if there are several (`simulate --seeds`); else None."""
    epoch: float | None = None
    total_steps: int | None = None
    """Planned optimizer steps of the run."""
    loss: float | None = None
    learning_rate: float | None = None
    created: str = ""
    """Time in UTC, ISO 8601."""
    copy_seconds: float = 0.0
    """Seconds of the training process that recording the step took."""
    skipped_before: int = 0
    """Number of due steps since the last snapshot that were not recorded.

    The writer was busy, or the spool was full.
    """


class KeptParts(Facts):
    """The kept parts of a step with only the first blocks (`keep: auto`)."""

    blocks: int
    """Number of blocks of the rebuilt model, counted from the first."""
    parameters: int
    """Number of parameters of the client's whole model."""
    rows: str | None = None
    """Parameter of whose update only the rows that are not zero are stored."""
    not_kept: tuple[str, ...] = ()
    """Shared parameters of whose update only a sketch is stored.

    See `leakaudit.capture.recording.sketch`.
    """


class SentUpdate(Facts):
    """What is public about a sent update that something changed after the training."""

    defenses: tuple[DeclaredDefense, ...] = ()
    """The declared defences in it, in the order in which they apply. A change that nobody declared is a defence that is not registered."""
    differences: bool = False
    """Whether the file holds differences from the weights before the round, instead of weights."""
    beside: int = 0
    """Number of other tensors that left with it, which nobody audits."""


class Manifest(Facts):
    """The content of `snapshot.json`."""

    schema_: str = Field(default=SCHEMA, alias="schema")
    model: ModelRecipe
    facts: PublicFacts
    recipe: StepRecipe
    provenance: Provenance
    digests: dict[str, str] = Field(default={})
    """File name -> digest of its bytes, with the algorithm as prefix.

    See `leakaudit.storage.digests`. Before schema 1.2 the prefix is always `sha256:`.
    """
    encrypted_to: tuple[str, ...] = ()
    """Public keys to which the tensors are encrypted; empty if they are not encrypted."""
    parts: KeptParts | None = None
    """None if the whole step was kept."""
    sent: SentUpdate | None = None
    """None if the update was sent as the training produced it."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def files(self) -> tuple[str, ...]:
        """Return the names of the snapshot's tensor files without `.age`."""
        more = (name for name in (BASE, SENT) if any(found.startswith(name) for found in self.digests))
        return (OBSERVED, TRUTH, *more)


@dataclass(frozen=True)
class Snapshot:
    """One step recorded for audit."""

    observation: Observation
    truth: Truth
    recipe: StepRecipe
    model_recipe: ModelRecipe
    provenance: Provenance
    parts: KeptParts | None = None
    """None if the whole step was kept."""
    sketches: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameter name -> sketch of its update, if only parts were kept."""
    sent: Observation | None = None
    """What was sent, if something changed the update after the training; else None."""
    sent_beside: int = 0
    """Number of other tensors that left with it, which nobody audits."""
    sent_differences: bool = False
    """Whether differences of weights were sent instead of weights."""


def without_retired_keys(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the manifest of an earlier version without its retired keys.

    None if it has no retired keys. If only retired keys describe the loss, the step is marked as one that cannot be replayed.

    Args:
        manifest: parsed `snapshot.json`, not yet checked.
    """
    found: dict[str, Any] = dict(manifest)
    for part, keys in RETIRED.items():
        given = manifest.get(part)
        if isinstance(given, dict) and not keys.isdisjoint(given):
            found[part] = {key: value for key, value in given.items() if key not in keys}
            if given.get("loss") == "label_smoothing" or given.get("pass_num_items"):
                found[part] |= {"loss": "unsupported", "note": given.get("note") or OTHER_LOSS}
    return found if found != manifest else None
