"""What a training run records of its policy, its code and the files that it makes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from leakaudit.callbacks.torch_loop import watch
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.gate.policy import load_policy
from leakaudit.results.files import load_results
from tests.support import tiny

POLICY = "schema: leakaudit.policy/1\nname: clinic\nrules:\n  - {id: rate, event: exact_sentence, max_rate: 0.05}\n"


def test_a_run_names_its_first_policy_and_the_files_that_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy loosened during training shows; old weights are not new ones."""
    monkeypatch.chdir(tmp_path)
    policy, old, new = Path("policy.yaml"), Path("old.bin"), Path("new.bin")
    policy.write_text(POLICY)
    first = load_policy(policy).digest
    old.write_bytes(b"yesterday")
    os.utime(old, (1.0e9, 1.0e9))
    config = AuditConfig(
        out_dir=Path("audit"), attacks=(PluginSpec(name="llg"),), controls=0, schedule="inline", policy=policy,
        artifacts=(old, new, Path("missing.bin")), data_name="notes-7", data_invented=True,
    )  # fmt: skip
    model, tokenizer = tiny.bert(), tiny.bert_tokenizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tokenizer=tokenizer, config=config, total_steps=1):
        batch = tokenizer(["the old dog chased a cat ."], return_tensors="pt")
        model(**batch, labels=torch.tensor([1])).loss.backward()
        optimizer.step()
        policy.write_text(POLICY.replace("0.05", "0.5"))
        new.write_bytes(b"weights")
    found, verdict = load_results(Path("audit")), json.loads(Path("audit/verdict.json").read_text())
    assert found.run.policy is not None and found.run.policy.digest == first
    assert verdict["policy_changed"] is True and verdict["policy_of_run"] == first
    (made,) = found.subject.artifacts
    assert (made.name, made.sha256) == ("new.bin", hashlib.sha256(b"weights").hexdigest())
    lacking = {one.what: one.why for one in found.coverage.not_tested if one.what.startswith("the artefact")}
    assert (
        "older than the run" in lacking["the artefact old.bin"] and "not there" in lacking["the artefact missing.bin"]
    )
    assert found.subject.data_invented is True
    assert found.subject.data == "notes-7" and str(tmp_path) not in Path("audit/results.json").read_text()
