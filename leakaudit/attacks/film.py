"""`film`: sentences from a bag of words, a language model and gradient norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

import torch

from leakaudit.algorithms.film.recovery import Settings, can_recover, recover
from leakaudit.algorithms.precision import in_single_precision
from leakaudit.plugins import (
    FALSE_EVENTS,
    Applicability,
    Budget,
    Goal,
    Observation,
    Reads,
    Reconstruction,
    attack,
)

Preset = Literal["honest", "paper", "released"]

PAPER = Settings(
    bag="update",
    sentences=1,
    beam=32,
    groups=1,
    diversity=0.0,
    gram=2,
    penalty=float("inf"),
    said_penalty=float("inf"),
    length=40,
    apart=False,
    stops=False,
    coverage=0.0,
    doubt_weight=0.0,
    ppl_weight=1.0,
    norm_weight=1.0,
    norm_of="all",
    cosine_weight=0.0,
    phrase_steps=200,
    token_steps=200,
    candidates=50,
    patience=0,
    prior="victim",
)

RELEASED = replace(
    PAPER,
    bag="granted",
    groups=8,
    diversity=0.1,
    ppl_weight=10.0,
    norm_of="middle gain",
    phrase_steps=100,
    token_steps=100,
    patience=50,
)

HONEST = replace(
    PAPER,
    sentences=0,
    said_penalty=2.0,
    apart=True,
    stops=True,
    coverage=1.0,
    doubt_weight=1.0,
    cosine_weight=10.0,
    phrase_steps=20,
    token_steps=20,
    candidates=16,
    patience=5,
)

PRESETS: dict[Preset, Settings] = {"honest": HONEST, "paper": PAPER, "released": RELEASED}


@attack("film")
@dataclass(frozen=True)
class Film:
    """FILM: beam search over the bag of words, then reordering by a score.

    An option that is None has the preset's value.
    """

    preset: Preset = "honest"
    """`paper` is the attack as printed. `released` is what the published code runs: it takes the set of tokens and the longest length from the
    true texts, so the threat model has to grant `words` and `lengths`, and every score says so. `honest` uses the update alone, and guesses
    every sentence."""
    sentences: int | None = None
    """Repetitions of the beam search, each for one sentence; 0 for as many as the protocol allows, or 16."""
    beam: int | None = None
    """k, texts that are kept."""
    groups: int | None = None
    """Groups of beams that avoid each other's tokens."""
    diversity: float | None = None
    """Nats of the Hamming diversity between groups."""
    gram: int | None = None
    """n of the n-grams that should not come twice; 0 for no penalty."""
    penalty: float | None = None
    """rho, nats for each n-gram that comes again in a text."""
    said_penalty: float | None = None
    """Nats for each n-gram of an earlier result."""
    length: int | None = None
    """L, most tokens of a text, if the position rows do not show fewer."""
    apart: bool | None = None
    """Whether each first word has beams of its own, of k / 4 texts. False in the paper."""
    stops: bool | None = None
    """Whether a text is over after a full stop. False in the paper, which cuts afterwards."""
    coverage: float | None = None
    """Nats that the first use of each token earns. 0 in the paper."""
    doubt_weight: float | None = None
    """Nats that every use of a token costs for each factor e by which its evidence is below that of a sure one. 0 in the paper."""
    ppl_weight: float | None = None
    """Weight of the perplexity: 1 in the paper, alpha = 10 in the published code."""
    norm_weight: float | None = None
    """beta, weight of the gradient norm."""
    cosine_weight: float | None = None
    """Above 0, the score is the mean nats of a token minus this weight times the cosine of the sentence's gradient with the update; perplexity and
    norm then do not count. 0 in the paper."""
    phrase_steps: int | None = None
    """Steps of phrase-wise reordering."""
    token_steps: int | None = None
    """Steps of token-wise reordering."""
    candidates: int | None = None
    """Candidates of each step of reordering."""
    patience: int | None = None
    """Steps without a better text after which reordering ends; 0 for never."""
    prior: str | None = None
    """Language model: `victim` for the client's own, a prior's name, a file or a folder."""

    presets: ClassVar[Mapping[Preset, Settings]] = PRESETS
    label: ClassVar[str] = "FILM"
    meaning: ClassVar[str] = (
        "Reads which words were in the batch, and lets a language model write the likeliest sentences with them."
    )
    goal: ClassVar[Goal] = "text"
    slow: ClassVar[bool] = True
    reads: ClassVar[Reads] = "update"
    source: ClassVar[str] = (
        "FILM (Gupta et al., NeurIPS 2022), Sec. 4, Algorithm 1, App. B; counts, stops, coverage: own"
    )
    false_event_rate: ClassVar[float] = FALSE_EVENTS
    threat_model: ClassVar[str] = (
        "Sees one client's update and knows the weights; the word embedding is trained, and the client's model or a prior predicts next tokens."
    )

    def __post_init__(self) -> None:
        """Refuse sizes that search nothing."""
        chosen = self.settings()
        if min(chosen.beam, chosen.groups, chosen.candidates) < 1 or chosen.length < 2:
            raise ValueError(
                "beam, groups and candidates are at least 1 and length at least 2, "
                f"got {chosen.beam}, {chosen.groups}, {chosen.candidates} and {chosen.length}"
            )

    def settings(self) -> Settings:
        """Return the preset with the options that were set."""
        given = {each.name: getattr(self, each.name, None) for each in fields(Settings)}
        return replace(self.presets[self.preset], **{name: value for name, value in given.items() if value is not None})

    def applies(self, seen: Observation) -> Applicability:
        """Say whether there are a bag and a language model."""
        return can_recover(seen, self.settings())

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Return the guessed sentences, the best first."""
        seen = in_single_precision(seen)
        return recover(seen, self.settings(), rng, budget)
