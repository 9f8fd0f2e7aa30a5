"""The nearest pairs of token and position, against brute force."""

from __future__ import annotations

import pytest
import torch

from leakaudit.algorithms.span.candidates import Scan, distances
from leakaudit.algorithms.span.sequence_assembly import count_inside
from leakaudit.algorithms.span.subspace import span_of, stacked_update
from leakaudit.models.structure import find_anatomy, input_stage_of
from tests.support import tiny
from tests.support.span_steps import generator, span_step


def test_the_scan_by_products_gives_the_distances_of_every_pair_computed_alone() -> None:
    """Against brute force over all tokens at four positions."""
    model = tiny.bert()
    stage = input_stage_of(model, tiny.POSITIONS)
    basis = torch.linalg.qr(torch.randn(stage.hidden, 7, generator=generator(), dtype=torch.float64))[0].T
    block = Scan(stage, basis, None, keep=10).block(2, 6)
    assert stage.additive
    for position in range(2, 6):
        everything = torch.arange(stage.vocabulary)
        brute = distances(stage.inputs(everything, torch.full_like(everything, position)), basis)
        nearest = set(brute.argsort()[:10].tolist())
        assert set(block.tokens[block.positions == position].tolist()) == nearest


def test_attention_inputs_are_those_the_model_computes() -> None:
    """Token and position against a forward pass that is stopped at the block."""
    model = tiny.bert()
    stage = input_stage_of(model, tiny.POSITIONS)
    tokens, positions = torch.tensor([5, 9, 30]), torch.tensor([0, 3, 11])
    assert torch.allclose(stage.inputs(tokens, positions), stage._inputs_by_running(tokens, positions), atol=1e-5)


@pytest.mark.parametrize("kind", ["BERT", "GPT-2"])
def test_the_nearest_tokens_are_those_of_a_search_over_all(kind: str) -> None:
    """Brute force over the whole vocabulary finds the same three per position."""
    step = span_step(kind)
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
