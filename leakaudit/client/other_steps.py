"""Steps of the same client on the same batch under another recipe.

Each function returns a step whose model, facts and recipe fit together, as if the client had trained in that way. Nothing that it is given is
changed: a model with other modules shares its tensors with the recorded one.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakaudit.client.batches import with_random_state
from leakaudit.client.facts import PublicFacts, ReplacedWords
from leakaudit.client.optimizer import ClientOptimizer
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch
from leakaudit.errors import AnatomyError, ConfigError, SnapshotError
from leakaudit.models.lora import adapted, add_lora, below_adapters, is_adapter, is_second_matrix
from leakaudit.models.structure import dropout_rates, parameters_up_to_block
from leakaudit.models.structure.dropout import is_dropout
from leakaudit.models.structure.embeddings import require_word_embedding


def without_first_blocks(step: ClientStep, first: int) -> ClientStep:
    """Return the step of a client that does not train the first blocks.

    Args:
        step: of the client that trains them.
        first: number of blocks, counted from the input. Everything before them is frozen as well. A model with fewer blocks keeps only what
            comes after them.

    Raises:
        AnatomyError: the model has no list of blocks, or nothing is left to train.
    """
    return _training(step, frozenset(step.facts.shared) - parameters_up_to_block(step.model, first))


def with_dropout(step: ClientStep, rate: float, rng: torch.Generator) -> ClientStep:
    """Return the step of a client whose dropout modules have another rate.

    The client trains with dropout, even if the recorded step was computed without it. Each pass draws new masks.

    Args:
        step: of the client with its own rates.
        rate: share of the entries that dropout sets to zero, for every dropout module.
        rng: source of the random states of the passes.

    Raises:
        AnatomyError: the model has no dropout module.
        SnapshotError: the client's loss cannot be computed for other outputs.
    """
    _check_own_loss(step)
    model = _with_own_modules(step.model)
    layers: list[Any] = [module for module in model.modules() if is_dropout(module)]
    if not layers:
        raise AnatomyError(
            f"{type(model).__name__}: looked for dropout modules to set their rate to {rate:g}, found none; its layers train without dropout"
        )
    for layer in layers:
        layer.p = rate
    facts = step.facts.model_copy(update={"dropout": dropout_rates(model.named_modules()), "training_mode": True})
    recipe = step.recipe.model_copy(update={"training": True})
    truth = replace(step.truth, micro_batches=_redrawn(step.truth.micro_batches, rng))
    return ClientStep(model, truth, recipe, facts)


def with_local_steps(step: ClientStep, steps: int, learning_rate: float, rng: torch.Generator) -> ClientStep:
    """Return the step of a client that takes several local steps on its batch.

    The steps are those of plain SGD. The client sends the difference of the weights. A client with dropout draws new masks in every step but the first.

    Args:
        step: of the client that sends the gradient of its batch.
        steps: number K of local steps.
        learning_rate: of every step.
        rng: source of the random states of the passes.

    Raises:
        SnapshotError: the recorded update is a difference of weights already, or a mean over processes, or the client's loss cannot be
            computed for other outputs.
    """
    if step.facts.view == "delta":
        raise SnapshotError(
            "the recorded update is a difference of weights after local steps already; audit local steps on a run that sends gradients"
        )
    if step.recipe.processes > 1:
        raise SnapshotError(
            "the recorded update is a mean over processes, and local steps are those of one process; audit a run with `observe: local`"
        )
    _check_own_loss(step)
    first = step.truth.micro_batches
    later = [replace(batch, repeated_pass=True) for _ in range(1, steps) for batch in _redrawn(first, rng)]
    sends = {"view": "delta", "local_steps": steps, "learning_rate": learning_rate, "optimizer": None}
    recipe = step.recipe.model_copy(update={"step_sizes": (len(first),) * steps})
    truth = replace(step.truth, micro_batches=(*first, *later))
    return replace(step, truth=truth, recipe=recipe, facts=step.facts.model_copy(update=sends))


def with_adapters(
    step: ClientStep,
    rank: int,
    targets: tuple[str, ...],
    *,
    alpha: float | None,
    spread: float,
    only_second: bool,
    rng: torch.Generator,
) -> ClientStep:
    """Return the step of a client that trains LoRA adapters (peft).

    With a layer y = W x + s B A x, the gradient of B is s dW A^T and that of A is s B^T dW, where dW is the gradient of W (own derivation).
    In the first round B is zero, so A gets no gradient. Besides the adapters, the client trains what is above the body of a classifier.

    Args:
        step: of the client that trains the model itself.
        rank: R.
        targets: ends of the names of the layers with adapters; empty uses peft's own choice.
        alpha: numerator of the scale s = alpha / R; None uses R.
        spread: standard deviation of the entries of B; 0 for the first round.
        only_second: whether only B is trained and sent (FFA-LoRA).
        rng: source of A and B.

    Raises:
        AnatomyError: the model has adapters already, or no layer that peft could adapt.
        SnapshotError: peft is not installed, or the client's loss cannot be computed for other outputs.
    """
    if spread:
        _check_own_loss(step)
    model = _adapted_copy(step.model, rank, targets, alpha, rng)
    seconds = {name: p for name, p in model.named_parameters() if is_second_matrix(name)}
    with torch.no_grad():
        for parameter in seconds.values():
            drawn = spread * torch.randn(parameter.shape, generator=rng, device=rng.device)
            parameter.copy_(drawn)
    trained = set(seconds) if only_second else {name for name, _ in model.named_parameters() if is_adapter(name)}
    if step.facts.task == "classification":
        trained |= set(step.facts.shared) - below_adapters(model)
    return _training(replace(step, model=model), trained)


def with_substituted_tokens(step: ClientStep, share: float, nearest: int, rng: torch.Generator) -> ClientStep:
    """Return the step of a client that replaces words by similar ones first.

    A label that is the token at its place is replaced with it. Special tokens and those around every text stay. The facts say how words are
    replaced, because the protocol is public.

    Args:
        step: of the client that trains on its own words.
        share: chance that a token is replaced, each by itself; above 0.
        nearest: number of tokens with the most similar embeddings (cosine), one of which is drawn; at most those that the table has.
        rng: source of all choices.

    Raises:
        AnatomyError: the model has no token table.
        SnapshotError: the labels are words at other places, or the client's loss cannot be computed for other outputs.
    """
    _check_own_loss(step)
    if step.facts.task not in ("classification", "causal-lm"):
        raise SnapshotError(
            f"tokens are substituted for classifiers and causal language models, and the task is {step.facts.task}: its labels hold words "
            "that this defence would leave as they are"
        )
    table = step.model.get_parameter(require_word_embedding(step.model)).detach().float()
    kept = torch.tensor(sorted(step.facts.vocabulary.wordless_ids), device=table.device)
    nearest = min(nearest, len(table) - len(kept) - 1)
    batches = tuple(_substituted(batch, table, kept, share, nearest, rng) for batch in step.truth.micro_batches)
    facts = step.facts.model_copy(update={"replaced": ReplacedWords(share=share, nearest=nearest)})
    return replace(step, truth=replace(step.truth, micro_batches=batches, trace={}), facts=facts)


def _substituted(
    batch: MicroBatch, table: Tensor, kept: Tensor, share: float, nearest: int, rng: torch.Generator
) -> MicroBatch:
    """Return a micro-batch in which drawn tokens are replaced.

    Args:
        batch: of the client.
        table: (V, D) float32, the word embedding.
        kept: ids that are neither replaced nor taken.
        share: chance of a token to be replaced.
        nearest: number of tokens from which one is drawn.
        rng: source of all choices.
    """
    ids = batch.inputs["input_ids"]
    own, where = ids.unique(return_inverse=True)
    unit = functional.normalize(table, dim=1)
    likeness = unit[own] @ unit.T  # (tokens, V)
    likeness[:, kept] = -torch.inf
    likeness[torch.arange(len(own)), own] = -torch.inf
    similar = likeness.topk(nearest, dim=1).indices  # (tokens, nearest)
    choice = torch.randint(nearest, ids.shape, generator=rng, device=rng.device).to(ids.device)
    drawn = torch.rand(ids.shape, generator=rng, device=rng.device).to(ids.device) < share
    new = torch.where(drawn & ~torch.isin(ids, kept), similar[where.view_as(ids), choice], ids)
    inputs = {**batch.inputs, "input_ids": new}
    labels = batch.inputs.get("labels")
    if labels is not None and labels.shape == ids.shape:
        inputs["labels"] = torch.where(labels == ids, new, labels)
    return replace(batch, inputs=inputs)


def _adapted_copy(
    model: nn.Module, rank: int, targets: tuple[str, ...], alpha: float | None, rng: torch.Generator
) -> nn.Module:
    """Return a model with new adapters that shares its other tensors with `model`."""
    if adapted(model) is not None:
        raise AnatomyError(
            f"{type(model).__name__}: asked for new adapters, and the client trains adapters already; audit them as they are"
        )
    requires = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    changed = _with_own_modules(model)
    seed = int(torch.randint(2**31, (), generator=rng, device=rng.device))
    try:
        add_lora(changed, rank, targets, alpha=alpha, seed=seed)
    except ConfigError as error:
        if "not installed" in str(error):
            raise SnapshotError(str(error)) from None
        raise AnatomyError(str(error)) from None
    finally:
        for parameter, required in requires:  # the tensors are shared, and peft freezes them
            parameter.requires_grad_(required)
    return changed


def _training(step: ClientStep, trained: Collection[str]) -> ClientStep:
    """Return a step that trains and sends only some parameters.

    Raises:
        AnatomyError: none of them is there.
        SnapshotError: an optimizer with moments of earlier rounds would train other parameters than before.
    """
    names = [name for name, _ in step.model.named_parameters()]
    shared = tuple(name for name in names if name in trained)
    if not shared:
        raise AnatomyError("nothing would be left to train, so there would be no update to attack")
    tied = tuple(pair for pair in step.facts.tied if set(pair) & set(names))
    known = {
        "shared": shared,
        "frozen": tuple(name for name in names if name not in trained),
        "tied": tied,
        "dropout": dropout_rates(step.model.named_modules()),
        "optimizer": _optimizer_of(step.facts, shared),
    }
    state = step.truth.optimizer_state
    kept = {path: value for path, value in state.items() if path.rpartition("/")[0] in shared}
    truth = replace(step.truth, optimizer_state=kept, trace={})
    return replace(step, truth=truth, facts=step.facts.model_copy(update=known))


def _optimizer_of(facts: PublicFacts, shared: Sequence[str]) -> ClientOptimizer | None:
    """Return the client's optimizer for other parameters.

    A parameter that it does not know gets the options of the first group.
    """
    optimizer = facts.optimizer
    if optimizer is None:
        return None
    new = tuple(name for name in shared if optimizer.group_of(name) is None)
    if new and not optimizer.fresh:
        raise SnapshotError(
            "the client's optimizer kept moments from earlier rounds, and the adapters of this audit have none; audit a run that begins "
            "every round with a new optimizer"
        )
    first, *others = optimizer.groups
    groups = [
        group.model_copy(update={"parameters": (*(n for n in group.parameters if n in shared), *more)})
        for group, more in ((first, new), *((group, ()) for group in others))
    ]
    return optimizer.model_copy(update={"groups": tuple(group for group in groups if group.parameters)})


def _with_own_modules(model: nn.Module) -> nn.Module:
    """Return a copy of a model with modules of its own and the same tensors."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _redrawn(batches: Sequence[MicroBatch], rng: torch.Generator) -> tuple[MicroBatch, ...]:
    """Return micro-batches with new random states."""
    drawn = torch.randint(2**62, (len(batches),), generator=rng, device=rng.device).tolist()
    return tuple(with_random_state(batch, seed) for batch, seed in zip(batches, drawn, strict=True))


def _check_own_loss(step: ClientStep) -> None:
    """Refuse a step whose loss is known at the recorded outputs only."""
    paths = {path for batch in step.truth.micro_batches for path in batch.output_gradients}
    if step.recipe.loss == "pulls" and paths != {"loss"}:
        raise SnapshotError(
            "the client's loss was computed outside its model, and its gradients are known at the recorded outputs only; this defence changes "
            "the outputs: audit it on a run whose model computes the loss"
        )
