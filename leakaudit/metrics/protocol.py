"""What a metric is: a frozen dataclass that turns a guess and the truth into a number from 0 to 1, or None.

None means that there is nothing to measure, and becomes `Missing` in the results; it is never counted as 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

from leakaudit.metrics.matching import Pair


@dataclass(frozen=True)
class LabelCounts:
    """True and guessed class counts of one step, each (C,)."""

    true: tuple[int, ...]
    guess: tuple[int, ...]


@runtime_checkable
class SequenceMetric(Protocol):
    """Registered with `@metric("name")`; compares one true sequence with the guess matched to it."""

    name: ClassVar[str]
    higher_is_better: ClassVar[bool]
    """Better for the attacker, that is."""
    level: ClassVar[Literal["sequence", "step"]]
    """`sequence` here: the score of a step is the mean over its sequences."""
    source: ClassVar[str]

    def __call__(self, pair: Pair) -> float | None:
        """Return the number, or None where this pair has nothing to measure."""
        ...


@runtime_checkable
class StepMetric(Protocol):
    """Registered with `@metric("name")`; compares what was guessed of a step's labels with the truth."""

    name: ClassVar[str]
    higher_is_better: ClassVar[bool]
    level: ClassVar[Literal["sequence", "step"]]
    """`step` here."""
    source: ClassVar[str]

    def __call__(self, counts: LabelCounts) -> float | None:
        """Return the number, or None where this step has nothing to measure."""
        ...
