"""DLG, TAG and LAMP as printed and as released, beside LAMP's Table 1.

Run `python -m tests.benchmarks.matching_presets --data cola/paper100.jsonl sst2/paper100.jsonl --sentences 20 --seeds 1 2 3`.

Every seed attacks the same first sentences of each file, one by one (B = 1), in eval mode with all embedding tables frozen. Labels and lengths
are granted, as in the paper. A seed draws a new head of the classifier and new starts. Each cell is the mean over the seeds, and for two or more
seeds the standard deviation of the seeds' means. The paper's rows are BERT-base's with GPT-2; ours are of the given model with the built-in
prior. `--steps` shortens every attack for a trial. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from statistics import fmean, stdev

import torch

from leakaudit.audit.simulation.texts import Simulator
from leakaudit.config.audit import PluginSpec
from leakaudit.config.simulation import Simulation
from leakaudit.results.schema import Attempt
from leakaudit.results.summary import summarise
from tests.benchmarks.matching import attempts_of
from tests.benchmarks.span import arguments

ATTACKS = tuple(
    f"{name}(preset={preset})" for name in ("lamp-cos", "lamp-l1l2", "tag", "dlg") for preset in ("paper", "released")
)
METRICS = ("rouge1", "rouge2", "rougeL", "exact", "token_recall")
TABLE_1: dict[str, dict[str, tuple[float, float, float]]] = {
    "cola": {
        "dlg": (59.3, 7.7, 46.2),
        "tag": (78.9, 10.2, 53.3),
        "lamp-cos": (89.6, 51.9, 76.2),
        "lamp-l1l2": (87.5, 47.5, 73.2),
    },
    "sst2": {
        "dlg": (65.4, 17.7, 54.2),
        "tag": (75.6, 18.9, 57.4),
        "lamp-cos": (88.8, 56.9, 77.7),
        "lamp-l1l2": (88.6, 57.4, 75.7),
    },
    "rotten_tomatoes": {
        "dlg": (38.6, 1.4, 26.0),
        "tag": (60.3, 3.5, 33.6),
        "lamp-cos": (64.7, 16.3, 43.1),
        "lamp-l1l2": (51.4, 10.2, 34.3),
    },
}
"""LAMP, Table 1, BERT-base, n = 100: folder of the data -> attack -> R-1, R-2, R-L."""


def means_by_seed(data: Path, attack: str, options: argparse.Namespace) -> tuple[list[dict[str, float]], list[float]]:
    """Return each seed's means by metric, and the CPU seconds of every sentence."""
    means, seconds = [], []
    for seed in options.seeds:
        simulation = Simulation(
            model=options.model,
            data=data,
            steps=options.sentences,
            seed=seed,
            freeze=("embeddings",),
            grant=("labels", "lengths"),
        )
        found: list[tuple[Attempt, float]] = attempts_of(Simulator(simulation), attack, options)
        (summary,) = summarise(attempt for attempt, _ in found)
        means.append(summary.scores)
        seconds += [spent for _, spent in found]
    return means, seconds


def cell(values: list[float]) -> str:
    """Return a mean in per cent, with the standard deviation of two or more values.

    >>> cell([0.5]), cell([0.25, 0.75]), cell([])
    ('50.0', '50.0 ± 35.4', '-')
    """
    if not values:
        return "-"
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{spread}"


def _first_rows(data: Path, count: int, folder: Path) -> Path:
    """Return a file with the first rows of another one."""
    rows = list(itertools.islice(data.read_text(encoding="utf-8").splitlines(keepends=True), count))
    found = folder / data.name
    found.write_text("".join(rows), encoding="utf-8")
    return found


def _with_steps(attack: str, steps: int | None) -> str:
    spec = PluginSpec.parse(attack)
    return spec.label if steps is None else spec.model_copy(update={"options": {**spec.options, "steps": steps}}).label


def main() -> None:
    """Print one table for all data sets."""
    shared = arguments(__doc__.splitlines()[0], sentences=20)
    parser = argparse.ArgumentParser(description=shared.description, parents=[shared], conflict_handler="resolve")
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help="JSONL files; a folder's name finds the paper's row"
    )
    parser.add_argument(
        "--sentences", type=int, default=20, help="first sentences of each file, the same for every seed"
    )
    parser.add_argument("--attacks", default=";".join(ATTACKS), help="separated by `;`")
    parser.add_argument("--steps", type=int, help="steps of every attack, for a trial; default: the preset's")
    parser.add_argument("--budget", type=float, default=36_000.0, help="seconds an attack may take on a sentence")
    parser.add_argument("--verbose", action="store_true", help="also print the numbers of every attempt")
    parser.set_defaults(defense="none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    short = "" if options.steps is None else f", only {options.steps} steps"
    print(
        f"The first {options.sentences} sentences of each file, seeds {options.seeds}, labels and lengths granted, B = 1{short}"
    )
    print("| data | attack | n | seeds | R-1 | R-2 | R-L | exact | token recall | CPU s a sentence |")
    print(f"|{' --- |' * 10}")
    for data in options.data:
        for attack, numbers in TABLE_1.get(data.parent.name, {}).items():
            print(
                f"| {data.parent.name} | {attack}, in print | 100 | 1 | {' | '.join(map(str, numbers))} | - | - | - |"
            )
        with tempfile.TemporaryDirectory() as folder:
            rows = _first_rows(data, options.sentences, Path(folder))
            for attack in options.attacks.split(";"):
                means, seconds = means_by_seed(rows, _with_steps(attack, options.steps), options)
                cells = " | ".join(cell([one[name] for one in means if name in one]) for name in METRICS)
                n, seeds = len(seconds) // len(means), len(means)
                print(
                    f"| {data.parent.name} | `{attack}` | {n} | {seeds} | {cells} | {fmean(seconds):.0f} |", flush=True
                )


if __name__ == "__main__":
    main()
