"""The protocol of a metric: from a guess and the truth to a number.

A metric is a frozen dataclass. Its number lies between 0 and 1. None means that there is nothing to measure. It becomes `Missing` in the
results and never counts as 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

Level = Literal["sequence", "batch", "step"]
"""What a metric compares: one true sequence with its guess, all sequences of a batch with all guesses, or the true label counts of a step
with the guessed ones."""


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
    """`sequence`: the score of a step is the mean over its sequences. `batch` and `step`: it is one number of the step."""
    source: ClassVar[str]
    """Paper, section, equation."""
    needs_guess: ClassVar[bool]
    """Whether the metric returns None instead of 0 if nothing was guessed. False unless the class states it."""
    needs_model: ClassVar[bool]
    """Whether it needs a model that the user names. Without that model, no attempt has this metric. False unless the class states it."""
    missing_because: ClassVar[str]
    """Why a step has no number, as a clause, if no sequence of it has one. Unless the class states it: the texts are too short."""


@runtime_checkable
class SequenceMetric(Metric, Protocol):
    """A metric of level `sequence`: it compares a true sequence with a guess."""

    def __call__(self, pair: Pair) -> float | None:
        """Return the number, or None where this pair has nothing to measure."""
        ...


@runtime_checkable
class BatchMetric(Metric, Protocol):
    """A metric of level `batch`: it compares all guesses with all true sequences."""

    def __call__(self, batch: Batch) -> float | None:
        """Return the number, or None where this batch has nothing to measure."""
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
    def own_score(self) -> float:
        """The attack's own score of the guess, 0 to 1."""
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
    own_score: float | None = None
    proved: bool = False
    masked_ids: tuple[int, ...] = ()
    """Tokens of `true_ids` that a mask hid from the model, in order. A masked language model has to predict them."""
    entities: tuple[str, ...] | None = None
    """Named entities of the true text, from the data or from a tagger; None if nobody says which ones it holds."""
    tagged: TaggedEntities | None = None
    """What one tagger finds in both texts; None without a tagger."""


@dataclass(frozen=True)
class TaggedEntities:
    """Named entities that one tagger finds in a true text and in its guess."""

    true: tuple[str, ...]
    guess: tuple[str, ...]


@dataclass(frozen=True)
class Batch:
    """All true sequences of a step, and all sequences that an attack guessed."""

    pairs: tuple[Pair, ...]
    """One pair for each true sequence, in the order of the batch."""
    guesses: int
    """Number of guessed sequences. Guesses beyond the number of true sequences are in no pair."""
