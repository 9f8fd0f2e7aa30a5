"""A run that is not audited says so in its folder.

Results of an earlier run never count for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.context import OFF_SWITCH
from leakaudit.capture.unaudited import folder_of
from leakaudit.cli import main
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.errors import ResultsError
from leakaudit.results.files import load_results, to_json
from leakaudit.results.not_audited import NOT_AUDITED, refuse_unaudited
from tests.support import factories, stacks, tiny, tiny_trainer

TOKENIZER = tiny.bert_tokenizer()


def _train(config: Any, *, tokenizer: Any = TOKENIZER, error: Exception | None = None, steps: int = 1) -> None:
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tokenizer=tokenizer, config=config):
        for _ in range(steps):
            if error is not None:
                raise error
            model(**TOKENIZER(["the old dog"], return_tensors="pt"), labels=torch.tensor([0])).loss.backward()
            optimizer.step()


def _gate(folder: Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["gate", str(folder)])
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def audited(tmp_path: Path) -> Path:
    """Return a folder in which an earlier run's audit lies; the gate judges it."""
    folder = tmp_path / "audit"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(to_json(factories.audit(0, 3))))
    assert _gate(folder)[0] != 5
    return folder


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "an attack that does not exist": {"attacks": (PluginSpec(name="spam"),)},
    "no step is reached": {"first_step": 5},
}


