"""Every registered plugin keeps the promises of its kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leakaudit.attacks.film import Film
from leakaudit.attacks.gradient_mixture import GradientMixture
from leakaudit.attacks.llg_plus import LlgPlus
from leakaudit.attacks.pooler_features import PoolerFeatures
from leakaudit.audit.active_server import WidePooler, on_active_server
from leakaudit.metrics.semantic_similarity import SemanticSimilarity
from leakaudit.models.array_classifier import save_auxiliary
from leakaudit.plugins.testing import (
    check_attack,
    check_defense,
    check_metric,
    check_prior,
    classifier_step,
    language_model_step,
)
from leakaudit.plugins.testing.attacks import OBSERVATIONS, Makers
from leakaudit.plugins.testing.steps import TEXT
from leakaudit.priors.causal_lm import CausalLM
from leakaudit.priors.ngram import NGram, build_ngram, write_ngram
from leakaudit.registry import Registry, attacks, defenses, metrics, priors
from tests.support import tiny


def _auxiliary(folder: Path) -> Path:
    """Return labelled data like the client's, which some threat models grant."""
    texts = [TEXT, "a small bird saw the red fish.", "never one horse."]
    batch = tiny.client_step(tiny.bert(num_labels=3), tiny.bert_tokenizer(), texts, [0, 1, 2]).truth.micro_batches[0]
    inputs = {name: tensor for name, tensor in batch.inputs.items() if name != "labels"}
    save_auxiliary(folder / "auxiliary", inputs, batch.inputs["labels"])
    return folder / "auxiliary"


def _on_wide_pooler() -> Any:
    return on_active_server(classifier_step(), WidePooler(width=2000, dimension=24)).observe()


def _on_untied_head() -> Any:
    return tiny.client_step(tiny.gpt2_lm(tied=False), tiny.gpt2_tokenizer(), [TEXT], task="causal-lm").observe()


def _sentence_model(folder: Path) -> Path:
    tiny.bert_tokenizer().save_pretrained(folder)
    tiny.hf.BertModel(tiny.bert().config).save_pretrained(folder)
    return folder


def _language_model(folder: Path) -> Path:
    tiny.gpt2_tokenizer().save_pretrained(folder)
    tiny.gpt2_lm().save_pretrained(folder)  # type: ignore[operator]
    return folder


def _ngrams(folder: Path) -> Path:
    tokenizer = tiny.gpt2_tokenizer()
    write_ngram(folder / "ngram", build_ngram([TEXT], tokenizer, 3), tokenizer)
    return folder / "ngram"


GRANTED: dict[type, Callable[[Path], Any]] = {
    GradientMixture: lambda folder: GradientMixture(auxiliary=_auxiliary(folder)),
    LlgPlus: lambda folder: LlgPlus(auxiliary=_auxiliary(folder)),
    SemanticSimilarity: lambda folder: SemanticSimilarity(_sentence_model(folder)),
    CausalLM: lambda folder: CausalLM(_language_model(folder)),
    NGram: lambda folder: NGram(_ngrams(folder)),
}
"""Plugin -> an instance with the file that it cannot do without."""

ELSEWHERE: dict[type, Makers] = {
    PoolerFeatures: {"a classifier with a wide pooler": _on_wide_pooler},
    Film: {"a language model with a head of its own": _on_untied_head},
}
"""Attack -> what it is tried on, where an active server has to have changed the model, or the tied table of a small model has too few rows."""


def _shipped(registry: Registry[Any]) -> list[tuple[str, type]]:
    """Return the plugins of one kind that are no stand-ins of other tests."""
    return [(name, kind) for name, kind in registry if kind.__module__.partition(".")[0] != "tests"]


def _ready(kind: type, folder: Path) -> Any:
    return GRANTED[kind](folder) if kind in GRANTED else kind


@pytest.mark.parametrize(("name", "kind"), _shipped(attacks))
def test_an_attack_keeps_its_promises(name: str, kind: type, tmp_path: Path) -> None:
    """It repeats itself, changes nothing, keeps to its budget, sees no truth."""
    check_attack(_ready(kind, tmp_path), ELSEWHERE.get(kind, OBSERVATIONS))


@pytest.mark.parametrize(("name", "kind"), _shipped(defenses))
def test_a_defence_keeps_its_promises(name: str, kind: type, tmp_path: Path) -> None:
    """It does nothing at no strength, declares itself, accounts for what it does."""
    check_defense(_ready(kind, tmp_path))


@pytest.mark.parametrize(("name", "kind"), _shipped(metrics))
def test_a_metric_keeps_its_promises(name: str, kind: type, tmp_path: Path) -> None:
    """It says what it is and scores from 0 to 1, the perfect guess best."""
    check_metric(_ready(kind, tmp_path))


@pytest.mark.parametrize(("name", "kind"), _shipped(priors))
def test_a_prior_keeps_its_promises(name: str, kind: type, tmp_path: Path) -> None:
    """It scores many sequences as it scores one, and sees no update."""
    check_prior(_ready(kind, tmp_path))


def test_the_checks_run_on_both_kinds_of_model() -> None:
    """Otherwise an attack on language models would be held to nothing."""
    assert {make().facts.task for make in OBSERVATIONS.values()} == {"classification", "causal-lm"}
    assert classifier_step().facts.num_labels == 3 and language_model_step().truth.labels() is None
