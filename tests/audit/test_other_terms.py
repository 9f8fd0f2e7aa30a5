"""What clients do to a round beside training: the stamp, and its cause in words."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from leakaudit.audit.stamp import stamp_of
from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.rounds import finish
from leakaudit.capture.rounds import registry
from leakaudit.capture.worker.shared_process import SharedSideProcess
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.results.schema import Verification, VerificationStatus
from leakaudit.storage.snapshots import read_snapshot
from tests.support import round_changes as clients
from tests.support import tiny, tiny_trainer

UNVERIFIABLE, MISMATCH = VerificationStatus.UNVERIFIABLE, VerificationStatus.MISMATCH

CAUSES = {
    clients.ProximalLoss: "step 2 of 3 the loss had a penalty on the distance from the first weights of the round, as FedProx with mu = 1;",
    clients.ProximalGradient: "step 2 of 3 the loop changed .* added 1 times the distance from the first weights",
    clients.ControlInGradients: "step 1 of 3 .* the same vector in every optimizer step, as the control variates of SCAFFOLD",
    clients.ControlInWeights: "the loop changed the weights .*between optimizer steps, first before optimizer step 2 of 3",
    clients.ClippedByValue: "step 1 of 3 .* cut every entry to at most 0.001, as clipping by value",
    clients.ClippedByNorm: r"step 1 of 3 .* multiplied them by 0\.\d+, as clipping by norm",
    clients.Unscaled: "step 1 of 3 .* multiplied them by 0.000977, as .* a GradScaler that the audit was not told of",
    clients.Noised: "step 1 of 3 the loop changed the gradients after the backward pass in a way that is not known here",
    clients.NeverZeroed: "step 2 of 3 a gradient of an earlier step was still there, as without `zero_grad`",
    clients.Decayed: "step 1 of 3 the loss had a penalty on the weights, whose gradient is 0.02 times their weights",
    clients.SparseHead: "step 1 of 3 the loss had a penalty on the weights, whose gradient is 0.01 times their signs",
    clients.Bounded: "the loop cut the weights to at most 0.05 between optimizer steps, first before optimizer step 2 of 3",
    clients.Averaged: "the loop pulled the weights back to the first ones of the round by 0.1 of the distance between",
    clients.Sharpened: "the forward passes of optimizer step 1 of 3 saw different weights, as in SAM",
}
"""Client -> its cause, as a pattern."""


def stamp(snapshot: Snapshot) -> Verification:
    """Return the stamp of a kept round."""
    return stamp_of(snapshot, ClientStep.of(snapshot))


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, pytest.param(torch.optim.AdamW, marks=pytest.mark.integrations)]
)
@pytest.mark.parametrize("client", CAUSES, ids=lambda client: client.__name__)
def test_a_changed_round_is_unverifiable_and_its_note_names_the_cause(
    tmp_path: Path, client: type[clients.Client], optimizer: type[torch.optim.Optimizer]
) -> None:
    """What is found in such a round is a leak; a failure is no evidence."""
    changed = type(
        client.__name__, (client,), {"optimizer": optimizer, "rate": 0.1 if optimizer is torch.optim.SGD else 1e-3}
    )
    (snapshot,) = changed().rounds(tmp_path)
    found = stamp(snapshot)
    assert found.status is UNVERIFIABLE
    assert re.search(CAUSES[client], found.note), found.note


def test_every_round_has_its_own_first_weights(tmp_path: Path) -> None:
    """The distance of FedProx begins anew with the weights that the server sends."""
    rounds = clients.ProximalLoss().rounds(tmp_path, count=2)
    assert len(rounds) == 2
    assert all("as FedProx with mu = 1" in stamp(snapshot).note for snapshot in rounds)


@pytest.mark.parametrize("client", [clients.Client, clients.Distilled])
def test_a_loss_of_the_models_outputs_is_verified(tmp_path: Path, client: type[clients.Client]) -> None:
    """Whatever the loss makes of them."""
    (snapshot,) = client().rounds(tmp_path)
    assert stamp(snapshot).status is VerificationStatus.VERIFIED


@pytest.mark.parametrize(
    "client", [clients.ClippedByValue, clients.Noised, clients.Decayed, clients.ControlInGradients]
)
def test_a_changed_gradient_of_one_step_has_a_cause(tmp_path: Path, client: type[clients.Client]) -> None:
    """The gradients after the backward pass show that the batch is the kept one."""
    snapshots = client().rounds(tmp_path, observe="update", local_steps=1)
    assert len(snapshots) == 3
    for snapshot in snapshots:
        found = stamp(snapshot)
        assert found.status is UNVERIFIABLE and "in the optimizer step" in found.note


@pytest.mark.parametrize("client", [clients.Client, clients.ProximalLoss, clients.ControlInWeights, clients.Noised])
def test_an_exchanged_update_stays_a_mismatch(tmp_path: Path, client: type[clients.Client]) -> None:
    """The record is not of that update."""
    one, two = client().rounds(tmp_path, count=2)
    forged = replace(one, observation=replace(one.observation, update=two.observation.update))
    assert stamp(forged).status is MISMATCH
    half = {name: (two if "encoder" in name else one).observation.update[name] for name in one.observation.update}
    assert stamp(replace(one, observation=replace(one.observation, update=half))).status is MISMATCH


@pytest.mark.parametrize("client", [clients.Client, clients.ProximalLoss, clients.ClippedByValue, clients.Decayed])
def test_an_exchanged_batch_stays_a_mismatch(tmp_path: Path, client: type[clients.Client]) -> None:
    """The gradients that the backward pass left are not those of that batch."""
    one, two = client().rounds(tmp_path, count=2)
    truth = replace(one.truth, micro_batches=two.truth.micro_batches)
    assert stamp(replace(one, truth=truth)).status is MISMATCH


def test_a_record_of_another_round_explains_nothing(tmp_path: Path) -> None:
    """Neither does a record that is missing."""
    one, two = clients.ProximalLoss().rounds(tmp_path, count=2)
    for trace in (two.truth.trace, {}):
        assert stamp(replace(one, truth=replace(one.truth, trace=trace))).status is MISMATCH


class Controls(TrainerCallback):
    """SCAFFOLD in a Trainer, after each optimizer step."""

    def on_step_end(self, *_arguments: Any, model: Any = None, **_more: Any) -> None:
        """Change the weights."""
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(1e-3 * torch.randn_like(p))


def test_a_change_after_the_last_optimizer_step_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer's round is over when the training ends."""
    monkeypatch.setattr(SharedSideProcess, "ensure", lambda self: False)
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path, unit="round"))
    trainer = tiny_trainer.make_trainer(tmp_path, audit, model=tiny.bert(), max_steps=1)
    trainer.add_callback(Controls())
    audit.attach(trainer)
    trainer.train()
    held = registry.audit_in(tmp_path / "audit")
    assert held is not None and held.tasks.wait(20)
    (snapshot,) = [read_snapshot(entry) for entry in held.spool.entries()]
    finish()
    found = stamp(snapshot)
    assert found.status is UNVERIFIABLE
    assert "the loop changed the weights" in found.note and "after the last optimizer step" in found.note
