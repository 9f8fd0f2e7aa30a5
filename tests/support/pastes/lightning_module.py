"""A user's script with Lightning."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import small
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding


class Module(pl.LightningModule):
    """A classifier of notes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small.classifier().train()

    def training_step(self, batch: Any, index: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


tokenizer = small.tokenizer()
loader: Any = DataLoader(small.labelled(), batch_size=1, collate_fn=DataCollatorWithPadding(tokenizer))
trainer: Any = pl.Trainer(max_steps=small.STEPS, accelerator="cpu", logger=False, enable_checkpointing=False)
# paste:
trainer.fit(Module(), loader)
