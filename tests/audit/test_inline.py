"""Attacks in the training process give the same results and change nothing."""

from __future__ import annotations

import random
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from leakaudit.audit.inline import undisturbed
from leakaudit.callbacks.torch_loop import watch
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.errors import AnatomyError
from leakaudit.models.library_modules import without_users_code
from leakaudit.models.recipe import can_rebuild
from leakaudit.results.files import load_results
from leakaudit.results.schema import AttemptStatus, VerificationStatus
from leakaudit.storage.encryption import new_identity
from tests.support import tiny

TEXTS = ("the old dog chased a cat .", "a small bird saw the red fish .", "one horse ate .")


class Bag(nn.Module):
    """A model with nothing inside that another process could make."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(100, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Any, labels: Any, **rest: Any) -> Any:
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(self.words(input_ids).mean(1)), labels))


def seed_all(seed: int) -> None:
    """Seed every generator that a training loop may draw from."""
    torch.manual_seed(seed), random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global generator is the one that must not be touched


def draw() -> float:
    """Draw from numpy's global generator."""
    return float(np.random.rand())  # noqa: NPY002 - as above


def local_model(dropout: float = 0.1) -> nn.Module:
    """Return a model of a class that no other process can find."""

    class MineForSequenceClassification(hf.BertForSequenceClassification):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            MineForSequenceClassification.calls += 1
            return super().forward(*args, **kwargs)

    plain = tiny.bert(dropout=dropout)
    model: nn.Module = MineForSequenceClassification(cast(hf.BertConfig, plain.config))
    model.load_state_dict(plain.state_dict())
    return model.train()


def train(folder: Path, steps: int = 4, model: nn.Module | None = None, **more: Any) -> tuple[nn.Module, list[Any]]:
    """Train with random numbers of all kinds.

    Return the model and the next numbers of the generators.
    """
    seed_all(1)
    model, tokenizer = model or local_model(), tiny.bert_tokenizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AuditConfig(
        **{
            "out_dir": folder / "audit",
            "every_n_steps": 2,
            "attacks": (PluginSpec(name="embedding-rows"), PluginSpec(name="llg")),
            "controls": 1,
            "schedule": "inline",
            **more,
        }
    )
    with watch(model, optimizer, tokenizer=tokenizer, config=config, total_steps=steps):
        for _ in range(steps):
            batch = tokenizer([random.choice(TEXTS)], return_tensors="pt")
            model(**batch, labels=torch.tensor([int(draw() > 0.5)])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for thread in threading.enumerate():
                if thread.name == "leakaudit-writer":
                    thread.join(20)
    return model, [torch.rand(3), random.random(), draw(), torch.get_num_threads()]


PROCESS = subprocess.Popen


def only_git(command: list[str], **options: Any) -> Any:
    """Start git, which tells the commit of the code, and nothing else."""
    return PROCESS(command, **options) if command[0] == "git" else pytest.fail("a process was started")


def test_a_model_that_nobody_can_rebuild_is_audited_where_it_is_and_never_called_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs its code does not apply, and the user is told what to do."""
    monkeypatch.setattr("subprocess.Popen", only_git)
    model: Any = local_model()
    assert not can_rebuild(model)
    train(tmp_path, model=model)
    assert type(model).calls == 4, "one call for each step of training"
    results = load_results(tmp_path / "audit")
    assert [record.step for record in results.steps] == [0, 2]
    assert {record.verification.status for record in results.steps} == {VerificationStatus.UNVERIFIABLE}
    assert {a.status for a in results.attempts} <= {AttemptStatus.RAN, AttemptStatus.NOT_APPLICABLE}
    assert results.subject.parameters == sum(p.numel() for p in model.parameters()), "the whole model"
    said = capsys.readouterr().err
    assert said.count("(`schedule: inline`); a model that says how it is made") == 1 and "report" in said
    assert (tmp_path / "audit" / "report.html").is_file()
    assert not list((tmp_path / "audit" / "spool").glob("0*"))


def test_training_goes_on_as_if_nothing_had_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are equal bit by bit, and so is the state of every generator.

    Dropout draws from one of them.
    """
    audited, after = train(tmp_path, threads=2)
    assert load_results(tmp_path / "audit").steps
    monkeypatch.setenv("LEAKAUDIT_DISABLED", "1")
    alone, plain = train(tmp_path)
    for (name, one), other in zip(audited.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert torch.equal(after[0], plain[0]) and after[1:] == plain[1:]


def test_encrypted_steps_are_attacked_here_with_the_key_of_the_run(tmp_path: Path) -> None:
    """Which was never anywhere else."""
    train(tmp_path, encrypt_to=(new_identity()[0],))
    assert [record.step for record in load_results(tmp_path / "audit").steps] == [0, 2]


def test_without_inline_such_a_model_is_refused_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training is not hurt."""
    train(tmp_path, model=Bag(), schedule="beside")
    assert "rebuilt_by" in caplog.text and "`schedule: inline`" in caplog.text
    assert not (tmp_path / "audit" / "spool").exists()


class Scaled(nn.Linear):
    """A layer of the user's."""

    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def test_a_copy_runs_the_layers_of_torch_and_refuses_every_other() -> None:
    """Hooks, an own `forward` and hooks on all modules are the user's code, too."""
    calls: list[int] = []
    inputs = torch.rand(2, 4)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()
    handle = net[0].register_forward_hook(lambda *_: calls.append(1))
    made = without_users_code(net)
    assert torch.equal(made(inputs), net(inputs)) and len(calls) == 1, "only the live model calls the hook"
    assert all(not a.is_set_to(b) for a, b in zip(made.parameters(), net.parameters(), strict=True))
    handle.remove()
    net[2].forward = lambda given: given
    mine = nn.Sequential(Scaled(4, 2))
    for refused in (without_users_code(net), without_users_code(mine)):
        with pytest.raises(AnatomyError, match="does not run a second time"):
            refused(inputs)
    every = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(2))
    try:
        with pytest.raises(AnatomyError):
            without_users_code(nn.Sequential(nn.Linear(4, 2)))(inputs)
    finally:
        every.remove()
    assert 2 not in calls and list(without_users_code(mine).state_dict()) == list(mine.state_dict())


@pytest.mark.parametrize("place", [nn.functional, torch], ids=["functional", "torch"])
def test_a_copy_runs_no_function_that_the_user_put_into_torch(monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    """It would be the user's code that runs once more."""
    calls: list[str] = []
    name = "linear" if place is nn.functional else "conv1d"
    model = nn.Sequential(nn.Linear(2, 2))
    without_users_code(model)(torch.ones(1, 2))
    monkeypatch.setattr(place, name, lambda *_: calls.append("again"))
    with pytest.raises(AnatomyError):
        without_users_code(model)(torch.ones(1, 2))
    assert not calls


def test_whatever_is_done_undisturbed_leaves_no_trace() -> None:
    """Threads, gradient mode and generators, also after an exception."""
    seed_all(3)
    first = draw()
    seed_all(3)
    before = (torch.get_rng_state(), random.getstate(), torch.get_num_threads())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match="trouble"), undisturbed():  # noqa: PT012 - the block raises in its middle
            assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
            torch.rand(3), random.random(), draw()
            torch.set_num_threads(3)
            raise ValueError("trouble")
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert before[2] == torch.get_num_threads()
    assert draw() == first
