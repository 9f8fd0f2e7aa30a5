"""What the callback keeps is the step that the Trainer makes.

The rows are those of the list of traps
that a naive callback falls into (the number is in each test's name)."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from transformers import (
    BertForQuestionAnswering,
    BertForSequenceClassification,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
)

from leakaudit.audit.audit import Audit
from leakaudit.audit.verification import verify
from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.capture.context import OFF_SWITCH
from leakaudit.capture.observing.optimizers import base_optimizer
from leakaudit.capture.results_log import ResultsLog
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.config.audit import PluginSpec
from leakaudit.models.tensors import state_of
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attacks
from leakaudit.results.journal import load_journal
from leakaudit.results.schema import VerificationStatus
from leakaudit.storage.snapshot_files import write_tensors
from leakaudit.storage.snapshots import read_manifest, read_snapshot, write_snapshot
from leakaudit.storage.spool import Spool
from tests.support import tiny, tiny_trainer
from tests.support.tiny_trainer import Probe, Tamper, distance, gradient, kept, make_trainer, stamp, train

VERIFIED = VerificationStatus.VERIFIED


def assert_verified(snapshot: Any, tolerance: float = 1e-5) -> None:
    """Recompute the step and hold it against what was kept."""
    found = stamp(snapshot)
    assert found.status is VERIFIED, found
    assert found.relative_error is not None and found.relative_error < tolerance


# ---------------------------------------------------------------------- which gradient, which weights, which batch


def test_row_2_the_update_is_the_one_the_optimizer_gets(tmp_path: Path) -> None:
    """The kept gradient is bit by bit what another callback sees.

    It is not missing, not zero and not of another step.
    """
    probe = Probe()
    found = train(tmp_path, probe)
    assert list(found) == [0, 1, 2]
    for step, snapshot in found.items():
        assert distance(snapshot.observation.update, probe.updates[step]) == 0.0
        assert all(bool(torch.isfinite(g).all()) for g in snapshot.observation.update.values())
        assert_verified(snapshot)


def test_row_3_the_weights_are_those_before_the_step(tmp_path: Path) -> None:
    """At a learning rate of 1, the weights after the step explain nothing."""
    probe = Probe()
    found = train(tmp_path, probe, learning_rate=1.0)
    for step, snapshot in found.items():
        weights = dict(snapshot.observation.model.named_parameters())
        assert all(torch.equal(weights[name].detach(), value) for name, value in probe.weights[step].items())
    late = ClientStep.of(found[0])
    late.model.load_state_dict(probe.weights[1], strict=False)
    assert verify(late, found[0].observation.update).status is VerificationStatus.MISMATCH


def test_row_4_later_changes_do_not_reach_the_snapshot(tmp_path: Path) -> None:
    """User code that edits the batch in place, and the step itself, find copies only."""

    class Careless(Trainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            prepared = super()._prepare_inputs(inputs)
            self.seen = {name: value.clone() for name, value in prepared.items()}
            return prepared

        def floating_point_ops(self, inputs: Any) -> int:
            for value in inputs.values():  # called after the step's backward pass, with the very tensors
                value.zero_()
            return 0

    found = train(tmp_path, kind=Careless)
    assert len(found) == 3
    for snapshot in found.values():
        assert int(snapshot.truth.micro_batches[0].inputs["input_ids"].sum()) > 0
        assert_verified(snapshot)


def test_row_5_every_micro_batch_of_a_ragged_window_is_kept(tmp_path: Path) -> None:
    """Eight batches of one in windows of three: three, three, two."""
    found = train(
        tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=3, num_train_epochs=1, max_steps=-1
    )
    assert [len(snapshot.truth.micro_batches) for snapshot in found.values()] == [3, 3, 2]
    for snapshot in found.values():
        assert_verified(snapshot)


@pytest.mark.parametrize("windows", [2, 4])
def test_row_6_the_scale_of_the_loss_is_the_trainers(tmp_path: Path, windows: int) -> None:
    """A BERT classifier ignores the item count: the update is a sum of means."""
    found = train(tmp_path, gradient_accumulation_steps=windows, per_device_train_batch_size=1)
    for snapshot in found.values():
        assert_verified(snapshot)
        model = snapshot.observation.model
        batches = [batch.inputs for batch in snapshot.truth.micro_batches]
        own = gradient(model, {n: p.detach() for n, p in model.named_parameters()}, batches)
        assert distance(snapshot.observation.update, own) < 1e-5


@pytest.mark.parametrize("attach", [True, False])
def test_row_6_a_window_without_labels_to_count_is_divided_by_its_micro_batches(tmp_path: Path, attach: bool) -> None:
    """Question answering has labels of other names.

    So the Trainer finds no items and divides by the window.
    """
    torch.manual_seed(0)
    rows: Any = tiny_trainer.Rows(tiny.bert_tokenizer(), classes=0)
    rows.rows = [{**row, "start_positions": 1, "end_positions": 2} for row in rows.rows]
    model = BertForQuestionAnswering(cast(Any, tiny.bert().config))
    found = train(tmp_path, model=model, rows=rows, gradient_accumulation_steps=2, attach=attach)
    assert len(found) == 3
    for snapshot in found.values():
        assert snapshot.observation.facts.loss_divisor == 2.0
        assert_verified(snapshot)


@pytest.mark.parametrize("attach", [True, False])
def test_row_6_a_language_model_divides_by_the_items_of_the_window(tmp_path: Path, attach: bool) -> None:
    """GPT-2's loss uses the item count.

    So the update is neither the sum nor the mean of the micro-batches' means.
    """
    tokenizer = tiny.gpt2_tokenizer()

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        padded = tokenizer.pad([{"input_ids": row["input_ids"]} for row in rows], return_tensors="pt")
        labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
        return {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"], "labels": labels}

    rows = tiny_trainer.Rows(tokenizer, classes=0)
    found = train(
        tmp_path,
        model=tiny.gpt2_lm(),
        tokenizer=tokenizer,
        rows=rows,
        collator=collate,
        gradient_accumulation_steps=2,
        remove_unused_columns=False,
        attach=attach,
    )
    assert len(found) == 3
    for snapshot in found.values():
        assert snapshot.observation.facts.task == "causal-lm"
        assert all(batch.num_items is not None for batch in snapshot.truth.micro_batches)
        assert_verified(snapshot)


@pytest.mark.parametrize("attach", [True, False])
def test_row_7_a_loss_of_the_trainers_own_is_replayed(tmp_path: Path, attach: bool) -> None:
    """The Trainer takes the labels out before the forward pass.

    Only `attach` sees them; the update can be computed without them.
    """
    found = train(tmp_path, label_smoothing_factor=0.1, gradient_accumulation_steps=2, attach=attach)
    for snapshot in found.values():
        assert (snapshot.truth.labels() is not None) == attach
        assert all("labels" not in batch.inputs for batch in snapshot.truth.micro_batches)
        assert_verified(snapshot)


def test_row_7_a_loss_of_the_users_own_is_replayed(tmp_path: Path) -> None:
    """`compute_loss_func` is the user's code; gradients of the logits are enough."""

    def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return torch.nn.functional.cross_entropy(outputs.logits, labels) + outputs.logits.square().mean()

    found = train(tmp_path, trainer_options={"compute_loss_func": own_loss}, gradient_accumulation_steps=2)
    for snapshot in found.values():
        assert snapshot.truth.labels() is not None
        assert_verified(snapshot)


