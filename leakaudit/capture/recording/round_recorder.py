"""The recorder of a round of local steps."""

from __future__ import annotations

from leakaudit.capture.observing.local_optimizer import LocalOptimizer
from leakaudit.capture.recording.background_writer import BackgroundWriter
from leakaudit.capture.recording.copies import CopyBuffers, Source
from leakaudit.capture.recording.live_model import LiveModel
from leakaudit.capture.recording.local_round import LocalRound
from leakaudit.capture.recording.step_recording import StepRecording
from leakaudit.capture.recording.step_tensors import TensorSelection
from leakaudit.client.local_steps import state_tensors
from leakaudit.client.optimizer import UNKNOWN
from leakaudit.errors import LeakAuditError


class RoundRecorder:
    """A recorder that copies what was before a round, and notes each local step."""

    def __init__(
        self,
        model: LiveModel,
        selection: TensorSelection,
        buffers: CopyBuffers,
        writer: BackgroundWriter,
        *,
        local_steps: int | None,
    ) -> None:
        """Prepare.

        Args:
            model: the live model with its only optimizer.
            selection: which tensors are kept.
            buffers: memory for the copies.
            writer: counts rounds that are not kept.
            local_steps: K optimizer steps that make a round; None if the loop says when a round is over.
        """
        self._model = model
        self._selection = selection
        self._buffers = buffers
        self._writer = writer
        self._local_steps = local_steps

    def goes_on(self, recording: StepRecording) -> bool:
        """Note a local step whose gradient is final.

        Before the first one, the weights and the optimizer's state are copied.

        Returns:
            Whether the round goes on; it does not if it cannot be computed again.
        """
        try:
            self._note_step(recording)
        except LeakAuditError as error:
            self._writer.not_kept(recording.step, error)
            return False
        return True

    def _note_step(self, recording: StepRecording) -> None:
        (optimizer,), names = self._model.optimizers, self._model.names()
        if recording.round is None:
            recording.parameters = self._model.parameters()
            recording.round = self._begun(recording, LocalOptimizer.of(optimizer, names))
        recording.round.optimizer.note_step(optimizer, names)
        if recording.trace is not None:
            recording.trace.given()
        recording.round.loss_scales.add(recording.loss_scale)
        new = [seen for seen in recording.passes if seen.backward is not None and not seen.stepped]
        recording.round.steps.append(new)
        for seen in new:
            seen.stepped = True

    def is_over(self, recording: StepRecording) -> bool:
        """Count a local step that was made; return whether it was the last one."""
        recording.steps_done += 1
        if recording.trace is not None:
            recording.trace.moved()
        return recording.steps_done == self._local_steps

    def _begun(self, recording: StepRecording, optimizer: LocalOptimizer) -> LocalRound:
        weights, frozen = self._selection.before_round(recording)
        state = (
            {}
            if optimizer.fresh or optimizer.algorithm == UNKNOWN
            else state_tensors(self._model.optimizers[0], self._model.names())
        )
        sources = {f"w/{name}": Source(weight, weight.dtype) for name, weight in weights.items()}
        sources |= {f"o/{name}": Source(value, value.dtype) for name, value in state.items()}
        copies, ready = self._buffers.copy(sources, on_gpu=self._model.on_gpu())
        return LocalRound(
            weights={name: copies[f"w/{name}"] for name in weights},
            frozen=frozen,
            state={name: copies[f"o/{name}"] for name in state},
            ready=ready,
            optimizer=optimizer,
        )
