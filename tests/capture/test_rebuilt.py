"""The side process rebuilds the trained model: types, buffers and module settings."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import TrainerCallback

from leakaudit.audit.stamp import stamp_of
from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.capture.fitness import Fit
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.errors import ModelError
from leakaudit.models.first_blocks import first_parts
from leakaudit.models.rebuilding import build_model
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.tensors import state_of
from leakaudit.models.unstored_state import unstored_buffers
from leakaudit.results.schema import Verification, VerificationStatus
from leakaudit.storage.partial_steps import build_first_blocks
from tests.support import tiny
from tests.support.tiny_trainer import Rows, audit_config, make_trainer, stamp, train

WORDS: dict[str, Any] = {
    "rows": Rows(tiny.gpt2_tokenizer(), classes=0),
    "tokenizer": tiny.gpt2_tokenizer(),
    "collator": hf.DataCollatorForLanguageModeling(tiny.gpt2_tokenizer(), mlm=False),
}


def llama(**more: Any) -> nn.Module:
    config = hf.LlamaConfig(  # type: ignore[call-arg]  # what every configuration takes
        vocab_size=len(tiny.VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        **{"num_hidden_layers": 2, **more},
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = hf.LlamaForCausalLM(config)
    return model


def both(folder: Path, make: Callable[[], Any], *callbacks: TrainerCallback, **more: Any) -> dict[int, Snapshot]:
    """Train with and without the audit, compare the weights, and return what was kept."""
    torch.manual_seed(3)
    plain = make_trainer(folder / "plain", *copy.deepcopy(callbacks), model=make(), **more)
    plain.train()
    model = make()
    torch.manual_seed(3)
    found = train(folder, *callbacks, model=model, **more)
    live = dict(model.named_parameters())
    assert all(torch.equal(live[name], p) for name, p in plain.model.named_parameters())
    return found


def assert_same(snapshot: Snapshot, expected: dict[str, Tensor]) -> None:
    made = state_of(snapshot.observation.model)
    assert all(torch.equal(made[name], w) and made[name].dtype == w.dtype for name, w in expected.items())


def with_lora(model: Any, config: Any = None) -> Any:
    """Return a model with adapters whose B is not zero, as peft makes it."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers by a name that is deprecated
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(model, config or peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        with torch.no_grad():
            for parameter in (p for p in wrapped.parameters() if p.requires_grad):
                parameter.add_(0.05 * torch.randn_like(parameter))
    return wrapped


def test_adapters_in_float32_on_a_model_in_bfloat16_are_not_rounded(tmp_path: Path) -> None:
    """The default of peft: the update is computed in float32, and its fact says so."""

    def make() -> Any:
        model = with_lora(llama().to(torch.bfloat16))
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        return model

    start = {n: w.clone() for n, w in state_of(make().get_base_model()).items()}
    found = both(tmp_path, make, **WORDS)
    assert_same(found[0], start)
    for snapshot in found.values():
        stamped = stamp(snapshot)
        assert stamped.status is VerificationStatus.VERIFIED and (stamped.relative_error or 0.0) < 1e-6
        assert snapshot.observation.facts.dtype == "float32"
        assert {w.dtype for w in snapshot.observation.model.parameters()} == {torch.float32, torch.bfloat16}


def test_buffers_that_are_not_stored_are_kept_if_they_are_not_what_the_class_makes(tmp_path: Path) -> None:
    """`.to(bfloat16)` rounds Llama's rotary table; without it nothing is kept."""
    made = {name: buffer.clone() for name, buffer in unstored_buffers(llama().to(torch.bfloat16)).items()}
    assert made
    for snapshot in both(tmp_path / "cast", lambda: llama().to(torch.bfloat16), **WORDS).values():
        found = unstored_buffers(snapshot.observation.model)
        assert all(
            torch.equal(found[name], buffer) and found[name].dtype == buffer.dtype for name, buffer in made.items()
        )
        assert (stamp(snapshot).relative_error or 0.0) < 1e-6
    plain = both(tmp_path / "plain", llama, **WORDS)
    assert all((stamp(snapshot).relative_error or 0.0) < 1e-6 for snapshot in plain.values())


class Changes(TrainerCallback):
    """Sets the dropout of the head when the second step begins."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            kwargs["model"].dropout.p = 0.25


def test_rates_that_were_changed_on_the_modules_are_those_of_the_rebuilt_model(tmp_path: Path) -> None:
    """Zero as TRL sets it, 0.5 in the head, another rate later, and another epsilon."""

    def make() -> Any:
        model: Any = tiny.bert(dropout=0.3)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0
        model.dropout.p = 0.5
        model.bert.embeddings.LayerNorm.eps = 0.1
        return model

    found = both(tmp_path, make, Changes())
    rates = [
        {name: m.p for name, m in snapshot.observation.model.named_modules() if isinstance(m, nn.Dropout) and m.p}
        for snapshot in found.values()
    ]
    assert rates == [{"dropout": 0.5}, {"dropout": 0.25}, {"dropout": 0.25}]
    models: list[Any] = [snapshot.observation.model for snapshot in found.values()]
    assert {model.bert.embeddings.LayerNorm.eps for model in models} == {0.1}
    for snapshot in found.values():
        assert stamp(snapshot).status is VerificationStatus.VERIFIED


def _replace(part: nn.Module) -> Callable[[], Any]:
    def make() -> Any:
        model: Any = tiny.bert()
        for layer in model.bert.encoder.layer:
            layer.intermediate.intermediate_act_fn = copy.deepcopy(part)
        return model

    return make


@pytest.mark.parametrize("part", [nn.ReLU(), nn.LeakyReLU(0.3), nn.GELU(), nn.Identity()], ids=lambda part: str(part))
def test_an_activation_that_was_replaced_is_that_of_the_rebuilt_model(part: nn.Module, tmp_path: Path) -> None:
    """With its number; otherwise attacks would search on another model."""
    for snapshot in both(tmp_path, _replace(part), max_steps=1).values():
        model: Any = snapshot.observation.model
        assert repr(model.bert.encoder.layer[1].intermediate.intermediate_act_fn) == repr(part)
        assert (stamp(snapshot).relative_error or 0.0) < 1e-5


class Odd(nn.Module):
    """An activation that nobody else can make."""

    def forward(self, values: Tensor) -> Tensor:
        return values.sin()


@pytest.mark.parametrize("part", [Odd(), nn.GELU(approximate="tanh")], ids=["own", "a word of its own"])
def test_a_part_that_cannot_be_made_again_is_refused_by_name(
    part: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first step, with what to do."""
    audit = LeakAuditCallback(audit_config(tmp_path))
    make_trainer(tmp_path, audit, model=_replace(part)()).train()
    assert "intermediate_act_fn' is a" in caplog.text and "rebuilt_by" in caplog.text
    assert not (tmp_path / "audit" / "spool").exists()


def test_a_recipe_asks_for_no_other_class() -> None:
    """It is read from a file."""
    recipe = ModelRecipe.of(tiny.bert()).model_copy(update={"parts": {"dropout": "subprocess:Popen"}})
    with pytest.raises(ModelError, match="no activation, dropout or identity"):
        build_model(recipe, state_of(tiny.bert()))


def test_a_step_of_which_parts_are_kept_is_rebuilt_with_the_same_buffers_and_numbers() -> None:
    """Two of three blocks are kept; a change in the third is not in the smaller model."""
    model: Any = llama(num_hidden_layers=3).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.LeakyReLU(0.3)
    recipe = ModelRecipe.of(model)
    fit = Fit.of(model, recipe)
    recipe = recipe.model_copy(update={"parts": dict(fit.parts), "settings": fit.settings(model)})
    parts = first_parts(model, ModelRecipe.of(model), fit.unlike)
    assert parts is not None
    everything = state_of(model) | unstored_buffers(model)
    made: Any = build_first_blocks(recipe, 2, {name: everything[name] for name in parts.weights})
    assert len(made.model.layers) == 2 and made.model.layers[1].mlp.act_fn.negative_slope == 0.3
    assert torch.equal(made.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


# ---------------------------------------------------------------------- other code than the attackers' model


def _judged(snapshot: Snapshot) -> Verification:
    return stamp_of(snapshot, ClientStep.of(snapshot))


def _loud(plain: Any) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (2 * plain(*args, **kwargs)[0], None)

    return forward


def _logged(module: nn.Module, args: Any, output: Any) -> None:
    """Change nothing."""


def test_a_step_of_other_code_is_no_evidence_and_its_note_names_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patched class leaves no trace in the model that attacks get."""
    attention = hf.models.bert.modeling_bert.BertSelfAttention
    with monkeypatch.context() as patched:
        patched.setattr(attention, "forward", _loud(attention.forward))
        found = train(tmp_path, model=tiny.bert())
    stamped = _judged(found[0])
    assert stamped.status is VerificationStatus.UNVERIFIABLE
    assert "cosine" in stamped.note and stamped.note.endswith("say how the model is made with `rebuilt_by`")
    assert f"BertSelfAttention of {attention.__module__} runs another `forward` (defined in {__name__})" in stamped.note


def test_a_hook_that_changes_nothing_leaves_a_step_verified(tmp_path: Path) -> None:
    """Its note says nothing."""

    model = tiny.bert(dropout=0.1)
    model.register_forward_hook(_logged)
    found = train(tmp_path, model=model)
    stamped = _judged(found[0])
    assert found[0].recipe.code.own == {f"a forward hook: `_logged` of {__name__}": ("",)}
    assert (stamped.status, stamped.note) == (VerificationStatus.VERIFIED, "")


def test_a_step_of_another_batch_stays_a_mismatch(tmp_path: Path) -> None:
    """Where no code differs, nothing else explains it."""
    found = train(tmp_path, model=tiny.bert())
    wrong = dataclasses.replace(found[0], truth=found[1].truth)
    stamped = _judged(wrong)
    assert stamped.status is VerificationStatus.MISMATCH
    assert "rebuilt_by" not in stamped.note
