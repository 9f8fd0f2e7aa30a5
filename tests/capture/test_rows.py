"""Thirty ways to capture a wrong gradient unnoticed, one numbered test each.

Further tests of the same rows are in `test_hf_trainer.py`, `test_recorder.py` and `test_distributed.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.audit.applied_defenses import defenses_found
from leakaudit.audit.audit import Audit
from leakaudit.audit.verification import verify
from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.recording.recorder import Recorder
from leakaudit.capture.refusals import refuse_strategy
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.errors import SnapshotError
from leakaudit.results.schema import AttemptStatus, VerificationStatus
from tests.capture.test_recorder import manifest
from tests.support import private_training, stacks, tiny
from tests.support.stacks import Case
from tests.support.tiny_trainer import audit_config, distance, kept, make_trainer, stamp, without_side_process

VERIFIED, MISMATCH = VerificationStatus.VERIFIED, VerificationStatus.MISMATCH


def assert_verified(snapshot: Snapshot, tolerance: float = 1e-5) -> None:
    """Recompute the step and hold it against what was kept."""
    found = stamp(snapshot)
    assert found.status is VERIFIED, found
    assert found.relative_error is not None and found.relative_error < tolerance


def with_truth(snapshot: Snapshot, truth: Truth) -> ClientStep:
    """Return the step that a snapshot would come from if its batch were another."""
    return ClientStep(snapshot.observation.model, truth, snapshot.recipe, snapshot.observation.facts)


# ---------------------------------------------------------------------- which gradient


@pytest.mark.parametrize("windows", [1, 2])
def test_row_1_lightning_steps_hold_their_own_batch_and_not_the_last_one(tmp_path: Path, windows: int) -> None:
    """Lightning computes the gradient inside the step, after a hook before it."""
    found = stacks.lightning(tmp_path, Case(batches=stacks.classes(count=6), windows=windows))
    assert len(found) == 6 // windows
    for step in range(1, len(found)):
        assert_verified(found[step])
        before = verify(with_truth(found[step], found[step - 1].truth), found[step].observation.update)
        assert before.status is MISMATCH


def test_row_1_a_closure_in_a_plain_loop_is_run_before_the_copy(tmp_path: Path) -> None:
    """L-BFGS: the first evaluation of the step is kept, with its batch alone."""
    model = tiny.bert().train()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    with without_side_process(), watched:
        for batch in stacks.classes(count=2):

            def closure(batch: stacks.Batch = batch) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(**batch).loss
                loss.backward()
                return loss

            optimizer.step(closure)
    for snapshot in kept(watched).values():
        assert len(snapshot.truth.micro_batches) == 1
        assert_verified(snapshot)


@pytest.mark.parametrize("stack", stacks.STACKS)
def test_row_3_the_weights_after_the_step_explain_nothing(tmp_path: Path, stack: str) -> None:
    """A large step: with W_{t+1} the same batch gives another gradient."""
    case = Case(batches=stacks.classes(count=2))
    found = stacks.STACKS[stack](tmp_path, case)
    assert_verified(found[0])
    late = dataclasses.replace(ClientStep.of(found[0]), model=found[1].observation.model)
    assert verify(late, found[0].observation.update).status is MISMATCH


@pytest.mark.parametrize("stack", stacks.STACKS)
def test_row_5_every_micro_batch_of_a_ragged_window_is_kept(tmp_path: Path, stack: str) -> None:
    """Five batches in windows of three: three and two, where a stack allows two."""
    found = stacks.STACKS[stack](tmp_path, Case(batches=stacks.classes(count=5), windows=3))
    assert [len(snapshot.truth.micro_batches) for snapshot in found.values()] == [3, 2]
    for snapshot in found.values():
        assert_verified(snapshot)
    shorter = Truth(found[0].truth.micro_batches[-1:])
    assert verify(with_truth(found[0], shorter), found[0].observation.update).status is not VERIFIED


@pytest.mark.parametrize("stack", stacks.STACKS)
@pytest.mark.parametrize("kind", ["classifier", "language model"])
def test_row_6_the_scale_of_the_loss_is_measured(tmp_path: Path, stack: str, kind: str) -> None:
    """BERT ignores the Trainer's item count, GPT-2 uses it; others divide."""
    case = Case(batches=stacks.classes(), windows=2)
    if kind == "language model":
        case = Case(model=tiny.gpt2_lm, tokenizer=tiny.gpt2_tokenizer, batches=stacks.texts(), windows=2)
    found = stacks.STACKS[stack](tmp_path, case)
    for snapshot in found.values():
        assert_verified(snapshot)
    trainer = "Trainer" in stack
    assert found[0].observation.facts.loss_divisor == pytest.approx(1.0 if trainer else 2.0)


