"""The output layer is found by structure, and its logits' gradient is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.algorithms.gradient_estimate import as_gradient
from leakaudit.algorithms.labels.output_layer import check_gradient, find_output_layer, logit_gradient, neutral_outputs
from leakaudit.errors import AnatomyError
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attacks
from tests.support import tiny
from tests.support.optimizer_steps import difference_step


def test_the_last_linear_layer_with_one_output_a_class_is_the_output_layer() -> None:
    """BERT's pooler and feed-forward layers are not mistaken for it."""
    layer = find_output_layer(tiny.observe(["a dog"], model=tiny.bert(num_labels=3)))
    assert (layer.weight, layer.bias) == ("classifier.weight", "classifier.bias")


def test_of_two_layers_of_the_right_width_the_later_one_is_taken() -> None:
    """With as many classes as hidden features, attention layers fit, too."""
    layer = find_output_layer(tiny.observe(["a dog"], model=tiny.bert(num_labels=tiny.HIDDEN)))
    assert layer.weight == "classifier.weight"


def test_a_head_without_bias_has_none() -> None:
    """GPT-2's classifier has a weight only."""
    seen = tiny.client_step(tiny.gpt2_classifier(), tiny.gpt2_tokenizer(), ["a dog"]).observe()
    layer = find_output_layer(seen)
    assert (layer.weight, layer.bias) == ("score.weight", None)


def test_a_bias_that_is_not_shared_is_not_read() -> None:
    """Freezing the bias alone leaves the weight to read."""
    seen = tiny.observe(["a dog"], frozen=frozenset({"classifier.bias"}))
    assert find_output_layer(seen).bias is None


def test_a_frozen_head_is_named() -> None:
    """The message says which parameter is missing."""
    seen = tiny.observe(["a dog"], frozen=frozenset({"classifier.weight", "classifier.bias"}))
    with pytest.raises(AnatomyError, match=r"'classifier.weight' is frozen"):
        find_output_layer(seen)


def test_a_model_without_such_a_layer_is_refused() -> None:
    """The message says what was looked for."""
    seen = tiny.observe(["a dog"])
    wrong = seen.facts.model_copy(update={"num_labels": 7})
    with pytest.raises(AnatomyError, match="looked for a linear layer with 7 outputs"):
        find_output_layer(type(seen)(seen.update, seen.model, wrong))


@pytest.mark.parametrize(
    ("labels", "problem", "reason"),
    [
        (1, None, "this is a regression, or has one class only"),
        (3, "regression", "this is a regression"),
        (3, "multi_label_classification", "this is multi-label classification"),
    ],
)
def test_losses_without_one_class_a_sequence_are_refused(labels: int, problem: str | None, reason: str) -> None:
    """Regression and multi-label training have no class counts."""
    model: Any = tiny.bert(num_labels=labels)
    seen = tiny.observe(["a dog"], model=tiny.bert())
    model.config.problem_type = problem
    facts = seen.facts.model_copy(update={"num_labels": labels})
    with pytest.raises(AnatomyError, match=reason):
        find_output_layer(type(seen)(seen.update, model, facts))


def test_language_modelling_has_no_labels() -> None:
    """A token is not a class of its sequence."""
    seen = tiny.client_step(tiny.gpt2_lm(), tiny.gpt2_tokenizer(), ["a dog"], task="causal-lm").observe()
    with pytest.raises(AnatomyError, match="this task is causal-lm"):
        find_output_layer(seen)


def test_a_difference_of_weights_is_no_gradient() -> None:
    """Its sign is the optimizer's."""
    with pytest.raises(AnatomyError, match="difference of weights"):
        check_gradient(difference_step("SGD", [["a dog"]]).observe())
    with pytest.raises(AnatomyError, match="only the signs of its large entries"):
        check_gradient(as_gradient(difference_step("AdamW", [["a dog"]]).observe())[0])


def test_the_bias_update_is_probability_minus_share_of_each_class() -> None:
    """LLG, Eq. 9, with the probabilities computed from the private batch itself."""
    model = tiny.bert(num_labels=4)
    step = tiny.client_step(model, tiny.bert_tokenizer(), ["a dog saw a cat", "the bird", "a fish ate"], [2, 2, 0])
    seen = step.observe()
    layer = find_output_layer(seen)
    inputs = {k: v for k, v in step.truth.micro_batches[0].inputs.items() if k != "labels"}
    with torch.no_grad():
        probabilities = model(**inputs).logits.softmax(dim=1).mean(dim=0)
    expected = probabilities - torch.tensor([1, 0, 2, 0]) / 3
    found = logit_gradient(seen, layer, neutral_outputs(seen, layer, torch.Generator()))
    assert torch.allclose(found.float(), expected, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_neutral_features_give_the_neutral_logits(family: str) -> None:
    """The head's input is right, also where a decoder's head sees every token."""
    model, tokenizer = {
        "bert": (tiny.bert(3), tiny.bert_tokenizer()),
        "gpt2": (tiny.gpt2_classifier(3), tiny.gpt2_tokenizer()),
    }[family]
    seen = tiny.client_step(model, tokenizer, ["a dog"]).observe()
    layer = find_output_layer(seen)
    neutral = neutral_outputs(seen, layer, torch.Generator().manual_seed(3))
    with torch.no_grad():
        again = layer.module(neutral.features).softmax(dim=1).mean(dim=0)
    assert torch.allclose(again.double(), neutral.probabilities, atol=1e-6)


def test_row_sums_of_a_fresh_decoder_are_zero_and_projections_are_not() -> None:
    """Features of a fresh LayerNorm sum to 0, so LLG's g_i = 1^T dW_i is 0."""
    seen = tiny.client_step(tiny.gpt2_classifier(3), tiny.gpt2_tokenizer(), ["a dog saw a cat"], [1]).observe()
    layer = find_output_layer(seen)
    rows = seen.update[layer.weight]
    assert float(rows.sum(dim=1).abs().max()) < 1e-5 * float(rows.norm())
    found = logit_gradient(seen, layer, neutral_outputs(seen, layer, torch.Generator()))
    assert float(found.abs().max()) > 1e-2


def test_reading_leaves_no_hook_behind() -> None:
    """The hook that looks at the head's input is removed."""
    seen = tiny.observe(["a dog"])
    layer = find_output_layer(seen)
    neutral_outputs(seen, layer, torch.Generator())
    assert isinstance(layer.module, nn.Linear)
    assert not layer.module._forward_pre_hooks


@pytest.mark.parametrize("name", ["idlg", "llg", "llg-star", "ilrg"])
def test_a_batch_of_one_class_is_told_without_its_size(name: str) -> None:
    """The attack names no number of sequences, but the class of all of them."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["a dog", "a cat", "the bird", "two fish"], [1] * 4)
    guess = attacks[name]()(step.observe(), torch.Generator().manual_seed(0), Budget(600))
    assert guess.counts_are_shares and guess.label_counts is not None
    assert guess.label_counts[0] == 0
