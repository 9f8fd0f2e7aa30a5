"""Classifiers of arrays in every adapter: steps are verified, and labels attacked."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from leakaudit.audit.applied_defenses import defenses_found
from leakaudit.audit.audit import Audit
from leakaudit.callbacks.hf_trainer import LeakAuditCallback as TrainerAudit
from leakaudit.callbacks.lightning_trainer import LeakAuditCallback as LightningAudit
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.array_batches import classifier_in
from leakaudit.capture.rounds.before_round import BeforeRound
from leakaudit.cli import main
from leakaudit.client.array_batches import array_facts
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import LABEL_ATTACKS, AuditConfig
from leakaudit.models.array_classifier import ArrayClassifier, reader_in
from leakaudit.models.factories import rebuilt_by
from leakaudit.results.files import load_results
from leakaudit.results.schema import AttemptStatus, Score, VerificationStatus
from tests.support import array_models
from tests.support.array_models import CLASSES
from tests.support.stacks import _quiet_lightning
from tests.support.tiny_trainer import kept, make_trainer, stamp, without_side_process

VERIFIED, NOISED = VerificationStatus.VERIFIED, VerificationStatus.NOISED

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def cross_entropy(net: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of a loop that computes it itself."""
    return nn.functional.cross_entropy(net(inputs), labels)


def config(folder: Path, **more: Any) -> AuditConfig:
    """Return a configuration that names no attacks; every second step is due."""
    return AuditConfig(**{"out_dir": folder / "audit", "every_n_steps": 2, "controls": 1, "device": "cpu", **more})


