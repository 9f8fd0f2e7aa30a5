"""Capture does what preflight says of twelve configurations.

Each is trained on a tiny model.

Each is cut down from one of axolotl's examples. What has no kernels on a CPU has a stand-in with the same interface: layers of four bits,
an optimizer whose state is in eight bits. Strategies of several processes are told to the audit as Accelerate tells them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.utils import DistributedType
from transformers import TrainerCallback

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import watch
from leakaudit.models import quantised_layers as quantised_module
from leakaudit.preflight.answer import Answer, preflight
from leakaudit.preflight.axolotl import read_axolotl
from leakaudit.preflight.files import with_rounds
from leakaudit.results.schema import VerificationStatus
from tests.capture.test_rebuilt import WORDS, llama, with_lora
from tests.support import tiny
from tests.support.own_optimizers import EightBits, Lion
from tests.support.quantised import FourBits, quantised
from tests.support.tiny_trainer import TEXTS, audit_config, kept, make_trainer, stamp, without_side_process

peft: Any = pytest.importorskip("peft")

EXAMPLES = {
    "full": "optimizer: adamw_torch\nmicro_batch_size: 2\ngradient_accumulation_steps: 2",
    "full, bf16, checkpoints": "optimizer: adamw_torch_fused\nbf16: auto\ngradient_checkpointing: true",
    "full, chosen parts": "optimizer: adamw_torch\nunfrozen_parameters: [norm, embed]",
    "full, 8-bit moments": "optimizer: adamw_bnb_8bit",
    "full, Lion": "optimizer: lion_8bit",
    "reward model": "optimizer: adamw_torch\nreward_model: true\nmodel_type: AutoModelForSequenceClassification",
    "LoRA": "adapter: lora\nlora_r: 4\nlora_target_modules: [q_proj, v_proj]\noptimizer: adamw_torch",
    "LoRA, 4-bit base, 8-bit moments": "adapter: qlora\nlora_r: 4\nload_in_4bit: true\nlora_target_linear: true\noptimizer: paged_adamw_8bit\ngradient_accumulation_steps: 2",
    "LoRA, 4-bit base, tables saved": "adapter: qlora\nlora_r: 2\nload_in_4bit: true\nlora_target_modules: [q_proj]\nlora_modules_to_save: [embed_tokens, lm_head]\noptimizer: adamw_torch",
    "another adapter": "adapter: llama-adapter\noptimizer: adamw_torch",
    "DeepSpeed": "deepspeed: deepspeed_configs/zero2.json\noptimizer: adamw_torch",
    "FSDP1": "fsdp: [full_shard, auto_wrap]\noptimizer: adamw_torch",
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers of these tests count as those of an installed package."""
    found = quantised_module.installed_packages() | {"tests"}
    monkeypatch.setattr(quantised_module, "installed_packages", lambda: found)


def settings(name: str) -> dict[str, Any]:
    """Return the keys of one example."""
    found: dict[str, Any] = yaml.safe_load(f"base_model: tiny\nsequence_len: 32\n{EXAMPLES[name]}")
    return found


def answer_of(name: str) -> Answer:
    """Return what preflight says of one example."""
    return preflight(read_axolotl(settings(name)))


def model_of(said: Mapping[str, Any]) -> Any:
    """Return a tiny model that is stored and trained as a configuration says."""
    if said.get("reward_model"):
        return tiny.bert(num_labels=2)
    model: Any = llama()
    if said.get("load_in_4bit"):
        model = quantised(model, FourBits)
    for name, parameter in model.named_parameters() if said.get("unfrozen_parameters") else ():
        parameter.requires_grad_(any(part in name for part in said["unfrozen_parameters"]))
    if said.get("adapter") == "llama-adapter":
        options = peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
        return peft.get_peft_model(model, options)
    if said.get("adapter"):
        targets = "all-linear" if said.get("lora_target_linear") else said["lora_target_modules"]
        saved = said.get("lora_modules_to_save")
        return with_lora(model, peft.LoraConfig(r=said["lora_r"], target_modules=targets, modules_to_save=saved))
    return model


