"""The protocol of a metric: from a guess and the truth to a number.

A metric is a frozen dataclass. Its number lies between 0 and 1. None means that there is nothing to measure. It becomes `Missing` in the
results and never counts as 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

Level = Literal["sequence", "step"]
"""What a metric compares: one true sequence with its guess, or the true label counts of a step with the guessed ones."""


@dataclass(frozen=True)
class LabelCounts:
    """True and guessed class counts of one step, each (C,)."""

    true: tuple[int, ...]
    guess: tuple[int, ...]


class Metric(Protocol):
    """What every metric says of itself; a metric is registered with `@metric("name")`."""

    name: ClassVar[str]
    label: ClassVar[str]
    """Its name for people, in a table or inside a sentence, such as "ROUGE-1"."""
    meaning: ClassVar[str]
    """One sentence for a glossary: what is measured, and what 1 means unless that is obvious."""
    higher_is_better: ClassVar[bool]
    """Whether a higher number is better for the attacker."""
    level: ClassVar[Level]
    """`sequence`: the score of a step is the mean over its sequences. `step`: it is one number of the step."""
    source: ClassVar[str]
    """Paper, section, equation."""
    needs_guess: ClassVar[bool]
    """Whether the metric returns None instead of 0 if nothing was guessed. False unless the class states it."""
    needs_model: ClassVar[bool]
    """Whether it needs a model that the user names. Without that model, no attempt has this metric. False unless the class states it."""


@runtime_checkable
class SequenceMetric(Metric, Protocol):
    """A metric of level `sequence`: it compares a true sequence with a guess."""

    def __call__(self, pair: Pair) -> float | None:
        """Return the number, or None where this pair has nothing to measure."""
        ...


@runtime_checkable
class StepMetric(Metric, Protocol):
    """A metric of level `step`: it compares guessed label counts with the true ones."""

    def __call__(self, counts: LabelCounts) -> float | None:
        """Return the number, or None where this step has nothing to measure."""
        ...


class Guess(Protocol):
    """One guessed sequence, as attacks return it."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids in order."""
        ...

    @property
    def confidence(self) -> float:
        """The attacker's own confidence, 0 to 1."""
        ...

    @property
    def proved(self) -> bool:
        """Whether the simulated update of the guess is the observed one, up to rounding."""
        ...


@dataclass(frozen=True)
class Pair:
    """One true sequence and the guess matched to it.

    Neither holds special tokens or padding.
    """

    true_ids: tuple[int, ...]
    guess_ids: tuple[int, ...]
    """Empty if the attack guessed fewer sequences than the batch has."""
    true_text: str
    guess_text: str
    confidence: float | None = None
    proved: bool = False
    masked_ids: tuple[int, ...] = ()
    """Tokens of `true_ids` that a mask hid from the model, in order. A masked language model has to predict them."""
