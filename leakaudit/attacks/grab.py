"""`grab`: gradient matching with dropout masks, and a beam search over tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from leakaudit.algorithms.matching.descent import Descent, Keep
from leakaudit.algorithms.matching.hybrid_search import Hybrid
from leakaudit.algorithms.matching.learned_masks import MaskPlaces
from leakaudit.algorithms.matching.objective import Objective
from leakaudit.algorithms.matching.options import SharedOptions, SharedSettings, check_knobs, with_knobs
from leakaudit.algorithms.matching.run import Recipe, StartSource, can_match, reconstruct_by_matching
from leakaudit.algorithms.matching.starts import Start
from leakaudit.plugins import Applicability, Budget, Observation, Reads, Reconstruction, attack

Preset = Literal["paper", "large", "released", "fast"]


@dataclass(frozen=True)
class Settings(SharedSettings):
    """The settings that a preset decides."""

    decay: float
    clip: float
    sweeps: int
    beams: int
    distance: Literal["l2", "cosine"]
    alpha: float
    length_weight: float
    mask_start: Literal["mean", "bernoulli"]
    mask_weight: float
    mask_places: MaskPlaces
    keep_masks: bool
    seats: bool
    attempts: int
    verdict_steps: int
    fill: bool
    whitened: bool
    label_step: float | None
    apart: bool
    stop_early: bool
    denoise: bool
    noise_rescales: bool


PAPER = Settings(
    steps=2000,
    learning_rate=0.01,
    decay=0.89,
    clip=0.0,
    linear=False,
    weight_decay=0.01,
    n_init=2000,
    n_permutations=2000,
    sweeps=5,
    beams=4,
    distance="l2",
    alpha=0.01,
    length_weight=0.0,
    mask_start="bernoulli",
    mask_weight=0.0,
    mask_places="all",
    restarts=1,
    keep_masks=True,
    seats=False,
    attempts=1,
    verdict_steps=0,
    fill=False,
    whitened=False,
    relative=False,
    start_scale=1.0,
    start_norm=0.0,
    squared=False,
    label_step=0.01,
    apart=True,
    patience=0,
    stop_early=False,
    keep="last",
    lowest_id=0,
    denoise=False,
    noise_rescales=True,
)

FAST = Settings(
    steps=150,
    learning_rate=0.4,
    decay=1.0,
    clip=0.0,
    linear=True,
    weight_decay=0.0,
    n_init=50,
    n_permutations=0,
    sweeps=2,
    beams=2,
    distance="cosine",
    alpha=0.0,
    length_weight=1.0,
    mask_start="mean",
    mask_weight=0.3,
    mask_places="opening",
    restarts=4,
    keep_masks=True,
    seats=True,
    attempts=3,
    verdict_steps=40,
    fill=True,
    whitened=False,
    relative=True,
    start_scale=0.0,
    start_norm=0.0,
    squared=True,
    label_step=None,
    apart=False,
    patience=50,
    stop_early=True,
    keep="best",
    lowest_id=0,
    denoise=True,
    noise_rescales=False,
)

PRESETS: dict[Preset, Settings] = {
    "paper": PAPER,
    "large": replace(PAPER, decay=1.0, linear=True, clip=0.5),
    "released": replace(PAPER, start_scale=0.0),
    "fast": FAST,
}
"""`paper`: GRAB, Sec. 5.1 (the weight decay of AdamW is PyTorch's default, as the paper names none). `large`: the setting of Table 4, for BERT-large and RoBERTa-large (Sec. 5.4.1: a linear decay of the step, and
the gradient of the embeddings clipped to 0.5; "the rest of the hyperparameters setting remains the same"). `released`: as the published code (UQ-Trust-Lab/GRAB), whose starts have rows as long as words. `fast`: chosen on
training sentences (CoLA); distance and regulariser are those of LAMP_cos."""


@attack("grab")
@dataclass(frozen=True)
class Grab(SharedOptions):
    """Learn embeddings, labels and dropout masks; then search token orders.

    A round has three parts. First Adam minimises a distance between gradients over the embeddings x, the labels and the
    masks of every dropout of the model. Masks are clamped to [0, 1]. Then the nearest tokens are taken. Then a beam
    search tries each token of a sequence at all positions, and keeps the `beams` batches with the smallest distance.
    The next round starts from its result. If an option is None, the preset decides it.

    There is one mask entry for each feature of each token at each dropout. So many unknowns can explain an update by
    wrong tokens, and once masks fit wrong words, the search keeps these words. But most of the effect of dropout comes
    from few positions. The classifier reads one token, `[CLS]`, and every gradient passes its masks. So the `fast`
    preset learns only the masks of opening tokens and leaves the others at their mean, 1 - p; `mask_weight` holds the
    learned masks near that mean. Learned masks of opening tokens belong to no word, so tokens are scored with them, and
    the next round begins with them. The expected distance at the true words can be estimated, because dropout can be
    applied to a guess's own gradient. If a search ends at a much larger distance, another search begins from a random
    start (`attempts`). At the end the best guesses of all rounds are compared, each with masks of its own. The preset
    also moves embeddings to other positions (`position_assignment`).

    `preset=paper` is the published attack with these departures. The paper allows a padding token at every position,
    because only the longest length is known. Here the number of tokens of the batch is read as a rank, and the lengths
    are read from the span of the first block's inputs (`batch_shape`). So candidates have the right lengths from the
    start, and no position is padding. Line 10 of Algorithm 1, as printed, keeps the worse of two results; here the
    better one is kept. Tokens are scored with the likeliest labels instead of soft ones. Defences are taken from the
    protocol, not inferred from norms and zeros.

    If the protocol prunes, only non-zero entries are matched (Sec. 5.5.2), or, with `fill`, removed entries are
    filled in first. If the protocol clips, gradients are compared at the same length. With `noise_rescales` this is also
    done if the protocol adds noise, as in the paper (Sec. 5.5.1). A cosine needs no length. With `denoise`, declared
    noise is removed from matrices as far as their rank allows (`singular_value_shrinkage`), and each cosine is weighted
    by its expected reliability. `aware=false` turns all of this off.
    """

    preset: Preset = "fast"
    """`paper` and `released` (hours for a sentence on a CPU), as printed and as the published code starts; `large`, the paper's setting for large
    models; or `fast`."""
    hybrid_rounds: int = 5
    """n_h: most rounds; the search ends after a round without improvement."""
    decay: float | None = None
    """Factor on the step every 50 steps."""
    clip: float | None = None
    """Norm to which the derivative by the embeddings is clipped; 0 for no clipping."""
    sweeps: int | None = None
    """n_d: beam searches over all positions in a round."""
    beams: int | None = None
    """n_b: batches that are kept at each position."""
    apart: bool | None = None
    """Search from each of the `beams` best orders separately, as in the paper (Algorithm 3), instead of once from all
    together."""
    distance: Literal["l2", "cosine"] | None = None
    """Distance between gradients, of each parameter: L2, or one minus the cosine."""
    alpha: float | None = None
    """Weight of the additional L1 distance (Eq. 1)."""
    length_weight: float | None = None
    """alpha_reg of LAMP's regulariser; 0 in the paper."""
    masks: bool = True
    """Learn dropout masks. False models a client without dropout: the paper's ablation."""
    mask_step: float = 0.01
    """Adam's step for masks, in absolute terms (Sec. 5.1, lambda); it falls with that of the embeddings."""
    label_step: float | None = None
    """Adam's step for labels that are optimised, in absolute terms; it falls with that of the embeddings. The paper's
    is lambda (Algorithm 2, line 5)."""
    mask_start: Literal["mean", "bernoulli"] | None = None
    """Masks at the start: all at 1 - p, or drawn (Algorithm 1, line 1)."""
    mask_weight: float | None = None
    """Weight of the masks' mean squared distance from their mean, in units of a drawn mask's variance. It is added to
    the gradient distance. 0 in the paper."""
    mask_places: MaskPlaces | None = None
    """The masks that are learned: those of `all` tokens, as in the paper, or only those of `opening` tokens, which stand
    before every text, and those that belong to no token."""
    keep_masks: bool | None = None
    """Keep learned masks between rounds and score tokens with them, as the paper does."""
    seats: bool | None = None
    """Move embeddings together with their positions after the steps of a round. Not in the paper."""
    attempts: int | None = None
    """Most searches from random starts. Another one begins if the best guess is farther from the update than dropout
    explains, as estimated from the guess itself. 1 in the paper."""
    verdict_steps: int | None = None
    """Steps on masks alone for the final comparison of the best guesses of all rounds. Not in the paper."""
    fill: bool | None = None
    """Fill in removed entries of pruned updates, as far as a low rank allows (`low_rank_completion`), instead of
    masking them as the paper does."""
    whitened: bool | None = None
    """Take cosines in a metric in which weak tokens count (`whitening`); with `distance=cosine` only. It helps for a
    single sentence under dropout. Not in the paper."""
    words: int = 0
    """Nearest words at each position that are tried after the beam search (`token_refinement`). Not in the paper."""
    patience: int | None = None
    """Number of steps without a lower loss after which the steps of a round end. 0 turns this off, as in the paper."""
    stop_early: bool | None = None
    """Stop as soon as the tokens explain the update. Not in the paper."""
    keep: Keep | None = None
    """Return the `best` guess of all rounds, or the `last` one, as the paper does; with `best-step`, too, but each round then ends with its best
    step. With both the rounds end if the beam search does not improve on the steps."""
    denoise: bool | None = None
    """Remove declared noise from the update. Not in the paper."""
    noise_rescales: bool | None = None
    """Compare gradients at the same length under declared noise, too, as the paper does (Sec. 5.5.1). Only for an L2
    distance."""
    labels: Literal["joint", "enumerate"] = "joint"
    """Labels that are not granted are optimised with the embeddings (`joint`), or each assignment is tried for
    `trial_steps` steps (`enumerate`)."""
    trial_steps: int = 75
    """Number of steps after which restarts, or labellings, are compared. Our choice."""
    aware: bool = True
    """Use the defences that the protocol declares."""
    start: StartSource = "none"
    """`span`: start from the sequences that exact recovery reads, and at their lengths, instead of from noise. Not in
    the paper."""

    label: ClassVar[str] = "GRAB"
    meaning: ClassVar[str] = (
        "Searches for inputs and dropout masks whose gradient is near the observed one, then for the best order of the words."
    )
    reads: ClassVar[Reads] = "direction"
    source: ClassVar[str] = (
        "GRAB (Feng et al., CCS 2024), Algorithms 1 to 3, Sec. 5.1, 5.5; lengths, fresh masks and seats: own"
    )
    threat_model: ClassVar[str] = (
        "Sees one client's update and knows the weights and dropout rates; the client takes a gradient step on few sequences."
    )

    def __post_init__(self) -> None:
        """Refuse options that are out of range."""
        check_knobs(
            self,
            at_least_one=(
                *("hybrid_rounds", "steps", "n_init", "beams"),
                *("trial_steps", "restarts", "attempts"),
            ),
            not_negative=(
                *(
                    "n_permutations",
                    "sweeps",
                    "words",
                    "verdict_steps",
                    "patience",
                    "start_scale",
                    "start_norm",
                    "lowest_id",
                ),
                *("alpha", "clip", "length_weight", "weight_decay", "mask_step", "mask_weight"),
            ),
            positive=("learning_rate", "decay", "label_step"),
        )
        self._objective()  # refuses a metric for anything but a cosine

    def _objective(self) -> Objective:
        chosen = self.settings()
        return Objective(chosen.distance, l1=chosen.alpha, whitened=chosen.whitened, squared=chosen.squared)

    def settings(self) -> Settings:
        """Return the preset with the options that were set."""
        return with_knobs(PRESETS[self.preset], self)

    def applies(self, seen: Observation) -> Applicability:
        """Return whether gradient matching applies to an observation."""
        return can_match(seen, self.exposure, self.start, lowest_id=self.settings().lowest_id)

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Run rounds until one brings no improvement or the budget is used up."""
        chosen = self.settings()
        recipe = Recipe(
            objective=self._objective(),
            descent=Descent(
                steps=chosen.steps,
                learning_rate=chosen.learning_rate,
                decay=chosen.decay,
                linear=chosen.linear,
                weight_decay=chosen.weight_decay,
                clip=chosen.clip,
                patience=chosen.patience,
                label_step=chosen.label_step,
                mask_step=self.mask_step,
                keep=chosen.keep,
            ),
            start=Start(
                chosen.n_init,
                chosen.n_permutations,
                norm=chosen.start_norm,
                restarts=chosen.restarts,
                trial_steps=self.trial_steps,
                labels=self.labels,
                masks=chosen.mask_start,
            ),
            hybrid=Hybrid(
                rounds=self.hybrid_rounds,
                permutations=chosen.n_permutations,
                sweeps=chosen.sweeps,
                beams=chosen.beams,
                words=self.words,
                keep_masks=chosen.keep_masks,
                seats=chosen.seats,
                attempts=chosen.attempts,
                verdict_steps=chosen.verdict_steps,
                apart=chosen.apart,
                keep=chosen.keep,
                stop_early=chosen.stop_early,
            ),
            length_weight=chosen.length_weight,
            exposure=self.exposure,
            start_source=self.start,
            dropout=self.masks and seen.facts.training_mode,
            mask_weight=chosen.mask_weight,
            mask_places=chosen.mask_places,
            aware=self.aware,
            fill=chosen.fill,
            denoise=chosen.denoise,
            noise_rescales=chosen.noise_rescales,
            relative=chosen.relative,
            start_scale=chosen.start_scale,
            start_norm=chosen.start_norm,
            lowest_id=chosen.lowest_id,
        )
        return reconstruct_by_matching(seen, recipe, rng, budget)
