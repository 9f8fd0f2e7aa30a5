"""`LeakAuditCallback` for the Hugging Face `Trainer` and its subclasses.

    audit = LeakAuditCallback("leakaudit.yaml")
    trainer = Trainer(..., callbacks=[audit])
    audit.attach(trainer)          # for labels that the trainer keeps from the model, and for its loggers
    trainer.train()

Put it last among the callbacks, so that it sees what the others do to the gradients. It never raises into the run, unless `defense` asks for a
defence that cannot be applied. `LEAKAUDIT_DISABLED=1` switches the audit off, and no defence.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from leakaudit.capture.adapter import Adapter
from leakaudit.capture.boundary import Ending, around, entry, last_resort
from leakaudit.capture.context import OFF_SWITCH, Source, StepContext, TrainerContext, configuration
from leakaudit.capture.processes.distributed import peers_of
from leakaudit.capture.recording.step_facts import loader_bound
from leakaudit.capture.refusals import auditable, refuse_accelerate, refuse_strategy
from leakaudit.capture.trackers import OtherLogger, Trackers, tracker_in
from leakaudit.capture.training_defense import Trained
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.errors import SnapshotError
from leakaudit.models.wrappers import unwrapped


class Event(NamedTuple):
    """The objects that the trainer passes with each of its events."""

    args: TrainingArguments
    state: TrainerState
    objects: Mapping[str, Any]
    """Model, optimizer, scheduler, loader and tokenizer."""


@dataclass(eq=False, repr=False)
class LeakAuditCallback(Adapter, TrainerCallback, ExportableState):
    """A callback that keeps training steps, has them attacked, and reports.

    A new object only stores its arguments; nothing is read, written or started before training begins.
    """

    FRAMEWORK = "transformers.Trainer"

    config: Source = None
    """A YAML file, the object (or its JSON, as a checkpoint keeps it), or None for the defaults."""
    _: KW_ONLY
    num_labels: int | None = None
    """C, for a classifier of arrays, such as `AutoModelForImageClassification`: its labels are audited."""
    defense: PluginSpec | str | None = None
    """Defence that changes the update which training uses, such as `gaussian-noise(scale=0.1)`; None for the key `defense` of the
    configuration. A training that cannot apply it ends with a `DefenseError`."""
    defense_seed: int | None = None
    """Seed of its random numbers, for tests: whoever knows it can remove the noise. None draws them from the operating system."""
    _trainer: Any = field(default=None, init=False)
    _event: Any = field(default=None, init=False)
    """The last `Event` of a training, None outside of it."""
    _control: TrainerControl | None = field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the configuration only: a copy of a running audit is a new, idle one."""
        return {"config": self.config, "num_labels": self.num_labels, "defense": self.defense}

    @last_resort
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: configuration and number of kept steps.

        A resumed run continues to count from there.
        """
        return self._state() or {"args": {}, "attributes": {}}

    @entry
    def _state(self) -> dict[str, Any] | None:
        config = self.config
        whole = isinstance(config, AuditConfig | Mapping)
        stored = configuration(config).model_dump(mode="json") if whole else config
        arguments = {"config": str(stored) if isinstance(stored, Path) else stored, "num_labels": self.num_labels}
        if self.defense is not None:
            arguments["defense"] = self.defense if isinstance(self.defense, str) else self.defense.label
        return {"args": arguments, "attributes": {"_kept": self._kept_so_far()}}

    @last_resort
    def attach(self, trainer: Any) -> LeakAuditCallback:
        """Read whole batches from the trainer, with labels, before any hook.

        Without this call, the audit sees only the model's inputs, which lack labels that the trainer keeps for its own loss. The trainer's
        loggers get no results. And if an exception ends the run, its audit ends only when the process ends or trains again.

        Args:
            trainer: a `transformers.Trainer`; this callback is added to it if it is missing there.

        Returns:
            This callback.
        """
        self._attach(trainer)
        return self

    @entry
    def _attach(self, trainer: Any) -> None:
        if self._trainer is trainer or os.environ.get(OFF_SWITCH):
            return
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)  # without its events nothing would be kept, and the user would not learn of it
        self._trainer = trainer
        observe(trainer, self._batch, self._ended)

    @entry
    def _batch(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> None:
        """Note the batch; called before a training step, with its arguments."""
        if self._run is not None and isinstance(inputs, Mapping):
            self._run.recorder.batch(inputs)

    @entry
    def _ended(self, error: BaseException) -> None:
        """End the audit of a training that an exception or Ctrl-C ended.

        The trainer has no event for either of them.
        """
        self._interrupt(f"training ended with {type(error).__name__}")
        self._event = None

    # ------------------------------------------------------------------ the trainer's events

    @entry
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin the audit and tell the user what will happen."""
        self._event = Event(args, state, kwargs)
        self._open()

    @entry
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Decide whether the step that begins is kept."""
        self._event, self._control = Event(args, state, kwargs), control
        self._decide(state.global_step)

    @entry
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Cancel a step that the optimizer skipped, and log new results."""
        if self._run is not None:
            self._control = control
            if (
                self._run.trainer.local_steps is not None
            ):  # otherwise a round is recorded, of which a skipped step is a part
                self._run.recorder.cancel()  # a recording that is still open has no step: an overflow, or a skipped batch
            self._after_step()

    @entry
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the side process and tell the user where the report is."""
        self._control = control
        self._close(state.global_step)
        self._remind()
        self._event = None

    # ------------------------------------------------------------------ what the audit asks

    def _trained(self) -> Trained:
        return Trained(self._event.objects["model"], self._event.objects["optimizer"])

    def _refuse(self) -> None:
        args, accelerator = self._event.args, getattr(self._trainer, "accelerator", None)
        if getattr(args, "deepspeed", None):
            refuse_strategy("DEEPSPEED", fsdp2=False, config=args.deepspeed)
        refuse_accelerate(accelerator)
        if getattr(args, "fsdp", None):
            refuse_strategy("FSDP", fsdp2=bool(getattr(accelerator, "is_fsdp2", False)))
        if args.n_gpu > 1:
            refuse_strategy("DataParallel", fsdp2=False)
        if args.torch_compile and self._trainer is None:
            raise SnapshotError(
                "hooks inside a compiled model do not fire; call `attach(trainer)` to put them around it"
            )

    def _versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def _trainer_context(self) -> TrainerContext:
        event, trainer = self._event, self._trainer
        model = event.objects["model"]
        if trainer is not None and trainer.model is not model:
            trainer = None  # a copy of the trainer shares its callbacks and trains another model
        called = None if trainer is None else trainer.model_wrapped
        # A user's subclass of a transformers model is audited as a whole: the known model inside it lacks the user's head.
        if self.num_labels is None and not isinstance(unwrapped(model), transformers.PreTrainedModel):
            inner, core = auditable(model, self.config)
            if core is not unwrapped(model):  # a model of transformers in another module, as in sentence-transformers
                model = called = inner
        return TrainerContext(
            model=model,
            optimizer=event.objects["optimizer"],
            tokenizer=_tokenizer(event.objects.get("processing_class"), event.objects["model"]),
            num_labels=self.num_labels,
            called=called,
            batch_size_bound=_bound(event.args, event.objects.get("train_dataloader")),
            total_steps=event.state.max_steps or None,
            kept_before=_kept_before(event.state, type(self).__name__),
            peers=peers_of(event.args.world_size),
        )

    def _step_context(self) -> StepContext:
        args, state, objects = self._event
        scheduler = objects.get("lr_scheduler")
        rates = scheduler.get_last_lr() if scheduler is not None and hasattr(scheduler, "_last_lr") else [None]
        precision = getattr(getattr(self._trainer, "accelerator", None), "mixed_precision", None)
        return StepContext(
            step=state.global_step,
            epoch=state.epoch,
            total_steps=state.max_steps or None,
            loss=next((entry["loss"] for entry in reversed(state.log_history) if "loss" in entry), None),
            learning_rate=rates[0],
            max_grad_norm=args.max_grad_norm or None,
            autocast=precision or ("bf16" if args.bf16 else "fp16" if args.fp16 else None),
            kept_rng=not args.torch_compile,  # compiled dropout draws from a generator of its own
        )

    def _stop_training(self) -> None:
        if self._control is not None:
            self._control.should_training_stop = True

    def _run_name(self) -> str:
        event = self._event
        return getattr(event.state, "trial_name", None) or event.args.run_name or ""

    def _trackers(self) -> Trackers | None:
        if self._trainer is None:
            return None
        loggers = [
            one
            for one in self._trainer.callback_handler.callbacks
            if type(one).on_log is not TrainerCallback.on_log and one is not self
        ]
        known = {id(one): found for one in loggers if (found := tracker_in(one)) is not None}
        others = OtherLogger(functools.partial(self._log, frozenset(known)))
        return Trackers.of((*known.values(), others))

    def _log(self, known: frozenset[int], step: int, numbers: dict[str, float]) -> None:
        """Log through the trainer, past the callbacks whose trackers have the numbers.

        Args:
            known: identities of those callbacks.
            step: the audited step.
            numbers: name -> number; the audited step is one of them.
        """
        trainer, control = self._trainer, self._control
        due = control is not None and control.should_log
        if not known:
            trainer.log(numbers)
        else:
            trainer.state.log_history.append({**numbers, "step": trainer.state.global_step})
            handler = copy.copy(trainer.callback_handler)
            handler.callbacks = [one for one in handler.callbacks if id(one) not in known]
            handler.on_log(trainer.args, trainer.state, trainer.control, numbers)
        if control is not None:  # logging resets `should_log`: the trainer's own line of this step would be lost
            control.should_log = due


@dataclass(frozen=True)
class _Noted:
    """What is noted of one trainer; the trainer holds it."""

    trainer: int
    """Identity of the trainer. A copied trainer has another one, so nothing is noted of it."""
    kind: type
    """The class whose methods note it."""
    batch: Callable[..., object]
    """Entry that is called with the arguments of each training step."""
    ended: Ending

    def __reduce__(self) -> Any:
        """Copy and pickle as None."""
        return type(None), ()


def observe(trainer: Any, batch: Callable[..., object], ended: Callable[[BaseException], object]) -> None:
    """Note the batches of a trainer, and an exception that ends its training.

    The trainer keeps its class, because the user's code may ask for it (`type(self)`). Two methods of that class note the batches of trainers
    that are observed; of others they note nothing. If the class was not made by `type`, or the user replaced one of the methods on the object,
    the methods are replaced on the object.

    Args:
        trainer: a `transformers.Trainer`.
        batch: entry that is called with the arguments of each training step.
        ended: entry that is called with the exception.
    """
    kind = type(trainer)
    if type(kind) is not type or {"train", "training_step"} & vars(trainer).keys():
        trainer.training_step = around(trainer.training_step, batch)
        trainer.train = Ending(ended)(trainer.train)
        return
    vars(trainer)[_HELD] = _Noted(id(trainer), kind, batch, Ending(ended))
    for name in ("training_step", "train"):
        if not hasattr(vars(kind).get(name), _HELD):
            setattr(kind, name, _noting(kind, name))


_HELD = "_leakaudit_noted"
"""Attribute in which a trainer holds what is noted of it, and by which our methods are known."""


def _noting(kind: type, name: str) -> Callable[..., Any]:
    """Return a method of a class that notes the trainers which are observed."""
    own = vars(kind).get(name)

    @functools.wraps(getattr(kind, name))
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = getattr(super(kind, self), name) if own is None else own.__get__(self, kind)
        noted = _noted_of(self, kind)
        if noted is None:
            return call(*args, **kwargs)
        if name == "train":
            with noted.ended:
                return call(*args, **kwargs)
        noted.batch(*args, **kwargs)
        return call(*args, **kwargs)

    setattr(observed, _HELD, True)
    return observed


@last_resort
def _noted_of(trainer: Any, kind: type) -> _Noted | None:
    """Return what is to be noted of a trainer in a method of a class."""
    noted = vars(trainer).get(_HELD)
    return noted if noted is not None and noted.trainer == id(trainer) and noted.kind is kind else None


def _tokenizer(given: Any, model: Any) -> Any:
    """Return the tokenizer itself, which another object may hold.

    Such an object is a processor, or a SentenceTransformer as the model.
    """
    places = (given, getattr(given, "tokenizer", None), getattr(unwrapped(model), "tokenizer", None))
    return next((found for found in places if hasattr(found, "get_vocab")), given)


def _bound(args: TrainingArguments, loader: Any) -> int | None:
    """Return the largest batch of one optimizer step.

    The loader in use tells it, or the arguments if there is no loader yet.
    """
    windows = args.gradient_accumulation_steps
    if loader is None:
        return int(args.per_device_train_batch_size * windows * args.world_size)
    return loader_bound(loader, windows, args.world_size)


def _kept_before(state: TrainerState, name: str) -> int:
    """Return how many steps a run kept before the checkpoint that it was resumed from."""
    states: Any = state.stateful_callbacks or {}
    stored = states.get(name) if state.global_step else None
    entries = stored if isinstance(stored, list) else [stored]
    return sum(int(entry["attributes"].get("_kept", 0)) for entry in entries if entry)
