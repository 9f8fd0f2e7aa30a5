"""The axolotl plugin audits axolotl's own training.

It runs in the environment that `make integrations` makes for axolotl, which has versions of its own of transformers, trl and peft.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from leakaudit.results.files import load_results

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("axolotl") is None, reason="axolotl is not installed"),
]


def test_two_lines_of_yaml_audit_a_training_of_axolotl(tmp_path: Path) -> None:
    """Its command line, its trainer, LoRA with AdamW: every kept step is verified, and leaks."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    env = {
        **os.environ,
        "AXOLOTL_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "PYTHONPATH": str(ROOT),
    }
    for command in (["examples/tiny_language_model.py"], ["-m", "axolotl.cli.train", "examples/axolotl.yaml"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    results = load_results(tmp_path / "leakaudit-demo" / "axolotl")
    assert [step.verification.status.value for step in results.steps] == ["verified"] * 2
    assert any(attempt.events for attempt in results.attempts)
