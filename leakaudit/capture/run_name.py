"""The name of a training run in `out_dir`.

With it, each run of a sweep has its own folder.
"""

from __future__ import annotations

import os
import re

from leakaudit.capture.context import TrainerContext
from leakaudit.config.audit import RUN_NAME, AuditConfig
from leakaudit.errors import ConfigError

RUN_NAME_VARIABLE = "LEAKAUDIT_RUN_NAME"
"""Environment variable with the name of the run; it comes before every other name."""

OF_TRACKERS = ("WANDB_RUN_ID", "MLFLOW_RUN_ID")
"""Environment variables with which sweeps name a run before it has begun."""

LONGEST = 100
"""Most characters of a name in a path. Our choice: file systems take 255 bytes, and suffixes are added."""


def named(config: AuditConfig, trainer: TrainerContext) -> AuditConfig:
    """Return the configuration with the name of the run in `out_dir`.

    The name is that of `LEAKAUDIT_RUN_NAME`, of the trainer, of a tracker, or of a tracker's environment variable: the first that exists.

    Raises:
        ConfigError: the run has no name.
    """
    wanted = str(config.out_dir)
    if RUN_NAME not in wanted:
        return config
    name = path_safe(_name(trainer)) if trainer.writes else "other-process"  # which writes nothing there
    if not name:
        raise ConfigError(
            f"`out_dir: {wanted}` needs the name of the run, and this run has none: set `run_name` of `TrainingArguments`, a logger of "
            f"Lightning, a tracker, or the environment variable {RUN_NAME_VARIABLE}"
        )
    return config.model_copy(update={"out_dir": type(config.out_dir)(wanted.replace(RUN_NAME, name))})


def _name(trainer: TrainerContext) -> str:
    if given := os.environ.get(RUN_NAME_VARIABLE):
        return given
    if trainer.run_name:
        return trainer.run_name
    runs = trainer.trackers.facts() if trainer.trackers is not None else ()
    named = [run.name or run.id for run in runs]
    return next(filter(None, [*named, *(os.environ.get(key, "") for key in OF_TRACKERS)]), "")


def path_safe(name: str) -> str:
    """Return a name of letters, digits, `.`, `_` and `-` that is one part of a path.

    >>> path_safe("../out/my run: lr=1e-4")
    'out-my-run-lr-1e-4'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:LONGEST].rstrip("-.")
