"""LAMP's settings, presets and attack; `lamp-cos` and `lamp-l1l2` use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from leakaudit.algorithms.matching.descent import Descent
from leakaudit.algorithms.matching.guessed_labels import NextTokenLabels
from leakaudit.algorithms.matching.objective import Objective
from leakaudit.algorithms.matching.options import SharedOptions, SharedSettings, check_knobs, with_knobs
from leakaudit.algorithms.matching.permutation_rounds import Rounds
from leakaudit.algorithms.matching.run import Recipe, StartSource, can_match, reconstruct_by_matching
from leakaudit.algorithms.matching.starts import Start
from leakaudit.client.observation import Observation
from leakaudit.errors import ConfigError, PriorError
from leakaudit.plugins.attack_protocol import Applicability, Reconstruction, not_applicable
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.prior_loading import load_prior

Preset = Literal["improved", "paper", "released", "large", "fast"]

STAND_IN = "ngram"
"""Prior of the paper's presets unless another is given. The paper's GPT-2 cannot be shipped; the built-in n-gram model
replaces it."""


@dataclass(frozen=True)
class Settings(SharedSettings):
    """The settings that a preset decides."""

    round_every: int
    round_draws: int
    orders_after: float
    decay: float
    clip: float
    length_weight: float
    prior_weight: float
    prior: str
    words: int
    trial_steps: int
    whitened: bool
    seats: bool
    stop_early: bool
    aware: bool
    next_tokens: NextTokenLabels
    bag: bool


PAPER = Settings(
    steps=2000,
    n_init=500,
    n_permutations=500,
    round_every=75,
    round_draws=200,
    orders_after=0.0,
    learning_rate=0.01,
    decay=0.89,
    linear=False,
    weight_decay=0.0,
    clip=0.0,
    relative=False,
    start_scale=1.0,
    start_norm=0.0,
    length_weight=1.0,
    prior_weight=0.2,
    prior=STAND_IN,
    squared=False,
    words=0,
    restarts=1,
    trial_steps=30,
    whitened=False,
    seats=False,
    patience=0,
    stop_early=False,
    keep="last",
    lowest_id=0,
    aware=False,
    next_tokens="joint",
    bag=False,
)

RELEASED = replace(PAPER, squared=True, start_norm=1.4, keep="best-step", orders_after=0.1, lowest_id=999)

LARGE = replace(PAPER, steps=5000, round_every=200, decay=1.0, linear=True, weight_decay=0.01, clip=0.5)

IMPROVED = replace(
    PAPER,
    learning_rate=0.2,
    relative=True,
    start_scale=0.0,
    prior="",
    squared=True,
    seats=True,
    patience=3,
    stop_early=True,
    keep="best",
    aware=True,
    next_tokens="similar",
    bag=True,
)

FAST = replace(
    IMPROVED,
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
)

PRESETS: dict[Preset, Settings] = {
    "improved": IMPROVED,
    "paper": PAPER,
    "released": RELEASED,
    "large": LARGE,
    "fast": FAST,
}
"""`paper`: LAMP, Sec. 5 and App. D, for BERT-base, with the cosine's weights. `released`: what its published code
(eth-sri/lamp) runs there. `large`: its recipe for BERT-large; the
weight decay of AdamW is PyTorch's default, because the paper names none. `improved`: as many steps, with our additions.
`fast`: chosen on training sentences (CoLA); `lamp-cos` has a `fast` of its own."""

COSINE_PRESETS: dict[Preset, Settings] = {
    **PRESETS,
    "fast": replace(PRESETS["fast"], steps=105, learning_rate=0.5, words=8, restarts=2, trial_steps=105, whitened=True),
}
"""The presets with the cosine distance. `fast` is chosen on training sentences (CoLA): two candidates take all steps,
and the words of both are then combined in one guess."""


@dataclass(frozen=True)
class Lamp(SharedOptions):
    """LAMP, Algorithm 1. An option that is None has the preset's value."""

    preset: Preset = "improved"
    """`paper` is the attack as printed for BERT-base, `large` for BERT-large; `released` is what the published code runs, which made the
    printed figures; `improved` has our additions, and `fast` takes fewer steps."""
    round_every: int | None = None
    """n_c: continuous steps between two discrete rounds."""
    round_draws: int | None = None
    """n_d: random transformations of each sequence in a round. Equal results are scored once."""
    orders_after: float | None = None
    """Share of the steps that are taken before new orders are tried. 0 in the paper, 0.1 in its published code."""
    decay: float | None = None
    """Factor on the step every 50 steps."""
    clip: float | None = None
    """Norm to which the derivative by the embeddings is clipped; 0 for no clipping."""
    relative: bool | None = None
    """Use units that depend on the model and the update. The unit of steps is the root mean square of the word embedding's
    entries; the unit of `lamp-l1l2`'s weights is the distance of a zero gradient. False in the paper."""
    length_weight: float | None = None
    """alpha_reg, weight of the embedding-length regulariser (App. D: 1 for the cosine, 25 for L2+L1)."""
    prior_weight: float | None = None
    """alpha_lm, weight of the prior (App. D: 0.2 for the cosine, 60 for L2+L1)."""
    prior: str | None = None
    """Language model for the likelihood of an order: a prior's name, a file or a folder; `none` for no prior (alpha_lm
    = 0). The paper takes GPT-2. The paper's presets take the built-in `ngram` unless another one is given, and then set the
    diagnostic `prior_stand_in` to 1."""
    words: int | None = None
    """Most nearest words that are tried at each position after the last step (`token_refinement`). Fewer are tried where a
    position is certain; the words of dropped restarts are tried, too. 0 takes the nearest word, as the paper does."""
    discrete: Literal["alternate", "at-end", "never"] = "alternate"
    """When new orders are tried: between continuous steps, or as in the paper's ablations DiscreteAtEnd and NoDiscrete."""
    seats: bool | None = None
    """Also move embeddings together with their positions, which does not change the gradient (`position_assignment`).
    Not in the paper."""
    per: Literal["parameter", "layer", "whole"] = "parameter"
    """What one cosine compares before the mean is taken: a parameter, a layer or the whole update."""
    patience: int | None = None
    """The attack stops as converged after this many rounds in a row that change no token and no order; 0 for never, as in the paper."""
    stop_early: bool | None = None
    """Stop as soon as the tokens explain the update. Not in the paper."""
    aware: bool | None = None
    """Use the noise, pruning and clipping that the protocol declares. Not in the paper."""
    next_tokens: NextTokenLabels | None = None
    """Labels under a causal language model's loss (`guessed_labels`). Tokens of a discrete step always have their exact labels."""
    bag: bool | None = None
    """Take only words whose rows of the word embedding were updated, if the table is trained, not tied to a head, and no defence is declared.
    Not in the paper, where the table is frozen (App. A.1)."""
    labels: Literal["joint", "enumerate"] = "enumerate"
    """How to find labels that are not granted: try each assignment for `trial_steps` (LAMP, Sec. 4.2), or optimise them jointly."""
    trial_steps: int | None = None
    """Steps after which restarts, or assignments of labels, are compared. Our choice."""
    whitened: bool | None = None
    """Take cosines in a metric that gives weak tokens more weight (`whitening`); `lamp-cos` only. Not in the paper."""
    start: StartSource = "none"
    """With `span`, start from the sequences that exact recovery reads, with their lengths, and not from noise. Not in the
    paper."""

    presets: ClassVar[Mapping[Preset, Settings]] = PRESETS
    source: ClassVar[str] = (
        "LAMP (Balunovic et al., NeurIPS 2022), Algorithm 1, App. D; places (`seats`): own derivation"
    )
    threat_model: ClassVar[str] = (
        "Sees one client's update and knows the weights; the client takes gradient steps without dropout on few sequences; "
        "with a prior, knows the language of the texts."
    )

    def __post_init__(self) -> None:
        """Refuse settings that are out of range."""
        check_knobs(
            self,
            at_least_one=("steps", "n_init", "round_every", "round_draws", "restarts", "trial_steps"),
            not_negative=(
                *("n_permutations", "words", "weight_decay", "clip", "patience"),
                *("length_weight", "prior_weight", "start_scale", "start_norm", "orders_after", "lowest_id"),
            ),
            positive=("learning_rate", "decay"),
        )

    def settings(self) -> Settings:
        """Return the preset with the options that were set."""
        chosen = with_knobs(self.presets[self.preset], self)
        return replace(chosen, prior="" if chosen.prior == "none" else chosen.prior)

    @property
    def stands_in(self) -> bool:
        """Whether the built-in prior replaces the paper's."""
        return self.prior is None and self.settings().prior == STAND_IN

    @property
    def language_model(self) -> str:
        """The prior that judges an order; empty for none."""
        return self.settings().prior

    @property
    def prior_facts(self) -> dict[str, float]:
        """The diagnostic that says that the built-in prior replaces the paper's.

        Empty if it does not.
        """
        return {"prior_stand_in": 1.0} if self.stands_in else {}

    def applies(self, seen: Observation) -> Applicability:
        """Return whether gradient, batch shape and prior are available."""
        chosen = self.settings()
        if chosen.prior:
            try:
                load_prior(chosen.prior, vocabulary=seen.facts.vocabulary, victim=seen.model)
            except (ConfigError, PriorError) as error:
                hint = (
                    f"preset={self.preset} needs a language model; give prior=FOLDER, prior=FILE or prior=none: "
                    if self.stands_in
                    else ""
                )
                return not_applicable(f"{hint}{error}")
        return can_match(seen, self.exposure, self.start, lowest_id=self.settings().lowest_id)

    def attack(
        self, seen: Observation, objective: Objective, rng: torch.Generator, budget: Budget, *, unit: float = 1.0
    ) -> Reconstruction:
        """Run the attack with one objective.

        Args:
            seen: what to attack.
            objective: L_grad.
            rng: source of all random numbers.
            budget: checked before every step.
            unit: unit of `length_weight` and `prior_weight`.
        """
        guess = reconstruct_by_matching(seen, self.recipe(seen, objective, unit=unit), rng, budget)
        return replace(guess, diagnostics={**guess.diagnostics, **self.prior_facts})

    def recipe(self, seen: Observation, objective: Objective, *, unit: float = 1.0) -> Recipe:
        """Return the settings of the attack with one objective.

        Args:
            seen: gives the vocabulary that the prior has to score.
            objective: L_grad.
            unit: unit of `length_weight` and `prior_weight`.
        """
        chosen = self.settings()
        prior = chosen.prior and load_prior(chosen.prior, vocabulary=seen.facts.vocabulary, victim=seen.model)
        rounds = Rounds(
            every=chosen.round_every,
            draws=chosen.round_draws,
            after=chosen.orders_after,
            when="at-end" if self.discrete == "at-end" else "alternate",
            seats=chosen.seats,
            prior=prior or None,
            prior_weight=unit * chosen.prior_weight,
            patience=chosen.patience,
            stop_early=chosen.stop_early,
            words=chosen.words,
        )
        return Recipe(
            objective=replace(objective, per=self.per, whitened=chosen.whitened, squared=chosen.squared),
            descent=Descent(
                steps=chosen.steps,
                learning_rate=chosen.learning_rate,
                decay=chosen.decay,
                linear=chosen.linear,
                weight_decay=chosen.weight_decay,
                clip=chosen.clip,
                keep=chosen.keep,
            ),
            start=Start(
                chosen.n_init,
                chosen.n_permutations,
                norm=chosen.start_norm,
                restarts=chosen.restarts,
                trial_steps=chosen.trial_steps,
                labels=self.labels,
            ),
            rounds=None if self.discrete == "never" else rounds,
            length_weight=unit * chosen.length_weight,
            exposure=self.exposure,
            start_source=self.start,
            relative=chosen.relative,
            start_scale=chosen.start_scale,
            start_norm=chosen.start_norm,
            lowest_id=chosen.lowest_id,
            aware=chosen.aware,
            next_tokens=chosen.next_tokens,
            bag=chosen.bag,
        )
