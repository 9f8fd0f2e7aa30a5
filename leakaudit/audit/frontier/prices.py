"""What a defence costs in time and traffic."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from leakaudit.audit.frontier.training import Trainer
from leakaudit.plugins.defense_protocol import FLOAT_BYTES, Defense

TIMED_STEPS = 5
"""Steps of each kind that are timed after one that is not. Our choice: the median of five ignores two that something else slowed."""


@dataclass(frozen=True)
class Priced:
    """The price of a defence."""

    step_s: float
    """Median seconds of a training step under the defence."""
    plain_s: float
    """Median seconds of the same step without it."""
    sent: float
    """Bytes of an update in its smallest usual form."""
    plain: float
    """Bytes of the update without the defence, in float32."""


def seconds_of_step(
    trainer: Trainer, defense: Defense | None, seed: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of one training step under a defence, for an estimate.

    Args:
        trainer: makes the trainings.
        defense: None for a training without a defence.
        seed: of the training.
        clock: returns seconds since any fixed time.

    Raises:
        NonFiniteUpdateError, SnapshotError, ValueError: the defence does not fit this training.
    """
    run, batch = trainer.start(seed), next(trainer.batches_of(seed))
    optimizer, begun = run.optimizer(trainer.trainings.train_rate), clock()
    run.advance(batch, defense, torch.Generator().manual_seed(seed), optimizer)
    return clock() - begun


def price_of(
    trainer: Trainer, defense: Defense | None, seed: int, clock: Callable[[], float] = time.perf_counter
) -> Priced:
    """Measure the price of a defence on the first batches of a training.

    Steps with and without the defence take turns in one process, each kind on a model of its own.

    Args:
        trainer: makes the trainings.
        defense: None prices the training without a defence.
        seed: of the training.
        clock: returns seconds since any fixed time.

    Raises:
        NonFiniteUpdateError, SnapshotError, ValueError: the defence does not fit this training.
    """
    runs = [trainer.start(seed) for _ in range(1 if defense is None else 2)]
    defenses = (None, defense)
    optimizers = [run.optimizer(trainer.trainings.train_rate) for run in runs]
    times: list[list[float]] = [[], []]
    sizes = [0.0, 0.0]
    rng, batches = torch.Generator().manual_seed(seed), trainer.batches_of(seed)
    for number in range(TIMED_STEPS + 1):
        batch = next(batches)
        for kind, (run, optimizer) in enumerate(zip(runs, optimizers, strict=True)):
            begun = clock()
            sent = run.advance(batch, defenses[kind], rng, optimizer)
            if trainer.device.type == "cuda":
                torch.cuda.synchronize(trainer.device)
            if number:
                times[kind].append(clock() - begun)
            own = defenses[kind]
            dense = float(FLOAT_BYTES * sum(tensor.numel() for tensor in sent.values()))
            sizes[kind] = dense if own is None else own.sent_bytes(sent)
    plain_s = statistics.median(times[0])
    if defense is None:
        return Priced(plain_s, plain_s, sizes[0], sizes[0])
    return Priced(statistics.median(times[1]), plain_s, sizes[1], sizes[0])
