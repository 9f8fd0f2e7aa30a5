"""The tensors of a step that are kept, and their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from leakaudit.capture.observing.local_optimizer import has_stepped
from leakaudit.capture.observing.optimizers import parameters_of
from leakaudit.capture.processes.flat_shards import FlatPiece, as_pieces
from leakaudit.capture.recording.copies import Source, stored_dtype
from leakaudit.capture.recording.live_model import LiveModel
from leakaudit.capture.recording.part_of_step import PartOfStep
from leakaudit.capture.recording.sketch import BUCKETS
from leakaudit.capture.recording.step_recording import StepRecording
from leakaudit.client.local_steps import state_tensors
from leakaudit.errors import SnapshotError
from leakaudit.models.first_blocks import Parts
from leakaudit.models.tensors import in_rows, tied_names
from leakaudit.storage.frozen_weights import FrozenWeights

Observe = Literal["update", "local", "delta"]
"""What the client sends: the update that the optimizer gets, this process's share of it before processes are summed, or the
difference of the weights after K local steps."""


@dataclass(frozen=True)
class StepTensors:
    """The tensors of one step; references until they are copied."""

    update: Mapping[str, Tensor]
    """Parameter name -> update."""
    weights: Mapping[str, Tensor]
    """Name -> trained parameter or persistent buffer before the step."""
    frozen: FrozenWeights | None
    scales: Mapping[str, Tensor]
    """Parameter name -> the factor that a GradScaler left in its gradient; no entry for 1."""
    part: PartOfStep | None = None
    """The kept parts of the update; None where `update` is the whole one."""

    def reduced_to(self, parts: Parts) -> StepTensors:
        """Return the kept parts of these tensors, with sketches of the whole update."""
        part = PartOfStep.of(parts, self.update, self.scales)
        frozen = self.frozen
        return replace(
            self,
            update=dict(part.update),
            weights={name: w for name, w in self.weights.items() if name in parts.weights},
            frozen=None if frozen is None else frozen.without(frozenset(frozen.tensors) - parts.weights),
            part=part,
        )

    def sources(self) -> dict[str, Source]:
        """Return what is to be copied, by the key of its buffer."""
        found = {}
        for name, gradient in self.update.items():
            dtype = torch.float32 if name in self.scales else stored_dtype(gradient.dtype)
            # To find the rows, the training thread would wait for a GPU.
            found[f"u/{name}"] = Source(
                gradient if gradient.is_cuda else in_rows(gradient), dtype, self.scales.get(name)
            )
        found |= {f"w/{name}": Source(w, w.dtype) for name, w in self.weights.items()}
        if self.part is not None:
            found |= {f"s/{name}": Source(s, s.dtype) for name, s in self.part.sketches.items()}
        return found

    def copied(self, copies: Mapping[str, Tensor]) -> StepTensors:
        """Return the same step with copies in place of the references."""
        part = self.part
        if part is not None:
            sketches = {name: copies[f"s/{name}"] for name in part.sketches}
            part = replace(part, update={}, sketches=sketches)
        update = {name: copies[f"u/{name}"] for name in self.update}
        return replace(self, update=update, weights={name: copies[f"w/{name}"] for name in self.weights}, part=part)


class TensorSelection:
    """The selection of a step's update, and of the weights that it belongs to."""

    def __init__(self, model: LiveModel, observe: Observe, *, holds_copies: bool) -> None:
        """Prepare.

        Args:
            model: the live model.
            observe: what the client sends.
            holds_copies: whether this process is the one that keeps the step.
        """
        self._model = model
        self._observe = observe
        self._holds_copies = holds_copies
        self._frozen: FrozenWeights | None = None
        """Parameters that were in no optimizer at the first kept step and have not changed since."""
        self.parts: Parts | None = None
        """What of a step is kept; None for everything."""

    def of(self, recording: StepRecording) -> StepTensors:
        """Return references to the update and the weights before the step.

        The update of a round is not in them: see `LocalRound.difference`.
        """
        if recording.round is not None:
            return StepTensors({}, recording.round.weights, recording.round.frozen, {})
        moving, parameters = self._model.moving_ids(), recording.parameters
        if self._observe == "local":
            update = {name: g / recording.loss_scale for name, g in recording.local.items()}
        else:
            update = {name: p.grad for name, p in parameters if p.grad is not None and id(p) in moving}
        weights, frozen = self.before_round(recording)
        weights |= recording.before
        if flat := self._model.flat_shapes():
            # All processes send the same names. A missing gradient is zero: the optimizer of this process leaves its piece as it is.
            update = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters if id(p) in moving}
            update, weights = as_pieces(update, flat), as_pieces(weights, flat)
        return StepTensors(update, weights, frozen, self._scales(recording))

    def before_round(self, recording: StepRecording) -> tuple[dict[str, Tensor], FrozenWeights]:
        """Return references to the weights that a step may change, and to all others.

        Raises:
            SnapshotError: the packed numbers of a quantised layer changed since the first kept step.
        """
        moving = self._model.moving_ids()
        unmoved = [(name, p) for name, p in recording.parameters if id(p) not in moving]
        flat = self._model.flat_shapes()
        frozen = self._still_frozen([*(one for one in unmoved if one[0] not in flat), *self._model.packed_buffers()])
        self._check_quantised(frozen)
        weights = {name: p.detach() for name, p in recording.parameters if name not in frozen.tensors}
        buffers = {n: b for n, b in recording.buffers.items() if n in self._model.persistent}
        return weights | buffers, frozen

    def _check_quantised(self, frozen: FrozenWeights) -> None:
        if not self._holds_copies:
            return
        for name, layer in self._model.quantised.items():
            if not layer.packed <= frozen.tensors.keys():
                raise SnapshotError(
                    f"the packed numbers of {name!r} changed during the run, or are of a kind whose changes are not seen, so its matrix is not "
                    "known; keep the quantised layers as they are during an audit"
                )

    def _scales(self, recording: StepRecording) -> dict[str, Tensor]:
        """Return the scale that some gradients still contain, by parameter name.

        A GradScaler lets fused optimizers unscale inside their step. Gradients of this process alone are unscaled already.
        """
        if self._observe == "local":
            return {}
        found = {id(p): getattr(one, "grad_scale", None) for one in self._model.optimizers for p in parameters_of(one)}
        return {name: scale for name, p in recording.parameters if (scale := found.get(id(p))) is not None}

    def _still_frozen(self, unmoved: Iterable[tuple[str, Tensor]]) -> FrozenWeights:
        """Return the parameters that seem not to have changed since the first kept step."""
        if not self._holds_copies:
            return FrozenWeights({}, {})  # this process writes nothing
        if self._frozen is None:
            self._frozen = FrozenWeights.of(unmoved, self._model.quantised)
        else:
            self._frozen = self._frozen.still_in(unmoved)
        return self._frozen

    # ------------------------------------------------------------------ sizes

    def expected_sources(self) -> Iterator[tuple[str, Source]]:
        """Yield the tensors that every step copies.

        Sketches and rows of the word embedding are left out.
        """
        parts = self.parts
        flat = self._model.flat_shapes()
        for name, held in self._model.trained():
            parameter = FlatPiece(held.detach(), flat[name]) if name in flat else held
            if parts is None or name in parts.updates:
                yield f"u/{name}", Source(parameter, self._update_dtype(parameter))
            if parts is None or name in parts.weights:
                yield f"w/{name}", Source(parameter, parameter.dtype)
        for name, buffer in self._model.persistent_buffers().items():
            yield f"w/{name}", Source(buffer, buffer.dtype)
        for name, value in self._optimizer_state().items():
            yield f"o/{name}", Source(value, value.dtype)

    def held_in_advance(self) -> Iterator[tuple[str, Source]]:
        """Yield the tensors for whose copies memory is allocated before training.

        Tables of embeddings are left out: mostly few rows of their update are not zero, and only these are copied.
        """
        module, tied = self._model.module, {name for pair in tied_names(self._model.module) for name in pair}
        tables = {id(found.weight) for found in module.modules() if isinstance(found, nn.Embedding)}
        in_few_rows = {f"u/{name}" for name, p in self._model.trained() if id(p) in tables and name not in tied}
        yield from ((key, source) for key, source in self.expected_sources() if key not in in_few_rows)

    def _update_dtype(self, parameter: Tensor) -> torch.dtype:
        return torch.float32 if self._observe == "delta" else stored_dtype(parameter.dtype)

    def _optimizer_state(self) -> dict[str, Tensor]:
        """Return the moments that a round would go on from now.

        Empty if there are none, or if they cannot be read: such a round is not kept.
        """
        if self._observe != "delta" or not has_stepped(self._model.optimizers[0], self._model.names()):
            return {}
        try:
            return state_tensors(self._model.optimizers[0], self._model.names())
        except SnapshotError:
            return {}

    def bytes_of_a_step(self) -> int:
        """Return the size of the copies of one step, in bytes.

        The copies are the trained weights, their update, the persistent buffers and, for a round, the optimizer's moments. If only parts are kept, rows of the word embedding are
        not counted, because their number depends on the tokens of the batch.
        """
        sketches = 0 if self.parts is None else sum(4 * min(BUCKETS, p.numel()) for _, p in self._model.trained())
        return sketches + sum(source.bytes for _, source in self.expected_sources())

    def bytes_to_write(self) -> int:
        """Return what the next kept step takes on the disk, in bytes.

        This includes the frozen weights if the step is the first one.
        """
        moving = self._model.moving_ids()
        frozen = sum(layer.bytes for layer in self._model.quantised.values()) + sum(
            p.numel() * p.element_size()
            for name, p in self._model.parameters()
            if id(p) not in moving and not self._model.is_packed(name)
        )
        return self.bytes_of_a_step() + (frozen if self._frozen is None else 0)
