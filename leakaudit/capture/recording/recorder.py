"""The recorder of single training steps: the transmitted update and its batch.

A record holds the weights before the step, the update as the optimizer gets it, and the batch. No framework is imported here; adapters
say when a step is due and what its batch was. The only place where the final gradient can be read under every trainer is a pre-hook on
the step of the base optimizer: after accumulation, unscaling, clipping and a defence's noise, before the weights move. After the step
the weights' movement is compared with the copy, and only then the writer gets the copy; a step that is too large for a copy is written
before it. Several optimizers make one step of the audit, which ends when all of them have stepped.

The training thread copies into buffers that are reused; a background thread writes. Nothing raises into training: a step that cannot
be written is counted, and any other exception is logged once and ends the recording.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from leakaudit.capture.boundary import entry
from leakaudit.capture.observing.forward_hooks import ForwardHooks
from leakaudit.capture.observing.optimizers import Rounds, base_optimizers, every_layer
from leakaudit.capture.processes.flat_shards import flat_shapes
from leakaudit.capture.processes.process_group import ProcessGroup
from leakaudit.capture.recording.background_writer import PATIENCE_SECONDS, BackgroundWriter, Counters
from leakaudit.capture.recording.copies import CopyBuffers
from leakaudit.capture.recording.current_step import CurrentStep
from leakaudit.capture.recording.kept_step import KeptStep
from leakaudit.capture.recording.live_model import LiveModel
from leakaudit.capture.recording.pass_recorder import PassRecorder
from leakaudit.capture.recording.round_recorder import RoundRecorder
from leakaudit.capture.recording.step_copier import StepCopier
from leakaudit.capture.recording.step_keeper import StepKeeper
from leakaudit.capture.recording.step_tensors import Observe, TensorSelection
from leakaudit.client.snapshot import Manifest
from leakaudit.client.truth import MicroBatch
from leakaudit.errors import SnapshotError, type_and_place
from leakaudit.models.first_blocks import BOUNDARY, Parts
from leakaudit.models.quantised_layers import QuantisedLayer
from leakaudit.models.wrappers import plain_name

logger = logging.getLogger(__name__)


class Recorder:
    """A recorder of single steps of one model and its optimizers."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        write: Callable[[KeptStep], None],
        *,
        called: nn.Module | None = None,
        scaler: Any = None,
        peers: ProcessGroup | None = None,
        observe: Observe = "update",
        local_steps: int | None = 1,
        max_bytes: float = float("inf"),
        convert_pass: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
        complete_manifest: Callable[[Manifest], Manifest] = lambda manifest: manifest,
        withdraw: Callable[[int], None] = lambda _step: None,
        unsaved_buffers: frozenset[str] = frozenset(),
        quantised: Mapping[str, QuantisedLayer] | None = None,
        made_again: bool = False,
    ) -> None:
        """Prepare; hooks are set by `install`.

        Args:
            model: the unwrapped model whose parameters the optimizer moves.
            optimizer: the optimizer, a wrapper around it, or a list of several that share the model.
            write: called in a background thread with each kept step; its exceptions are logged, never raised.
            called: the object that the training loop calls, wrappers included; `model` if None.
            scaler: the `GradScaler`, where the optimizer's wrappers do not hold it.
            peers: the processes of a distributed run.
            observe: what the client sends.
            local_steps: K optimizer steps that make one `delta`; None if `end_round` says when a round is over.
            max_bytes: a step whose copies are larger than this is not recorded.
            convert_pass: converts a recorded forward pass to the audited model's inputs; may refuse the step.
            complete_manifest: adds the facts that are known only when the optimizer steps, such as scheduled noise.
            withdraw: removes a written step, by its number.
            unsaved_buffers: names of buffers that are kept although the model's state dict does not hold them.
            quantised: plain name -> layer of the model that stores its matrix in few bits.
            made_again: whether another process makes the model, as it is at the beginning.
        """
        called = model if called is None else called
        self._max_bytes = max_bytes
        self._unsaved_buffers = unsaved_buffers
        self._model = LiveModel(model, base_optimizers(optimizer), quantised, flat_shapes(called))
        if made_again:
            self._model.note_shapes()
        self.writer = BackgroundWriter(write, self._fail)
        self.buffers = CopyBuffers(peers, always_pooled=observe == "delta")
        self._selection = TensorSelection(self._model, observe, holds_copies=self.buffers.held_here)
        self._forwards = ForwardHooks(
            called,
            lambda seen: self.current.forward_begins(seen),
            lambda seen, number: self.current.backward_arrives(seen, number),
            self._fail,
        )
        passes = PassRecorder(
            self._model,
            scaler=scaler or _scaler_in(optimizer),
            watch_weights=observe != "delta",
            traced=peers is None and len(self._model.optimizers) == 1,
        )
        copier = StepCopier(
            self._model,
            self._selection,
            self.buffers,
            convert_pass=convert_pass,
            complete_manifest=complete_manifest,
        )
        keeper = StepKeeper(
            self._model,
            passes,
            self._forwards,
            copier,
            self.buffers,
            self.writer,
            group=peers,
            observe=observe,
            withdraw=withdraw,
        )
        self.current = CurrentStep(
            self._model,
            passes,
            self._forwards,
            keeper,
            self.writer,
            observe=observe,
            rounds=RoundRecorder(self._model, self._selection, self.buffers, self.writer, local_steps=local_steps)
            if observe == "delta"
            else None,
            failed=self._fail,
        )

    # ------------------------------------------------------------------ setting up and ending

    def install(self) -> None:
        """Set the hooks and allocate the buffers; a second call changes nothing.

        Raises:
            SnapshotError: one step is larger than `max_bytes`, or the optimizer moves no parameter of the model.
        """
        if self.current.hooks.installed:
            return
        self._model.note_persistent(self._unsaved_buffers)
        size = self.bytes_to_write()
        if size > self._max_bytes:
            raise SnapshotError(
                f"one step of this model takes {size // 10**6} MB and `max_spool_gb` allows {self._max_bytes / 10**6:.0f} MB: "
                "raise it, or train fewer parameters (LoRA, frozen layers)"
            )
        if not self._model.trained():
            raise SnapshotError(
                "the optimizer moves no parameter of this model; give the optimizer and the model that belong together"
            )
        self.buffers.choose(self.bytes_of_a_step(), on_gpu=self._model.on_gpu())
        if self.buffers.held_here and self.buffers.pooled:
            self.buffers.make(self._selection.held_in_advance())
        self.current.hooks.install()

    def stop_recording(self) -> None:
        """Record no more steps, but keep answering the other processes.

        They ask at every step that is due.
        """
        self.current.stop()

    def remove(self, patience_s: float = PATIENCE_SECONDS) -> None:
        """Remove the hooks, and wait for the writer.

        Args:
            patience_s: longest time to wait, in seconds: a stuck disk must not hold up training.
        """
        self.cancel()
        self.current.hooks.remove()
        if not self.written(patience_s) and patience_s:
            logger.warning(
                "the last kept step is still not on the disk after %g s; the audit continues without it", patience_s
            )

    def keep_only(self, parts: Parts) -> None:
        """Keep only parts of a step and sketches of its update; call before `install`."""
        self._selection.parts = parts
        modules = {plain_name(name): module for name, module in self._model.module.named_modules()}
        self._forwards.watch_inside({f"{BOUNDARY}{name}": modules[name] for name in parts.boundary if name in modules})

    # ------------------------------------------------------------------ a step

    def start(self, step: int, manifest: Manifest) -> None:
        """Record the step that begins now.

        Args:
            step: its number.
            manifest: everything about it that is not a tensor, as it is now: the writer must not look it up later.
        """
        if not self.disabled:
            self._forwards.due_again = False
            self.current.start(step, manifest)

    @entry
    def end_round(self) -> None:
        """End a round whose number of local steps was not known (`local_steps=None`).

        The recorded round is kept with the local steps that were taken. Without any, nothing is kept. Nothing happens if none is recorded.
        """
        start = time.perf_counter()
        self.current.end_round()
        self.writer.blocked_since(start)

    def cancel(self) -> None:
        """Drop what was recorded of a step that did not end."""
        self.current.cancel()

    @entry
    def batch(self, values: Mapping[str, Any]) -> None:
        """Note the whole batch before its forward pass, withheld inputs included."""
        self.current.note_batch(values)

    # ------------------------------------------------------------------ what adapters ask

    @property
    def counters(self) -> Counters:
        """Counters of kept steps, failed steps and their cost."""
        return self.writer.counters

    @property
    def rounds(self) -> Rounds:
        """The counter that tells whether all optimizers have stepped."""
        return self.current.hooks.rounds

    @property
    def disabled(self) -> bool:
        """Whether no more steps are recorded."""
        return self.current.stopped

    @property
    def due_again(self) -> bool:
        """Whether the next step is due, because the last one could not be kept whole."""
        return self._forwards.due_again

    def written(self, patience_s: float = PATIENCE_SECONDS) -> bool:
        """Wait at most so many seconds for the writer; return whether it is done."""
        return self.writer.wait(patience_s)

    def writing(self) -> bool:
        """Return whether a kept step is still being written."""
        return self.writer.writing()

    def bytes_held(self) -> int:
        """Return the size of the copies that are held in memory."""
        return self.buffers.bytes_held()

    def bytes_of_a_step(self) -> int:
        """Return the size of the copies of one step, in bytes."""
        return self._selection.bytes_of_a_step()

    def bytes_to_write(self) -> int:
        """Return what the next kept step takes on the disk, in bytes."""
        return self._selection.bytes_to_write()

    def _fail(self, error: Exception) -> None:
        """Log the first problem and record nothing more: training comes first."""
        if self.disabled:
            return
        self.stop_recording()
        self.counters.failed += 1
        logger.warning(
            "leakaudit stops recording a %s after a %s; training continues, later steps are not audited. Please report this line; "
            "LEAKAUDIT_DISABLED=1 switches the audit off",
            type(self._model.module).__name__,
            type_and_place(error),
        )


def _scaler_in(optimizer: Any) -> Any:
    """Return the `GradScaler` that a wrapper of the optimizer holds; None without one."""
    return next((vars(o)["scaler"] for o in every_layer(optimizer) if vars(o).get("scaler")), None)
