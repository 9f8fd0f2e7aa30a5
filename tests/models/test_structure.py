"""The parts of fourteen architectures, against what their configurations say."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Anatomy, InputStage, anatomy_of, find_anatomy, input_stage_of
from tests.support import tiny

hf: Any = transformers

VOCABULARY, HIDDEN, HEADS, SIZE, POSITIONS = 60, 32, 4, 8, 40
"""Of every tiny model below: 4 heads of 8 features make D = 32."""

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


@dataclass(frozen=True)
class Plan:
    """One architecture and what must be found in it, by its configuration."""

    make: Callable[[], Any]
    """Returns model class and configuration."""
    block: str
    """Attention module of the first block."""
    layers: tuple[str, ...]
    """Layers in it that read the attention input, in call order."""
    output: str
    word: str
    heads: Callable[[], list[tuple[list[int], list[int], list[int]]]]
    """Query, key and value features of each head among the concatenated outputs of `layers`."""
    causal: bool
    position_free: bool
    tables: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    input_first: bool = False
    additive: bool = True


def _separate(key_heads: int = HEADS) -> Callable[[], list[tuple[list[int], list[int], list[int]]]]:
    """Three layers with heads side by side; with GQA, query heads share a key head."""

    def build() -> list[tuple[list[int], list[int], list[int]]]:
        key_at = HEADS * SIZE
        value_at = key_at + key_heads * SIZE
        share = HEADS // key_heads
        return [
            (
                _run(h * SIZE),
                _run(key_at + h // share * SIZE),
                _run(value_at + h // share * SIZE),
            )
            for h in range(HEADS)
        ]

    return build


def _interleaved() -> list[tuple[list[int], list[int], list[int]]]:
    """One layer whose output is [q k v] head by head (GPT-NeoX)."""
    return [(_run(3 * h * SIZE), _run((3 * h + 1) * SIZE), _run((3 * h + 2) * SIZE)) for h in range(HEADS)]


def _run(start: int) -> list[int]:
    return list(range(start, start + SIZE))


BERT_LAYERS = ("self.query", "self.key", "self.value")
BERT_TABLES = ("embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight")
LLAMA_LAYERS = ("q_proj", "k_proj", "v_proj")


def _bert_like(make: Callable[[], Any], **more: Any) -> Plan:
    plan: dict[str, Any] = {
        "make": make,
        "block": "encoder.layer.0.attention",
        "layers": BERT_LAYERS,
        "output": "encoder.layer.0.attention.output.dense",
        "word": "embeddings.word_embeddings.weight",
        "heads": _separate(),
        "causal": False,
        "position_free": False,
        "tables": BERT_TABLES,
        "after": ("embeddings.dropout",),
    }
    return Plan(**(plan | more))


def _llama_like(make: Callable[[], Any], key_heads: int) -> Plan:
    return Plan(
        make=make,
        block="layers.0.self_attn",
        layers=LLAMA_LAYERS,
        output="layers.0.self_attn.o_proj",
        word="embed_tokens.weight",
        heads=_separate(key_heads),
        causal=True,
        position_free=True,
    )


PLANS: dict[str, Plan] = {
    "BERT": _bert_like(lambda: (hf.BertModel, hf.BertConfig(**COMMON))),
    "RoBERTa": _bert_like(lambda: (hf.RobertaModel, hf.RobertaConfig(**COMMON))),
    "DistilBERT": Plan(
        make=lambda: (
            hf.DistilBertModel,
            hf.DistilBertConfig(
                vocab_size=VOCABULARY,
                dim=HIDDEN,
                n_layers=2,
                n_heads=HEADS,
                hidden_dim=48,
                max_position_embeddings=POSITIONS,
            ),
        ),
        block="transformer.layer.0.attention",
        layers=("q_lin", "k_lin", "v_lin"),
        output="transformer.layer.0.attention.out_lin",
        word="embeddings.word_embeddings.weight",
        heads=_separate(),
        causal=False,
        position_free=False,
        tables=("embeddings.position_embeddings.weight",),
        after=("embeddings.dropout",),
    ),
    "ELECTRA": _bert_like(
        lambda: (hf.ElectraModel, hf.ElectraConfig(**COMMON, embedding_size=16)),
        before=("embeddings.dropout",),  # a projection stands between this dropout and the block
        after=(),
        additive=False,
    ),
    "ALBERT": _bert_like(
        lambda: (hf.AlbertModel, hf.AlbertConfig(**COMMON, embedding_size=16)),
        block="encoder.albert_layer_groups.0.albert_layers.0.attention",
        layers=("query", "key", "value"),
        output="encoder.albert_layer_groups.0.albert_layers.0.attention.dense",
        before=("embeddings.dropout",),
        after=(),
        additive=False,
    ),
    "DeBERTa-v2": _bert_like(
        lambda: (
            hf.DebertaV2Model,
            hf.DebertaV2Config(**COMMON, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        ),
        layers=("self.query_proj", "self.key_proj", "self.value_proj"),
        tables=("embeddings.position_embeddings.weight",),
        additive=False,  # its embedding is multiplied by the attention mask after the normalisation
    ),
    "GPT-2": Plan(
        make=lambda: (
            hf.GPT2Model,
            hf.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=HIDDEN,
                n_layer=2,
                n_head=HEADS,
                n_positions=POSITIONS,
                bos_token_id=2,
                eos_token_id=3,
            ),
        ),
        block="h.0.attn",
        layers=("c_attn",),
        output="h.0.attn.c_proj",
        word="wte.weight",
        heads=_separate(),
        causal=True,
        position_free=False,
        tables=("wpe.weight",),
        before=("drop",),
        input_first=True,
    ),
    "GPT-NeoX": Plan(
        make=lambda: (hf.GPTNeoXModel, hf.GPTNeoXConfig(**COMMON)),
        block="layers.0.attention",
        layers=("query_key_value",),
        output="layers.0.attention.dense",
        word="embed_in.weight",
        heads=_interleaved,
        causal=True,
        position_free=True,
        before=("emb_dropout",),
    ),
    "OPT": Plan(
        make=lambda: (
            hf.OPTModel,
            hf.OPTConfig(
                vocab_size=VOCABULARY,
                hidden_size=HIDDEN,
                word_embed_proj_dim=HIDDEN,
                num_hidden_layers=2,
                num_attention_heads=HEADS,
                ffn_dim=48,
                max_position_embeddings=POSITIONS,
            ),
        ),
        block="decoder.layers.0.self_attn",
        layers=LLAMA_LAYERS,
        output="decoder.layers.0.self_attn.out_proj",
        word="decoder.embed_tokens.weight",
        heads=_separate(),
        causal=True,
        position_free=False,
        tables=("decoder.embed_positions.weight",),
    ),
    "LLaMA with grouped queries": _llama_like(
        lambda: (hf.LlamaModel, hf.LlamaConfig(**COMMON, num_key_value_heads=2)), key_heads=2
    ),
    "Qwen2": _llama_like(lambda: (hf.Qwen2Model, hf.Qwen2Config(**COMMON, num_key_value_heads=2)), key_heads=2),
    "Mistral": _llama_like(lambda: (hf.MistralModel, hf.MistralConfig(**COMMON, num_key_value_heads=2)), key_heads=2),
    "Gemma": _llama_like(
        lambda: (hf.GemmaModel, hf.GemmaConfig(**COMMON, num_key_value_heads=1, head_dim=SIZE)), key_heads=1
    ),
    "T5 encoder": Plan(
        make=lambda: (
            hf.T5EncoderModel,
            hf.T5Config(vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=SIZE, d_ff=48, num_layers=2, num_heads=HEADS),
        ),
        block="encoder.block.0.layer.0.SelfAttention",
        layers=("q", "k", "v"),
        output="encoder.block.0.layer.0.SelfAttention.o",
        word="shared.weight",
        heads=_separate(),
        causal=False,
        position_free=True,
        tables=("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
        before=("encoder.dropout",),
    ),
}


def _build(plan: Plan) -> nn.Module:
    """Return the tiny model, random, in eval mode with eager attention."""
    kind, config = plan.make()
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = kind(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # gains of 1 and biases of 0 would hide a part that is left out
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=list(PLANS), scope="module")
def case(request: pytest.FixtureRequest) -> tuple[Plan, nn.Module, Anatomy]:
    """Give one architecture, a model of it, and the parts that were found."""
    plan = PLANS[request.param]
    model = _build(plan)
    return plan, model, find_anatomy(model)


def test_the_layers_that_read_the_attention_input_are_found(case: tuple[Plan, nn.Module, Anatomy]) -> None:
    """Names, layout and sizes are those of the configuration."""
    plan, model, found = case
    assert [p.module for p in found.projections] == [f"{plan.block}.{layer}" for layer in plan.layers]
    assert [p.weight for p in found.projections] == [f"{p.module}.weight" for p in found.projections]
    assert all(p.input_first == plan.input_first for p in found.projections)
    for projection in found.projections:
        weight = model.get_parameter(projection.weight)
        assert projection.by_output(weight).shape == (projection.out_features, HIDDEN)
    assert (found.output, found.word_embedding, found.hidden) == (plan.output, plan.word, HIDDEN)


def test_every_head_has_the_features_that_the_layout_gives_it(case: tuple[Plan, nn.Module, Anatomy]) -> None:
    """Query, key and value indices are those of the model's own reshape."""
    plan, _, found = case
    heads = [(h.query.tolist(), h.key.tolist(), h.value.tolist()) for h in found.heads]
    assert sorted(heads) == sorted(plan.heads())


