"""The active-server scenario: declared, computed again, kept apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.audit.active_server import WidePooler, named_server, on_active_server
from leakaudit.audit.audit import Audit
from leakaudit.cli import main
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.snapshot import Provenance, Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.errors import AnatomyError, ConfigError, SnapshotError
from leakaudit.models.recipe import ModelRecipe
from tests.support import tiny

TEXT = "the old dog chased a cat."
SERVER = WidePooler(width=400, dimension=20)


def _step(**more: Any) -> ClientStep:
    return tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), [TEXT], [1], **more)


def _snapshot(step: ClientStep) -> Snapshot:
    return Snapshot(step.observe(), step.truth, step.recipe, ModelRecipe.of(step.model), Provenance(framework="test"))


def test_the_step_is_that_of_the_same_client_on_the_changed_model() -> None:
    """The update has the wide pooler's shape, and the facts name the server.

    Batch and recipe are the same.
    """
    honest = _step(frozen=frozenset({"bert.embeddings.word_embeddings.weight"}))
    step = on_active_server(honest, SERVER)
    assert (step.truth, step.recipe) == (honest.truth, honest.recipe)
    update = step.update()
    assert update["bert.pooler.dense.weight"].shape == (400, 32)
    assert set(update) == set(honest.update())
    declared = step.facts.server
    assert declared is not None and declared.name == "wide-pooler"
    assert declared.parameters == {
        "width": 400, "dimension": 20, "activation": "cube+square", "deviation": 0.1, "seed": 0, "kept": 32,
    }  # fmt: skip
    assert honest.facts.server is None


def test_the_pooler_is_as_wide_as_the_vocabulary_unless_said_otherwise() -> None:
    """And looks at no more features than there are."""
    step = on_active_server(_step(), WidePooler(dimension=1000))
    assert step.facts.server is not None
    assert step.facts.server.parameters["width"] == len(tiny.VOCABULARY)
    assert step.facts.server.parameters["dimension"] == 32


def test_a_model_without_a_pooler_and_a_loss_outside_it_are_refused() -> None:
    """Neither can be computed anew."""
    decoder = tiny.client_step(tiny.gpt2_classifier(), tiny.gpt2_tokenizer(), [TEXT], [1])
    with pytest.raises(AnatomyError, match="looked for a pooler"):
        on_active_server(decoder, SERVER)
    with pytest.raises(SnapshotError, match="computed outside the model"):
        on_active_server(replace(_step(), recipe=StepRecipe(loss="pulls")), SERVER)


def test_servers_are_named_with_their_knobs() -> None:
    """As plugins are."""
    assert named_server("wide-pooler", {"dimension": "7", "activation": "selu"}) == WidePooler(
        dimension=7, activation="selu"
    )
    with pytest.raises(ConfigError, match=r"no server is called 'wide-pool'; did you mean 'wide-pooler'\?"):
        named_server("wide-pool", {})
    with pytest.raises(ConfigError, match="deviation must be above 0"):
        named_server("wide-pooler", {"deviation": 0})


def _audit(folder: Path, server: str | None) -> dict[str, Any]:
    config = AuditConfig(
        out_dir=folder,
        attacks=(
            PluginSpec(name="idlg"),
            PluginSpec(name="pooler-features", options={"preset": "fast", "steps": 3}),
        ),
        server=None if server is None else PluginSpec.parse(server),
        controls=1,
    )
    audit = Audit(folder, config, tiny.bert_tokenizer())
    audit.step(_snapshot(_step()))
    audit.finish()
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


def test_an_audit_under_it_says_so_everywhere(tmp_path: Path) -> None:
    """In the threat model, in what was not tested, and in the report."""
    results = _audit(tmp_path, "wide-pooler(width=400,dimension=20)")
    assert results["threat_model"]["adversary"].startswith("an active server, which changed the model")
    assert "wide-pooler(width=400, dimension=20)" in results["threat_model"]["adversary"]
    assert results["coverage"]["not_tested"][0]["what"] == "honest server"
    assert [attempt["status"] for attempt in results["attempts"]] == ["ran", "ran"]
    assert "an active server, which changed the model" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_an_honest_audit_does_not_know_it(tmp_path: Path) -> None:
    """The attack that belongs to it is not applicable, and says what it would need."""
    results = _audit(tmp_path, None)
    assert results["threat_model"]["adversary"] == "honest-but-curious server"
    assert results["coverage"]["not_tested"][0]["what"] == "malicious server"
    (attempt,) = [a for a in results["attempts"] if a["attack"] == "pooler-features"]
    assert attempt["status"] == "not_applicable" and "--server wide-pooler" in attempt["reason"]


def test_where_it_cannot_be_every_attempt_is_skipped_with_the_reason(tmp_path: Path) -> None:
    """Not scored as protection."""
    step = tiny.client_step(tiny.gpt2_classifier(), tiny.gpt2_tokenizer(), [TEXT], [1])
    config = AuditConfig(
        out_dir=tmp_path, attacks=(PluginSpec(name="idlg"),), server=PluginSpec(name="wide-pooler"), controls=0
    )
    audit = Audit(tmp_path, config, tiny.gpt2_tokenizer())
    audit.step(_snapshot(step))
    (entry,) = audit.entries
    assert entry.attempt.status == "skipped"
    assert "the active server wide-pooler: looked for a pooler" in entry.attempt.reason


def test_the_command_line_takes_a_server(tmp_path: Path) -> None:
    """And refuses one that it does not know before any attack."""
    from click.testing import CliRunner

    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    tiny.bert().save_pretrained(model)  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(model)
    data.write_text(json.dumps({"text": TEXT, "label": 1}) + "\n", encoding="utf-8")
    words = [
        "simulate",
        "--model",
        model,
        "--data",
        data,
        "--steps",
        1,
        "--attacks",
        "idlg",
        "--controls",
        0,
        "--out",
        tmp_path / "out",
    ]
    said = CliRunner().invoke(main, [str(word) for word in (*words, "--server", "wide-pooler(width=400,dimension=9)")])
    assert said.exit_code == 0, said.output
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert "dimension=9" in results["threat_model"]["adversary"]
    wrong = CliRunner().invoke(main, [str(word) for word in (*words, "--server", "wide-pool")])
    assert wrong.exit_code == 2 and "did you mean 'wide-pooler'" in wrong.output


def test_dropout_is_drawn_anew_and_repeated() -> None:
    """The kept random state gives one and the same step on the changed model, too."""
    from leakaudit.client.batches import with_random_state
    from leakaudit.client.truth import Truth

    step = tiny.client_step(tiny.bert(dropout=0.1), tiny.bert_tokenizer(), [TEXT], [1], training=True)
    step = replace(step, truth=Truth((with_random_state(step.truth.micro_batches[0], 3),)))
    one, other = (on_active_server(step, SERVER).update()["bert.pooler.dense.weight"] for _ in range(2))
    assert torch.equal(one, other) and bool(one.any())
