"""The local steps of a round, whose difference of weights the client sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from leakaudit.capture.observing.forward_hooks import ForwardPass
from leakaudit.capture.observing.local_optimizer import LocalOptimizer
from leakaudit.capture.recording.copies import CopyBuffers, Source
from leakaudit.client.local_steps import delta_divisor
from leakaudit.client.snapshot import Manifest
from leakaudit.errors import SnapshotError
from leakaudit.storage.frozen_weights import FrozenWeights

NO_RATE = (
    "the learning rate of its first parameter group was 0 in every local step, as at the beginning of a warm-up, so there is no difference of "
    "weights to divide by it; a later round is kept instead"
)


@dataclass
class LocalRound:
    """The round that is being recorded: what was before it, and its local steps."""

    weights: Mapping[str, Tensor]
    """Name -> trained parameter or persistent buffer before the first local step; copies."""
    frozen: FrozenWeights
    """Parameters that the optimizer does not move, before the first local step; references."""
    state: Mapping[str, Tensor]
    """State of the optimizer before the first local step, as `state_tensors` names it; copies. Empty if it was fresh."""
    ready: Callable[[], None]
    """Waits until these copies have arrived."""
    optimizer: LocalOptimizer
    steps: list[list[ForwardPass]] = field(default_factory=list)
    """The forward passes from which each local step got its gradient."""
    loss_scales: set[float] = field(default_factory=set)
    """Factors of a GradScaler in the local steps."""

    @property
    def passes(self) -> list[ForwardPass]:
        """The forward passes of all local steps, in the order of the steps."""
        return [seen for step in self.steps for seen in step]

    def check(self) -> None:
        """Refuse a round that cannot be computed again.

        Raises:
            SnapshotError: says what was found and what to do.
        """
        unseen = sum(not step for step in self.steps)
        if unseen:
            raise SnapshotError(
                f"in {unseen} of its {len(self.steps)} local steps the audit saw no forward pass that the gradient comes from; give the audit "
                "the object that the training loop calls"
            )
        if len(self.loss_scales) > 1:
            raise SnapshotError(
                "its GradScaler changed the factor of the loss between local steps; train in bf16, or audit a later round"
            )
        if not self.optimizer.learning_rate:
            raise SnapshotError(NO_RATE)

    def completed(self, manifest: Manifest) -> Manifest:
        """Return a manifest with what is known of the round when it is over."""
        rounds = {
            "optimizer": self.optimizer.described(),
            "local_steps": len(self.steps),
            "learning_rate": self.optimizer.learning_rate,
        }
        sizes = tuple(len(step) for step in self.steps)
        recipe = {"step_sizes": sizes if any(size != 1 for size in sizes) else ()}
        return manifest.model_copy(
            update={
                "facts": manifest.facts.model_copy(update=rounds),
                "recipe": manifest.recipe.model_copy(update=recipe),
            }
        )

    def difference(
        self, parameters: Mapping[str, nn.Parameter], manifest: Manifest, buffers: CopyBuffers
    ) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Copy the weights after the round, from which the writer computes the update.

        Args:
            parameters: name -> parameter that the optimizer moves.
            manifest: the completed one.
            buffers: memory for the copies.

        Returns:
            Parameter name -> float32 tensor that holds (before - after) / (learning rate * K), bit for bit as `weight_difference` computes
            it, once the function beside it was called.
        """
        copies, arrived = buffers.copy_into({f"u/{n}": Source(p, torch.float32) for n, p in parameters.items()})
        update = {name: copies[f"u/{name}"] for name in parameters}
        divisor = delta_divisor(manifest.facts)

        def subtract() -> None:
            self.ready()
            arrived()
            for name, after in update.items():
                torch.sub(self.weights[name].float(), after, out=after).div_(divisor)

        return update, subtract
