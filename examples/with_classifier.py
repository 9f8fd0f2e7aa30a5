"""A classifier of pictures: what an observer of its updates reads of the labels, in a loop of your own.

    python examples/with_classifier.py

There is no tokenizer and no text; `num_labels` says so, and the loop tells the audit the labels of each batch, to score against. Any
module that turns one array (B, ...) into logits (B, C) will do. The digits come with scikit-learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from leakaudit.callbacks.torch_loop import watch
from leakaudit.models import model_factory, rebuilt_by


@model_factory
def small_cnn(classes: int) -> nn.Module:
    """Make the classifier; the side process calls this, too, and loads the weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, classes)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("leakaudit-demo/classifier"), help="folder of the audit")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(7)
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (N, 1, 8, 8)
    data = torch.utils.data.TensorDataset(pictures, torch.tensor(digits.target))
    loader = iter(torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))

    # Without `rebuilt_by` the same attacks run in this process, in pauses of training. `deferred`, because this run is over before
    # a side process is up.
    net = rebuilt_by(small_cnn(10), "with_classifier:small_cnn", classes=10)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    policy = Path(__file__).parent / "policy_labels.yaml"
    config = {"out_dir": options.out, "every_n_steps": 20, "schedule": "deferred", "policy": policy}
    with watch(net, optimizer, num_labels=10, batch_size=16, config=config, total_steps=options.steps) as audit:
        for _ in range(options.steps):
            inputs, labels = next(loader)
            audit.batch({"labels": labels})
            nn.functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
