"""Trainings with TRL, each as a user writes it.

They use a tiny model and a few sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import tiny
from tests.support.spy import Configuration, Seen, Sequences, Training
from tests.support.tiny_trainer import TEXTS, settings

WIDE = 96
"""Hidden size: more than the tokens of a batch, so that the span of its sentences can be read."""


def llama(dropout: float = 0.0, **more: Any) -> nn.Module:
    """Return a tiny Llama language model, as far from zero as a trained one."""
    config = tiny.hf.LlamaConfig(
        vocab_size=len(tiny.VOCABULARY),
        hidden_size=WIDE,
        intermediate_size=2 * WIDE,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=64,
        attention_dropout=dropout,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=3,
        eos_token_id=3,
        **more,
    )
    return _seeded(lambda: tiny.hf.LlamaForCausalLM(config))


def gpt2(dropout: float = 0.0) -> nn.Module:
    """Return a tiny GPT-2 language model with its usual dropout or none."""
    config = tiny.hf.GPT2Config(
        vocab_size=len(tiny.VOCABULARY), n_embd=WIDE, n_layer=2, n_head=6, n_positions=64, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, initializer_range=0.1, pad_token_id=0, bos_token_id=3, eos_token_id=3,
    )  # fmt: skip
    return _seeded(lambda: tiny.hf.GPT2LMHeadModel(config))


def reward_model() -> nn.Module:
    """Return a tiny Llama that scores a text with one number."""
    config: Any = llama().config
    config.num_labels = 1
    return _seeded(lambda: tiny.hf.LlamaForSequenceClassification(config))


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def texts() -> Any:
    """Return sentences, one a row."""
    return _rows([{"text": text} for text in TEXTS])


def completions() -> Any:
    """Return sentences cut into a prompt and its completion."""
    return _rows([{"prompt": " ".join(t.split()[:3]), "completion": " " + " ".join(t.split()[3:])} for t in TEXTS])


def preferences() -> Any:
    """Return prompts with a chosen and a rejected completion."""
    endings = (" liked a cat .", " saw the red fish .")
    return _rows(
        [
            {"prompt": " ".join(t.split()[:3]), "chosen": endings[i % 2], "rejected": endings[1 - i % 2]}
            for i, t in enumerate(TEXTS)
        ]
    )


def prompts() -> Any:
    """Return prompts alone."""
    return _rows([{"prompt": " ".join(t.split()[:3])} for t in TEXTS])


def _rows(rows: list[dict[str, str]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


PLAIN: Mapping[str, Any] = {"bf16": False, "gradient_checkpointing": False}
"""What TRL would choose otherwise."""


def _settings(run: Training, arguments: dict[str, Any]) -> dict[str, Any]:
    return settings(run.folder, **{**PLAIN, **arguments})


def _train(run: Training, trainer: Any) -> None:
    run.trainer(trainer)
    trainer.train()


def sft(
    model: Callable[[], nn.Module] = llama, rows: Callable[[], Any] = texts, adapters: bool = False, **arguments: Any
) -> Callable[[Training], None]:
    """Return a training with `SFTTrainer`."""

    def train(run: Training) -> None:
        from trl import SFTConfig, SFTTrainer

        _train(
            run,
            SFTTrainer(
                model=model(),
                args=SFTConfig(**_settings(run, arguments)),
                train_dataset=rows(),
                processing_class=tiny.gpt2_tokenizer(),
                peft_config=_lora() if adapters else None,
            ),
        )

    return train


def dpo(model: Callable[[], nn.Module] = llama, adapters: bool = False, **arguments: Any) -> Callable[[Training], None]:
    """Return a training with `DPOTrainer`."""

    def train(run: Training) -> None:
        from trl import DPOConfig, DPOTrainer

        _train(
            run,
            DPOTrainer(
                model=model(),
                ref_model=None if adapters else model(),
                args=DPOConfig(**_settings(run, arguments)),
                train_dataset=preferences(),
                processing_class=tiny.gpt2_tokenizer(),
                peft_config=_lora() if adapters else None,
            ),
        )

    return train


def grpo(model: Callable[[], nn.Module] = llama, **arguments: Any) -> Callable[[Training], None]:
    """Return a training with `GRPOTrainer`; the reward is the sum of token ids."""

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [sum(ids) / 100 for ids in completion_ids]

    def train(run: Training) -> None:
        from trl import GRPOConfig, GRPOTrainer

        settings = {"num_generations": 2, "max_completion_length": 5, **arguments}
        policy: Any = model()
        policy.save_pretrained(run.folder / "policy")  # a term against the first weights reads them again
        policy.config._name_or_path = str(run.folder / "policy")
        _train(
            run,
            GRPOTrainer(
                model=policy,
                reward_funcs=reward,
                args=GRPOConfig(**_settings(run, settings)),
                train_dataset=prompts(),
                processing_class=_left(tiny.gpt2_tokenizer()),
            ),
        )

    return train


def reward(**arguments: Any) -> Callable[[Training], None]:
    """Return a training with `RewardTrainer`."""

    def train(run: Training) -> None:
        from trl import RewardConfig, RewardTrainer

        _train(
            run,
            RewardTrainer(
                model=reward_model(),
                args=RewardConfig(**_settings(run, arguments)),
                train_dataset=preferences(),
                processing_class=tiny.gpt2_tokenizer(),
            ),
        )

    return train


def _left(tokenizer: Any) -> Any:
    tokenizer.padding_side = "left"
    return tokenizer


def _lora() -> Any:
    import peft

    return peft.LoraConfig(r=32, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM")


def _generated(seen: Seen) -> Sequences:
    """Return the inputs of the word embeddings, without padding.

    GRPO's batches hold prompts only.
    """
    return [tuple(t for t in row.tolist() if t != 0) for rows in seen.rows for row in rows]


def _language_model(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Return the mean cross-entropy over all labels of a step: TRL's `nll` loss."""
    total, items = torch.zeros(()), 0
    for batch in batches:
        given = {n: batch[n] for n in ("input_ids", "attention_mask", "position_ids") if n in batch}
        logits, labels = model(**given).logits[:, :-1].float(), batch["labels"][:, 1:]
        total = total + nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        items += int((labels != -100).sum())
    return total / items