@pytest.mark.parametrize("stack", stacks.STACKS)
def test_row_7_a_loss_outside_the_model_is_repeated_without_its_code(tmp_path: Path, stack: str) -> None:
    """Labels never reach the model; what the loss sends into the logits does."""

    def smoothed(outputs: Any, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1)

    found = stacks.STACKS[stack](tmp_path, Case(batches=stacks.classes(), loss=smoothed, windows=2))
    for snapshot in found.values():
        assert all(
            "labels" not in batch.inputs and set(batch.output_gradients) == {"logits"}
            for batch in snapshot.truth.micro_batches
        )
        assert_verified(snapshot)


def test_row_8_stacks_agree_on_the_clipped_update(tmp_path: Path) -> None:
    """Its norm is the bound, not the ten to fifty times larger one before clipping."""
    case = Case(batches=stacks.classes(count=2), clip=1e-3)
    one, two = stacks.hf_trainer(tmp_path / "a", case), stacks.lightning(tmp_path / "b", case)
    for step in range(2):
        squares = sum(float(g.double().square().sum()) for g in one[step].observation.update.values())
        assert squares**0.5 == pytest.approx(1e-3, rel=1e-2)
        assert distance(one[step].observation.update, two[step].observation.update) < 1e-5


def test_row_8_a_bound_that_nobody_told_is_named(tmp_path: Path) -> None:
    """The loop clips and the audit was not told: the stamp says by how much."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    with without_side_process(), watched:
        model(**stacks.classes(count=1)[0]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)
        optimizer.step()
    found = stamp(kept(watched)[0])
    assert found.status is VerificationStatus.SCALED and found.scale is not None and found.scale < 0.5
    assert found.relative_error is not None and found.relative_error < 1e-5
    assert found.note == "as if clipped to a norm of 0.001"


@pytest.mark.parametrize("fused", [True, False])
def test_row_9_the_scale_of_a_grad_scaler_is_in_neither_side(tmp_path: Path, fused: bool) -> None:
    """fp16 with a scaler: the update is unscaled, and so is what the loss sent back."""
    case = Case(
        batches=stacks.classes(),
        precision="fp16",
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused),
    )
    found = stacks.torch_loop(tmp_path, case)
    assert len(found) == 4
    for snapshot in found.values():
        assert snapshot.recipe.autocast == "fp16"
        assert float(snapshot.truth.micro_batches[0].output_gradients["loss"]) == pytest.approx(1.0)
        verified = stamp(snapshot)
        assert verified.status is VERIFIED, verified


def test_row_10_a_step_that_the_scaler_skips_is_not_merged_into_the_next(tmp_path: Path) -> None:
    """It calls no hook of the optimizer; its gradients were emptied since."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path), scaler=scaler)
    batches = stacks.classes(count=3)
    with without_side_process(), watched:
        for number, batch in enumerate(batches):
            loss = model(**batch).loss
            optimizer.zero_grad(
                set_to_none=number != 1
            )  # gradients are emptied between forward and backward, in place or not
            scaler.scale(loss).backward()
            if number == 0:
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
    found = kept(watched)
    assert list(found) == [0, 1]
    for snapshot, batch in zip(found.values(), batches[1:], strict=True):
        assert len(snapshot.truth.micro_batches) == 1
        assert torch.equal(snapshot.truth.micro_batches[0].inputs["input_ids"], batch["input_ids"])
        assert_verified(snapshot)


def test_row_10_a_fused_optimizer_is_called_on_an_overflow_too_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    """It decides after our hook; the next step has only its own batch."""
    model = tiny.bert().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path), scaler=scaler)
    batches = stacks.classes(count=3)
    with without_side_process(), watched:
        for number, batch in enumerate(batches):
            scaler.scale(model(**batch).loss).backward()
            if number == 1:
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    found = kept(watched)
    assert list(found) == [0, 2]
    assert torch.equal(found[2].truth.micro_batches[0].inputs["input_ids"], batches[2]["input_ids"])
    for snapshot in found.values():
        assert_verified(snapshot)


# ---------------------------------------------------------------------- private SGD


def test_row_11_what_opacus_sends_is_clipped_and_noised(tmp_path: Path) -> None:
    """The noise is measured, and has the declared strength."""
    found, _ = stacks.private_run(tmp_path, sigma=1.0)
    for snapshot in found.values():
        verified = stamp(snapshot)
        assert verified.status is VerificationStatus.NOISED
        assert verified.sigma == pytest.approx(1.0 * 1e-3 / 4, rel=0.05)
        facts = snapshot.observation.facts
        assert facts.defenses[0].parameters == {
            "noise_multiplier": 1.0, "max_grad_norm": 1e-3, "expected_batch_size": 4.0
        }  # fmt: skip


