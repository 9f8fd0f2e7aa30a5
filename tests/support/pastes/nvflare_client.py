"""The training script of a user's NVFlare job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel

sys.path.insert(0, str(Path(__file__).resolve().parent))
import small
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

flare.init()
while flare.is_running():
    received = flare.receive()
    trainer: Any = Trainer(
        model=small.classifier(),
        args=TrainingArguments("model", max_steps=1, optim="sgd", learning_rate=0.1, report_to="none", use_cpu=True),
        train_dataset=small.labelled()[:1],
        data_collator=DataCollatorWithPadding(small.tokenizer()),
        processing_class=small.tokenizer(),
    )
    # paste:
    trainer.train()
    flare.send(FLModel(params=dict(trainer.model.state_dict())))
