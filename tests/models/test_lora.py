"""Low-rank adapters: put in, described, rebuilt, and found by structure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leakaudit.errors import ConfigError, ModelError
from leakaudit.models.lora import adapted, add_lora
from leakaudit.models.rebuilding import build_model
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.structure import find_anatomy
from leakaudit.models.tensors import state_of
from tests.support import tiny

pytest.importorskip("peft")


def test_adapters_change_nothing_at_first_and_the_seed_decides_them() -> None:
    """B is zero; A is drawn from the seed whatever the global random state."""
    ids = torch.arange(5, 13)[None]
    plain, one, two, other = (tiny.bert() for _ in range(4))
    recipe = add_lora(one, 3, seed=1)
    torch.manual_seed(5)
    add_lora(two, 3, seed=1)
    add_lora(other, 3, seed=2)
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, one(input_ids=ids).logits)
    assert recipe.targets == ("query", "value") and recipe.rank == 3
    name = "bert.encoder.layer.0.attention.self.query.lora_A.default.weight"
    assert torch.equal(state_of(one)[name], state_of(two)[name])
    assert not torch.equal(state_of(one)[name], state_of(other)[name])


def test_a_model_with_adapters_is_rebuilt_from_its_recipe() -> None:
    """As it travels in a snapshot: through JSON, weights and all."""
    model = tiny.bert()
    add_lora(model, 2, ("query", "key"), alpha=8.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    recipe = ModelRecipe.model_validate_json(ModelRecipe.of(model).model_dump_json())
    twin = build_model(recipe, state_of(model))
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, twin(input_ids=ids).logits)
    assert adapted(twin) == adapted(model) and adapted(tiny.bert()) is None


def test_layers_that_do_not_exist_are_a_clear_error() -> None:
    """And a model type that peft has no choice for asks for names."""
    with pytest.raises(ConfigError, match=r"peft cannot place adapters .*--lora-targets query,value"):
        add_lora(tiny.bert(), 2, ("telepathy",))
    config = tiny.hf.AlbertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        embedding_size=16,
    )
    with pytest.raises(ConfigError, match=r"AlbertForSequenceClassification: peft cannot place adapters"):
        add_lora(tiny.hf.AlbertForSequenceClassification(config), 2)


def test_without_peft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra."""
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'leakaudit\[lora\]'"):
        add_lora(tiny.bert(), 2)


def test_adapters_that_no_recipe_describes_are_refused() -> None:
    """A wrong rebuild would be attacked in the place of the real model."""
    peft = pytest.importorskip("peft")
    model = tiny.bert()
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=["query"], task_type="CAUSAL_LM", alora_invocation_tokens=[3]), model
    )
    with pytest.raises(ModelError, match="use `alora_invocation_tokens`"):
        ModelRecipe.of(model)


@pytest.mark.parametrize(("make", "beside"), [(tiny.bert, (0, 2)), (tiny.gpt2_classifier, (0,))])
def test_adapters_are_found_beside_their_projections(make, beside: tuple[int, ...], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The projections and heads are those of the model without them."""
    plain, model = make(), make()
    add_lora(model, 3)
    before, after = find_anatomy(plain), find_anatomy(model)
    assert [p.weight for p in after.projections] == [
        p.weight if index not in beside else p.weight.replace(".weight", ".base_layer.weight")
        for index, p in enumerate(before.projections)
    ]
    assert tuple(adapter.beside for adapter in after.adapters) == beside
    assert all(adapter.rank == 3 and ".lora_A." in adapter.down.weight for adapter in after.adapters)
    assert after.output == before.output and before.adapters == ()
    assert [h.query.tolist() for h in after.heads] == [h.query.tolist() for h in before.heads]