def rows(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return one batch of a loop."""
    rng = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=rng), torch.randint(CLASSES, (size,), generator=rng)


def train(
    net: nn.Module, source: Any = None, *, steps: int = 4, loss: Loss = cross_entropy, tell: bool = True, **options: Any
) -> Any:
    """Train on tables, watched where there is a configuration, and return the watch."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"num_labels": CLASSES, "batch_size": 8} | options
    watched = watch(net, optimizer, config=source, total_steps=steps, **options)
    with watched as audit:
        for step in range(steps):
            inputs, labels = rows(step)
            if tell:
                audit.batch({"labels": labels})
            loss(net, inputs, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return watched


def snapshots(net: nn.Module, folder: Path, **options: Any) -> dict[int, Snapshot]:
    """Train without a side process and return what was kept."""
    with without_side_process():
        return kept(train(net, config(folder), **options))


# ---------------------------------------------------------------------- plain loops


def test_a_loop_on_tables_is_audited_where_nobody_else_can_make_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With dropout and batch norm, every due step is verified and attacked."""
    net = array_models.net()
    train(net, config(tmp_path))
    results = load_results(tmp_path / "audit")
    assert [record.step for record in results.steps] == [0, 2]
    assert {record.verification.status for record in results.steps} == {VERIFIED}
    assert {a.attack for a in results.attempts} == {spec.name for spec in LABEL_ATTACKS}
    assert {a.status for a in results.attempts} == {AttemptStatus.RAN}
    found = [a.scores["label_accuracy"] for a in results.attempts if a.attack == "ilrg"]
    assert all(isinstance(score, Score) and score.value > 0.7 for score in found) and len(found) == 2
    assert results.subject.model == "Sequential" and results.controls.positive.k == 1
    assert "(`schedule: inline`)" in capsys.readouterr().err
    assert "Labels" in (tmp_path / "audit" / "report.html").read_text()


def test_training_ends_where_it_would_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, with running averages of batch norm and the random state."""
    watched, plain = array_models.net(), array_models.net()
    train(watched, config(tmp_path))
    after = torch.rand(3)
    monkeypatch.setenv("LEAKAUDIT_DISABLED", "1")
    train(plain, config(tmp_path))
    assert torch.equal(after, torch.rand(3))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name


def test_a_classifier_that_says_how_it_is_made_is_read_by_another_process(tmp_path: Path) -> None:
    """The snapshot rebuilds model and loss; the folder says that it has no text."""
    weights = torch.tensor([1.0, 2.0, 0.5])
    criterion = nn.CrossEntropyLoss(weight=weights, label_smoothing=0.0)
    found = snapshots(array_models.known(), tmp_path, loss=lambda net, x, y: criterion(net(x), y), criterion=criterion)
    assert list(found) == [0, 2]
    for step, snapshot in found.items():
        model, facts = snapshot.observation.model, snapshot.observation.facts
        assert isinstance(model, ArrayClassifier) and torch.equal(model.criterion.weight, weights)  # type: ignore[arg-type]
        assert (facts.input_shape, facts.num_labels, facts.batch_size_bound) == ((6,), CLASSES, 8)
        assert snapshot.truth.labels() == rows(step)[1].tolist()
        assert stamp(snapshot).status is VERIFIED
    tokenizer = reader_in(tmp_path / "audit" / "spool" / "tokenizer")
    assert tokenizer.decode([]) == "" and tokenizer.convert_ids_to_tokens([]) == []


@pytest.mark.parametrize(
    ("criterion", "reason"),
    [
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(CLASSES)), "this is multi-label training (BCEWithLogitsLoss)"),
        (nn.MSELoss(), "this is a regression (MSELoss)"),
        (type("Focal", (nn.Module,), {})(), "the loss is Focal and not cross-entropy"),
    ],
)
def test_of_another_loss_its_name_travels_and_says_why_labels_are_not_read(
    tmp_path: Path, criterion: nn.Module, reason: str
) -> None:
    """The loss itself need not be made again: what it sent into the logits was kept."""

    def loss(net: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        error: Tensor = net(inputs) - nn.functional.one_hot(labels, CLASSES)
        return error.square().mean()

    (snapshot, *_) = snapshots(array_models.known(), tmp_path, loss=loss, criterion=criterion).values()
    assert stamp(snapshot).status is VERIFIED
    audit = Audit(tmp_path / "out", config(tmp_path, attacks=LABEL_ATTACKS), reader_in(_tokenizer(tmp_path)))
    audit.step(snapshot)
    assert all(reason in entry.attempt.reason for entry in audit.entries)


def _tokenizer(folder: Path) -> Path:
    return folder / "audit" / "spool" / "tokenizer"


def test_a_difference_of_weights_over_local_steps_is_verified(tmp_path: Path) -> None:
    """As federated averaging sends it; running averages are those of the first step."""
    with without_side_process():
        found = kept(train(array_models.known(), config(tmp_path, every_n_steps=1), observe="delta", local_steps=2))
    assert list(found) == [0, 1]
    for snapshot in found.values():
        assert snapshot.observation.facts.view == "delta" and len(snapshot.truth.labels() or []) == 16
        assert stamp(snapshot).status is VERIFIED


@pytest.mark.parametrize(
    ("net", "options", "reason"),
    [
        (array_models.known(), {"tell": False}, "its labels are not known"),
        (array_models.known(), {"num_labels": 5}, r"outputs of shape \(8, 3\); the audit takes .* of shape \(8, 5\)"),
        (
            array_models.TwoArrays(),
            {"loss": lambda net, x, y: nn.functional.cross_entropy(net(x, x), y)},
            r"called with left \(float32\), right \(float32\); the audit takes classifiers of one array",
        ),
        (array_models.known(), {"num_labels": 1}, "a classifier has two classes or more"),
        (array_models.known(), {"num_labels": None}, "or `num_labels` where the model classifies pictures or tables"),
    ],
)
def test_what_cannot_be_audited_is_said_and_training_goes_on(
    tmp_path: Path, net: nn.Module, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With what to do about it; no step is kept."""
    before = [p.detach().clone() for p in net.parameters()]
    train(net, config(tmp_path), **options)
    assert re.search(reason, caplog.text), caplog.text
    assert not (tmp_path / "audit" / "spool").exists()
    assert any(not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))


def test_a_schedule_that_was_asked_for_is_kept_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`beside`, and nothing says how another process could make the model."""
    train(array_models.net(), config(tmp_path, schedule="beside"))
    assert "rebuilt_by" in caplog.text and not (tmp_path / "audit" / "spool").exists()


@pytest.mark.parametrize(("sigma", "status"), [(0.0, VERIFIED), (1.0, NOISED)])
def test_private_training_on_tables_is_what_its_optimizer_sends(
    tmp_path: Path, sigma: float, status: VerificationStatus
) -> None:
    """Opacus clips every example: they are told apart by the rows of the logits."""
    from opacus import PrivacyEngine

    torch.manual_seed(0)
    net = rebuilt_by(array_models.without_norm(), "tests.support.array_models:without_norm")
    inputs, labels = rows(0, 16)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=8)
    with warnings.catch_warnings(), without_side_process():
        warnings.simplefilter("ignore")
        module, optimizer, loader = PrivacyEngine().make_private(
            module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), data_loader=loader,
            noise_multiplier=sigma, max_grad_norm=0.5, poisson_sampling=False,
        )  # fmt: skip
        watched = watch(module, optimizer, num_labels=CLASSES, config=config(tmp_path, every_n_steps=1))
        with watched as audit:
            for x, y in loader:
                audit.batch({"labels": y})
                nn.functional.cross_entropy(module(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    found = kept(watched)
    assert list(found) == [0, 1]
    for snapshot in found.values():
        assert stamp(snapshot).status is status
        assert [defense.name for defense in snapshot.observation.facts.defenses] == ["dp-sgd"]


def test_a_gate_on_labels_fails_such_a_run(tmp_path: Path) -> None:
    """One step with all counts right is proof."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "schema: leakaudit.policy/1\nname: labels\nrules:\n- {id: counts, severity: high, event: label_counts, max_count: 0}\n"
    )
    train(array_models.net(), config(tmp_path, policy=policy))
    verdict = json.loads((tmp_path / "audit" / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["exit_code"], verdict["deciding_rule"]) == ("FAIL", 3, "counts")


def test_kept_steps_are_attacked_again_from_the_command_line(tmp_path: Path) -> None:
    """Default attacks run, and attacks on text say that there is none."""
    snapshots(array_models.known(), tmp_path)
    kept_steps, out = str(tmp_path / "audit" / "taken"), tmp_path / "again"
    words = ["run", kept_steps, "--tokenizer", str(_tokenizer(tmp_path)), "--out", str(out)]
    outcome = CliRunner().invoke(main, words)
    assert outcome.exit_code == 0, outcome.output
    attempts = load_results(out).attempts
    assert all("hold no text" in a.reason for a in attempts if a.attack in ("embedding-rows", "span", "tag"))
    assert {a.status for a in attempts if a.attack in ("idlg", "llg", "ilrg")} == {AttemptStatus.RAN}


# ---------------------------------------------------------------------- trainers


@pytest.mark.parametrize("calls", ["the module", "its part"])
def test_lightning_tells_the_labels_of_its_batches(tmp_path: Path, calls: str) -> None:
    """(inputs, labels) from the loader; the step calls the module or its classifier."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = array_models.known()
            self.criterion = nn.CrossEntropyLoss()

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.net(inputs)
            return logits

        def training_step(self, batch: Any, index: int) -> Tensor:
            inputs, labels = batch
            logits = self(inputs) if calls == "the module" else self.net(inputs)
            loss: Tensor = self.criterion(logits, labels)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    inputs, labels = rows(0, 32)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=8)
    audit = LightningAudit(config(tmp_path), num_labels=CLASSES, batch_size=8)
    with without_side_process(), _quiet_lightning():
        pl.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, callbacks=[audit],
        ).fit(Module(), loader)  # fmt: skip
    found = kept(audit)
    assert {step: s.truth.labels() for step, s in found.items()} == {0: labels[:8].tolist(), 2: labels[16:24].tolist()}
    assert {stamp(s).status for s in found.values()} == {VERIFIED}
    assert {s.observation.facts.batch_size_bound for s in found.values()} == {8}


