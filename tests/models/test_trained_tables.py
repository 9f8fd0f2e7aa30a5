"""A token table inside a wrapper of peft is found, and attacks read the texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.attacks.span import Span
from leakaudit.models.structure import anatomy_of, find_tail, input_stage_of
from leakaudit.models.structure.anatomy import Anatomy
from leakaudit.models.wrappers import unwrapped
from leakaudit.plugins.budget import Budget
from tests.capture.test_rebuilt import llama, with_lora
from tests.support import tiny

peft: Any = pytest.importorskip("peft")

TEXT = "the old dog chased a cat"


def _adapted(model: nn.Module, *targets: str, **options: Any) -> Any:
    return unwrapped(with_lora(model, peft.LoraConfig(r=16, target_modules=list(targets), **options)))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "table and head": (
        llama,
        lambda: _adapted(llama(), "q_proj", "v_proj", modules_to_save=["embed_tokens", "lm_head"]),
        "model.embed_tokens.modules_to_save.default.weight",
    ),
    "table of an encoder": (
        tiny.bert,
        lambda: _adapted(tiny.bert(), "query", "value", modules_to_save=["word_embeddings", "classifier"]),
        "bert.embeddings.word_embeddings.modules_to_save.default.weight",
    ),
    "table that is also the head": (
        tiny.gpt2_lm,
        lambda: _adapted(tiny.gpt2_lm(), "c_attn", modules_to_save=["wte"], ensure_weight_tying=True),
        "transformer.wte.modules_to_save.default.weight",
    ),
    "rows of a table": (
        llama,
        lambda: _adapted(llama(), "q_proj", "v_proj", trainable_token_indices=[3, 4]),
        "model.embed_tokens.token_adapter.base_layer.weight",
    ),
    "adapters on a table": (
        llama,
        lambda: _adapted(llama(), "q_proj", "v_proj", "embed_tokens"),
        "model.embed_tokens.base_layer.weight",
    ),
}
"""What is trained -> the plain model, the adapted one, the parameter of its table."""


def _parts(anatomy: Anatomy) -> dict[str, Any]:
    """Return what an anatomy says beside the names that peft changes."""
    return {
        "heads": [[head.query.tolist(), head.key.tolist(), head.value.tolist()] for head in anatomy.heads],
        "tables": anatomy.tables,
        "causal": anatomy.causal,
        "dropout": (anatomy.dropout_before, anatomy.dropout_after),
        "projections": [one.module.removesuffix(".base_layer") for one in anatomy.projections],
    }


@pytest.mark.parametrize("kind", MODELS)
def test_the_parts_are_those_of_the_plain_model_and_the_table_is_the_one_inside(kind: str) -> None:
    """The tokens' vectors are those that the model computes with what it trained."""
    plain, make, name = MODELS[kind]
    model = make().eval()
    assert anatomy_of(model).word_embedding == name
    assert _parts(anatomy_of(model)) == _parts(anatomy_of(plain()))
    stage, table = input_stage_of(model, 8), model.get_input_embeddings()
    ids = torch.arange(stage.vocabulary)
    positions = stage._run(ids[:, None])[:, 0].double()
    assert torch.allclose(stage.inputs(ids, torch.zeros_like(ids)), positions, atol=1e-5)
    assert table(ids[None]).shape[-1] == stage.hidden


@pytest.mark.parametrize("kind", MODELS)
def test_span_reads_a_text_through_the_wrapper(kind: str) -> None:
    """Nothing but the adapters' update is needed for it.

    The last word of a language model is predicted and not read, so it may be missing.
    """
    model = MODELS[kind][1]()
    task: Any = "classification" if kind == "table of an encoder" else "causal-lm"
    tokenizer = tiny.bert_tokenizer() if task == "classification" else tiny.gpt2_tokenizer()
    frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    step = tiny.client_step(model, tokenizer, [TEXT], task=task, frozen=frozen)
    seen = step.observe()
    only = {name: update for name, update in seen.update.items() if ".lora_" in name and "embed" not in name}
    seen = dataclasses.replace(seen, update=only)
    assert Span().applies(seen).applies, Span().applies(seen).reason
    found = Span()(seen, tiny.generator(), Budget(seconds=30))
    assert found.sequences is not None
    (guess,), (text,) = found.sequences, step.truth.sequences()
    assert guess.token_ids == text[: len(guess.token_ids)]
    assert len(guess.token_ids) >= len(text) - (task == "causal-lm")


def test_the_head_that_is_trained_as_a_whole_is_the_last_layer_and_not_the_one_before_it() -> None:
    """The wrapper passes on what the head returned."""
    tail = find_tail(MODELS["table and head"][1]())
    assert tail.head == "lm_head.modules_to_save.default"
    assert tail.layer == find_tail(llama()).layer