def test_row_8_the_update_is_the_clipped_one(tmp_path: Path) -> None:
    """Its norm is the bound, and the bound is among the public facts."""
    found = train(tmp_path, max_grad_norm=1e-3)
    for snapshot in found.values():
        squares = sum(float(g.double().square().sum()) for g in snapshot.observation.update.values())
        assert squares**0.5 == pytest.approx(1e-3, rel=1e-2)
        assert snapshot.observation.facts.max_grad_norm == 1e-3
        assert_verified(snapshot)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_row_10_an_overflowed_step_is_not_kept_and_leaves_nothing_behind(
    tmp_path: Path, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The step counts as not finite; the next one has its own batch only."""
    restore = {}

    class Heal(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            if state.global_step == 1:
                restore.update({n: p.detach().clone() for n, p in model.named_parameters()})
            elif state.global_step == 2:
                model.load_state_dict(restore, strict=False)

    found = train(tmp_path, Tamper(1, lambda g: g.view(-1)[0].fill_(bad)), Heal(), max_steps=4)
    assert list(found) == [0, 2, 3]
    assert [len(snapshot.truth.micro_batches) for snapshot in found.values()] == [1, 1, 1]
    assert "step 1 was not kept: its update is not finite" in caplog.text
    for snapshot in found.values():
        assert_verified(snapshot)


def test_row_18_evaluation_is_not_recorded(tmp_path: Path) -> None:
    """Forward passes of an evaluation are not recorded, with or without `attach`."""
    for attach in (True, False):
        folder = tmp_path / str(attach)
        tokenizer = tiny.bert_tokenizer()
        found = train(
            folder,
            attach=attach,
            eval_strategy="steps",
            eval_steps=1,
            trainer_options={"eval_dataset": tiny_trainer.Rows(tokenizer)},
        )
        assert [len(snapshot.truth.micro_batches) for snapshot in found.values()] == [1, 1, 1]
        for snapshot in found.values():
            assert_verified(snapshot)


@pytest.mark.parametrize("attach", [True, False])
def test_row_18_a_loss_of_two_forward_passes_is_one_batch(tmp_path: Path, attach: bool) -> None:
    """R-Drop: both passes are part of the step, with masks of their own.

    The second pass adds no sequence.
    """

    class Twice(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return 0.3 * model(**inputs).loss + model(**inputs).loss ** 2

    found = train(tmp_path, kind=Twice, attach=attach, model=tiny.bert(dropout=0.1))
    for snapshot in found.values():
        assert [batch.repeated_pass for batch in snapshot.truth.micro_batches] == [False, True]
        assert len(snapshot.truth.sequences()) == 2
        assert "1 forward passes saw a batch that another one had seen" in snapshot.recipe.note
        assert_verified(snapshot)


def test_row_19_dropout_is_repeated_from_the_kept_state(tmp_path: Path) -> None:
    """The step is verified only with the state of the random generators."""
    one_class = tiny_trainer.Rows(tiny.bert_tokenizer(), classes=1)
    found = train(tmp_path, model=tiny.bert(dropout=0.1), gradient_accumulation_steps=2, rows=one_class)
    for snapshot in found.values():
        assert snapshot.observation.facts.dropout
        assert_verified(snapshot)
        forgot = Truth(tuple(dataclasses.replace(batch, rng={}) for batch in snapshot.truth.micro_batches))
        step = ClientStep(snapshot.observation.model, forgot, snapshot.recipe, snapshot.observation.facts)
        assert verify(step, snapshot.observation.update).status is VerificationStatus.UNVERIFIABLE


def test_row_20_the_model_is_rebuilt_from_its_live_configuration(tmp_path: Path) -> None:
    """Packed sequences are told apart.

    A setting that the Trainer changes decides whether they attend to each other.
    """
    tokenizer = tiny.gpt2_tokenizer()
    found = train(
        tmp_path,
        model=tiny.gpt2_lm(),
        tokenizer=tokenizer,
        rows=tiny_trainer.Rows(tokenizer, classes=0),
        collator=DataCollatorWithFlattening(),
        per_device_train_batch_size=3,
        remove_unused_columns=False,
        max_steps=2,
    )
    texts = {tuple(tokenizer(text)["input_ids"]) for text in tiny_trainer.TEXTS}
    for snapshot in found.values():
        assert snapshot.truth.micro_batches[0].inputs["input_ids"].shape[0] == 1
        assert len(snapshot.truth.sequences()) == 3
        assert set(snapshot.truth.sequences()) <= texts
        assert_verified(snapshot)


def test_row_21_autocast_is_replayed(tmp_path: Path) -> None:
    """A bf16 step is verified in bf16, and says so.

    In float32 the error would be five thousandths.
    """
    found = train(tmp_path, bf16=True)
    for snapshot in found.values():
        assert snapshot.observation.facts.dtype == "bfloat16"
        assert snapshot.recipe.autocast == "bf16"
        assert stamp(snapshot).status is VERIFIED


def test_a_model_with_bfloat16_weights_is_verified(tmp_path: Path) -> None:
    """The weights come back bit by bit and the update in float32."""
    probe = Probe()
    found = train(tmp_path, probe, model=tiny.bert().to(torch.bfloat16))
    for step, snapshot in found.items():
        assert snapshot.observation.facts.dtype == "bfloat16"
        assert distance(snapshot.observation.update, probe.updates[step]) == 0.0
        assert {g.dtype for g in snapshot.observation.update.values()} == {torch.float32}
        weights = dict(snapshot.observation.model.named_parameters())
        assert all(torch.equal(weights[n].detach(), w.to(weights[n].dtype)) for n, w in probe.weights[step].items())
        assert stamp(snapshot).status is VERIFIED


def test_row_25_prefetched_batches_are_not_mistaken_for_the_steps(tmp_path: Path) -> None:
    """A run with two loader processes is resumed in the middle of an epoch.

    Its windows have two micro-batches.
    """
    common: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "dataloader_num_workers": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "model": tiny.bert(dropout=0.1),
    }
    first = train(tmp_path, max_steps=1, **common)
    assert_verified(first[0])
    shutil.rmtree(tmp_path / "audit" / "taken")  # the folder is used again
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = make_trainer(tmp_path, audit, **{**common, "max_steps": 3, "model": tiny.bert(dropout=0.1)})
    audit.attach(trainer)
    with tiny_trainer.without_side_process():
        trainer.train(resume_from_checkpoint=True)
    found = kept(audit)
    assert list(found) == [1, 2]
    assert [len(snapshot.truth.micro_batches) for snapshot in found.values()] == [2, 2]
    for snapshot in found.values():
        assert_verified(snapshot)


def test_row_29_a_second_run_of_the_same_trainer_keeps_each_due_step_once(tmp_path: Path) -> None:
    """Into the same folder, which the first one's files have left by then."""
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = make_trainer(tmp_path, audit, max_steps=2)
    audit.attach(trainer)
    audit.attach(trainer)
    folders = []
    for _ in range(2):
        with tiny_trainer.without_side_process():
            trainer.train()
        found = kept(audit)
        assert list(found) == [0, 1]
        assert [len(snapshot.truth.micro_batches) for snapshot in found.values()] == [1, 1]
        for snapshot in found.values():
            assert_verified(snapshot)
        folders.append(audit.folder)
        shutil.rmtree(tmp_path / "audit" / "taken")
    assert folders == [tmp_path / "audit"] * 2
    assert (tmp_path / "audit.1" / "spool" / "finished.json").is_file()


def test_a_run_after_one_that_is_through_takes_its_folder_and_says_where_that_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that a gate on `out_dir` judges the latest run."""
    for _ in range(2):
        audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path, max_snapshots=1))
        trainer = make_trainer(tmp_path, audit, max_steps=1)
        with tiny_trainer.without_side_process():
            trainer.train()
        for waiting in (tmp_path / "audit" / "spool").glob("*.ready"):
            shutil.rmtree(waiting)  # as a worker that is through with it leaves it
    assert audit.folder == tmp_path / "audit"
    assert (tmp_path / "audit.1" / "spool" / "finished.json").is_file()
    lines = [line for line in capsys.readouterr().err.splitlines() if "leakaudit: report: " in line]
    assert "earlier audit" not in lines[0]
    assert any("; the earlier audit there is now in audit.1" in line for line in lines[1:])


@pytest.mark.parametrize("attach", [True, False])
def test_row_29_a_run_after_one_that_raised_keeps_each_due_step_once(tmp_path: Path, attach: bool) -> None:
    """What the failed run kept stays where it is, marked as interrupted."""

    class Fail(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1 and not hasattr(self, "failed"):
                self.failed = True
                raise RuntimeError("out of luck")

    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = make_trainer(tmp_path, Fail(), audit, max_steps=2)
    if attach:
        audit.attach(trainer)
    with tiny_trainer.without_side_process():
        with pytest.raises(RuntimeError, match="out of luck"):
            trainer.train()
        trainer.train()
    assert audit.folder == tmp_path / "audit-2"
    found = kept(audit)
    assert list(found) == [0, 1]
    for snapshot in found.values():
        assert_verified(snapshot)
    assert json.loads((tmp_path / "audit" / "spool" / "finished.json").read_text())["interrupted"]
    assert [path.name for path in (tmp_path / "audit" / "spool").glob("*.ready")] == ["000000.ready"]


def test_row_29_a_smaller_batch_after_running_out_of_memory_is_the_same_audit(tmp_path: Path) -> None:
    """`auto_find_batch_size` begins again with half the batch.

    Nothing was kept before.
    """

    class Hungry(Trainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super()._prepare_inputs(inputs)

    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = make_trainer(tmp_path, audit, kind=Hungry, auto_find_batch_size=True, per_device_train_batch_size=4)
    audit.attach(trainer)
    with tiny_trainer.without_side_process():
        trainer.train()
    assert audit.folder == tmp_path / "audit"
    found = kept(audit)
    assert list(found) == [0, 1, 2]
    for snapshot in found.values():
        assert [len(batch.inputs["input_ids"]) for batch in snapshot.truth.micro_batches] == [2]
        assert_verified(snapshot)


def test_row_30_attacks_do_not_look_at_the_truth(tmp_path: Path) -> None:
    """Their guesses are the same with another batch in the truth file's place."""
    train(tmp_path, max_steps=1)
    folder = tmp_path / "audit" / "taken" / "000000"
    snapshot = read_snapshot(folder)
    write_snapshot(
        tmp_path / "other.ready",
        update=snapshot.observation.update,
        weights=state_of(snapshot.observation.model),
        truth=Truth((MicroBatch({"input_ids": torch.tensor([[1, 1, 1]]), "labels": torch.tensor([0])}),)),
        manifest=read_manifest(folder),
    )
    other = read_snapshot(tmp_path / "other.ready")
    for name in ("embedding-rows", "span"):
        guesses = [
            attacks.create(name)(one.observation, torch.Generator().manual_seed(3), Budget(600))
            for one in (snapshot, other)
        ]
        assert guesses[0] == guesses[1]


# ---------------------------------------------------------------------- a guest in somebody else's run


def test_training_is_the_same_with_and_without_the_audit(tmp_path: Path) -> None:
    """Training with an audit draws the same random numbers and ends alike.

    That includes dropout and shuffling.
    """
    outcomes = []
    for audited in (True, False):
        torch.manual_seed(11)
        model = tiny.bert(dropout=0.1)
        folder = tmp_path / str(audited)
        if audited:
            assert len(train(folder, model=model, gradient_accumulation_steps=2, optim="adamw_torch")) == 3
        else:
            make_trainer(folder, model=model, gradient_accumulation_steps=2, optim="adamw_torch").train()
        outcomes.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


def test_attaching_alone_is_enough(tmp_path: Path) -> None:
    """A callback that was attached but not listed would keep nothing without a word."""
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = make_trainer(tmp_path)
    audit.attach(trainer)
    with tiny_trainer.without_side_process():
        trainer.train()
    assert list(kept(audit)) == [0, 1, 2]


def test_the_hooks_are_gone_after_training(tmp_path: Path) -> None:
    """Model and optimizer are left as they were found."""
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = make_trainer(tmp_path, audit)
    with tiny_trainer.without_side_process():
        trainer.train()
    optimizer = base_optimizer(trainer.optimizer)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not trainer.model._forward_pre_hooks


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda audit: pickle.loads(pickle.dumps(audit))])
def test_a_copy_of_a_running_audit_is_an_idle_one(tmp_path: Path, clone: Any) -> None:
    """Pickling and deep copying carry the configuration and nothing that runs."""
    copies: list[LeakAuditCallback] = []

    class Copy(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            copies.append(clone(audit))

    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = make_trainer(tmp_path, Copy(), audit, max_steps=1)
    audit.attach(trainer)
    with tiny_trainer.without_side_process():
        trainer.train()
        assert copies[0].folder is None
        again = make_trainer(tmp_path, copies[0], max_steps=1)
        again.train()
    assert copies[0].folder == tmp_path / "audit-2"


def test_the_switch_in_the_environment_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written or wrapped; one line of the log says that it is off."""
    monkeypatch.setenv(OFF_SWITCH, "1")
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = make_trainer(tmp_path, audit)
    audit.attach(trainer)
    assert type(trainer) is Trainer and "train" not in vars(trainer)
    trainer.train()
    assert audit.folder is None
    assert not (tmp_path / "audit").exists()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attacks": (PluginSpec(name="spam"),)}, "no attack is called 'spam'; did you mean 'span'?"),
        ({"shipped_defense": PluginSpec(name="nois")}, "no defense is called 'nois'"),
        ({"policy": Path("no-such-policy.yaml")}, "no-such-policy.yaml"),
    ],
)
def test_a_wrong_configuration_is_said_at_the_start_and_again_at_the_end(
    tmp_path: Path,
    change: dict[str, Any],
    message: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Training continues without the audit."""
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path, **change))
    make_trainer(tmp_path, audit).train()
    assert message in caplog.text
    assert "this run was not audited" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "audit").iterdir()] == ["not_audited.json"]


