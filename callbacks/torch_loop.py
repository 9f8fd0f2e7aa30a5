"""`watch`: audits a training loop of your own, in plain torch, Accelerate, Fabric or Opacus.

    with watch(model, optimizer, tokenizer=tokenizer, config="leakaudit.yaml"):
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

A classifier of pictures or tables has no tokenizer: `num_labels` says that its labels are to be audited, and the loop tells them.

    with watch(net, optimizer, num_labels=10, config="leakaudit.yaml") as audit:
        for inputs, labels in loader:
            audit.batch({"labels": labels})
            criterion(net(inputs), labels).backward()
            ...

Give it what the loop uses: the objects that `accelerator.prepare` or `privacy_engine.make_private` returned. The loop is not
changed; steps are counted at the optimizer. It never raises into the loop; `LEAKAUDIT_DISABLED=1` switches it off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import nn

from leakaudit.callbacks.audit_run import (
    OFF_SWITCH,
    Guarded,
    Source,
    Stack,
    StepNow,
    auditable,
    never_raises,
    refuse_strategy,
)
from leakaudit.callbacks.distributed import peers_of
from leakaudit.callbacks.recorder import Observe, innermost, layers_of
from leakaudit.callbacks.side_process import say
from leakaudit.errors import SnapshotError


def watch(
    model: nn.Module,
    optimizer: Any,
    *,
    tokenizer: Any = None,
    num_labels: int | None = None,
    criterion: nn.Module | None = None,
    batch_size: int | None = None,
    config: Source = None,
    scaler: Any = None,
    max_grad_norm: float | None = None,
    observe: Observe = "update",
    local_steps: int = 1,
    total_steps: int | None = None,
    first_step: int = 0,
    log: Callable[[dict[str, float]], None] | None = None,
) -> Watch:
    """Return a context in which a training loop is audited.

    Args:
        model: what the loop calls: a model of transformers, wrapped or not, or a module with one such model inside; with
            `num_labels` any classifier.
        optimizer: what the loop steps, wrapped or not.
        tokenizer: the model's; none for a classifier of arrays.
        num_labels: C, for a classifier of arrays: any module that turns one array (B, ...) into logits (B, C).
        criterion: its loss, where that is another one than mean cross-entropy and the protocol says so.
        batch_size: largest batch of a step, where the protocol makes it public; else attacks have to guess how many labels there are.
        config: a YAML file, the object, a mapping, or None for the defaults.
        scaler: the `GradScaler`, if the loop has one that no wrapper of the optimizer holds.
        max_grad_norm: bound that the loop clips to; without it a clipped step is stamped `scaled` instead of `verified`.
        observe: `update`, what the optimizer gets; `local`, this process's share of it before processes are summed; `delta`, the
            difference of the weights after `local_steps` steps of plain SGD, as a client of federated averaging sends it.
        local_steps: K, for `delta`.
        total_steps: of the loop, if known; for the report.
        first_step: number of the loop's next step, where it goes on from a checkpoint.
        log: called with finished numbers, such as `accelerator.log`.
    """
    return Watch(
        config,
        Stack(
            framework="torch",
            versions={"torch": torch.__version__},
            model=model,
            optimizer=optimizer,
            tokenizer=tokenizer,
            num_labels=num_labels,
            criterion=criterion,
            batch_size_bound=batch_size,
            scaler=scaler,
            total_steps=total_steps,
            observe=observe,
            local_steps=local_steps,
            log=log,
        ),
        max_grad_norm=max_grad_norm,
        first_step=first_step,
    )


class Watch(Guarded):
    """An audited loop; what `watch` returns."""

    def __init__(
        self, source: Source, stack: Stack, *, max_grad_norm: float | None = None, first_step: int = 0
    ) -> None:
        """Remember; nothing is read, written or started before the context is entered."""
        super().__init__()
        self._source = source
        self._stack = stack
        self._max_grad_norm = max_grad_norm
        self._steps = first_step
        self._hook: Any = None

    def __enter__(self) -> Self:
        """Begin: make the spool, set the hooks, say what will happen."""
        self._off = ""
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """End: wait for the side process and say where the report is, or leave it to its own after an exception."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if kind is None:
            self._finish()
        else:
            self._break_off(f"training ended with {kind.__name__}")
        if self._off and self._off != OFF_SWITCH:
            say(f"this run was not audited: {self._off}")

    def batch(self, values: Mapping[str, Any]) -> None:
        """Tell of the whole batch before its forward pass, if the model is not given its labels: they are scored against then."""
        if self._run is not None:
            self._run.recorder.batch(values)

    @never_raises
    def _begin(self) -> None:
        self._open(self._source, self._look)
        if self._run is not None:
            self._hook = innermost(self._stack.optimizer).register_step_post_hook(self._stepped)
            self._next()

    def _look(self) -> Stack:
        """Return the stack as it is when training begins."""
        stack = self._stack
        layers = layers_of(stack.optimizer)
        state = next((s for layer in layers if (s := vars(layer).get("accelerator_state")) is not None), None)
        kind = getattr(state, "distributed_type", "")
        refuse_strategy(str(getattr(kind, "value", kind)), fsdp2=bool(getattr(state, "is_fsdp2", False)))
        wrappers = ("DataParallel", "DeepSpeedEngine", "FullyShardedDataParallel")
        refuse_strategy(
            next((k.__name__ for k in type(stack.model).__mro__ if k.__name__ in wrappers), ""), fsdp2=False
        )
        if stack.observe == "delta":
            _check_plain_sgd(layers[-1])
            if peers_of() is not None:
                raise SnapshotError("`observe='delta'` is for one client in one process; several share this run")
        called, core = auditable(stack.model, self._source) if stack.num_labels is None else (stack.model, stack.model)
        self._precision = getattr(state, "mixed_precision", None)
        return Stack(**{**vars(stack), "model": core, "called": called, "peers": peers_of()})

    def _next(self) -> None:
        """Decide about the step that begins; a round of local steps counts as one."""
        run, rounds = self._run, self._stack.local_steps if self._stack.observe == "delta" else 1
        if run is not None and self._steps % rounds == 0:
            run.decide(self._now, self._steps // rounds)

    @never_raises
    def _stepped(self, *args: Any) -> None:
        """Count a step; called by the optimizer after the weights have moved, and not for steps that a GradScaler skips."""
        self._steps += 1
        if self._run is not None:
            self._run.after_step()
            self._next()

    def _now(self) -> StepNow:
        rounds = self._stack.local_steps if self._stack.observe == "delta" else 1
        return StepNow(
            step=self._steps // rounds,
            total_steps=self._stack.total_steps,
            learning_rate=float(innermost(self._stack.optimizer).param_groups[0]["lr"]),
            max_grad_norm=self._max_grad_norm,
            autocast=self._precision,
            kept_rng=not _compiled(self._stack.model),
        )

    @never_raises
    def _finish(self) -> None:
        self._close(self._steps)

    @never_raises
    def _break_off(self, what: str) -> None:
        self._break(what)


def _compiled(model: nn.Module) -> bool:
    """Return whether a model is compiled, in which case its dropout may draw from a generator of its own."""
    kinds = [kind.__name__ for kind in type(model).__mro__]
    return "OptimizedModule" in kinds or getattr(model, "_compiled_call_impl", None) is not None


def _check_plain_sgd(optimizer: Any) -> None:
    """Refuse optimizers whose steps do not add up to a mean of gradients.

    Raises:
        SnapshotError: another optimizer than SGD, or one with momentum, weight decay or several learning rates.
    """
    knobs = [
        knob for group in optimizer.param_groups for knob in ("momentum", "weight_decay", "nesterov") if group.get(knob)
    ]
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if type(optimizer).__name__ == "SGD" and not knobs and len(rates) == 1 and rates != {0.0}:
        return
    found = f"{type(optimizer).__name__} with {', '.join(knobs) or f'{len(rates)} learning rates'}"
    raise SnapshotError(
        f"`observe='delta'` needs plain SGD with one learning rate, found {found}: other steps leave no mean of gradients "
        "in the difference of the weights. Use SGD, or `observe='update'`"
    )