def test_row_11_without_noise_the_clipped_mean_is_verified_and_both_views_are_there(tmp_path: Path) -> None:
    """Transmitted and raw: the raw update is the same batch's without clipping."""
    found, _ = stacks.private_run(tmp_path, sigma=0.0)
    for snapshot in found.values():
        assert_verified(snapshot)
        step = ClientStep.of(snapshot)
        raw = step.update()
        model = copy.deepcopy(snapshot.observation.model).train()
        model(**snapshot.truth.micro_batches[0].inputs).loss.backward()
        own = {n: p.grad for n, p in model.named_parameters() if n in raw and p.grad is not None}
        assert distance(raw, own) < 1e-5
        assert distance(snapshot.observation.update, raw) > 0.1


@pytest.mark.parametrize("options", [{"mode": "ghost"}, {"clipping": "per_layer"}], ids=["ghost", "per layer"])
@pytest.mark.filterwarnings("ignore")
def test_row_11_clipping_by_layer_and_in_a_second_pass_is_computed_again(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Ghost clipping runs backward twice; clipping by layers has many bounds."""
    found = private_training.train(tmp_path, noise=0.0, steps=2, **options)
    assert len(found) == 2
    for snapshot in found.values():
        assert snapshot.observation.facts.defenses[0].name == "dp-sgd"
        stamp = verify(ClientStep.of(snapshot), snapshot.observation.update)
        # Opacus adds 1e-6 to the norms that ghost clipping divides by, and the clipped gradients are clipped once more here
        assert stamp.status.bounds and stamp.scale == pytest.approx(1.0, abs=1e-4)


def test_row_12_a_logical_batch_is_the_union_of_its_physical_pieces(tmp_path: Path) -> None:
    """BatchMemoryManager: between two parts, gradients are zeroed, sums are not."""
    found, sizes = stacks.private_run(tmp_path, sigma=0.0, physical=2, steps=1)
    assert sizes == [2, 2, 2, 2]
    assert [len(snapshot.truth.micro_batches) for snapshot in found.values()] == [2, 2]
    for snapshot in found.values():
        assert len(snapshot.truth.sequences()) == 4
        assert_verified(snapshot)


def test_row_12_batches_drawn_by_chance_are_divided_by_the_expected_size(tmp_path: Path) -> None:
    """Poisson sampling: sizes vary, the divisor does not; an empty draw makes no step."""
    found, sizes = stacks.private_run(tmp_path, sigma=0.0, size=2, poisson=True, steps=3)
    assert len(set(sizes)) > 1
    assert len(found) == sum(size > 0 for size in sizes)
    for snapshot in found.values():
        assert snapshot.observation.facts.defenses[0].parameters["expected_batch_size"] == 2.0
        assert_verified(snapshot)


def test_row_12_a_batch_made_up_for_an_empty_draw_is_nobodys_data(tmp_path: Path) -> None:
    """`rand_on_empty`: a row of zeros and ones is trained on, and not audited."""
    found, sizes = stacks.private_run(tmp_path, sigma=0.0, size=1, poisson=True, rand_on_empty=True, steps=3, rows=4)
    assert 0 < len(found) < len(sizes)
    for snapshot in found.values():
        assert all(int(row.max()) > 1 for batch in snapshot.truth.micro_batches for row in batch.inputs["input_ids"])


def test_a_private_run_that_steps_the_wrong_optimizer_is_reported_as_undefended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It computes every example's gradient, adds no noise, and everything looks right."""
    found, _ = stacks.private_run(tmp_path, sigma=1.0, stepped="original")
    assert "this run is audited as undefended" in capsys.readouterr().err
    for snapshot in found.values():
        assert not snapshot.observation.facts.defenses
        assert_verified(snapshot)


def test_a_lightning_run_that_calls_opacus_wrongly_is_reported_as_undefended(tmp_path: Path) -> None:
    """The module returns its old optimizer; its owner declares private SGD."""
    import lightning.pytorch as pl
    from opacus import PrivacyEngine

    from leakaudit.callbacks.lightning_trainer import LeakAuditCallback as LightningAudit

    tokenizer = tiny.bert_tokenizer()
    loader: Any = torch.utils.data.DataLoader(stacks.classes(count=3), batch_size=1, collate_fn=lambda r: dict(r[0]))  # type: ignore[arg-type]

    class Module(pl.LightningModule):
        model: Any

        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.bert().train()
            self.model.bert.embeddings.position_embeddings.weight.requires_grad_(False)

        def training_step(self, batch: stacks.Batch, index: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            original = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
            self.model, _, _ = PrivacyEngine().make_private(
                module=self.model, optimizer=original, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1e-3,
                poisson_sampling=False,
            )  # fmt: skip
            return original

    declared = {"name": "dp-sgd", "noise_multiplier": 1.0, "max_grad_norm": 1e-3, "expected_batch_size": 2}
    config = audit_config(tmp_path, shipped_defense=declared)
    audit = LightningAudit(config, tokenizer=tokenizer)
    with without_side_process(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, callbacks=[audit],
        ).fit(Module(), loader)  # fmt: skip
    found = kept(audit)
    assert len(found) == 3
    for snapshot in found.values():
        verified = stamp(snapshot)
        assert verified.status is VERIFIED
        assert verified.note == "the declared dp-sgd is not in the update: it was sent undefended"
        assert defenses_found(ClientStep.of(snapshot), verified, snapshot.observation.update) == ()
    results = Audit(tmp_path / "results", config.model_copy(update={"controls": 0}), tokenizer)
    results.step(found[0])
    assert results.finish().steps[0].shipped_defense == "none"


# ---------------------------------------------------------------------- strategies that are refused


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("DEEPSPEED", "train with FSDP2 or DDP"),
        ("DeepSpeedStrategy", "train with FSDP2 or DDP"),
        ("FSDP", "train with FSDP2"),
        ("FSDPStrategy", "train with FSDP2"),
        ("DataParallel", "use DDP, or one GPU"),
        ("MEGATRON_LM", "train with FSDP2 or DDP"),
    ],
)
def test_row_16_strategies_whose_update_no_hook_sees_are_refused_by_name(name: str, instead: str) -> None:
    """DeepSpeed steps inside backward: at every hook the weights have moved already."""
    with pytest.raises(SnapshotError, match=instead):
        refuse_strategy(name, fsdp2=False)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("deepspeed", {"zero_optimization": {"stage": 2}}, "ZeRO-2 leaves each process a share of the gradients"),
        ("deepspeed", {"zero_optimization": {"stage": 1}}, "torch's `ZeroRedundancyOptimizer`, which does the same"),
        ("deepspeed", {"zero_optimization": {"stage": 3}}, "ZeRO-3 shards the weights themselves"),
        ("deepspeed", "zero.json", "DeepSpeed moves the weights inside backward"),
        ("fsdp", ["full_shard"], "FSDP1 keeps parameters flattened and in shards; train with FSDP2"),
        ("_n_gpu", 2, "DataParallel splits a batch over threads"),
        ("torch_compile", True, "call `attach(trainer)` to put them around it"),
    ],
)
def test_row_16_a_trainer_that_cannot_be_audited_trains_without(
    tmp_path: Path, setting: str, value: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says why, and what to use instead; no folder is made."""
    audit = LeakAuditCallback(audit_config(tmp_path))
    trainer = make_trainer(tmp_path, audit)
    if setting != "torch_compile":
        audit.attach(trainer)
    assert trainer.args.n_gpu <= 1  # looked up once, before it is changed
    setattr(trainer.args, setting, value)
    audit.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=None)
    assert message in caplog.text
    assert audit._run is None and not (tmp_path / "audit" / "spool").exists()


# ---------------------------------------------------------------------- which forward passes


@pytest.mark.parametrize("in_place", [False, True])
def test_row_17_a_model_compiled_long_before_the_audit_is_seen(tmp_path: Path, in_place: bool) -> None:
    """Hooks are set around the compiled object, not in its graph, after five steps."""
    model = tiny.bert(dropout=0.1).train()
    if in_place:
        model.compile(backend="eager")
    called: Any = model if in_place else torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = stacks.classes(count=8)

    def train(batch: stacks.Batch) -> None:
        called(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in batches[:5]:
        train(batch)
    watched = watch(called, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    with without_side_process(), watched:
        for batch in batches[5:]:
            train(batch)
    found = kept(watched)
    assert len(found) == 3
    for snapshot in found.values():
        assert len(snapshot.truth.micro_batches) == 1
        assert_verified(snapshot)
    assert called(**batches[0]).loss.requires_grad  # and it is still compiled, with nothing of ours around it


def test_row_18_passes_that_the_update_does_not_come_from_are_left_out(tmp_path: Path) -> None:
    """An evaluation, a call without gradients, and a pass whose loss is not used."""
    model = tiny.bert(dropout=0.1).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    first, second, third = stacks.classes(count=3)
    with without_side_process(), watched:
        with torch.no_grad():
            model(**second)
        model(**third)  # with gradients, and nobody asks for them
        model(**first).loss.backward()
        with torch.inference_mode():
            model(**third)
        optimizer.step()
    found = kept(watched)[0]
    assert len(found.truth.micro_batches) == 1
    assert torch.equal(found.truth.micro_batches[0].inputs["input_ids"], first["input_ids"])
    assert_verified(found)


def test_row_18_two_batches_in_one_loss_are_two_batches(tmp_path: Path) -> None:
    """A contrastive loss over hidden states and pooled outputs of two passes."""
    torch.manual_seed(0)
    model: Any = tiny.hf.BertModel(tiny.bert().config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    one, two = ({k: v for k, v in batch.items() if k != "labels"} for batch in stacks.classes(count=2))
    with without_side_process(), watched:
        a, b = model(**one), model(**two)
        scores = a.pooler_output @ b.pooler_output.T
        loss = nn.functional.cross_entropy(scores, torch.arange(2)) + a.last_hidden_state.square().mean()
        loss.backward()
        optimizer.step()
    found = kept(watched)[0]
    # What arrives at the hidden state includes what came through the pooled one; pulled by itself, the second pass's has no part.
    assert all(
        set(batch.output_gradients) == {"last_hidden_state", "pooler_output"} for batch in found.truth.micro_batches
    )
    assert len(found.truth.sequences()) == 4
    assert_verified(found)


@pytest.mark.parametrize("stack", stacks.STACKS)
def test_row_19_dropout_is_repeated_with_its_state_and_unverifiable_without(tmp_path: Path, stack: str) -> None:
    """Every micro-batch has masks of its own."""
    case = Case(model=lambda: tiny.bert(dropout=0.1), batches=stacks.classes(), windows=2)
    for snapshot in stacks.STACKS[stack](tmp_path, case).values():
        assert snapshot.observation.facts.dropout and snapshot.observation.facts.training_mode
        assert_verified(snapshot)
        forgot = Truth(tuple(dataclasses.replace(batch, rng={}) for batch in snapshot.truth.micro_batches))
        found = verify(with_truth(snapshot, forgot), snapshot.observation.update)
        assert found.status in (VerificationStatus.UNVERIFIABLE, MISMATCH) and found.status is not VERIFIED
        assert found.relative_error is not None and found.relative_error > 0.01


def test_row_19_parts_of_the_model_that_are_in_eval_mode_are_repeated_so(tmp_path: Path) -> None:
    """A frozen body without dropout under a head with it."""
    model: Any = tiny.bert(dropout=0.3).train()
    model.bert.encoder.layer[0].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    with without_side_process(), watched:
        model(**stacks.classes(count=1)[0]).loss.backward()
        optimizer.step()
    found = kept(watched)[0]
    assert "bert.encoder.layer.0" in found.recipe.eval_modules
    assert_verified(found)
    everywhere = dataclasses.replace(ClientStep.of(found), recipe=found.recipe.model_copy(update={"eval_modules": ()}))
    assert verify(everywhere, found.observation.update).status is not VERIFIED


@pytest.mark.parametrize("stack", stacks.STACKS)
def test_row_20_the_live_configuration_is_what_travels(tmp_path: Path, stack: str) -> None:
    """It was changed after loading; a model rebuilt from its source would differ."""

    def changed() -> nn.Module:
        model: Any = tiny.bert(num_labels=1)
        model.config.problem_type = "regression"
        return model  # type: ignore[no-any-return]

    batches = [{**batch, "labels": batch["labels"].float()} for batch in stacks.classes()]
    for snapshot in stacks.STACKS[stack](tmp_path, Case(model=changed, batches=batches)).values():
        assert snapshot.model_recipe.config["problem_type"] == "regression"
        assert_verified(snapshot)


@pytest.mark.parametrize("stack", stacks.STACKS)
def test_row_21_autocast_is_repeated_and_reported(tmp_path: Path, stack: str) -> None:
    """The precision is set in the trainer, in a patched forward, or in a context."""
    found = stacks.STACKS[stack](tmp_path, Case(batches=stacks.classes(count=2), precision="bf16"))
    for snapshot in found.values():
        assert snapshot.observation.facts.dtype == "bfloat16" and snapshot.recipe.autocast == "bf16"
        assert stamp(snapshot).status is VERIFIED
        full = dataclasses.replace(
            ClientStep.of(snapshot), recipe=snapshot.recipe.model_copy(update={"autocast": None})
        )
        error = verify(full, snapshot.observation.update).relative_error
        assert error is not None and error > 1e-3


@pytest.mark.parametrize("stack", stacks.STACKS)
def test_row_22_tied_weights_are_there_once_with_both_their_gradients(tmp_path: Path, stack: str) -> None:
    """GPT-2's head is its word embedding: every row of the table has a gradient."""
    case = Case(model=tiny.gpt2_lm, tokenizer=tiny.gpt2_tokenizer, batches=stacks.texts(count=2))
    for snapshot in stacks.STACKS[stack](tmp_path, case).values():
        names = [name for name, _ in tiny.gpt2_lm().named_parameters()]
        assert sorted(snapshot.observation.update) == sorted(names) and "lm_head.weight" not in names
        assert ("transformer.wte.weight", "lm_head.weight") in snapshot.observation.facts.tied
        rows = snapshot.observation.update["transformer.wte.weight"].norm(dim=1)  # (V,)
        assert int((rows > 0).sum()) == len(rows)
        assert_verified(snapshot)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks for it by this name
@pytest.mark.parametrize("stack", stacks.STACKS)
def test_row_23_a_step_at_the_start_of_adapters_is_left_for_the_next(
    tmp_path: Path, stack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """B is zero at first, so every A has a zero gradient: that is no sign of safety."""
    found = stacks.STACKS[stack](tmp_path, Case(model=lora, batches=stacks.classes(count=3)))
    assert list(found) == [1, 2]
    assert "step 0 is not kept: its adapters are at their start" in capsys.readouterr().err
    for snapshot in found.values():
        names = set(snapshot.observation.update)
        assert all(".lora_" in name or "classifier" in name for name in names)
        assert all(float(g.norm()) > 0 for name, g in snapshot.observation.update.items() if ".lora_A." in name)
        assert_verified(snapshot)


def lora() -> nn.Module:
    """Return a classifier with adapters and a trained head, as `get_peft_model` does."""
    import peft

    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], lora_dropout=0.0)
    torch.manual_seed(0)
    return peft.get_peft_model(tiny.bert(), config)


