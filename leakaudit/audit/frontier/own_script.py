"""The user's own training script as the training of a frontier."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakaudit.audit.frontier.evaluation import HIGHER_IS_BETTER
from leakaudit.audit.frontier.plan import Candidate, Need
from leakaudit.audit.frontier.store import KeptMetric, KeptTraining
from leakaudit.audit.frontier.work import Work
from leakaudit.errors import ConfigError, DataError
from leakaudit.files.private_files import create

DEFENSE, SEED, METRICS_FILE = "LEAKAUDIT_DEFENSE", "LEAKAUDIT_SEED", "LEAKAUDIT_METRICS_FILE"
"""Environment variables of the script: the defence to apply, such as `prune(share=0.9)` or `none`; the seed; and the JSON file to write."""

PREFIX = "eval_"
"""Beginning of the names of a Hugging Face Trainer's metrics, which is left out."""


@dataclass
class ScriptWork(Work):
    """Trainings by the user's script.

    Strengths and learning rates are not chosen.
    """

    script: str = ""
    """Command line of the script; it runs without a shell."""

    def need(self, candidate: Candidate) -> Need:
        """Return one training for each seed."""
        return Need(0, super().need(candidate).whole)

    def seconds(self) -> float:
        """Return 0: how long the script takes is not known."""
        return 0.0

    def length(self, _steps: int, _rate: float) -> str:
        """Return nothing: the script decides."""
        return ""

    def train_one(self, candidate: Candidate, seed: int, _steps: int, _rate: float) -> KeptTraining:
        """Run the script once.

        Raises:
            ConfigError, DataError: it failed, or wrote no metrics, in the training without a defence.
        """
        facts: dict[str, Any] = {"defense": candidate.label, "seed": seed}
        try:
            metrics = self._metrics(candidate, seed)
        except (ConfigError, DataError) as error:
            if candidate.defense is None:
                raise
            return KeptTraining(**facts, unfit=str(error))
        if not all(math.isfinite(value) for value in metrics.values()):
            return KeptTraining(**facts, diverged=True)
        kept = {name: KeptMetric(value=value, by_example=(value,)) for name, value in metrics.items()}
        return KeptTraining(**facts, metrics=kept)

    def _metrics(self, candidate: Candidate, seed: int) -> dict[str, float]:
        folder = self.store.folder.absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = self.key_of("script", candidate, seed=seed)
        output, log = folder / f"{name}.metrics", folder / f"{name}.log"
        for earlier in (output, log):
            earlier.unlink(missing_ok=True)
        told = {DEFENSE: candidate.spec, SEED: str(seed), METRICS_FILE: str(output)}
        descriptor = create(log)
        try:
            done = subprocess.run(
                shlex.split(self.script), env=os.environ | told, stdout=descriptor, stderr=descriptor, check=False
            )
        except OSError as error:
            raise ConfigError(f"--command {self.script!r}: cannot be started ({error.strerror})") from None
        finally:
            os.close(descriptor)
        if done.returncode:
            raise ConfigError(
                f"--command ended with exit code {done.returncode} under {candidate.label}, seed {seed}; "
                f"its output is in {log.name}"
            )
        return read_metrics(output)

    def key_of(self, what: str, candidate: Candidate, **more: Any) -> str:
        """Return the digest of what a run of the script depends on.

        The content of the script is not known; whoever changes it gives another --out.
        """
        return super().key_of(what, candidate, **more, script=self.script, spec=candidate.spec)


def read_metrics(path: Path) -> dict[str, float]:
    """Read the metrics that a script wrote: a JSON object of names and numbers.

    The names are those of `HIGHER_IS_BETTER`, with or without `eval_`; others are ignored. A number may be NaN or infinite.

    Raises:
        DataError: the file is missing, is no such object, or has none of the names.
    """
    wanted = f"a JSON object with numbers for some of {', '.join(HIGHER_IS_BETTER)}"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"the script of --command wrote no file {METRICS_FILE}; write {wanted}") from None
    except (OSError, ValueError):
        raise DataError(f"the file {METRICS_FILE} of --command cannot be read; write {wanted}") from None
    pairs = found.items() if isinstance(found, dict) else ()
    metrics = {
        name.removeprefix(PREFIX): float(value)
        for name, value in pairs
        if name.removeprefix(PREFIX) in HIGHER_IS_BETTER
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }
    if not metrics:
        raise DataError(f"the file {METRICS_FILE} of --command has no metric that is known; write {wanted}")
    return metrics
