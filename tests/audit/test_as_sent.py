"""Weights as they were sent are verified against what the training produced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leakaudit.audit.as_sent import SentUpdate, copies_of_produced, sent_of
from leakaudit.callbacks.rounds import finish
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.rounds import registry
from leakaudit.capture.worker.shared_process import SharedSideProcess
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import PluginSpec
from leakaudit.models.structure import word_embedding
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.journal import JournalEntry
from leakaudit.results.schema import VerificationStatus
from leakaudit.storage.snapshots import read_snapshot
from tests.support import tiny
from tests.support.factories import attempt, step
from tests.support.mini_trainer import config

TEXT = "the old dog chased a cat ."
Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start no side process, and leave no audit open."""
    monkeypatch.setattr(SharedSideProcess, "ensure", lambda self: False)
    yield
    finish()


def sent(
    folder: Path,
    change: Callable[[Weights, Weights], Weights],
    *,
    optimizer: Any = torch.optim.SGD,
    rate: float = 0.1,
    differences: bool = False,
    beside: int = 0,
    **options: Any,
) -> tuple[SentUpdate, set[int], set[int]]:
    """Train a round and send what `change` makes of the weights before and after it.

    Returns:
        What was sent, the ids of the words whose rows changed in it, and those of the batch.
    """
    model, tokenizer = tiny.bert(), tiny.bert_tokenizer()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    moving = optimizer(model.parameters(), lr=rate)
    audit = config(folder, unit="round", every_n_steps=1, out_dir=folder / "audit", **options)
    batch = tokenizer([TEXT], return_tensors="pt")
    with watch(model, moving, tokenizer=tokenizer, config=audit):
        model(**batch, labels=torch.tensor([1])).loss.backward()
        moving.step()
    kept, opened = registry.open_round(), registry.audit_in()
    assert kept is not None and opened is not None
    after = {n: p.detach() for n, p in model.named_parameters()}
    kept.sent(change(before, after), differences=differences, beside=beside)
    assert opened.tasks.wait(20) and not kept.lost
    snapshot = read_snapshot(next((folder / "audit" / "spool").glob("0*")))
    seen = snapshot.observation
    client = ClientStep(seen.model, snapshot.truth, snapshot.recipe, seen.facts)
    found = sent_of(snapshot, seen, client)
    assert found is not None
    table = word_embedding(seen.model)
    rows = found.seen.update[str(table)]
    return found, set(rows.any(dim=1).nonzero().flatten().tolist()), set(batch["input_ids"].flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("optimizer", "rate"), [(torch.optim.SGD, 0.1), (torch.optim.AdamW, 1e-3)])
