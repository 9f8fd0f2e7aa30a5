"""Whether a client's loss is the one that its model computes."""

from __future__ import annotations

from dataclasses import replace

from leakaudit.audit.accuracy import FLOAT32_TOLERANCE, TOLERANCE
from leakaudit.audit.comparison import error_up_to_a_factor
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch
from leakaudit.errors import LeakAuditError
from leakaudit.results.schema import Verification


def has_own_loss(client: ClientStep, stamp: Verification) -> bool | None:
    """Return whether the loss of a step is the model's own, up to a factor.

    In each micro-batch the model's loss of the kept labels must have the gradient that the client's loss had.

    Args:
        client: the step on the rebuilt model.
        stamp: of that step.

    Returns:
        None if that cannot be told: the step was not computed again, or its weights changed between the micro-batches.
    """
    if not stamp.status.bounds or client.facts.view == "delta" or client.recipe.loss != "pulls":
        return None
    try:
        return all(_is_own(client, batch) for batch in client.truth.micro_batches)
    except (LeakAuditError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, AttributeError):
        return False  # the class cannot compute its loss on such a batch, so an attack cannot either


def _is_own(client: ClientStep, batch: MicroBatch) -> bool:
    if set(batch.output_gradients) == {"loss"}:
        return True
    if batch.labels is None:
        return False
    recipe = client.recipe.model_copy(update={"max_grad_norm": None, "max_grad_value": None})
    alone = replace(client, recipe=recipe, truth=replace(client.truth, micro_batches=(batch,)))
    labelled = replace(batch, inputs={**batch.inputs, "labels": batch.labels})
    of_class = replace(
        client,
        recipe=recipe.model_copy(update={"loss": "forward"}),
        truth=replace(client.truth, micro_batches=(labelled,)),
    )
    precision = recipe.autocast or client.facts.dtype
    return error_up_to_a_factor(alone.update(), of_class.update()) <= TOLERANCE.get(precision, FLOAT32_TOLERANCE)
