"""Recall of gradient matching.

Run `python -m tests.benchmarks.matching --attacks "lamp-cos;tag" --data FILE.jsonl --seeds 1 2`.

Prints one row an attack: ROUGE, exact rate and token recall of texts without special tokens, and the median of a batch's CPU seconds on
one thread. Eval mode, all embedding tables frozen; lengths and labels are granted, as in LAMP's experiments, unless `--grant` says
otherwise. `--verbose` also prints every attempt's numbers. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import torch

from leakaudit.audit.audit import Audit
from leakaudit.audit.devices import choose_device
from leakaudit.audit.simulation.texts import Simulator
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.config.simulation import Simulation
from leakaudit.results.schema import Attempt, TextMode
from leakaudit.results.summary import summarise
from tests.benchmarks.span import arguments, in_percent


def attempts_of(simulator: Simulator, attack: str, options: argparse.Namespace) -> list[tuple[Attempt, float]]:
    """Attack every step of a simulation.

    Each attempt has the CPU seconds of its step.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        config = AuditConfig(
            out_dir=Path(folder),
            attacks=(PluginSpec.parse(attack),),
            defenses=(PluginSpec.parse(options.defense),),
            seed=simulator.what.seed,
            text=TextMode.HASH,
            controls=0,
            budget_s=options.budget,
        )
        audit = Audit(Path(folder), config, simulator.tokenizer, device=choose_device(options.device))
        for snapshot in simulator:
            start = time.process_time()
            audit.step(snapshot)
            spent = time.process_time() - start
            attempt = next(
                entry.attempt for entry in reversed(audit.entries) if entry.attempt.defense == options.defense
            )
            found.append((attempt, spent))
            if options.verbose:
                facts = {name: round(value, 4) for name, value in attempt.facts.items()}
                print(
                    f"    {spent:.1f} s {attempt.status.value} {attempt.stop}{attempt.reason} {facts}",
                    flush=True,
                )
    return found


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__.splitlines()[0], sentences=20)
    parser.set_defaults(seeds=[1, 2])
    parser.add_argument("--attacks", default="dlg;tag;lamp-cos;lamp-cos(preset=fast)", help="separated by `;`")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds an attack may take on a batch")
    parser.add_argument("--grant", nargs="*", default=["labels", "lengths"])
    parser.add_argument("--freeze", nargs="*", default=["embeddings"])
    parser.add_argument("--mode", choices=["eval", "train"], default="eval", help="train: with the model's dropout")
    parser.add_argument("--task", choices=["classification", "causal-lm"], default="classification")
    parser.add_argument("--lora-rank", type=int, default=None)
    parser.add_argument("--local-steps", type=int, default=1, help="FedAvg: gradient steps of the batch size each")
    parser.add_argument("--learning-rate", type=float, help="of local steps, without momentum")
    parser.add_argument("--defense", default="none", help="as on the command line of `simulate`")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sequences = options.batch_size * options.local_steps
    granted = " and ".join(options.grant) or "nothing"
    print(
        f"{options.data.name}, {options.sentences} sentences over seeds {options.seeds}, {granted} granted, "
        f"{options.mode} mode, B = {options.batch_size}, local steps: {options.local_steps}, defence: {options.defense}"
    )
    print("| attack | n | R-1 | R-2 | R-L | exact | token recall | CPU s, median (mean) | steps, mean |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for attack in options.attacks.split(";"):
        found: list[tuple[Attempt, float]] = []
        for seed in options.seeds:
            simulation = Simulation(
                model=options.model,
                data=options.data,
                batch_size=options.batch_size,
                steps=max(1, options.sentences // sequences // len(options.seeds)),
                local_steps=options.local_steps,
                learning_rate=options.learning_rate,
                seed=seed,
                freeze=tuple(options.freeze),
                grant=tuple(options.grant),
                mode=options.mode,
                task=options.task,
                lora_rank=options.lora_rank,
            )
            found += attempts_of(Simulator(simulation), attack, options)
        attempts = [attempt for attempt, _ in found]
        (summary,) = summarise(attempts)
        rates = (
            summary.scores.get("rouge1"),
            summary.scores.get("rouge2"),
            summary.scores.get("rougeL"),
            summary.scores.get("exact"),
            summary.scores.get("token_recall"),
        )
        seconds = [spent for _, spent in found]
        steps = mean(attempt.facts.get("steps", 0.0) for attempt in attempts)
        print(
            f"| `{attack}` | {summary.sequences} | {in_percent(rates)} | {median(seconds):.1f} ({mean(seconds):.1f}) | {steps:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
