"""Knobs and course of LAMP, which `lamp-cos` and `lamp-l1l2` give their objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from leakaudit.attacks.matching_attack import Evidence, Recipe, can_match, check_knobs, with_knobs
from leakaudit.attacks.matching_objective import Objective
from leakaudit.attacks.matching_search import Descent, Rounds, Start
from leakaudit.attacks.reconstruction import FALSE_EVENTS, Applicability, not_applicable
from leakaudit.errors import ConfigError, PriorError
from leakaudit.priors import load_prior
from leakaudit.snapshot import Observation

Preset = Literal["paper", "large", "fast"]


@dataclass(frozen=True)
class Settings:
    """What a preset decides."""

    steps: int
    n_init: int
    n_permutations: int
    round_every: int
    round_draws: int
    learning_rate: float
    decay: float
    linear: bool
    weight_decay: float
    clip: float
    redraws: int
    redraw_steps: int
    words: int
    restarts: int
    trial_steps: int
    whitened: bool


PAPER = Settings(
    steps=2000,
    n_init=500,
    n_permutations=500,
    round_every=75,
    round_draws=200,
    learning_rate=0.2,
    decay=0.89,
    linear=False,
    weight_decay=0.0,
    clip=0.0,
    redraws=0,
    redraw_steps=75,
    words=0,
    restarts=1,
    trial_steps=30,
    whitened=False,
)

PRESETS: dict[Preset, Settings] = {
    "paper": PAPER,
    "large": replace(PAPER, steps=5000, round_every=200, decay=1.0, linear=True, weight_decay=0.01, clip=0.5),
    "fast": replace(
        PAPER,
        steps=120,
        n_init=8,
        n_permutations=0,
        round_every=30,
        round_draws=4,
        learning_rate=0.4,
        decay=1.0,
        linear=True,
        words=4,
        restarts=4,
    ),
}
"""`paper`: LAMP, Sec. 5 and App. D, for BERT-base. `large`: its recipe for BERT-large; the weight decay of AdamW is PyTorch's
default, as the paper names none. `fast`: our tuning on training sentences (CoLA); `lamp-cos` has one of its own. The learning rate of 0.01 is 0.2 of BERT's unit."""