def test_a_run_that_is_over_before_the_first_step_leaves_no_spool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says so at the start."""
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path, first_step=3))
    make_trainer(tmp_path, audit).train()
    said = capsys.readouterr().err
    assert "will keep no step: the run has 3, and `first_step` is 3" in said
    assert "no step was kept, so there is nothing to report" in said
    assert [path.name for path in (tmp_path / "audit").iterdir()] == ["not_audited.json"]


def test_steps_are_kept_by_the_schedule(tmp_path: Path) -> None:
    """From the first step, every so many, up to the limit."""
    config = tiny_trainer.audit_config(tmp_path, first_step=1, every_n_steps=3, max_snapshots=2)
    assert list(train(tmp_path, config=config, max_steps=12)) == [1, 4]


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    """Two steps before the checkpoint and a limit of three leave one after it."""
    config = tiny_trainer.audit_config(tmp_path, max_snapshots=3)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    assert list(train(tmp_path, config=config, max_steps=2, **saving)) == [0, 1]
    for restore, expected in ((False, [2]), (True, [2])):
        shutil.rmtree(tmp_path / "audit" / "taken")  # the folder is used again
        audit = LeakAuditCallback(config)
        trainer = make_trainer(tmp_path, audit, max_steps=5, restore_callback_states_from_checkpoint=restore)
        with tiny_trainer.without_side_process():
            trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-2"))
        audit = next(c for c in trainer.callback_handler.callbacks if isinstance(c, LeakAuditCallback))
        assert list(kept(audit)) == expected


def test_a_full_disk_costs_one_warning_and_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next due step is tried again; failures are counted."""
    calls: list[Path] = []

    def write(path: Path, *rest: Any) -> tuple[str, str]:
        calls.append(path)
        if len(calls) <= 2:  # the first file of the first two snapshots
            raise OSError(28, os.strerror(28))
        return write_tensors(path, *rest)

    monkeypatch.setattr("leakaudit.storage.snapshots.write_tensors", write)
    with caplog.at_level(logging.WARNING):
        found = train(tmp_path, max_steps=4)
    assert list(found) == [2, 3]
    assert caplog.text.count("was not kept") == 1
    assert "No space left on device; free some space" in caplog.text
    assert not list((tmp_path / "audit" / "spool").glob("*.tmp"))


