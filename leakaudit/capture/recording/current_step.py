"""The step that is being recorded, until all its optimizers have stepped.

torch and the training loop cause these events, in this order:

1. `start`: the schedule wants the step.
2. `forward_begins`, and `backward_arrives` at that forward pass.
3. `before_step`: the gradients are final, and the weights are still those of the forward pass. The step is copied at the first of
   several optimizers; at the others, gradients that changed since are copied again.
4. `after_step`: the movement of the weights is compared with the copy. After the last optimizer the writer gets the step.

A round of local steps is copied before its first one, and its difference of weights after its last one, or at `end_round`.

A forward pass between the steps of two optimizers begins the step again, because some weights moved before that pass.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from leakaudit.capture.boundary import around, entry
from leakaudit.capture.observing.calls import copied
from leakaudit.capture.observing.forward_hooks import ForwardHooks, ForwardPass
from leakaudit.capture.observing.optimizer_hooks import OptimizerHooks, closure_of, replaced_closure
from leakaudit.capture.observing.optimizers import nested
from leakaudit.capture.recording.background_writer import BackgroundWriter
from leakaudit.capture.recording.live_model import LiveModel
from leakaudit.capture.recording.local_gradients import LocalGradients
from leakaudit.capture.recording.pass_recorder import PassRecorder
from leakaudit.capture.recording.round_recorder import RoundRecorder
from leakaudit.capture.recording.step_keeper import StepKeeper
from leakaudit.capture.recording.step_recording import SKIPPED, CopiedStep, StepRecording
from leakaudit.capture.recording.step_tensors import Observe
from leakaudit.client.snapshot import Manifest
from leakaudit.errors import LeakAuditError, SnapshotError

MOST_RESTARTS = 16
"""How often a step of several optimizers begins again before a warning says so. Our choice: optimizers that step less often than others
do so every few steps."""


class CurrentStep:
    """A recorder of one step after another, driven by torch and the training loop."""

    def __init__(
        self,
        model: LiveModel,
        passes: PassRecorder,
        forwards: ForwardHooks,
        keeper: StepKeeper,
        writer: BackgroundWriter,
        *,
        observe: Observe,
        rounds: RoundRecorder | None,
        failed: Callable[[Exception], None],
    ) -> None:
        """Prepare; nothing is hooked before `hooks.install`.

        Args:
            model: the live model.
            passes: records forward and backward passes.
            forwards: hooks on the object that the loop calls.
            keeper: copies a recorded step and passes it to the writer.
            writer: counts what was kept.
            observe: what the client sends.
            rounds: records the local steps of a round; None where `observe` is not `delta`.
            failed: called with each exception that is raised in an entry.
        """
        self._model = model
        self._passes = passes
        self._forwards = forwards
        self._keeper = keeper
        self._writer = writer
        self._observe = observe
        self._rounds = rounds
        self._fail = failed
        self.hooks = OptimizerHooks(model.optimizers, self.before_step, self.after_step)
        self._local = LocalGradients(model, lambda: None if self._recording is None else self._recording.local, failed)
        self._recording: StepRecording | None = None
        self._copied: CopiedStep | None = None
        self.stopped = False
        """Whether no more steps are recorded."""

    # ------------------------------------------------------------------ beginning and end

    def start(self, step: int, manifest: Manifest) -> None:
        """Record the step that begins now."""
        self.cancel()
        self._recording = StepRecording(step, manifest)
        self._keeper.answer.owe(step)
        self._forwards.open()
        if self._observe == "local":
            self._local.open()

    def cancel(self) -> None:
        """Drop what was recorded of a step that did not end."""
        if (found := self._copied) is not None and found.stepped:
            why = f"the step ended before {found.missing(self._model.optimizers)}"
            self._writer.not_kept(found.recording.step, SnapshotError(why))
        elif self._recording is not None and self._recording.was_skipped():
            self._writer.not_kept(self._recording.step, SnapshotError(SKIPPED))
        self._close()
        self._keeper.answer.refuse()

    def stop(self) -> None:
        """Record no more steps; the other processes still get their answers."""
        self.stopped = True
        self._recording = self._copied = None

    def note_batch(self, values: Mapping[str, Any]) -> None:
        """Note the whole batch of the next forward pass, withheld inputs included."""
        self._restart_if_stepped()
        if self._recording is not None:
            self._recording.withheld_inputs = copied(values)

    def _close(self) -> None:
        """Record no more of this step; the other processes still wait for an answer."""
        self._recording = self._copied = None
        self._unhook()

    def _unhook(self) -> None:
        self._forwards.close()
        self._local.close()

    # ------------------------------------------------------------------ forward and backward passes

    def forward_begins(self, seen: ForwardPass) -> None:
        """Add a forward pass."""
        self._restart_if_stepped()
        recording = self._recording
        if recording is None:
            return
        start = time.perf_counter()
        if not recording.passes:
            self.hooks.come_last()
            self.hooks.rounds.restart()
        self._passes.add_pass(recording, seen)
        self._writer.blocked_since(start)

    def backward_arrives(self, seen: ForwardPass, number: int) -> None:
        """Note that a backward pass reaches a forward pass."""
        if self._recording is not None:
            self._passes.add_backward(self._recording, seen, number)

    def _restart_if_stepped(self) -> None:
        """Begin the step again, if only some of its optimizers have stepped."""
        found = self._copied
        if found is None or not found.stepped:
            return
        self._copied = None
        restarts = found.recording.restarts + 1
        self._recording = StepRecording(found.recording.step, found.recording.manifest, restarts=restarts)
        self._keeper.answer.owe(found.recording.step, restarts)
        if restarts == MOST_RESTARTS:
            self._writer.not_kept(found.recording.step, found.restarted(restarts, self._model.optimizers))

    # ------------------------------------------------------------------ before an optimizer steps

    @entry
    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Copy now, or after the first call of the closure if the step has one."""
        if nested(optimizer):
            return None
        optimizer = self.hooks.base_of(optimizer)
        closure = closure_of(args, kwargs)
        if closure is None or (self._recording is None and self._copied is None):
            if not self._ends_the_step_before(optimizer):
                self._copy(optimizer)
            return None
        observed = around(closure, after=functools.partial(self._evaluated, optimizer, itertools.count()))
        return replaced_closure(args, kwargs, observed)

    @entry
    def _evaluated(self, optimizer: Any, calls: Iterator[int], _loss: Any) -> None:
        """Copy at the first evaluation: an optimizer may evaluate its closure many times."""
        if next(calls) == 0:
            self._copy(optimizer)
        if self._copied is not None and id(optimizer) in self._copied.optimizer_steps:
            self._copied.optimizer_steps[id(optimizer)].evaluated()

    def _ends_the_step_before(self, optimizer: Any) -> bool:
        """Return whether one of several optimizers steps before the first forward pass."""
        recording = self._recording
        if recording is None or recording.passes or len(self._model.optimizers) == 1:
            return False
        recording.ignored.add(id(optimizer))
        return len(recording.ignored) < len(self._model.optimizers)

    def _copy(self, optimizer: Any) -> None:
        """Copy the gradients that the optimizer got; always answer the other processes."""
        start, recording = time.perf_counter(), self._recording
        try:
            if self._copied is not None:
                self._join(self._copied, optimizer)
            elif recording is not None and self._rounds is not None:
                if not self._rounds.goes_on(recording):
                    self._close()
            elif recording is not None:
                self._finish(recording, start)
                if self._copied is not None:
                    self._copied.entered.add(id(optimizer))
        finally:
            self._keeper.answer.refuse()
            if self.stopped:
                self._unhook()
            self._writer.blocked_since(start)

    def end_round(self) -> None:
        """End a round of unknown length; drop it if it had no local step."""
        if self._recording is None or not self._recording.steps_done:
            self.cancel()
        else:
            self._finish(self._recording, time.perf_counter())

    def _join(self, found: CopiedStep, optimizer: Any) -> None:
        """Continue a copied step at its next optimizer; copy changed gradients again."""
        if id(optimizer) in found.entered:
            self._drop(
                found,
                SnapshotError(f"{type(optimizer).__name__} steps again before {found.missing(self._model.optimizers)}"),
            )
            return
        found.entered.add(id(optimizer))
        given = found.optimizer_steps.get(id(optimizer))
        if given is None:
            return
        found.optimizer_steps[id(optimizer)] = self.hooks.step_of(optimizer)
        if given.gradients.touched(given.now):
            self._keeper.copier.copy_again(found, given)

    def _finish(self, recording: StepRecording, start: float) -> None:
        """End the recording: copy the step, or say why it is not kept."""
        self._recording = None
        if len(self._model.optimizers) == 1:  # otherwise hooks must see a forward pass before all have stepped
            self._unhook()
        try:
            found = self._keeper.keep(recording, start)
            if found is None:
                return
            if found.kept is not None and self._observe != "local":
                found.optimizer_steps = {id(one): self.hooks.step_of(one) for one in self._model.optimizers}
            self._copied = found
            self._keeper.write_if_large(found)
        except LeakAuditError as error:
            if self._forwards.left_out_of_a_graph:  # each hook that is set makes the user's function be compiled again
                self.stop()
            self._unhook()
            self._writer.not_kept(recording.step, error)

    @entry
    def after_step(self, optimizer: Any, *_arguments: Any) -> None:
        """Compare the copy with what the optimizer did, or end a local step."""
        if nested(optimizer):
            return
        optimizer = self.hooks.base_of(optimizer)
        self.hooks.come_last(after_step=True)
        start, recording = time.perf_counter(), self._recording
        if self._copied is not None:
            self._stepped(self._copied, optimizer)
        elif recording is not None and id(optimizer) in recording.ignored:
            return
        elif self._rounds is None:
            self._keeper.answer.refuse()
            if recording is not None:
                self.cancel()
        elif recording is not None and self._rounds.is_over(recording):
            self._finish(recording, start)
        self._writer.blocked_since(start)

    def _stepped(self, found: CopiedStep, optimizer: Any) -> None:
        """Check what one optimizer did; after the last one, give the step to the writer."""
        found.stepped.add(id(optimizer))
        given = found.optimizer_steps.get(id(optimizer))
        try:
            if given is not None:
                found.notes.append(given.check(declared=bool(found.recording.manifest.facts.defenses)))
                if given.copy_after_step:
                    self._keeper.copier.copy_again(found, given)
        except LeakAuditError as error:
            self._drop(found, error)
            return
        if all(id(one) in found.stepped for one in self._model.optimizers):
            self._close()
            self._keeper.confirm(found)

    def _drop(self, found: CopiedStep, error: LeakAuditError) -> None:
        """Give up a copied step, and say why."""
        self._close()
        if found.written:
            self.stop()
        self._keeper.drop(found, error)
