"""The defence tables of LLG and GRAB: the papers' numbers beside ours.

    python -m tests.benchmarks.defense_tables_labels llg-7 --batches 30 [--texts FOLDER]
    python -m tests.benchmarks.defense_tables_labels grab-6 --data FILE.jsonl --sentences 2 --budget 20
    python -m tests.benchmarks.defense_tables_labels grab-7 --data FILE.jsonl --sentences 2 --budget 20

`llg-7` is LLG's Fig. 7 and Table 1 (Wainakh et al. 2022). The figure is a picture, so its column says what the text and the caption say.
The client is the paper's untrained CNN on scikit-learn's digits. Compression has two rows: as the paper describes it, and by the rule of the
published code (tklab-tud/LLG). With `--texts` the same defences are measured on a text classifier (FOLDER/ag_news).

`grab-6` and `grab-7` are GRAB's Tables 6 and 7 (Feng et al. 2024): one text, dropout on, embeddings frozen, labels and lengths granted.
Table 6 has utility and epsilon only; the recovery under noise is a picture. Every attack knows the defence. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leakaudit.audit.audit import Audit
from leakaudit.audit.devices import choose_device
from leakaudit.audit.simulation.texts import Simulator, read_examples
from leakaudit.client.batches import make_batch, public_facts
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.config.simulation import Simulation
from leakaudit.defenses.clip_noise import ClipNoise
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.defenses.prune import Prune
from leakaudit.models.array_classifier import save_auxiliary
from leakaudit.plugins import Defense
from leakaudit.results.schema import Attempt, Score, TextMode
from tests.benchmarks.label_models import fresh
from tests.benchmarks.labels import PLAIN, STEPS, Cell, Maker, Pictures, chosen_from, measure
from tests.benchmarks.span import arguments, in_percent


class Figure7(NamedTuple):
    """What LLG's paper says of one defence."""

    kind: str
    """`noise`, `clipped` (noise 0.1) or `compressed`."""
    strength: float
    """Sigma, the bound of the norm, or the share that is not sent."""
    sgd: str
    """LLG+ under FedSGD, Fig. 7 a to c, as its text and caption put it."""
    average: str
    """The same under FedAvg, Fig. 7 d to f."""
    accuracy: tuple[str, str]
    """Table 1: test accuracy in percent of a model trained with the defence, FedSGD and FedAvg; undefended 93.3 and 94.5."""


FIGURE_7 = (
    Figure7("noise", 0.01, "above the random guess", "no clear effect", ("93.4", "94.6")),
    Figure7("noise", 0.1, "above the random guess", "no clear effect", ("89.9", "91.4")),
    Figure7("noise", 1.0, "above the random guess", "no clear effect", ("<= 10.1", "<= 13.5")),
    Figure7("clipped", 10.0, "not stated", "not stated", ("89", "91.2")),
    Figure7("clipped", 5.0, "not stated", "not stated", ("86.1", "90.5")),
    Figure7("clipped", 1.0, "below the random guess for B > 16", "close to 20 % for larger B", ("<= 52.4", "52.5")),
    Figure7("compressed", 0.2, "slight effect", "limited effect", ("93.4", "92.8")),
    Figure7("compressed", 0.4, "not stated", "ended from B = 8 on", ("93.7", "91.6")),
    Figure7("compressed", 0.8, "below the random guess from B = 4 on", "ended at every B", ("91.9", "89.3")),
)
"""Source: LLG, Sec. 6.5, caption of Fig. 7, Table 1; n = 100 batches."""


class Table7(NamedTuple):
    """One share of GRAB's Table 7: MCC, and R-1, R-2, R-L of three rows."""

    share: float
    mcc: float
    grab: tuple[float, float, float]
    """With dropout masks and pruning mask."""
    unmasked: tuple[float, float, float]
    """Without the pruning mask."""
    lamp: tuple[float, float, float]
    """LAMP_cos."""


