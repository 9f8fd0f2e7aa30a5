"""How a client's update comes about: (weights, batch, recipe) -> update. Used to verify and to simulate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.client.facts import PublicFacts
from leakaudit.client.observation import Observation, check_finite
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.errors import DataError, SnapshotError
from leakaudit.models.loading import Task
from leakaudit.models.structure import dropout_rates
from leakaudit.models.tensors import outputs_of, tied_names
from leakaudit.models.vocabulary import vocabulary_of


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
        """Run the step: forward and backward of every micro-batch, then clipping; no declared defence is applied.

        Where the protocol sends a difference of weights (`view` is `delta`), every micro-batch is one local step of plain SGD,
        and the result is (weights before - weights after) / (learning rate * local steps), as federated averaging sends it
        (McMahan et al. 2017, Algorithm 1, ClientUpdate). Weights are float32, so their rounding is part of it.

        Returns:
            Parameter name -> gradient or difference, for the shared parameters, float32.

        Raises:
            SnapshotError: the loss cannot be replayed.
        """
        self._check_replayable()
        with self._trained() as parameters:
            if self.facts.view == "delta":
                return self._local_steps(parameters)
            self._accumulate(parameters)
            self._clip(parameters)
            return _gradients(parameters)

    @contextmanager
    def _trained(self) -> Iterator[dict[str, nn.Parameter]]:
        """Put the model into the client's state, what is in eval mode and noise on the embeddings included."""
        with _as_trained(self.model, self.recipe.training, frozenset(self.facts.shared)) as parameters:
            for name, module in self.model.named_modules():
                if name in self.recipe.eval_modules:
                    module.training = False
            with _neftune(self.model, self.recipe.neftune_alpha), _attending(self.model, self.recipe.attention):
                yield parameters

    def _accumulate(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for batch in self.truth.micro_batches:
            self._backward(batch)
        divisor = self.recipe.processes * self.recipe.loss_scale
        if divisor != 1:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)

    def clipped_per_example(self, bound: float, *, divisor: float, summed: bool) -> dict[str, Tensor]:
        """Run the step, clip every example's gradient, add them up and divide; no noise is added.

        Source: Abadi et al. 2016, Algorithm 1. An example's gradient is B times its share in the gradient of the micro-batch's mean
        loss, as Opacus takes it. Examples meet only in the loss, so its share is what the rows of the outputs that belong to it are
        pulled by.

        Args:
            bound: norm to which an example's gradient is clipped; infinite for none.
            divisor: of the sum, such as the expected batch size.
            summed: whether the loss of a micro-batch is the sum over its examples, not their mean.

        Returns:
            Parameter name -> (sum of clipped gradients) / divisor, for the shared parameters, float32.

        Raises:
            SnapshotError: the loss cannot be replayed, the examples' gradients cannot be told apart, or the update is a difference
                of weights after local steps.
        """
        self._check_replayable()
        if self.facts.view == "delta":
            raise SnapshotError(
                "the update is a difference of weights after local steps, so the clipped gradient of each example cannot be computed from it; "
                "try dp-sgd on a run that sends gradients"
            )
        with self._trained() as parameters:
            total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
            for batch in self.truth.micro_batches:
                share = 1 if summed else len(batch.inputs["input_ids"])
                for example in self._per_example(batch, parameters, share):
                    norm = torch.stack([g.norm() for g in example.values()]).norm()
                    factor = float((bound / (norm + 1e-6)).clamp(max=1.0))  # 1e-6 as in Opacus' `clip_and_accumulate`
                    for name, gradient in example.items():
                        total[name] += factor * gradient
        return {name: gradient / divisor for name, gradient in total.items()}

    def _check_replayable(self) -> None:
        if self.recipe.loss == "unsupported":
            raise SnapshotError(
                f"the loss of this step cannot be replayed: {self.recipe.note or 'custom loss function'}"
            )

    def _per_example(
        self, batch: MicroBatch, parameters: Mapping[str, nn.Parameter], share: float
    ) -> Iterator[dict[str, Tensor]]:
        """Yield each example's gradient by parameter name: `share` times its part in the gradient of the micro-batch."""
        with self._forward(batch) as outputs:
            rows = len(batch.inputs["input_ids"])
            tensors, output_gradients = self._output_gradients_by_row(outputs, batch, rows)
        for row in range(rows):
            for parameter in parameters.values():
                parameter.grad = None
            own = []
            for pull in output_gradients:
                mine = torch.zeros_like(pull)
                mine[row] = share * pull[row]
                own.append(mine)
            torch.autograd.backward(tensors, own, retain_graph=row < rows - 1)
            yield _gradients(parameters)

    def _output_gradients_by_row(
        self, outputs: Mapping[str, Tensor], batch: MicroBatch, rows: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs with one row an example, and what output_gradients on them; a loss inside the model is followed to its logits."""
        output_gradients = dict(batch.output_gradients) or {"loss": torch.ones(()) / self.recipe.loss_divisor}
        scalars = [path for path in output_gradients if outputs[path].dim() == 0]
        if not scalars:
            return self._direct(outputs, output_gradients)
        loss, pull = outputs[scalars[0]], output_gradients[scalars[0]].to(outputs[scalars[0]])
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
                tensors, output_gradients = self._direct(outputs, batch.output_gradients)
            torch.autograd.backward(tensors, [self.recipe.loss_scale * pull for pull in output_gradients])
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
            missing = [path for path in batch.output_gradients if path not in found or not found[path].requires_grad]
            if missing:
                raise SnapshotError(
                    f"the client's loss came from the model's output {missing[0]!r}, and the rebuilt model has none of that "
                    "name that depends on shared parameters"
                )
            yield found

    def _direct(
        self, outputs: Mapping[str, Tensor], output_gradients: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs and what output_gradients on each by itself.

        What arrived at an output includes what came through later outputs that were computed from it (a pooled state from the
        last hidden one); that part comes again when these are pulled, so it is taken out.
        """
        order = sorted(output_gradients, key=lambda path: -outputs[path].grad_fn._sequence_nr())  # type: ignore[union-attr]
        tensors: list[Tensor] = []
        direct: list[Tensor] = []
        for path in order:
            output, pull = outputs[path], output_gradients[path].to(outputs[path])
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
    """Take the gradients from the parameters, in float32.

    A gradient is zero for a parameter that the loss did not reach.
    """
    found = {}
    for name, parameter in parameters.items():
        gradient, parameter.grad = parameter.grad, None
        found[name] = (
            torch.zeros_like(parameter, dtype=torch.float32) if gradient is None else gradient.detach().float()
        )
    return found


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
def _attending(model: nn.Module, attention: str) -> Iterator[None]:
    """Let a model attend as the client's did, and as before afterwards.

    This is done only if it needs no kernel of a GPU.

    Attacks need a second derivative, which only eager attention has everywhere; a step needs none, and rows of padding come out
    differently.
    """
    now = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention != "sdpa" or now in (None, attention) or not hasattr(model, "set_attn_implementation"):
        yield
        return
    model.set_attn_implementation(attention)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation(now)  # type: ignore[operator]


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
