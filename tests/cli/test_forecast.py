"""`leakaudit doctor --model`: what an audit will cost, from one measured step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from leakaudit.audit.canaries import CANARIES
from leakaudit.cli import main
from leakaudit.cli.forecast import StepCost, forecast
from leakaudit.config.audit import AuditConfig
from leakaudit.gate.policy import default_policy
from leakaudit.models.tiny_encoder import tiny_encoder

COST = StepCost(4, 2.0, (("span / none", 1.5), ("april / none", 0.25)), step_bytes=200_000_000, once_bytes=50_000_000)


def planned(steps: int, **keys: Any) -> tuple[str, str]:
    """Return state and sentence of the plan."""
    plan = list(forecast(COST, AuditConfig(**keys), default_policy(), steps))[1]
    return plan.state, plan.sentence


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny encoder."""
    folder = tmp_path_factory.mktemp("model")
    encoder, tokenizer = tiny_encoder(CANARIES)
    encoder.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write a configuration of one quick attack."""
    path = tmp_path / "audit.yaml"
    path.write_text(f"out_dir: {tmp_path / 'audit'}\nattacks: [embedding-rows]\ndevice: cpu\n", encoding="utf-8")
    return path


def doctor(*words: object) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, words)], catch_exceptions=False)


def test_the_plan_multiplies_the_measured_step() -> None:
    """60 kept steps and 3 controls of 2 s; 60 times 0.2 GB, and 0.05 GB once."""
    state, sentence = planned(1200)
    assert state == "ok"
    assert "keeps 60 of 1,200 steps (every 20th)" in sentence
    assert "attacks take about 2 min (at most 7 h 21 min, 3 control steps included) in a process beside" in sentence
    assert "all kept steps together take 12.05 GB" in sentence


def test_a_disk_that_is_too_small_is_a_warning_where_steps_wait_for_the_end() -> None:
    """Beside the training, a side process empties it."""
    assert planned(1200, max_spool_gb=1.0)[0] == "ok"
    state, sentence = planned(1200, max_spool_gb=1.0, schedule="deferred")
    assert state == "warn" and "holds 4 of them" in sentence and "after the training" in sentence


def test_a_run_that_is_too_short_for_the_policy_is_a_warning() -> None:
    """It says so before the training."""
    state, sentence = planned(20)
    assert state == "warn" and "can fail the policy and not pass it" in sentence


def test_the_slowest_attempts_are_named_first() -> None:
    """Without steps there is no plan."""
    (one,) = forecast(COST, AuditConfig(), default_policy(), None)
    assert "one step with 4 texts: verified and attacked in 2.0 s" in one.sentence
    assert one.sentence.endswith("(span / none 1.5 s, april / none 0.2 s); 0.20 GB on the disk, and 0.05 GB once")


def test_one_step_of_a_model_is_measured(model: Path, config: Path, tmp_path: Path) -> None:
    """Nothing is left in the folders that the user named."""
    done = doctor("--config", config, "--model", model, "--batch-size", 2, "--steps", 80, "--json")
    assert done.exit_code == 0, done.output
    sentences = [check["sentence"] for check in json.loads(done.stdout)]
    assert re.search(r"one step with 2 texts: .* with 1 thread \(embedding-rows / none \d+\.\d s\)", sentences[-2])
    assert "80 steps of training: keeps 10 of 80 steps" in sentences[-1]
    assert not (tmp_path / "audit").exists()


def test_a_model_that_cannot_be_loaded_is_a_failed_check(config: Path, tmp_path: Path) -> None:
    """Exit code 2, and the message names the folder."""
    (tmp_path / "empty").mkdir()
    done = doctor("--config", config, "--model", tmp_path / "empty", "--json")
    failed = [check["sentence"] for check in json.loads(done.stdout) if check["state"] == "fail"]
    assert done.exit_code == 2 and len(failed) == 1 and "empty" in failed[0]


@pytest.mark.parametrize("option", ["--steps", "--data"])
def test_options_of_a_step_need_a_model(option: str, config: Path) -> None:
    """A value that would be ignored is an error."""
    done = doctor(option, config if option == "--data" else 300)
    assert done.exit_code == 2 and "give --model as well" in done.output
