"""A training for `torchrun` and `accelerate launch`: one paste for an audit.

torchrun --nproc-per-node 2 -m tests.support.launched FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import Trainer, TrainingArguments

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.plugins.testing.small_models import bert, bert_tokenizer

TEXTS = ("the old dog chased a cat .", "a small bird saw the red fish .", "one horse ate .", "the new blue house .")


def main() -> None:
    out, tokenizer = Path(sys.argv[1]), bert_tokenizer()
    data = [{**tokenizer(text, padding="max_length", max_length=12), "labels": n % 2} for n, text in enumerate(TEXTS)]
    arguments = TrainingArguments(
        str(out / "trainer"), per_device_train_batch_size=1, max_steps=2, use_cpu=True, report_to=[],
        save_strategy="no", optim="sgd", max_grad_norm=0.0, ddp_backend="gloo",
    )  # fmt: skip
    audit = LeakAuditCallback(
        {"out_dir": str(out / "audit"), "every_n_steps": 1, "attacks": ["embedding-rows"], "controls": 1, "nice": 0}
    )
    trainer = Trainer(bert(), arguments, train_dataset=data, processing_class=tokenizer)
    audit.attach(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
