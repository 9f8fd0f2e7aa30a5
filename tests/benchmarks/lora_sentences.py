"""Table of `span` on the adapters of small models, by batch size.

Run: `python -m tests.benchmarks.lora_sentences --train TEXTS.jsonl --data FILE.jsonl [...]`.

The decoders are those of `tests.benchmarks.decoders`; `--encoder FOLDER` measures a text classifier instead. Adapters stand where peft puts them, and a client sends the update of one step after
some rounds of training. `--freeze-head` leaves out a head of its own, which the simulation trains beside the adapters. Nothing is granted.
Not collected by pytest.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import fmean, median

from leakaudit.audit.simulation.texts import Simulator
from leakaudit.config.simulation import Simulation
from leakaudit.results.schema import Attempt
from leakaudit.results.summary import summarise
from tests.benchmarks.decoders import HIDDEN, build, read_texts
from tests.benchmarks.span import attempts_of, in_percent

SHAPES = ("gpt2", "llama")


def measure(
    options: argparse.Namespace, shape: str, model: Path, data: Path, size: int
) -> tuple[list[Attempt], list[int]]:
    """Run one batch size over all seeds.

    Returns:
        The attempts, and the number of tokens of every batch.
    """
    attempts: list[Attempt] = []
    tokens: list[int] = []
    for seed in options.seeds:
        simulation = Simulation(
            model=model,
            data=data,
            task="classification" if options.encoder else "causal-lm",
            batch_size=size,
            steps=max(1, round(options.sentences / size / len(options.seeds))),
            seed=seed,
            lora_rank=options.rank,
            lora_warmup=options.warmup,
            optimizer=options.optimizer,
            learning_rate=options.learning_rate,
            freeze=("lm_head.weight",) if options.freeze_head and shape == "llama" else (),
        )
        attempts += attempts_of(Simulator(simulation), "none", "cpu", tokens)
    return attempts, tokens


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--train", type=Path, help="JSONL with the field text, to train the decoders on")
    models.add_argument("--encoder", type=Path, help="folder of an encoder that becomes a classifier")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "leakaudit-decoders")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8], help="batch sizes")
    parser.add_argument("--sentences", type=int, default=48, help="sentences a row, over all seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=3, help="rounds of training before the audited step")
    parser.add_argument("--optimizer", help="as for `leakaudit simulate`; default: the gradient itself is sent")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--freeze-head", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Print the table."""
    options = _arguments()
    texts = [] if options.encoder else read_texts(options.train)
    shapes = ["encoder"] if options.encoder else options.shapes
    print(f"rank {options.rank}, {options.warmup} rounds before, seeds {options.seeds}, nothing granted")
    print("| data | shape | B | n | tokens / D | exact | token recall | R-L | s a batch |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for data in options.data:
        for shape in shapes:
            model = options.encoder or build(shape, options.folder, texts)
            for size in options.sizes:
                attempts, tokens = measure(options, shape, model, data, size)
                (found,) = summarise(attempts)
                ratio = f"{fmean(tokens) / HIDDEN:.2f} (at most {max(tokens) / HIDDEN:.2f})"
                rates = (found.scores.get(name) for name in ("exact", "token_recall", "rougeL"))
                print(
                    f"| {data.parent.name} {data.stem} | {shape} | {size} | {found.sequences} | {ratio} | {in_percent(rates)} "
                    f"| {median(a.wall_s for a in attempts):.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
