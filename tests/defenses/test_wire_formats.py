"""Laplace noise, rounding, signs and quantisation, against numbers by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from leakaudit.client.observation import Observation
from leakaudit.defenses.laplace_noise import LaplaceNoise
from leakaudit.defenses.quantize import Quantize
from leakaudit.defenses.rounding import Round
from leakaudit.defenses.sign import Sign
from tests.support import tiny


def _seen(**update: torch.Tensor) -> tuple[object, Observation]:
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["a dog"], [1])
    return step, dataclasses.replace(step.observe(), update=update)


def test_laplace_noise_has_the_declared_deviation_and_heavier_tails_than_normal() -> None:
    """Excess kurtosis of a Laplace variable is 3, of a normal one 0."""
    step, seen = _seen(a=torch.full((400, 500), 2.0))
    noisy = LaplaceNoise(scale=0.5)(step, seen, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    noise = (noisy.update["a"] - 2.0).double()
    (declared,) = noisy.facts.defenses
    assert declared.name == "laplace-noise" and declared.parameters["sigma"] == pytest.approx(1.0)
    assert float(noise.std()) == pytest.approx(1.0, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.01)
    assert float((noise / noise.std()).pow(4).mean()) - 3 == pytest.approx(3.0, abs=0.5)


def test_negative_laplace_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="scale must be 0 or more"):
        LaplaceNoise(scale=-1.0)


def test_rounding_keeps_the_digits_that_the_format_has() -> None:
    """1 + 2^-8 is half way in bf16, and exact in fp16.

    fp16 loses what is below its range.
    """
    step, seen = _seen(a=torch.tensor([1.0 + 2**-8, 1.0 + 2**-7, 1e-9]))
    generator = torch.Generator()
    assert Round(dtype="bf16")(step, seen, generator).update["a"][:2].tolist() == [1.0, 1.0 + 2**-7]  # type: ignore[arg-type]
    assert Round(dtype="fp16")(step, seen, generator).update["a"].tolist() == [1.0 + 2**-8, 1.0 + 2**-7, 0.0]  # type: ignore[arg-type]


def test_rounding_refuses_what_the_format_cannot_hold() -> None:
    """Infinity on the wire would be no update at all."""
    step, seen = _seen(a=torch.tensor([1e6]))
    with pytest.raises(ValueError, match="too large for fp16"):
        Round(dtype="fp16")(step, seen, torch.Generator())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype must be one of"):
        Round(dtype="int8")  # type: ignore[arg-type]


def test_signs_are_all_that_is_sent() -> None:
    """Zero stays zero."""
    step, seen = _seen(a=torch.tensor([3.0, -1e-9, 0.0]), b=torch.tensor([[-7.0]]))
    sent = Sign()(step, seen, torch.Generator())  # type: ignore[arg-type]
    assert sent.update["a"].tolist() == [1.0, -1.0, 0.0] and sent.update["b"].tolist() == [[-1.0]]


def test_quantised_entries_are_levels_of_the_largest_and_right_on_average() -> None:
    """With three bits, 0.2 of the largest becomes 0 or 1/3, and 0.2 in the mean."""
    step, seen = _seen(a=torch.cat([torch.tensor([1.0, -1.0]), torch.full((20000,), 0.2)]))
    sent = Quantize(bits=3)(step, seen, torch.Generator().manual_seed(0)).update["a"]  # type: ignore[arg-type]
    assert sent[:2].tolist() == [1.0, -1.0]
    torch.testing.assert_close(sent[2:].unique(), torch.tensor([0.0, 1 / 3]))
    assert float(sent[2:].mean()) == pytest.approx(0.2, abs=0.005)


def test_a_tensor_of_zeros_is_sent_as_it_is() -> None:
    step, seen = _seen(a=torch.zeros(3))
    assert Quantize(bits=4)(step, seen, torch.Generator()).update["a"].tolist() == [0.0, 0.0, 0.0]  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [1, 17, 0])
def test_bits_that_make_no_sense_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="bits must be 2 to 16"):
        Quantize(bits=bits)
