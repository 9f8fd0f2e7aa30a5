"""Keeps what a client transmits in a step.

That is the weights before the step, the update as the optimizer gets it, and the batch.

No framework is imported here; adapters say when a step is due and what its batch was. The one place where the final gradient
can be read in every stack is a step pre-hook on the innermost optimizer: after accumulation, unscaling, clipping and a
defence's noise, before the weights move. After the step the recorder checks that the weights were moved by what was copied, and
only then hands the copy to the writer. Several optimizers make one step of the audit: it ends when all of them have stepped.

The training thread copies into buffers that are reused, and nothing else; writing happens in the background. Nothing raises
into training: a step that cannot be written is counted, anything unforeseen is reported once and ends the recording.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from leakaudit.capture.boundary import around, entry
from leakaudit.capture.calls import copied
from leakaudit.capture.forward_hooks import MOST_BYTES, Pass, Tap
from leakaudit.capture.in_place import Before, NotInPlaceError, Repetition, UnheldError, check
from leakaudit.capture.inside_step import Handed, random_states
from leakaudit.capture.optimizers import (
    Rounds,
    base_optimizers,
    check_all_moved,
    every_layer,
    first,
    nested,
    parameters_of,
    steps_on_the_stack,
)
from leakaudit.capture.part_of_step import PartOfStep
from leakaudit.capture.sketch import BUCKETS
from leakaudit.capture.withheld_inputs import hand_out
from leakaudit.capture.witness import Witness, few_entries, own_part
from leakaudit.client.observation import check_finite
from leakaudit.client.snapshot import Manifest
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.errors import LeakAuditError, NonFiniteUpdateError, SnapshotError, type_and_place
from leakaudit.models.first_blocks import Parts
from leakaudit.models.wrappers import plain_name
from leakaudit.results.schema import Verification
from leakaudit.storage.frozen_weights import FrozenWeights

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long the end of training waits for the writer. A disk that takes longer for one snapshot is stuck; our choice."""

POOL_BYTES = 2 * 10**9
"""Most that the copies of a step may take in the trainer's memory. A larger step is written from where it is, a few megabytes at a
time, while the optimizer waits. Our choice: a machine that trains a model of more than 2 GB has that much to spare."""

MOST_RESTARTS = 16
"""How often a step of several optimizers begins again before a message says so. Our choice: optimizers that step less often than others
do so every few steps."""

END_OF = "the end of "
"""Begins what processes agree on at the end of a step; what they agree on at its beginning is the step's name."""

Observe = Literal["update", "local", "delta"]
"""What the client sends: the update that the optimizer gets, this process's share of it before processes are summed, or the
difference of the weights after K local steps."""


