"""The decision whether a recorded step is kept; the writer gets its copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from leakaudit.capture.observing.forward_hooks import MOST_BYTES, ForwardHooks
from leakaudit.capture.observing.optimizers import check_all_moved
from leakaudit.capture.processes.process_group import EndOfStepAnswer, ProcessGroup
from leakaudit.capture.recording.background_writer import BackgroundWriter
from leakaudit.capture.recording.copies import POOL_BYTES, CopyBuffers
from leakaudit.capture.recording.kept_step import KeptStep
from leakaudit.capture.recording.live_model import LiveModel
from leakaudit.capture.recording.pass_recorder import PassRecorder
from leakaudit.capture.recording.step_copier import StepCopier
from leakaudit.capture.recording.step_recording import CopiedStep, StepRecording
from leakaudit.capture.recording.step_tensors import Observe
from leakaudit.errors import LeakAuditError, SnapshotError


class StepKeeper:
    """A keeper that copies a recorded step and passes it to the writer."""

    def __init__(
        self,
        model: LiveModel,
        passes: PassRecorder,
        forwards: ForwardHooks,
        copier: StepCopier,
        buffers: CopyBuffers,
        writer: BackgroundWriter,
        *,
        group: ProcessGroup | None,
        observe: Observe,
        withdraw: Callable[[int], None],
    ) -> None:
        """Prepare.

        Args:
            model: the live model.
            passes: knows which weights the passes saw.
            forwards: hooks on the object that the loop calls.
            copier: copies a step.
            buffers: memory for the copies.
            writer: writes a copied step.
            group: the processes of a distributed run.
            observe: what the client sends.
            withdraw: removes a written step, by its number.
        """
        self._model = model
        self._passes = passes
        self._forwards = forwards
        self.copier = copier
        self._buffers = buffers
        self._writer = writer
        self._group = group
        self.answer = EndOfStepAnswer(group)
        self._observe = observe
        self._withdraw = withdraw
        self._confirmed = False
        """Whether one step was observed to its end, and its optimizers moved the weights by what was copied."""
        self._confirmed_notes: list[str] = []
        """What could not be known of that step."""

    # ------------------------------------------------------------------ before the weights move

    def keep(self, recording: StepRecording, start: float) -> CopiedStep | None:
        """Copy a step whose gradients are final.

        Every process of a distributed run calls this, or no process does.

        Args:
            recording: of the step.
            start: when the training thread entered the recorder, by `time.perf_counter`.

        Returns:
            The step, to be confirmed when its optimizers have stepped; None if it is not kept, or if the writer has it already.

        Raises:
            SnapshotError: the step would not be what the client sends, or too much of it would have to be held.
        """
        if recording.round is None:
            recording.parameters = self._model.parameters()
        self._check(recording)
        self._watch_forward_if_unseen(recording)
        if recording.round is not None:
            self._forwards.due_again = not recording.round.optimizer.learning_rate
            recording.round.check()
        recording.end_trace()
        passes = recording.counted_passes()
        truth = self.copier.truth_of(recording, passes)
        too_large = any(p.too_large for p in passes)
        if self._group is not None:
            if not self.answer.give(not self._writer.writing() and not too_large):
                return None
            if self._observe == "update":
                truth = self._group.gather(truth)
        elif self._writer.writing():
            return None  # buffers are in use; the adapter has counted a skipped step
        if too_large:
            raise SnapshotError(
                f"its loss is computed outside the model, from outputs of more than {MOST_BYTES // 10**6} MB a step; let the model "
                "compute it (`labels`), or take smaller micro-batches"
            )
        kept = self.copier.copy(recording, passes, truth, start)
        if kept is None:
            return CopiedStep(recording)
        found = CopiedStep(recording, kept=kept, notes=[self._passes.note_on_weights(recording, passes)])
        if recording.round is not None:
            self._hand_over(kept, found.notes)
            return None
        return found

    def _check(self, recording: StepRecording) -> None:
        """Refuse a step that is visibly not what the client sends, before it is copied.

        Raises:
            SnapshotError: says what was found and what to do.
        """
        if recording.problem:
            raise SnapshotError(recording.problem)
        if self._forwards.left_out_of_a_graph:
            raise SnapshotError(
                "the model runs in a function that is compiled with `fullgraph=True`, and no hook can be in its graph: compile the model "
                "(`torch.compile(model, fullgraph=True)`) instead of the function that calls it. No later step of this run is kept"
            )
        if torch._C._current_graph_task_id() != -1:
            raise SnapshotError(
                "its optimizer steps during the backward pass, when only some of the gradients are there; call the optimizer after the backward pass"
            )
        self._model.check_shapes(self._model.parameters() if recording.round is not None else recording.parameters)
        check_all_moved(recording.parameters, self._model.optimizers)
        self._passes.check_weights(recording)

    def _watch_forward_if_unseen(self, recording: StepRecording) -> None:
        """Watch the model's `forward` from the next due step on, if no call was seen.

        A library may call `forward` itself, which reaches no hook.

        Raises:
            SnapshotError: this step is lost.
        """
        if recording.passes or self._group is not None or self._forwards.watches_forward:
            return
        self._forwards.watch_forward()
        raise SnapshotError(
            "the audit saw no forward pass that this update comes from; give the audit the object that the training loop calls. The next step "
            "is kept in its place if the loop calls `forward` itself"
        )

    def write_if_large(self, found: CopiedStep) -> None:
        """Write a step before its weights move, if it is too large for a copy.

        Such a step cannot be compared with the movement of the weights later. So it is written only if torch's own code moves them, or if
        an earlier step was confirmed. Otherwise this step is not kept, but a later one may be.
        """
        if found.kept is None or self._buffers.pooled:
            return
        kept, found.kept = found.kept, None
        plain = len(self._model.optimizers) == 1 and all(given.trusted for given in found.optimizer_steps.values())
        if plain or self._confirmed:
            found.written = True
            self._hand_over(kept, [*found.notes, *self._confirmed_notes])
        else:
            self._writer.not_kept(
                found.recording.step,
                SnapshotError(
                    f"it is larger than {POOL_BYTES // 10**9} GB, so it is written before the optimizer steps; the audit must see one step of "
                    "this optimizer to the end first, and keeps the next one that is due"
                ),
            )

    # ------------------------------------------------------------------ after the weights moved

    def confirm(self, found: CopiedStep) -> None:
        """Give the writer a step whose weights moved by the copied update."""
        self._confirmed, self._confirmed_notes = True, found.notes
        if found.kept is not None:
            self._hand_over(found.kept, found.notes)

    def drop(self, found: CopiedStep, error: LeakAuditError) -> None:
        """Count a copied step as not kept; remove it if it is on the disk already."""
        if found.written:
            self._withdraw(found.recording.step)
            self._writer.removed(found.recording.step, error)
        else:
            self._writer.not_kept(found.recording.step, error)

    def _hand_over(self, kept: KeptStep, notes: list[str]) -> None:
        """Give a step to the writer.

        Args:
            kept: the step.
            notes: on what cannot be known of it; empty notes are left out.
        """
        recipe = kept.manifest.recipe
        note = "; ".join(dict.fromkeys(filter(None, (recipe.note, *notes))))
        manifest = kept.manifest.model_copy(update={"recipe": recipe.model_copy(update={"note": note})})
        kept = replace(kept, manifest=manifest)
        if self._buffers.pooled:
            self._writer.begin(kept)
        else:
            self._writer.write_now(kept)
