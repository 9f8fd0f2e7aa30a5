"""Trains a configuration twice, and compares kept steps with a spy's.

One training is audited, the other is not.

The spy shares no code with the product: it hooks every optimizer of torch and the word embeddings, in the training without the
audit. Of the product only its public entrances are used (`attach`, `watch`, the Lightning callback), its configuration, and
`read_snapshot`. The second training keeps every step (`schedule: deferred, at_end: leave`).

A configuration is a function of a `Training`: it makes a model and trains it, and tells the `Training` which loop it has.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.lightning_trainer import LeakAuditCallback as LightningAudit
from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.snapshot import Snapshot
from leakaudit.storage.snapshots import read_snapshot

Batch = dict[str, Tensor]
Tensors = dict[str, Tensor]
Sequences = list[tuple[int, ...]]

ROUNDING = 1e-6
"""Largest relative error of an update or of weights that count as copied: float32 keeps them to the bit, a cast from bfloat16 too."""

FORMULA_ROUNDING = 1e-4
"""The same against a gradient by an own formula, which sums in another order. Our choice: 1e-7 to 1e-6 were measured in float32."""

WRAPPERS = ("module.", "_orig_mod.", "_module.", "_forward_module.", "_fsdp_wrapped_module.")
"""What wrappers put before the names of parameters."""


@dataclass
class Seen:
    """One step of an optimizer, as the spy saw it in the training without the audit."""

    before: Tensors
    """Weights immediately before the step, by plain name."""
    gradient: Tensors = field(default_factory=dict)
    """What the optimizer was handed; float32, of all parameters of the model, whichever optimizer they belong to."""
    after: Tensors = field(default_factory=dict)
    """Weights before the next step, or at the end: other optimizers have moved as well."""
    batches: list[Batch] = field(default_factory=list)
    """What the loop, or the trainer's `training_step`, was given for this step."""
    rows: list[Tensor] = field(default_factory=list)
    """What the word embeddings were given in passes that had a graph, (B, T) each."""
    autocast: str = ""
    """Precision of the autocast that the word embeddings ran in; empty without."""