@dataclass(frozen=True)
class Lamp:
    """LAMP, Algorithm 1. A knob at None is the preset's."""

    preset: Preset = "paper"
    """`paper`, `large` (BERT-large in the paper) or `fast`."""
    steps: int | None = None
    """Continuous steps in all."""
    n_init: int | None = None
    """Normal samples that are scored before the start."""
    n_permutations: int | None = None
    """Random orders of the best of them that are scored."""
    round_every: int | None = None
    """n_c: continuous steps between two discrete rounds."""
    round_draws: int | None = None
    """n_d: random transformations in a round, for each sequence. Those that come out the same are scored once."""
    learning_rate: float | None = None
    """Adam's step, relative to the root mean square of the word embedding's entries."""
    decay: float | None = None
    """Factor on it every 50 steps."""
    linear: bool | None = None
    """Let it fall to zero on a straight line instead."""
    weight_decay: float | None = None
    """Of AdamW."""
    clip: float | None = None
    """Norm that the derivative by the embeddings is cut to; 0 for none."""
    redraws: int | None = None
    """How often, after the last step, the quarter of the places that is furthest from any word is drawn anew and another descent begins
    from the best so far, unless the guess explains the update. Not in the paper."""
    redraw_steps: int | None = None
    """Steps of each of these descents."""
    words: int | None = None
    """Nearest words at each place that are tried as tokens after the last step (`matching_words`), as many as a place is in doubt of, and those of
    restarts that fell out; 0 takes the nearest, as the paper does."""
    discrete: Literal["alternate", "at-end", "never"] = "alternate"
    """When orders are tried: between continuous steps, or the paper's ablations DiscreteAtEnd and NoDiscrete."""
    seats: bool = True
    """Also move embeddings together with their positions, which the gradient cannot tell from staying (`matching_seats`). Not in the
    paper: false is the paper's attack."""
    prior: str = ""
    """Language model that says how likely an order is: a prior's name, a file or a folder; empty for none (alpha_lm = 0)."""
    per: Literal["parameter", "layer", "whole"] = "parameter"
    """What a cosine is taken of, before the mean."""
    patience: int = 3
    """Rounds in a row that change no token after which the attack stops as converged; 0 for never."""
    labels: Literal["joint", "enumerate"] = "enumerate"
    """Labels that are not granted: each assignment tried for `trial_steps` (LAMP, Sec. 4.2), or optimised with the embeddings."""
    restarts: int | None = None
    """Best samples that get `trial_steps` steps side by side at the start; the one with the lowest loss then goes on. 1 in the paper."""
    trial_steps: int | None = None
    """Steps in which restarts, or labellings, compete. Our choice."""
    whitened: bool | None = None
    """Take cosines in a metric in which weak tokens count (`matching_metric`); `lamp-cos` only. Not in the paper."""
    start: Evidence = "none"
    """`span`: start from what exact recovery reads instead of noise, and at the lengths that it finds. Not in the paper."""
    exposure: str = "*"
    """Parameters whose update is matched: patterns of names, joined by `+`, such as `*.layer.0.*`."""

    presets: ClassVar[Mapping[Preset, Settings]] = PRESETS
    goal: ClassVar[Literal["text", "words", "labels"]] = "text"
    false_event_rate: ClassVar[float] = FALSE_EVENTS
    source: ClassVar[str] = (
        "LAMP (Balunovic et al., NeurIPS 2022), Algorithm 1, App. D; places (`seats`): own derivation"
    )
    threat_model: ClassVar[str] = (
        "Sees one client's update and knows the weights; the client takes gradient steps without dropout on few sequences; "
        "with a prior, knows the language of the texts."
    )

    def __post_init__(self) -> None:
        """Refuse knobs that leave nothing to do."""
        check_knobs(
            self,
            at_least_one=("steps", "n_init", "round_every", "round_draws", "redraw_steps", "restarts", "trial_steps"),
            not_negative=("n_permutations", "redraws", "words", "weight_decay", "clip", "patience"),
            positive=("learning_rate", "decay"),
        )

    def settings(self) -> Settings:
        """Return the preset with the knobs that were set."""
        return with_knobs(self.presets[self.preset], self)

    def applies(self, seen: Observation) -> Applicability:
        """Say whether there is a gradient to match, a shape to match it with, and the prior that was asked for."""
        if self.prior:
            try:
                load_prior(self.prior, vocabulary=seen.facts.vocabulary, victim=seen.model)
            except (ConfigError, PriorError) as error:
                return not_applicable(str(error))
        return can_match(seen, self.exposure, self.start)

    def recipe(self, seen: Observation, objective: Objective, *, length_weight: float, prior_weight: float) -> Recipe:
        """Return the attack with one objective and its weights.

        Args:
            seen: whose vocabulary the prior has to speak.
            objective: L_grad.
            length_weight: alpha_reg.
            prior_weight: alpha_lm.
        """
        chosen = self.settings()
        prior = load_prior(self.prior, vocabulary=seen.facts.vocabulary, victim=seen.model) if self.prior else None
        rounds = Rounds(
            every=chosen.round_every,
            draws=chosen.round_draws,
            when="at-end" if self.discrete == "at-end" else "alternate",
            seats=self.seats,
            prior=prior,
            prior_weight=prior_weight,
            patience=self.patience,
            words=chosen.words,
            redraws=chosen.redraws,
            redraw_steps=chosen.redraw_steps,
        )
        return Recipe(
            objective=replace(objective, per=self.per, whitened=chosen.whitened),
            descent=Descent(
                steps=chosen.steps,
                learning_rate=chosen.learning_rate,
                decay=chosen.decay,
                linear=chosen.linear,
                weight_decay=chosen.weight_decay,
                clip=chosen.clip,
            ),
            start=Start(
                chosen.n_init,
                chosen.n_permutations,
                restarts=chosen.restarts,
                trial_steps=chosen.trial_steps,
                labels=self.labels,
            ),
            rounds=None if self.discrete == "never" else rounds,
            length_weight=length_weight,
            exposure=self.exposure,
            evidence=self.start,
        )
