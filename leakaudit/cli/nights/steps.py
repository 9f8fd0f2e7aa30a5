"""The client steps of one night: simulated, kept, or of its own training."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from leakaudit.cli.auditing import Steps
from leakaudit.cli.common import say
from leakaudit.cli.nights.training import OUTPUT, train
from leakaudit.cli.run import steps_of_snapshots
from leakaudit.cli.simulate import say_notices, secrets_of, simulator_of
from leakaudit.results.wording import counted

if TYPE_CHECKING:
    from leakaudit.config.nightly import Nightly

TRAINING = "training"
"""Folder in a night's folder for its training; it is removed when the night is recorded."""


@dataclass(frozen=True)
class NightSteps:
    """The steps of a night, and what the history says of them."""

    steps: Steps
    data: str
    """Name of the data set, or a mark of its place."""
    model_version: str
    """Mark of the stored weights; empty if every step has its own."""


def seed_of(night: str) -> int:
    """Return the seed of a night, the same however often the night is started."""
    return int.from_bytes(hashlib.sha256(night.encode()).digest()[:4], "big")


def steps_of_night(config: Nightly, night: str, folder: Path, key: bytes, deadline: float) -> NightSteps:
    """Return the client steps of a night; a training is run first.

    Args:
        config: of the nights.
        night: id of the night.
        folder: of the night.
        key: of the history.
        deadline: `time.monotonic` at which a training must have ended.

    Raises:
        LeakAuditError: they cannot be made or found; the message says why.
        OSError: a file cannot be read.
    """
    from leakaudit.audit.pairing import Pairing

    pairing = Pairing(key)
    if config.simulate is not None:
        simulator = simulator_of(asdict(config.simulate.simulation(seed_of(night))))
        say_notices(simulator, names=False)  # a night's output is kept as a log
        all_steps, book = range(len(simulator)), secrets_of(simulator)
        steps = Steps(
            simulator.digest, simulator.tokenizer, all_steps, simulator.snapshot, pairing=pairing, secrets=book
        )
        if len(simulator) < config.simulate.steps:
            asked = counted(config.simulate.steps, "step")
            say(f"{asked} wanted, and the data gives {counted(len(simulator), 'full batch', 'full batches')}")
        # of the files where there are some: the head, the adapters and the warm-up of a simulation differ every night
        files = sorted(config.simulate.model.glob("*.safetensors"))
        version = pairing.mark_of_files(files) if files else pairing.mark_of_weights(simulator.model)
        return NightSteps(steps, config.data_name or _mark(key, config.simulate.data), version)
    if config.training is not None:
        spool = train(config.training, folder / TRAINING, folder / OUTPUT, deadline)
        steps = steps_of_snapshots((spool,), None, (), config.training.allow_factory)
        place = config.data_name or _mark(key, Path(" ".join(config.training.command)))
    else:
        assert config.snapshots is not None  # the configuration has exactly one of the three
        from leakaudit.cli.snapshots import private_keys

        kept = config.snapshots
        steps = steps_of_snapshots((kept.folder,), kept.tokenizer, private_keys(kept.identity), kept.allow_factory)
        place = config.data_name or _mark(key, kept.folder)
    return NightSteps(replace(steps, pairing=pairing), place, "")


def _mark(key: bytes, place: Path) -> str:
    """Return a mark of a place, which may have a private name."""
    return hmac.new(key, f"data {place}".encode(), hashlib.sha256).hexdigest()[:12]
