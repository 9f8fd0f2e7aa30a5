"""Finished trainings, kept as files so that a stopped command continues."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from leakaudit.audit.frontier.evaluation import Measured
from leakaudit.errors import ResultsError
from leakaudit.files.private_files import write_atomic
from leakaudit.files.regular_files import read_regular

Kept = TypeVar("Kept", bound=BaseModel)


class KeptMetric(BaseModel):
    """A metric of a trained model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: FiniteFloat
    by_example: tuple[FiniteFloat, ...]

    def measured(self) -> Measured:
        """Return the metric with its numbers as an array."""
        return Measured(self.value, np.array(self.by_example, dtype=np.float64))


class KeptTraining(BaseModel):
    """A finished training.

    It holds numbers for each example, but no text and no label.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    defense: str
    seed: int
    steps: int | None = None
    """Optimizer steps; None if the user's script decides."""
    learning_rate: FiniteFloat | None = None
    diverged: bool = False
    """Whether a number was not finite."""
    diverged_at: int | None = None
    """Step at which that was; None if it is not known."""
    unfit: str = ""
    """Why the defence does not fit this training; empty if it does."""
    choice: tuple[FiniteFloat, ...] = ()
    """Loss of each row that is held out for choices, in nats for each token or class."""
    metrics: dict[str, KeptMetric] = {}

    @property
    def has_ended_well(self) -> bool:
        """Whether the training gave a model that was measured."""
        return not self.diverged and not self.unfit


class KeptPrice(BaseModel):
    """The price of a defence; see `leakaudit.audit.frontier.prices.Priced`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_s: FiniteFloat = 0.0
    plain_s: FiniteFloat = 0.0
    sent: FiniteFloat = 0.0
    plain: FiniteFloat = 0.0
    unfit: str = ""


class Store:
    """A folder of finished trainings and prices."""

    def __init__(self, folder: Path) -> None:
        """Use a folder; the first file that is kept makes it."""
        self.folder = folder

    def find(self, key: str, kind: type[Kept]) -> Kept | None:
        """Return what is kept under a key; None if there is nothing.

        Raises:
            ResultsError: the file was changed.
        """
        path = self.folder / f"{key}.json"
        if not path.exists():
            return None
        try:
            return kind.model_validate_json(read_regular(path))
        except ValidationError as error:
            raise ResultsError(
                f"{path}: is no finished training ({error.error_count()} problems); remove the file to train again"
            ) from None

    def keep(self, key: str, found: BaseModel) -> None:
        """Write what was found; the file is there as a whole or not at all."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self.folder / f"{key}.json", found.model_dump_json())
