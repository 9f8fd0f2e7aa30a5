"""How a client's update comes about: (weights, batch, recipe) -> update. Used to verify and to simulate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.errors import DataError, SnapshotError
from leakaudit.models import Task, outputs_of, tied_names, vocabulary_of
from leakaudit.scores import Verification, VerificationStatus
from leakaudit.snapshot import (
    DP_SGD,
    NOISES,
    DeclaredDefense,
    MicroBatch,
    Observation,
    PublicFacts,
    Snapshot,
    StepRecipe,
    Truth,
    check_finite,
    dropout_rates,
)

TOLERANCE = {"bf16": 3e-2, "bfloat16": 3e-2, "fp16": 1e-2, "float16": 1e-2}
"""Relative error up to which a recomputed update counts as the same, by autocast or else the weights' precision. Our choice: autocast steps
were measured at 5e-3 (bf16) with eager instead of fused attention; a wrong batch is above 0.3."""

FLOAT32_TOLERANCE = 1e-3
"""The same for every other precision: float32 steps were measured at 1e-8 to 1e-6."""

NOISE_TOLERANCE = 0.1
"""Relative error up to which a residual's standard deviation is the declared one."""

STANDARD_ERRORS = 5.0
"""How far the projection of a noised update on the recomputed one may lie from 1, in standard errors: by chance it does so
once in two million steps, while the update of another batch, hidden in however much noise, projects on less than 1."""

FACTOR_TOLERANCE = 1e-3
"""How near a factor must lie to a known one to be given its name. Our choice: two such factors are never that close."""

SAME_DIRECTION = 0.2
"""Cosine between observed and recomputed update below which a step whose random state was not kept is a mismatch. Our
choice: another dropout mask leaves 0.8 or more at the usual rate of 0.1."""


