"""What the user's audit object says before, during and after a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.context import OFF_SWITCH
from leakaudit.config.audit import PluginSpec
from leakaudit.results.files import load_results, to_json
from tests.support import factories, tiny, tiny_trainer

TOKENIZER = tiny.bert_tokenizer()


def test_results_and_verdict_are_there_after_training_and_none_before(tmp_path: Path) -> None:
    """They are those of the folder, and a notebook shows them."""
    config = tiny_trainer.audit_config(tmp_path / "audit", attacks=(PluginSpec(name="embedding-rows"),), controls=0)
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = watch(model, optimizer, tokenizer=TOKENIZER, config=config)
    assert (audit.results, audit.verdict, audit._repr_html_()) == (None, None, None)
    assert repr(audit) == "Watch(training has not begun)"
    with audit:
        model(**TOKENIZER(["the old dog"], return_tensors="pt"), labels=torch.tensor([0])).loss.backward()
        optimizer.step()
        assert (audit.results, audit.verdict) == (None, None)
        assert repr(audit).startswith("Watch(training runs, steps kept: 1, folder ")
    assert audit.folder is not None and audit.results is not None and audit.verdict is not None
    assert to_json(audit.results) == to_json(load_results(audit.folder))
    assert audit.verdict.verdict == json.loads((audit.folder / "verdict.json").read_text())["verdict"]
    assert repr(audit) == f"Watch({audit.verdict.verdict}, folder {str(audit.folder)!r})"
    assert audit.verdict.sentence[:20] in str(audit._repr_html_())


def test_results_of_an_earlier_run_are_not_those_of_a_training_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object says why there are none."""
    folder = tmp_path / "audit"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(to_json(factories.audit(1, 3))))
    monkeypatch.setenv(OFF_SWITCH, "1")
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    tiny_trainer.make_trainer(tmp_path / "run", audit).train()
    assert (audit.results, audit.verdict, audit._repr_html_()) == (None, None, None)
    assert repr(audit) == f"LeakAuditCallback(not audited: {OFF_SWITCH} is set)"


def test_changed_results_are_no_reason_for_a_failing_repr(tmp_path: Path) -> None:
    """Only asking for them raises."""
    audit = LeakAuditCallback()
    audit._folder = tmp_path
    assert repr(audit) == f"LeakAuditCallback(no results yet, folder {str(tmp_path)!r})"
    (tmp_path / "results.json").write_text("{}")
    assert repr(audit).startswith("LeakAuditCallback(ResultsError, ") and audit._repr_html_() is None