def test_no_room_for_a_snapshot_costs_one_warning_and_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    """The disk is not filled up in the first place."""
    monkeypatch.setattr(Spool, "free_bytes", lambda self: 1000)
    make_trainer(tmp_path, LeakAuditCallback(tiny_trainer.audit_config(tmp_path))).train()
    assert caplog.text.count("needs 0 MB of free disk") == 1
    assert "3 steps not kept: the spool or the disk was full" in capsys.readouterr().err


def test_a_spool_removed_during_the_run_ends_the_audit_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning that says what is gone."""

    class Remove(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                (tmp_path / "audit" / "spool").rename(tmp_path / "gone")

    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = make_trainer(tmp_path, Remove(), audit, max_steps=4)
    with tiny_trainer.without_side_process():
        trainer.train()
    assert trainer.state.global_step == 4
    assert caplog.text.count("leakaudit is off for this run: SpoolError: somebody removed") == 1


def test_an_unwritable_folder_ends_the_audit_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file where the folder should be: the message names it and says what to do."""
    (tmp_path / "audit").write_text("in the way")
    make_trainer(tmp_path, LeakAuditCallback(tiny_trainer.audit_config(tmp_path))).train()
    assert "cannot be written" in caplog.text and "set `out_dir`" in caplog.text


def test_a_problem_of_our_own_never_reaches_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning with the type, never the message: it might quote the batch."""

    def broken(*args: Any) -> None:
        raise ValueError("the old dog chased a cat")

    monkeypatch.setattr(LeakAuditCallback, "_step_context", broken)
    trainer = make_trainer(tmp_path, LeakAuditCallback(tiny_trainer.audit_config(tmp_path)))
    trainer.train()
    assert trainer.state.global_step == 3
    assert caplog.text.count("leakaudit is off for this run: ValueError") == 1
    assert "dog" not in caplog.text


def test_ctrl_c_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the user's, not ours to swallow; what was kept is marked as interrupted."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = make_trainer(tmp_path, audit)
    audit.attach(trainer)
    with tiny_trainer.without_side_process():
        monkeypatch.setattr(ResultsLog, "update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert json.loads((tmp_path / "audit" / "spool" / "finished.json").read_text())["interrupted"]


def test_a_model_class_that_transformers_does_not_have_is_refused_clearly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The side process could not rebuild it.

    The encoder in it would be audited without its head.
    """

    class Own(BertForSequenceClassification):
        pass

    model = Own(cast(Any, tiny.bert().config))
    make_trainer(tmp_path, LeakAuditCallback(tiny_trainer.audit_config(tmp_path)), model=model).train()
    assert "Own is no model class that transformers exports" in caplog.text


