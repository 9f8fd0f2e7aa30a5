"""The update of queries and keys, factored into the gradient of each token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakaudit.algorithms.span.factoring import factor
from leakaudit.client.step import ClientStep
from leakaudit.models.structure import Head, anatomy_of, find_anatomy
from tests.support import tiny
from tests.support.span_steps import span_step, true_inputs


def _outputs_and_gradients(step: ClientStep, modules: list[str]) -> tuple[Tensor, Tensor]:
    """Return the outputs of layers and their gradients, from autograd itself.

    Returns:
        (features, n) each, for all n real tokens.
    """
    taken: list[Tensor] = []
    handles = [
        step.model.get_submodule(name).register_forward_hook(lambda _, given, made: taken.append(made))
        for name in modules
    ]
    batch = step.truth.micro_batches[0]
    with torch.enable_grad():
        loss = step.model(**batch.inputs).loss
        gradients = torch.autograd.grad(loss, taken)
    for handle in handles:
        handle.remove()
    real = batch.inputs["attention_mask"].bool()
    made = torch.cat([t.detach()[real].T for t in taken]).double()
    return made, torch.cat([g[real].T for g in gradients]).double()


@pytest.mark.parametrize("kind", ["BERT", "GPT-2"])
def test_the_update_factors_into_the_gradients_that_autograd_gave_each_token(kind: str) -> None:
    """Queries, keys and their gradients by token and head, from the summed update.

    One sequence, so that all inputs are distinct.
    """
    step = span_step(kind, count=1)
    anatomy = find_anatomy(step.model)
    made, wanted = _outputs_and_gradients(step, [p.module for p in anatomy.projections])
    weights = {name: parameter.detach() for name, parameter in step.model.named_parameters()}
    factors = factor(step.observe().update, weights, anatomy, true_inputs(step))
    assert factors is not None
    size = float(wanted.abs().max())
    for number, head in enumerate(anatomy.heads):
        assert torch.allclose(factors.queries[number].T, made[head.query], atol=1e-5)
        assert torch.allclose(factors.keys[number, :, :-1].T, made[head.key], atol=1e-5)
        assert torch.allclose(factors.query_updates[number, :, :-1].T, wanted[head.query], atol=1e-2 * size)
        assert torch.allclose(factors.key_updates[number].T, wanted[head.key], atol=1e-2 * size)


def test_factoring_needs_every_projection() -> None:
    """With the keys frozen, attention is not known."""
    step = span_step("BERT")
    anatomy = find_anatomy(step.model)
    update = step.observe().update
    del update[anatomy.projections[1].weight]  # type: ignore[attr-defined]
    assert factor(update, {}, anatomy, true_inputs(step)) is None


def test_heads_partition_the_features_of_the_projections() -> None:
    """Indices of all heads are disjoint and cover every output feature."""
    anatomy = anatomy_of(tiny.bert())
    parts = [part for head in anatomy.heads for part in (head.query, head.key, head.value)]
    assert all(isinstance(head, Head) for head in anatomy.heads) and len(anatomy.heads) == 2
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(3 * tiny.HIDDEN))
