"""Models and tokenizers are loaded, described and rebuilt to the same numbers."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.client.batches import make_batch
from leakaudit.errors import ModelError, ModelNotVouchedError
from leakaudit.models import factories
from leakaudit.models.config_numbers import check_config
from leakaudit.models.factories import MOVED, rebuilt_by, vouch_for, vouched
from leakaudit.models.loading import load_model, load_tokenizer
from leakaudit.models.rebuilding import build_model
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.tensors import state_of, tied_names
from leakaudit.models.vocabulary import Vocabulary, vocabulary_of
from leakaudit.models.wrappers import plain_name, unwrapped
from tests.support import norm_model, tiny


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with a headless encoder and its tokenizer."""
    folder = tmp_path_factory.mktemp("encoder")
    tiny.bert(seed=3).bert.save_pretrained(folder)  # type: ignore[operator, union-attr]
    tiny.bert_tokenizer().save_pretrained(folder)
    return folder


def _logits(model: nn.Module) -> torch.Tensor:
    ids = torch.tensor([[2, 6, 7, 8, 3]])
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return found


def _llama(seed: int) -> nn.Module:
    """Return a language model whose rotary frequencies no weights file holds."""
    config = tiny.hf.LlamaConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = tiny.hf.LlamaForCausalLM(config).eval()
    return model


def _mamba2(seed: int) -> nn.Module:
    """Return a language model whose configuration holds an infinity."""
    sizes = {"num_heads": 4, "head_dim": 16, "state_size": 4, "n_groups": 1, "chunk_size": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny.hf.Mamba2Config(vocab_size=60, hidden_size=32, num_hidden_layers=1, **sizes)
        model: nn.Module = tiny.hf.Mamba2ForCausalLM(config).eval()
    return model


def _sparse(seed: int) -> nn.Module:
    """Return a classifier whose table of words has sparse gradients."""
    model: Any = tiny.bert(seed=seed)
    model.get_input_embeddings().sparse = True
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [tiny.bert, tiny.gpt2_lm, tiny.gpt2_classifier, _llama, _mamba2, _sparse])
def test_a_model_is_rebuilt_from_its_recipe_to_the_same_numbers(make: Any) -> None:
    """Tied weights are given once; the rebuilt model is in eval mode."""
    model = make(seed=5)
    recipe = ModelRecipe.model_validate_json(ModelRecipe.of(model).model_dump_json())  # as it travels
    twin = build_model(recipe, state_of(model))
    assert torch.equal(_logits(twin), _logits(model))
    assert not twin.training
    assert twin.config._attn_implementation == "eager"  # type: ignore[union-attr]
    assert tied_names(twin) == tied_names(model)


def test_rebuilding_does_not_touch_the_global_random_state() -> None:
    """A callback in the training process may rebuild, too."""
    model = tiny.bert()
    before = torch.get_rng_state()
    build_model(ModelRecipe.of(model), state_of(model))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_state_holds_every_parameter_once() -> None:
    """GPT-2's head is its word table."""
    model = tiny.gpt2_lm()
    assert set(state_of(model)) == {name for name, _ in model.named_parameters()}
    assert "lm_head.weight" not in state_of(model)
    assert tied_names(model) == (("transformer.wte.weight", "lm_head.weight"),)
    assert tied_names(tiny.bert()) == ()


class _Home(nn.Module):
    """A model that transformers does not export."""


def test_a_model_that_cannot_be_rebuilt_is_refused_when_it_is_described() -> None:
    """The callback then says so at once, not the worker an hour later."""
    with pytest.raises(ModelError, match=r"test_models\._Home is no model class that transformers exports"):
        ModelRecipe.of(_Home())


def test_a_subclass_of_a_known_model_is_refused() -> None:
    """Its own code would be lost."""

    class BertForSequenceClassification(type(tiny.bert())):  # type: ignore[misc]
        """Same name, other class."""

    model = BertForSequenceClassification(tiny.bert().config)
    with pytest.raises(ModelError, match="is no model class that transformers exports"):
        ModelRecipe.of(model)