# ---------------------------------------------------------------------- the trainer's log


def _with_results(tmp_path: Path, *callbacks: TrainerCallback, **arguments: Any) -> Any:
    """Train while an audit in this process stands in for the side process."""

    class Attacker(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert audit._run is not None
            audit._run.recorder.writing()  # waits, without a side process
            for step, snapshot in kept(audit).items():
                if step not in done and audit.folder is not None:
                    done.add(step)
                    Audit(audit.folder, config, tokenizer).step(snapshot)

    done: set[int] = set()
    config, tokenizer = tiny_trainer.audit_config(tmp_path, controls=0), tiny.bert_tokenizer()
    audit = LeakAuditCallback(config)
    trainer = make_trainer(tmp_path, *callbacks, Attacker(), audit, **arguments)
    audit.attach(trainer)
    with tiny_trainer.without_side_process():
        trainer.train()
    assert audit.folder is not None and load_journal(audit.folder / "journal.jsonl")
    return trainer


def test_numbers_go_to_the_trainers_loggers_beside_its_own(tmp_path: Path) -> None:
    """One line per audited step, and every line of the trainer's own is still there."""
    trainer = _with_results(tmp_path, logging_strategy="steps", logging_steps=1)
    history = trainer.state.log_history
    assert [entry["leakaudit/step"] for entry in history if "leakaudit/step" in entry] == [0, 1, 2]
    assert all("leakaudit/span/exact" in entry for entry in history if "leakaudit/step" in entry)
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 2, 3]