# ---------------------------------------------------------------------- optimizers, state, faults


@pytest.mark.parametrize("frozen", [True, False])
def test_row_24_of_two_optimizers_the_watched_ones_update_is_kept_where_it_is_all_that_moves(
    tmp_path: Path, frozen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A generator's steps run the classifier as well, and may leave gradients in it."""
    model: Any = tiny.bert().train()
    own, other = list(model.classifier.parameters()), list(model.bert.parameters())
    head, body = torch.optim.SGD(own, lr=0.1), torch.optim.SGD(other, lr=0.1)
    watched = watch(model, head, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    with without_side_process(), watched:
        for one, two in zip(stacks.classes(count=3), reversed(stacks.classes(count=3)), strict=True):
            model(**one).loss.backward()
            body.step()
            model.zero_grad()
            model.bert.requires_grad_(not frozen)
            model(**two).loss.backward()
            head.step()
            model.zero_grad()
            model.bert.requires_grad_(True)
    if not frozen:
        assert "the model has 39 parameters" in caplog.text and "give the audit all optimizers" in caplog.text
        return
    found = kept(watched)
    assert list(found) == [0, 1, 2]
    for snapshot in found.values():
        assert set(snapshot.observation.update) == {"classifier.weight", "classifier.bias"}
        assert len(snapshot.truth.micro_batches) == 1
        assert_verified(snapshot)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own import
def test_row_24_an_optimizer_of_sharded_states_is_hooked_once(tmp_path: Path) -> None:
    """`ZeroRedundancyOptimizer` steps an inner optimizer over its own share."""
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", rank=0, world_size=1, store=torch._C._distributed_c10d.HashStore())
    try:
        model = tiny.bert().train()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
        watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
        with without_side_process(), watched:
            for batch in stacks.classes(count=2):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    found = kept(watched)
    assert list(found) == [0, 1]
    for snapshot in found.values():
        assert_verified(snapshot)


def test_row_26_a_loss_that_no_output_of_the_model_tells_of_is_a_mismatch_without_numbers(tmp_path: Path) -> None:
    """A weight on the loss is measured; a penalty on fourth powers is not."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = audit_config(tmp_path)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config)
    with without_side_process(), watched:
        for epoch, batch in enumerate(stacks.classes(count=2)):
            penalty = sum(p.pow(4).sum() for p in model.parameters())
            (model(**batch).loss * (1.0 + epoch) + epoch * 0.01 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = kept(watched)
    assert_verified(found[0])
    assert stamp(found[1]).status is MISMATCH
    audit = Audit(tmp_path / "results", config.model_copy(update={"controls": 0}), tiny.bert_tokenizer())
    audit.step(found[1])
    assert {entry.attempt.status for entry in audit.entries} == {AttemptStatus.SKIPPED}
    assert not any(entry.attempt.scores for entry in audit.entries)


def test_row_26_a_curriculum_on_the_loss_is_verified(tmp_path: Path) -> None:
    """`training_step` weighs the loss by the epoch; the model's loss gets that weight."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    with without_side_process(), watched:
        for epoch, batch in enumerate(stacks.classes(count=3)):
            (model(**batch).loss * 0.5**epoch).backward()
            optimizer.step()
            optimizer.zero_grad()
    for epoch, snapshot in kept(watched).items():
        assert snapshot.observation.facts.loss_divisor == pytest.approx(2.0**epoch)
        assert_verified(snapshot)


def test_row_27_buffers_are_those_before_the_forward_pass(tmp_path: Path) -> None:
    """Batch norm updates its statistics in a pass; the old ones are kept."""
    from tests.support.norm_model import make

    model = make(size=len(tiny.VOCABULARY)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    before = {name: b.clone() for name, b in model.named_buffers()}
    with without_side_process(), watched:
        loss = nn.functional.cross_entropy(model(stacks.classes(size=4, count=1)[0]["input_ids"]), torch.arange(4) % 2)
        loss.backward()
        optimizer.step()
    found = kept(watched)[0]
    rebuilt = dict(found.observation.model.named_buffers())
    assert all(torch.equal(rebuilt[name], before[name]) for name in before)
    assert not torch.equal(dict(model.named_buffers())["norm.running_mean"], before["norm.running_mean"])
    assert_verified(found)
    assert all(torch.equal(b, before[name]) for name, b in found.observation.model.named_buffers())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the copy is made on a stream of its own")
def test_row_28_a_copy_from_the_gpu_is_not_torn() -> None:
    """The optimizer's stream waits for the copy, however long that is delayed."""
    model = tiny.bert().train().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    written: list[Any] = []
    recorder = Recorder(model, optimizer, lambda kept: written.append(copy.deepcopy(dict(kept.weights))))
    recorder.install()
    recorder.buffers.stream = torch.cuda.Stream()
    for step in range(5):
        recorder.start(step, manifest(model))
        inputs = {"input_ids": torch.tensor([[2, 6, 9, 7, 3]]).cuda(), "labels": torch.tensor([1]).cuda()}
        model(**inputs).loss.backward()
        want = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        with torch.cuda.stream(recorder.buffers.stream):
            torch.cuda._sleep(50_000_000)
        optimizer.step()
        recorder.remove()
        recorder.install()
        assert all(torch.equal(written[-1][name], want[name]) for name in want)


@pytest.mark.parametrize("ending", ["through", "raised"])
def test_row_29_a_second_run_has_one_set_of_hooks(tmp_path: Path, ending: str) -> None:
    """Each due step is kept once, however the first run ended."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))

    def run(error: Exception | None = None) -> None:
        for batch in stacks.classes(count=2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if error is not None:
            raise error

    with without_side_process():
        if ending == "raised":
            with pytest.raises(RuntimeError, match="enough"), watched:
                run(RuntimeError("enough"))
        else:
            with watched:
                run()
        assert watched.folder is not None and list(kept(watched)) == [0, 1]
        shutil.rmtree(watched.folder / "taken")
        watched._counter.number = 0
        with watched:
            run()
    assert list(kept(watched)) == [0, 1]
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not model._forward_pre_hooks and not model._forward_hooks


@pytest.mark.parametrize("where", ["copied", "outputs_of", "_autocast"])
def test_row_29_nothing_that_goes_wrong_in_a_hook_reaches_the_models_forward_or_backward(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning with the type; all steps are made."""

    def fail(*args: Any) -> Any:
        raise MemoryError("the old dog chased a cat")

    monkeypatch.setattr(f"leakaudit.capture.observing.forward_hooks.{where}", fail)
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    before = next(model.parameters()).detach().clone()
    with watched:
        for batch in stacks.classes(count=2):
            model(**batch).loss.backward()
            optimizer.step()
    assert not torch.equal(next(model.parameters()).detach(), before)
    assert caplog.text.count(" after a MemoryError") == 1
    assert "dog" not in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": None}, "there is no tokenizer"),
        ({"config": {"max_spool_gb": 1e-6}}, "`max_spool_gb` allows 0 MB"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)}, "moves no parameter of this model"),
        ({"model": nn.Sequential(nn.Linear(2, 2))}, "inside it 0 were found"),
        ({"model": nn.Sequential(tiny.bert(), tiny.bert())}, "inside it 2 were found (0, 1)"),
        (
            {"observe": "delta", "optimizer": partial(torch.optim.SGD, lr=0.1, differentiable=True)},
            "it was made with `differentiable=True`",
        ),
    ],
)
def test_what_cannot_be_audited_is_said_before_the_first_step(
    tmp_path: Path, change: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues without it; nothing is left behind."""
    model = change.pop("model", None) or tiny.bert().train()
    made = change.get("optimizer")
    optimizer = made(model.parameters()) if isinstance(made, partial) else None
    options: dict[str, Any] = {"tokenizer": tiny.bert_tokenizer(), **change}
    options["optimizer"] = optimizer or change.get("optimizer") or torch.optim.SGD(model.parameters(), lr=0.1)
    config = {**audit_config(tmp_path).model_dump(), **change.get("config", {})}
    with watch(model, **{**options, "config": config}):
        options["optimizer"].step()
    assert message in caplog.text
    assert not (tmp_path / "audit" / "spool").exists()


def test_a_module_around_a_model_is_audited_by_the_model_and_says_what_is_beside_it(tmp_path: Path) -> None:
    """A user's head on a transformer: its output gradients verify the update."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = tiny.hf.BertModel(tiny.bert().config)
            self.head = nn.Linear(tiny.HIDDEN, 3)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            hidden: Tensor = self.body(ids, mask).last_hidden_state
            logits: Tensor = self.head(hidden[:, 0])
            return logits

    model = Own().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    with without_side_process(), watched:
        for batch in stacks.classes(count=2):
            watched.batch(batch)
            logits = model(batch["input_ids"], batch["attention_mask"])
            nn.functional.cross_entropy(logits, batch["labels"]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for snapshot in kept(watched).values():
        assert snapshot.recipe.unaudited_parameters == 2
        assert snapshot.truth.labels() is not None
        assert not any(name.startswith("head") for name in snapshot.observation.update)
        assert_verified(snapshot)


def test_row_9_a_scaler_that_nobody_told_of_is_named(tmp_path: Path) -> None:
    """The loss sends back 2^10 times what the update is made of; the stamp says so."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    with without_side_process(), watched:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**stacks.classes(count=1)[0]).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
    found = stamp(kept(watched)[0])
    assert found.status is VerificationStatus.SCALED
    assert found.note == "one over 2^10, as of a GradScaler that the audit was not told of"


def test_row_7_a_loss_of_ones_own_over_outputs_too_large_to_hold_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The message says what to do; a loss inside the model is one number and goes on."""
    monkeypatch.setattr("leakaudit.capture.observing.forward_hooks.MOST_BYTES", 8)
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    own, inside = stacks.classes(count=2)
    labels = own.pop("labels")
    with without_side_process(), watched:
        nn.functional.cross_entropy(model(**own).logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        model(**inside).loss.backward()
        optimizer.step()
    assert list(kept(watched)) == [1]
    assert "let the model compute it (`labels`), or take smaller micro-batches" in caplog.text


def test_a_trainer_that_overrides_the_whole_training_step_is_seen(tmp_path: Path) -> None:
    """Its own forward, its own loss, its own call of backward, as in other packages."""
    from transformers import Trainer

    class Own(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            model.train()
            inputs = self._prepare_inputs(inputs)
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            loss = nn.functional.cross_entropy(logits, inputs["labels"]) * 0.7
            self.accelerator.backward(loss)
            return loss.detach()

    audit = LeakAuditCallback(audit_config(tmp_path))
    trainer = make_trainer(tmp_path, audit, kind=Own, model=tiny.bert(dropout=0.1))
    audit.attach(trainer)
    with without_side_process():
        trainer.train()
    found = kept(audit)
    assert len(found) == 3
    for snapshot in found.values():
        assert snapshot.truth.labels() is not None
        assert_verified(snapshot)


def test_an_encoder_decoder_is_kept_with_what_it_reads_and_what_it_is_taught(tmp_path: Path) -> None:
    """T5 in `Seq2SeqTrainer`: the model makes the decoder's inputs from the labels."""
    config = tiny.hf.T5Config(
        vocab_size=len(tiny.VOCABULARY), d_model=tiny.HIDDEN, d_kv=16, d_ff=64, num_layers=1, num_heads=2, dropout_rate=0.1,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=3,
    )  # fmt: skip

    def model() -> nn.Module:
        torch.manual_seed(0)
        return tiny.hf.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]

    case = Case(model=model, tokenizer=tiny.gpt2_tokenizer, batches=stacks.texts(count=3), windows=2)
    found = stacks.seq2seq_trainer(tmp_path, case)
    assert len(found) == 2
    for snapshot in found.values():
        assert snapshot.observation.facts.task == "encoder-decoder"
        assert_verified(snapshot)


def test_row_13_the_local_view_is_before_clipping_and_without_the_scale_of_a_scaler(tmp_path: Path) -> None:
    """It is what this process computed: accumulated, without a bound or scale."""
    case = Case(batches=stacks.classes(), windows=2, clip=0.001, precision="fp16", options={"observe": "local"})
    for snapshot in stacks.torch_loop(tmp_path, case).values():
        facts = snapshot.observation.facts
        assert (facts.view, facts.max_grad_norm) == ("local", None)
        squares = sum(float(g.double().square().sum()) for g in snapshot.observation.update.values())
        assert squares**0.5 > 0.002
        assert stamp(snapshot).status is VERIFIED
