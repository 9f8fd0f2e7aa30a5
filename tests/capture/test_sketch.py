"""A sketch is linear, the same everywhere, and gives a difference's length."""

from __future__ import annotations

import pytest
import torch

from leakaudit.capture.recording.sketch import BUCKETS, distance, sketch


def test_a_sketch_is_linear_and_repeatable() -> None:
    """Sums of tensors are sums of sketches, in another type and shape as well."""
    a, b = torch.randn(3, BUCKETS + 7), torch.randn(3, BUCKETS + 7)
    assert torch.allclose(sketch("w", a) - sketch("w", b), sketch("w", a - b), atol=1e-4)
    assert torch.equal(sketch("w", a), sketch("w", a.flatten()))
    assert not torch.equal(sketch("w", a), sketch("v", a))


@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (BUCKETS,), (0,)])
def test_a_small_tensor_keeps_its_length_exactly(shape: tuple[int, ...]) -> None:
    """No two entries meet."""
    a = torch.randn(shape)
    assert float(sketch("w", a).norm()) == pytest.approx(float(a.norm()), rel=1e-6)


def test_the_length_is_estimated_within_the_stated_standard_error() -> None:
    """Over 200 names: unbiased, and as wide as stated for a dense tensor."""
    a = torch.randn(12 * 64, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leakaudit.capture.recording.sketch.BUCKETS", 64)
        found = torch.tensor([float(sketch(f"w{i}", a).double().square().sum() / a.square().sum()) for i in range(200)])
    assert float(found.mean()) == pytest.approx(1.0, abs=4 * (2 / 64) ** 0.5 / 200**0.5)
    assert 0.5 * (2 / 64) ** 0.5 < float(found.std()) < 1.2 * (2 / 64) ** 0.5


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.5])
def test_a_difference_is_seen_without_the_update(size: float) -> None:
    """Also one that sits in a single entry."""
    own = {"w": torch.randn(700, 300), "b": torch.randn(300)}
    for other in (
        torch.randn(700, 300),
        torch.zeros(700, 300).index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(1.0)),
    ):
        seen = {"w": own["w"].double() + size * other, "b": own["b"].double()}
        true = float(size * other.double().norm() / torch.cat([g.double().flatten() for g in own.values()]).norm())
        if true < 1e-6:  # the sketches are kept in float32
            continue
        error, spread = distance({n: sketch(n, g) for n, g in seen.items()}, own)
        assert error == pytest.approx(true, abs=5 * spread + 2e-7)
        assert spread <= 0.01 * error + 1e-9