def test_a_logger_that_fails_costs_the_numbers_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The audit itself goes on."""

    class Picky(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "leakaudit/step" in logs:
                raise ValueError("a name with a slash")

    trainer = _with_results(tmp_path, Picky())
    assert trainer.state.global_step == 3
    assert caplog.text.count("sends nothing more to a tracker of this run (OtherLogger): it raised ValueError") == 1
    assert "off for this run" not in caplog.text


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("deep", [True, False], ids=["deep", "shallow"])
def test_a_copy_of_an_attached_trainer_trains_itself(tmp_path: Path, deep: bool) -> None:
    """The original's weights stay; the copy is of the user's own class."""
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = make_trainer(tmp_path, audit)
    audit.attach(trainer)
    with tiny_trainer.without_side_process():
        twin = copy.deepcopy(trainer) if deep else copy.copy(trainer)
        assert type(twin) is Trainer and isinstance(trainer, Trainer)
        twin.model = twin.model_wrapped = copy.deepcopy(cast(Any, trainer.model))
        before, of_twin = _weights(trainer), _weights(twin)
        twin.train()
    assert all(torch.equal(p, before[name]) for name, p in _weights(trainer).items())
    assert any(not torch.equal(p, of_twin[name]) for name, p in _weights(twin).items())


class Registered(Trainer):
    """A trainer that asks for its own class in every way that Python has."""

    subclasses: ClassVar[list[type]] = []
    steps: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        Registered.subclasses.append(cls)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        type(self).steps += 1
        weight = {Registered: 1.0}[type(self)]
        return weight * super(self.__class__, self).training_step(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        return super(type(self), self).train(*args, **kwargs)


def test_an_attached_trainer_keeps_its_class(tmp_path: Path) -> None:
    """Code that asks for the class of its object finds the user's own."""
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = make_trainer(tmp_path, audit)
    trainer.__class__ = Registered
    Registered.steps = 0
    audit.attach(trainer)
    assert type(trainer) is Registered and not Registered.subclasses
    with tiny_trainer.without_side_process():
        trainer.train()
    assert Registered.steps == trainer.state.global_step == 3
    assert audit._kept_so_far() == 3
    twin = make_trainer(tmp_path / "twin")
    twin.__class__ = Registered
    twin.train()
    assert Registered.steps == 6 and audit._kept_so_far() == 3, "another trainer of the class is not audited"
