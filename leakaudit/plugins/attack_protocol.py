"""The protocol of an attack: from an Observation to a Reconstruction.

An attack is a frozen dataclass; its fields are its knobs. It never sees the batch. First it says whether it applies, and if not, why.
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

Reads = Literal["update", "gradient", "direction"]
"""What an attack reads of a client that sends a difference of weights.

`update`: the difference itself; the attack knows what each optimizer does. `gradient`: a gradient up to a known error, which the audit
computes from the difference where that is possible. `direction`: the same, or else the difference itself in place of a gradient.
"""

FALSE_EVENTS = 0.01
"""Largest allowed probability of an event where the update is declared noise and nothing else. Our choice: one step in a hundred. Each
attack states its own probability as `false_event_rate`, and `tests/house/test_pure_noise.py` tests it."""


@dataclass(frozen=True)
class Applicability:
    """Whether an attack applies; if not, a reason that a user can act on."""

    applies: bool
    reason: str = ""

    def __bool__(self) -> bool:
        """Return whether the attack applies."""
        return self.applies


APPLIES = Applicability(True)


def not_applicable(reason: str) -> Applicability:
    """Return a refusal with its reason.

    Args:
        reason: a sentence that says what the attack looked for and what it found.
    """
    return Applicability(False, reason)


@dataclass(frozen=True)
class GuessedSequence:
    """One guessed sequence of the batch."""

    token_ids: tuple[int, ...]
    """Token ids in order, without padding. They include the special tokens that the attack believes the sequence to have."""
    own_score: float = 0.0
    """From 0 to 1, computed from what an adversary sees: the attack's own opinion of its guess. It is no probability. It ranks the guesses of
    one attack, and scores of two attacks say nothing about each other. What is certain is `proved`."""
    proved: bool = False
    """Whether the simulated update of the guess is the observed one, up to rounding."""


class Reach(Protocol):
    """What an attack with a perfect search could have recovered.

    It separates "protected" from "the search gave up". The attack builds it from the observation. After the attack has returned, the audit
    asks it about the true sequences and stores the answers beside the scores. A question contains the truth, so it must not change the
    Reach or the attack.
    """

    def tokens(self, ids: tuple[int, ...]) -> tuple[bool, ...]:
        """Tell for each token whether the attack had it as a candidate there.

        Args:
            ids: (T,) one sequence with its special tokens, without padding.

        Returns:
            (T,) answers.
        """
        ...

    def passes(self, ids: tuple[int, ...]) -> bool | None:
        """Return whether the sequence would have passed the attack's own test.

        None if the attack has no such test.
        """
        ...


@dataclass(frozen=True)
class Reconstruction:
    """An attack's guess.

    A field that the attack does not guess stays None. Its scores are then missing, not zero.
    """

    sequences: tuple[GuessedSequence, ...] | None = None
    """As many sequences as the attack believes the batch to have, the best first. Scoring matches each to at most one true sequence, in
    any order."""
    tokens: tuple[int, ...] | None = None
    """Token ids that the attack believes to be in the batch, without an order. For attacks that find words but no sentences."""
    label_counts: tuple[int, ...] | None = None
    """(C,) number of sequences of each class."""
    counts_told: bool = True
    """Whether the attack can tell `label_counts` from chance at its `false_event_rate`. If not, the counts are scored as an estimate
    only. An exact hit is then no event, because with few classes it is likely by chance."""
    counts_are_shares: bool = False
    """Whether only the proportions of `label_counts` are meant, because the attack does not know the number of sequences. They are then
    scored as shares of the batch."""
    stop: Literal["done", "converged", "budget"] = "done"
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """Numbers about the attack's own work, such as rank, loss or number of candidates. They never depend on the truth."""
    told_by: Mapping[str, float] = field(default_factory=dict)
    """Parameter name -> share of what the attack read that this parameter's update told, 0 to 1; the shares sum to 1. Empty if the attack cannot
    say, as most cannot."""
    reach: Reach | None = field(default=None, compare=False, repr=False)
    """What the attack could have recovered; not a part of the guess. None if the attack cannot say; the results then call it missing."""


@runtime_checkable
class Attack(Protocol):
    """A frozen dataclass registered with `@attack("name")`; its fields are its knobs.

    The same observation, knobs and generator state give the same reconstruction. An attack changes neither the observation nor the model.
    When the budget is used up, the attack returns its best guess so far with `stop="budget"`.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    """Its name for people, in a table or inside a sentence, such as "TAG"."""
    meaning: ClassVar[str]
    """One sentence for a glossary: what it does. The reader knows no formula."""
    goal: ClassVar[Goal]
    source: ClassVar[str]
    """Paper, section, equation."""
    threat_model: ClassVar[str]
    """One sentence: what the adversary sees, and which conditions the attack needs."""
    false_event_rate: ClassVar[float]
    """Probability of an event where the update is declared noise and nothing else; at most `FALSE_EVENTS`."""
    needs: ClassVar[Needs]
    """`everything` unless the class states it. With `named parts` the attack also works on an observation that is not `whole`: one that
    holds only the first blocks, so that no step can be simulated."""
    reads: ClassVar[Reads]
    """What it reads of a difference of weights: `gradient` unless the class states it."""
    blind: ClassVar[bool]
    """Whether it ignores the update, so that its hits do not show that an audit works; False unless the class states it."""
    token_limit: ClassVar[bool]
    """Whether it can read nothing where a step has as many tokens as the model's hidden size; False unless the class states it. If such an
    attack finds nothing on such a step, that is no evidence: other attacks have no such limit."""
    slow: ClassVar[bool]
    """Whether it is a search that may use up its budget; False unless the class states it. Every waiting step gets the other attacks first."""

    def applies(self, seen: Observation) -> Applicability:
        """Return whether the attack can work on this observation, and if not, why."""
        ...

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Run the attack."""
        ...