@dataclass(frozen=True)
class KeptStep:
    """One step, copied to the CPU."""

    step: int
    update: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    truth: Truth
    manifest: Manifest
    """What the adapter knew of the step when it began."""
    copy_seconds: float
    autocast: torch.dtype | None = None
    """In which the forward passes ran, as far as it could be seen from outside."""
    loss_scale: float = 1.0
    """Of a GradScaler while the gradients were computed; the update and what the loss sent back are without it."""
    training: bool = True
    """Whether the model was in training mode during its forward passes."""
    eval_modules: tuple[str, ...] = ()
    """Parts of a model that trained which were not."""
    has_output_gradients: bool = False
    """Whether the batches hold what the loss sent back."""
    frozen: FrozenWeights | None = None
    """Live parameters that no optimizer moves and that are not in `weights`; the writer keeps them once a run."""
    checked: Verification | None = None
    """Its stamp, where the step was repeated in place."""
    own_loss: bool | None = None
    """Whether its loss is the one that the model's class computes, up to a factor; None where it was not repeated."""
    check_seconds: float = 0.0
    not_in_place: str = ""
    """Why it was not; empty where that was not asked for."""
    part: PartOfStep | None = None
    """What takes the place of the rest of the update; None where `update` is the whole one."""
    parameters: int = 0
    """Of the whole model."""
    ready: Callable[[], None] = lambda: None
    """Waits until the copy has arrived; called in the writer's thread."""

    @property
    def bytes(self) -> int:
        """Size of its update and weights, the frozen ones left out."""
        tensors = [*self.update.values(), *self.weights.values()]
        if self.part is not None:
            tensors += [
                *self.part.sketches.values(),
                *(t for t in (self.part.index, self.part.values) if t is not None),
            ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass
class Counters:
    """What the recorder did, for the last line and the report."""

    kept: int = 0
    not_finite: int = 0
    failed: int = 0
    """Steps that were due and could not be kept: a full disk, an empty batch, an optimizer without gradients."""
    reason: str = ""
    """Why the first of them could not."""
    blocked_s: float = 0.0
    """Seconds of the training thread spent in the recorder."""
    check_s: float = 0.0
    """The part of them in which steps were repeated in place."""
    writer_s: float = 0.0
    """Seconds of the writer beside it."""
    written: int = 0
    """Bytes on the disk, of all kept steps."""


class ProcessGroup(Protocol):
    """The other processes of a distributed run.

    All of them enter `gather` and `whole`, or none does.
    """

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""

    @property
    def mean_over(self) -> int:
        """Processes over whose gradients the update is the mean."""

    @property
    def over(self) -> str:
        """Why these processes keep no steps together any more; empty while they do."""

    def agree(self, topic: str, yes: bool) -> bool:
        """Return whether all processes say yes to a topic within a time limit."""

    def leave(self) -> None:
        """Tell the others that this process takes no part any more."""

    def gather(self, truth: Truth) -> Truth:
        """Return the micro-batches of all processes, in the first one.

        They are in the order of the ranks.
        """

    def whole(self, shard: Any) -> Tensor:
        """Return a sharded tensor whole, in the first process."""


@dataclass
class _Armed:
    """The step that is being recorded."""

    step: int
    manifest: Manifest
    passes: list[Pass] = field(default_factory=list)
    withheld_inputs: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Persistent buffers before the first forward pass, which may change them (batch norm)."""
    state: Before | None = None
    """What the loop calls, before the first forward pass; None where the step is not checked in place."""
    modes: dict[str, bool] = field(default_factory=dict)
    """Module -> whether it was in training mode at the first forward pass; trainers set it as late as that."""
    local: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of this process before they are summed with those of others; filled where `observe` is `local`."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """Weights before the first local step, where `observe` is `delta`, or at the first forward pass, where they were others later."""
    steps_done: int = 0
    loss_scale: float = 1.0
    """Of a GradScaler: it is in the gradients while the passes are recorded."""
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    """Of the model, by name, as they were when the step was copied."""
    moving: list[nn.Parameter] = field(default_factory=list)
    """Parameters that the optimizers moved when the first forward pass began."""
    seen_weights: list[tuple[Pass, Witness]] = field(default_factory=list)
    """Each forward pass, with a few entries of these parameters when it began."""
    ignored: set[int] = field(default_factory=set)
    """Optimizers that stepped before any forward pass of this step: they belong to the step before."""
    begun_again: int = 0
    """How often passes were left out, because only some of several optimizers had stepped when the next forward pass began."""
    own_loss: bool | None = None
    """Whether its loss is the model's own, as a repetition showed."""
    problem: str = ""
    """Why the step cannot be kept, where that was seen on the way."""


@dataclass
class _Copied:
    """A step that was copied and waits for the end of the optimizers' steps."""

    armed: _Armed
    handed: dict[int, Handed] = field(default_factory=dict)
    """Identity of an optimizer -> what it was given."""
    kept: KeptStep | None = None
    """The copy; None where another process writes it."""
    notes: list[str] = field(default_factory=list)
    """What cannot be known of it."""
    written: bool = False
    """It is on the disk already, because it is too large for a copy."""
    entered: set[int] = field(default_factory=set)
    """Optimizers whose step has begun."""
    stepped: set[int] = field(default_factory=set)
    """Optimizers whose step has come to its end."""


class Recorder:
    """Records single steps of one model and optimizer."""

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
        local_steps: int = 1,
        learning_rate: float | None = None,
        max_bytes: float = float("inf"),
        as_kept: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
        as_stepped: Callable[[Manifest], Manifest] = lambda manifest: manifest,
        withdraw: Callable[[int], None] = lambda step: None,
        beside: frozenset[str] = frozenset(),
        in_place: bool = False,
    ) -> None:
        """Prepare; hooks are set by `install`.

        Args:
            model: the unwrapped model whose parameters the optimizer moves.
            optimizer: it, or a wrapper around it, or a list of several that share the model.
            write: called in a background thread with each kept step; its exceptions are reported, never raised.
            called: the object that the training loop calls, if its forward passes are to be recorded from outside; without
                it, `micro_batch` tells of each.
            scaler: the `GradScaler`, where the optimizer's wrappers do not hold it.
            peers: the other processes of a distributed run.
            observe: what the client sends.
            local_steps: K optimizer steps that make one `delta`.
            learning_rate: of these steps.
            max_bytes: a step whose copies are larger than this is not recorded.
            as_stepped: fills in what is true of the optimizer when it steps and not earlier, such as the noise of a schedule.
            withdraw: removes a written step, by its number.
            in_place: whether a step is repeated here, before the optimizer moves the weights, to check it.
            as_kept: puts a forward pass, as it was seen, into the words of the model that is audited; it may refuse the step.
            beside: names of buffers that are kept although the model does not store them.
        """
        self._model = model
        self._movers = base_optimizers(optimizer)
        self.rounds = Rounds(self._movers)
        self._write = write
        self._scaler = scaler or next(
            (vars(o)["scaler"] for o in every_layer(optimizer) if vars(o).get("scaler")), None
        )
        self._peers = peers
        self._observe = observe
        self._local_steps = local_steps
        self._learning_rate = learning_rate
        self._max_bytes = max_bytes
        self._as_kept = as_kept
        self._as_stepped = as_stepped
        self._withdraw = withdraw
        # A step of several processes, or of several local steps, is checked on the rebuilt model.
        self._in_place = in_place and peers is None and observe != "delta"
        self._at_begin: dict[str, Tensor] = {}
        """A few entries of each trained parameter when the run began."""
        self.due_again = False
        """Whether the next step is due, because the last one lacked something that the recorder holds from then on."""
        self._tap = None if called is None else Tap(called, self._began, self._reached, self._fail)
        self._beside = beside
        self._persistent: frozenset[str] = frozenset()
        self._armed: _Armed | None = None
        self._copied: _Copied | None = None
        self._seen_right = False
        """Whether a step of the optimizers was seen to the end and moved the weights by what was kept."""
        self._notes_of_the_last: list[str] = []
        """What could not be known of that step."""
        self._weights_at_first_pass = False
        """Whether weights are copied at the first forward pass, because they were others when the optimizer stepped."""
        self._buffers: dict[str, Tensor] = {}
        self._frozen: FrozenWeights | None = None
        """Parameters that were in no optimizer at the first kept step and have not changed since."""
        self._parts: Parts | None = None
        """What of a step is kept; None for everything."""
        self._pooled = True
        """Whether the copies of a step are small enough to be held until the writer has them on the disk."""
        self._handles: list[Any] = []
        self._local_handles: list[Any] = []
        self._writer: threading.Thread | None = None
        self._side: Any = None
        """CUDA stream of the copies."""
        self._owes_answer = ""
        """Topic on which the other processes wait for a word from us at the end of this step; empty where they do not."""
        self.counters = Counters()
        self.disabled = False

    # ------------------------------------------------------------------ what adapters call

    def install(self) -> None:
        """Set the hooks and make the buffers; a second call changes nothing.

        Raises:
            SnapshotError: one step is larger than `max_bytes`, or the optimizer moves no parameter of the model.
        """
        if self._handles:
            return
        self._persistent = self._beside | {plain_name(name) for name in self._model.state_dict()}
        size = self.bytes_to_write()
        if size > self._max_bytes:
            raise SnapshotError(
                f"one step of this model takes {size // 10**6} MB and `max_spool_gb` allows {self._max_bytes / 10**6:.0f} MB: "
                "raise it, or train fewer parameters (LoRA, frozen layers)"
            )
        if not self._trained():
            raise SnapshotError(
                "the optimizer moves no parameter of this model; give the optimizer and the model that belong together"
            )
        self._pooled = self._in_pool(self.bytes_of_a_step())
        if self._peers is None or self._peers.first:
            self._make_buffers()
        self._at_begin = {name: few_entries(own_part(p)).clone() for name, p in self._trained()}
        self._handles = [mover.register_step_pre_hook(self._before_step) for mover in self._movers]
        for mover in self._movers:
            self._handles.append(
                first(mover._optimizer_step_post_hooks, mover.register_step_post_hook(self._after_step))
            )
        self._handles += self.rounds.install()

    def stop_recording(self) -> None:
        """Record nothing any more, and go on answering the other processes: they ask at every step that is due."""
        self.disabled = True
        self._armed = self._copied = None

    def remove(self, patience_s: float = PATIENCE_SECONDS) -> None:
        """Take the hooks off and wait for the writer, for so long and no longer: a stuck disk must not hold up training."""
        self.cancel()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if not self.written(patience_s) and patience_s:
            logger.warning(
                "the last kept step is still not on the disk after %g s; the audit goes on without it", patience_s
            )

    def written(self, patience_s: float = PATIENCE_SECONDS) -> bool:
        """Wait until what was kept is on the disk, for so long and no longer; return whether it is."""
        if self._writer is not None:
            self._writer.join(patience_s)
        return not self.writing()

    def writing(self) -> bool:
        """Return whether a kept step is still on its way to the disk."""
        return self._writer is not None and self._writer.is_alive()

    def keep_only(self, parts: Parts) -> None:
        """Keep these parts of a step; call before `install`.

        A sketch stands for the rest of its update.
        """
        self._parts = parts

    def bytes_held(self) -> int:
        """Return the size of the copies that are held in memory."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def bytes_of_a_step(self) -> int:
        """Return the size of the copies of one step.

        Trained weights, their update and persistent buffers are copied.

        Rows of the word embedding, of which there are as many as words in the batch, are not counted where only parts are kept.
        """
        parts, trained = self._parts, self._trained()
        size = sum(p.numel() * p.element_size() for n, p in trained if parts is None or n in parts.weights)
        size += sum(p.numel() * _kept_as(p.dtype).itemsize for n, p in trained if parts is None or n in parts.updates)
        size += 0 if parts is None else sum(4 * min(BUCKETS, p.numel()) for _, p in trained)
        buffers = (b for name, b in self._model.named_buffers() if plain_name(name) in self._persistent)
        return size + sum(b.numel() * b.element_size() for b in buffers)

    def _in_pool(self, size: int) -> bool:
        """Return whether copies of that size are held in memory.

        They are held until the writer has them on the disk.
        """
        # Pinned memory comes in powers of two, so a tensor may take up to twice its size.
        held = 2 * size if next(self._model.parameters()).is_cuda else size
        return self._observe == "delta" or held <= POOL_BYTES

    def bytes_to_write(self) -> int:
        """Return what the next kept step takes on the disk.

        The first one brings the frozen weights with it.
        """
        moved = self._moved()
        frozen = sum(p.numel() * p.element_size() for p in self._model.parameters() if id(p) not in moved)
        return self.bytes_of_a_step() + (frozen if self._frozen is None or self._observe == "delta" else 0)

    def start(self, step: int, manifest: Manifest) -> None:
        """Record the step that begins now.

        Args:
            step: its number.
            manifest: everything about it that is not a tensor, as it is now: the writer must not look it up later.
        """
        if self.disabled:
            return
        self.cancel()
        self.due_again = False
        self._armed = _Armed(step, manifest)
        self._owe_answer(self._armed)
        if self._tap is not None:
            self._tap.open()
        if self._observe == "local":
            self._watch_local_gradients()

    def cancel(self) -> None:
        """Forget what was recorded of a step that did not come to its end."""
        found, self._copied = self._copied, None
        if found is not None and found.stepped:
            self._not_kept(found.armed.step, SnapshotError(f"the step ended before {self._missing(found)}"))
        self._put_down()
        if self._owes_answer:
            self._answer(False)

    def _put_down(self) -> None:
        """Record nothing of this step any more; the other processes still wait for an answer."""
        self._armed = self._copied = None
        self._unhook_step()

    @property
    def armed(self) -> bool:
        """Whether the current step is being recorded."""
        return self._armed is not None

    @entry
    def batch(self, values: Mapping[str, Any]) -> None:
        """Tell of the whole batch before its forward pass, so that what the trainer keeps from the model is known, too."""
        self._begin_again()
        if self._armed is not None:
            self._armed.withheld_inputs = copied(values)

    @entry
    def micro_batch(self, inputs: Mapping[str, Any], num_items: Any = None) -> None:
        """Keep one micro-batch and the random state; call immediately before its forward pass, where nothing is tapped."""
        if self._armed is None and self._copied is None:
            return
        items = None if num_items is None else torch.as_tensor(num_items).detach().to("cpu", copy=True)
        self._began(Pass(inputs=copied(inputs), num_items=items))

    # ------------------------------------------------------------------ forward and backward passes

    def _began(self, seen: Pass) -> None:
        """Add a pass to the step, with the random state that its dropout will draw from."""
        self._begin_again()
        armed = self._armed
        if armed is None:
            return
        start = time.perf_counter()
        if not armed.passes:
            self._come_last()
            self.rounds.restart()
            armed.state = Before.of(self._called()) if self._in_place and self._tap is not None else None
            copied_of = _copy if armed.state is None else armed.state.copy_of
            armed.buffers = {plain_name(name): copied_of(buffer) for name, buffer in self._model.named_buffers()}
            armed.modes = {plain_name(n): m.training for n, m in self._model.named_modules()}
        self._look_at_weights(armed, seen)
        seen.rng = random_states([next(self._model.parameters())])
        seen.withheld_inputs = armed.withheld_inputs
        armed.passes.append(seen)
        if armed.state is not None:
            armed.state.note(seen)
        self.counters.blocked_s += time.perf_counter() - start

    def _begin_again(self) -> None:
        """Leave out a step that only some of several optimizers had made.

        A forward pass begins, and the weights were moved since.
        """
        found = self._copied
        if found is None or not found.stepped:
            return
        self._copied = None
        self._armed = _Armed(found.armed.step, found.armed.manifest, begun_again=found.armed.begun_again + 1)
        self._owe_answer(self._armed)
        if self._armed.begun_again == MOST_RESTARTS:
            reason = f"in {MOST_RESTARTS} attempts a forward pass began before {self._missing(found)}"
            self._not_kept(
                found.armed.step,
                SnapshotError(f"{reason}; the audit needs all optimizers to step without a forward pass between them"),
            )

    def _look_at_weights(self, armed: _Armed, seen: Pass) -> None:
        """Remember a few entries of the weights that a pass sees.

        The weights are copied here if they were others at an earlier step.
        """
        if self._observe == "delta":
            return
        if not armed.passes:
            armed.moving = [p for mover in self._movers for p in parameters_of(mover) if p.requires_grad]
        if self._weights_at_first_pass and not armed.before:
            armed.before = {name: p.detach().clone() for name, p in self._trained()}
        armed.seen_weights.append((seen, Witness.of(armed.moving)))

    def _reached(self, seen: Pass, backward: int) -> None:
        """Drop the passes of a window that came to nothing: its gradients were zeroed since, so they are in no update.

        A step that a GradScaler skips fires no hook of the optimizer, and zeroing cannot be hooked. But when a backward pass
        arrives and finds every gradient empty, whatever an earlier one had brought is gone.
        """
        armed = self._armed
        if armed is None:
            return
        if self._scaler is not None:
            armed.loss_scale = float(self._scaler.get_scale())
        if armed.begun_again and all(p.backward is None for p in armed.passes) and not self._nothing_accumulated():
            armed.problem = (
                "one of its optimizers accumulates gradients over several steps of another one, which moves the weights in between: no "
                "one set of weights gives such an update"
            )
        earlier = [p for p in armed.passes if p.backwards.keys() - {backward} and not p.stepped]
        if earlier and not self._takes_examples_alone(armed) and self._nothing_accumulated():
            for one in earlier:
                one.backwards = {number: what for number, what in one.backwards.items() if number == backward}
            gone = {id(p) for p in earlier if not p.backwards and p is not seen}
            armed.passes = [p for p in armed.passes if id(p) not in gone]

    def _takes_examples_alone(self, armed: _Armed) -> bool:
        """Return whether the loop itself clips each example, and so zeroes gradients between passes whose sum is the update.

        An optimizer of Opacus does that without zeroing: it keeps sums of its own beside the gradients.
        """
        declared = [defense for defense in armed.manifest.facts.known_defenses if defense is not None]
        by_hand = not any(hasattr(parameter, "summed_grad") for _, parameter in self._trained())
        return by_hand and any(defense.per_example for defense in declared)

    def _nothing_accumulated(self) -> bool:
        for _, parameter in self._trained():
            if getattr(parameter, "summed_grad", None) is not None:  # Opacus, between the pieces of a logical batch
                return False
            gradient = parameter.grad
            if gradient is not None and bool(own_part(gradient).any()):
                return False
        return True

    def _watch_local_gradients(self) -> None:
        """Keep each gradient as it is when this process has added its own share, before any other is added to it."""
        for name, parameter in self._trained():
            hook = parameter.register_post_accumulate_grad_hook(functools.partial(self._added, name))
            self._local_handles.append(hook)

    @entry
    def _added(self, name: str, parameter: Tensor) -> None:
        if self._armed is not None and parameter.grad is not None:
            self._armed.local[name] = parameter.grad.detach().clone()

    def _unhook_step(self) -> None:
        if self._tap is not None:
            self._tap.close()
        for handle in self._local_handles:
            handle.remove()
        self._local_handles = []

    # ------------------------------------------------------------------ the optimizer's hooks

    @entry
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Copy now, or after the closure where the optimizer computes its gradients itself."""
        if nested(optimizer):
            return None
        optimizer = self._mover(optimizer)
        closure = kwargs.get("closure") or next((a for a in args[1:] if callable(a)), None)
        if closure is None or (self._armed is None and self._copied is None):
            if not self._belongs_before(optimizer):
                self._copy(optimizer)
            return None
        observed = around(closure, after=functools.partial(self._evaluated, optimizer, itertools.count()))
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": observed}
        return tuple(observed if a is closure else a for a in args), kwargs

    def _mover(self, optimizer: Any) -> Any:
        """Return the optimizer as it was found in its wrappers.

        Some of them cannot be looked into.
        """
        return self._movers[0] if len(self._movers) == 1 else optimizer

    @entry
    def _evaluated(self, optimizer: Any, calls: Iterator[int], loss: Any) -> None:
        """Copy at the first evaluation: an optimizer may evaluate its closure many times."""
        if next(calls) == 0:
            self._copy(optimizer)
        if self._copied is not None and id(optimizer) in self._copied.handed:
            self._copied.handed[id(optimizer)].evaluated()

    def _belongs_before(self, optimizer: Any) -> bool:
        """Return whether an optimizer ends the step before this one.

        One of several does so if it steps before the first forward pass.
        """
        armed = self._armed
        if armed is None or armed.passes or len(self._movers) == 1:
            return False
        armed.ignored.add(id(optimizer))
        return len(armed.ignored) < len(self._movers)

    def _copy(self, optimizer: Any) -> None:
        """Keep what the optimizer got; whatever happens, the other processes have their answer afterwards."""
        start = time.perf_counter()
        armed = self._armed
        try:
            if self._copied is not None:
                self._join(self._copied, optimizer)
            elif armed is not None and self._observe == "delta":
                self._note_local_step(armed)
            elif armed is not None:
                self._finish(armed, start)
                self._join_first(optimizer)
        finally:
            if self._owes_answer:
                self._answer(False)
            if self.disabled:
                self._unhook_step()
            self.counters.blocked_s += time.perf_counter() - start

    def _join_first(self, optimizer: Any) -> None:
        """Note which of the optimizers steps first."""
        if self._copied is not None:
            self._copied.entered.add(id(optimizer))

    def _join(self, found: _Copied, optimizer: Any) -> None:
        """Go on with a copied step at the next of several optimizers.

        What was clipped since is copied again.
        """
        if id(optimizer) in found.entered:
            self._drop(found, SnapshotError(f"{type(optimizer).__name__} steps again before {self._missing(found)}"))
            return
        found.entered.add(id(optimizer))
        handed = found.handed.get(id(optimizer))
        if handed is None:
            return
        found.handed[id(optimizer)] = Handed.of(optimizer, last=self._is_last(optimizer))
        if handed.gradients.touched(handed.now):
            self._copy_again(found, handed)

    def _missing(self, found: _Copied) -> str:
        """Name the optimizers that have not stepped yet."""
        left = [type(mover).__name__ for mover in self._movers if id(mover) not in found.stepped]
        return f"{' and '.join(left)} had stepped"

    def _is_last(self, optimizer: Any) -> bool:
        """Return whether no hook of an optimizer comes after ours."""
        return bool(next(reversed(optimizer._optimizer_step_pre_hooks.values())) == self._before_step)

    def _come_last(self, *, after_step: bool = False) -> None:
        """Move our hook before a step behind the hooks that were set since.

        So it sees what they do to the gradients.

        Args:
            after_step: whether this is called after a step. Otherwise a running step may be calling the hooks just now, and a dictionary
                must not be changed while somebody goes through it.
        """
        for mover, handle in zip(self._movers, self._handles, strict=False):
            hooks: Any = mover._optimizer_step_pre_hooks
            if next(reversed(hooks), None) == handle.id or handle.id not in hooks:
                continue
            if after_step or (isinstance(mover, torch.optim.Optimizer) and not steps_on_the_stack(mover)):
                hooks.move_to_end(handle.id)

    def _owe_answer(self, armed: _Armed) -> None:
        """Remember that the other processes will ask about this step's end.

        They ask each time that the step begins again.
        """
        again = f", attempt {armed.begun_again + 1}" if armed.begun_again else ""
        self._owes_answer = "" if self._peers is None else f"{END_OF}step {armed.step}{again}"

    def _answer(self, yes: bool) -> bool:
        """Tell the other processes whether this one keeps the step; return whether all do."""
        topic, self._owes_answer = self._owes_answer, ""
        return self._peers is None or self._peers.agree(topic, yes)

    @entry
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Hand the step to the writer, or end a round of local steps.

        All is known of the step at this point.
        """
        if nested(optimizer):
            return
        optimizer = self._mover(optimizer)
        self._come_last(after_step=True)
        start = time.perf_counter()
        armed = self._armed
        if self._copied is not None:
            self._stepped(self._copied, optimizer)
        elif armed is not None and id(optimizer) in armed.ignored:
            return
        elif self._observe != "delta":
            if self._owes_answer:
                self._answer(False)
            if armed is not None:
                self.cancel()
        elif armed is not None:
            armed.steps_done += 1
            if armed.steps_done == self._local_steps:
                self._finish(armed, start)
        self.counters.blocked_s += time.perf_counter() - start

    def _stepped(self, found: _Copied, optimizer: Any) -> None:
        """Check what one optimizer did, and hand over the complete step.

        It is complete when all optimizers have stepped.
        """
        found.stepped.add(id(optimizer))
        handed = found.handed.get(id(optimizer))
        try:
            if handed is not None:
                found.notes.append(handed.check(declared=bool(found.armed.manifest.facts.defenses)))
                if handed.retake:
                    self._copy_again(found, handed)
        except LeakAuditError as error:
            self._drop(found, error)
            return
        if all(id(mover) in found.stepped for mover in self._movers):
            self._put_down()
            self._seen_right, self._notes_of_the_last = True, found.notes
            if found.kept is not None:
                self._hand_over(found.kept, found.notes)

    def _drop(self, found: _Copied, error: LeakAuditError) -> None:
        """Let go of a copied step and say why."""
        self._put_down()
        if found.written:
            self.stop_recording()
            self._withdraw(found.armed.step)
            self.counters.kept -= 1
            self.counters.failed += 1
            logger.warning(
                "step %d was written and removed again, because it is not what the client sends; no more steps are kept: %s",
                found.armed.step,
                error,
            )
        else:
            self._not_kept(found.armed.step, error)

    def _note_local_step(self, armed: _Armed) -> None:
        """Keep the weights before the first step of a round, and remember which passes were made into steps."""
        for seen in armed.passes:
            seen.stepped = seen.backward is not None
        if not armed.before:
            before = {name: w.detach().clone() for name, w in self._state().items()}
            armed.before = {name: armed.buffers.get(name, w) for name, w in before.items()}

    def _finish(self, armed: _Armed, start: float) -> None:
        """Copy the step, or say why not where that is a matter of this step alone."""
        self._armed = None
        if len(self._movers) == 1:  # of several, a forward pass before all have stepped must be seen
            self._unhook_step()
        try:
            armed.parameters = [(plain_name(name), p) for name, p in self._model.named_parameters()]
            if self._observe == "delta" and sum(p.stepped for p in armed.passes) != self._local_steps:
                raise SnapshotError(
                    f"its {self._local_steps} local steps were made of {sum(p.stepped for p in armed.passes)} micro-batches; "
                    "the audit needs one micro-batch in every local step"
                )
            self._check(armed)
            self._keep(armed, start)
        except LeakAuditError as error:
            self._unhook_step()
            self._not_kept(armed.step, error)

    def _check(self, armed: _Armed) -> None:
        """Refuse a step that would not be what the client sends.

        Only what is known before the copy is checked here.

        Raises:
            SnapshotError: says what was found and what to do.
        """
        if armed.problem:
            raise SnapshotError(armed.problem)
        if torch._C._current_graph_task_id() != -1:
            raise SnapshotError(
                "its optimizer steps during the backward pass, when only some of the gradients are there; call the optimizer after the backward pass"
            )
        check_all_moved(armed.parameters, self._movers)
        if armed.seen_weights and not armed.before and (changed := armed.seen_weights[0][1].changed(armed.moving)):
            self._weights_at_first_pass = True
            raise SnapshotError(
                f"the weights of {len(changed)} of {len(armed.moving)} parameters changed between its first forward pass and its step, as "
                "SAM and swapped averages do; the next step that is due is kept with the weights of its first pass"
            )

    def _other_weights(self, armed: _Armed, passes: list[Pass]) -> str:
        """Say which forward passes saw other weights than the kept ones.

        The text is empty if none did.
        """
        if not armed.seen_weights:
            return ""
        first_seen = armed.seen_weights[0][1]
        kept = {id(p) for p in passes}
        here = [witness for seen, witness in armed.seen_weights if id(seen) in kept]
        others = sum(not first_seen.equals(witness) for witness in here)
        if others:
            return (
                f"{others} of {len(here)} forward passes saw other weights than those that are kept (SAM, FGM): such a pass cannot be "
                "repeated from the weights that the client received"
            )
        if first_seen.touched(armed.moving):
            return (
                "weights were written to between the first forward pass and the step, and put back (FGM, SAM, swapped averages): a gradient "
                "that was computed in between cannot be repeated from the weights that the client received"
            )
        return ""

    # ------------------------------------------------------------------ copies

    def _keep(self, armed: _Armed, start: float) -> None:
        """Copy the step and hand it to the writer. Every process of a distributed run comes here, or none."""
        self._look_closer(armed)
        passes, batches = _batch_of(armed)
        truth = Truth(tuple(self._as_kept(batch) for batch in batches))
        too_large = any(p.too_large for p in passes)
        if self._peers is not None:
            if not self._answer(not self.writing() and not too_large):
                return
            if self._observe == "update":
                truth = self._peers.gather(truth)
        elif self.writing():
            return  # buffers are in use; the adapter counts a skipped step before it comes to this
        if too_large:
            raise SnapshotError(
                f"its loss is computed outside the model, from outputs of more than {MOST_BYTES // 10**6} MB a step; let the model "
                "compute it (`labels`), or take smaller micro-batches"
            )
        update, weights, frozen = self._tensors(armed)
        manifest = self._as_stepped(armed.manifest)
        scales = self._scales(armed)
        checked, why, seconds = self._checked_in_place(armed, passes, truth, manifest, update, scales)
        if any(p.mixed for p in passes):
            truth = replace(
                truth, micro_batches=tuple(self._as_kept(_micro_batch(p, armed.loss_scale)) for p in passes)
            )
        part = None if self._parts is None else PartOfStep.of(self._parts, update, scales)
        if part is not None and self._parts is not None:
            update, weights = dict(part.update), {n: w for n, w in weights.items() if n in self._parts.weights}
            frozen = None if frozen is None else frozen.without(frozenset(frozen.tensors) - self._parts.weights)
        types = {n: torch.float32 if n in scales else _kept_as(g.dtype) for n, g in update.items()}
        copies = {f"u/{n}": (g, types[n], scales.get(n)) for n, g in update.items()}
        copies |= {f"w/{name}": (w, w.dtype, None) for name, w in weights.items()}
        if part is not None:
            copies |= {f"s/{name}": (s, s.dtype, None) for name, s in part.sketches.items()}
            rows = {"r/index": part.index, "r/values": part.values}
            copies |= {key: (tensor, tensor.dtype, None) for key, tensor in rows.items() if tensor is not None}
        self._pooled = self._in_pool(sum(t.numel() * dtype.itemsize for t, dtype, _ in copies.values()))
        with _CopyStream(self, update) as ready:
            copied = {key: self._into_buffer(key, *what) for key, what in copies.items()}
        if self._peers is not None and not self._peers.first:
            self._copied = _Copied(armed)
            return
        if part is not None:
            sketches = {name: copied[f"s/{name}"] for name in part.sketches}
            index, values = copied.get("r/index"), copied.get("r/values")
            part = replace(part, update={}, sketches=sketches, index=index, values=values)
        kept = KeptStep(
            step=armed.step,
            update={name: copied[f"u/{name}"] for name in update},
            weights={name: copied[f"w/{name}"] for name in weights},
            truth=truth,
            manifest=manifest,
            copy_seconds=time.perf_counter() - start - seconds,
            autocast=next((p.autocast for p in passes), None),
            loss_scale=armed.loss_scale,
            training=armed.modes.get("", True),
            eval_modules=tuple(name for name, on in armed.modes.items() if not on and armed.modes.get("")),
            has_output_gradients=bool(passes) and all(p.tapped for p in passes),
            frozen=frozen,
            checked=checked,
            own_loss=armed.own_loss,
            check_seconds=seconds,
            not_in_place=why,
            part=part,
            parameters=sum(p.numel() for p in self._model.parameters()) if part is not None else 0,
            ready=ready.wait,
        )
        notes = [self._other_weights(armed, passes)]
        if self._observe == "delta":
            self._hand_over(kept, notes)
            return
        handed = (
            {}
            if self._observe == "local"
            else {id(m): Handed.of(m, last=self._is_last(m), alone=len(self._movers) == 1) for m in self._movers}
        )
        self._copied = _Copied(armed, handed, kept, notes)
        if not self._pooled:
            self._write_at_once(self._copied)

    def _write_at_once(self, found: _Copied) -> None:
        """Write a step of which there is no copy, before its optimizer moves the weights.

        What is known only after the step comes too late for it. So it is written only if torch's own code moves the weights, or if
        an earlier step was seen to be right in all of that.

        Raises:
            SnapshotError: no step has been seen to the end before; the next one is kept.
        """
        kept, found.kept = found.kept, None
        plain = len(self._movers) == 1 and all(handed.trusted for handed in found.handed.values())
        if kept is not None and (plain or self._seen_right):
            found.written = True
            self._hand_over(kept, [*found.notes, *self._notes_of_the_last])
        else:
            self._not_kept(
                found.armed.step,
                SnapshotError(
                    f"it is larger than {POOL_BYTES // 10**9} GB, so it is written before the optimizer steps; the audit must see one step of "
                    "this optimizer to the end first, and keeps the next one that is due"
                ),
            )

    def _hand_over(self, kept: KeptStep, notes: list[str]) -> None:
        """Let the writer have a step.

        Args:
            kept: the step.
            notes: what cannot be known of it; empty ones are left out.
        """
        recipe = kept.manifest.recipe
        note = "; ".join(dict.fromkeys(filter(None, (recipe.note, *notes))))
        manifest = kept.manifest.model_copy(update={"recipe": recipe.model_copy(update={"note": note})})
        kept = replace(kept, manifest=manifest)
        if not self._pooled:
            self._write_quietly(kept)
            return
        # A daemon: a disk that is stuck must not keep the finished training process alive. `remove` waits for it.
        self._writer = threading.Thread(target=self._write_quietly, args=(kept,), name="leakaudit-writer", daemon=True)
        self._writer.start()

    def _look_closer(self, armed: _Armed) -> None:
        """Watch the model's `forward` from the next due step on.

        This is for a model of which no call was seen: a library may call `forward` itself.

        Raises:
            SnapshotError: this step is lost.
        """
        if armed.passes or self._tap is None or self._tap.watches_forward or self._peers is not None:
            return
        self._tap.watches_forward = self.due_again = True
        raise SnapshotError(
            "the audit saw no forward pass that this update comes from; give the audit the object that the training loop calls. The next step "
            "is kept in its place if the loop calls `forward` itself"
        )

    def _called(self) -> nn.Module:
        """Return what is called to repeat a step.

        It is what the loop calls, out of a wrapper whose reducer counts its passes.
        """
        assert self._tap is not None
        called = self._tap.model
        wrapped = any(kind.__name__ == "DistributedDataParallel" for kind in type(called).__mro__)
        return called.module if wrapped else called  # type: ignore[return-value]

    def _checked_in_place(
        self,
        armed: _Armed,
        passes: list[Pass],
        truth: Truth,
        manifest: Manifest,
        update: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
    ) -> tuple[Verification | None, str, float]:
        """Repeat the step before the optimizer moves the weights.

        The result is its stamp, or why there is none, and the seconds it took.

        Raises:
            SnapshotError: the loss sent more into the outputs than was held.
        """
        if armed.state is None or not update or self._tap is None:
            return None, "", 0.0
        size = sum(gradient.numel() * gradient.element_size() for gradient in update.values())
        if size > POOL_BYTES:  # a machine without that much memory would end the training
            return None, f"its gradients take {size / 1e9:.1f} GB, and a repetition would need as much again", 0.0
        start = time.perf_counter()
        repetition = Repetition(
            called=armed.state.called,
            passes=passes,
            before=armed.state,
            named=dict(armed.parameters),
            moved=[p for mover in self._movers for p in parameters_of(mover)],
            recipe=manifest.recipe,
            loss_scale=armed.loss_scale,
            begin=self._at_begin,
        )
        try:
            self._tap.paused = True
            seen = {name: _unscaled(gradient, scales.get(name)) for name, gradient in update.items()}
            stamp = check(ClientStep(self._model, truth, manifest.recipe, manifest.facts), seen, repetition)
            armed.own_loss = self._is_own_loss(repetition, truth) if stamp.status.bounds else None
            return stamp, "", time.perf_counter() - start
        except UnheldError:
            self._tap.holds_everything = self.due_again = True
            raise
        except NotInPlaceError as error:
            return None, str(error), time.perf_counter() - start
        except Exception as error:  # the user's model is called here: whatever it raises, the rebuilt one may do
            return None, f"repeating it raised {type_and_place(error)}", time.perf_counter() - start
        finally:
            self._tap.paused = False
            self.counters.check_s += time.perf_counter() - start

    def _copy_again(self, found: _Copied, handed: Handed) -> None:
        """Take gradients that changed since the copy as the new update.

        Raises:
            SnapshotError: they are in shards, and putting them together would need all processes.
        """
        if found.kept is None:
            if found.written or not self._pooled:
                raise SnapshotError(f"the gradients that {handed.name} moves changed after the step was written")
            return
        if found.kept.part is not None:
            raise SnapshotError(
                f"the gradients that {handed.name} moves changed after the parts of them were copied; set `keep: all`"
            )
        mine = {id(p) for p in handed.parameters}
        update = {name: p.grad for name, p in found.armed.parameters if id(p) in mine and p.grad is not None}
        if any(hasattr(gradient, "full_tensor") for gradient in update.values()):
            raise SnapshotError(
                f"the gradients that {handed.name} moves changed after they were copied, and they are in shards"
            )
        with _CopyStream(self, update) as ready:
            fresh = {name: self._into_buffer(f"u/{name}", g, _kept_as(g.dtype), None) for name, g in update.items()}
        found.kept = replace(
            found.kept,
            update={**found.kept.update, **fresh},
            checked=None,
            not_in_place="its gradients were changed after it was repeated",
            ready=ready.wait,
        )

    def _scales(self, armed: _Armed) -> dict[str, Tensor]:
        """Return the scale that is in the gradients of some parameters, by name.

        A GradScaler leaves it to fused optimizers, which unscale inside their step; what is local is unscaled already.
        """
        found = (
            {}
            if self._observe == "local"
            else {id(p): getattr(m, "grad_scale", None) for m in self._movers for p in parameters_of(m)}
        )
        return {name: scale for name, p in armed.parameters if (scale := found.get(id(p))) is not None}

    def _is_own_loss(self, repetition: Repetition, truth: Truth) -> bool:
        """Return whether the loss of this step is the model's own; a loop may have another one in its next step."""
        if repetition.loss_is_inside(self._model):
            return True
        try:
            return repetition.loss_is_like(self._model, truth.micro_batches)
        except Exception:  # the class cannot compute its loss of such a batch, and neither can an attack
            return False

    def _tensors(self, armed: _Armed) -> tuple[dict[str, Tensor], dict[str, Tensor], FrozenWeights | None]:
        """Return references to the update, the weights and the frozen weights.

        The weights are those before the step; one walk over the model finds all.
        """
        mine = self._moved()
        parameters = armed.parameters
        if self._observe == "delta":
            scale = (self._learning_rate or 1.0) * self._local_steps
            moved = {n: (armed.before[n] - p.detach()).float() / scale for n, p in parameters if id(p) in mine}
            return moved, armed.before, None
        if self._observe == "local":
            update = {name: g / armed.loss_scale for name, g in armed.local.items()}
        else:
            update = {name: p.grad for name, p in parameters if p.grad is not None and id(p) in mine}
        frozen = self._still_frozen((name, p) for name, p in parameters if id(p) not in mine)
        weights = {name: p.detach() for name, p in parameters if name not in frozen.tensors}
        before = {n: b for n, b in armed.buffers.items() if n in self._persistent}
        return update, weights | before | armed.before, frozen

    def _still_frozen(self, unmoved: Iterable[tuple[str, nn.Parameter]]) -> FrozenWeights:
        """Return the parameters that need no copy.

        They are as they were at the first kept step.
        """
        if self._peers is not None and not self._peers.first:
            return FrozenWeights({}, {})  # this process writes nothing
        now = FrozenWeights.of(unmoved)
        self._frozen = now if self._frozen is None else self._frozen.unchanged_in(now)
        return self._frozen

    def _moved(self) -> set[int]:
        """Return the identities of the parameters that the optimizers move.

        Groups are added during training.
        """
        return {id(p) for mover in self._movers for p in parameters_of(mover) if p.requires_grad}

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that the optimizer moves, by name."""
        mine = self._moved()
        return [(plain_name(name), p) for name, p in self._model.named_parameters() if id(p) in mine]

    def _state(self) -> dict[str, Tensor]:
        """Return every parameter and persistent buffer by name, tied ones once; references, not copies."""
        found = {plain_name(name): p.detach() for name, p in self._model.named_parameters()}
        buffers = ((plain_name(name), b) for name, b in self._model.named_buffers())
        return found | {name: buffer for name, buffer in buffers if name in self._persistent}

    def _make_buffers(self) -> None:
        """Allocate and touch the buffers before training begins: page faults would make the first copy twenty times as slow.

        MiniLM on one thread: 330 ms for a first copy into fresh memory, 15 ms for every later one.
        """
        if not self._pooled:
            return
        for name, parameter in self._trained():
            if self._parts is None or name in self._parts.updates:
                self._buffers[f"u/{name}"] = _fresh(parameter.shape, _kept_as(parameter.dtype), parameter)
            if self._parts is None or name in self._parts.weights:
                self._buffers[f"w/{name}"] = _fresh(parameter.shape, parameter.dtype, parameter)
        for name, buffer in self._model.named_buffers():
            if plain_name(name) in self._persistent:
                self._buffers[f"w/{plain_name(name)}"] = _fresh(buffer.shape, buffer.dtype, buffer)

    def _into_buffer(self, key: str, source: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
        """Copy into a reused buffer: fresh allocations cost six times as much in page faults."""
        source = source.detach()
        if hasattr(source, "full_tensor"):
            source = source.full_tensor() if self._peers is None else self._peers.whole(source)
        if self._peers is not None and not self._peers.first:
            return source
        if source.is_sparse:
            source = source.to_dense()
        if scale is not None:
            source = source / scale
        if not self._pooled:
            return source.to(dtype)  # mostly the tensor itself
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != dtype:
            buffer = self._buffers[key] = _fresh(source.shape, dtype, source)
        return buffer.copy_(source, non_blocking=source.is_cuda)

    @entry
    def _write_quietly(self, kept: KeptStep) -> None:
        start = time.perf_counter()
        try:
            kept.ready()
            _check_worth_keeping(kept)
            self._write(kept)
            self.counters.kept += 1
            self.counters.written += kept.bytes + (kept.frozen.bytes if kept.frozen and self.counters.kept == 1 else 0)
        except NonFiniteUpdateError:
            self.counters.not_finite += 1
            logger.warning("step %d was not kept: its update is not finite", kept.step)
        except LeakAuditError as error:
            self._not_kept(kept.step, error)
        finally:
            self.counters.writer_s += time.perf_counter() - start

    def _not_kept(self, step: int, error: LeakAuditError) -> None:
        self.counters.failed += 1
        self.counters.reason = self.counters.reason or str(error)
        # A disk that is full now is full at the next step, too: once is a message, the rest is noise.
        level = logging.WARNING if self.counters.failed == 1 else logging.DEBUG
        logger.log(level, "step %d was not kept: %s", step, error)

    def _fail(self, error: Exception) -> None:
        """Report the first problem and do nothing any more: training comes first."""
        if self.disabled:
            return
        self.stop_recording()
        self.counters.failed += 1
        logger.warning(
            "leakaudit stops recording after a %s; training goes on, later steps are not audited", type_and_place(error)
        )


class _CopyStream:
    """Copies from a GPU on a stream of their own, into pinned memory; does nothing where the update is on the CPU.

    The training stream waits for the copies before it goes on, or the optimizer would move weights that are still being read.
    The training thread does not wait: only the writer does, for the event.
    """

    def __init__(self, recorder: Recorder, update: Mapping[str, Tensor]) -> None:
        self._device = next((g.device for g in update.values() if g.is_cuda), None)
        if self._device is not None and recorder._side is None:
            recorder._side = torch.cuda.Stream(self._device)
        self._side = recorder._side
        self._done: Any = None
        self._context: Any = None

    def __enter__(self) -> Self:
        if self._device is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            self._context = torch.cuda.stream(self._side)
            self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._device is not None:
            self._done = self._side.record_event()
            self._context.__exit__(*error)
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        """Wait until the copies have arrived."""
        if self._done is not None:
            self._done.synchronize()


def _fresh(shape: torch.Size, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return memory that was touched, pinned where it is filled from a GPU."""
    return torch.empty(shape, dtype=dtype, pin_memory=like.is_cuda).fill_(0)


