"""How much of a recomputed update's error is rounding.

The figures behind the constants are in `docs/decisions/noise_floor.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from leakaudit.audit.comparison import Update, relative_error
from leakaudit.client.other_order import other_order
from leakaudit.client.replay import attention_is_repeated, repeats_tf32
from leakaudit.client.step import ClientStep
from leakaudit.models.quantised_layers import stand_in_types
from leakaudit.models.tensors import coarsest_dtype

TOLERANCE = {"bf16": 3e-2, "bfloat16": 3e-2, "fp16": 1e-2, "float16": 1e-2, "tf32": 1e-2}
"""Largest relative error at which a recomputed update can count as the same.

It depends on the coarsest precision among autocast, facts and weights. Our choice: autocast steps (bf16) had an error of 5e-3 with eager
instead of fused attention; the update of a wrong batch has an error above 0.3. TF32 has as many digits as float16.

A replay that adds in another order usually shows that rounding explains less (`ORDERS`).
"""


FLOAT32_TOLERANCE = 1e-3
"""Largest relative error for every other precision."""


TIGHT = {"bf16": 1e-3, "bfloat16": 1e-3, "fp16": 1e-4, "float16": 1e-4}
"""Relative error at which a recomputed update counts as the same without a measurement.

It is a quarter of the rounding error of one number. In bfloat16, another number of threads alone gives as much.
"""


FLOAT32_TIGHT = 1e-6
"""The same for every other precision: eight units in the last place of a float32.

Float32 steps had errors of 1e-8 to 1e-6 (`docs/decisions/noise_floor.md`). Float64 has it, too: updates are compared in float32, and many
models compute norms and attention weights in float32 whatever the type of their weights is.
"""


ORDERS = 4.0
"""Largest relative error from rounding, in distances of two replays that add in different orders.

Measured: other instruction sets, numbers of threads and attention kernels were at most 1.4 distances away (`docs/decisions/noise_floor.md`).
The rest leaves room for other models.
"""


ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative rounding error of multiplying a gradient of this dtype by a factor.

It is half the distance between two neighbouring numbers.
"""


@dataclass(frozen=True)
class Accuracy:
    """How exactly a step can be computed again."""

    precisions: tuple[str, str, str]
    """Names of the types of autocast, of the client's facts, and of the model's coarsest weights.

    Adapters may have a finer precision than the model below them.
    """

    @classmethod
    def of(cls, step: ClientStep) -> Accuracy:
        """Return the accuracy of a step on its model."""
        computed_in = str(coarsest_dtype(step.model.parameters())).removeprefix("torch.")
        return cls((str(step.recipe.autocast), step.facts.dtype, computed_in))

    @property
    def largest(self) -> float:
        """Largest relative error that can count as rounding."""
        return max(TOLERANCE.get(kind, FLOAT32_TOLERANCE) for kind in self.precisions)

    @property
    def is_coarse(self) -> bool:
        """Whether the client computed with fewer digits than float32 has."""
        return self.largest > FLOAT32_TOLERANCE

    @property
    def tight(self) -> float:
        """Relative error that counts as rounding without a measurement."""
        return max(TIGHT.get(kind, FLOAT32_TIGHT) for kind in self.precisions)

    def limit(self, distance: float) -> float:
        """Return the relative error that counts as rounding.

        Args:
            distance: between replays in two orders of additions.
        """
        return min(self.largest, max(self.tight, ORDERS * distance))

    def why_unmeasured(self, step: ClientStep) -> str:
        """Return why no replay here shows how the client rounds, or ""."""
        here = next(step.model.parameters()).device.type
        trained_on = {"cuda" if "cuda" in batch.rng else "cpu" for batch in step.truth.micro_batches if batch.rng}
        autocast, client, computed_in = self.precisions
        replayed = max(TOLERANCE.get(kind, FLOAT32_TOLERANCE) for kind in (autocast, computed_in))
        if repeats_tf32(client, here):
            replayed = self.largest
        what = ""
        if trained_on - {here}:
            what = f"it was trained on {' and '.join(sorted(trained_on))} and is verified on {here}"
        elif replayed < self.largest:
            what = f"it was computed in {client}, which is not repeated here"
        elif not attention_is_repeated(step.model, step.recipe.attention):
            what = f"its attention ({step.recipe.attention}) is not repeated here"
        elif coarse := sorted(str(kind).removeprefix("torch.") for kind in stand_in_types(step.model) & set(ROUNDING)):
            what = f"its quantised layers multiply in {' and '.join(coarse)} with kernels of their own, which are not repeated here"
        return what and f"{what}, so an error of up to {self.largest:g} counts as rounding"


def distance_of_orders(step: ClientStep, updates: Sequence[tuple[Update, Callable[[Update], Update] | None]]) -> float:
    """Return how far another order of additions moves updates, relative to them.

    Args:
        step: is computed once more.
        updates: each with what makes it from the step's update; None for that update itself.

    Returns:
        The largest distance.
    """
    on_gpu = next(step.model.parameters()).is_cuda
    with other_order(attention=not (on_gpu and step.recipe.training and step.facts.dropout)):
        again = step.update()
        return max(relative_error(make(again) if make else again, update) for update, make in updates)


def loses_dropout(step: ClientStep) -> bool:
    """Return whether a repetition of the step draws other dropout masks."""
    return step.recipe.training and bool(step.facts.dropout) and not _repeats_dropout(step)


def _repeats_dropout(step: ClientStep) -> bool:
    """Return whether the recorded random states reproduce the dropout masks here.

    They do so only on the kind of device that drew the masks.
    """
    if not step.recipe.kept_rng:
        return False
    here = next(step.model.parameters()).device.type
    return all(batch.rng and ("cuda" if "cuda" in batch.rng else "cpu") == here for batch in step.truth.micro_batches)
