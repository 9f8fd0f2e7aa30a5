"""The judgement on one round before it is transmitted.

A leak blocks, a round that protects passes, and whatever cannot be judged blocks.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.audit.rounds import Trainers
from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.rounds import finish, judge_round, open_round
from leakaudit.capture.rounds import registry
from leakaudit.capture.worker.shared_process import SharedSideProcess
from leakaudit.config.audit import PluginSpec
from leakaudit.gate.verdict import Status
from leakaudit.results.files import load_results
from leakaudit.storage.held_rounds import held_rounds
from leakaudit.storage.spool import Spool
from tests.support import tiny, tiny_trainer

SCALE = 20.0
"""Noise over the root mean square of the update: no attack of the battery finds a word in it."""


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Leave no audit open for the next test."""
    yield
    finish()


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no side process: rounds stay in the spool."""
    monkeypatch.setattr(SharedSideProcess, "ensure", lambda self: False)


def trainer_round(folder: Path, **config: Any) -> Any:
    """Train one round of one step; return the Trainer of a former `tiny.bert()`."""
    audit = LeakAuditCallback(tiny_trainer.audit_config(folder, unit="round", **config))
    trainer = tiny_trainer.make_trainer(folder, audit, model=tiny.bert(), max_steps=1)
    audit.attach(trainer)
    trainer.train()
    return trainer


def with_noise(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights after a round with Gaussian noise on the update."""
    before = dict(tiny.bert().named_parameters())
    after = {name: weight.detach() for name, weight in model.named_parameters()}
    change = torch.cat([(weight - before[name].detach()).flatten() for name, weight in after.items()])
    sigma = SCALE * float(change.square().mean().sqrt())
    random = torch.Generator().manual_seed(1)
    return {name: weight + sigma * torch.randn(weight.shape, generator=random) for name, weight in after.items()}


def test_a_leak_blocks_and_declared_noise_lets_the_next_round_through(tmp_path: Path) -> None:
    """The attacks apply to both rounds; from the noise they recover nothing.

    The same noise without a declaration shows nothing: an attack that knew it might succeed.
    """
    noise = PluginSpec(name="gaussian-noise", options={"scale": SCALE})
    trainer_round(tmp_path, shipped_defense=noise)
    leaked = judge_round(tmp_path / "audit")
    assert (leaked.status, leaked.passes, leaked.round) == (Status.FAIL, False, 0)
    trainer = trainer_round(tmp_path, shipped_defense=noise)
    kept = open_round(tmp_path / "audit")
    assert kept is not None
    kept.sent(with_noise(trainer.model))
    clean = judge_round(tmp_path / "audit")
    assert (clean.status, clean.passes, clean.round) == (Status.PASS, True, 1), clean.reason
    again = judge_round(tmp_path / "audit")
    assert again.status is Status.ERROR and "No round" in again.reason
    finish(tmp_path / "audit")
    trainer = trainer_round(tmp_path)
    kept = open_round()
    assert kept is not None
    kept.sent(with_noise(trainer.model))
    assert judge_round().status is Status.INCONCLUSIVE


def test_what_cannot_be_judged_is_blocked(tmp_path: Path, idle: None) -> None:
    """No audit, no side process, no round on the disk, a policy that cannot be read."""
    assert judge_round(tmp_path / "audit").status is Status.ERROR
    trainer_round(tmp_path)
    assert judge_round(policy=tmp_path / "none.yaml").status is Status.ERROR
    nobody = judge_round()
    assert nobody.status is Status.ERROR and not nobody.passes and nobody.round == 0
    trainer_round(tmp_path)
    audit = registry.audit_in()
    assert audit is not None and audit.tasks.wait(20)
    assert audit.last is not None
    audit.last.kept = lambda: False
    assert "was not kept" in judge_round().reason


def test_one_command_of_the_message_attacks_a_round_that_time_ran_out_for(tmp_path: Path, idle: None) -> None:
    """As it stands there, after the training has ended."""
    folder = tmp_path / "with a space"
    trainer_round(folder)
    late = judge_round(timeout_s=0.5)
    assert late.status is Status.ERROR
    finish()
    program, *arguments = shlex.split(late.reason.split("`")[1])
    assert program == "leakaudit"
    subprocess.run([sys.executable, "-m", "leakaudit", *arguments], check=True, capture_output=True, timeout=300)
    assert [step.id for step in load_results(folder / "audit").steps] == ["st-000000"]


def test_a_judgement_that_takes_too_long_is_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that never answers does not hold up the client for ever."""
    monkeypatch.setattr(SharedSideProcess, "ensure", lambda self: True)
    trainer_round(tmp_path)
    late = judge_round(timeout_s=0.5)
    assert late.status is Status.ERROR and "not finished after 0.5 s" in late.reason
    monkeypatch.setattr(SharedSideProcess, "ensure", lambda self: False)


def test_a_round_waits_for_what_is_sent_as_long_as_the_client_lives(tmp_path: Path, idle: None) -> None:
    """A worker that took the round earlier would judge another update."""
    trainer_round(tmp_path)
    audit = registry.audit_in()
    assert audit is not None and audit.tasks.wait(20)
    (held,) = held_rounds(audit.spool.root)
    os.utime(held, (0, 0))
    Trainers(*Spool.open(audit.spool.root)).release_held()
    assert held_rounds(audit.spool.root) == [held]


def test_a_round_is_not_judged_without_what_is_sent(tmp_path: Path, idle: None) -> None:
    """The worker has the round already, so it would judge what the training produced."""
    trainer = trainer_round(tmp_path)
    audit, kept = registry.audit_in(), open_round()
    assert audit is not None and kept is not None and audit.tasks.wait(20)
    (held,) = held_rounds(audit.spool.root)
    held.rename(held.with_suffix(".ready"))
    kept.sent(with_noise(trainer.model))
    judged = judge_round()
    assert judged.status is Status.ERROR and "does not have what is sent" in judged.reason


def test_a_crash_of_the_judgement_is_a_block(tmp_path: Path, idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that goes wrong inside reaches the caller, and nothing passes."""
    trainer_round(tmp_path)
    monkeypatch.setattr(SharedSideProcess, "ensure", lambda self: 1 / 0)
    crashed = judge_round()
    assert crashed.status is Status.ERROR and "ZeroDivisionError" in crashed.reason
    monkeypatch.setattr(SharedSideProcess, "ensure", lambda self: False)
