"""The attention identity on planted sequences of any length."""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.span.attention_identity import SATISFIED, AttentionIdentity
from leakaudit.plugins.budget import Budget

HEADS, WIDTH, LENGTH = 4, 8, 12
"""Longer than a head has dimensions."""


def _sequence(seed: int) -> tuple[Tensor, Tensor]:
    """Plant one sequence.

    Returns:
        Vectors and updates (2H, L, d + 1): keys then queries, dq then dk, as the softmax Jacobian relates them.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(HEADS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    queries = torch.randn(HEADS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    scores = torch.randn(HEADS, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    scores = scores - scores.mean(dim=2, keepdim=True)  # rows of a softmax Jacobian sum to zero
    one, zero = torch.ones(HEADS, LENGTH, 1), torch.zeros(HEADS, LENGTH, 1)
    vectors = torch.cat([torch.cat([keys, one], 2), torch.cat([queries, zero], 2)])
    given, got = scores @ keys, scores.transpose(1, 2) @ queries
    return vectors, torch.cat([torch.cat([given, zero], 2), torch.cat([got, zero], 2)])


def _two() -> tuple[Tensor, Tensor, Tensor]:
    """Return vectors, updates and places of two sequences, one behind the other."""
    first, second = _sequence(1), _sequence(2)
    places = torch.arange(LENGTH).repeat(2)
    return torch.cat([first[0], second[0]], 1), torch.cat([first[1], second[1]], 1), places


def test_the_terms_of_a_sequence_add_up_to_zero() -> None:
    """With one member of another sequence they do not."""
    vectors, updates, places = _two()
    identity = AttentionIdentity(vectors, updates, torch.ones(2 * LENGTH, dtype=torch.bool), places)
    whole = torch.arange(LENGTH)
    assert identity.violation(whole) < SATISFIED
    wrong = whole.clone()
    wrong[5] += LENGTH
    assert identity.violation(wrong) > 1e-3


def test_members_of_unknown_update_are_left_out() -> None:
    """Their gradients are arbitrary; still a wrong member violates the identity."""
    vectors, updates, places = _two()
    known = torch.ones(2 * LENGTH, dtype=torch.bool)
    known[[3, 3 + LENGTH]] = False
    updates[:, [3, 3 + LENGTH]] = torch.nan
    identity = AttentionIdentity(vectors, updates, known, places)
    whole = torch.arange(LENGTH)
    assert identity.violation(whole) < SATISFIED
    wrong = whole.clone()
    wrong[3] += LENGTH
    assert identity.violation(wrong) > 1e-3


def test_a_search_finds_the_members_of_one_sequence_among_two() -> None:
    """From a start with four members of the other, and two places empty."""
    vectors, updates, places = _two()
    known = torch.ones(2 * LENGTH, dtype=torch.bool)
    known[[0, 4, 4 + LENGTH]] = False
    identity = AttentionIdentity(vectors, updates, known, places)
    start = list(range(LENGTH))
    for place in (2, 5, 7):
        start[place] += LENGTH
    start[4] = start[9] = -1
    budget, everything = Budget(600), torch.ones(2 * LENGTH, dtype=torch.bool)
    better = identity.improve(start, everything, budget)
    choice = identity.search(better.options, everything, budget)
    assert choice.options == tuple(range(LENGTH))
    assert choice.violation < SATISFIED


def test_nothing_is_tried_beyond_the_budget() -> None:
    """A spent budget returns the start."""
    vectors, updates, places = _two()
    identity = AttentionIdentity(vectors, updates, torch.ones(2 * LENGTH, dtype=torch.bool), places)
    now = [0.0]
    budget = Budget(1.0, clock=lambda: now[0])
    now[0] = 2.0
    start = [LENGTH + 1 if place == 1 else place for place in range(LENGTH)]
    everything = torch.ones(2 * LENGTH, dtype=torch.bool)
    assert identity.improve(start, everything, budget).options == tuple(start)
    assert identity.search(start, everything, budget).options == tuple(start)
