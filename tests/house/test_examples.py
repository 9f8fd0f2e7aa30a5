"""Every script in `examples/` runs, and its steps have the expected stamps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leakaudit.audit.audit import Audit
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.results.files import load_results
from leakaudit.results.schema import AttemptStatus, Missing, Results, Score
from tests.house.test_packaging import ROOT
from tests.support import stacks, tiny

STAMPS = {
    "with_accelerate": {"verified"},
    "with_classifier": {"verified"},
    "with_fedavg": {"verified"},
    "with_lightning": {"verified"},
    "with_opacus": {"noised"},
    "with_torch": {"verified"},
    "with_trainer": {"verified"},
}
"""Script -> stamps of the steps it keeps."""


@pytest.mark.parametrize("name", STAMPS)
def test_a_script_for_a_stack_runs_and_its_steps_are_what_was_sent(name: str, tmp_path: Path) -> None:
    """With a side process of its own, to a report."""
    done = subprocess.run(  # its output is looked at below
        [sys.executable, f"examples/{name}.py", "--out", str(tmp_path / "audit"), "--steps", "2"],
        cwd=ROOT,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "audit" / "results.json").read_text())
    assert {step["verification"]["status"] for step in results["steps"]} == STAMPS[name], results["steps"]
    assert (tmp_path / "audit" / "report.html").is_file()
    if name == "with_opacus":
        _leaks_words_without_its_noise_only(load_results(tmp_path / "audit"))


def _leaks_words_without_its_noise_only(found: Results) -> None:
    """Behind noise there is no event; without noise exactly all words are named."""
    by_defense = {attempt.defense: attempt for attempt in found.attempts}
    sent, undefended = by_defense["none"], by_defense["undefended"]
    assert sent.events == ()
    recall, precision = sent.scores["token_recall"], sent.scores["token_precision"]
    assert isinstance(recall, Score) and recall.value < 0.1
    assert isinstance(precision, Missing) or precision.value < 0.5
    assert "all_words" in undefended.events
    assert undefended.scores["token_precision"] == undefended.scores["token_recall"]
    summary = {summary.defense: summary for summary in found.summaries}["undefended"]
    assert (summary.scores.get("token_recall"), summary.scores.get("token_precision")) == (1.0, 1.0)


@pytest.mark.parametrize("sigma", [1.0, 1e-5])
def test_no_word_leaks_from_private_steps_of_a_tiny_model(sigma: float, tmp_path: Path) -> None:
    """Private steps are kept, verified and attacked, as in `with_opacus.py`.

    The attacks are the default ones on words and labels.

    A noise multiplier of 0.00001 shows that the audit sees words where noise leaves them: precision stands beside recall there.
    """
    steps, _ = stacks.private_run(tmp_path / "run", sigma=sigma)
    names = ("embedding-rows", "idlg", "llg", "ilrg")
    config = AuditConfig(attacks=tuple(PluginSpec(name=name) for name in names), controls=0)
    audit = Audit(tmp_path / "audit", config, tiny.bert_tokenizer())
    for snapshot in steps.values():
        audit.step(snapshot)
    found = [attempt for attempt in audit.finish().attempts if attempt.status is AttemptStatus.RAN]
    assert len(found) == len(names) * len(steps)
    words = [attempt.scores for attempt in found if attempt.attack == "embedding-rows"]
    if sigma == 1.0:
        assert not any(attempt.events for attempt in found)
        assert all(isinstance(scores["token_recall"], Score) for scores in words)
    else:
        recall, precision = (words[0][name] for name in ("token_recall", "token_precision"))
        assert isinstance(recall, Score) and isinstance(precision, Score)
        assert recall.value > 0.5 and precision.value > 0.8


def test_every_stack_has_its_script() -> None:
    """And no script is left untested."""
    scripts = {path.stem for path in (ROOT / "examples").glob("with_*.py")}
    assert scripts == set(STAMPS)
