"""Taking noise out of a matrix whose rank is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.objective import Matching, Objective
from leakaudit.algorithms.matching.singular_value_shrinkage import denoised
from leakaudit.defenses.gaussian_noise import GaussianNoise
from tests.support import tiny

RANK = 3


def _noisy(sigma: float, rows: int = 120, columns: int = 80) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    clean = torch.randn(rows, RANK, generator=rng) @ torch.randn(RANK, columns, generator=rng)
    return clean, clean + sigma * torch.randn(rows, columns, generator=rng)


@pytest.mark.parametrize(("sigma", "least"), [(0.1, 0.999), (1.0, 0.97), (3.0, 0.85)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_matrix_of_low_rank_comes_out_of_the_noise(sigma: float, least: float, turned: bool) -> None:
    """Far nearer than it was, lying or standing, and of its rank."""
    clean, noisy = (matrix.T if turned else matrix for matrix in _noisy(sigma))
    found = denoised(noisy, RANK, sigma)
    assert torch.linalg.matrix_rank(found, rtol=1e-4) <= RANK
    assert tiny.cosine(found, clean) > least
    assert 1 - tiny.cosine(found, clean) < 0.3 * (1 - tiny.cosine(noisy, clean))


def test_singular_values_are_shrunk_as_far_as_is_best() -> None:
    """No common factor improves the result; one does improve unshrunk values."""
    clean, noisy = _noisy(4.0, 400, 300)
    found = denoised(noisy, RANK, 4.0)
    left, values, right = torch.linalg.svd(noisy, full_matrices=False)
    cut = (left[:, :RANK] * values[:RANK]) @ right[:RANK]

    def best_factor(matrix: Tensor) -> float:
        return float((matrix * clean).sum() / matrix.square().sum())

    assert best_factor(found) == pytest.approx(1.0, abs=0.01)
    assert best_factor(cut) < 0.97


def test_of_noise_alone_nothing_is_left() -> None:
    _, noisy = _noisy(1.0)
    clean, _ = _noisy(1.0)
    assert not denoised(noisy - clean, RANK, 1.0).any()


def test_without_its_noise_the_true_words_explain_an_update_better() -> None:
    """With declared noise the true words have less than half of the distance.

    The noise is three tenths of the update's mean entry.
    """
    seen, ids = tiny.defended(GaussianNoise(scale=0.3), "the cat sat on the mat")
    aware, unaware = (Matcher(seen, (len(ids),), Objective("cosine"), Matching(aware=aware)) for aware in (True, False))
    one, other = (matcher.token_losses([[ids]], torch.zeros(1, 2))[0] for matcher in (aware, unaware))
    assert one < 0.5 * other