def test_causal_models_and_further_tables_are_recognised(case: tuple[Plan, nn.Module, Anatomy]) -> None:
    """Whether a token sees later ones, and which other tables enter the input."""
    plan, _, found = case
    assert found.causal == plan.causal
    assert sorted(found.tables) == sorted(plan.tables)


def test_the_place_of_the_input_dropout_is_found(case: tuple[Plan, nn.Module, Anatomy]) -> None:
    """Only dropout after the last mixing layer leaves exact zeros."""
    plan, _, found = case
    assert (found.dropout_before, found.dropout_after) == (plan.before, plan.after)


def test_inputs_computed_for_single_pairs_are_those_of_a_running_model(case: tuple[Plan, nn.Module, Anatomy]) -> None:
    """A hook on the running model sees the same inputs."""
    plan, model, found = case
    stage = InputStage(model, found, POSITIONS - 4)
    ids = torch.randint(4, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(5))  # no padding token
    seen: list[Tensor] = []
    handle = model.get_submodule(found.projections[0].module).register_forward_pre_hook(
        lambda _, given: seen.append(given[0])
    )
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    handle.remove()
    tokens, positions = ids.flatten(), torch.arange(9).repeat(3)
    assert float((stage.inputs(tokens, positions) - seen[0].flatten(0, 1)).abs().max()) < 1e-5
    assert stage.position_free == plan.position_free
    assert stage.additive == plan.additive


