"""Parts of the span attack against autograd, planted gaps and brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leakaudit.algorithms.span.candidates import Scan, distances
from leakaudit.algorithms.span.factoring import factor
from leakaudit.algorithms.span.sequence_assembly import count_inside
from leakaudit.algorithms.span.subspace import span_of, stacked_update
from leakaudit.attacks.span import Span
from leakaudit.client.step import ClientStep
from leakaudit.models.structure import find_anatomy, input_stage_of
from leakaudit.plugins.budget import Budget
from tests.support import tiny

TEXTS = ["the old dog chased a red cat", "one bird saw two fish today"]


def _trained_looking(model: nn.Module) -> nn.Module:
    """Give every bias and gain a value of its own; 0 and 1 would hide mistakes."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def _step(kind: str, count: int = 2) -> ClientStep:
    if kind == "BERT":
        return tiny.client_step(_trained_looking(tiny.bert()), tiny.bert_tokenizer(), TEXTS[:count])
    model = _trained_looking(tiny.gpt2_classifier())
    return tiny.client_step(model, tiny.gpt2_tokenizer(), TEXTS[:count])


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


def _true_inputs(step: ClientStep) -> Tensor:
    """Return the (n, D) attention inputs of all real tokens."""
    ids = [token for sequence in step.truth.sequences() for token in sequence]
    positions = [position for sequence in step.truth.sequences() for position in range(len(sequence))]
    stage = input_stage_of(step.model, tiny.POSITIONS)
    return stage.inputs(torch.tensor(ids), torch.tensor(positions))


@pytest.mark.parametrize("kind", ["BERT", "GPT-2"])
def test_the_span_is_that_of_the_inputs(kind: str) -> None:
    """Its rank is the number of distinct inputs that get a gradient."""
    step = _step(kind)
    inputs = _true_inputs(step)
    basis = span_of(stacked_update(step.observe().update, find_anatomy(step.model)))
    assert basis.rank == int(torch.linalg.matrix_rank(inputs, rtol=1e-9))
    assert not basis.noisy
    assert float(distances(inputs, basis.vectors).max()) < 1e-3
    torch.testing.assert_close(basis.vectors @ basis.vectors.T, torch.eye(basis.rank, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["BERT", "GPT-2"])
def test_the_update_factors_into_the_gradients_that_autograd_gave_each_token(kind: str) -> None:
    """Queries, keys and their gradients by token and head, from the summed update.

    One sequence, so that all inputs are distinct.
    """
    step = _step(kind, count=1)
    anatomy = find_anatomy(step.model)
    made, wanted = _outputs_and_gradients(step, [p.module for p in anatomy.projections])
    weights = {name: parameter.detach() for name, parameter in step.model.named_parameters()}
    factors = factor(step.observe().update, weights, anatomy, _true_inputs(step))
    assert factors is not None
    size = float(wanted.abs().max())
    for number, head in enumerate(anatomy.heads):
        assert torch.allclose(factors.queries[number].T, made[head.query], atol=1e-5)
        assert torch.allclose(factors.keys[number, :, :-1].T, made[head.key], atol=1e-5)
        assert torch.allclose(factors.query_updates[number, :, :-1].T, wanted[head.query], atol=1e-2 * size)
        assert torch.allclose(factors.key_updates[number].T, wanted[head.key], atol=1e-2 * size)


def test_factoring_needs_every_projection() -> None:
    """With the keys frozen, attention is not known."""
    step = _step("BERT")
    anatomy = find_anatomy(step.model)
    update = step.observe().update
    del update[anatomy.projections[1].weight]  # type: ignore[attr-defined]
    assert factor(update, {}, anatomy, _true_inputs(step)) is None


@pytest.mark.parametrize("kind", ["BERT", "GPT-2"])
def test_the_nearest_tokens_are_those_of_a_search_over_all(kind: str) -> None:
    """Brute force over the whole vocabulary finds the same three per position."""
    step = _step(kind)
    stage = input_stage_of(step.model, tiny.POSITIONS)
    assert stage.additive
    basis = span_of(stacked_update(step.observe().update, find_anatomy(step.model))).vectors[:4]
    found = Scan(stage, basis, None, keep=3).block(2, 6)
    everything = torch.arange(stage.vocabulary)
    for position in range(2, 6):
        here = found.positions == position
        brute = distances(stage.inputs(everything, torch.full_like(everything, position)), basis)
        assert set(found.tokens[here].tolist()) == set(brute.topk(3, largest=False).indices.tolist())
        order = found.tokens[here]
        torch.testing.assert_close(found.distance[here], brute[order])


@pytest.mark.parametrize(
    ("distance", "rank", "expected"),
    [
        ([1e-7, 1e-7, 2e-7, 0.3, 0.4], 3, 3),  # a clear gap
        ([1e-7, 1e-7, 1e-6, 2e-6, 0.3], 3, 4),  # one pair more than directions: a shared position
        ([1e-4, 3e-4, 5e-4, 0.2, 0.2], 3, 3),  # rounding in an untrained model
        ([0.3, 0.4, 0.5], 2, 0),  # nothing lies in the span
        ([1e-7, 0.3, 0.4], 2, 1),  # fewer than directions: a token was not among the candidates
    ],
)
def test_pairs_in_the_span_end_at_the_widest_gap(distance: list[float], rank: int, expected: int) -> None:
    """There are never fewer pairs than directions if that many are near."""
    assert count_inside(torch.tensor(distance, dtype=torch.float64), rank) == expected


@pytest.mark.parametrize("count", [1, 2])
def test_a_gpt2_classifiers_batch_comes_back_exactly(count: int) -> None:
    """Nothing granted: no labels, no lengths, no batch size."""
    step = _step("GPT-2", count)
    guess = Span()(step.observe(), torch.Generator().manual_seed(0), Budget(600))
    assert guess.sequences is not None
    assert set(step.truth.sequences()) <= {sequence.token_ids for sequence in guess.sequences}
    assert all(sequence.proved for sequence in guess.sequences)


def test_the_last_token_of_a_language_models_text_comes_back_as_a_target() -> None:
    """Its query, key and value get no gradient, but the last layer predicted it."""
    step = tiny.client_step(_trained_looking(tiny.gpt2_lm()), tiny.gpt2_tokenizer(), TEXTS[:1], task="causal-lm")
    guess = Span()(step.observe(), torch.Generator().manual_seed(0), Budget(600))
    (true,) = step.truth.sequences()
    assert guess.sequences is not None
    assert [sequence.token_ids for sequence in guess.sequences] == [true]
