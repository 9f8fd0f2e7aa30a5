"""The options of the trainings of `leakaudit frontier`.

No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leakaudit.config.client_optimizer import parse_optimizer
from leakaudit.errors import ConfigError


def _option(default: Any, text: str, **limits: float) -> Any:
    """Return a dataclass field with its `--help` text and its limits."""
    return field(default=default, metadata={"help": text, **limits})


@dataclass(frozen=True)
class Trainings:
    """How the models of a frontier are trained.

    Each field is an option of `leakaudit frontier`; its metadata holds the text of `--help`.
    """

    eval: Path | None = field(
        default=None,
        metadata={
            "help": "Data on which the trained models are measured; default: a tenth of --data, which is not trained on."
        },
    )
    train_steps: int = _option(200, "Optimizer steps of each training.", minimum=1)
    train_batch_size: int = _option(16, "Texts of a training step.", minimum=1)
    train_rate: float = _option(5e-5, "Learning rate of the trainings, constant over all steps.", above=0)
    train_optimizer: str = _option(
        "adamw", "Optimizer of the trainings: adamw, adam, sgd or adafactor, with options as in sgd(momentum=0.9)."
    )
    retune: int = _option(
        1,
        "Learning rates to try for each defence, an odd number: with 3, a third, once and three times --train-rate.",
        minimum=1,
        maximum=9,
    )

    def __post_init__(self) -> None:
        """Refuse an unknown optimizer and an even number of learning rates."""
        parse_optimizer(self.train_optimizer)
        if self.retune % 2 == 0:
            raise ConfigError(f"--retune {self.retune}: give an odd number, so that --train-rate is in the middle")

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates to try: `train_rate` times powers of three."""
        half = self.retune // 2
        return tuple(self.train_rate * 3.0**power for power in range(-half, half + 1))
