"""The local steps of a client: its own optimizer, run on its own batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.client.facts import PublicFacts
from leakaudit.client.optimizer import ALGORITHMS, UNKNOWN, ClientOptimizer
from leakaudit.errors import SnapshotError

NUMBER = "#"
"""First letter of a state's key in a file if the optimizer holds a Python number there."""


def weight_difference(before: Mapping[str, Tensor], after: Mapping[str, Tensor], divisor: float) -> dict[str, Tensor]:
    """Return (before - after) / divisor in float32, by parameter name."""
    return {name: (weight.float() - after[name].detach().float()) / divisor for name, weight in before.items()}


def delta_divisor(facts: PublicFacts) -> float:
    """Return the number by which a difference of weights is divided.

    It is the sum of the learning rates of the local steps.

    Raises:
        SnapshotError: the learning rate was not kept, or it is zero in every local step.
    """
    if not facts.learning_rate:
        raise SnapshotError(
            "the update is a difference of weights, but the learning rate of its steps was not kept or is zero"
        )
    return facts.learning_rate * facts.local_steps


def run_local_steps(
    parameters: Mapping[str, nn.Parameter],
    facts: PublicFacts,
    state: Mapping[str, Tensor],
    gradients: Sequence[Callable[[], None]],
) -> dict[str, Tensor]:
    """Run K local steps and return the scaled difference of the weights.

    The weights are restored afterwards.

    Args:
        parameters: name -> parameter; shared parameters.
        facts: optimizer and learning rate.
        state: state of the optimizer before the first step, as `state_tensors` returns it.
        gradients: K functions; each adds the gradient of its step to the parameters, clipped as the client clips.

    Returns:
        Parameter name -> (weights before - weights after) / (learning rate * K), float32.

    Raises:
        SnapshotError: the learning rate was not kept, or the optimizer cannot be rebuilt.
    """
    divisor = delta_divisor(facts)
    with _copied_weights(parameters) as before:
        step = _stepper(parameters, facts, state)
        for number, add_gradient in enumerate(gradients):
            for parameter in parameters.values():
                parameter.grad = None
            add_gradient()
            step(number)
        return weight_difference(before, parameters, divisor)


def move_gradients(parameters: Iterable[nn.Parameter], share: float) -> None:
    """Move every gradient by a share of its size, as other rounding may.

    Each entry moves by `share` times the sum of the parameter's largest entry and the root mean square of all entries. Entries that are
    exactly zero, as those of words that are in no text, are so on every machine and do not move.

    Args:
        parameters: their gradients are changed in place.
        share: below zero to move all entries down.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
    typical = math.sqrt(squares / max(1, sum(gradient.numel() for gradient in gradients)))
    for gradient in gradients:
        gradient.add_((gradient != 0) * (share * (float(gradient.abs().max()) + typical)))


@contextmanager
def _copied_weights(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Let parameters hold copies of their weights within the block; yield the weights."""
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.data = parameter.data.clone()
        yield before
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]


def _stepper(
    parameters: Mapping[str, nn.Parameter], facts: PublicFacts, state: Mapping[str, Tensor]
) -> Callable[[int], None]:
    """Return a function that takes the step of a number, counted from 0."""
    described = facts.optimizer
    if described is None:
        rate = float(facts.learning_rate or 0.0)
        return lambda _number: _plain_sgd(parameters, rate)
    _check(described, parameters, state)
    optimizer = described.make(parameters)
    load_state(optimizer, parameters, state)

    def step(number: int) -> None:
        for group, kept in zip(optimizer.param_groups, described.groups, strict=True):
            group["lr"] = kept.learning_rates[number]
        optimizer.step()

    return step


def _check(described: ClientOptimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]) -> None:
    if described.algorithm == UNKNOWN:
        raise SnapshotError(
            "the difference of weights has unknown moments: the client's optimizer steps by a rule, or keeps a state, that is not known here"
        )
    if described.algorithm not in ALGORITHMS:
        raise SnapshotError(
            f"the client's optimizer {described.algorithm!r} cannot be rebuilt; known: {', '.join(ALGORITHMS)}"
        )
    missing = [name for group in described.groups for name in group.parameters if name not in parameters]
    if missing:
        raise SnapshotError(f"the client's optimizer moves {missing[0]!r}, which the rebuilt model does not share")
    if not described.fresh and not state:
        raise SnapshotError("the client's optimizer kept its moments from earlier steps, and they were not recorded")


def _plain_sgd(parameters: Mapping[str, nn.Parameter], rate: float) -> None:
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad, alpha=-rate)


def state_tensors(optimizer: Any, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the state of an optimizer as tensors; references, not copies.

    Args:
        optimizer: of torch.
        names: id of a parameter -> its name.

    Returns:
        `parameter/key` -> tensor. Python numbers become tensors of one number, and their key begins with `NUMBER`.

    Raises:
        SnapshotError: a part of the state is neither a tensor nor a number.
    """
    found: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            continue
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[f"{name}/{key}"] = value
            elif isinstance(value, int | float):
                number = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
                found[f"{name}/{NUMBER}{key}"] = number
            elif value is not None:
                raise SnapshotError(
                    f"the state of {type(optimizer).__name__} holds a {type(value).__name__} under {key!r}, which cannot be "
                    "kept; audit a round that begins with a new optimizer, or use an optimizer whose state is tensors"
                )
    return found


def load_state(optimizer: Any, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]) -> None:
    """Give an optimizer a state that `state_tensors` returned; tensors are copied."""
    for path, value in state.items():
        name, _, key = path.rpartition("/")
        mine = optimizer.state[parameters[name]]
        mine[key.removeprefix(NUMBER)] = value.item() if key.startswith(NUMBER) else value.clone()
