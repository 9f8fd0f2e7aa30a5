"""The comparison of a step's loss with the one that the model's class computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from leakaudit.audit.comparison import error_up_to_a_factor
from leakaudit.audit.verification import FLOAT32_TOLERANCE, TOLERANCE
from leakaudit.capture.in_place.repetition import Repetition
from leakaudit.capture.observing.forward_hooks import ForwardPass
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.truth import MicroBatch
from leakaudit.errors import NonFiniteUpdateError


def loss_is_inside(passes: Sequence[ForwardPass], model: nn.Module) -> bool:
    """Return whether every pass used only a loss that the model's own class computed.

    Args:
        passes: those that the update comes from.
        model: the audited model; a `forward` or loss function set on the object itself is not its class's.
    """
    replaced = {"forward", "loss_function", "_loss_function"} & vars(model).keys()
    return not replaced and all(set(seen.output_gradients) == {"loss"} for seen in passes)


def loss_is_like(repetition: Repetition, model: nn.Module, batches: Sequence[MicroBatch]) -> bool:
    """Return whether each pass has the gradient of the class's loss, up to a factor.

    Args:
        repetition: of the step.
        model: the audited model.
        batches: the passes, as the audited model takes them.
    """
    pairs = zip(repetition.passes, batches, strict=True)
    return all(_pass_is_like(repetition, seen, model, batch) for seen, batch in pairs)


def _pass_is_like(repetition: Repetition, seen: ForwardPass, model: nn.Module, batch: MicroBatch) -> bool:
    labels = batch.inputs.get("labels", batch.withheld_inputs.get("labels"))
    if labels is None:
        return False
    alone = replace(repetition, passes=[seen], recipe=StepRecipe())
    theirs = alone.update(alone.named)
    inputs = {**batch.inputs, "labels": labels}
    mine = alone.update(alone.named, lambda: _send_back_own_loss(alone, model, inputs))
    try:
        return error_up_to_a_factor(theirs, mine) <= TOLERANCE.get(_precision(alone), FLOAT32_TOLERANCE)
    except NonFiniteUpdateError:
        return False


def _send_back_own_loss(alone: Repetition, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Differentiate the loss of the model's class, in the context of the only pass."""
    (seen,) = alone.passes
    with ExitStack() as context:
        alone.enter_context(seen, context)
        device = next(model.parameters()).device
        given = {name: value.to(device, copy=True) for name, value in inputs.items()}
        loss = type(model).forward(model, **given, **seen.options).loss
    alone.backward([loss], [torch.ones_like(loss)])


def _precision(repetition: Repetition) -> str:
    """Return the coarsest type in which the step was computed."""
    types = {p.dtype for p in repetition.named.values()} | {seen.autocast for seen in repetition.passes}
    return next((name for name in ("bfloat16", "float16") if getattr(torch, name) in types), "float32")
