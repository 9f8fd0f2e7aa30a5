"""The recorder of the forward and backward passes of a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from leakaudit.capture.observing.calls import random_states
from leakaudit.capture.observing.entry_sample import EntrySample, own_part
from leakaudit.capture.observing.forward_hooks import ForwardPass
from leakaudit.capture.observing.waiting_gradients import waiting_gradients
from leakaudit.capture.recording.live_model import LiveModel
from leakaudit.capture.recording.step_recording import StepRecording
from leakaudit.capture.recording.step_trace import StepTrace
from leakaudit.errors import SnapshotError
from leakaudit.models.wrappers import plain_name


class PassRecorder:
    """A recorder of forward passes.

    It notes the state from which each pass starts, and finds the passes that the update comes from.
    """

    def __init__(self, model: LiveModel, *, scaler: Any, watch_weights: bool, traced: bool = False) -> None:
        """Prepare.

        Args:
            model: the live model.
            scaler: the loop's `GradScaler`; None without one.
            watch_weights: whether all passes of a step must see the same weights.
            traced: whether a few entries are noted at the moments of each optimizer step.
        """
        self._model = model
        self._scaler = scaler
        self._watch_weights = watch_weights
        self._traced = traced
        self._weights_at_first_pass = False
        """Whether weights are copied at the first forward pass, because in an earlier step they changed after it."""

    def add_pass(self, recording: StepRecording, seen: ForwardPass) -> None:
        """Add a forward pass that begins, with the random state before it."""
        if not recording.passes:  # a pass may change buffers
            recording.buffers = {name: _copy(buffer) for name, buffer in self._model.buffers_of_a_pass().items()}
        if self._watch_weights:
            self._note_weights(recording, seen)
        if self._traced:
            recording.trace = recording.trace or StepTrace(self._model)
            recording.trace.forward()
        seen.rng = random_states([next(self._model.module.parameters())])
        seen.withheld_inputs = recording.withheld_inputs
        seen.eval_modules = tuple(plain_name(n) for n, m in self._model.module.named_modules() if not m.training)
        recording.passes.append(seen)

    def _note_weights(self, recording: StepRecording, seen: ForwardPass) -> None:
        """Remember a few entries of the weights that a pass sees.

        At the first pass all weights are copied, if an earlier step showed that they change within a step.
        """
        if not recording.passes:
            recording.moving = self._model.moving()
        if self._weights_at_first_pass and not recording.before:
            recording.before = {name: _copy(p) for name, p in self._model.trained()}
        sample = EntrySample.of(recording.moving)
        seen.on_other_weights = bool(recording.seen_weights) and not recording.seen_weights[0][1].equals(sample)
        recording.seen_weights.append((seen, sample))

    def add_backward(self, recording: StepRecording, seen: ForwardPass, backward: int) -> None:
        """Note that a backward pass reaches a forward pass; drop passes that were zeroed.

        A step that a GradScaler skips calls no hook of the optimizer, and zeroing cannot be hooked. But if a backward pass finds every
        gradient empty, the gradients of all earlier passes were zeroed.
        """
        if self._scaler is not None:
            recording.loss_scale = float(self._scaler.get_scale())
        begins = recording.restarts and all(p.backward is None for p in recording.passes)
        if begins and not self._gradients_are_empty():
            recording.problem = (
                "one of its optimizers accumulates gradients over several steps of another one, which moves the weights in between: no "
                "one set of weights gives such an update"
            )
        earlier = [p for p in recording.passes if p.backwards.keys() - {backward} and not p.stepped]
        zeroed = bool(earlier) and not self._loop_clips_examples(recording) and self._gradients_are_empty()
        if recording.trace is not None:
            recording.trace.backward(empty=zeroed)
        if zeroed:
            for one in earlier:
                one.backwards = {number: what for number, what in one.backwards.items() if number == backward}
            dropped = {id(p) for p in earlier if not p.backwards and p is not seen}
            recording.passes = [p for p in recording.passes if id(p) not in dropped]

    def _loop_clips_examples(self, recording: StepRecording) -> bool:
        """Return whether the loop itself clips each example.

        Such a loop zeroes gradients between passes whose sum is the update. An optimizer of Opacus clips without zeroing: it keeps sums of
        its own beside the gradients.
        """
        declared = [defense for defense in recording.manifest.facts.known_defenses if defense is not None]
        by_hand = not any(hasattr(parameter, "summed_grad") for _, parameter in self._model.trained())
        return by_hand and any(defense.per_example for defense in declared)

    def _gradients_are_empty(self) -> bool:
        """Return whether every gradient is missing or zero."""
        for _, parameter in self._model.trained():
            if getattr(parameter, "summed_grad", None) is not None:  # Opacus, between the parts of a logical batch
                return False
            gradient = parameter.grad
            if gradient is not None and bool(own_part(gradient).any()):
                return False
        return not any(bool(own_part(gradient).any()) for gradient in waiting_gradients(self._model.module))

    def check_weights(self, recording: StepRecording) -> None:
        """Refuse a step whose weights changed between its first pass and its update.

        From the next step on, the weights of the first pass are kept.

        Raises:
            SnapshotError: counts the parameters.
        """
        if not recording.seen_weights or recording.before:
            return
        if changed := recording.seen_weights[0][1].changed(recording.moving):
            self._weights_at_first_pass = True
            raise SnapshotError(
                f"the weights of {len(changed)} of {len(recording.moving)} parameters changed between its first forward pass and its step, as "
                "SAM and swapped averages do; the next step that is due is kept with the weights of its first pass"
            )

    def note_on_weights(self, recording: StepRecording, passes: list[ForwardPass]) -> str:
        """Return a sentence on passes that saw other weights than the kept ones.

        The sentence is empty if there are none.
        """
        if not recording.seen_weights:
            return ""
        first_seen = recording.seen_weights[0][1]
        kept = {id(p) for p in passes}
        here = [seen for seen, _ in recording.seen_weights if id(seen) in kept]
        others = sum(seen.on_other_weights for seen in here)
        if others:
            return (
                f"{others} of {len(here)} forward passes saw other weights than those that are kept (SAM, FGM): such a pass cannot be "
                "repeated from the weights that the client received"
            )
        if first_seen.touched(recording.moving):
            return (
                "weights were written to between the first forward pass and the step, and put back (FGM, SAM, swapped averages): a gradient "
                "that was computed in between cannot be repeated from the weights that the client received"
            )
        return ""


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
