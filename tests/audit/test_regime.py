"""The regime of a run: tokens against the hidden size, and the trained parts."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from leakaudit.audit.audit import Audit
from leakaudit.audit.simulation.texts import Simulator
from leakaudit.audit.step_record import beyond_hidden, regime_of
from leakaudit.config.audit import AuditConfig
from leakaudit.config.simulation import Simulation
from leakaudit.results.consistency import contradictions
from leakaudit.results.files import load_results
from leakaudit.results.schema import AttemptStatus
from tests.support import tiny

TEXTS = [
    "the old dog chased a red horse near the big river",
    "one bird never ate two fish today and the cat ran",
    "four new trees near a big house and the small road",
    "a cat found three small houses and the old tree",
    "the river and the road ran near one new house today",
    "two dogs and three cats never saw the red bird",
    "a horse ran over the quiet river and the old road",
    "the small fish ate one big bird near four trees",
]


def _simulator(folder: Path, model: Any, tokenizer: Any, **more: Any) -> Simulator:
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [json.dumps({"text": text, "label": number % 2}) for number, text in enumerate(TEXTS)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    given: dict[str, Any] = {"model": folder / "model", "data": folder / "rows.jsonl", "batch_size": 8, "steps": 1}
    return Simulator(Simulation(**given | more))


def test_an_audit_beyond_the_hidden_size_proves_nothing_and_says_so(tmp_path: Path) -> None:
    """About 90 tokens at 80 different places against a hidden size of 32."""
    simulator = _simulator(tmp_path, tiny.bert(num_labels=2), tiny.bert_tokenizer())
    config = {"out_dir": tmp_path, "attacks": ["span", "embedding-rows"], "controls": 0}
    audit = Audit(tmp_path / "run", AuditConfig.model_validate(config), simulator.tokenizer)
    audit.step(simulator.snapshot(0))
    audit.finish()
    found = load_results(tmp_path / "run")
    assert contradictions(found) == ()
    by_name = {attempt.attack: attempt for attempt in found.attempts}
    assert by_name["span"].status is AttemptStatus.NOT_APPLICABLE
    assert "That is no protection" in by_name["span"].reason
    assert found.steps[0].beyond_hidden is True
    assert (found.regime.tokens, found.regime.embeddings, found.regime.head) == ("65-128", "trained", "trained")
    assert found.catalogue.attacks["span"].token_limit and not found.catalogue.attacks["embedding-rows"].token_limit
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    statuses = {rule["id"]: rule["status"] for rule in verdict["rules"]}
    assert statuses["no-sentence-verbatim"] == "INCONCLUSIVE" and "PASS" not in statuses.values()
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    assert "1 of 1 step has as many or more. That is no protection. There span can say nothing." in page
    assert "embedding-rows (words only) does not end there and ran." in page
    assert "word embeddings trained, head trained" in page and "at most 65-128 tokens a step" in page
    not_run = {item.what: item.why for item in found.coverage.not_run}
    assert "does not end where a step has as many tokens" in not_run["tag"]
    assert "does not end" not in not_run["idlg"]


def test_equal_inputs_count_once_unless_dropout_tells_them_apart(tmp_path: Path) -> None:
    """Eight copies of one text have the inputs of one text."""
    simulator = _simulator(tmp_path, tiny.bert(num_labels=2, dropout=0.1), tiny.bert_tokenizer())
    simulator.batches = [[simulator.batches[0][0]] * 8]
    assert beyond_hidden(simulator.snapshot(0)) is False
    simulator.what = Simulation(model=tmp_path / "model", data=tmp_path / "rows.jsonl", batch_size=8, mode="train")
    assert beyond_hidden(simulator.snapshot(0)) is True


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ("trained", "tied", None)),
        ({"freeze": ("embeddings",)}, ("frozen", "frozen", None)),
        ({"lora_rank": 4}, ("frozen", "frozen", 4)),
    ],
)
def test_the_trained_parts_of_a_language_model(
    tmp_path: Path, more: dict[str, Any], expected: tuple[str, str, int | None]
) -> None:
    """GPT-2 ties its head to the word embeddings."""
    simulator = _simulator(tmp_path, tiny.gpt2_lm(), tiny.gpt2_tokenizer(), task="causal-lm", **more)
    regime = regime_of(simulator.snapshot(0), None)
    assert (regime.embeddings, regime.head, regime.adapters_rank) == expected


def test_a_frozen_head_of_a_classifier_is_found(tmp_path: Path) -> None:
    """By the number of its outputs."""
    simulator = _simulator(tmp_path, tiny.bert(num_labels=2), tiny.bert_tokenizer(), freeze=("classifier.*",))
    regime = regime_of(simulator.snapshot(0), None)
    assert (regime.embeddings, regime.head) == ("trained", "frozen")
