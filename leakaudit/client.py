"""How a client's update comes about: (weights, batch, recipe) -> update. Used to verify and to simulate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.errors import DataError, SnapshotError
from leakaudit.models import Task, tied_names, vocabulary_of
from leakaudit.scores import Verification, VerificationStatus
from leakaudit.snapshot import (
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
        with _as_trained(self.model, self.recipe.training, frozenset(self.facts.shared)) as parameters:
            if self.facts.view == "delta":
                return self._local_steps(parameters)
            for batch in self.truth.micro_batches:
                self._backward(batch)
            self._clip(parameters)
            return {
                name: torch.zeros_like(p) if p.grad is None else p.grad.detach().float().clone()
                for name, p in parameters.items()
            }

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

    def observe(self) -> Observation:
        """Run the step and return what an eavesdropper sees of it.

        Raises:
            NonFiniteUpdateError: the update is not finite.
        """
        update = self.update()
        check_finite(update)
        return Observation(update=update, model=self.model.eval(), facts=self.facts)

    def _backward(self, batch: MicroBatch) -> None:
        device = batch.inputs["input_ids"].device
        with ExitStack() as stack:
            if batch.rng:
                stack.enter_context(_random_state(batch.rng, device))
            if self.recipe.autocast:
                dtype = torch.bfloat16 if self.recipe.autocast == "bf16" else torch.float16
                stack.enter_context(torch.autocast(device.type, dtype=dtype))
            loss = self._loss(batch)
        (loss / self.recipe.loss_divisor).backward()

    def _loss(self, batch: MicroBatch) -> Tensor:
        inputs: dict[str, Any] = dict(batch.inputs)
        if self.recipe.loss == "label_smoothing":
            return self._smoothed_loss(inputs, batch)
        if self.recipe.pass_num_items and batch.num_items is not None:
            inputs["num_items_in_batch"] = batch.num_items
        loss: Tensor = self.model(**inputs).loss
        return loss

    def _smoothed_loss(self, inputs: dict[str, Any], batch: MicroBatch) -> Tensor:
        from transformers.trainer_pt_utils import LabelSmoother

        labels = inputs.pop("labels")
        if self.recipe.pass_num_items and batch.num_items is not None:
            inputs["num_items_in_batch"] = batch.num_items
        outputs = self.model(**inputs)
        smoother = LabelSmoother(epsilon=self.recipe.label_smoothing)
        shift = self.facts.task == "causal-lm"
        loss: Tensor = smoother(outputs, labels, shift_labels=shift, num_items_in_batch=batch.num_items)
        return loss


@contextmanager
def _as_trained(model: nn.Module, training: bool, shared: frozenset[str]) -> Iterator[dict[str, nn.Parameter]]:
    """Put the model into the client's state, with gradients for the shared parameters only, and back afterwards."""
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    was_training = model.training
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
    recomputed = step.update()
    check_finite(recomputed)
    kept = _mask_of_pruned(step, observed)
    seen = torch.cat([observed[name].double().flatten() for name in recomputed])
    own = torch.cat([(recomputed[name] * kept.get(name, 1.0)).double().flatten() for name in recomputed])
    norm = float(own.norm())
    if norm == 0.0 or float(seen.norm()) == 0.0:
        return Verification(
            status=VerificationStatus.MISMATCH, note="the observed or the recomputed update is all zero"
        )
    plain = float((seen - own).norm()) / norm
    tolerance = TOLERANCE.get(step.recipe.autocast or step.facts.dtype, FLOAT32_TOLERANCE)
    sigma = _declared_sigma(step, own)
    if plain <= tolerance:
        note = "the declared gaussian-noise is not in the update" if sigma else ""
        return Verification(status=VerificationStatus.VERIFIED, relative_error=plain, scale=1.0, note=note)
    k = float(seen @ own) / norm**2
    scaled = float((seen - k * own).norm()) / (abs(k) * norm) if k else float("inf")
    if k > 0 and scaled <= tolerance:
        return Verification(status=VerificationStatus.SCALED, relative_error=scaled, scale=k)
    if sigma and _is_noise(seen - own, own, sigma, tolerance):
        return Verification(
            status=VerificationStatus.NOISED,
            relative_error=plain,
            scale=1.0,
            sigma=float((seen - own).std()),
            note="as declared",
        )
    cosine = float(seen @ own) / (norm * float(seen.norm()))
    if step.recipe.training and step.facts.dropout and not _repeats_dropout(step) and cosine >= SAME_DIRECTION:
        return Verification(
            status=VerificationStatus.STOCHASTIC,
            relative_error=plain,
            scale=k,
            note=f"dropout state was not kept; cosine {cosine:.2f}",
        )
    return Verification(
        status=VerificationStatus.MISMATCH,
        relative_error=plain,
        scale=k,
        note=f"cosine {cosine:.2f} with the update recomputed from the kept batch",
    )


def _mask_of_pruned(step: ClientStep, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries that a declared pruning left, so that only they are compared."""
    if step.facts.declared("prune") is None:
        return {}
    return {name: (tensor != 0).to(tensor.dtype) for name, tensor in observed.items()}


def _declared_sigma(step: ClientStep, recomputed: Tensor) -> float | None:
    """Return the standard deviation of the noise that the protocol declares, in the update's units, or None.

    Declared as `sigma`, or as `scale`: a multiple of the root mean square of the whole update.
    """
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