TABLE_7 = (
    Table7(0.75, 0.72, (89.2, 65.8, 78.8), (0.8, 0.0, 0.7), (27.9, 8.8, 21.3)),
    Table7(0.90, 0.67, (89.4, 67.8, 80.8), (0.9, 0.0, 0.9), (7.9, 1.8, 6.7)),
    Table7(0.95, 0.61, (87.6, 65.3, 78.0), (0.9, 0.0, 0.9), (0.1, 0.0, 0.1)),
    Table7(0.99, 0.45, (85.9, 60.2, 75.4), (0.7, 0.0, 0.7), (0.0, 0.0, 0.0)),
)
"""GRAB, Table 7: BERT-base, CoLA, 64 sentences, three runs; random entries are set to zero."""

UNDEFENDED = (87.7, 64.3, 78.2)
"""GRAB, Table 3: BERT-base with dropout masks, B = 1, no defence; R-1, R-2, R-L."""


class Table6(NamedTuple):
    """One noise level of GRAB's Table 6."""

    sigma: float
    mcc: float
    epsilon: float


TABLE_6 = (
    Table6(0.001, 0.74, 1.10e10), Table6(0.002, 0.68, 2.75e9), Table6(0.005, 0.60, 4.38e8),
    Table6(0.01, 0.51, 1.08e8), Table6(0.02, 0.45, 2.55e7), Table6(0.05, 0.25, 2.37e6),
)  # fmt: skip
"""GRAB, Table 6: delta = 1e-5; the undefended model has an MCC of 0.77."""

WIDTH = 768
"""Width of BERT-base. The published code (UQ-Trust-Lab/GRAB, helper functions) divides each tensor by its norm and adds noise sigma. A matrix
of 768 x 768 entries then has a root mean square of 1/768, so the noise is 768 sigma times as large as its entries."""

ROWS = ("random", "llg+ rows", "llg+", "ilrg", "rlu+")
"""Attacks of `llg-7`: a guess, the paper's own, and three of ours."""

TEXT_ROWS: dict[str, tuple[str, dict[str, str]]] = {
    name: PLAIN[name] for name in ("random", "llg+ rows", "llg+", "ilrg")
}
TEXT_ROWS["feature-labels"] = ("feature-labels", {})

OURS = ("span", "grab")


def applied(defense: Defense, seen: Observation, rng: torch.Generator) -> Observation:
    """Return what a defence of the update sends, declared as attacks know it."""
    prepared = defense.prepared(seen.update, 1.0)
    return seen.under(prepared.declared(), prepared.changed(seen.update, rng))


def defense_of(row: Figure7, steps: int) -> Defense:
    """Return a defence of Fig. 7.

    The paper's noise and bound are those of the sum of `steps` gradients. An update here is their mean.
    """
    if row.kind == "noise":
        return GaussianNoise(sigma=row.strength / steps)
    if row.kind == "clipped":
        return ClipNoise(bound=row.strength / steps, sigma=0.1 / steps)
    return Prune(share=row.strength)