def test_a_model_is_left_as_it_was(case: tuple[Plan, nn.Module, Anatomy]) -> None:
    """Flags, gradients, weights, hooks and random state survive the probes."""
    _, model, _ = case
    model.train()
    next(model.children()).eval()
    before = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    InputStage(model, find_anatomy(model), 8)
    assert [module.training for module in model.modules()] == before
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    model.eval()


def test_the_probes_find_the_same_parts_in_a_trained_looking_model() -> None:
    """Sharp attention (weights ten times larger) neither hides heads nor invents them."""
    model = _build(PLANS["BERT"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attention.self" in name:
                parameter.mul_(10.0)
    found = find_anatomy(model)
    heads = [(h.query.tolist(), h.key.tolist(), h.value.tolist()) for h in found.heads]
    assert sorted(heads) == sorted(PLANS["BERT"].heads())


@pytest.mark.parametrize("vocabulary", range(5, 45, 4))
def test_padding_among_the_random_probes_does_not_mislead_roberta(vocabulary: int) -> None:
    """RoBERTa counts positions over real tokens only.

    In vocabularies this small random probes are sure to meet it.
    """
    config = hf.RobertaConfig(**COMMON | {"vocab_size": vocabulary})
    model = _build(replace(PLANS["RoBERTa"], make=lambda: (hf.RobertaModel, config)))
    assert InputStage(model, find_anatomy(model), 8).additive


def test_anatomy_is_found_once_and_inputs_anew_after_the_weights_were_written() -> None:
    """A cached stage would give the inputs of older weights."""
    model = _build(PLANS["BERT"])
    assert anatomy_of(model) is anatomy_of(model)
    first = input_stage_of(model, 8)
    assert input_stage_of(model, 8) is first
    with torch.no_grad():
        model.get_parameter("embeddings.LayerNorm.bias").add_(1.0)
    second = input_stage_of(model, 8)
    pair = torch.tensor([5]), torch.tensor([2])
    torch.testing.assert_close(second.inputs(*pair) - first.inputs(*pair), torch.ones(1, HIDDEN, dtype=torch.float64))


class _NoBlocks(nn.Module):
    """A bag of words: a token table and one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, HIDDEN)
        self.head = nn.Linear(HIDDEN, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.head(self.table(input_ids).mean(1))


class _NoLinear(_NoBlocks):
    """Blocks without a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(HIDDEN), nn.ReLU())])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.head(self.blocks[0](self.table(input_ids)).mean(1))


