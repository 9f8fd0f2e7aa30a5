"""The function that writes kept steps into the spool, in the writer's thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from leakaudit.capture.describe import AUTOCAST_DTYPES
from leakaudit.capture.fitness import without_foreign
from leakaudit.capture.notify import notify
from leakaudit.capture.recording.kept_step import KeptStep
from leakaudit.capture.recording.part_of_step import PartOfStep
from leakaudit.capture.recording.step_facts import check_masked_words, checked_bound, checked_divisor
from leakaudit.client.facts import PublicFacts
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.snapshot import KeptParts, Manifest
from leakaudit.client.truth import reading_of
from leakaudit.errors import SnapshotError
from leakaudit.models.first_blocks import BLOCKS
from leakaudit.storage.spool import Spool

AUTOCAST: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Type in which the forward passes ran -> autocast, as the recipe of a step names it."""


@dataclass(frozen=True)
class StepWriter:
    """A function that writes a kept step, with the step's completed manifest.

    It reads nothing but the kept step, because training continues while it writes.
    """

    spool: Spool
    foreign: frozenset[str]
    """Names of tensors of the live model that the rebuilt model will not have."""
    unit: str = "step"
    """What is kept, for the user: `step` or `round`."""
    poisson: bool = False
    """Whether the optimizer is one of Opacus. If a draw is empty, loaders of Opacus make up a batch, which is nobody's data."""

    def __call__(self, kept: KeptStep) -> None:
        """Write a step.

        Raises:
            SnapshotError: the step cannot be evidence; the message says why.
            OSError: the disk is full.
        """
        kept = without_foreign(kept, self.foreign)
        truth = replace(kept.truth, reading=reading_of(kept.manifest.facts))
        check_masked_words(kept.manifest.facts, truth)
        bound, loose = checked_bound(kept.manifest.facts, truth)
        divisor, uneven = checked_divisor(truth)
        if self.poisson and _is_placeholder(kept):
            raise SnapshotError(
                "the Poisson draw was empty, and the loader made up a batch in its place, which is nobody's data"
            )
        recipe = _recipe(kept, [loose, uneven])
        facts = self._facts(kept, recipe, bound, divisor)
        self._write(kept, _manifest(kept, recipe, facts))
        notify(
            f"kept {self.unit} {kept.step} ({len(kept.update)} updates, copied in {kept.copy_seconds * 1000:.0f} ms)"
        )

    def _facts(self, kept: KeptStep, recipe: StepRecipe, bound: int | None, divisor: float | None) -> PublicFacts:
        """Return the public facts with what the step showed.

        Args:
            kept: the step.
            recipe: its recipe, with the autocast that was seen.
            bound: most examples of the batch.
            divisor: the number by which the sum of the losses is divided; None if unknown.
        """
        facts = kept.manifest.facts
        names = [name for name in (*facts.shared, *facts.frozen) if name not in self.foreign]
        sent = kept.update.keys() if kept.part is None else kept.part.sketches.keys()
        optimizer = None if facts.optimizer is None else facts.optimizer.moving(sent)
        return facts.model_copy(
            update={
                "training_mode": kept.training,
                "batch_size_bound": bound,
                "loss_divisor": divisor,
                "dtype": AUTOCAST_DTYPES.get(str(recipe.autocast), facts.dtype),
                "input_shape": _input_shape(kept),
                "optimizer": optimizer,
                "shared": tuple(name for name in names if name in sent),
                "frozen": tuple(name for name in names if name not in sent),
            }
        )

    def _write(self, kept: KeptStep, manifest: Manifest) -> None:
        parts: dict[str, Any] = {"update": kept.update, "weights": kept.weights, "truth": kept.truth}
        if (part := kept.part) is not None:
            manifest = manifest.model_copy(update={"parts": _kept_parts(kept, part)})
            parts["sketches"] = part.sketches
            parts["table"] = part.rows if part.rows in kept.weights else None
        self.spool.write(kept.step, frozen=kept.frozen, manifest=manifest, **parts)


def _recipe(kept: KeptStep, notes: list[str]) -> StepRecipe:
    """Return the recipe of a step with what its forward passes showed.

    Args:
        kept: the step.
        notes: further notes on the step; empty notes are left out.
    """
    recipe = kept.manifest.recipe
    repeated = sum(batch.repeated_pass for batch in kept.truth.micro_batches)
    said = [note for note in (recipe.note, *notes) if note]
    if repeated:
        said.append(f"{repeated} forward passes saw a batch that another one had seen")
    return recipe.model_copy(
        update={
            "loss": "pulls" if kept.has_output_gradients else "forward",
            "loss_scale": kept.loss_scale,
            "training": kept.training,
            "eval_modules": kept.eval_modules[0] if kept.training and kept.eval_modules else (),
            "eval_by_pass": _eval_by_pass(kept),
            "differentiated_again": kept.differentiated_again,
            "unheld": kept.unheld,
            "autocast": recipe.autocast or AUTOCAST.get(kept.autocast) if kept.autocast else recipe.autocast,
            "note": "; ".join(said),
        }
    )


def _eval_by_pass(kept: KeptStep) -> tuple[tuple[str, ...], ...]:
    """Return the modules in eval mode of each pass; empty if all are the same."""
    alike = len(set(kept.eval_modules)) <= 1
    return () if alike or len(kept.eval_modules) != len(kept.truth.micro_batches) else kept.eval_modules


def _manifest(kept: KeptStep, recipe: StepRecipe, facts: PublicFacts) -> Manifest:
    provenance = kept.manifest.provenance.model_copy(
        update={
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "copy_seconds": round(kept.copy_seconds, 4),
        }
    )
    return kept.manifest.model_copy(update={"recipe": recipe, "facts": facts, "provenance": provenance})


def _kept_parts(kept: KeptStep, part: PartOfStep) -> KeptParts:
    """Return a description of the parts that are kept of a large step."""
    omitted = tuple(name for name in part.sketches if name not in kept.update)
    return KeptParts(blocks=BLOCKS, parameters=kept.parameters, rows=part.rows, not_kept=omitted)


def _input_shape(kept: KeptStep) -> tuple[int, ...] | None:
    """Return the shape of one example of a batch of arrays; None for text."""
    inputs = kept.truth.micro_batches[0].inputs.get("inputs")
    return None if inputs is None else tuple(inputs.shape[1:])


def _is_placeholder(kept: KeptStep) -> bool:
    """Return whether a batch is one row of zeros and ones.

    Opacus' `rand_on_empty` makes such a batch if a draw is empty.
    """
    parts = [batch.inputs.get("inputs", batch.inputs["input_ids"]) for batch in kept.truth.micro_batches]
    rows = [row for part in parts for row in part]
    return len(rows) == 1 and bool(((rows[0] == 0) | (rows[0] == 1)).all())
