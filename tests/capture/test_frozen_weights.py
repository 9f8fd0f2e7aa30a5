"""Weights that no optimizer moves are kept once a run.

That holds whatever happens to the snapshots that refer to them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.audit.verification import verify
from leakaudit.audit.worker import run_worker
from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.snapshot import BASE, OBSERVED
from leakaudit.client.step import ClientStep
from leakaudit.errors import SnapshotDamagedError
from leakaudit.models.lora import add_lora
from leakaudit.storage import frozen_weights
from leakaudit.storage.encryption import new_identity
from leakaudit.storage.retention import purge
from leakaudit.storage.snapshot_files import read_tensors
from leakaudit.storage.snapshots import read_snapshot
from leakaudit.storage.spool import Spool
from tests.support import tiny

TOKENIZER = tiny.bert_tokenizer()
Each = Callable[[int, nn.Module, Any], None]


def with_adapters(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a tiny BERT of which the adapters and the head are trained."""
    torch.manual_seed(0)
    model = tiny.bert(initializer_range=0.2)
    add_lora(model, 2, ("query", "value"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name or name.startswith("classifier"))
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).train()


def train(folder: Path | None, model: nn.Module, each: Each = lambda step, model, audit: None, **config: Any) -> Any:
    """Train eight steps with plain SGD; return weights before kept steps.

    If there is a folder, every second step is kept.
    """
    torch.manual_seed(0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    settings = {"out_dir": folder, "every_n_steps": 2, "schedule": "deferred", "at_end": "leave", "attacks": ["idlg"]}
    before = []
    with ExitStack() as stack:
        audit = None
        if folder is not None:
            audit = stack.enter_context(watch(model, optimizer, tokenizer=TOKENIZER, config=settings | config))
        for step in range(8):
            if step % 2 == 0:
                before.append({name: p.detach().clone() for name, p in model.named_parameters()})
            words = TOKENIZER(
                [("the old dog", "a red fish", "one big house", "two rivers")[step // 2]], return_tensors="pt"
            )
            model(**words, labels=torch.tensor([step % 2])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if audit is not None and audit._run is not None:
                assert audit._run.recorder.written()
            each(step, model, (audit, optimizer))
    return before


MANIFEST_BYTES = 60_000
"""Room for the description of one snapshot, which a tiny model's tensors do not outweigh."""


def snapshots(folder: Path) -> list[Path]:
    return sorted((folder / "spool").glob("*.ready"))


def stored(folder: Path, name: str = OBSERVED) -> set[str]:
    return {key.partition("/")[2] for key in read_tensors(folder / name) if key.startswith("weights/")}


def same(model: nn.Module, weights: dict[str, Tensor]) -> bool:
    return all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_frozen_weights_are_on_the_disk_once_and_training_is_the_same(tmp_path: Path) -> None:
    """One file with one link a snapshot; each snapshot reads as before and verifies."""
    audited, plain = with_adapters(), with_adapters()
    before = train(tmp_path / "audit", audited)
    train(None, plain)
    assert same(audited, dict(plain.named_parameters()))
    found = snapshots(tmp_path / "audit")
    assert len(found) == 4 and len({(path / BASE).stat().st_ino for path in found}) == 1
    assert (found[0] / BASE).stat().st_nlink == 4, "what the trainer held on to is gone with it"
    assert "bert.encoder.layer.0.intermediate.dense.weight" not in stored(found[1])
    for path, weights in zip(found, before, strict=True):
        snapshot = read_snapshot(path)
        assert same(snapshot.observation.model, weights)
        assert verify(ClientStep.of(snapshot), snapshot.observation.update).status.value == "verified"


def test_the_limit_counts_what_is_written_so_adapters_of_a_large_model_are_kept(tmp_path: Path) -> None:
    """There is room for the frozen weights once and for some steps.

    If three times all weights had to fit, no step of such a run would be kept.
    """
    model = with_adapters()
    weights = 4 * sum(p.numel() for p in model.parameters())
    train(tmp_path / "audit", model, max_spool_gb=(2.0 * weights + 4 * MANIFEST_BYTES) / 1e9)
    assert len(snapshots(tmp_path / "audit")) == 4


def test_the_last_snapshot_takes_the_frozen_weights_with_it(tmp_path: Path) -> None:
    """A removed snapshot leaves them to the others.

    When all snapshots are removed, nothing is left behind.
    """
    train(tmp_path / "audit", with_adapters())
    spool = Spool(tmp_path / "audit" / "spool")
    alone = spool.used_bytes()
    for path in snapshots(tmp_path / "audit")[:-1]:
        shutil.rmtree(path)
    (last,) = snapshots(tmp_path / "audit")
    moved = last.rename(tmp_path / "elsewhere")
    assert read_snapshot(moved).provenance.step == 6
    assert alone > spool.used_bytes() == 0
    assert not (spool.root / "base").exists()


def test_snapshots_that_a_worker_removes_at_once_find_the_weights_again(tmp_path: Path) -> None:
    """During training the trainer keeps them in the spool.

    If somebody removes them there, they are written again.
    """

    def remove(step: int, model: nn.Module, others: Any) -> None:
        spool = others[0]._run.spool
        if step < 6 and (claimed := spool.queue.claim()):
            spool.queue.discard_or_keep(claimed, keep=False)
        if step == 3:
            shutil.rmtree(spool.root / "base")

    before = train(tmp_path / "audit", with_adapters(), remove)
    (last,) = snapshots(tmp_path / "audit")
    assert same(read_snapshot(last).observation.model, before[3])


def test_a_parameter_that_becomes_trained_is_in_the_snapshot_from_then_on(tmp_path: Path) -> None:
    """Gradual unfreezing."""
    name = "bert.encoder.layer.1.output.dense.weight"

    def thaw(step: int, model: nn.Module, others: Any) -> None:
        if step == 3:
            parameter = model.get_parameter(name)
            others[1].add_param_group({"params": [parameter.requires_grad_()]})

    before = train(tmp_path / "audit", with_adapters(), thaw)
    found = snapshots(tmp_path / "audit")
    assert [name in stored(path) for path in found] == [False, False, True, True]
    for path, weights in zip(found, before, strict=True):
        snapshot = read_snapshot(path)
        assert same(snapshot.observation.model, weights)
        assert (name in snapshot.observation.update) == (path in found[2:])
        assert verify(ClientStep.of(snapshot), snapshot.observation.update).status.value == "verified"


@pytest.mark.parametrize("through", ["data", "no_grad"])
def test_a_frozen_weight_that_changes_is_seen_however_it_is_changed(tmp_path: Path, through: str) -> None:
    """The weights change in a way that PyTorch does not count.

    The user averages weights, or merges adapters and takes them out again, by writing to `.data`.
    """
    name = "bert.encoder.layer.1.output.dense.weight"

    def change(step: int, model: nn.Module, others: Any) -> None:
        with torch.no_grad():
            parameter = model.get_parameter(name)
            (parameter.data if through == "data" else parameter)[0, 0].add_(1e-3)

    before = train(tmp_path / "audit", with_adapters(), change)
    for path, weights in zip(snapshots(tmp_path / "audit"), before, strict=True):
        assert same(read_snapshot(path).observation.model, weights)


WEIGHT = "bert.encoder.layer.1.output.dense.weight"
BETWEEN = (0, 2)
"""An entry of that weight that is in no sample of four words."""


def with_few_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let samples have some words only, as those of large weights do."""
    monkeypatch.setattr(frozen_weights, "SAMPLE", 4)


def add(model: nn.Module, value: float) -> None:
    """Change one entry in a way that PyTorch does not count."""
    model.get_parameter(WEIGHT).data[BETWEEN].add_(value)


def by_optimizer(model: nn.Module) -> None:
    parameter = model.get_parameter(WEIGHT)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1).step()
    parameter.grad = None


def by_counted_write(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter(WEIGHT)[BETWEEN].add_(1)


def just_before_writing(step: int, change: Callable[[nn.Module], None]) -> Each:
    """Return a hook that changes a frozen weight between a step and its writing."""

    def each(now: int, model: nn.Module, others: Any) -> None:
        if now != 0:
            return
        writer = others[0]._run.recorder.writer
        real = writer.write

        def write(kept: Any) -> None:
            if kept.step == step:
                change(model)
            real(kept)

        writer.write = write

    return each


def holds_right_weights(folder: Path, before: list[dict[str, Tensor]], steps: list[int]) -> None:
    """Fail unless just these steps are kept, each with the weights that it saw."""
    found = snapshots(folder)
    assert [int(path.stem) for path in found] == steps
    for path in found:
        assert same(read_snapshot(path).observation.model, before[int(path.stem) // 2])


@pytest.mark.parametrize(
    "change", [by_optimizer, by_counted_write, lambda model: add(model, 1)], ids=["optimizer", "no_grad", "data"]
)
def test_a_weight_that_changes_before_the_step_is_written_refuses_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module], None]
) -> None:
    """Nobody knows whether the step saw the change; later steps hold their own copy."""
    with_few_sampled(monkeypatch)
    before = train(tmp_path / "audit", with_adapters(), just_before_writing(2, change))
    holds_right_weights(tmp_path / "audit", before, [0, 4, 6])
    assert WEIGHT in stored(snapshots(tmp_path / "audit")[1])


@pytest.mark.parametrize(("entry", "steps"), [((0, 0), [0, 2, 4, 6]), (BETWEEN, [0, 4, 6])], ids=["sampled", "between"])
def test_an_uncounted_change_between_two_kept_steps_makes_no_false_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: tuple[int, int], steps: list[int]
) -> None:
    """In a sampled word no step is lost; elsewhere the writer refuses one."""
    with_few_sampled(monkeypatch)

    def change(step: int, model: nn.Module, others: Any) -> None:
        if step == 1:
            model.get_parameter(WEIGHT).data[entry].add_(1)

    before = train(tmp_path / "audit", with_adapters(), change)
    holds_right_weights(tmp_path / "audit", before, steps)


def test_a_change_that_is_taken_back_before_the_writing_is_found_by_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncounted, in no sampled word, there at the step and gone at its writing.

    Marks, sample and checksum are those of the first kept step, so the snapshot has another weight than the step. It gives another update.
    """
    with_few_sampled(monkeypatch)
    was: list[Tensor] = []

    def restore(model: nn.Module) -> None:
        model.get_parameter(WEIGHT).data[BETWEEN].copy_(was[0])

    put_back = just_before_writing(2, restore)

    def change(step: int, model: nn.Module, others: Any) -> None:
        put_back(step, model, others)
        if step == 1:
            was.append(model.get_parameter(WEIGHT).data[BETWEEN].clone())
            add(model, 8)

    before = train(tmp_path / "audit", with_adapters(), change)
    first, second, *_ = (read_snapshot(path) for path in snapshots(tmp_path / "audit"))
    assert not same(second.observation.model, before[1]), "if this is found, say so in docs/decisions/digests.md"
    assert verify(ClientStep.of(first), first.observation.update).status.value == "verified"
    assert verify(ClientStep.of(second), second.observation.update).status.value == "mismatch"


def test_after_the_first_kept_step_the_training_thread_reads_a_sample_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's thread reads all bytes, alone."""
    read: list[tuple[str, bool]] = []
    real = frozen_weights.checksum_of

    def checksum_of(tensor: Tensor, *, one_thread: bool = False) -> Tensor:
        read.append((threading.current_thread().name, one_thread))
        return real(tensor, one_thread=one_thread)

    def forget(step: int, model: nn.Module, others: Any) -> None:
        if step == 1:
            read.clear()

    monkeypatch.setattr(frozen_weights, "checksum_of", checksum_of)
    train(tmp_path / "audit", with_adapters(), forget)
    assert set(read) == {("leakaudit-writer", True)}


def test_a_disk_without_hard_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each snapshot is whole by itself."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    before = train(tmp_path / "audit", with_adapters())
    found = snapshots(tmp_path / "audit")
    assert [(path / BASE).stat().st_nlink for path in found] == [1] * 4
    assert all(path.stat().st_mode & 0o77 == 0 for folder in found for path in folder.iterdir())
    assert same(read_snapshot(found[2]).observation.model, before[2])


def test_frozen_weights_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    """Before any of them is used."""
    train(tmp_path / "audit", with_adapters())
    first, second, *_ = snapshots(tmp_path / "audit")
    (first / BASE).unlink()
    with pytest.raises(SnapshotDamagedError, match=f"{BASE} is missing"):
        read_snapshot(first)
    with (second / BASE).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(SnapshotDamagedError, match=f"{BASE}: its digest"):
        read_snapshot(second)


def test_frozen_weights_are_encrypted_like_the_rest(tmp_path: Path) -> None:
    """Once, to the same keys."""
    public, private = new_identity()
    before = train(tmp_path / "audit", with_adapters(), encrypt_to=[public])
    found = snapshots(tmp_path / "audit")
    assert {path.name for path in found[0].iterdir()} == {
        "snapshot.json", "observed.safetensors.age", "truth.safetensors.age", "base.safetensors.age",
    }  # fmt: skip
    assert len({(path / f"{BASE}.age").stat().st_ino for path in found}) == 1
    assert same(read_snapshot(found[3], [private]).observation.model, before[3])


def test_an_update_is_kept_in_its_own_type_and_read_without_loss(tmp_path: Path) -> None:
    """bfloat16 gradients take two bytes an entry.

    Attacks get the same numbers in float32.
    """
    gradients: list[dict[str, Tensor]] = []
    model = with_adapters(torch.bfloat16)
    hooks = [
        p.register_post_accumulate_grad_hook(
            lambda p, n=n: gradients[-1].__setitem__(n, p.grad.detach().float().clone())
        )
        for n, p in model.named_parameters()
        if p.requires_grad
    ]
    gradients.append({})
    train(tmp_path / "audit", model, lambda step, *_: gradients.append({}))
    for path, expected in zip(snapshots(tmp_path / "audit"), gradients[::2], strict=False):
        raw = read_tensors(path / OBSERVED)
        assert {t.dtype for key, t in raw.items() if key.startswith("update/")} == {torch.bfloat16}
        found = read_snapshot(path).observation.update
        assert found.keys() == expected.keys()
        assert all(found[n].dtype == torch.float32 and torch.equal(found[n], expected[n]) for n in expected)
    assert hooks


def test_the_overhead_counts_the_writer_the_memory_and_the_disk(tmp_path: Path) -> None:
    """Not only what the training thread waited for."""
    train(tmp_path / "audit", with_adapters())
    spool = Spool(tmp_path / "audit" / "spool")
    totals = spool.totals()
    assert totals is not None and totals.overhead.writer_s and totals.overhead.writer_s > 0
    described = sum((path / "snapshot.json").stat().st_size for path in snapshots(tmp_path / "audit"))
    assert totals.overhead.disk_mb == pytest.approx((spool.used_bytes() - described) / 1e6, rel=0.5)
    assert 0 < (totals.overhead.memory_mb or 0) < (totals.overhead.disk_mb or 0)


@pytest.mark.parametrize("by", ["worker", "purge"])
def test_what_a_killed_trainer_held_on_to_is_removed(tmp_path: Path, by: str) -> None:
    """They are removed with the last snapshot, by a worker or by `purge`.

    While the trainer lives they stay.
    """
    train(tmp_path / "audit", with_adapters())
    spool = Spool(tmp_path / "audit" / "spool")
    (spool.root / "finished.json").unlink()
    (spool.root / "base").mkdir()
    os.link(snapshots(tmp_path / "audit")[0] / BASE, spool.root / "base" / BASE)
    spool.tidy()
    assert (spool.root / "base" / BASE).exists(), "this process is the trainer"
    audit = json.loads((spool.root / "audit.json").read_text())
    (spool.root / "audit.json").write_text(json.dumps(audit | {"trainer_pid": 2**22 + 1}))
    if by == "worker":
        run_worker(spool.root, once=True)
    else:
        purge(Spool.open(spool.root)[0], now=datetime.now(UTC), older_than=None)
    assert not (spool.root / "base").exists()