def test_weights_that_do_not_fit_are_counted_and_the_first_is_named() -> None:
    """Missing and foreign weights alike."""
    model = tiny.bert()
    weights = state_of(model)
    del weights["classifier.bias"]
    with pytest.raises(ModelError, match=r"1 weights are missing and 0 are not its own, first 'classifier\.bias'"):
        build_model(ModelRecipe.of(model), weights)
    foreign = {**state_of(model), "adapter.weight": torch.zeros(2)}
    with pytest.raises(ModelError, match=r"0 weights are missing and 1 are not its own, first 'adapter\.weight'"):
        build_model(ModelRecipe.of(model), foreign)


def test_an_unknown_class_is_named() -> None:
    """Another version of transformers may not have it."""
    with pytest.raises(ModelError, match=r"transformers 5\S* has no class 'BertForTelepathy'"):
        build_model(ModelRecipe(class_name="BertForTelepathy", config={}), {})


def test_weights_of_another_shape_are_refused_without_their_values() -> None:
    """Torch's own message would print shapes of everything."""
    model = tiny.bert()
    weights = {**state_of(model), "classifier.bias": torch.zeros(7)}
    with pytest.raises(
        ModelError, match=r"cannot rebuild BertForSequenceClassification from its recipe: RuntimeError$"
    ):
        build_model(ModelRecipe.of(model), weights)


def test_a_missing_head_is_made_from_the_seed(encoder: Path) -> None:
    """The head depends on the seed alone; the encoder is the stored one."""
    one, same, other = (load_model(encoder, "classification", num_labels=4, seed=s) for s in (1, 1, 2))
    head = "classifier.weight"
    assert one.get_parameter(head).shape == (4, tiny.HIDDEN)
    assert torch.equal(one.get_parameter(head), same.get_parameter(head))
    assert not torch.equal(one.get_parameter(head), other.get_parameter(head))
    words = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(one.get_parameter(words), tiny.bert(seed=3).get_parameter(words))


