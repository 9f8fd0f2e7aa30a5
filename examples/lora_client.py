"""A client of federated fine-tuning: LoRA on a frozen model with TRL, and AdamW made anew in every round.

    python examples/lora_client.py          # one client alone: three rounds, one audit

`flower_lora.py` runs the same client in Flower.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.capture.rounds.registry import finish_rounds

sys.path.insert(0, str(Path(__file__).parent))
from tiny_language_model import FOLDER, make, notes

RANK = 32
LEARNING_RATE = 1e-3
TARGETS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]


def adapted_model(base: Path = FOLDER) -> Any:
    """Return the small Llama with new adapters, the same at every call."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(make(base), trust_remote_code=False)
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM"))


def first_weights() -> dict[str, Tensor]:
    """Return the adapters that the server sends before the first round.

    They are as after some training: at their start B is zero, and A has no update.
    """
    adapters = get_peft_model_state_dict(adapted_model())
    return {name: 0.02 * torch.randn_like(w) if "lora_B" in name else w for name, w in adapters.items()}


def train(
    weights: dict[str, Tensor], client: int, number: int, audit: dict[str, Any], local_steps: int = 1
) -> dict[str, Tensor]:
    """Take the local steps of one round and return the adapters.

    Args:
        weights: the adapters that the server sent.
        client: number of the client; clients have different notes.
        number: of the round, counted from 0; each round has new notes.
        audit: configuration of the audit.
        local_steps: K, each with a batch of one note.
    """
    model = adapted_model()
    set_peft_model_state_dict(model, weights)
    mine = notes()[client::2][number * local_steps :][:local_steps]
    callback = LeakAuditCallback({"unit": "round", **audit})
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(Path(audit["out_dir"]).with_suffix(".trainer")),
            per_device_train_batch_size=1,
            max_steps=local_steps,
            learning_rate=LEARNING_RATE,
            optim="adamw_torch",
            lr_scheduler_type="constant",
            bf16=False,
            loss_type="nll",
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataset_num_proc=None,
        ),
        train_dataset=Dataset.from_list([{"text": note} for note in mine]),
        processing_class=AutoTokenizer.from_pretrained(make(), trust_remote_code=False),
        callbacks=[callback],
    )
    callback.attach(trainer)
    trainer.train()
    return dict(get_peft_model_state_dict(model))


QUICK = {"attacks": ["span"], "controls": 1, "budget_s": 120}
"""One attack, so that an example takes minutes; without these keys the battery is a whole one. It needs up to 120 s for a sentence."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("leakaudit-demo/rounds"), help="folder of the audit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--local-steps", type=int, default=1)
    options = parser.parse_args()
    weights = first_weights()
    for number in range(options.rounds):
        weights = train(weights, 0, number, {"out_dir": str(options.out), **QUICK}, options.local_steps)
    finish_rounds(options.out)


if __name__ == "__main__":
    main()