def optimizer_of(model: Any, name: str) -> Any:
    """Return a stand-in for an optimizer without kernels here.

    None for an optimizer of torch.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    return Lion(parameters, lr=1e-3) if "lion" in name else EightBits(parameters, lr=1e-3) if "8bit" in name else None


def checkpointed(model: Any) -> None:
    """Let a model compute its layers again in the backward pass.

    Versions of transformers have two names for it.
    """
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def quietly(function: Callable[[Mapping[str, Any], Path], set[str]]) -> Callable[[Mapping[str, Any], Path], set[str]]:
    """Let a function run without warnings of the frameworks."""

    @functools.wraps(function)
    def quiet(said: Mapping[str, Any], folder: Path) -> set[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(said, folder)

    return quiet


class Tells(TrainerCallback):
    """Tells how Accelerate distributes, while the audit asks."""

    def __init__(self, state: Any, kind: DistributedType) -> None:
        self.state, self.kind = state, kind

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.state.distributed_type = self.kind


@quietly
def trained(said: Mapping[str, Any], folder: Path) -> set[str]:
    """Train as a configuration says and return the stamps; empty if the audit refused."""
    model = model_of(said)
    if said.get("gradient_checkpointing"):
        checkpointed(model)
    own = optimizer_of(model, str(said["optimizer"]))
    words = {} if said.get("reward_model") else WORDS
    audit = LeakAuditCallback(audit_config(folder))
    trainer = make_trainer(
        folder,
        model=model,
        per_device_train_batch_size=said.get("micro_batch_size", 1),
        gradient_accumulation_steps=said.get("gradient_accumulation_steps", 1),
        bf16=bool(said.get("bf16")),
        max_steps=2,
        **words,
        **({"optim": said["optimizer"]} if own is None else {"trainer_options": {"optimizers": (own, None)}}),
    )
    kind = DistributedType.DEEPSPEED if "deepspeed" in said else DistributedType.FSDP if "fsdp" in said else None
    state = trainer.accelerator.state
    if kind is not None:
        trainer.add_callback(Tells(state, kind))
    audit.attach(trainer)
    if kind is not None:
        trainer.add_callback(Tells(state, DistributedType.NO))
    with without_side_process():
        trainer.train()
    return {stamp(snapshot).status.value for snapshot in kept(audit).values()} if audit.folder is not None else set()


@quietly
def sent(said: Mapping[str, Any], folder: Path) -> set[str]:
    """Take two local steps and return the stamps of what a round sends."""
    model = model_of(said).train()
    moved = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(model, str(said["optimizer"])) or torch.optim.AdamW(moved, lr=1e-3)
    tokenizer = tiny.gpt2_tokenizer()
    with (
        without_side_process(),
        watch(
            model, optimizer, tokenizer=tokenizer, observe="delta", local_steps=2, config=audit_config(folder)
        ) as audit,
    ):
        for text in TEXTS[:2]:
            batch = tokenizer([text], return_tensors="pt")
            model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {stamp(snapshot).status.value for snapshot in kept(audit).values()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_capture_does_what_preflight_says(name: str, tmp_path: Path) -> None:
    """Captured steps are verified; a refused training runs to its end."""
    stamps = trained(settings(name), tmp_path)
    assert answer_of(name).outlook == ("captured" if stamps else "refused")
    assert stamps <= {VerificationStatus.VERIFIED.value}


@pytest.mark.parametrize("name", ["full", "full, Lion", "full, 8-bit moments", "LoRA"])
def test_rounds_are_as_weak_as_preflight_says(name: str, tmp_path: Path) -> None:
    """A difference of weights is verified where the optimizer's rule is known."""
    answer = preflight(with_rounds(read_axolotl(settings(name)), 2))
    stamps = sent(settings(name), tmp_path)
    weaker = any(one.kind == "weaker" for one in answer.findings)
    assert stamps == {"unverifiable" if weaker else "verified"}


def test_both_answers_occur() -> None:
    """The agreement is not that of one answer for all."""
    outlooks = [answer_of(name).outlook for name in EXAMPLES]
    assert len(EXAMPLES) == 12 and outlooks.count("refused") >= 3 and outlooks.count("captured") >= 8