def _own(name: str, train: Callable[[Training], None], fresh: Callable[[], nn.Module] = llama) -> Configuration:
    return Configuration(name, train, loss=_language_model, fresh=fresh)


SFT = (
    _own("SFT", sft()),
    Configuration("SFT, defaults (bf16, checkpointing)", sft(bf16=True, gradient_checkpointing=True)),
    _own("SFT, loss nll", sft(loss_type="nll")),
    Configuration("SFT, loss dft", sft(loss_type="dft")),
    _own("SFT, accumulation", sft(gradient_accumulation_steps=2)),
    Configuration("SFT, bf16", sft(bf16=True)),
    Configuration("SFT, packing bfd", sft(packing=True, max_length=16)),
    Configuration("SFT, packing wrapped", sft(packing=True, packing_strategy="wrapped", max_length=16)),
    Configuration("SFT, padding-free", sft(padding_free=True, max_length=None)),
    _own("SFT, prompt and completion", sft(rows=completions)),
    _own("SFT, prompt and completion, whole loss", sft(rows=completions, completion_only_loss=False)),
    Configuration("SFT, LoRA", sft(adapters=True, max_steps=4)),
    Configuration("SFT, GPT-2 with dropout", sft(model=lambda: gpt2(dropout=0.1))),
    Configuration("SFT, clipped", sft(max_grad_norm=0.1)),
)
DPO = (
    Configuration("DPO, Llama", dpo()),
    Configuration("DPO, GPT-2", dpo(model=lambda: gpt2(dropout=0.1))),
    Configuration("DPO, LoRA", dpo(adapters=True, max_steps=4)),
)
GRPO = (
    Configuration("GRPO", grpo(), texts=_generated),
    Configuration("GRPO, KL term", grpo(beta=0.1), texts=_generated),
)
REWARD = (
    Configuration("Reward", reward()),
    Configuration("Reward, accumulation", reward(gradient_accumulation_steps=2)),
)

ALL = (*SFT, *DPO, *GRPO, *REWARD)
