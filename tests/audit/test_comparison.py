"""The comparison of two updates by sums equals that of whole vectors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from leakaudit.audit.comparison import PIECE, UpdateComparison

SHAPES = {"a": (3, 5), "b": (7,), "c": (), "d": (PIECE + 3,)}


def random_update(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def vector(update: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in update.values()])


@pytest.mark.parametrize(("scale", "noise"), [(1.0, 0.0), (1.0, 1e-7), (0.25, 1e-6), (1.0, 2.0), (-3.0, 0.5)])
def test_sums_give_what_whole_vectors_give(scale: float, noise: float) -> None:
    """The sums hold for a difference of a ten-millionth of the update.

    A difference of squared norms would lose it.
    """
    own, other = random_update(0), random_update(1)
    seen = {name: scale * own[name] + noise * other[name] for name in own}
    found, a, b = UpdateComparison.of(seen, own), vector(seen), vector(own)
    k = float(a @ b / (b @ b))
    assert found.error == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-9, abs=1e-15)
    assert found.scale == pytest.approx(k, rel=1e-12)
    assert found.scaled_error == pytest.approx(float((a - k * b).norm() / abs(k) / b.norm()), rel=1e-6, abs=1e-15)
    assert found.cosine == pytest.approx(float(a @ b / a.norm() / b.norm()), rel=1e-12)
    assert found.difference.std == pytest.approx(float((a - b).std()), rel=1e-9, abs=1e-15)
    assert found.scaled_difference.std == pytest.approx(float((a - k * b).std()), rel=1e-6, abs=1e-15)


def test_nothing_recomputed_is_infinitely_far_and_has_no_direction() -> None:
    """Where the recomputed update is zero."""
    seen = random_update(0)
    found = UpdateComparison.of(seen, {name: torch.zeros_like(g) for name, g in seen.items()})
    assert (found.error, found.scale, found.scaled_error, found.cosine) == (float("inf"), 0.0, float("inf"), 0.0)


PEAK = """
import resource, torch
from leakaudit.audit.comparison import UpdateComparison
one, two = {"w": torch.ones(1 << 24)}, {"w": torch.full((1 << 24,), 2.0)}
UpdateComparison.of({"w": torch.ones(9)}, {"w": torch.ones(9)})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert UpdateComparison.of(one, two).scaled_error == 0.0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_comparison_takes_no_memory_that_grows_with_the_model() -> None:
    """Two updates of 64 MB each are compared within 64 MB.

    Whole float64 vectors would take 400 MB.
    """
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 64 * 1024
