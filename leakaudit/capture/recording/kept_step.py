"""One recorded step, as the writer gets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.capture.recording.part_of_step import PartOfStep
from leakaudit.client.observation import check_finite
from leakaudit.client.snapshot import Manifest
from leakaudit.client.truth import Truth
from leakaudit.errors import SnapshotError
from leakaudit.models.tensors import bytes_of
from leakaudit.storage.frozen_weights import FrozenWeights


@dataclass(frozen=True)
class KeptStep:
    """One step: copies on the CPU, or live tensors if it is too large for copies."""

    step: int
    update: Mapping[str, Tensor]
    """Parameter name -> what the optimizer got, the parameter's shape; bfloat16, float16 or float32."""
    weights: Mapping[str, Tensor]
    """Name -> trained parameter or persistent buffer before the step."""
    truth: Truth
    manifest: Manifest
    """What the adapter knew of the step when it began."""
    copy_seconds: float
    autocast: torch.dtype | None = None
    """Type in which the forward passes ran under autocast; None where none was seen."""
    loss_scale: float = 1.0
    """Factor of a GradScaler while the gradients were computed. The update and the output gradients do not contain it."""
    eval_modules: tuple[tuple[str, ...], ...] = ()
    """Modules in eval mode in each forward pass of this process; the name of the model itself is empty."""
    has_output_gradients: bool = False
    """Whether the batches hold the gradients that the loss sent to the model's outputs."""
    frozen: FrozenWeights | None = None
    """Live parameters that no optimizer moves and that are not in `weights`. The writer stores them once per run."""
    differentiated_again: bool = False
    """Whether a gradient at an output can be differentiated again, as a penalty on gradients requires."""
    unheld: tuple[str, ...] = ()
    """Paths of outputs whose gradients were too large to be held beside a loss that the model computed."""
    part: PartOfStep | None = None
    """The kept parts of the update; None where `update` is the whole one."""
    parameters: int = 0
    """Number of parameters of the whole model, where only parts are kept."""
    ready: Callable[[], None] = lambda: None
    """Waits until the copy has arrived; the writer's thread calls it."""

    @property
    def training(self) -> bool:
        """Whether the model was in training mode in its first forward pass."""
        return not self.eval_modules or "" not in self.eval_modules[0]

    @property
    def bytes(self) -> int:
        """Size of update, weights and optimizer's state, without the frozen weights."""
        tensors = [*self.update.values(), *self.weights.values(), *self.truth.optimizer_state.values()]
        return sum(bytes_of(tensor) for tensor in (*tensors, *(self.part.sketches.values() if self.part else ())))

    def check_content(self) -> None:
        """Refuse a step on which no attack could be scored.

        Raises:
            NonFiniteUpdateError: the update holds NaN or infinity.
            SnapshotError: there is no gradient, no forward pass, or no token in the batch.
        """
        if not self.update and self.part is None:
            raise SnapshotError(
                "the optimizer held no gradient when it stepped; optimizers that move the weights during the backward pass "
                "cannot be audited"
            )
        if not self.truth.micro_batches:
            raise SnapshotError(
                "the audit saw no forward pass that this update comes from; give the audit the object that the training loop calls"
            )
        if any("input_ids" not in batch.inputs for batch in self.truth.micro_batches):
            raise SnapshotError(
                "its batch has no `input_ids`; the audit takes models that read token ids, and classifiers of arrays (`num_labels`)"
            )
        if not any(batch.inputs.get("inputs", batch.inputs["input_ids"]).numel() for batch in self.truth.micro_batches):
            raise SnapshotError("its batch was empty")
        check_finite(self.update)
        if self.part is not None:
            check_finite(self.part.sketches)  # each entry is in one bucket, which a NaN or infinity makes not finite
