"""Another process reads from a list which sent tensors a round left unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leakaudit.errors import SnapshotError
from leakaudit.storage.round_tensors import (
    TENSORS,
    RoundTensors,
    UnmovedTensor,
    read_round_tensors,
    write_round_tensors,
)

FROZEN = torch.tensor([[0.1, -0.0], [3e-5, 2.0]])
IDS = torch.arange(4)


@pytest.fixture
def listed(tmp_path: Path) -> RoundTensors:
    """Return a list that was written and read."""
    unmoved = {"frozen": UnmovedTensor.of(FROZEN), "ids": UnmovedTensor.of(IDS)}
    made = RoundTensors(trained={"w": (2,)}, unmoved=unmoved, known={"w": "w"}, own=(), declared=())
    write_round_tensors(tmp_path, made)
    return read_round_tensors(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_tensor_as_it_was_is_known_in_every_type_of_weights(listed: RoundTensors, dtype: torch.dtype) -> None:
    """Zeros without their sign, as they are sent."""
    assert listed.as_before("frozen", FROZEN.to(dtype) + 0, differences=False)
    assert listed.as_before("ids", IDS, differences=False)
    assert listed.as_before("frozen", torch.zeros(2, 2), differences=True)


@pytest.mark.parametrize(
    ("name", "sent", "differences"),
    [
        ("frozen", FROZEN + torch.tensor([[0.0, 0.0], [0.0, 1e-6]]), False),
        ("frozen", FROZEN.flip(0), False),
        ("frozen", FROZEN.view(4), False),
        ("frozen", FROZEN.double() * (1 + 1e-12), False),
        ("frozen", torch.full((2, 2), 1e-30), True),
        ("ids", IDS.flip(0), False),
        ("ids", IDS.float(), False),
        ("w", torch.zeros(2), False),
        ("other", torch.zeros(2), False),
    ],
)
def test_anything_else_is_not(listed: RoundTensors, name: str, sent: torch.Tensor, differences: bool) -> None:
    """Another number, order, shape or type, or a tensor that nobody listed."""
    assert not listed.as_before(name, sent, differences=differences)


@pytest.mark.parametrize("content", [None, "", "{}", '{"trained": 1}'])
def test_a_missing_or_damaged_list_is_an_error(tmp_path: Path, content: str | None) -> None:
    """Nobody then knows what the round trained."""
    if content is not None:
        (tmp_path / TENSORS).write_text(content)
    with pytest.raises(SnapshotError, match="nobody knows"):
        read_round_tensors(tmp_path)
