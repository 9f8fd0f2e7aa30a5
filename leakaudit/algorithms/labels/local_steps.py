"""A client's local steps, as the label attacks repeat them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from leakaudit.algorithms.gradient_estimate import divisor_of
from leakaudit.client.observation import Observation


@contextmanager
def after_the_steps(seen: Observation) -> Iterator[None]:
    """Set the weights after the client's steps while the block runs.

    Args:
        seen: of a client that sent a difference of weights, or the gradient that was estimated from it.
    """
    sent = seen.sent or seen
    with moved(sent.model, sent.update, divisor_of(sent.facts)):
        yield


@contextmanager
def moved(model: nn.Module, update: Mapping[str, Tensor], rate: float) -> Iterator[None]:
    """Set the weights after the client's steps while the block runs.

    Args:
        model: the model with the weights before the steps.
        update: (weights before - weights after) / rate.
        rate: learning rate times steps.
    """
    parameters = dict(model.named_parameters())
    before = {name: parameters[name].data for name in update if name in parameters}
    try:
        for name, data in before.items():
            parameters[name].data = data - rate * update[name].to(data)
        yield
    finally:
        for name, data in before.items():
            parameters[name].data = data
