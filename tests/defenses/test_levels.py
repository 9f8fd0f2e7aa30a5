"""`qsgd` and `quantize` send levels that an independent computation gives."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from leakaudit.audit.verification import verify
from leakaudit.defenses.powersgd import PowerSgd
from leakaudit.defenses.qsgd import Qsgd
from leakaudit.defenses.quantize import Quantize
from leakaudit.plugins.testing import check_defense
from leakaudit.results.schema import VerificationStatus
from tests.support import tiny


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("levels", [1, 4, 16])
def test_qsgd_is_unbiased_with_the_variance_of_its_paper(levels: int) -> None:
    """Mean v, and E|Q(v) - v|^2 at most min(n / s^2, sqrt(n) / s) |v|^2 (Lemma 3.1).

    The mean and the variance of each entry are those of the two neighbouring levels, written down without the code.
    """
    v = torch.tensor([3.0, -4.0, 0.5, 0.0, 12.0])  # norm 13.01
    norm, draws = float(v.norm()), 20_000
    many = torch.stack([Qsgd(levels=levels).changed({"v": v}, _generator(i))["v"] for i in range(draws)]).double()
    up = [math.modf(levels * abs(x) / norm)[0] for x in v.tolist()]
    variance = [(norm / levels) ** 2 * p * (1 - p) for p in up]
    for entry, (mean, spread) in enumerate(zip(v.tolist(), variance, strict=True)):
        assert float(many[:, entry].mean()) == pytest.approx(mean, abs=5 * (spread / draws) ** 0.5 + 1e-5)
        assert float(many[:, entry].var()) == pytest.approx(spread, rel=0.1, abs=1e-6)
    assert float((many - v).square().sum(dim=1).mean()) <= min(5 / levels**2, 5**0.5 / levels) * norm**2


def test_qsgd_leaves_few_entries_of_a_large_tensor() -> None:
    """At most s (s + sqrt(n)) on average (Lemma 3.1), where `quantize` keeps most."""
    v = torch.randn(10_000, generator=_generator())
    sent = Qsgd(levels=4).changed({"v": v}, _generator())["v"]
    assert 0 < int((sent != 0).sum()) <= 4 * (4 + 100)
    assert int((Quantize(bits=8).changed({"v": v}, _generator())["v"] != 0).sum()) > 9_000


def test_nearest_rounding_to_8_bits_is_what_torch_quantises_to() -> None:
    """The same integers and scale as torch's symmetric int8; no draw is used."""
    v = torch.randn(400, generator=_generator())
    scale = float(v.abs().max()) / 127
    other = torch.fake_quantize_per_tensor_affine(v, scale, 0, -127, 127)
    one, two = (Quantize(bits=8, rounding="nearest").changed({"v": v}, _generator(seed))["v"] for seed in (0, 1))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    "defense",
    [Qsgd(levels=1), Qsgd(levels=256), Quantize(bits=8, rounding="nearest"), Quantize(rounding="nearest", bits=2)],
)
def test_the_contract_holds_at_coarse_and_fine_levels(defense: Qsgd | Quantize) -> None:
    """No step that declares it would be called a mismatch."""
    check_defense(defense)


def test_a_random_rounding_is_no_nearest_one() -> None:
    """A step that declares nearest rounding and rounds at random is a mismatch."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["the dog saw a cat"], [1])
    seen = Quantize(bits=4)(step, step.observe(), _generator())
    declared = Quantize(bits=4, rounding="nearest").declared()
    other = dataclasses.replace(step, facts=step.facts.model_copy(update={"defenses": (declared,)}))
    assert verify(other, seen.update).status is VerificationStatus.MISMATCH


def test_knobs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="levels must be 1 or more"):
        Qsgd(levels=-1)
    with pytest.raises(ValueError, match="rounding must be one of random, nearest, got 'up'"):
        Quantize(rounding="up")  # type: ignore[arg-type]


def test_a_tensor_of_zeros_and_an_empty_one_are_sent_as_they_are() -> None:
    """Their norm is no divisor."""
    update = {"zero": torch.zeros(3), "empty": torch.zeros(0)}
    sent = Qsgd().changed(update, _generator())
    assert sent["zero"].tolist() == [0.0, 0.0, 0.0] and sent["empty"].numel() == 0


def test_the_size_of_what_is_sent_is_that_of_its_usual_form() -> None:
    """Forbids the price of a dense update for fifteen values or thin matrices."""
    update = {"w": torch.ones(40, 30), "b": torch.ones(7)}
    assert Qsgd(levels=7).sent_bytes(update) == (40 * 30 + 7) * 4 / 8 + 2 * 4
    assert Qsgd(levels=0).sent_bytes(update) == 4 * (40 * 30 + 7)
    assert PowerSgd(rank=2).sent_bytes(update) == 4 * ((40 + 30) * 2 + 7)
    assert PowerSgd(rank=0).sent_bytes(update) == PowerSgd(rank=30).sent_bytes(update) == 4 * (40 * 30 + 7)
