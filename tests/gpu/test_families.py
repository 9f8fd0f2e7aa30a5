"""Steps of several families that a GPU trained, against the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.families import FAMILIES, PRECISIONS, measured, off, train
from tests.gpu.record import DEVICE, MEASURED, STEPS

pytestmark = pytest.mark.gpu

ATTACKED = {"float32": 5, "tf32": 1, "bf16": 1}
"""Attacked steps of a training by precision, spread over it. Our choice, because an attack takes a thousand times as long as a step."""


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_kept_steps_are_those_of_the_optimizer_and_say_the_same_on_both_devices(
    family: str, precision: str, tmp_path: Path
) -> None:
    """To the bit, verified, and attacked with the same result."""
    if precision == "tf32" and DEVICE == "cpu":
        pytest.skip("a CPU has no TF32")
    if "LoRA" in family:
        pytest.importorskip("peft")
    trained = train(FAMILIES[family], precision, DEVICE, STEPS, tmp_path)
    assert off(trained) == []
    steps = sorted({STEPS * number // ATTACKED[precision] for number in range(ATTACKED[precision])})
    MEASURED.families.append(measured(family, precision, trained, DEVICE, steps))