def test_weights_in_half_precision_show_the_words_of_the_batch(
    tmp_path: Path, dtype: torch.dtype, optimizer: Any, rate: float
) -> None:
    """Compared with the rounded weights before, only the batch's rows changed."""
    half = lambda _, after: {n: w.to(dtype) for n, w in after.items()}
    options = {"weight_decay": 0.0} if optimizer is torch.optim.AdamW else {}
    found, rows, words = sent(tmp_path, half, optimizer=lambda p, lr: optimizer(p, lr=lr, **options), rate=rate)
    assert found.stamp.status is VerificationStatus.VERIFIED, found.stamp
    assert rows == words
    assert [one.parameters["of"] for one in found.shipped] == ["weights"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_differences_in_half_precision_are_verified(tmp_path: Path, dtype: torch.dtype) -> None:
    """In the units of the wire, whatever the learning rate."""
    half = lambda before, after: {n: (after[n] - before[n]).to(dtype) for n in after}
    found, rows, words = sent(tmp_path, half, differences=True, rate=0.03)
    assert found.stamp.status is VerificationStatus.VERIFIED and rows == words
    assert [one.parameters["of"] for one in found.shipped] == ["differences"]


def test_some_weights_may_stay_in_full_precision(tmp_path: Path) -> None:
    """As NVFlare's quantizer and many clients leave norms and biases."""
    mixed = lambda _, after: {n: w.half() if w.dim() > 1 else w for n, w in after.items()}
    found, rows, words = sent(tmp_path, mixed)
    assert found.stamp.status is VerificationStatus.VERIFIED and rows == words


def test_a_declared_rounding_is_the_one_that_is_seen(tmp_path: Path) -> None:
    """A declaration in the units of the update does no harm."""
    half = lambda _, after: {n: w.half() for n, w in after.items()}
    declared = PluginSpec(name="round", options={"dtype": "fp16"})
    found, *_ = sent(tmp_path, half, shipped_defense=declared)
    assert found.stamp.status is VerificationStatus.VERIFIED and len(found.shipped) == 1


def test_other_weights_in_half_precision_are_an_undeclared_change(tmp_path: Path) -> None:
    """Rounding explains no other difference."""
    other = lambda _, after: {n: (w + 0.01).half() for n, w in after.items()}
    found, *_ = sent(tmp_path, other)
    assert found.stamp.status is VerificationStatus.UNVERIFIABLE


def test_a_parameter_that_is_not_sent_is_not_sent(tmp_path: Path) -> None:
    """FedBN keeps its norms; what is sent is as the training made it."""
    without = lambda _, after: {n: w for n, w in after.items() if "LayerNorm" not in n}
    found, rows, words = sent(tmp_path, without)
    assert found.stamp.status is VerificationStatus.VERIFIED and rows == words
    assert "trained parameters were not sent" in found.stamp.note and found.shipped == ()
    assert all("LayerNorm" in name for name in found.seen.facts.frozen)


@pytest.mark.parametrize("norm", [0.01, 100.0])
def test_clip_and_noise_are_declared_in_the_units_of_the_wire(tmp_path: Path, norm: float) -> None:
    """As Flower's `LocalDpMod` has them, whatever the learning rate."""
    random = torch.Generator().manual_seed(0)

    def private(before: Weights, after: Weights) -> Weights:
        difference = {n: after[n] - before[n] for n in after}
        length = torch.stack([d.norm() for d in difference.values()]).norm()
        factor = min(1.0, norm / float(length))
        return {
            n: before[n] + factor * d + 0.02 * torch.randn(d.shape, generator=random) for n, d in difference.items()
        }

    declared = PluginSpec(name="clip-noise", options={"bound": norm, "sigma": 0.02})
    found, *_ = sent(tmp_path, private, rate=0.03, shipped_defense=declared)
    assert found.stamp.status is VerificationStatus.NOISED, found.stamp
    assert found.seen.noise_sigma == pytest.approx(0.02 / 0.03)


def test_a_clipped_difference_without_noise_is_verified(tmp_path: Path) -> None:
    """The weights move a tenth as far, and no further, because the norm says so."""
    declared = PluginSpec(name="clip-noise", options={"bound": 0.01})

    def clipped(before: Weights, after: Weights) -> Weights:
        length = torch.stack([(after[n] - before[n]).norm() for n in after]).norm()
        return {n: before[n] + 0.01 / length * (after[n] - before[n]) for n in after}

    found, rows, words = sent(tmp_path, clipped, shipped_defense=declared)
    assert found.stamp.status is VerificationStatus.VERIFIED and rows == words
    assert found.seen.resized


def test_what_leaves_beside_the_weights_makes_them_unverifiable(tmp_path: Path) -> None:
    """Nobody knows what is in other tensors; what came back from the weights counts."""
    found, rows, words = sent(tmp_path, lambda _, after: after, beside=2)
    assert found.stamp.status is VerificationStatus.UNVERIFIABLE and rows == words
    assert "2 other tensors left with it" in found.stamp.note


def test_an_audit_that_was_stopped_does_not_call_the_produced_update_the_sent_one() -> None:
    """Only a step that was sent as produced has the same attempts twice."""
    changed = step(0).model_copy(update={"sent": step(0).verification})
    made = [JournalEntry(attempt=attempt(i, name)) for i in (0, 1) for name in ("span", "tag")]
    made.append(JournalEntry(attempt=attempt(0, "span", AS_SENT)))
    copies = [copy.attempt for copy in copies_of_produced(made, [changed, step(1)])]
    assert copies == [attempt(1, "span", AS_SENT), attempt(1, "tag", AS_SENT)]
