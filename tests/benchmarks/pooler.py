"""Gain of an active server by a wide pooler.

Run `python -m tests.benchmarks.pooler --data FILE.jsonl --seeds 0 1`.

Two tables. `--what features`: how close the features that are read come to those that went into the pooler, by server, reading and batch size:
cosines by absolute value, matched one to one, the mean and the lowest over all sequences, and how many were read. `--what texts`: what the
features are worth in the search, by phase, on the same steps: ROUGE, likeness in meaning where `--sentence-model` names an encoder, seconds.
Eval mode, embeddings frozen; lengths and labels are granted in the second table, as in the paper. Not collected by pytest.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional

from leakaudit.attacks.pooler_features import Read, read_features
from leakaudit.audit.active_server import named_server, on_active_server
from leakaudit.audit.audit import Audit
from leakaudit.audit.simulation.texts import Simulator
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.config.simulation import Simulation
from leakaudit.models.structure import find_pooler
from leakaudit.results.schema import Score, TextMode
from leakaudit.results.summary import summarise
from tests.benchmarks.span import arguments, in_percent

SERVERS = (
    "wide-pooler(activation=selu,deviation=1.0)",
    "wide-pooler(activation=cube+square,deviation=1.0)",
    "wide-pooler(activation=selu,deviation=0.3)",
    "wide-pooler(activation=cube+square,deviation=0.1)",
)
"""The paper's two, and what the weights' deviation does to them; the last is the default."""

READS: tuple[Read, ...] = ("paper", "span", "solve")


def simulator(options: object, size: int, seed: int, *, granted: bool) -> Simulator:
    """Return client steps of one batch size."""
    given = vars(options)
    return Simulator(
        Simulation(
            model=given["model"],
            data=given["data"],
            batch_size=size,
            steps=max(1, given["sentences"] // size // len(given["seeds"])),
            seed=seed,
            freeze=("embeddings",),
            grant=("labels", "lengths") if granted else (),
        )
    )


def true_features(step: ClientStep) -> Tensor:
    """Return (B, D) what goes into the pooler."""
    taken: list[Tensor] = []
    dense = step.model.get_submodule(find_pooler(step.model, step.facts.num_labels or 0).dense)
    handle = dense.register_forward_pre_hook(lambda _, given: taken.append(given[0]))
    with torch.no_grad():
        step.model(**{name: v for name, v in step.truth.micro_batches[0].inputs.items() if name != "labels"})
    handle.remove()
    return taken[0].double()


def cosines(found: Tensor, true: Tensor) -> list[float]:
    """Return the cosines of features that were found with true ones, one to one."""
    cosine = functional.normalize(found, dim=1) @ functional.normalize(true[:, : found.shape[1]], dim=1).T
    rows, columns = linear_sum_assignment(cosine.abs().numpy(), maximize=True)
    return [abs(float(cosine[row, column])) for row, column in zip(rows, columns, strict=True)]


def read_all(options: object, server: str, size: int) -> Iterator[tuple[Read, list[float], int, float]]:
    """Yield each reading with its cosines, number of sequences and seconds."""
    spec = PluginSpec.parse(server)
    steps = []
    for seed in vars(options)["seeds"]:
        for snapshot in simulator(options, size, seed, granted=False):
            step = on_active_server(ClientStep.of(snapshot), named_server(spec.name, spec.options))
            steps.append((step.observe(), true_features(step)))
    for read in READS:
        found: list[float] = []
        began = time.process_time()
        for seen, true in steps:
            found += cosines(read_features(seen, size, read, torch.Generator().manual_seed(0)).rows, true)
        yield read, found, size * len(steps), (time.process_time() - began) / len(steps)


def features_table(options: object) -> None:
    """Print how close features come."""
    print("| server | B | reading | n | read | cosine, mean | lowest | CPU s a step |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for server in SERVERS:
        for size in vars(options)["sizes"]:
            for read, found, count, seconds in read_all(options, server, size):
                close = f"{fmean(found):.3f} | {min(found):.3f}" if found else "- | -"
                cells = f"| {count} | {len(found)} | {close} | {seconds:.1f} |"
                print(f"| `{server}` | {size} | `{read}` {cells}", flush=True)


def texts_table(options: object) -> None:
    """Print what features are worth."""
    given = vars(options)
    print("| B | attack | n | R-1 | R-2 | R-L | exact | token recall | likeness in meaning | CPU s a step, median |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in given["sizes"]:
        for attack in given["attacks"].split(";"):
            attempts, seconds = [], []
            for seed in given["seeds"]:
                with tempfile.TemporaryDirectory() as folder:
                    config = AuditConfig(
                        out_dir=Path(folder),
                        attacks=(PluginSpec.parse(attack),),
                        server=PluginSpec.parse(given["server"]),
                        sentence_model=given["sentence_model"],
                        seed=seed,
                        text=TextMode.HASH,
                        controls=0,
                        budget_s=given["budget"],
                    )
                    steps = simulator(options, size, seed, granted=True)
                    audit = Audit(Path(folder), config, steps.tokenizer)
                    for snapshot in steps:
                        began = time.process_time()
                        audit.step(snapshot)
                        seconds.append(time.process_time() - began)
                    attempts += [entry.attempt for entry in audit.entries]
            (row,) = summarise(attempts)
            rates = in_percent(
                (
                    row.scores.get("rouge1"),
                    row.scores.get("rouge2"),
                    row.scores.get("rougeL"),
                    row.scores.get("exact"),
                    row.scores.get("token_recall"),
                )
            )
            scores = [a.scores.get("semantic_similarity") for a in attempts]
            likeness = [score.value for score in scores if isinstance(score, Score)]
            meaning = f"{100 * fmean(likeness):.1f}" if likeness else "-"
            print(
                f"| {size} | `{attack}` | {row.sequences} | {rates} | {meaning} | {median(seconds):.0f} |", flush=True
            )


def main() -> None:
    """Print the tables."""
    parser = arguments(__doc__.splitlines()[0], sentences=20)
    parser.set_defaults(seeds=[0])
    parser.add_argument("--what", choices=["features", "texts"], default="features")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--server", default=SERVERS[-1])
    parser.add_argument("--attacks", default="pooler-features(phase=none);pooler-features", help="separated by `;`")
    parser.add_argument("--sentence-model", type=Path)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds an attack may take on a batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{options.data.parent.name}/{options.data.stem}, {options.sentences} sentences over seeds {options.seeds}, eval mode"
    )
    {"features": features_table, "texts": texts_table}[options.what](options)


if __name__ == "__main__":
    main()