class _Fails(_NoBlocks):
    """A forward pass that raises with private values in its message."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        raise ValueError(f"secret {input_ids.tolist()}")


class _Recurrent(_NoBlocks):
    """Mixes neighbours before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.blocks[0](self.table(input_ids).cumsum(1))


def test_a_model_without_blocks_is_refused_with_what_was_looked_for_and_found() -> None:
    """The user learns which part is missing."""
    with pytest.raises(AnatomyError, match=r"_NoBlocks: looked for a list of blocks .* found only Embedding, Linear"):
        find_anatomy(_NoBlocks())


def test_blocks_without_linear_layers_are_refused() -> None:
    """The message names the kinds of layers that are there."""
    with pytest.raises(AnatomyError, match=r"blocks\.0: looked for linear layers .* found only LayerNorm, ReLU"):
        find_anatomy(_NoLinear())


@pytest.mark.parametrize("found", [None, nn.Linear(2, 2)])
def test_a_model_without_a_token_table_is_refused(found: nn.Module | None) -> None:
    """It may have no table or one of another kind."""
    model = _NoBlocks()
    model.get_input_embeddings = lambda: found  # type: ignore[method-assign, return-value, assignment]
    with pytest.raises(AnatomyError, match=rf"looked for the token table .* found {type(found).__name__}"):
        find_anatomy(model)


def test_a_failing_forward_pass_is_reported_by_type_only() -> None:
    """The message of a user's exception may hold private values."""
    with pytest.raises(AnatomyError, match=r"a forward pass with input_ids and attention_mask failed \(ValueError\)$"):
        find_anatomy(_Fails())


def test_inputs_that_depend_on_neighbours_are_refused() -> None:
    """No candidate could be computed alone."""
    model = _Recurrent()
    with pytest.raises(AnatomyError, match="attention input of a token depends on the tokens around it"):
        InputStage(model, find_anatomy(model), 8)


def test_a_model_that_was_attacked_is_not_kept() -> None:
    """Parts and input stage are remembered only while the model lives."""
    model = tiny.bert()
    stage = input_stage_of(model, tiny.POSITIONS)
    assert input_stage_of(model, tiny.POSITIONS) is stage
    stage.token_vectors  # noqa: B018 - computed once, and kept with the stage
    gone = weakref.ref(model)
    del model, stage
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_in_another_type_than_their_base_are_found() -> None:
    """peft keeps adapters in float32 beside weights in bfloat16."""
    peft = pytest.importorskip("peft")
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
        model = peft.get_peft_model(tiny.bert().to(dtype), config)
        assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
        found[dtype] = find_anatomy(model)
    plain, mixed = found[torch.float32], found[torch.bfloat16]
    assert (mixed.adapters, mixed.projections) == (plain.adapters, plain.projections)
    assert len(mixed.adapters) == 2 and len(mixed.projections) == 3
