"""What an attack is: a frozen dataclass of knobs that turns an Observation into a Reconstruction.

It is never handed the truth. It says first whether it applies, and why not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch

from leakaudit.client.observation import Observation
from leakaudit.plugins.budget import Budget

Goal = Literal["text", "words", "labels"]
"""What an attack recovers: whole sequences, a bag of words, or class counts."""

Needs = Literal["everything", "named parts"]
"""What an attack reads of a step: the whole update, or only the parts of the first blocks that it names."""

FALSE_EVENTS = 0.01
"""Probability with which an attack may have an event where the update is declared noise and nothing else. Our choice: one step in a hundred.
Attacks state theirs as `false_event_rate`, and `tests/house/test_pure_noise.py` holds each to its own."""


@dataclass(frozen=True)
class Applicability:
    """Whether an attack has anything to work on; false carries the reason, in a sentence a user can act on."""

    applies: bool
    reason: str = ""

    def __bool__(self) -> bool:
        """Return whether the attack applies."""
        return self.applies


APPLIES = Applicability(True)


def not_applicable(reason: str) -> Applicability:
    """Say why an attack does not apply: what it looked for and what it found."""
    return Applicability(False, reason)


@dataclass(frozen=True)
class GuessedSequence:
    """One guessed sequence of the batch."""

    token_ids: tuple[int, ...]
    """In order, special tokens as the attack believes them, no padding."""
    confidence: float = 0.0
    """0 to 1, computed from what an adversary sees."""
    proved: bool = False
    """Re-simulating the guess reproduced the update to rounding."""


class Reach(Protocol):
    """What an attack could have recovered, had its search been perfect: it separates "protected" from "the search gave up".

    Made by the attack from what it saw. The battery asks it about the true sequences once the attack has returned, and stores
    the answers beside the scores. What it is asked is the truth: an answer leaves no trace in it or in the attack.
    """

    def tokens(self, ids: tuple[int, ...]) -> tuple[bool, ...]:
        """Say of each token of a sequence whether it was among the attack's candidates at its place.

        Args:
            ids: one sequence without padding, special tokens included.

        Returns:
            One answer a token.
        """
        ...

    def passes(self, ids: tuple[int, ...]) -> bool | None:
        """Say whether this sequence, as a whole, would have passed the attack's own test; None where there is no such test."""
        ...


@dataclass(frozen=True)
class Reconstruction:
    """An attack's guess. What it does not guess stays None, and is then missing in the scores, not zero."""

    sequences: tuple[GuessedSequence, ...] | None = None
    """As many as the attack believes there are, best first; order means nothing. Each is matched to at most one true one."""
    tokens: tuple[int, ...] | None = None
    """Token ids believed to be in the batch, in no order: for attacks that find words but no sentences."""
    label_counts: tuple[int, ...] | None = None
    """(C,) number of sequences of each class."""
    counts_told: bool = True
    """Whether the attack can tell `label_counts` from chance at its `false_event_rate`. If not they are an estimate, scored as one, and an
    exact hit is no event: among few classes it is likely by chance."""
    stop: Literal["done", "converged", "budget"] = "done"
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """Numbers the attack says of itself, such as rank, loss or candidates; they never depend on the truth."""
    reach: Reach | None = field(default=None, compare=False, repr=False)
    """What it could have recovered; None where an attack cannot say, and then missing in the results. No part of the guess."""


@runtime_checkable
class Attack(Protocol):
    """A frozen dataclass registered with `@attack("name")`; its fields are its knobs.

    The same observation, knobs and generator state give the same reconstruction. Neither the observation nor the model's
    weights are changed. When the budget runs out the attack returns its best guess so far with `stop="budget"`.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    """How a person reads it in a table or inside a sentence, such as "TAG"."""
    meaning: ClassVar[str]
    """One sentence for a glossary: what it does, for a reader who knows no formula."""
    goal: ClassVar[Goal]
    source: ClassVar[str]
    """Paper, section, equation."""
    threat_model: ClassVar[str]
    """One sentence: who sees what, and what has to hold."""
    false_event_rate: ClassVar[float]
    """Probability of an event where the update is declared noise and nothing else; at most `FALSE_EVENTS`."""
    needs: ClassVar[Needs]
    """`everything` where it is not stated. With `named parts` the attack works on an observation that is not `whole`: only the first
    blocks are there, and no step can be simulated."""
    blind: ClassVar[bool]
    """Whether it ignores the update, so that what it gets right does not show that an audit works; False where it is not stated."""

    def applies(self, seen: Observation) -> Applicability:
        """Say whether there is anything to work on."""
        ...

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Run the attack."""
        ...
