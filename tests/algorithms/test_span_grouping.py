"""Sequences from attention, on planted queries, keys and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.span.attention_evidence import COMPLETE, AttentionEvidence, Group
from leakaudit.algorithms.span.factoring import AttentionFactors
from leakaudit.algorithms.span.grouping import assemble
from leakaudit.plugins.budget import Budget
from tests.support.span_steps import generator


def _planted_attention(
    sizes: list[int], heads: int = 6, width: int = 24
) -> tuple[AttentionFactors, Tensor, list[set[int]]]:
    """Plant sequences: dq and dk are combinations of their own keys and queries.

    The coefficients of dq sum to 0.
    """
    draws = generator(9)
    count = sum(sizes)
    keys = torch.randn(heads, count, width, generator=draws, dtype=torch.float64)
    queries = torch.randn(heads, count, width, generator=draws, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    same = (owner[:, None] == owner[None, :]).double()
    a = torch.randn(heads, count, count, generator=draws, dtype=torch.float64) * same
    a -= same * a.sum(2, keepdim=True) / same.sum(1)[None, :, None]
    b = torch.randn(heads, count, count, generator=draws, dtype=torch.float64) * same
    one, zero = torch.ones(heads, count, 1).double(), torch.zeros(heads, count, 1).double()
    factors = AttentionFactors(torch.cat([keys, one], 2), queries, torch.cat([a @ keys, zero], 2), b @ queries)
    positions = torch.cat([torch.arange(size) for size in sizes])
    return factors, positions, [set((owner == s).nonzero().flatten().tolist()) for s in range(len(sizes))]


def test_planted_sequences_are_assembled_exactly() -> None:
    """Four sequences of different lengths come back row by row."""
    factors, positions, truth = _planted_attention([5, 9, 7, 12])
    groups = assemble(factors, positions, beam=8, budget=Budget(600))
    assert sorted(map(sorted, (group.members for group in groups))) == sorted(map(sorted, truth))
    assert all(group.residual < 1e-8 for group in groups)
    for group in groups:
        assert positions[list(group.members)].tolist() == list(range(len(group.members)))


def test_a_sequence_longer_than_the_head_is_found_by_elimination() -> None:
    """Thirty keys explain anything in a head of 24, so the short one is found first."""
    factors, positions, truth = _planted_attention([6, 30])
    groups = assemble(factors, positions, beam=8, budget=Budget(600))
    assert sorted(map(sorted, (group.members for group in groups))) == sorted(map(sorted, truth))


def test_a_sequence_ends_with_its_closing_token() -> None:
    """Nothing is added behind the given last rows, and no sequence stops before."""
    factors, positions, truth = _planted_attention([5, 9, 7, 12])
    closing = torch.zeros(len(positions), dtype=torch.bool)
    closing[[max(rows) for rows in truth]] = True
    groups = assemble(factors, positions, beam=8, budget=Budget(600), closing=closing)
    assert sorted(map(sorted, (group.members for group in groups))) == sorted(map(sorted, truth))
    wrong = torch.zeros(len(positions), dtype=torch.bool)
    wrong[[2, 7]] = True  # the third places of two sequences: then they are cut short, and nothing explains them
    for group in assemble(factors, positions, beam=8, budget=Budget(600), closing=wrong):
        places = positions[[row for row in group.members if wrong[row]]].tolist()
        assert all(place == int(positions[list(group.members)].max()) for place in places)


def test_a_wrong_member_is_exchanged_for_the_one_that_explains_the_others() -> None:
    """Two of nine members are of another sequence; single exchanges correct both."""
    factors, positions, truth = _planted_attention([9, 9])
    evidence = AttentionEvidence(factors.vectors, factors.updates, torch.arange(18), positions)
    wrong = list(range(9))
    wrong[3], wrong[6] = 12, 15
    corrected = evidence.exchanged(Group(tuple(wrong), 1.0), times=3)
    assert set(corrected.members) == truth[0]
    assert corrected.residual < COMPLETE
    assert evidence.exchanged(Group(tuple(wrong), 1.0), times=0).members == tuple(wrong)


def test_one_summed_gradient_in_three_does_not_hide_a_complete_sequence() -> None:
    """A token at two places has the sum of two gradients; the other two are enough."""
    factors, positions, truth = _planted_attention([6, 6])
    updates = factors.updates.clone()
    updates[:, 2] += updates[:, 9]
    known = torch.full((12,), -1)
    known[[1, 2, 4]] = torch.tensor([1, 2, 4])
    evidence = AttentionEvidence(factors.vectors, updates, known, positions)
    best = evidence.grow([1], torch.ones(12, dtype=torch.bool), beam=8, longest=12)[0]
    assert set(best.members) == truth[0]
    assert best.residual < COMPLETE


def test_a_spent_budget_assembles_nothing_and_does_not_hang() -> None:
    """The caller then falls back on positions."""
    factors, positions, _ = _planted_attention([5, 5])
    ticks = iter(float(i) for i in range(10_000))
    assert assemble(factors, positions, beam=8, budget=Budget(0.5, clock=lambda: next(ticks))) == []
