"""A step that is computed again draws what it drew; the GPU is made up here."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from leakaudit.client.replay import restored_random_state


def test_a_gpu_whose_state_was_not_kept_draws_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the two computations of a simulated step would have other masks."""
    seeds: list[int] = []
    here = contextlib.nullcontext
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: here())
    monkeypatch.setattr(torch.cuda, "device", lambda device: here())
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 1, 2)]
    before = torch.get_rng_state()
    for state in states:
        with restored_random_state({"cpu": state}, torch.device("cuda:0")):
            pass
    torch.set_rng_state(before)
    assert seeds[0] == seeds[1] != seeds[2]


def test_a_kept_state_of_a_gpu_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no seed is invented."""
    said: list[Any] = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: pytest.fail("a seed was set"))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: said.append((state, device)))
    with restored_random_state({"cuda": torch.ones(3)}, torch.device("cuda:0")):
        pass
    ((state, device),) = said
    assert torch.equal(state, torch.ones(3)) and device == torch.device("cuda:0")
