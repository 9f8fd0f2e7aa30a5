"""The client's step: the rule that turns weights, batch and recipe into an update.

It is used to verify recorded steps and to simulate steps under other defences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.client.facts import PublicFacts
from leakaudit.client.fused_head import label_scores
from leakaudit.client.local_steps import move_gradients, run_local_steps
from leakaudit.client.observation import Observation, check_finite
from leakaudit.client.output_gradients import send_back
from leakaudit.client.per_example import ExampleClipping, gradients_of_examples
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.replay import (
    client_attention,
    client_products,
    neftune_noise,
    restored_random_state,
    take_gradients,
    trained_parameters,
)
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.errors import SnapshotError
from leakaudit.models.structure.trace import inputs_of
from leakaudit.models.tensors import outputs_of

Notice = Callable[[Mapping[str, nn.Parameter]], None]
"""Called in each optimizer step with the shared parameters by name."""


@dataclass(frozen=True)
class ClientStep:
    """One step of a client: model, batch, recipe and public facts."""

    model: nn.Module
    """The model with the weights before the step; computing leaves it unchanged."""
    truth: Truth
    recipe: StepRecipe
    facts: PublicFacts

    @classmethod
    def of(cls, snapshot: Snapshot) -> ClientStep:
        """Return the step that a snapshot claims to come from."""
        return cls(snapshot.observation.model, snapshot.truth, snapshot.recipe, snapshot.observation.facts)

    def update(self, *, gradient_error: float = 0.0, notice: Notice = lambda _: None) -> dict[str, Tensor]:
        """Compute the update: forward and backward of every micro-batch, then clipping.

        No declared defence is applied. If the protocol sends a difference of weights (`view` is `delta`), the client's optimizer runs its
        local steps. The result is then (weights before - weights after) / (learning rate * local steps), as in federated averaging
        (McMahan et al. 2017, Algorithm 1, ClientUpdate). The result contains the rounding of the weights.

        Args:
            gradient_error: share of itself by which every gradient of a local step is moved (`move_gradients`); for a `delta` only.
            notice: called in each optimizer step with the shared parameters by name. They hold its gradient before clipping, and the
                weights before it.

        Returns:
            Parameter name -> gradient or difference, for the shared parameters, float32.

        Raises:
            SnapshotError: the loss cannot be replayed, or the learning rate of local steps was not kept.
        """
        self._check_replayable()
        with self._trained() as parameters:
            if self.facts.view == "delta":
                gradients = self._local_gradients(parameters, gradient_error, notice)
                return run_local_steps(parameters, self.facts, self.truth.optimizer_state, gradients)
            self._accumulate(parameters, self.truth.micro_batches)
            notice(parameters)
            self._clip(parameters)
            return take_gradients(parameters)

    def consecutive(self) -> Iterator[dict[str, Tensor]]:
        """Yield each update of the window, in order, without a defence.

        Raises:
            SnapshotError: an update cannot be computed, as for `update`.
        """
        recipe = self.recipe.model_copy(update={"window": 1})
        size = len(self.truth.micro_batches) // self.recipe.window
        for start in range(0, len(self.truth.micro_batches), size):
            part = replace(self.truth, micro_batches=self.truth.micro_batches[start : start + size])
            yield replace(self, truth=part, recipe=recipe).update()

    def observe(self) -> Observation:
        """Compute the update and return what an eavesdropper sees of the step.

        Raises:
            NonFiniteUpdateError: the update is not finite.
            SnapshotError: the update cannot be computed, as for `update`.
        """
        update = self.update()
        check_finite(update)
        return Observation(update=update, model=self.model.eval(), facts=self.facts)

    def clipped_per_example(self, clipping: ExampleClipping, *, alone: bool = False) -> dict[str, Tensor]:
        """Clip the gradient of each example and return their sum, divided; add no noise.

        Args:
            clipping: bounds and divisor.
            alone: as in `example_gradients`.

        Returns:
            Parameter name -> (sum of clipped gradients) / divisor, for the shared parameters, float32.

        Raises:
            SnapshotError: as in `example_gradients`.
        """
        total: dict[str, Tensor] = {}
        for _, example in self.example_gradients(summed=clipping.summed, alone=alone):
            clipping.clip(example)
            for name, gradient in example.items():
                total[name] = total[name].add_(gradient) if name in total else gradient.float()
        with self._trained() as parameters:
            zeros = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
        return {name: total.get(name, zero) / clipping.divisor for name, zero in zeros.items()}

    def example_gradients(self, *, summed: bool, alone: bool = False) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield the micro-batch and the gradient of each example, without clipping.

        An example's gradient is B times its share in the gradient of the micro-batch's mean loss, as in Opacus. Examples interact only in the
        loss, so an example's share comes from the output gradients of its rows.

        Args:
            summed: whether the loss of a micro-batch is the sum over its examples instead of their mean.
            alone: examples may be taken out of their batch, which is faster and rounds otherwise than the client.

        Raises:
            SnapshotError: the loss cannot be replayed, the gradients of the examples cannot be separated, or the update is a
                difference of weights after local steps.
        """
        self._check_replayable()
        if self.facts.view == "delta":
            raise SnapshotError(
                "the update is a difference of weights after local steps, so the clipped gradient of each example cannot be computed from it; "
                "try dp-sgd on a run that sends gradients"
            )
        with self._trained() as parameters:
            for number, batch in enumerate(self.truth.micro_batches):
                share = 1 if summed else len(batch.inputs["input_ids"])
                divisor = self.recipe.loss_divisor
                for example in gradients_of_examples(
                    self._forward, batch, parameters, divisor=divisor, share=share, alone=alone
                ):
                    yield number, example

    def _check_replayable(self) -> None:
        if self.recipe.loss == "unsupported":
            raise SnapshotError(
                f"the loss of this step cannot be replayed: {self.recipe.note or 'custom loss function'}"
            )

    @contextmanager
    def _trained(self) -> Iterator[dict[str, nn.Parameter]]:
        """Put the model into the client's state and yield its shared parameters by name."""
        with trained_parameters(self.model, self.recipe.training, frozenset(self.facts.shared)) as parameters:
            for name, module in self.model.named_modules():
                if name in self.recipe.eval_modules:
                    module.training = False
            with (
                neftune_noise(self.model, self.recipe.neftune_alpha),
                client_attention(self.model, self.recipe.attention),
                client_products(self.facts.dtype, next(self.model.parameters()).device),
            ):
                yield parameters

    def _accumulate(self, parameters: Mapping[str, nn.Parameter], batches: Sequence[MicroBatch]) -> None:
        """Add up the gradients of micro-batches in the parameters."""
        for batch in batches:
            self._set_modes(batch)
            self._backward(batch)
        divisor = self.recipe.processes * self.recipe.window * self.recipe.loss_scale
        if divisor != 1:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)

    def _local_gradients(
        self,
        parameters: Mapping[str, nn.Parameter],
        error: float,
        notice: Notice,
    ) -> list[Callable[[], None]]:
        """Return one function for each local step that adds its clipped gradient.

        Raises:
            SnapshotError: the recipe's local steps have another number of micro-batches than the truth.
        """
        batches = list(self.truth.micro_batches)
        sizes = self.recipe.step_sizes or (1,) * len(batches)
        if sum(sizes) != len(batches):
            raise SnapshotError(f"{len(batches)} micro-batches were kept, and the local steps are made of {sum(sizes)}")

        def gradient_of(part: Sequence[MicroBatch]) -> Callable[[], None]:
            def add() -> None:
                self._accumulate(parameters, part)
                notice(parameters)
                self._clip(parameters)
                if error:
                    move_gradients(parameters.values(), error)

            return add

        ends = list(itertools.accumulate(sizes))
        return [gradient_of(batches[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    def _clip(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if self.recipe.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), self.recipe.max_grad_norm)
        if self.recipe.max_grad_value:
            torch.nn.utils.clip_grad_value_(list(parameters.values()), self.recipe.max_grad_value)

    def _set_modes(self, batch: MicroBatch) -> None:
        """Put each module into the mode of a pass, if the passes differ."""
        if not self.recipe.eval_by_pass:
            return
        number = next(n for n, one in enumerate(self.truth.micro_batches) if one is batch)
        for name, module in self.model.named_modules():
            module.training = name not in self.recipe.eval_by_pass[number]

    def _backward(self, batch: MicroBatch) -> None:
        """Add the gradient of one micro-batch, times the loss scale, to the parameters."""
        if self.recipe.loss == "pulls":
            with self._forward(batch) as outputs:
                pass
            send_back(outputs, batch.output_gradients, self.recipe.loss_scale)
            return
        with self._client_precision(batch):
            loss: Tensor = self.model(**self._arguments(batch)).loss
        (loss / self.recipe.loss_divisor * self.recipe.loss_scale).backward()

    @contextmanager
    def _client_precision(self, batch: MicroBatch) -> Iterator[None]:
        """Use the random state and the autocast of a micro-batch within the block."""
        device = batch.inputs["input_ids"].device
        with ExitStack() as stack:
            if batch.rng:
                stack.enter_context(restored_random_state(batch.rng, device))
            if self.recipe.autocast:
                dtype = torch.bfloat16 if self.recipe.autocast == "bf16" else torch.float16
                stack.enter_context(torch.autocast(device.type, dtype=dtype))
            yield

    @contextmanager
    def _forward(self, batch: MicroBatch) -> Iterator[dict[str, Tensor]]:
        """Run the model as the client did and yield its outputs by path."""
        head = _head_of(self.model)
        with self._client_precision(batch), ExitStack() as stack:
            read = [] if head is None else stack.enter_context(inputs_of(head))
            found = dict(outputs_of(self.model(**self._arguments(batch))))
            found |= _scored_labels(found, batch, head, read)
            missing = [path for path in batch.output_gradients if path not in found or not found[path].requires_grad]
            if missing:
                raise SnapshotError(
                    f"the client's loss came from the model's output {missing[0]!r}, and the rebuilt model has none of that "
                    "name that depends on shared parameters"
                )
            yield found

    def _arguments(self, batch: MicroBatch) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward."""
        inputs: dict[str, Any] = {**batch.inputs, **batch.options}
        if batch.num_items is not None and self.recipe.loss == "pulls":
            inputs["num_items_in_batch"] = batch.num_items
        return inputs


def _scored_labels(
    outputs: Mapping[str, Tensor], batch: MicroBatch, head: nn.Module | None, read: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the labels' log-probabilities, if the client's loss came from them.

    A client with a fused head never makes logits: its model returns the log-probability of each next label, which the rebuilt model lacks.
    An output of the shape of next labels is taken for them. Where it is another one, the recomputed update does not match.

    Args:
        outputs: of the rebuilt model, by path.
        batch: the micro-batch.
        head: the model's output layer; None if it has none.
        read: what the head read in this pass.
    """
    logits, labels = outputs.get("logits"), batch.labels
    if logits is None or labels is None or labels.dim() < 2 or logits.shape[:-1] != labels.shape:
        return {}
    shape = labels[:, 1:].shape
    paths = [path for path, g in batch.output_gradients.items() if path not in outputs and g.shape == shape]
    return {path: label_scores(logits, labels, head, read[-1] if read else None) for path in paths}


def _head_of(model: nn.Module) -> nn.Module | None:
    """Return the output layer of a model; None if it names none."""
    named = getattr(model, "get_output_embeddings", None)
    found = named() if callable(named) else None
    return found if isinstance(found, nn.Module) else None
