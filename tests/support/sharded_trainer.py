"""One of two processes whose Hugging Face Trainer shards the model with FSDP2.

    python -m tests.support.sharded_trainer FOLDER

Accelerate shards on accelerators only; `fsdp_on_cpu` lets it shard over processes on gloo.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import set_seed

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from tests.support import tiny
from tests.support.fsdp_on_cpu import fsdp_on_cpu
from tests.support.tiny_trainer import Probe, audit_config, make_trainer, without_side_process

STEPS = 3
SHARDED: dict[str, Any] = {
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2, "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]},
}


def adapted() -> Any:
    """Return a tiny BERT with adapters that have moved."""
    import peft

    model = peft.get_peft_model(
        tiny.bert(), peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return model


def main() -> None:
    """Train twice, and write what the optimizers of this process got."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    got = {}
    for name, make in (("whole", tiny.bert), ("adapters", adapted)):
        set_seed(0)
        probe, audit = Probe(), LeakAuditCallback(audit_config(folder / name))
        with fsdp_on_cpu():
            trainer = make_trainer(
                folder / name, probe, audit, model=make(), max_steps=STEPS, per_device_train_batch_size=2, **SHARDED
            )
            audit.attach(trainer)
            with without_side_process():
                trainer.train()
        assert any("FSDPModule" in kind.__name__ for kind in type(trainer.model_wrapped).__mro__)
        got[name] = [
            {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in u.items()} for u in probe.updates
        ]
    torch.save(got, folder / f"updates-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