def _kept_as(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which an update of that type is kept.

    It is the type itself if that is narrower than float32, else float32.
    """
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _unscaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient if scale is None else gradient / scale.to(gradient.device)


def _same_examples(one: Pass, two: Pass) -> bool:
    """Return whether two passes are of the same texts with the same labels."""
    mine, others = (_examples(p) for p in (one, two))
    return mine.keys() == others.keys() and bool(mine) and all(torch.equal(mine[name], others[name]) for name in mine)


def _examples(seen: Pass) -> dict[str, Tensor]:
    ids = {"input_ids": seen.inputs["input_ids"]} if "input_ids" in seen.inputs else seen.inputs
    labels = seen.inputs.get("labels", seen.withheld_inputs.get("labels"))
    return dict(ids) if labels is None else {**ids, "labels": labels}


def _batch_of(armed: _Armed) -> tuple[list[Pass], list[MicroBatch]]:
    """Return the passes that the update comes from, and the batch that they are; two passes over the same examples are one."""
    passes = [p for p in armed.passes if p.backward is not None or not p.tapped]
    for number, seen in enumerate(passes):
        seen.repeated_pass = any(
            _same_examples(seen, p)
            for p in passes[:number]
            if seen.backward == p.backward is not None or seen.elsewhere
        )
    hand_out(passes)  # afterwards: two passes over one batch were told the same labels
    return passes, [_micro_batch(p, armed.loss_scale) for p in passes]


def _micro_batch(seen: Pass, loss_scale: float) -> MicroBatch:
    return MicroBatch(
        inputs=seen.inputs,
        rng=seen.rng,
        num_items=seen.num_items,
        options=seen.options,
        withheld_inputs=seen.withheld_inputs,
        output_gradients={path: pull.to("cpu") / loss_scale for path, pull in seen.output_gradients.items()},
        repeated_pass=seen.repeated_pass,
    )


def _check_worth_keeping(kept: KeptStep) -> None:
    """Refuse a step that nothing could be said about.

    Raises:
        NonFiniteUpdateError: the update holds NaN or infinity.
        SnapshotError: no gradient, no forward pass, or a batch without tokens.
    """
    if not kept.update and kept.part is None:
        raise SnapshotError(
            "the optimizer held no gradient when it stepped; optimizers that move the weights during the backward pass "
            "cannot be audited"
        )
    if not kept.truth.micro_batches:
        raise SnapshotError(
            "the audit saw no forward pass that this update comes from; give the audit the object that the training loop calls"
        )
    if any("input_ids" not in batch.inputs for batch in kept.truth.micro_batches):
        raise SnapshotError(
            "its batch has no `input_ids`; the audit takes models that read token ids, and classifiers of arrays (`num_labels`)"
        )
    if not any(batch.inputs.get("inputs", batch.inputs["input_ids"]).numel() for batch in kept.truth.micro_batches):
        raise SnapshotError("its batch was empty")
    check_finite(kept.update)
    if kept.part is not None:
        check_finite(kept.part.sketches)  # of everything: an entry that is not finite makes its bucket so
