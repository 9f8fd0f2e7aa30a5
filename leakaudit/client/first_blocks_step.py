"""The part of a client's step that the first blocks of its model took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.client.output_gradients import made_at, send_back
from leakaudit.client.replay import take_gradients
from leakaudit.client.step import ClientStep, Notice
from leakaudit.client.truth import MicroBatch
from leakaudit.errors import SnapshotError
from leakaudit.models.first_blocks import BOUNDARY, boundary_of
from leakaudit.models.structure.embeddings import word_embedding
from leakaudit.models.structure.trace import hooked
from leakaudit.models.tensors import outputs_of


@dataclass(frozen=True)
class FirstBlocksStep(ClientStep):
    """One step of a client of whose model only the first blocks are known.

    The gradients that arrived behind them replace the rest of the model and the loss.
    """

    kept: frozenset[str] = frozenset()
    """Shared parameters whose update is known."""

    def update(self, *, gradient_error: float = 0.0, notice: Notice = lambda _: None) -> dict[str, Tensor]:  # noqa: ARG002 - of other steps
        """Compute the update of the parameters that the boundary's gradients reach.

        It is not clipped to a norm, because the norm of the whole update is not known.

        Args:
            gradient_error: not used, because the update is no difference of weights.
            notice: not used, because only parts of the gradient are known.

        Returns:
            Parameter name -> gradient, float32: the kept parameters of blocks and word embedding, and those before them. Parameters
            behind the blocks are left out.

        Raises:
            SnapshotError: a gradient at the boundary was not recorded.
        """
        inside = f"{self._boundary()[0].rpartition('.')[0]}."
        words = word_embedding(self.model)
        with self._trained() as parameters:
            self._accumulate(parameters, self.truth.micro_batches)
            if self.recipe.max_grad_value:
                torch.nn.utils.clip_grad_value_(list(parameters.values()), self.recipe.max_grad_value)
            read = {n for n, p in parameters.items() if p.grad is not None or n.startswith(inside) or n == words}
            return {n: gradient for n, gradient in take_gradients(parameters).items() if n in read & self.kept}

    def _boundary(self) -> tuple[str, ...]:
        if not (names := boundary_of(self.model)):
            raise SnapshotError("the attention of the last kept block was not found: `keep: all` keeps all")
        return names

    def _backward(self, batch: MicroBatch) -> None:
        """Send the recorded gradients back from the boundary."""
        with _outputs_of_modules(self.model, self._boundary()) as found, self._client_precision(batch):
            own = dict(outputs_of(self.model(**self._arguments(batch))))
        found = {path: tensor for path, tensor in found.items() if tensor.requires_grad}
        missing = [path for path in found if path not in batch.output_gradients]
        if missing or not found:
            name = missing[0].removeprefix(BOUNDARY) if missing else "the first blocks"
            raise SnapshotError(f"the gradient behind {name!r} was not recorded in every pass: `keep: all` keeps all")
        last = max(map(made_at, found.values()))
        earlier = {path: t for path, t in own.items() if t.requires_grad and made_at(t) < last}
        outputs = {path: tensor for path, tensor in (earlier | found).items() if path in batch.output_gradients}
        send_back(outputs, {path: batch.output_gradients[path] for path in outputs}, self.recipe.loss_scale)


@contextmanager
def _outputs_of_modules(model: nn.Module, names: tuple[str, ...]) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that gets the first tensor of each module's output by path.

    Raises:
        SnapshotError: a module ran twice in a pass, so its two gradients cannot be told apart.
    """
    found: dict[str, Tensor] = {}

    def note(path: str, _module: nn.Module, _args: Any, outputs: Any) -> None:
        if path in found:
            raise SnapshotError(f"{path.removeprefix(BOUNDARY)!r} runs twice in a pass: `keep: all` keeps all")
        found[path] = next(tensor for _, tensor in outputs_of(outputs))

    with hooked(
        model.get_submodule(name).register_forward_hook(partial(note, f"{BOUNDARY}{name}"), prepend=True)
        for name in names
    ):
        yield found