def as_released(update: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return a first round of the compression in LLG's published code.

    The code takes the row sums of the output layer's weight, one for each of C classes. But it applies them to the parameters in their order:
    tensor number i is withheld as a whole if the size of row sum i is among the share C smallest, and if the sum of the tensor's entries is
    smaller than that bar. In the CNN the output layer's weight is tensor 6, so the row sum of class 6 decides whether it is sent. The sum of
    its entries is 0, so the second condition always holds for it.

    Args:
        update: tensors in the order of the model's parameters; the last two are the output layer's weight (C, H) and bias.
        share: theta.
    """
    sizes = list(update.values())[-2].sum(dim=1).abs()  # (C,)
    bar = sizes.sort().values[int(len(sizes) * share) - 1]
    sent = {}
    for size, (name, g) in zip(sizes, update.items(), strict=False):
        withheld = bool(size <= bar) and bool(g.sum().abs() < bar)
        sent[name] = torch.zeros_like(g) if withheld else g
    return dict(update) | sent


def figure_7(pictures: Pictures, batches: int, sizes: Sequence[int], kinds: Sequence[str]) -> Iterator[str]:
    """Yield the rows of LLG's Fig. 7 on the untrained CNN."""
    chosen = chosen_from(PLAIN, ROWS, pictures.auxiliary)
    yield (
        "| | defence | B | paper, LLG+ | paper, accuracy | "
        + " | ".join(ROWS)
        + " | `llg+ rows`, interval | output layer sent | n |"
    )
    yield "| --- " * (8 + len(ROWS)) + "|"
    for row in FIGURE_7:
        for released in (False, True) if row.kind == "compressed" else (False,):
            if (f"{row.kind}-released" if released else row.kind) not in kinds:
                continue
            for number, steps in enumerate((1, STEPS)):
                for size in sizes:
                    sent: list[float] = []
                    make = _of_pictures(pictures, row, released, steps, size, sent)
                    where = ("Fig. 7", row.kind, str(steps), size)
                    cells = measure(chosen, make, range(batches), where)
                    if released:  # Algorithm 1 itself does not look whether a gradient was sent
                        own = {ROWS[1]: chosen[ROWS[1]]}
                        (cells[1],) = measure(own, _filled(make), range(batches), where)
                    name = f"{row.kind} {row.strength:g}" + (", published code" if released else "")
                    paper = f"{(row.sgd, row.average)[number]} | {row.accuracy[number]}"
                    yield f"| {('FedSGD', 'FedAvg')[number]} | {name} | {size} | {paper} | {_cells(cells)} | {100 * fmean(sent):.0f} | {batches} |"


def _of_pictures(pictures: Pictures, row: Figure7, released: bool, steps: int, size: int, sent: list[float]) -> Maker:
    """Return what makes a defended update.

    `sent` gets the share of the head that is sent.
    """

    def make(repeat: int) -> tuple[Observation, list[int]]:
        seen, labels = pictures.observe(fresh("CNN", repeat, "uniform"), size, False, steps, repeat, training=False)
        if released:
            declared = DeclaredDefense(name="prune", parameters={"share": row.strength})
            seen = seen.under(declared, as_released(seen.update, row.strength))
        else:
            seen = applied(defense_of(row, steps), seen, torch.Generator().manual_seed(repeat))
        sent.append(float((list(seen.update.values())[-2] != 0).double().mean()))
        return seen, labels

    return make


def _filled(make: Maker) -> Maker:
    """Return a maker of steps whose output layer is never all 0."""

    def filled(repeat: int) -> tuple[Observation, list[int]]:
        return _never_empty(*make(repeat))

    return filled


def _never_empty(seen: Observation, labels: list[int]) -> tuple[Observation, list[int]]:
    """Return the step with an output layer of 1e-20 in place of one that is all 0.

    Our attack refuses to apply to a layer that is all 0.
    """
    weight = list(seen.update)[-2]
    if bool(seen.update[weight].any()):
        return seen, labels
    update = {**seen.update, weight: torch.full_like(seen.update[weight], 1e-20)}
    return Observation(update, seen.model, seen.facts), labels


def _cells(cells: Sequence[Cell]) -> str:
    """Return rates in percent.

    In brackets the steps to which an attack applies, if not to all.
    """
    most = max(cell.n for cell in cells)
    rates = " | ".join("-" if not c.n else f"{100 * c.rate:.0f}" + (f" ({c.n})" if c.n < most else "") for c in cells)
    own = cells[1]
    bounds = "-" if own.lower is None else f"{100 * own.lower:.0f} to {100 * (own.upper or 0.0):.0f}"
    return f"{rates} | {bounds}"


def text_rows(folder: Path, model_path: Path, scratch: Path, batches: int, sizes: Sequence[int]) -> Iterator[str]:
    """Yield the same defences on AG News with a fresh head of four classes.

    The last block, the pooler and the head are trained. FedSGD, dropout off, texts cut at 64 tokens.
    """
    from leakaudit.models.loading import load_model, load_tokenizer

    tokenizer = load_tokenizer(model_path)
    model: Any = load_model(model_path, "classification", num_labels=4)
    train = read_examples(folder / "ag_news" / "train.jsonl", "classification")
    dev = read_examples(folder / "ag_news" / "dev.jsonl", "classification")
    kept = [row for c in range(4) for row in [r for r in train if r.label == c][:5]]
    spare = make_batch(tokenizer, [r.text for r in kept], [r.label or 0 for r in kept], "classification", 64)
    auxiliary = scratch / "texts.safetensors"
    save_auxiliary(auxiliary, {k: spare.inputs[k] for k in ("input_ids", "attention_mask")}, spare.inputs["labels"])
    chosen = chosen_from(TEXT_ROWS, list(TEXT_ROWS), auxiliary)
    last = f"bert.encoder.layer.{len(model.bert.encoder.layer) - 1}."
    frozen = frozenset(
        name for name, _ in model.named_parameters() if not name.startswith((last, "bert.pooler.", "classifier."))
    )
    yield "| defence | B | " + " | ".join(TEXT_ROWS) + " | `llg+ rows`, interval | output layer sent | n |"
    yield "| --- " * (5 + len(TEXT_ROWS)) + "|"
    for row in FIGURE_7:
        for size in sizes:
            sent: list[float] = []

            def make(
                repeat: int, row: Figure7 = row, size: int = size, sent: list[float] = sent
            ) -> tuple[Observation, list[int]]:
                order = torch.randperm(len(dev), generator=torch.Generator().manual_seed(1000 + repeat))[:size]
                mine = [dev[i] for i in order.tolist()]
                labels = [r.label or 0 for r in mine]
                batch = make_batch(tokenizer, [r.text for r in mine], labels, "classification", 64)
                facts = public_facts(
                    model, tokenizer, task="classification", training=False, frozen=frozen, batch_size_bound=size
                )
                seen = ClientStep(model, Truth((batch,)), StepRecipe(), facts).observe()
                seen = applied(defense_of(row, 1), seen, torch.Generator().manual_seed(repeat))
                sent.append(float((seen.update["classifier.weight"] != 0).double().mean()))
                return seen, labels

            cells = measure(chosen, make, range(batches), ("text", row.kind, "FedSGD", size))
            yield f"| {row.kind} {row.strength:g} | {size} | {_cells(cells)} | {100 * fmean(sent):.0f} | {batches} |"


def grab_rows(table: str) -> dict[str, str]:
    """Return defence -> what the paper prints, as cells.

    Strength, MCC, R-1/R-2/R-L with and without the mask, LAMP_cos, epsilon.
    """

    def cell(values: tuple[float, float, float]) -> str:
        return " / ".join(map(str, values))

    rows = {"none": f"none | 0.77 | {cell(UNDEFENDED)} | - | 75.9 / 36.4 / 60.1 | -"}
    if table == "grab-6":
        for noise in TABLE_6:
            spec = PluginSpec.parse(f"gaussian-noise(scale={WIDTH * noise.sigma:g})").label
            rows[spec] = f"{noise.sigma:g} | {noise.mcc:g} | picture | - | picture | {noise.epsilon:.2e}"
    else:
        for one in TABLE_7:
            spec = PluginSpec.parse(f"prune(share={one.share},choose=random)").label
            rows[spec] = f"{one.share:g} | {one.mcc:g} | {cell(one.grab)} | {cell(one.unmasked)} | {cell(one.lamp)} | -"
    return rows


def grab_table(options: argparse.Namespace) -> Iterator[str]:
    """Yield ours beside the paper's rows; every defence sees the same steps."""
    paper = grab_rows(options.table)
    found: dict[tuple[str, str], list[Attempt]] = {}
    for seed in options.seeds:
        for attempt in _attempts(options, list(paper), seed):
            found.setdefault((attempt.defense, attempt.attack), []).append(attempt)
    yield "| defence | paper's strength | MCC | GRAB | GRAB, no pruning mask | LAMP_cos | epsilon | our attack | R-1 | lowest to highest | R-2 | R-L | exact | stopped | n |"
    yield "| --- " * 15 + "|"
    for (defense, attack), attempts in found.items():
        first = _scores(attempts, "rouge1")
        rates = [fmean(_scores(attempts, name)) if first else None for name in ("rouge2", "rougeL", "exact")]
        spread = f"{100 * min(first):.0f} to {100 * max(first):.0f}" if first else "-"
        stopped = sum(attempt.stop == "budget" for attempt in attempts)
        mean = in_percent([fmean(first) if first else None])
        yield f"| `{defense}` | {paper[defense]} | `{attack}` | {mean} | {spread} | {in_percent(rates)} | {stopped} | {len(attempts)} |"


def _scores(attempts: Sequence[Attempt], name: str) -> list[float]:
    """Return a score of every attempt that has it."""
    found = [attempt.scores.get(name) for attempt in attempts]
    return [score.value for score in found if isinstance(score, Score)]


def _attempts(options: argparse.Namespace, defenses: Sequence[str], seed: int) -> list[Attempt]:
    simulation = Simulation(
        model=options.model, data=options.data, steps=max(1, options.sentences // len(options.seeds)), seed=seed,
        freeze=("embeddings",), grant=("labels", "lengths"), mode="train",
    )  # fmt: skip
    simulator = Simulator(simulation)
    with tempfile.TemporaryDirectory() as folder:
        config = AuditConfig(
            out_dir=Path(folder), attacks=tuple(PluginSpec.parse(word) for word in options.attacks.split(";")),
            defenses=tuple(PluginSpec.parse(word) for word in defenses), seed=seed, text=TextMode.HASH, controls=0,
            budget_s=options.budget, attack_recovered_steps=True,
        )  # fmt: skip
        audit = Audit(Path(folder), config, simulator.tokenizer, device=choose_device(options.device))
        for snapshot in simulator:
            audit.step(snapshot)
        return [entry.attempt for entry in audit.entries if entry.attempt.defense in set(defenses)]


def main() -> None:
    """Print one of the tables."""
    shared = arguments(__doc__.splitlines()[0], sentences=2)
    parser = argparse.ArgumentParser(description=shared.description, parents=[shared], conflict_handler="resolve")
    parser.add_argument("table", choices=["llg-7", "grab-6", "grab-7"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of heads, order of texts and attacks (GRAB)")
    parser.add_argument("--batches", type=int, default=30, help="batches of each row of llg-7, numbered from 0")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64], help="batch sizes of llg-7")
    kinds = ("noise", "clipped", "compressed", "compressed-released")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=list(kinds), help="rows of llg-7")
    parser.add_argument("--texts", type=Path, help="folder with ag_news/: llg-7 on texts instead of digits")
    parser.add_argument("--attacks", default=";".join(OURS), help="of the GRAB tables, separated by `;`")
    parser.add_argument(
        "--steps", type=int, help="adds GRAB as printed with so many steps: the whole is hours a sentence"
    )
    parser.add_argument(
        "--budget", type=float, default=20.0, help="seconds of an attack on a sentence under one defence"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.steps is not None:
        short = "n_init=20,n_permutations=20,sweeps=1,hybrid_rounds=1"
        options.attacks += f";grab(preset=paper,steps={options.steps},{short})"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if options.table != "llg-7":
            print(
                f"{options.data.parent.name}/{options.data.name}, seeds {options.seeds}, {options.budget:g} s for each attack, dropout on\n"
            )
            rows = grab_table(options)
        elif options.texts:
            print(
                "AG News, fresh head, FedSGD; success rate in percent, output layer sent: percent of entries that are not 0\n"
            )
            rows = text_rows(options.texts, options.model, Path(folder), options.batches, options.sizes)
        else:
            print("untrained CNN, weights uniform from -0.5 to 0.5, unbalanced; success rate in percent\n")
            rows = figure_7(Pictures(Path(folder)), options.batches, options.sizes, options.kinds)
        for line in rows:
            print(line, flush=True)
    print(f"\n{time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
