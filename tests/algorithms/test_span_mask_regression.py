"""Inputs behind planted dropout masks."""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.span.candidates import Candidates, distances
from leakaudit.algorithms.span.mask_regression import MaskSearch, find_masked
from leakaudit.plugins.budget import Budget
from tests.support.span_steps import generator


def _masked_problem(
    copies: list[int], false: int, rate: float = 0.1, width: int = 192
) -> tuple[Tensor, Candidates, dict[int, list[Tensor]]]:
    """Plant true inputs behind masks, some several times, among false ones.

    Tokens number the inputs.
    """
    draws = generator(5)
    inputs = torch.randn(len(copies) + false, width, generator=draws, dtype=torch.float64)
    masked: dict[int, list[Tensor]] = {}
    for index, count in enumerate(copies):
        for _ in range(count):
            mask = (torch.rand(width, generator=draws) > rate).double()
            masked.setdefault(index, []).append(inputs[index] * mask / (1 - rate))
    rows = torch.stack([vector for vectors in masked.values() for vector in vectors])
    basis = torch.linalg.qr(rows.T)[0].T
    tokens = torch.arange(len(inputs))
    candidates = Candidates(tokens, torch.zeros_like(tokens), distances(inputs, basis), inputs)
    return basis, candidates, masked


def test_inputs_behind_dropout_masks_are_found_with_their_masks() -> None:
    """Exactly the twelve planted ones of 72, every coordinate of every mask."""
    basis, candidates, planted = _masked_problem([1] * 12, false=60)
    found = find_masked(basis, candidates, 0.1, generator(), Budget(600))
    assert sorted(found.tokens.tolist()) == list(range(12))
    for token, vector in zip(found.tokens.tolist(), found.vectors, strict=True):
        assert torch.allclose(vector, planted[token][0], atol=1e-6)


def test_two_copies_of_one_input_are_told_apart_by_their_masks() -> None:
    """Both [CLS] of a batch of two are found, each with its own mask."""
    basis, candidates, planted = _masked_problem([2, *[1] * 8], false=30)
    found = find_masked(basis, candidates, 0.1, generator(), Budget(600))
    assert sorted(found.tokens.tolist()) == [0, *range(9)]
    copies = found.vectors[found.tokens == 0]
    for mine in planted[0]:
        assert float((copies - mine).abs().amax(dim=1).min()) < 1e-6


def test_the_zero_vector_explains_nothing() -> None:
    """In a span of one direction, a mask that drops everything would fit any input."""
    basis, candidates, _ = _masked_problem([1], false=40)
    found = find_masked(basis, candidates, 0.1, generator(), Budget(600))
    assert found.tokens.tolist() == [0]


def test_a_missing_input_is_found_when_it_is_searched_again() -> None:
    """Three inputs are shown to the second search only; it also finds a second copy."""
    basis, candidates, planted = _masked_problem([2, *[1] * 9], false=30)
    shown = candidates.take(torch.tensor([*range(7), *range(10, 40)]))
    search = MaskSearch(basis, 0.1, generator(), Budget(600), frozenset())
    search.consider(shown)
    before = search.count()
    assert before < len(basis)
    search.look_again(candidates)
    found = search.result()
    assert before < search.count() == len(basis)
    assert sorted(found.tokens.tolist()) == [0, *range(10)]
    for token, vector in zip(found.tokens.tolist(), found.vectors, strict=True):
        assert min(float((vector - true).abs().max()) for true in planted[token]) < 1e-6