class Training:
    """One training: with the audit, or without it and with the spy."""

    def __init__(self, folder: Path, *, audited: bool, options: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.audited = audited
        self.config: dict[str, Any] = {
            "out_dir": folder / "audit",
            "schedule": "deferred",
            "at_end": "leave",
            "every_n_steps": 1,
            "max_snapshots": 100,
            **(options or {}),
        }
        self.model: nn.Module | None = None
        self.told: Any = None
        """The optimizer that the audit was told of; None where it finds it by itself."""
        self.pad = 0
        self.seen: list[Seen] = []
        self._batches: list[Batch] = []
        self._rows: list[Tensor] = []
        self._autocast = ""
        self._handles: list[Any] = []

    # ------------------------------------------------------------------ what configurations call

    def trainer(self, trainer: Any, model: nn.Module | None = None, *, attach: bool = True) -> Any:
        """Audit a `transformers.Trainer`, or watch it; returns it."""
        self._look_at(model or trainer.model)
        if self.audited:
            audit = LeakAuditCallback(self.config)
            if attach:
                audit.attach(trainer)
            else:
                trainer.add_callback(audit)
        else:
            inner = trainer.training_step

            def step(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                self.batch(inputs)
                return inner(model, inputs, *args, **kwargs)

            trainer.training_step = step
        return trainer

    def loop(self, model: nn.Module, optimizer: Any, **options: Any) -> Any:
        """Audit a training loop; `core` names the model inside a wrapper."""
        self._look_at(options.pop("core", model))
        self.told = optimizer
        if self.audited:
            return watch(model, optimizer, config=self.config, **options)
        return contextlib.nullcontext(self)

    def lightning(self, core: nn.Module, **options: Any) -> list[Any]:
        """Return the callbacks for a Lightning trainer."""
        self._look_at(core)
        return [LightningAudit(self.config, **options)] if self.audited else []

    def batch(self, batch: Any) -> None:
        """Give the spy a batch.

        A loop does so before each pass whose gradient belongs to the update.
        """
        if not self.audited and isinstance(batch, Mapping):
            self._batches.append({k: v.detach().clone() for k, v in batch.items() if isinstance(v, Tensor)})

    # ------------------------------------------------------------------ the spy

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hook every optimizer that is stepped in here."""
        if self.audited:
            with _writers_first():
                yield
            return
        hooks = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        try:
            yield
        finally:
            for handle in (*hooks, *self._handles):
                handle.remove()

    def _look_at(self, model: nn.Module) -> None:
        self.model = model
        if self.audited:
            return
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        if embeddings is not None:
            self._handles.append(embeddings.register_forward_pre_hook(self._embedded))

    def _embedded(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and args and not args[0].is_floating_point():
            self._rows.append(args[0].detach().clone())
            on, kind = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            self._autocast = str(kind).removeprefix("torch.") if on else ""

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.model is None or not self._ours(optimizer):
            return
        now = weights_of(self.model)
        if self.seen:
            self.seen[-1].after = now
        self.seen.append(Seen(before=now))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.model is None or not self._ours(optimizer) or not self.seen:
            return
        step = self.seen[-1]
        step.gradient = {
            plain(n): whole(p.grad).detach().float().clone()
            for n, p in self.model.named_parameters()
            if p.grad is not None
        }
        step.batches, self._batches = self._batches, []
        step.rows, self._rows = self._rows, []
        step.autocast = self._autocast

    def _ours(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's step belongs to the audit.

        It moves the model, is not a wrapper, and is the one that the audit was given.
        """
        mine = {id(p) for p in self.model.parameters()} if self.model is not None else set()
        moved = any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
        layers, told = [self.told], self.told
        while told is not None and len(layers) < 9:
            told = getattr(told, "optimizer", None) or getattr(told, "original_optimizer", None)
            layers.append(told)
        return moved and (self.told is None or optimizer is [layer for layer in layers if layer is not None][-1])


@contextlib.contextmanager
def _writers_first() -> Iterator[None]:
    """Let the audit's writer finish whenever it is asked for.

    So no step is left out because another one is being written.
    """
    alive = threading.Thread.is_alive

    def finished(self: threading.Thread) -> bool:
        if self.name.startswith("leakaudit"):
            self.join(timeout=5.0)
        return alive(self)

    threading.Thread.is_alive = finished  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.is_alive = alive  # type: ignore[method-assign]


def weights_of(model: nn.Module) -> Tensors:
    """Return copies of all parameters, by plain name."""
    return {plain(name): whole(p).detach().clone() for name, p in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor out of its shards."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def plain(name: str) -> str:
    """Return a parameter's name without what wrappers put before and into it."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


# ---------------------------------------------------------------------- expectations


def sequences_in(batch: Mapping[str, Tensor]) -> Sequences:
    """Return the texts of a batch, by masks or by packed positions.

    Every key with such an ending counts.
    """
    found: Sequences = []
    for name, ids in batch.items():
        if name.endswith("input_ids"):
            found += _texts(batch, name.removesuffix("input_ids"), ids)
    return found


def _texts(batch: Mapping[str, Tensor], prefix: str, ids: Tensor) -> Sequences:
    rows = ids.reshape(-1, ids.shape[-1])
    mask, positions = batch.get(f"{prefix}attention_mask"), batch.get(f"{prefix}position_ids")
    kept = torch.ones_like(rows) if mask is None or mask.shape != ids.shape else mask.reshape(rows.shape)
    places = torch.arange(rows.shape[1]).expand(rows.shape) if positions is None else positions.reshape(rows.shape)
    return [part for row, k, p in zip(rows, kept.bool(), places, strict=True) for part in _packed(row[k], p[k])]


def _packed(row: Tensor, positions: Tensor) -> Sequences:
    starts = [0, *(1 + torch.nonzero(positions[1:] == 0).flatten()).tolist(), len(row)]
    return [tuple(row[a:b].tolist()) for a, b in itertools.pairwise(starts)]


def expected_texts(step: Seen, pad: int) -> Sequences:
    """Return the texts of a step: of its batches, or of the embeddings' inputs."""
    if step.batches and all(any(n.endswith("input_ids") for n in batch) for batch in step.batches):
        return [text for batch in step.batches for text in sequences_in(batch)]
    return [tuple(t for t in row.tolist() if t != pad) for rows in step.rows for row in rows]


def expected_labels(step: Seen) -> list[int] | None:
    """Return the classes of a step, where its labels are one class a text."""
    found: list[int] = []
    for batch in step.batches:
        labels = batch.get("labels")
        if labels is None or labels.dim() != 1 or labels.is_floating_point() or len(labels) != len(sequences_in(batch)):
            return None
        found += labels.tolist()
    return found or None


# ---------------------------------------------------------------------- configurations


@dataclass(frozen=True)
class Configuration:
    """One training that an outside tester thought of."""

    name: str
    train: Callable[[Training], Any]
    """Makes everything anew, trains, and says where the audit goes in."""
    texts: Callable[[Seen], Sequences] | None = None
    """Texts of a step, where neither batches nor embeddings show them; or where other texts than those are the secret."""
    also: Callable[[Seen], Sequences] | None = None
    """Further texts that may stand in the truth or not, such as those of a second pass."""
    loss: Callable[[nn.Module, list[Batch]], Tensor] | None = None
    """Own formula: what the update is the gradient of, from the batches of a step. The model has the weights before it."""
    fresh: Callable[[], nn.Module] | None = None
    """Makes the model of the formula."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the audit's configuration."""
    divisor: float | None = None
    """True divisor of each micro-batch's loss, where it is known."""
    stamp: str = "verified"
    """What is to come of it: see `Row.stamp`."""


@dataclass
class Row:
    """What came of a configuration."""

    name: str
    steps: int = 0
    kept: int = 0
    stamps: Counter[str] = field(default_factory=Counter)
    relative: float = 0.0
    """Largest relative error of the recomputation."""
    upd: float = 0.0
    """Largest relative error of a kept update against the spy's gradient."""
    form: float | None = None
    weights: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """What is false in a step that may be scored."""
    same_training: bool = False
    said: list[str] = field(default_factory=list)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)

    @property
    def stamp(self) -> str:
        """Return `refused`, `none kept`, or the stamps with how often each was given."""
        if not self.kept:
            return "refused" if any("off for this run" in line for line in self.said) else "none kept"
        return ", ".join(s if n == self.kept else f"{n} {s}" for s, n in sorted(self.stamps.items()))

    def line(self) -> str:
        """Return the row, a line."""
        form = "-" if self.form is None else f"{self.form:.0e}"
        wrong = "; ".join(dict.fromkeys(self.wrong)) or "-"
        training = "identical" if self.same_training else "DIFFERENT"
        numbers = f"{self.relative:.0e} | {self.upd:.0e} | {form} | {self.weights:.0e}"
        return f"{self.name} | {self.kept}/{self.steps} {self.stamp} | {numbers} | {wrong} | {training}"


HEAD = "configuration | kept, stamp | recomputed | upd | form | weights | silently wrong | training"


def row_of(case: Configuration, folder: Path) -> Row:
    """Train a configuration twice and compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spied, end, _ = _trained(case, folder / "without", audited=False)
        _, audited_end, said = _trained(case, folder / "with", audited=True)
    row = Row(case.name, steps=len(spied.seen), said=said, same_training=_same(end, audited_end))
    for step, path in snapshots_in(folder / "with"):
        _compare(row, case, spied, step, read_snapshot(path))
    return row


def snapshots_in(folder: Path) -> list[tuple[int, Path]]:
    """Return the complete snapshots below a folder, by step."""
    found = folder.glob("audit*/spool/*.ready")
    return sorted((int(path.stem), path) for path in found)


def _trained(case: Configuration, folder: Path, *, audited: bool) -> tuple[Training, Tensors, list[str]]:
    folder.mkdir(parents=True)
    seed(0)
    run = Training(folder, audited=audited, options=case.options)
    with _listening() as said, run.watching(), contextlib.redirect_stdout(io.StringIO()):
        case.train(run)
    assert run.model is not None, f"{case.name} did not say where the audit goes in"
    end = weights_of(run.model)
    if run.seen:
        run.seen[-1].after = dict(end)
    end |= {f"buffer {name}": b.detach().clone() for name, b in run.model.named_buffers()}
    end |= {"random state": torch.get_rng_state(), "python": torch.tensor([random.getrandbits(30)])}
    return run, end, said


def seed(number: int) -> None:
    """Seed every generator."""
    random.seed(number)
    numpy.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """Collect what the audit logs."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    ear, ours = Ear(), logging.getLogger("leakaudit")
    ours.addHandler(ear)
    try:
        yield said
    finally:
        ours.removeHandler(ear)


def _same(one: Tensors, two: Tensors) -> bool:
    return set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


def _compare(row: Row, case: Configuration, spied: Training, step: int, snapshot: Snapshot) -> None:
    """Compare one kept step with what the spy saw of it."""
    row.kept += 1
    row.snapshots[step] = snapshot
    stamp, error = stamped(snapshot)
    row.stamps[stamp] += 1
    if stamp == "mismatch":
        return
    row.relative = max(row.relative, error)
    seen = spied.seen[step]
    kept = {plain(name): value for name, value in snapshot.observation.update.items()}
    for what in _falsehoods(case, seen, snapshot, kept, spied.pad):
        row.wrong.append(f"step {step}: {what}")
    common = sorted(set(kept) & set(seen.gradient))
    row.upd = max(row.upd, distance({n: kept[n] for n in common}, {n: seen.gradient[n] for n in common}))
    row.weights = max(row.weights, _weights_off(seen, snapshot))
    if case.loss is not None and case.fresh is not None:
        form = _by_formula(case, seen)
        shared = sorted(set(kept) & set(form))
        own = distance({n: kept[n] for n in shared}, {n: form[n] for n in shared})
        row.form = max(row.form or 0.0, own)
        if own > FORMULA_ROUNDING and stamp in ("verified", "noised"):
            row.wrong.append(f"step {step}: update is {own:.0e} off the formula")
    if row.upd > ROUNDING:
        row.wrong.append(f"step {step}: update is {row.upd:.0e} off what the optimizer was handed")
    if row.weights > ROUNDING:
        row.wrong.append(f"step {step}: weights are {row.weights:.0e} off")


def _falsehoods(case: Configuration, seen: Seen, snapshot: Snapshot, kept: Tensors, pad: int) -> Iterator[str]:
    """Yield what is false in a kept step's truth and public facts."""
    facts, truth = snapshot.observation.facts, snapshot.truth
    texts = case.texts(seen) if case.texts else expected_texts(seen, pad)
    more = Counter(case.also(seen)) if case.also else Counter()
    held = Counter(truth.sequences())
    if texts and ((Counter(texts) - held) or (held - Counter(texts) - more)):
        yield f"{len(texts)} texts are {sum(held.values())}, {sum((Counter(texts) & held).values())} the same"
    labels, own = expected_labels(seen), truth.labels()
    if labels is not None and own is not None and sorted(own) != sorted(labels):
        yield f"labels {own} for {labels}"
    bound = facts.batch_size_bound
    if bound is not None and texts and bound < len(texts):
        yield f"batch bound {bound} for {len(texts)} texts"
    changed = {n for n, p in seen.after.items() if n in seen.before and not torch.equal(seen.before[n], p)}
    moved = {n for n in changed & set(seen.gradient) if bool(seen.gradient[n].any())}
    called_frozen = moved & {plain(n) for n in facts.frozen}
    if called_frozen:
        yield f"{len(called_frozen)} parameters that moved are called frozen"
    types = {str(p.dtype).removeprefix("torch.") for p in seen.before.values()}
    precision = seen.autocast or (types.pop() if len(types) == 1 else "")
    if precision and facts.dtype != precision:
        yield f"precision {facts.dtype} for {precision}"
    if case.divisor is not None and abs((facts.loss_divisor or 0.0) / case.divisor - 1) > 1e-4:
        yield f"divisor {facts.loss_divisor} for {case.divisor}"


def _weights_off(seen: Seen, snapshot: Snapshot) -> float:
    held = {plain(n): p.detach() for n, p in snapshot.observation.model.named_parameters()}
    common = [n for n in held if n in seen.before and held[n].shape == seen.before[n].shape]
    return max(
        (float((held[n].float() - seen.before[n].float()).abs().max()) for n in common if held[n].numel()), default=0.0
    )


def _by_formula(case: Configuration, seen: Seen) -> Tensors:
    """Return the gradient of the configuration's loss at the old weights."""
    assert case.fresh is not None and case.loss is not None
    model = case.fresh()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(seen.before[plain(name)])
    model.train()
    case.loss(model, seen.batches).backward()
    return {plain(n): p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """Return the relative L2 error of `one` against `two`."""
    off = sum(float((one[n].double() - two[n].double()).square().sum()) for n in two)
    size = sum(float(two[n].double().square().sum()) for n in two)
    return float((off / size) ** 0.5) if size else float(off > 0)


def stamped(snapshot: Snapshot) -> tuple[str, float]:
    """Return the stamp that a worker would use, and its relative error.

    It is the check in place, or else a recomputation.
    """
    from leakaudit.audit.verification import verify
    from leakaudit.client.step import ClientStep

    found = getattr(snapshot, "checked", None)
    if found is None:
        found = verify(ClientStep.of(snapshot), snapshot.observation.update)
    return str(found.status.value), float(found.relative_error or 0.0)


def read_by_span(snapshot: Snapshot, budget_s: float = 60.0) -> tuple[int, int] | None:
    """Return how many kept texts `span` finds word by word, and of how many.

    None if `span` does not apply.
    """
    from leakaudit.plugins.budget import Budget
    from leakaudit.registry import attacks

    span: Any = attacks.create("span", {})
    if not span.applies(snapshot.observation).applies:
        return None
    found = span(snapshot.observation, torch.Generator().manual_seed(0), Budget(budget_s))
    texts = snapshot.truth.sequences()
    guessed = {tuple(guess.token_ids) for guess in found.sequences or ()}
    return sum(text in guessed for text in texts), len(texts)


def table(rows: Sequence[Row]) -> str:
    """Return rows as lines under a head."""
    return "\n".join([HEAD, *(row.line() for row in rows)])
