"""A loop on tables is audited for labels, and does not notice."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.errors import ConfigError
from leakaudit.watch_arrays import ClassifierWatch


def _net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def _train(
    net: nn.Module, watch: ClassifierWatch | None, steps: int = 6, poison: int | None = None
) -> dict[str, Tensor]:
    """Train for a few steps and return the weights; a fixed seed, so that a disturbed run would differ."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.train()
    for step in range(steps):
        inputs, labels = torch.randn(8, 6), torch.randint(3, (8,))
        if step == poison:
            inputs = inputs * float("nan")
        if watch is None:
            nn.functional.cross_entropy(net(inputs), labels).backward()
        else:
            with watch(inputs, labels):
                nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_the_loop_is_audited_and_ends_where_it_would_have_ended(tmp_path: Path) -> None:
    """Dropout and batch normalisation on: every step is verified, and the weights are those of an unwatched run."""
    watch = ClassifierWatch(
        _net(), num_labels=3, config={"out_dir": str(tmp_path / "a"), "every_n_steps": 2, "controls": 1}
    )
    net: Any = watch._net
    watched, plain = _train(net, watch), _train(_net(), None)
    assert all(torch.equal(watched[name], plain[name]) for name in plain)
    report = watch.finish()
    assert report is not None and report.exists() and (watch.steps, watch.kept) == (6, 3)
    results = json.loads((tmp_path / "a" / "results.json").read_text())
    assert {s["verification"]["status"] for s in results["steps"]} == {"verified"}
    ilrg = [a["scores"]["label_accuracy"]["value"] for a in results["attempts"] if a["attack"] == "ilrg"]
    assert len(ilrg) == 3 and min(ilrg) > 0.7
    assert results["overhead"]["blocked_s"] > 0


def test_a_step_that_overflowed_is_left_out_and_training_goes_on(tmp_path: Path, caplog: Any) -> None:
    """One warning says which."""
    watch = ClassifierWatch(
        _net(), num_labels=3, config={"out_dir": str(tmp_path / "a"), "every_n_steps": 1, "controls": 0}
    )
    with caplog.at_level(logging.WARNING):
        _train(watch._net, watch, steps=1, poison=0)
    assert watch.kept == 0 and "step 0 was not audited: the update is not finite" in caplog.text
    assert watch.finish() is None


def test_anything_unforeseen_switches_it_off(tmp_path: Path, caplog: Any) -> None:
    """A disk that is a file: one warning with the type of the error, and no second attempt."""
    (tmp_path / "file").write_text("")
    watch = ClassifierWatch(_net(), num_labels=3, config={"out_dir": str(tmp_path / "file"), "every_n_steps": 1})
    with caplog.at_level(logging.WARNING):
        weights = _train(watch._net, watch, steps=3)
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert caplog.text.count("leakaudit stops after a") == 1 and str(tmp_path) not in caplog.text


def test_a_wrong_configuration_is_refused_before_training() -> None:
    """As everywhere: with the key."""
    with pytest.raises(ConfigError, match="every_n_step"):
        ClassifierWatch(_net(), num_labels=3, config={"every_n_step": 3})
