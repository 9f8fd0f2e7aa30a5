"""The device on which attacks compute, chosen so that training is not disturbed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from leakaudit.config.audit import DEVICE_PATTERN
from leakaudit.errors import ConfigError

IDLE_SHARE = 0.05
"""Share of used memory below which a GPU counts as idle.

Our choice: a driver and a desktop use 1 to 3 % of the memory, a training run far more.
"""

NEED = 3
"""Memory of an audit, as a multiple of a snapshot's size (weights and update).

The audit holds weights and update, a second gradient and the attack's own tensors, and as much again for candidates.
"""
CONTEXT_BYTES = 768 * 2**20
"""Memory that a second process takes on a GPU before it computes anything.

Context and libraries take several hundred megabytes.
"""
MARGIN = 1.5
"""Free memory that the trainer's own GPU must have, as a multiple of the need.

Training must not run out of memory on its longest batch.
"""


@dataclass(frozen=True)
class Card:
    """One visible GPU and its memory in bytes."""

    index: int
    """Number of the GPU in torch."""
    total: int
    free: int

    @property
    def idle(self) -> bool:
        """Whether so little memory is used that no process can be computing on it."""
        return self.total - self.free < IDLE_SHARE * self.total


def check_device(wanted: str) -> None:
    """Refuse a string that names no device.

    Raises:
        ConfigError: it is neither auto nor cpu nor cuda with a number.
    """
    if not re.fullmatch(DEVICE_PATTERN, wanted):
        raise ConfigError(f"device {wanted!r}: expected auto, cpu, cuda or cuda:1")


def choose_device(wanted: str, *, beside: str | None = None, snapshot: int = 0) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:1`.

    Args:
        wanted: a device; `auto` chooses a GPU if one has enough free memory.
        beside: device of a trainer, such as `cuda:0`; None if no trainer runs.
        snapshot: size of weights and update in bytes.

    Raises:
        ConfigError: the device is a GPU that does not exist.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if wanted == "auto":
            return torch.device("cpu")
        raise ConfigError(f"device {wanted} was asked for, but torch finds no GPU; use auto or cpu")
    if wanted != "auto":
        count = torch.cuda.device_count()
        if ":" in wanted and int(wanted.partition(":")[2]) >= count:
            raise ConfigError(
                f"device {wanted} was asked for, but torch finds {count} GPU(s), counted from 0; use auto or cpu"
            )
        return torch.device(wanted)
    if beside is None:
        return torch.device("cuda")
    return _limited(best_card(_cards(), beside, snapshot), beside, snapshot)


def best_card(cards: Sequence[Card], beside: str, snapshot: int) -> Card | None:
    """Return the GPU for an audit; None if no GPU has enough free memory.

    An idle GPU that the trainer does not use is preferred to the trainer's own.

    Other busy GPUs are never used: another rank or another user computes there.

    >>> busy, idle = Card(0, total=80 * 2**30, free=10 * 2**30), Card(1, total=80 * 2**30, free=79 * 2**30)
    >>> best_card([busy, idle], "cuda:0", snapshot=2**30).index
    1
    >>> best_card([busy], "cuda:0", snapshot=2**30).index
    0
    >>> best_card([busy], "cuda:0", snapshot=2 * 2**30) is None
    True
    """
    need = NEED * snapshot + CONTEXT_BYTES
    own = _index(beside)
    idle = [card for card in cards if card.index != own and card.idle and card.free >= need]
    if idle:
        return max(idle, key=lambda card: card.free)
    return next((card for card in cards if card.index == own and card.free >= MARGIN * need), None)


def _index(device: str) -> int | None:
    """Return the number of a GPU; None for the CPU."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else None


def _limited(card: Card | None, beside: str, snapshot: int) -> torch.device:
    """Return the device of a card, with a memory limit on the trainer's own GPU.

    An audit that exceeds the limit runs out of memory before training does.
    """
    if card is None:
        return torch.device("cpu")
    if card.index == _index(beside):
        fraction = min(1.0, MARGIN * (NEED * snapshot + CONTEXT_BYTES) / card.total)
        torch.cuda.set_per_process_memory_fraction(fraction, card.index)
    return torch.device("cuda", card.index)


def _cards() -> list[Card]:
    """Return the visible GPUs with the memory that `nvidia-smi` reports.

    A question through CUDA would use hundreds of megabytes on each GPU.
    """
    memory = _memory_by_uuid()
    cards = []
    for index in range(torch.cuda.device_count()):
        uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
        if uuid in memory:
            total, free = memory[uuid]
            cards.append(Card(index, total, free))
    return cards


def _memory_by_uuid() -> Mapping[str, tuple[int, int]]:
    """Return UUID -> total and free bytes of every GPU; empty without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    query = [tool, "--query-gpu=uuid,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_memory(printed)


def parse_memory(printed: str) -> Mapping[str, tuple[int, int]]:
    r"""Parse the output of nvidia-smi: UUID, total and free memory in MiB.

    Each line describes one GPU. Incomplete lines are left out. The result is in bytes.

    >>> parse_memory("GPU-3d2c, 81559, 80992\nGPU-77aa, [N/A], [N/A]")
    {'3d2c': (85520809984, 84926267392)}
    """
    found = {}
    for line in printed.splitlines():
        uuid, *numbers = [part.strip() for part in line.split(",")]
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            found[uuid.removeprefix("GPU-")] = (int(numbers[0]) << 20, int(numbers[1]) << 20)
    return found
