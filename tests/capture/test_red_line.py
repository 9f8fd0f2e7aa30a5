"""`stop_on: critical`: a training ends at a red line, and at nothing else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import TrainerCallback

from leakaudit.audit.publish import red_line_of
from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.lightning_trainer import LeakAuditCallback as LightningCallback
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.red_line import red_line_alone, red_line_of_all
from leakaudit.config.audit import AuditConfig
from leakaudit.errors import RedLineError
from leakaudit.storage.spool_files import RED_LINE, RedLine, read_red_line, write_red_line
from tests.callbacks.test_lightning_trainer import fit
from tests.support import stacks, tiny
from tests.support.factories import NOW
from tests.support.factories import audit as audit_of
from tests.support.tiny_trainer import audit_config, make_trainer, without_side_process

STEPS = 12


def policy(folder: Path, **rule: Any) -> Path:
    """Write a policy: no step may give every word of its batch."""
    path = folder / "policy.yaml"
    fields = {"id": "no-text", "severity": "critical", "event": "all_words", "max_count": 0} | rule
    other = {"id": "another", "event": "label_counts", "max_rate": 0.9}
    path.write_text(
        json.dumps({"schema": "leakaudit.policy/1", "name": "test", "rules": [fields, other]}), encoding="utf-8"
    )
    return path


def config(folder: Path, **more: Any) -> AuditConfig:
    """Return a configuration that stops at a red line."""
    return audit_config(folder, **{"stop_on": "critical", "policy": more.pop("policy", None) or policy(folder)} | more)


def cross(folder: Path) -> None:
    """Note a red line, as the side process does."""
    write_red_line(folder / "audit/spool", RedLine(rule="no-text", sentence="In 1 of 1 steps."))


class Crosses(TrainerCallback):
    """Notes a red line in a step."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            cross(self.folder)


def trained(folder: Path, audit_with: AuditConfig) -> int:
    """Train with the Hugging Face Trainer, and return the steps that it took."""
    audit = LeakAuditCallback(audit_with)
    trainer = make_trainer(folder, Crosses(folder, 4), audit, max_steps=STEPS)
    audit.attach(trainer)
    with without_side_process():
        trainer.train()
    return int(trainer.state.global_step)


def test_a_training_stops_at_the_next_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the trainer's own way, with one line why."""
    assert trained(tmp_path, config(tmp_path)) == 4
    lines = [line for line in capsys.readouterr().err.splitlines() if "training stops here" in line]
    assert len(lines) == 1 and "rule no-text" in lines[0] and "In 1 of 1" in lines[0]


def test_a_training_that_was_not_asked_to_stop_goes_on(tmp_path: Path) -> None:
    """Whatever is found."""
    assert trained(tmp_path, config(tmp_path, stop_on=None)) == STEPS


@pytest.mark.parametrize(
    ("rule", "leaks", "stops"),
    [
        ({}, 1, True),
        ({}, 0, False),
        ({"severity": "high"}, 1, False),
        ({"level": "warn"}, 1, False),
        ({"max_count": 1}, 2, False),
    ],
    ids=["a leak", "no leak", "not critical", "a warning", "some are allowed"],
)
def test_only_a_leak_that_a_critical_rule_forbids_is_a_red_line(
    tmp_path: Path, rule: dict[str, Any], leaks: int, stops: bool
) -> None:
    """Although some of the other policies fail."""
    with_policy = config(tmp_path, policy=policy(tmp_path, event="exact_sentence", **rule))
    line = red_line_of(audit_of(leaks, 3), with_policy, NOW)
    assert (line is not None) is stops
    assert line is None or (line.rule, "1 of 4" in line.sentence) == ("no-text", True)


def test_a_policy_that_can_never_stop_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """When training begins."""
    trained(tmp_path, config(tmp_path, policy=policy(tmp_path, severity="high")))
    assert "never ends this training" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_lightning_stops_between_two_steps(tmp_path: Path) -> None:
    """With accumulated gradients the window at work is trained to its end."""

    def training_step(module: Any, batch: Any, index: int) -> Any:
        if index == 4:
            cross(tmp_path)
        return module.model(**batch).loss

    audit = LightningCallback(config(tmp_path), tokenizer=tiny.bert_tokenizer())
    trainer = fit(tmp_path, audit, training_step, batches=2 * STEPS, accumulate_grad_batches=2)
    assert trainer.global_step == 3, "seen at the end of batch 4, in the middle of the third step"
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 2 * trainer.global_step


def step(model: Any, optimizer: Any) -> None:
    """Train one step."""
    model(**stacks.classes(count=1)[0]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_loop_is_told_and_decides_itself(tmp_path: Path) -> None:
    """`should_stop` raises nothing, and `stop_if_asked` does."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config(tmp_path))
    with without_side_process(), watched as audit:
        step(model, optimizer)
        audit.stop_if_asked()
        assert not audit.should_stop
        cross(tmp_path)
        step(model, optimizer)
        assert audit.should_stop
        step(model, optimizer)  # who does not heed it trains on
        with pytest.raises(RedLineError, match="rule no-text"):
            audit.stop_if_asked()


def test_the_side_process_stops_a_training_beside_it(tmp_path: Path) -> None:
    """It notes the red line in the spool; training finds it there at its next step."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    beside = config(tmp_path, schedule="beside", max_snapshots=2)
    deadline = time.monotonic() + 90
    with watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=beside) as audit:
        while not audit.should_stop and time.monotonic() < deadline:
            step(model, optimizer)
            time.sleep(0.05)
        assert audit.should_stop
    line = read_red_line(tmp_path / "audit/spool")
    assert line is not None and line.rule == "no-text"


def test_an_unreadable_note_stops_nothing(tmp_path: Path) -> None:
    """Whoever wrote it."""
    (tmp_path / RED_LINE).write_text("{", encoding="utf-8")
    assert read_red_line(tmp_path) is None


class Peers:
    """A process group of which the other processes answer as scripted."""

    over = ""
    first = True

    def __init__(self, others: bool) -> None:
        self.others, self.asked = others, list[tuple[str, bool]]()

    def agree(self, topic: str, yes: bool) -> bool:
        """Note the question."""
        self.asked.append((topic, yes))
        return yes and self.others


@pytest.mark.parametrize(("others", "first"), [(True, True), (False, True), (True, False)])
def test_processes_stop_together_or_not_at_all(tmp_path: Path, others: bool, first: bool) -> None:
    """One that stopped alone would leave the others waiting for it for ever."""
    (tmp_path / RED_LINE).write_text('{"rule": "no-text", "sentence": "In 1 of 1"}', encoding="utf-8")
    peers = Peers(others)
    due = SimpleNamespace(due=lambda step: step % 2 == 0)
    trainer = SimpleNamespace(writes=first, peers=peers)
    run: Any = SimpleNamespace(config=config(tmp_path), plan=due, spool=SimpleNamespace(root=tmp_path), trainer=trainer)
    assert red_line_alone(run) is None, "in a group, what one process knows stops nobody"
    assert red_line_of_all(run, 1) is None, "between due steps the processes do not speak"
    assert not peers.asked
    assert (red_line_of_all(run, 2) is not None) is others
    assert peers.asked == [("stopping before step 2", True)]


@pytest.mark.parametrize("fields", [{"unit": "round"}, {"schedule": "deferred"}])
def test_a_configuration_that_could_never_stop_is_refused(fields: dict[str, Any]) -> None:
    """It says what to do instead."""
    with pytest.raises(ValidationError, match="stop_on"):
        AuditConfig(stop_on="critical", **fields)
