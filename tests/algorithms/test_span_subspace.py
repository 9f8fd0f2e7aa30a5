"""The span of an update and its rank, on planted updates and on small models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakaudit.algorithms.span.candidates import distances
from leakaudit.algorithms.span.subspace import span_of, stacked_update
from leakaudit.models.structure import find_anatomy
from tests.support.span_steps import generator, span_step, true_inputs

WIDTH = 96


def _planted_update(rank: int, noise: float) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(rank, WIDTH, generator=generator(1), dtype=torch.float64)
    outputs = torch.randn(3 * WIDTH, rank, generator=generator(2), dtype=torch.float64)
    update = outputs @ inputs
    update += noise * update.norm() * torch.randn(update.shape, generator=generator(3), dtype=torch.float64) / WIDTH
    return update, inputs


def test_the_rank_is_where_the_singular_values_fall_to_rounding() -> None:
    """Seventeen planted directions above a floor of 1e-8."""
    update, inputs = _planted_update(17, noise=1e-9)
    basis = span_of(update)
    assert basis.rank == 17 and not basis.noisy and basis.gap > 1e3
    assert float(distances(inputs, basis.vectors).max()) < 1e-6


def test_noise_in_every_direction_is_told_from_rounding() -> None:
    """A hundredth of noise fills all directions: the basis is marked noisy."""
    update, _ = _planted_update(5, noise=1e-2)
    basis = span_of(update)
    assert basis.noisy and 1 <= basis.rank <= 8


@pytest.mark.parametrize("kind", ["BERT", "GPT-2"])
def test_the_span_is_that_of_the_inputs(kind: str) -> None:
    """Its rank is the number of distinct inputs that get a gradient."""
    step = span_step(kind)
    inputs = true_inputs(step)
    basis = span_of(stacked_update(step.observe().update, find_anatomy(step.model)))
    assert basis.rank == int(torch.linalg.matrix_rank(inputs, rtol=1e-9))
    assert not basis.noisy
    assert float(distances(inputs, basis.vectors).max()) < 1e-3
    torch.testing.assert_close(basis.vectors @ basis.vectors.T, torch.eye(basis.rank, dtype=torch.float64))
