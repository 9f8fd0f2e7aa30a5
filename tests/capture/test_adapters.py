"""Adapters of peft are audited if they can be made again.

Others are refused by name before the first step.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from leakaudit.callbacks.torch_loop import watch
from leakaudit.errors import ModelError
from leakaudit.models.lora import LoraRecipe, adapted
from leakaudit.models.wrappers import unwrapped
from leakaudit.results.schema import VerificationStatus
from tests.capture.test_rebuilt import llama, with_lora
from tests.support import tiny
from tests.support.tiny_trainer import audit_config, kept, stamp, without_side_process

peft: Any = pytest.importorskip("peft")

Make = Callable[[], Any]


def _lora(**more: Any) -> Make:
    return lambda: with_lora(llama(), peft.LoraConfig(r=2, **{"target_modules": ["q_proj", "v_proj"], **more}))


def _of_encoder(**more: Any) -> Make:
    return lambda: with_lora(tiny.bert(), peft.LoraConfig(r=2, target_modules=["query"], **more))


AUDITED: dict[str, Make] = {
    "some layers": _lora(layers_to_transform=[1]),
    "excluded modules": _lora(exclude_modules=["model.layers.0.self_attn.v_proj"]),
    "bias of B": _of_encoder(lora_bias=True),
    "biases": _of_encoder(bias="all"),
    "rows of the embedding": _lora(trainable_token_indices=[3, 4]),
    "regular expression": _lora(target_modules=r".*layers\.1.*q_proj"),
    "rsLoRA": _lora(use_rslora=True, lora_alpha=8),
    "DoRA": _lora(use_dora=True),
    "ranks by layer": _lora(rank_pattern={"v_proj": 3}, alpha_pattern={"v_proj": 5}),
    "IA3": lambda: with_lora(
        llama(), peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    ),
}


def _batch(model: Any) -> dict[str, Tensor]:
    if isinstance(unwrapped(model), hf.LlamaForCausalLM):
        ids = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return {
        **tiny.bert_tokenizer()(["the old dog", "a small bird"], return_tensors="pt"),
        "labels": torch.tensor([0, 1]),
    }


def _run(model: Any, folder: Path | None, **more: Any) -> Any:
    """Take two steps, with the audit in `folder` or without; return it."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def loop() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            batch = {name: value.to(next(model.parameters()).device) for name, value in _batch(model).items()}
            model(**batch).loss.backward()
            optimizer.step()

    if folder is None:
        loop()
        return None
    tokenizer = tiny.gpt2_tokenizer() if isinstance(unwrapped(model), hf.LlamaForCausalLM) else tiny.bert_tokenizer()
    with (
        without_side_process(),
        watch(model, optimizer, tokenizer=tokenizer, config=audit_config(folder), **more) as audit,
    ):
        loop()
    return audit


@pytest.mark.parametrize("kind", AUDITED)
def test_adapters_that_peft_can_make_again_are_audited(kind: str, tmp_path: Path) -> None:
    """Every shared gradient is kept, and the rebuilt step is verified.

    Training is the same to the bit.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, audited = AUDITED[kind]().train(), AUDITED[kind]().train()
    trained = {name for name, p in unwrapped(audited).named_parameters() if p.requires_grad}
    _run(plain, None)
    found = kept(_run(audited, tmp_path))
    live = dict(plain.named_parameters())
    assert all(torch.equal(live[name], p) for name, p in audited.named_parameters())
    assert len(found) == 2
    for snapshot in found.values():
        assert set(snapshot.observation.update) == trained
        stamped = stamp(snapshot)
        assert stamped.status is VerificationStatus.VERIFIED and (stamped.relative_error or 0.0) < 1e-5


def _two_sets() -> Any:
    model = with_lora(llama())
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def _prompts(kind: Any, model: Any, task: str) -> Any:
    return peft.get_peft_model(copy.deepcopy(model), kind(task_type=task, num_virtual_tokens=3))


REFUSED: dict[str, tuple[Make, str]] = {
    "two sets": (_two_sets, "2 sets of adapters (default, other)"),
    "VeRA": (lambda: with_lora(llama(), peft.VeraConfig(r=4, target_modules=["q_proj"])), "of the kind VERA"),
    "LoHa": (lambda: with_lora(llama(), peft.LoHaConfig(r=2, target_modules=["q_proj"])), "of the kind LOHA"),
    "aLoRA": (_lora(alora_invocation_tokens=[3]), "use `alora_invocation_tokens` of peft"),
    "prompts": (lambda: _prompts(peft.PromptTuningConfig, llama(), "CAUSAL_LM"), "trains prompt tuning"),
    "prompts of a classifier": (
        lambda: _prompts(peft.PromptTuningConfig, tiny.bert(), "SEQ_CLS"),
        "trains prompt tuning",
    ),
    "prefixes": (lambda: _prompts(peft.PrefixTuningConfig, llama(), "CAUSAL_LM"), "trains prefix tuning"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_cannot_be_made_again_are_refused_before_the_first_step(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By name, with what to do; nothing is written, and training continues."""
    make, message = REFUSED[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make().train()
        _run(model, tmp_path)
    assert message in caplog.text and caplog.text.count("is off for this run") == 1
    assert "PeftType" not in caplog.text and ("train" in caplog.text.split(message)[1] or "delete" in caplog.text)
    assert not (tmp_path / "audit" / "spool").exists()


def test_a_recipe_takes_no_setting_that_names_code() -> None:
    """A recipe is read from a file, and peft imports what `megatron_core` names."""
    with pytest.raises(ValueError, match="no setting 'megatron_core'"):
        LoraRecipe(rank=2, targets=("q_proj",), alpha=2.0, settings={"megatron_core": "os"})
    model = unwrapped(REFUSED["LoHa"][0]())
    with pytest.raises(ModelError, match="kind LOHA"):
        adapted(model)