def test_a_module_of_several_parts_is_the_classifier_itself() -> None:
    """Only a part with all parameters can stand for it."""
    parts = nn.ModuleDict({"body": nn.Linear(6, 4), "head": nn.Linear(4, 3)})
    assert classifier_in(parts) is parts
    whole = nn.ModuleDict({"net": parts, "loss": nn.CrossEntropyLoss()})
    assert classifier_in(whole) is parts


def test_the_trainer_of_transformers_on_pictures(tmp_path: Path) -> None:
    """The model computes its loss itself, and transformers exports it."""
    import transformers as hf

    vit: Any = hf.ViTConfig  # its stubs know none of its arguments
    vit = vit(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        num_channels=1, num_labels=CLASSES,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.ViTForImageClassification(vit)
    data = [{"pixel_values": torch.rand(1, 8, 8), "labels": torch.tensor(i % CLASSES)} for i in range(8)]
    audit = TrainerAudit(config(tmp_path), num_labels=CLASSES)
    trainer = make_trainer(
        tmp_path, audit, model=model, rows=data, collator=hf.default_data_collator, remove_unused_columns=False
    )
    audit.attach(trainer)
    with without_side_process():
        trainer.train()
    found = kept(audit)
    assert list(found) == [0, 2]
    for snapshot in found.values():
        assert len(snapshot.truth.labels() or []) == 2 and snapshot.observation.facts.input_shape == (1, 8, 8)
        assert stamp(snapshot).status is VERIFIED
    assert audit.state()["args"]["num_labels"] == CLASSES


def test_facts_of_arrays_know_tied_weights() -> None:
    """One tensor under two names is one parameter of the update."""
    body = nn.Linear(3, 3, bias=False)
    twin = nn.Linear(3, 3, bias=False)
    twin.weight = body.weight
    facts = array_facts(ArrayClassifier(nn.Sequential(body, twin), 3), (3,), training=False)
    assert facts.tied == (("net.0.weight", "net.1.weight"),)


def test_a_step_without_its_declared_noise_is_undefended(tmp_path: Path) -> None:
    """As for text: the stamp decides, not the declaration."""
    source = config(tmp_path, shipped_defense={"name": "gaussian-noise", "options": {"scale": 0.1}})
    with without_side_process():
        (snapshot, *_) = kept(train(array_models.known(), source)).values()
    found = stamp(snapshot)
    assert found.status is VERIFIED and "is not in the update" in found.note
    assert defenses_found(ClientStep.of(snapshot), found, snapshot.observation.update) == ()


def test_a_client_sends_a_classifier_under_its_own_names() -> None:
    """A classifier that has a part called `net` is no exception."""
    net = nn.ModuleDict({"net": nn.Linear(6, 4), "0": nn.Linear(4, CLASSES)})
    before = BeforeRound.of(ArrayClassifier(net, CLASSES), torch.optim.SGD(net.parameters(), lr=0.1))
    names = {name: before.known[name] for name in net.state_dict()}
    assert names == {name: f"net.{name}" for name in net.state_dict()} and set(names.values()) == set(before.trained)