@pytest.mark.parametrize("why", [*CONFIGS, "no tokenizer", "switched off", "interrupted at once", "an unknown key"])
def test_results_of_an_earlier_run_never_stand_for_a_run_that_was_not_audited(
    why: str, audited: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are moved away, and the gate says why there are none: exit 5."""
    more: dict[str, Any] = {"schedule": "deferred", "at_end": "leave", **CONFIGS.get(why, {})}
    config: Any = AuditConfig(out_dir=audited, **more)
    if why == "switched off":
        monkeypatch.setenv(OFF_SWITCH, "1")
    if why == "an unknown key":
        config = {"out_dir": str(audited), "evry_n_steps": 3}
    tokenizer = None if why == "no tokenizer" else TOKENIZER
    if why == "interrupted at once":
        error = ValueError("mine")
        with pytest.raises(ValueError, match="mine") as raised:
            _train(config, tokenizer=tokenizer, error=error)
        assert raised.value is error
    else:
        _train(config, tokenizer=tokenizer, error=None)
    assert not (audited / "results.json").exists()
    assert (audited.with_name("audit.1") / "results.json").is_file()
    code, said = _gate(audited)
    assert code == 5 and "this run was not audited" in said
    if why == "switched off":
        lines = [r.message for r in caplog.records if OFF_SWITCH in r.message]
        assert len(lines) == 1 and "audit.1" in lines[0]


POLICY = """schema: leakaudit.policy/1
name: release
rules:
  - {id: red-line, event: exact_sentence, max_count: 0, scope: {attack: KIND}}
  - {id: overlap, metric: METRIC, statistic: max, max_value: 0.5}
"""


@pytest.mark.parametrize(
    ("kind", "metric", "said"),
    [
        ("spam", "rougeL", "the attack 'spam' is unknown; did you mean 'span'?"),
        ("span", "rouge", "the metric 'rouge' is unknown; did you mean 'rouge"),
    ],
)
def test_a_policy_that_could_never_be_decided_is_refused_before_the_first_step(
    kind: str, metric: str, said: str, audited: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names the line of the file, as on the command line.

    The folder is no longer that of the earlier run.
    """
    policy = audited.with_name("policy.yaml")
    policy.write_text(POLICY.replace("KIND", kind).replace("METRIC", metric))
    _train(AuditConfig(out_dir=audited, policy=policy, schedule="deferred", at_end="leave"))
    assert said in caplog.text and "policy.yaml:" in caplog.text
    assert not (audited / "spool").exists()
    code, why = _gate(audited)
    assert code == 5 and "this run was not audited" in why


def _with_trainer(folder: Path) -> None:
    audit = LeakAuditCallback(AuditConfig(out_dir=folder, first_step=100, schedule="deferred", at_end="leave"))
    trainer = tiny_trainer.make_trainer(folder.parent, audit)
    audit.attach(trainer)
    trainer.train()


def _with_lightning(folder: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from leakaudit.callbacks.lightning_trainer import LeakAuditCallback as LightningAudit

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.bert()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows = [{"input_ids": torch.tensor([2, 5, 3]), "labels": torch.tensor(0)} for _ in range(3)]
    config = AuditConfig(out_dir=folder, first_step=100, schedule="deferred", at_end="leave")
    with stacks._quiet_lightning():
        lightning.Trainer(
            max_steps=2,
            callbacks=[LightningAudit(config, tokenizer=TOKENIZER)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            default_root_dir=folder.parent,
        ).fit(Module(), torch.utils.data.DataLoader(rows))  # type: ignore[arg-type]


@pytest.mark.parametrize("off", [True, False])
@pytest.mark.parametrize("train", [_with_trainer, _with_lightning])
def test_a_framework_s_run_without_an_audit_says_so_and_is_no_evidence(
    train: Callable[[Path], None],
    off: bool,
    audited: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One line tells the user, and the gate ends with ERROR.

    The audit is switched off, or no step was kept; the earlier audit is moved away.
    """
    if off:
        monkeypatch.setenv(OFF_SWITCH, "1")
    train(audited)
    said = caplog.text + capfd.readouterr().err
    assert (f"{OFF_SWITCH} is set" if off else "will keep no step: the run has ") in said
    assert (audited.with_name("audit.1") / "results.json").is_file()
    code, why = _gate(audited)
    assert code == 5 and (f"{OFF_SWITCH} is set" if off else "no step was kept") in why


def test_a_run_that_is_audited_takes_the_mark_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is not makes no second folder of it."""
    config = AuditConfig(out_dir=tmp_path / "audit", attacks=(PluginSpec(name="spam"),))
    for _ in range(2):
        _train(config)
    assert [path.name for path in tmp_path.iterdir()] == ["audit"]
    assert [path.name for path in (tmp_path / "audit").iterdir()] == [NOT_AUDITED]
    assert (tmp_path / "audit").stat().st_mode & 0o777 == 0o700
    _train(
        AuditConfig(out_dir=tmp_path / "audit", schedule="deferred", at_end="leave", attacks=(PluginSpec(name="idlg"),))
    )
    assert not (tmp_path / "audit" / NOT_AUDITED).exists()
    assert list((tmp_path / "audit" / "spool").glob("*.ready"))


def test_switched_off_it_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing lies, nothing can be taken for this run's."""
    monkeypatch.setenv(OFF_SWITCH, "1")
    _train(AuditConfig(out_dir=tmp_path / "audit"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{}", "[" * 100_000, '{"schema": 1}'])
def test_a_mark_that_cannot_be_read_refuses_as_well(audited: Path, content: str) -> None:
    """Whatever it holds, somebody wrote it."""
    (audited / NOT_AUDITED).write_text(content)
    with pytest.raises(ResultsError, match=r"was not audited: not_audited\.json cannot be read"):
        load_results(audited)
    with pytest.raises(ResultsError, match="was not audited"):
        refuse_unaudited(audited)


def test_nobody_waits_for_a_mark_that_is_a_pipe(audited: Path) -> None:
    """Reading one would wait for a writer without end."""
    os.mkfifo(audited / NOT_AUDITED)
    with pytest.raises(ResultsError, match=r"was not audited: not_audited\.json cannot be read"):
        refuse_unaudited(audited)


def test_the_folder_is_found_in_configurations_that_are_wrong_otherwise(tmp_path: Path) -> None:
    """A misspelt key must not leave an earlier run's results in force."""
    file = tmp_path / "audit.yaml"
    for text, folder in (
        ("attaks: [span]\nout_dir: runs/audit  # here\n", "runs/audit"),
        ("out_dir: 'a folder'\n  oops", "a folder"),
        ("seed: 1\n", "leakaudit-audit"),
    ):
        file.write_text(text)
        assert folder_of(file) == folder_of(str(file)) == Path(folder)
    assert folder_of({"out_dir": "x", "spam": 1}) == Path("x")
    assert folder_of(None) == Path("leakaudit-audit")
    assert folder_of(tmp_path / "none.yaml") is None
