"""Feed-forward parts (linear, activation, linear) of a model.

Letters: N examples, T tokens, D features into the first linear layer, M' outputs of the second, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.models.structure.layers import Projection, attention_readers, first_block, projection_of
from leakaudit.models.structure.trace import Call, is_leaf, is_linear, trace, trace_tokens


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward part, and the module that returns its input."""

    first: nn.Linear
    second: nn.Linear
    activation: nn.Module
    source: nn.Module
    """Module whose output is x, the part's input. A hook on it replaces x to run the rest of the model from given features."""


def find_down_projection(model: nn.Module) -> Projection:
    """Return the down projection of the first block.

    It is the layer with the widest input among the linear layers after the block's attention that treat every token. The model stays
    unchanged.

    Raises:
        AnatomyError: there is no linear layer after the attention.
    """
    calls = trace_tokens(model)
    first, block = first_block(model, calls)
    behind = block[block.index(attention_readers(first, block)[-1]) + 1 :]
    linear = [call for call in behind if is_linear(call) and call.given.dim() == 3]
    if not linear:
        raise AnatomyError(f"{type(model).__name__}: looked for a linear layer behind {first}'s attention, found none")
    return projection_of(model, max(linear, key=lambda call: call.given.shape[-1]))


def find_last_feed_forward(model: nn.Module, head: nn.Module, inputs: dict[str, Tensor]) -> FeedForward:
    """Find the last feed-forward part whose input alone decides the logits.

    Args:
        model: the public model.
        head: its output layer. The update of that layer has fewer directions than there are classes, so it is used as the
            second layer only if no other layer fits.
        inputs: keyword arguments of the model's forward, two examples or more, all different.

    Raises:
        AnatomyError: there is no such part, or the output depends on more than the part's input.
    """
    calls = [call for call in trace(model, inputs) if call.bare and is_leaf(call.module)]
    for found in _feed_forwards(calls, head):
        if _decides_logits(model, found, inputs):
            return found
    raise AnatomyError(
        "looked for a feed-forward part (linear, activation, linear) whose input decides the output alone, and found none; models "
        "that normalise before each part keep a second path around it, and plain convolutional ones have no such part"
    )


def _feed_forwards(calls: list[Call], head: nn.Module) -> Iterator[FeedForward]:
    """Yield the feed-forward parts in reverse order.

    Parts that end in the output layer come after all others.
    """
    sources = {id(call.made): call.module for call in calls}
    linear = {id(call.made): (call.module, call.given) for call in calls if isinstance(call.module, nn.Linear)}
    ends = [(call.module, call.given) for call in reversed(calls) if isinstance(call.module, nn.Linear)]
    for second, activated in sorted(ends, key=lambda end: end[0] is head):
        for call in calls:
            if call.made is activated and id(call.given) in linear and not list(call.module.parameters()):
                first, x = linear[id(call.given)]
                if id(x) in sources:
                    yield FeedForward(first, second, call.module, sources[id(x)])


def _decides_logits(model: nn.Module, part: FeedForward, inputs: dict[str, Tensor]) -> bool:
    """Return whether the logits depend only on x, the part's input.

    If so, different inputs with the same x give the same logits.
    """
    x = features_into(model, part, inputs)[:1]
    logits = run_from(model, part, x.expand(len(next(iter(inputs.values()))), -1), inputs)
    return bool(torch.allclose(logits, logits[:1].expand_as(logits), atol=1e-5, rtol=1e-4))


def features_into(model: nn.Module, part: FeedForward, inputs: dict[str, Tensor]) -> Tensor:
    """Return (N, D), the part's input at the token that decides the logits.

    Raises:
        AnatomyError: the logits depend on several tokens of a sequence.
    """
    taken: list[Tensor] = []
    with (
        part.source.register_forward_hook(lambda _module, _args, output: taken.append(output.requires_grad_())),
        torch.enable_grad(),
        _frozen(model),
    ):
        logits: Tensor = model(**inputs).logits
        (gradient,) = torch.autograd.grad(logits.sum(), taken[-1])
    x = taken[-1].detach()
    if x.dim() == 2:
        return x
    rows = gradient.abs().sum(dim=2) > 0  # (N, T)
    if int(rows.sum(dim=1).max()) != 1:
        raise AnatomyError(
            "every token of a sequence carries gradient behind the last feed-forward part (mean pooling), so its update does "
            "not hold one row a sequence"
        )
    return x[torch.arange(len(x)), rows.long().argmax(dim=1)]


def run_from(model: nn.Module, part: FeedForward, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits (N, C) of given features.

    The layers before the part have no influence.

    Args:
        model: the public model.
        part: the part that gets the features as its input.
        x: (N, D) features.
        inputs: any inputs of the model; if their number is not N, the first is repeated.
    """
    with torch.no_grad():
        return _run(model, part, x, inputs)


def logit_jacobian(model: nn.Module, part: FeedForward, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return (N, C, M') float64: derivatives of logits by the part's outputs.

    Args:
        model: the public model.
        part: the part, whose second layer has M' outputs.
        x: (N, D) features, the input of the part.
        inputs: any inputs of the model.
    """
    taken: list[Tensor] = []
    with (
        part.second.register_forward_hook(lambda _module, _args, output: taken.append(output.requires_grad_())),
        torch.enable_grad(),
        _frozen(model),
    ):
        logits = _run(model, part, x, inputs)
        gradients = [torch.autograd.grad(z.sum(), taken[-1], retain_graph=True)[0] for z in logits.unbind(dim=1)]
    # After the part, only one token of a sequence has a gradient, so the sum over tokens is that gradient.
    return torch.stack([one if one.dim() == 2 else one.sum(dim=1) for one in gradients], dim=1).double()


def _run(model: nn.Module, part: FeedForward, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    count = len(x)
    plain = {k: v if len(v) == count else v[:1].expand(count, *v.shape[1:]) for k, v in inputs.items()}

    def replace(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        given = x.to(output)
        return given if output.dim() == 2 else given[:, None].expand_as(output)

    with part.source.register_forward_hook(replace):
        logits: Tensor = model(**plain).logits
    return logits


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Switch off gradients of all parameters for the duration of the block."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)
