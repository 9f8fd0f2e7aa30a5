"""Several trainings of a client are one audit: its life in one process."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.rounds import finish, open_round
from leakaudit.capture.rounds import registry
from leakaudit.capture.worker.shared_process import SharedSideProcess
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.errors import SnapshotError
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.files import load_results
from leakaudit.results.journal import load_journal
from leakaudit.results.not_audited import NOT_AUDITED
from leakaudit.results.schema import Results, VerificationStatus
from leakaudit.storage.rounds_file import read_rounds
from leakaudit.storage.snapshots import read_snapshot
from tests.support import tiny, tiny_trainer
from tests.support.round_client import train_round


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Leave no audit open for the next test."""
    yield
    finish()


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no side process: rounds stay in the spool."""
    monkeypatch.setattr(SharedSideProcess, "ensure", lambda self: False)


def trainer_round(folder: Path, *, model: Any = None, **more: Any) -> Any:
    """Train one round with a new Trainer, model and callback; return the Trainer."""
    audit = LeakAuditCallback(tiny_trainer.audit_config(folder, unit="round", **more.pop("config", {})))
    trainer = tiny_trainer.make_trainer(folder, audit, model=model or tiny.bert(), **{"max_steps": 2, **more})
    audit.attach(trainer)
    trainer.train()
    return trainer


def held(folder: Path) -> list[str]:
    """Return the names of the snapshots in the spool, when they are on the disk."""
    audit = registry.audit_in(folder / "audit")
    assert audit is not None and audit.tasks.wait(20)
    return sorted(path.name for path in audit.spool.entries())


# ---------------------------------------------------------------------- one audit


def test_three_trainers_are_one_audit_with_one_worker_and_one_verdict(tmp_path: Path) -> None:
    """Each round has a new Trainer, model, optimizer and callback, as in a client.

    No round waits for the side process, which takes seconds to start.
    """
    workers, ends = set(), []
    for _ in range(3):
        start = time.monotonic()
        trainer_round(tmp_path)
        ends.append(time.monotonic() - start)
        audit = registry.audit_in(tmp_path / "audit")
        assert audit is not None
        workers.add(audit.side.pid)
    begun = time.monotonic()
    finish(tmp_path / "audit")
    results = load_results(tmp_path / "audit")
    assert [step.step for step in results.steps] == [0, 1, 2]
    assert all(step.verification.status is VerificationStatus.VERIFIED for step in results.steps)
    assert not results.run.interrupted and results.coverage.total_steps == 3
    assert len(workers) == 1 and None not in workers
    assert (tmp_path / "audit" / "report.html").is_file() and (tmp_path / "audit" / "verdict.json").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("audit")] == ["audit"]
    assert min(ends) < time.monotonic() - begun  # the attacks took longer than a round


def test_watch_counts_a_block_as_a_round(tmp_path: Path, idle: None) -> None:
    """The steps inside are the local steps of one difference of weights."""
    for number in range(2):
        train_round(tmp_path, number, steps=3)
    assert held(tmp_path) == ["000000.ready", "000001.held"]
    snapshot = read_snapshot(tmp_path / "audit" / "spool" / "000000.ready")
    facts = snapshot.observation.facts
    assert (facts.view, facts.local_steps, snapshot.provenance.step) == ("delta", 3, 0)


@pytest.mark.filterwarnings("ignore")
def test_fit_of_lightning_is_a_round(tmp_path: Path, idle: None) -> None:
    """Two `fit` calls of two Lightning trainers are two rounds of one audit."""
    lightning = pytest.importorskip("lightning.pytorch")
    from leakaudit.callbacks.lightning_trainer import LeakAuditCallback as Callback

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.bert()
            self.tokenizer = tiny.bert_tokenizer()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    tokenizer = tiny.bert_tokenizer()
    rows: Any = [
        {**tokenizer(text, return_tensors="pt"), "labels": torch.tensor([0])} for text in tiny_trainer.TEXTS[:2]
    ]
    for _ in range(2):
        callback = Callback(tiny_trainer.audit_config(tmp_path, unit="round"))
        lightning.Trainer(
            max_epochs=1, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(Module(), torch.utils.data.DataLoader(rows, batch_size=None))  # fmt: skip
    assert held(tmp_path) == ["000000.ready", "000001.held"]
    assert read_snapshot(tmp_path / "audit" / "spool" / "000000.ready").observation.facts.local_steps == 2


def test_training_is_the_same_with_and_without_the_audit(tmp_path: Path, idle: None) -> None:
    """Not one bit of the weights differs."""
    watched = trainer_round(tmp_path, optim="adamw_torch").model.state_dict()
    plain = tiny_trainer.make_trainer(tmp_path, model=tiny.bert(), max_steps=2, optim="adamw_torch")
    plain.train()
    assert all(torch.equal(weight, watched[name]) for name, weight in plain.model.state_dict().items())


def test_a_round_that_is_not_due_is_counted_and_not_recorded(tmp_path: Path, idle: None) -> None:
    """`every_n_steps` counts rounds."""
    for _ in range(3):
        trainer_round(tmp_path, config={"every_n_steps": 2})
    assert held(tmp_path) == ["000000.ready", "000002.held"]
    rounds = read_rounds(tmp_path / "audit" / "spool")
    assert (rounds.begun, rounds.ended, rounds.totals.kept) == (3, 3, 2)


def test_a_round_that_raises_is_not_kept_and_the_next_one_is(tmp_path: Path, idle: None) -> None:
    """What was not sent is not audited; the number of the round is used."""

    class Failing(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 1:
                raise RuntimeError("out of luck")
            return super().training_step(*args, **kwargs)

    with pytest.raises(RuntimeError, match="out of luck"):
        trainer_round(tmp_path, kind=Failing)
    assert open_round() is None
    trainer_round(tmp_path)
    assert held(tmp_path) == ["000001.held"]


def test_another_configuration_or_model_is_refused_and_training_goes_on(
    tmp_path: Path, idle: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The audit of the folder goes on without that round, and is not marked."""
    trainer_round(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert trainer_round(tmp_path, config={"seed": 7}).state.global_step == 2
        assert trainer_round(tmp_path, model=tiny.bert(num_hidden_layers=1)).state.global_step == 2
    said = caplog.text
    assert "another configuration (`seed`)" in said and "trains another model" in said
    trainer_round(tmp_path)
    assert held(tmp_path) == ["000000.ready", "000001.held"]
    assert not list(tmp_path.rglob(NOT_AUDITED)) and not (tmp_path / "audit-2").exists()


def test_rounds_beyond_the_plan_are_not_audited(tmp_path: Path, idle: None, caplog: pytest.LogCaptureFixture) -> None:
    """With `rounds: 1` the second one is trained without an audit."""
    trainer_round(tmp_path, config={"rounds": 1})
    trainer_round(tmp_path, config={"rounds": 1})
    assert "all 1 rounds of the audit" in caplog.text
    assert held(tmp_path) == ["000000.ready"]


def test_after_finish_the_folder_takes_a_new_audit(tmp_path: Path, idle: None) -> None:
    """The earlier one moves aside, as with steps."""
    trainer_round(tmp_path, config={"schedule": "deferred", "at_end": "leave"})
    finish(tmp_path / "audit")
    for path in (tmp_path / "audit" / "spool").glob("*.ready"):
        path.rename(path.with_suffix(".kept"))  # as a worker does with `keep_snapshots`
    trainer_round(tmp_path)
    assert held(tmp_path) == ["000000.held"]
    assert (tmp_path / "audit.1" / "spool" / "000000.kept").is_dir()


def test_rounds_with_the_inline_schedule_are_refused() -> None:
    """A model of a later round is another object, and none is at hand between two."""
    with pytest.raises(ValueError, match="side process"):
        AuditConfig(unit="round", schedule="inline")
    with pytest.raises(ValueError, match="unit: round"):
        AuditConfig(rounds=3)


# ---------------------------------------------------------------------- what was sent


def sent_by(trainer: Any, change: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a Trainer's model after a change."""
    return {name: change(weight.detach().clone()) for name, weight in trainer.model.named_parameters()}


def results_of(folder: Path) -> Results:
    """End an audit and return its results."""
    finish(folder / "audit")
    return load_results(folder / "audit")


def test_what_was_sent_is_a_second_column_and_what_the_policy_judges(tmp_path: Path) -> None:
    """One round was sent as produced, one with declared noise, one changed unseen."""
    noise = PluginSpec(name="gaussian-noise", options={"sigma": 1.0})
    config = {"shipped_defense": noise, "controls": 0}
    arguments: dict[str, Any] = {"learning_rate": 0.1, "config": config}
    random = torch.Generator().manual_seed(0)

    def noisy(weight: torch.Tensor) -> torch.Tensor:
        return weight + 2 * 0.1 * torch.randn(weight.shape, generator=random)  # sigma times learning rate times K

    for change in (torch.clone, noisy, torch.sign):
        trainer = trainer_round(tmp_path, **arguments)
        kept = open_round(tmp_path / "audit")
        assert kept is not None
        kept.sent(sent_by(trainer, change))
    results = results_of(tmp_path)
    status = [step.verification.status for step in results.steps]
    assert status == [VerificationStatus.VERIFIED] * 3
    stamps = [None if step.sent is None else step.sent.status for step in results.steps]
    assert stamps == [VerificationStatus.VERIFIED, VerificationStatus.NOISED, VerificationStatus.UNVERIFIABLE]
    undefended = results.steps[0].sent
    assert undefended is not None and undefended.noiseless == ("gaussian-noise",)
    assert results.run.battery.defenses == ("none", AS_SENT)
    leaked = {(a.step, a.defense) for a in results.attempts if "all_words" in a.events}
    assert leaked == {("st-000000", "none"), ("st-000000", AS_SENT), ("st-000001", "none"), ("st-000002", "none")}
    entries = load_journal(tmp_path / "audit" / "journal.jsonl")
    assert len(entries) == 3 * 2 * 2


def test_weights_in_half_precision_leak_their_words(tmp_path: Path) -> None:
    """Nobody declared the rounding; the attack reads the rows that changed."""
    trainer = trainer_round(tmp_path, learning_rate=0.1, config={"controls": 0})
    kept = open_round(tmp_path / "audit")
    assert kept is not None
    kept.sent(sent_by(trainer, torch.Tensor.half))
    results = results_of(tmp_path)
    (step,) = results.steps
    assert step.sent is not None and step.sent.status is VerificationStatus.VERIFIED
    assert {a.defense for a in results.attempts if "all_words" in a.events} == {"none", AS_SENT}


def test_rounds_that_were_sent_as_produced_have_one_column(tmp_path: Path, idle: None) -> None:
    """Saying so, and saying nothing, is the same."""
    trainer = trainer_round(tmp_path)
    kept = open_round()
    assert kept is not None and set(kept.names) == {name for name, _ in trainer.model.named_parameters()}
    kept.sent(trainer.model.state_dict())
    assert held(tmp_path) == ["000000.ready"]
    snapshot = read_snapshot(tmp_path / "audit" / "spool" / "000000.ready")
    assert snapshot.sent is not None
    assert all(torch.equal(update, snapshot.observation.update[name]) for name, update in snapshot.sent.update.items())


def test_weights_that_are_none_of_the_rounds_are_refused(tmp_path: Path, idle: None) -> None:
    """The error names what came and what was expected; the round stays open."""
    trainer = trainer_round(tmp_path)
    kept = open_round()
    assert kept is not None
    with pytest.raises(SnapshotError, match=r"none of 1 sent tensors.*'x'"):
        kept.sent({"x": torch.zeros(1)})
    name = kept.names[0]
    with pytest.raises(SnapshotError, match="another shape"):
        kept.sent({name: torch.zeros(1)})
    kept.sent(trainer.model.state_dict())
    with pytest.raises(SnapshotError, match="said already"):
        kept.sent(trainer.model.state_dict())