def test_loading_leaves_random_state_and_terminal_alone(encoder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A fresh head is what was asked for, so transformers need not warn of it."""
    before = torch.get_rng_state()
    model = load_model(encoder, "classification", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert capfd.readouterr() == ("", "")


def test_a_missing_folder_is_named_and_nothing_is_downloaded(tmp_path: Path) -> None:
    """A hub name is no folder."""
    with pytest.raises(ModelError, match=r"bert-base-uncased: no such folder; .* \(nothing is downloaded\)"):
        load_model(Path("bert-base-uncased"), "classification")
    with pytest.raises(ModelError, match="no such folder"):
        load_tokenizer(tmp_path / "nothing")


def test_a_folder_without_a_model_says_what_it_holds(tmp_path: Path) -> None:
    """The user sees at once that it is the wrong folder."""
    with pytest.raises(ModelError, match=r"holds no config\.json, found nothing"):
        load_model(tmp_path, "classification")
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    with pytest.raises(ModelError, match=r"holds no config\.json, found notes\.txt"):
        load_model(tmp_path, "classification")


def test_a_folder_without_weights_or_tokenizer_is_refused(tmp_path: Path) -> None:
    """With the reason of the library beneath, in one line."""
    tiny.bert().config.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    with pytest.raises(ModelError, match=r"cannot be loaded for classification: \S[^\n]*$"):
        load_model(tmp_path, "classification")
    with pytest.raises(ModelError, match=r"no tokenizer can be loaded from it: \S[^\n]*$"):
        load_tokenizer(tmp_path)


def test_a_damaged_weights_file_is_a_clear_error(encoder: Path, tmp_path: Path) -> None:
    """A truncated download, for example."""
    (tmp_path / "config.json").write_text((encoder / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    whole = (encoder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:100])
    with pytest.raises(ModelError, match="cannot be loaded for classification"):
        load_model(tmp_path, "classification")


def test_a_config_that_is_no_json_is_a_clear_error(encoder: Path, tmp_path: Path) -> None:
    """Half a file, for example."""
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(
        ModelError, match=r"config\.json: cannot be read as the configuration of a model \(JSONDecodeError\)"
    ):
        load_model(tmp_path, "classification")


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 10**7}, {"max_position_embeddings": 10**12}, {"text_config": {"n_layer": 10**7}}]
)
def test_absurd_numbers_in_a_folder_are_refused_before_anything_is_loaded(
    encoder: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """The message names the key, and `Infinity` is a number."""
    config = json.loads((encoder / "config.json").read_text(encoding="utf-8")) | {"limit": [0.0, float("inf")]}
    (tmp_path / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
    for load in (lambda: load_model(tmp_path, "classification"), lambda: load_tokenizer(tmp_path)):
        with pytest.raises(
            ModelError, match=r"config\.json: the configuration asks for a '(num_hidden|max_pos|n_layer).* of more than"
        ):
            load()
    check_config(tmp_path / "missing.json")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    check_config(tmp_path / "config.json")


def test_the_public_facts_of_a_wordpiece_tokenizer_are_its_frame(encoder: Path) -> None:
    """[CLS] before, [SEP] after, and the model's limit rather than the tokenizer's."""
    found = vocabulary_of(load_tokenizer(encoder), tiny.bert())
    ids = {role: tiny.VOCABULARY[f"[{role.upper()}]"] for role in ("cls", "sep", "pad", "unk", "mask")}
    assert found == Vocabulary(
        size=len(tiny.VOCABULARY),
        special=ids,
        starts_with=(ids["cls"],),
        ends_with=(ids["sep"],),
        max_length=tiny.POSITIONS,
        digest=found.digest,
        marks=found.marks,
    )
    assert len(found.digest) == 64
    assert found.special_ids == frozenset(ids.values())


def test_a_tokenizer_that_adds_nothing_has_no_frame() -> None:
    """GPT-2 style."""
    found = vocabulary_of(tiny.gpt2_tokenizer(), tiny.gpt2_lm())
    assert (found.starts_with, found.ends_with) == ((), ())
    assert found.special["eos"] == tiny.VOCABULARY["[SEP]"]


def test_a_model_without_a_largest_length_cuts_no_text() -> None:
    """XLNet's configuration says -1."""
    config = tiny.hf.XLNetConfig(vocab_size=len(tiny.VOCABULARY), d_model=16, n_layer=1, n_head=2, d_inner=16)
    model = tiny.hf.XLNetForSequenceClassification(config)
    found = vocabulary_of(tiny.bert_tokenizer(), model)
    assert found.max_length == tiny.POSITIONS
    batch = make_batch(tiny.bert_tokenizer(), ["a dog"], [0], "classification", found.max_length)
    assert batch.inputs["input_ids"].shape == (1, 4)


def test_a_tokenizer_larger_than_the_table_does_not_belong_to_the_model() -> None:
    """Ids without a row would crash later, and far from the cause."""
    tokenizer = tiny.bert_tokenizer()
    tokenizer.add_tokens(["lighthouse", "keeper"])
    size = len(tiny.VOCABULARY)
    with pytest.raises(ModelError, match=rf"has {size + 2} tokens but the model's embedding only {size} rows"):
        vocabulary_of(tokenizer, tiny.bert())


def test_a_model_without_a_table_of_words_is_refused_in_a_sentence() -> None:
    """Canine hashes characters into several tables."""
    sizes = {"num_attention_heads": 2, "intermediate_size": 64, "num_hash_buckets": 16}
    config = tiny.hf.CanineConfig(hidden_size=32, num_hidden_layers=1, **sizes)
    with torch.random.fork_rng(devices=[]):
        model = tiny.hf.CanineForSequenceClassification(config)
    with pytest.raises(ModelError, match="no one table of words"):
        vocabulary_of(tiny.bert_tokenizer(), model)


def test_a_recipe_holds_no_path_and_no_weights(encoder: Path) -> None:
    """It is written beside every snapshot."""
    model = load_model(encoder, "classification")
    text = json.dumps(ModelRecipe.of(model).model_dump(mode="json"))
    assert str(encoder) not in text
    assert len(text) < 5000


# ---------------------------------------------------------------------- models that transformers does not export


def unmarked(size: int) -> nn.Module:
    """Make a model; nobody said that a snapshot may call this."""
    return nn.Linear(size, size)


def test_a_model_that_says_how_it_is_made_is_made_again() -> None:
    """By a marked function with plain arguments, and with the live weights."""
    live = norm_model.make(size=12)
    recipe = ModelRecipe.model_validate_json(ModelRecipe.of(live).model_dump_json())
    assert (recipe.class_name, recipe.made_by) == ("NormClassifier", "tests.support.norm_model:build")
    twin = build_model(recipe, state_of(live))
    assert all(torch.equal(a, b) for a, b in zip(live.parameters(), twin.parameters(), strict=True))
    assert not twin.training


def test_a_class_is_a_way_to_make_a_model_too() -> None:
    """Also where the model is one of transformers whose class is the user's own."""
    live = rebuilt_by(norm_model.NormClassifier(7), "tests.support.norm_model:NormClassifier", size=7)
    assert dict(build_model(ModelRecipe.of(live), state_of(live)).named_parameters())["words.weight"].shape == (7, 8)


@pytest.mark.parametrize(
    ("made_by", "message"),
    [
        ("os:system", "neither a class of models nor a function marked"),
        ("tests.models.test_models:unmarked", "neither a class of models nor a function marked"),
        ("no_such_package:build", "cannot be imported"),
        ("tests.support.norm_model:no_such_name", "cannot be imported"),
        ("tests.support.norm_model", "cannot be imported"),
    ],
)
def test_a_snapshot_cannot_name_just_anything_to_be_called(
    made_by: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a file; only what was written to make models is called."""
    monkeypatch.setattr(factories, "_vouched", set())
    with pytest.raises(ModelError, match=message):
        rebuilt_by(nn.Linear(2, 2), made_by, size=2)
    assert vouched() == ()
    vouch_for(made_by)
    with pytest.raises(ModelError, match=message):
        build_model(ModelRecipe(class_name="Linear", made_by=made_by, arguments={"size": 2}), {})


@pytest.mark.parametrize(
    "name", ["harmful:build", "harmful", "torch.nn:Linear", "leakaudit.models.rebuilding:nn.Linear"]
)
def test_what_only_the_snapshot_names_is_neither_imported_nor_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says how to vouch for it."""
    (tmp_path / "harmful.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(factories, "_vouched", set())
    with pytest.raises(ModelNotVouchedError, match=f"--allow-factory {name}"):
        build_model(ModelRecipe(class_name="X", made_by=name, arguments={"in_features": 1, "out_features": 1}), {})
    assert "harmful" not in sys.modules


def test_a_model_of_another_process_vouches_for_its_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It carries the name with it."""
    live = norm_model.make(7)
    monkeypatch.setattr(factories, "_vouched", set())
    recipe = ModelRecipe.of(live)
    assert vouched() == ("tests.support.norm_model:build",)
    build_model(recipe, state_of(live))


def test_arguments_have_to_be_plain_data() -> None:
    """The message names those that are not."""
    with pytest.raises(ModelError, match="look at size"):
        rebuilt_by(nn.Linear(2, 2), "tests.support.norm_model:build", size=torch.zeros(1))
    with pytest.raises(ModelError, match=r"numbers finite, .*look at size"):
        rebuilt_by(nn.Linear(2, 2), "tests.support.norm_model:build", size=float("inf"))


def test_wrappers_of_all_libraries_are_looked_through() -> None:
    """However they are nested; a model with a part called `module` is none of them."""

    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    core = tiny.bert()
    compiled: Any = torch.compile(core, backend="eager")
    assert unwrapped(DistributedDataParallel(compiled)) is core
    own = nn.Sequential()
    own.module = core
    assert unwrapped(own) is own
    names = {f"module._orig_mod.{name}" for name, _ in core.named_parameters()}
    assert {plain_name(name) for name in names} == {name for name, _ in core.named_parameters()}


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks for it by this name
def test_heads_that_peft_trains_beside_its_adapters_come_back() -> None:
    """`get_peft_model` keeps a copy of the head; its name and weights are rebuilt."""
    import peft

    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    model: Any = unwrapped(peft.get_peft_model(tiny.bert(), config))
    recipe = ModelRecipe.of(model)
    assert recipe.lora is not None and recipe.lora.saved == ("classifier",)
    twin = build_model(ModelRecipe.model_validate_json(recipe.model_dump_json()), state_of(model))
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("old", sorted(MOVED))
def test_a_recipe_from_before_the_move_finds_its_function(old: str) -> None:
    """Old snapshots name the function's former place."""
    module, _, name = MOVED[old].partition(":")
    with pytest.raises(ModelError) as raised:
        build_model(ModelRecipe(class_name="X", made_by=old), {})
    assert "cannot be imported" not in str(raised.value)
    assert getattr(importlib.import_module(module), name).__name__ == old.partition(":")[2]
