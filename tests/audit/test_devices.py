"""The side process's device does not disturb training; GPUs are made up here."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leakaudit.audit.devices import CONTEXT_BYTES, MARGIN, NEED, Card, best_card, check_device, choose_device
from leakaudit.errors import ConfigError

GIB = 2**30


def card(index: int, free: float, total: float = 80.0) -> Card:
    return Card(index, int(total * GIB), int(free * GIB))


@pytest.mark.parametrize(
    ("cards", "snapshot", "expected"),
    [
        ([card(0, 10), card(1, 79)], 1.0, 1),  # an idle one beside the trainer's
        ([card(0, 70), card(1, 79), card(2, 79.5)], 1.0, 2),  # the emptiest of those
        ([card(0, 10), card(1, 60)], 1.0, 0),  # the other one is at work for somebody: the trainer's own has room
        ([card(0, 3), card(1, 60)], 1.0, None),  # it has none
        ([card(0, 3), card(1, 15.9, total=16.0)], 6.0, None),  # idle, and too small
        ([card(1, 60)], 1.0, None),
        ([], 1.0, None),
    ],
)
def test_which_gpu(cards: list[Card], snapshot: float, expected: int | None) -> None:
    """For a trainer on the first."""
    found = best_card(cards, "cuda:0", int(snapshot * GIB))
    assert (None if found is None else found.index) == expected


def test_the_trainers_own_gpu_needs_room_to_spare() -> None:
    """By half of what the audit needs, to the byte."""
    need = int(MARGIN * (NEED * GIB + CONTEXT_BYTES))
    assert best_card([Card(0, 80 * GIB, need)], "cuda", GIB) is not None
    assert best_card([Card(0, 80 * GIB, need - 1)], "cuda", GIB) is None


def test_a_trainer_on_the_cpu_leaves_busy_gpus_alone() -> None:
    """An idle one is taken."""
    assert best_card([card(0, 60)], "cpu", GIB) is None
    assert best_card([card(0, 79)], "cpu", GIB) == card(0, 79)


def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says what to use instead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", beside="cuda:0") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device cuda:1 was asked for, but torch finds no GPU; use auto or cpu"):
        choose_device("cuda:1")


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Make two GPUs up that the driver counts in another order than torch.

    The driver has a third one that is not visible.
    """
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU-bbb, 81920, 81000'\necho 'GPU-hidden, 81920, 81900'\necho 'GPU-aaa, 81920, 20480'\n"
    )
    tool.chmod(0o755)
    limits: dict[str, Any] = {}
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=("aaa", "bbb")[i]))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, i: limits.update(share=share, index=i)
    )
    return limits


def test_cards_are_known_by_their_uuid(two_cards: dict[str, Any]) -> None:
    """Torch counts the visible ones, the driver's tool all of them."""
    assert choose_device("auto", beside="cuda:0", snapshot=GIB) == torch.device("cuda", 1)
    assert two_cards == {}, "another GPU needs no limit"


def test_on_the_trainers_gpu_the_audit_runs_out_of_memory_first(two_cards: dict[str, Any]) -> None:
    """The trainer's own card is shared, and torch gets a memory limit."""
    assert choose_device("auto", beside="cuda:1", snapshot=GIB) == torch.device("cuda", 1)
    assert two_cards["index"] == 1
    assert two_cards["share"] == pytest.approx(MARGIN * (NEED * GIB + CONTEXT_BYTES) / (80 * GIB))


def test_a_worker_of_its_own_takes_a_gpu_as_ever(two_cards: dict[str, Any]) -> None:
    """Nobody trains beside it."""
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1", beside="cuda:0") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match=r"device cuda:2 was asked for, but torch finds 2 GPU\(s\), counted from 0"):
        choose_device("cuda:2")


@pytest.mark.parametrize("trouble", ["missing", "fails", "hangs", "nonsense"])
def test_a_driver_that_does_not_answer_means_the_cpu(
    two_cards: dict[str, Any], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Better slow than in the way."""

    def run(*args: Any, **options: Any) -> Any:
        if trouble == "fails":
            raise subprocess.CalledProcessError(9, "nvidia-smi")
        if trouble == "hangs":
            raise subprocess.TimeoutExpired("nvidia-smi", 10)
        return SimpleNamespace(stdout="No devices were found\n")

    monkeypatch.setattr("shutil.which", lambda name: None if trouble == "missing" else name)
    monkeypatch.setattr("subprocess.run", run)
    assert choose_device("auto", beside="cuda:0", snapshot=GIB) == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:x", "mps", ""])
def test_what_is_no_device_is_refused(wanted: str) -> None:
    """Before anything is loaded onto it."""
    with pytest.raises(ConfigError, match="expected auto, cpu, cuda or cuda:1"):
        check_device(wanted)
    for fine in ("auto", "cpu", "cuda", "cuda:3"):
        check_device(fine)
