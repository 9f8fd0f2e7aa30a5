"""The recorder's check of a step before the optimizer moves the weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from leakaudit.capture.in_place.check import UnheldError, check
from leakaudit.capture.in_place.loss_origin import loss_is_inside, loss_is_like
from leakaudit.capture.in_place.repetition import Repetition
from leakaudit.capture.in_place.state_before import NotInPlaceError, StateBefore
from leakaudit.capture.observing.entry_sample import few_entries, own_part
from leakaudit.capture.observing.forward_hooks import ForwardHooks, ForwardPass
from leakaudit.capture.recording.background_writer import Counters
from leakaudit.capture.recording.copies import fits_in_memory
from leakaudit.capture.recording.live_model import LiveModel
from leakaudit.capture.recording.step_recording import StepRecording
from leakaudit.capture.recording.step_tensors import StepTensors
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.snapshot import Manifest
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.errors import type_and_place
from leakaudit.results.schema import Verification


@dataclass(frozen=True)
class InPlaceResult:
    """The result of the repetition of a step."""

    stamp: Verification | None = None
    """None where the step was not repeated."""
    own_loss: bool | None = None
    """Whether its loss is the one that the model's class computes; None where that is not known."""
    seconds: float = 0.0
    why_not: str = ""
    """Why the step was not repeated; empty where it was, or where nobody asked for it."""


class InPlaceCheck:
    """The check that repeats steps on the live model."""

    def __init__(self, model: LiveModel, forwards: ForwardHooks, counters: Counters) -> None:
        """Prepare; `note_begin` comes before the first step."""
        self._model = model
        self._forwards = forwards
        self._counters = counters
        self._begin: dict[str, Tensor] = {}

    def note_begin(self) -> None:
        """Remember a few entries of each trained parameter when the run begins."""
        self._begin = {name: few_entries(own_part(p)).clone() for name, p in self._model.trained()}

    def run(
        self,
        recording: StepRecording,
        passes: list[ForwardPass],
        truth: Truth,
        manifest: Manifest,
        tensors: StepTensors,
    ) -> InPlaceResult:
        """Repeat a step before the optimizer moves the weights.

        Raises:
            UnheldError: the loss sent more gradients to the outputs than were held; the next step is recorded with all of them.
        """
        if recording.state is None or not tensors.update:
            return InPlaceResult()
        size = sum(gradient.numel() * gradient.element_size() for gradient in tensors.update.values())
        if not fits_in_memory(size):  # a machine without that much memory would end the training
            return InPlaceResult(
                why_not=f"its gradients take {size / 1e9:.1f} GB, and a repetition would need as much again"
            )
        start = time.perf_counter()
        repetition = self._repetition(recording, recording.state, passes, manifest.recipe)
        try:
            self._forwards.paused = True
            step = ClientStep(self._model.module, truth, manifest.recipe, manifest.facts)
            stamp = check(step, _unscaled(tensors), repetition)
            own = self._is_own_loss(repetition, truth) if stamp.status.bounds else None
            return InPlaceResult(stamp, own, time.perf_counter() - start)
        except UnheldError:
            self._forwards.hold_everything()
            raise
        except NotInPlaceError as error:
            return InPlaceResult(seconds=time.perf_counter() - start, why_not=str(error))
        except Exception as error:  # the user's model is called here: whatever it raises, the rebuilt one may work
            why = f"repeating it raised {type_and_place(error)}"
            return InPlaceResult(seconds=time.perf_counter() - start, why_not=why)
        finally:
            self._forwards.paused = False
            self._counters.check_s += time.perf_counter() - start

    def _repetition(
        self, recording: StepRecording, state: StateBefore, passes: list[ForwardPass], recipe: StepRecipe
    ) -> Repetition:
        return Repetition(
            called=state.called,
            passes=passes,
            before=state,
            named=dict(recording.parameters),
            moved=self._model.optimized(),
            recipe=recipe,
            loss_scale=recording.loss_scale,
            begin=self._begin,
        )

    def _is_own_loss(self, repetition: Repetition, truth: Truth) -> bool:
        """Return whether the loss of this step is the model's own.

        A loop may use another loss in its next step.
        """
        if loss_is_inside(repetition.passes, self._model.module):
            return True
        try:
            return loss_is_like(repetition, self._model.module, truth.micro_batches)
        except Exception:  # if the class cannot compute its loss on such a batch, an attack cannot either
            return False


def called_in_place(called: nn.Module) -> nn.Module:
    """Return the object that is called to repeat a step.

    It is the object that the loop calls, without a wrapper whose reducer counts passes.
    """
    wrapped = any(kind.__name__ == "DistributedDataParallel" for kind in type(called).__mro__)
    return called.module if wrapped else called  # type: ignore[return-value]


def _unscaled(tensors: StepTensors) -> Mapping[str, Tensor]:
    """Return the dense update, without the scale that some gradients still have."""
    found = {}
    for name, gradient in tensors.update.items():
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        scale = tensors.scales.get(name)
        found[name] = dense if scale is None else dense / scale.to(dense.device)
    return found