@dataclass(frozen=True)
class ClientStep:
    """The rule that turns weights, a batch and a recipe into an update."""

    model: nn.Module
    """With the weights before the step; left unchanged."""
    truth: Truth
    recipe: StepRecipe
    facts: PublicFacts

    @classmethod
    def of(cls, snapshot: Snapshot) -> ClientStep:
        """Return the step that a snapshot claims to come from."""
        return cls(snapshot.observation.model, snapshot.truth, snapshot.recipe, snapshot.observation.facts)

    def update(self) -> dict[str, Tensor]:
        """Run the step: forward and backward of every micro-batch, then clipping.

        Where the protocol sends a difference of weights (`view` is `delta`), every micro-batch is one local step of plain SGD,
        and the result is (weights before - weights after) / (learning rate * local steps), as federated averaging sends it
        (McMahan et al. 2017, Algorithm 1, ClientUpdate). Weights are float32, so their rounding is part of it.

        Returns:
            Parameter name -> gradient or difference, for the shared parameters, float32.

        Raises:
            SnapshotError: the loss cannot be replayed.
        """
        if self.recipe.loss == "unsupported":
            raise SnapshotError(
                f"the loss of this step cannot be replayed: {self.recipe.note or 'custom loss function'}"
            )
        with self._trained() as parameters:
            if self.facts.view == "delta":
                return self._local_steps(parameters)
            if private := self.facts.declared(DP_SGD):
                return self._private(parameters, private)
            self._accumulate(parameters)
            self._clip(parameters)
            return _gradients(parameters)

    def raw(self) -> dict[str, Tensor]:
        """Run the step without the declared defence: what clipping per example, noise or pruning keeps off the wire.

        Raises:
            SnapshotError: the loss cannot be replayed.
        """
        undefended = self.facts.model_copy(update={"defenses": ()})
        return replace(self, facts=undefended).update()

    @contextmanager
    def _trained(self) -> Iterator[dict[str, nn.Parameter]]:
        """Put the model into the client's state, what is in eval mode and noise on the embeddings included."""
        with _as_trained(self.model, self.recipe.training, frozenset(self.facts.shared)) as parameters:
            for name, module in self.model.named_modules():
                if name in self.recipe.eval_modules:
                    module.training = False
            with _neftune(self.model, self.recipe.neftune_alpha):
                yield parameters

    def _accumulate(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for batch in self.truth.micro_batches:
            self._backward(batch)
        divisor = self.recipe.processes * self.recipe.loss_scale
        if divisor != 1:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)

    def _private(self, parameters: Mapping[str, nn.Parameter], private: DeclaredDefense) -> dict[str, Tensor]:
        """Clip every example's gradient, add them up and divide by the expected batch size; the noise is not added.

        Source: Abadi et al. 2016, Algorithm 1, with the divisor L of its line "Add noise". An example's gradient is B times its
        share in the gradient of the micro-batch's mean loss, as Opacus takes it. Examples meet only in the loss, so its share
        is what the rows of the outputs that belong to it are pulled by.
        """
        bound, expected = float(private.parameters["max_grad_norm"]), float(private.parameters["expected_batch_size"])
        total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
        for batch in self.truth.micro_batches:
            share = 1 if private.parameters.get("loss_reduction") == "sum" else len(batch.inputs["input_ids"])
            for example in self._per_example(batch, parameters, share):
                norm = torch.stack([g.norm() for g in example.values()]).norm()
                factor = float((bound / (norm + 1e-6)).clamp(max=1.0))  # 1e-6 as in Opacus' `clip_and_accumulate`
                for name, gradient in example.items():
                    total[name] += factor * gradient
        divisor = expected * self.recipe.processes
        return {name: gradient / divisor for name, gradient in total.items()}

    def _per_example(
        self, batch: MicroBatch, parameters: Mapping[str, nn.Parameter], share: float
    ) -> Iterator[dict[str, Tensor]]:
        """Yield each example's gradient by parameter name: `share` times its part in the gradient of the micro-batch."""
        with self._forward(batch) as outputs:
            rows = len(batch.inputs["input_ids"])
            tensors, pulls = self._pulls_by_row(outputs, batch, rows)
        for row in range(rows):
            for parameter in parameters.values():
                parameter.grad = None
            own = []
            for pull in pulls:
                mine = torch.zeros_like(pull)
                mine[row] = share * pull[row]
                own.append(mine)
            torch.autograd.backward(tensors, own, retain_graph=row < rows - 1)
            yield _gradients(parameters)

    def _pulls_by_row(
        self, outputs: Mapping[str, Tensor], batch: MicroBatch, rows: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs with one row an example, and what pulls on them; a loss inside the model is followed to its logits."""
        pulls = dict(batch.pulls) or {"loss": torch.ones(()) / self.recipe.loss_divisor}
        scalars = [path for path in pulls if outputs[path].dim() == 0]
        if not scalars:
            return self._direct(outputs, pulls)
        loss, pull = outputs[scalars[0]], pulls[scalars[0]].to(outputs[scalars[0]])
        for output in outputs.values():
            if output.requires_grad and output.dim() > 0 and len(output) == rows:
                (reached,) = torch.autograd.grad(loss, output, pull, retain_graph=True, allow_unused=True)
                if reached is not None:
                    return [output], [reached]
        raise SnapshotError(
            "no output of the model holds one row an example that the loss is computed from, so the examples' gradients "
            "cannot be told apart and the clipping of this private step cannot be repeated"
        )

    def _local_steps(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Take one SGD step a micro-batch and return the scaled difference; the weights are put back."""
        rate = self.facts.learning_rate
        if not rate:
            raise SnapshotError(
                "the update is a difference of weights, but the learning rate of its steps was not kept"
            )
        before = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for parameter in parameters.values():
                parameter.data = parameter.data.clone()
            for batch in self.truth.micro_batches:
                self.model.zero_grad(set_to_none=True)
                self._backward(batch)
                self._clip(parameters)
                for parameter in parameters.values():
                    if parameter.grad is not None:
                        parameter.data.add_(parameter.grad, alpha=-rate)
            scale = rate * len(self.truth.micro_batches)
            return {name: ((before[name] - p.data) / scale).float() for name, p in parameters.items()}
        finally:
            for name, parameter in parameters.items():
                parameter.data = before[name]

    def _clip(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if self.recipe.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), self.recipe.max_grad_norm)
        if self.recipe.max_grad_value:
            torch.nn.utils.clip_grad_value_(list(parameters.values()), self.recipe.max_grad_value)

    def observe(self) -> Observation:
        """Run the step and return what an eavesdropper sees of it.

        Raises:
            NonFiniteUpdateError: the update is not finite.
        """
        update = self.update()
        check_finite(update)
        return Observation(update=update, model=self.model.eval(), facts=self.facts)

    def _backward(self, batch: MicroBatch) -> None:
        if self.recipe.loss == "pulls":
            with self._forward(batch) as outputs:
                tensors, pulls = self._direct(outputs, batch.pulls)
            torch.autograd.backward(tensors, [self.recipe.loss_scale * pull for pull in pulls])
            return
        with self._as_seen(batch):
            loss = self._loss(batch)
        (loss / self.recipe.loss_divisor * self.recipe.loss_scale).backward()

    @contextmanager
    def _as_seen(self, batch: MicroBatch) -> Iterator[None]:
        """Restore the random state and the precision in which the client saw a micro-batch."""
        device = batch.inputs["input_ids"].device
        with ExitStack() as stack:
            if batch.rng:
                stack.enter_context(_random_state(batch.rng, device))
            if self.recipe.autocast:
                dtype = torch.bfloat16 if self.recipe.autocast == "bf16" else torch.float16
                stack.enter_context(torch.autocast(device.type, dtype=dtype))
            yield

    @contextmanager
    def _forward(self, batch: MicroBatch) -> Iterator[dict[str, Tensor]]:
        """Run the model as the client did and yield its outputs by path."""
        with self._as_seen(batch):
            found = dict(outputs_of(self.model(**self._arguments(batch))))
            missing = [path for path in batch.pulls if path not in found or not found[path].requires_grad]
            if missing:
                raise SnapshotError(
                    f"the client's loss came from the model's output {missing[0]!r}, and the rebuilt model has none of that "
                    "name that depends on shared parameters"
                )
            yield found

    def _direct(self, outputs: Mapping[str, Tensor], pulls: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs and what pulls on each by itself.

        What arrived at an output includes what came through later outputs that were computed from it (a pooled state from the
        last hidden one); that part comes again when these are pulled, so it is taken out.
        """
        order = sorted(pulls, key=lambda path: -outputs[path].grad_fn._sequence_nr())  # type: ignore[union-attr]
        tensors: list[Tensor] = []
        direct: list[Tensor] = []
        for path in order:
            output, pull = outputs[path], pulls[path].to(outputs[path])
            if tensors:
                (via,) = torch.autograd.grad(tensors, output, direct, retain_graph=True, allow_unused=True)
                pull = pull if via is None else pull - via
            tensors.append(output)
            direct.append(pull)
        return tensors, direct

    def _arguments(self, batch: MicroBatch) -> dict[str, Any]:
        inputs: dict[str, Any] = {**batch.inputs, **batch.options}
        if batch.num_items is not None and (self.recipe.pass_num_items or self.recipe.loss == "pulls"):
            inputs["num_items_in_batch"] = batch.num_items
        return inputs

    def _loss(self, batch: MicroBatch) -> Tensor:
        inputs = self._arguments(batch)
        if self.recipe.loss == "label_smoothing":
            return self._smoothed_loss(inputs, batch)
        loss: Tensor = self.model(**inputs).loss
        return loss

    def _smoothed_loss(self, inputs: dict[str, Any], batch: MicroBatch) -> Tensor:
        from transformers.trainer_pt_utils import LabelSmoother

        labels = inputs.pop("labels")
        outputs = self.model(**inputs)
        smoother = LabelSmoother(epsilon=self.recipe.label_smoothing)
        shift = self.facts.task == "causal-lm"
        loss: Tensor = smoother(outputs, labels, shift_labels=shift, num_items_in_batch=batch.num_items)
        return loss


def _gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradients as they are now, in float32; zero for a parameter that the loss did not reach."""
    return {
        name: torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.detach().float().clone()
        for name, p in parameters.items()
    }


@contextmanager
def _neftune(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """Add NEFTune's noise to the word embeddings, drawing from the random state as the client's own hook did.

    Source: Jain et al. 2023, Algorithm 1: uniform in (-1, 1), times alpha / sqrt(L d), L tokens of d entries.
    """
    if not alpha:
        yield
        return

    def noisy(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        bound = alpha / torch.sqrt(torch.tensor(output.size(1) * output.size(2)))
        return output + torch.zeros_like(output).uniform_(-bound, bound)  # type: ignore[arg-type]

    table: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    hook = table.register_forward_hook(noisy)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _as_trained(model: nn.Module, training: bool, shared: frozenset[str]) -> Iterator[dict[str, nn.Parameter]]:
    """Put the model into the client's state, with gradients for the shared parameters only, and back afterwards."""
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    was_training = model.training
    buffers = {name: b.clone() for name, b in model.named_buffers()} if training else {}
    model.train(training)
    model.zero_grad(set_to_none=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in shared)
    try:
        with torch.enable_grad():
            yield {name: p for name, p in model.named_parameters() if name in shared}
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
        for (
            name,
            buffer,
        ) in model.named_buffers():  # batch norm counts on in training mode, and the step may be repeated
            if name in buffers:
                buffer.copy_(buffers[name])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])


@contextmanager
def _random_state(rng: Mapping[str, Tensor], device: torch.device) -> Iterator[None]:
    """Restore the kept random state for the duration of the block, and the caller's own state afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if "cpu" in rng:
            torch.set_rng_state(rng["cpu"].cpu())
        if "cuda" in rng and device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"].cpu(), device)
        yield


def public_facts(
    model: nn.Module, tokenizer: Any, *, task: Task, training: bool, frozen: frozenset[str] = frozenset(), **more: Any
) -> PublicFacts:
    """Describe what everybody knows about a step on `model` in which all parameters but `frozen` are shared."""
    names = [name for name, _ in model.named_parameters()]
    return PublicFacts(
        task=task,
        num_labels=int(model.config.num_labels) if task == "classification" else None,  # type: ignore[union-attr, arg-type]
        training_mode=training,
        dropout=dropout_rates(model.named_modules()),
        shared=tuple(name for name in names if name not in frozen),
        frozen=tuple(name for name in names if name in frozen),
        tied=tied_names(model),
        vocabulary=vocabulary_of(tokenizer, model),
        **more,
    )


def make_batch(tokenizer: Any, texts: list[str], labels: list[int] | None, task: Task, max_length: int) -> MicroBatch:
    """Tokenise texts into one padded micro-batch, with the labels the task's loss takes.

    Args:
        tokenizer: a tokenizer of transformers.
        texts: B texts.
        labels: B classes for classification; ignored for causal-lm, where the labels are the tokens themselves.
        task: which loss.
        max_length: longer texts are cut, as trainers do.

    Raises:
        DataError: the batch is empty.
    """
    if not texts:
        raise DataError("an empty batch: at least one text is needed for a client step")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}
    if "token_type_ids" in encoded:
        inputs["token_type_ids"] = encoded["token_type_ids"]
    if task == "classification":
        inputs["labels"] = torch.tensor(labels, dtype=torch.long)
    else:
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return MicroBatch(inputs=inputs)


def with_random_state(batch: MicroBatch, seed: int) -> MicroBatch:
    """Return the batch with the random state that `seed` gives, so that a simulated step with dropout can be repeated."""
    return replace(batch, rng={"cpu": torch.Generator().manual_seed(seed).get_state()})


def verify(step: ClientStep, observed: Mapping[str, Tensor]) -> Verification:
    """Recompute a step and stamp the observed update (architecture, honesty rule 2).

    The factor is k = <observed, recomputed> / <recomputed, recomputed>; the relative error is taken after it.

    Args:
        step: where the update is said to come from.
        observed: parameter name -> observed update.
    """
    if step.recipe.loss == "unsupported":
        return Verification(
            status=VerificationStatus.STOCHASTIC, note=f"not recomputed: {step.recipe.note or 'custom loss function'}"
        )
    try:
        return _stamp(step, observed)
    except SnapshotError as error:
        return Verification(status=VerificationStatus.MISMATCH, note=f"cannot be recomputed: {error}")
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        # The type only: a message of the model's own code may quote its inputs.
        return Verification(status=VerificationStatus.MISMATCH, note=f"recomputing raised {type(error).__name__}")


def _stamp(step: ClientStep, observed: Mapping[str, Tensor]) -> Verification:
    tolerance = TOLERANCE.get(step.recipe.autocast or step.facts.dtype, FLOAT32_TOLERANCE)
    noise = step.facts.noise
    if noise == DP_SGD:
        bare = _compared(step, observed, step.raw())
        if bare.error <= tolerance:
            return _verified(bare, f"the declared {noise} is not in the update: it was sent undefended")
    found = _compared(step, observed, step.update())
    if found.norm == 0.0 or float(found.seen.norm()) == 0.0:
        return Verification(
            status=VerificationStatus.MISMATCH, note="the observed or the recomputed update is all zero"
        )
    sigma = _declared_sigma(step, found.own)
    if found.error <= tolerance:
        return _verified(found, f"the declared {noise} is not in the update" if sigma else "")
    if found.scale > 0 and found.scaled_error <= tolerance:
        return Verification(
            status=VerificationStatus.SCALED,
            relative_error=found.scaled_error,
            scale=found.scale,
            note=_why_scaled(step, found),
        )
    residual = found.seen - found.own
    if sigma and _is_noise(residual, found.own, sigma, tolerance):
        return Verification(
            status=VerificationStatus.NOISED,
            relative_error=found.error,
            scale=1.0,
            sigma=float(residual.std()),
            note="as declared",
        )
    cosine = float(found.seen @ found.own) / (found.norm * float(found.seen.norm()))
    if step.recipe.training and step.facts.dropout and not _repeats_dropout(step) and cosine >= SAME_DIRECTION:
        return Verification(
            status=VerificationStatus.STOCHASTIC,
            relative_error=found.error,
            scale=found.scale,
            note=f"dropout state was not kept; cosine {cosine:.2f}",
        )
    return Verification(
        status=VerificationStatus.MISMATCH,
        relative_error=found.error,
        scale=found.scale,
        note=f"cosine {cosine:.2f} with the update recomputed from the kept batch",
    )


def defenses_found(step: ClientStep, stamp: Verification) -> tuple[DeclaredDefense, ...]:
    """Return the declared defences without noise that is declared and not in the update.

    Where a step comes out the same when it is computed again without noise, no noise was added to it, whatever the protocol says
    (this happened to users of Opacus who trained through a trainer that stepped the wrong optimizer). Such a step is audited as
    what it is: undefended.
    """
    same = stamp.status in (VerificationStatus.VERIFIED, VerificationStatus.SCALED)
    return tuple(
        defense for defense in step.facts.defenses if not (same and defense.name in NOISES and _has_noise(defense))
    )


def _has_noise(defense: DeclaredDefense) -> bool:
    return any(float(defense.parameters.get(knob, 0.0) or 0.0) > 0 for knob in ("sigma", "scale", "noise_multiplier"))


@dataclass(frozen=True)
class _Compared:
    """An observed and a recomputed update, entry by entry."""

    seen: Tensor
    """(entries,), float64."""
    own: Tensor
    """(entries,), float64."""
    norm: float
    """Of the recomputed one."""
    error: float
    """||seen - own|| / ||own||; infinite where own is zero."""
    scale: float
    """k = <seen, own> / <own, own>."""
    scaled_error: float
    """||seen - k own|| / (|k| ||own||)."""


def _compared(step: ClientStep, observed: Mapping[str, Tensor], recomputed: Mapping[str, Tensor]) -> _Compared:
    check_finite(recomputed)
    kept = _mask_of_pruned(step, observed)
    seen = torch.cat([observed[name].double().flatten() for name in recomputed])
    own = torch.cat([(recomputed[name] * kept.get(name, 1.0)).double().flatten() for name in recomputed])
    norm = float(own.norm())
    k = float(seen @ own) / norm**2 if norm else 0.0
    return _Compared(
        seen=seen,
        own=own,
        norm=norm,
        error=float((seen - own).norm()) / norm if norm else float("inf"),
        scale=k,
        scaled_error=float((seen - k * own).norm()) / (abs(k) * norm) if k else float("inf"),
    )


def _verified(found: _Compared, note: str) -> Verification:
    return Verification(status=VerificationStatus.VERIFIED, relative_error=found.error, scale=1.0, note=note)


def _why_scaled(step: ClientStep, found: _Compared) -> str:
    """Name the factor where it is one that trainers are known for."""
    k, windows, processes = found.scale, len(step.truth.micro_batches), step.recipe.processes
    norm = float(found.seen.norm())
    round_norm = float(f"{norm:.1g}")
    named = [
        (k, windows, "the number of micro-batches"),
        (k, 1 / windows, "one over the number of micro-batches"),
        (k, processes, "the number of processes"),
        (k, 1 / processes, "one over the number of processes"),
    ]
    for value, known, name in named:
        if known != 1 and abs(value - known) <= FACTOR_TOLERANCE * known:
            return f"the factor is {name}"
    exponent = math.log2(1 / k)
    if step.recipe.autocast == "fp16" and exponent >= 1 and abs(exponent - round(exponent)) <= FACTOR_TOLERANCE:
        return f"one over 2^{round(exponent)}, as of a GradScaler that the audit was not told of"
    if k < 1 and abs(norm - round_norm) <= FACTOR_TOLERANCE * round_norm:
        return f"as if clipped to a norm of {round_norm:g}"
    return ""


def _mask_of_pruned(step: ClientStep, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries that a declared pruning left, so that only they are compared."""
    if step.facts.declared("prune") is None:
        return {}
    return {name: (tensor != 0).to(tensor.dtype) for name, tensor in observed.items()}


def _declared_sigma(step: ClientStep, recomputed: Tensor) -> float | None:
    """Return the standard deviation of the noise that the protocol declares, in the update's units, or None.

    Declared as `sigma`, or as `scale`: a multiple of the root mean square of the whole update; for private SGD noise multiplier
    times clipping bound over the expected batch size (Abadi et al. 2016, Algorithm 1).
    """
    if private := step.facts.declared(DP_SGD):
        sums = float(private.parameters["noise_multiplier"]) * float(private.parameters["max_grad_norm"])
        return sums / float(private.parameters["expected_batch_size"]) or None
    declared = step.facts.declared("gaussian-noise")
    if declared is None:
        return None
    sigma, scale = declared.parameters.get("sigma"), declared.parameters.get("scale")
    if isinstance(sigma, float | int) and sigma > 0:
        return float(sigma)
    if isinstance(scale, float | int) and scale > 0:
        return float(scale) * float(recomputed.square().mean().sqrt())
    return None


def _is_noise(residual: Tensor, recomputed: Tensor, sigma: float, tolerance: float) -> bool:
    """Return whether `residual` is what noise of `sigma` leaves: as large as declared, and unrelated to the update.

    Independent noise projects on the update g with the standard deviation sigma / |g| in units of g. Without this second
    look, noise far above the signal would hide an update of another batch.

    Args:
        residual: (entries,), observed minus recomputed.
        recomputed: (entries,).
        sigma: declared standard deviation.
        tolerance: relative error of the recomputation itself.
    """
    if abs(float(residual.std()) - sigma) > NOISE_TOLERANCE * sigma:
        return False
    norm = float(recomputed.norm())
    return abs(float(residual @ recomputed)) / norm**2 <= tolerance + STANDARD_ERRORS * sigma / norm


def _repeats_dropout(step: ClientStep) -> bool:
    """Return whether the kept random states give the client's dropout masks again, on the kind of device that drew them."""
    if not step.recipe.kept_rng:
        return False
    here = next(step.model.parameters()).device.type
    return all(batch.rng and ("cuda" if "cuda" in batch.rng else "cpu") == here for batch in step.truth.micro_batches)
