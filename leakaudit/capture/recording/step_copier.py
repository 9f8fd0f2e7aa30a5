"""The copier of a recorded step to the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from leakaudit.capture.observing.forward_hooks import ForwardPass
from leakaudit.capture.observing.optimizer_step import OptimizerStep
from leakaudit.capture.recording.copies import CopyBuffers, Source, stored_dtype
from leakaudit.capture.recording.kept_step import KeptStep
from leakaudit.capture.recording.live_model import LiveModel
from leakaudit.capture.recording.step_recording import CopiedStep, StepRecording
from leakaudit.capture.recording.step_tensors import TensorSelection
from leakaudit.client.snapshot import Manifest
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.errors import SnapshotError


class StepCopier:
    """A copier that makes a `KeptStep` of a recording."""

    def __init__(
        self,
        model: LiveModel,
        selection: TensorSelection,
        buffers: CopyBuffers,
        *,
        convert_pass: Callable[[MicroBatch], MicroBatch],
        complete_manifest: Callable[[Manifest], Manifest],
    ) -> None:
        """Prepare.

        Args:
            model: the live model.
            selection: which tensors are kept.
            buffers: memory for the copies.
            convert_pass: converts a recorded forward pass to the audited model's inputs; it may refuse the step.
            complete_manifest: adds the facts that are known only when the optimizer steps.
        """
        self._model = model
        self._selection = selection
        self._buffers = buffers
        self._convert_pass = convert_pass
        self._complete_manifest = complete_manifest

    def truth_of(self, recording: StepRecording, passes: list[ForwardPass]) -> Truth:
        """Return the batch of a step, as the audited model takes it."""
        return recording.truth(passes, self._convert_pass)

    def copy(self, recording: StepRecording, passes: list[ForwardPass], truth: Truth, start: float) -> KeptStep | None:
        """Copy a step.

        Args:
            recording: of the step.
            passes: those that the update comes from.
            truth: the batch of all processes.
            start: when the training thread entered the recorder, by `time.perf_counter`.

        Returns:
            The step; None where another process keeps it.
        """
        tensors = self._selection.of(recording)
        manifest = self._complete_manifest(recording.manifest)
        if recording.round is not None:
            manifest = recording.round.completed(manifest)
        if self._selection.parts is not None:
            tensors = tensors.reduced_to(self._selection.parts)
        if recording.round is None:
            copies, ready = self._buffers.copy(tensors.sources(), on_gpu=self._model.on_gpu())
            if not self._buffers.held_here:
                return None
            tensors = tensors.copied(copies)
        else:
            update, ready = recording.round.difference(dict(self._model.trained()), manifest, self._buffers)
            tensors = replace(tensors, update=update)
        return KeptStep(
            step=recording.step,
            update=tensors.update,
            weights=tensors.weights,
            truth=truth,
            manifest=manifest,
            copy_seconds=time.perf_counter() - start,
            autocast=next((p.autocast for p in passes), None),
            loss_scale=recording.loss_scale,
            eval_modules=tuple(p.eval_modules for p in passes),
            has_output_gradients=bool(passes),
            frozen=tensors.frozen,
            differentiated_again=any(p.differentiable for p in passes),
            unheld=tuple(sorted(frozenset[str]().union(*(p.unheld for p in passes)))),
            part=tensors.part,
            parameters=0 if tensors.part is None else sum(p.numel() for p in self._model.module.parameters()),
            ready=ready,
        )

    def copy_again(self, found: CopiedStep, given: OptimizerStep) -> None:
        """Copy gradients that changed since the copy, as the new update.

        Raises:
            SnapshotError: the step is written already, only parts of it are kept, or its gradients are sharded, so that only all
                processes together could copy them.
        """
        if found.kept is None:
            if found.written or not self._buffers.pooled:
                raise SnapshotError(f"the gradients that {given.name} moves changed after the step was written")
            return
        if found.kept.part is not None:
            raise SnapshotError(
                f"the gradients that {given.name} moves changed after the parts of them were copied; set `keep: all`"
            )
        mine = {id(p) for p in given.parameters}
        update = {name: p.grad for name, p in found.recording.parameters if id(p) in mine and p.grad is not None}
        if self._model.flat_shapes() or any(hasattr(gradient, "full_tensor") for gradient in update.values()):
            raise SnapshotError(
                f"the gradients that {given.name} moves changed after they were copied, and they are in shards"
            )
        copies, ready = self._buffers.copy_into({f"u/{n}": Source(g, stored_dtype(g.dtype)) for n, g in update.items()})
        fresh = {name: copies[f"u/{name}"] for name in update}
        found.kept = replace(
            found.kept,
            update={**found.kept.update, **fresh},
            ready=ready if update else found.kept.ready,
        )
