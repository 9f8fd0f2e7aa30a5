"""The optimizer of a simulated client, and its rounds before the audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.client.local_steps import state_tensors
from leakaudit.client.optimizer import ClientOptimizer, ParameterGroup
from leakaudit.config.client_optimizer import parse_optimizer

WARMUP_LEARNING_RATE = 1e-3
"""Learning rate of AdamW in `--lora-warmup` if the client's is not given.
Our choice: adapters are usually trained with 1e-4 to 1e-3."""


def client_optimizer(
    text: str | None, rate: float | None, steps: int, names: tuple[str, ...]
) -> ClientOptimizer | None:
    """Return the optimizer of a simulated client; None for plain SGD or a gradient.

    Args:
        text: value of `--optimizer`.
        rate: learning rate of all local steps.
        steps: number of local steps.
        names: the shared parameters.
    """
    if text is None or rate is None:
        return None
    options = parse_optimizer(text)
    group = ParameterGroup(parameters=names, learning_rates=(rate,) * steps, options=options.options())
    found = ClientOptimizer(algorithm=options.algorithm, groups=(group,), fresh=options.fresh)
    plain = found.kind == "sgd" and not group.options["weight_decay"]
    return None if plain else found


def take_rounds(
    model: nn.Module,
    optimizer: ClientOptimizer | None,
    shared: frozenset[str],
    add_gradient: Callable[[int], None],
    rounds: int,
) -> dict[str, Tensor]:
    """Train the shared parameters for some rounds.

    Args:
        model: changed in place.
        optimizer: of the client; None trains with AdamW and one step a round.
        shared: names of the parameters that are trained.
        add_gradient: adds the gradient of a step, counted from 0 over all rounds, to the parameters.
        rounds: at least 1.

    Returns:
        The optimizer's state after the last round, as `leakaudit.client.local_steps.state_tensors` returns it; empty if every round
        begins with a new optimizer.
    """
    parameters = {name: p for name, p in model.named_parameters() if name in shared}
    steps = 1 if optimizer is None else optimizer.local_steps
    keeps_state = optimizer is None or not optimizer.fresh
    mover: Any = None
    for number in range(rounds * steps):
        if mover is None or (number % steps == 0 and not keeps_state):
            mover = _mover(optimizer, parameters)
        model.zero_grad(set_to_none=True)
        add_gradient(number)
        mover.step()
    model.zero_grad(set_to_none=True)
    if optimizer is None or not keeps_state:
        return {}
    names: Mapping[int, str] = {id(p): name for name, p in parameters.items()}
    return {path: value.clone() for path, value in state_tensors(mover, names).items()}


def _mover(optimizer: ClientOptimizer | None, parameters: Mapping[str, nn.Parameter]) -> Any:
    if optimizer is None:
        return torch.optim.AdamW(parameters.values(), lr=WARMUP_LEARNING_RATE)
    return optimizer.make(parameters)
