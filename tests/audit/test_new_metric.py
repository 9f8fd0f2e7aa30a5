"""A metric is one class, and its numbers reach every output."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from rich.console import Console

from leakaudit.audit.audit import Audit
from leakaudit.client.snapshot import Provenance, Snapshot
from leakaudit.config.audit import AuditConfig
from leakaudit.models.recipe import ModelRecipe
from leakaudit.plugins.metric_protocol import Pair
from leakaudit.registry import metrics
from leakaudit.reports import print_summary
from leakaudit.results.consistency import contradictions
from leakaudit.results.files import load_results
from tests.support import tiny


@dataclass(frozen=True)
class FirstToken:
    """1 where the first token of the text was recovered in its place."""

    label: ClassVar[str] = "first-token rate"
    meaning: ClassVar[str] = "Share of the texts whose first token was recovered in its place."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Literal["sequence", "step"]] = "sequence"
    source: ClassVar[str] = "made for a test"

    def __call__(self, pair: Pair) -> float | None:
        """Return 1 or 0, None for a text without tokens."""
        return float(pair.true_ids[:1] == pair.guess_ids[:1]) if pair.true_ids else None


RULE = "{id: beginnings, metric: first_token, statistic: max, max_value: 0.5}"


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of an audit by the span attack, with a rule on the new metric."""
    folder = tmp_path_factory.mktemp("metric")
    policy = folder / "policy.yaml"
    policy.write_text(f"schema: leakaudit.policy/1\nname: release\nrules:\n  - {RULE}\n")
    metrics.register("first_token")(FirstToken)
    try:
        config = {"out_dir": folder, "attacks": ["span"], "controls": 0, "policy": policy}
        audit = Audit(folder / "run", AuditConfig.model_validate(config), tiny.bert_tokenizer())
        audit.step(_snapshot())
        audit.finish()
    finally:
        del metrics._plugins["first_token"]
    return folder / "run"


def _snapshot() -> Snapshot:
    model = tiny.bert(num_labels=3)
    client = tiny.client_step(model, tiny.bert_tokenizer(), ["the old fox ran over the quiet river again"], [1])
    return Snapshot(
        observation=client.observe(),
        truth=client.truth,
        recipe=client.recipe,
        model_recipe=ModelRecipe.of(model),
        provenance=Provenance(framework="test", step=0),
    )


def test_the_results_hold_it_for_the_text_the_step_and_the_summary(audited: Path) -> None:
    """And in the catalogue, with the words of its class."""
    results = load_results(audited)
    (attempt,), (summary,) = results.attempts, results.summaries
    assert attempt.sequences[0].scores["first_token"] == summary.scores["first_token"] == 1.0
    assert json.loads((audited / "results.json").read_text())["catalogue"]["metrics"]["first_token"] == {
        "label": FirstToken.label,
        "meaning": FirstToken.meaning,
        "source": FirstToken.source,
        "level": "sequence",
        "higher_is_better": True,
    }
    assert contradictions(results) == ()


def test_the_report_shows_it_in_the_matrix_beside_the_text_and_in_the_glossary(audited: Path) -> None:
    """By its label."""
    page = html.unescape((audited / "report.html").read_text())
    sections = {part.partition('"')[0]: part for part in page.split('<section id="')}
    assert all("first-token rate 1.00" in sections[name] for name in ("matrix", "samples"))
    assert f"<dt>{FirstToken.label}</dt><dd>{FirstToken.meaning}</dd>" in sections["glossary"]


def test_a_rule_of_the_gate_may_limit_it_and_says_its_label(audited: Path) -> None:
    """The verdict is about the new metric."""
    (rule,) = json.loads((audited / "verdict.json").read_text())["rules"]
    assert (rule["status"], rule["observed"]) == ("FAIL", 1.0)
    assert rule["sentence"].startswith("The highest first-token rate of the one audited client step is 1.00")


def test_the_terminal_prints_it(audited: Path) -> None:
    """In the cell of its attack."""
    written = StringIO()
    print_summary(audited, Console(file=written, width=200))
    assert "first-token rate 1.00" in written.getvalue()


def test_attacks_and_defences_are_described_as_well(audited: Path) -> None:
    """The catalogue holds what their classes say, and the glossary their meanings."""
    catalogue = load_results(audited).catalogue
    span, none = catalogue.attacks["span"], catalogue.defenses["none"]
    assert (span.label, span.goal) == ("span", "text") and span.threat_model and span.source
    page = html.unescape((audited / "report.html").read_text())
    assert f"<dt>span</dt><dd>{span.meaning}</dd>" in page
    assert f"<dt>{none.label} (none)</dt><dd>{none.meaning}</dd>" in page
