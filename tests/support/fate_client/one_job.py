"""Runs the LoRA job of FATE-LLM's examples in three local processes.

    FATE_WORK=WORK FATE_EPOCHS=1 python one_job.py --parties guest:9999 host:10000 arbiter:10001

FATE's own launcher starts guest, host and arbiter, which talk through its standalone federation; its scheduler and its pipeline are not needed.
The configuration is the one of `examples/pellm/test_bloom_lora.py` and `bloom_lora_config.yaml` without DeepSpeed and half precision. WORK has a `model` and
`train.jsonl`; each party writes what it trained to `output-PARTY` there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def loader(module: str, item: str, **arguments: Any) -> dict[str, Any]:
    """Return what FATE's configuration says of an object of FATE-LLM."""
    return {"module_name": f"fate_llm.{module}", "item_name": item, "kwargs": arguments, "source": None}


def run(ctx: Any) -> None:
    """Take the part of one party."""
    from fate.components.core.essential import ARBITER, GUEST, HOST
    from fate_llm.runner.homo_seq2seq_runner import Seq2SeqRunner

    work = Path(os.environ["FATE_WORK"])
    tokens = {"tokenizer_name_or_path": str(work / "model"), "trust_remote_code": True}
    lora = {"r": 8, "lora_alpha": 32, "lora_dropout": 0.1, "target_modules": ["query_key_value"]}
    runner = Seq2SeqRunner(
        algo="fedavg",
        model_conf=loader(
            "model_zoo.pellm.bloom",
            "Bloom",
            pretrained_path=str(work / "model"),
            peft_type="LoraConfig",
            peft_config={**lora, "task_type": "CAUSAL_LM"},
            trust_remote_code=True,
        ),
        dataset_conf=loader("dataset.prompt_dataset", "PromptDataset", **tokens),
        data_collator_conf=loader("data.data_collator.cust_data_collator", "get_seq2seq_data_collator", **tokens),
        training_args_conf={
            "num_train_epochs": int(os.environ["FATE_EPOCHS"]),
            "per_device_train_batch_size": 4,
            "remove_unused_columns": False,
            "predict_with_generate": False,
            "learning_rate": 5e-4,
            "use_cpu": True,
        },
        fed_args_conf={},
        task_type="causal_lm",
        save_trainable_weights_only=True,
    )
    role = GUEST if ctx.is_on_guest else HOST if ctx.is_on_host else ARBITER
    runner.set_context(ctx)
    runner.set_role(role)
    output = work / f"output-{role.name}"
    output.mkdir()
    runner.train(str(work / "train.jsonl"), None, str(output))


if __name__ == "__main__":
    from fate.arch.launchers.multiprocess_launcher import launch

    launch(run)
