"""A pooler is found by structure and widened; nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.errors import AnatomyError
from leakaudit.models.rebuilding import build_model
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.structure import Pooler, find_pooler
from leakaudit.models.structure.first_token_head import with_activation_module
from leakaudit.models.tensors import state_of
from leakaudit.models.wide_pooler import CubePlusSquare, widened
from tests.support import tiny

KNOBS = {"width": 300, "dimension": 20, "activation": "selu"}


def _inputs() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[2, 7, 8, 9, 3], [2, 10, 11, 12, 3]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_a_bert_has_its_pooler() -> None:
    """By what feeds what, not by names; the model is left as it was."""
    model = tiny.bert(num_labels=3)
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    assert find_pooler(model, 3) == Pooler("bert.pooler.dense", "bert.pooler.activation", "classifier")
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks


@pytest.mark.parametrize(
    ("model", "classes", "message"),
    [
        (tiny.gpt2_classifier(), 2, "looked for a pooler"),
        (tiny.bert(), 7, "looked for an output layer with 7 outputs"),
        (nn.Linear(3, 2), 2, "looked for the token table"),
    ],
)
def test_a_model_without_one_is_a_clear_error(model: nn.Module, classes: int, message: str) -> None:
    """Decoders read the last token's state directly."""
    with pytest.raises(AnatomyError, match=message):
        find_pooler(model, classes)


def roberta() -> Any:
    """Return a tiny RoBERTa, whose head calls tanh as a function."""
    torch.manual_seed(0)
    config = tiny.hf.RobertaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3,
        max_position_embeddings=40, pad_token_id=1,
    )  # fmt: skip
    return tiny.hf.RobertaForSequenceClassification(config).eval()


def distilbert() -> Any:
    """Return a tiny DistilBERT, whose own forward calls ReLU."""
    config = tiny.hf.DistilBertConfig(vocab_size=50, dim=32, n_layers=1, n_heads=2, hidden_dim=32, num_labels=3)
    return tiny.hf.DistilBertForSequenceClassification(config).eval()


@pytest.mark.parametrize("model", [roberta(), distilbert()])
def test_an_activation_that_is_no_module_is_said(model: nn.Module) -> None:
    """As it stands, nothing there can be exchanged."""
    with pytest.raises(AnatomyError, match="has no activation that is a module of its own"):
        find_pooler(model, 3)


def test_a_head_that_calls_a_function_becomes_one_with_a_module() -> None:
    """It computes the same, in training, too, and its parameters keep their names."""
    model = roberta()
    changed = with_activation_module(model, 3)
    assert find_pooler(changed, 3) == Pooler("classifier.dense", "classifier.activation", "classifier.out_proj")
    assert [name for name, _ in changed.named_parameters()] == [name for name, _ in model.named_parameters()]
    for training in (False, True):
        logits = []
        for one in (model.train(training), changed.train(training)):
            torch.manual_seed(1)
            logits.append(one(**_inputs()).logits)
        assert torch.equal(*logits)
    assert with_activation_module(changed, 3) is changed
    bert = tiny.bert()
    assert with_activation_module(bert, 2) is bert


def test_a_function_in_the_models_own_forward_cannot_be_exchanged() -> None:
    """A server sends other modules, not other code of the whole model."""
    with pytest.raises(AnatomyError, match="reads the first token and calls tanh or ReLU"):
        widened(distilbert(), 3, **KNOBS)  # type: ignore[arg-type]


def test_old_outputs_stay_and_new_ones_are_what_the_paper_says() -> None:
    """New rows are normal in d' features and zero elsewhere; class c takes c / m."""
    model = tiny.bert(num_labels=3)
    before = {name: value.clone() for name, value in state_of(model).items()}
    changed = widened(model, 3, width=3032, dimension=20, activation="cube+square", deviation=0.5, seed=1)
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    dense, head = changed.get_submodule("bert.pooler.dense"), changed.get_submodule("classifier")
    assert isinstance(dense, nn.Linear) and isinstance(head, nn.Linear)
    assert torch.equal(dense.weight[:32], before["bert.pooler.dense.weight"])
    assert torch.equal(head.weight[:, :32], before["classifier.weight"])
    assert torch.equal(head.bias, before["classifier.bias"])
    new = dense.weight.detach()[32:]
    assert new.shape == (3000, 32) and not bool(new[:, 20:].any()) and not bool(dense.bias[32:].any())
    assert float(new[:, :20].std()) == pytest.approx(0.5, rel=0.02)
    assert torch.equal(head.weight[:, 32:], (torch.arange(3) / 3000)[:, None].expand(3, 3000))
    assert isinstance(changed.get_submodule("bert.pooler.activation"), CubePlusSquare)
    assert all(p.requires_grad for p in changed.parameters()) and not changed.training


def test_it_computes_what_its_parts_say() -> None:
    """Logits by hand, from what goes into the pooler."""
    model = tiny.bert()
    changed = widened(model, 2, width=300, dimension=20, activation="selu")
    taken: list[torch.Tensor] = []
    dense, head = changed.get_submodule("bert.pooler.dense"), changed.get_submodule("classifier")
    dense.register_forward_pre_hook(lambda _, given: taken.append(given[0]))
    with torch.no_grad():
        logits = changed(**_inputs()).logits
        assert torch.allclose(logits, head(torch.nn.functional.selu(dense(taken[0]))), atol=1e-6)


@pytest.mark.parametrize("knobs", [{"width": 32}, {"dimension": 33}, {"dimension": 0}])
def test_sizes_that_leave_nothing_are_refused(knobs: dict[str, int]) -> None:
    """No further outputs, or no features for them to look at."""
    with pytest.raises(AnatomyError, match="has more than its 32 outputs and looks at 1 to 32 features"):
        widened(tiny.bert(), 2, **{**KNOBS, **knobs})  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "classes"), [(tiny.bert(), 2), (roberta(), 3)])
def test_a_side_process_can_make_it_again(model: nn.Module, classes: int) -> None:
    """From its recipe and its weights."""
    changed = widened(model, classes, width=300, dimension=20, activation="selu")
    again = build_model(ModelRecipe.model_validate_json(ModelRecipe.of(changed).model_dump_json()), state_of(changed))
    with torch.no_grad():
        assert torch.equal(again(**_inputs()).logits, changed(**_inputs()).logits)
