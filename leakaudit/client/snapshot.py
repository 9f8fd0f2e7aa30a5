"""The snapshot: one training step kept for audit.

`Observation` and `Truth` are two types and two files. Attacks are handed the first; the second is for scoring and for
re-simulating defences only. `leakaudit.storage.snapshots` writes and reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ConfigDict, Field
from torch import Tensor

from leakaudit.client.facts import Facts, PublicFacts
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.truth import Truth
from leakaudit.models.recipe import ModelRecipe
from leakaudit.results.schema import Verification

SCHEMA = "leakaudit.snapshot/1.2"


OBSERVED, TRUTH, MANIFEST = "observed.safetensors", "truth.safetensors", "snapshot.json"


BASE = "base.safetensors"


class Provenance(Facts):
    """Where a snapshot comes from. Nothing of it is private."""

    framework: str
    versions: dict[str, str] = Field(default={})
    step: int = 0
    epoch: float | None = None
    total_steps: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    created: str = ""
    copy_seconds: float = 0.0
    check_seconds: float = 0.0
    """What repeating the step in place took of the training process; 0 where it was not repeated."""
    not_in_place: str = ""
    """Why it was not; empty where it was, or where that was not asked for."""
    skipped_before: int = 0
    """Steps that were due since the last snapshot and not recorded: the writer was at work, or the spool was full."""


class KeptParts(Facts):
    """What is there of a step of which the first blocks were kept only (`keep: auto`)."""

    blocks: int
    """Of the model that is rebuilt; they are the first ones of the client's."""
    parameters: int
    """Of the client's model, in all."""
    rows: str | None = None
    """Parameter whose update is kept as the rows that are not zero."""
    not_kept: tuple[str, ...] = ()
    """Shared parameters of whose update only a sketch was kept (`leakaudit.capture.sketch`)."""


class Manifest(Facts):
    """`snapshot.json`."""

    schema_: str = Field(default=SCHEMA, alias="schema")
    model: ModelRecipe
    facts: PublicFacts
    recipe: StepRecipe
    provenance: Provenance
    checked: Verification | None = None
    """Stamp of a step that was repeated where it was made; None where the rebuilt model is to check it."""
    digests: dict[str, str] = Field(default={})
    """File name -> digest of its bytes, which begins with the algorithm (`leakaudit.storage.digests`); `sha256:` before schema 1.2."""
    encrypted_to: tuple[str, ...] = ()
    """Public keys; empty where the tensors lie there in clear."""
    parts: KeptParts | None = None
    """None where the step was kept as a whole."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def files(self) -> tuple[str, ...]:
        """Return the names of the snapshot's tensor files.

        They are the names before encryption.
        """
        has_base = any(name.startswith(BASE) for name in self.digests)
        return (OBSERVED, TRUTH, BASE) if has_base else (OBSERVED, TRUTH)


@dataclass(frozen=True)
class Snapshot:
    """One step kept for audit."""

    observation: Observation
    truth: Truth
    recipe: StepRecipe
    model_recipe: ModelRecipe
    provenance: Provenance
    checked: Verification | None = None
    """Its stamp, where the step was repeated where it was made."""
    parts: KeptParts | None = None
    """None where the step was kept as a whole."""
    sketches: Mapping[str, Tensor] = field(default_factory=dict)
    """Of the whole update, by parameter name, where only parts of it were kept."""
