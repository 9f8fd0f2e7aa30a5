"""DLG's and TAG's settings, presets and attack.

Letters: B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from leakaudit.algorithms.matching.descent import Descent
from leakaudit.algorithms.matching.guessed_labels import NextTokenLabels
from leakaudit.algorithms.matching.objective import Objective
from leakaudit.algorithms.matching.options import SharedOptions, SharedSettings, check_knobs, with_knobs
from leakaudit.algorithms.matching.run import Recipe, can_match
from leakaudit.algorithms.matching.starts import Start
from leakaudit.client.observation import Observation
from leakaudit.plugins.attack_protocol import Applicability

PlainPreset = Literal["improved", "paper", "released", "large"]


@dataclass(frozen=True)
class PlainSettings(SharedSettings):
    """The settings that a preset of DLG or TAG decides."""

    clip: float
    trial_steps: int
    label_step: float | None
    aware: bool
    next_tokens: NextTokenLabels
    bag: bool


PLAIN_PAPER = PlainSettings(
    steps=2500,
    learning_rate=0.1,
    linear=False,
    weight_decay=0.0,
    clip=0.0,
    relative=False,
    start_scale=1.0,
    start_norm=0.0,
    n_init=1,
    n_permutations=0,
    restarts=1,
    trial_steps=50,
    patience=0,
    label_step=0.1,
    squared=False,
    keep="last",
    lowest_id=0,
    aware=False,
    next_tokens="joint",
    bag=False,
)

PLAIN_PRESETS: dict[PlainPreset, PlainSettings] = {
    "improved": replace(
        PLAIN_PAPER,
        learning_rate=0.5,
        relative=True,
        start_scale=0.0,
        n_init=10,
        restarts=2,
        patience=200,
        label_step=None,
        squared=True,
        keep="best",
        aware=True,
        next_tokens="similar",
        bag=True,
    ),
    "paper": PLAIN_PAPER,
    "released": replace(PLAIN_PAPER, n_permutations=1, squared=True, keep="best-step", lowest_id=999),
    "large": replace(PLAIN_PAPER, steps=10_000, linear=True, weight_decay=0.01, clip=1.0),
}
"""`paper`: DLG and TAG as LAMP runs them on BERT-base (Sec. 5, App. D). `released`: as LAMP's published code (eth-sri/lamp) runs them
there. `large`: on BERT-large, with PyTorch's weight
decay of AdamW, because the paper names none. `improved`: as many steps, with our settings. Chosen on training sentences; see
docs/decisions/matching.md."""


@dataclass(frozen=True)
class PlainMatching(SharedOptions):
    """DLG and TAG: normal starts, Adam, nearest tokens at the end.

    An option that is None has the preset's value.
    """

    preset: PlainPreset = "improved"
    """`paper` is the attack as LAMP describes it for BERT-base, `large` for BERT-large; `released` is what LAMP's published code runs;
    `improved` has our settings."""
    clip: float | None = None
    """Norm to which the derivative by the embeddings is clipped; 0 for no clipping."""
    trial_steps: int | None = None
    """Steps after which restarts are compared."""
    label_step: float | None = None
    """Adam's step for labels that are optimised, in absolute units; it falls with that of the embeddings. In the paper both
    steps are equal."""
    aware: bool | None = None
    """Use the noise, pruning and clipping that the protocol declares. Not in the paper."""
    next_tokens: NextTokenLabels | None = None
    """Labels under a causal language model's loss, which are the text itself: `joint` optimises logits at every place together with
    the embeddings, as DLG optimises labels; `similar` takes a softmax over the cosines of the next place's embedding with all tokens; `nearest`
    the token nearest to it."""
    bag: bool | None = None
    """Take only words whose rows of the word embedding were updated, if the table is trained, not tied to a head, and no defence is declared.
    Not in the paper, where the table is frozen."""
    labels: Literal["joint", "enumerate"] = "joint"
    """How to find labels that are not granted: optimise them with the embeddings (DLG), or try each assignment for `trial_steps`."""

    presets: ClassVar[Mapping[PlainPreset, PlainSettings]] = PLAIN_PRESETS
    threat_model: ClassVar[str] = (
        "Sees one client's update and knows the weights; the client takes gradient steps without dropout on few sequences."
    )

    def __post_init__(self) -> None:
        """Refuse options that are out of range."""
        check_knobs(
            self,
            at_least_one=("steps", "n_init", "restarts", "trial_steps"),
            not_negative=(
                "patience",
                "clip",
                "weight_decay",
                "start_scale",
                "start_norm",
                "n_permutations",
                "lowest_id",
            ),
            positive=("learning_rate", "label_step"),
        )

    def settings(self) -> PlainSettings:
        """Return the preset with the options that were set."""
        return with_knobs(self.presets[self.preset], self)

    def applies(self, seen: Observation) -> Applicability:
        """Return whether gradient matching applies to an observation."""
        return can_match(seen, self.exposure, lowest_id=self.settings().lowest_id)

    def recipe(self, objective: Objective) -> Recipe:
        """Return the settings of the attack with one objective."""
        chosen = self.settings()
        return Recipe(
            objective=replace(objective, squared=chosen.squared),
            descent=Descent(
                chosen.steps,
                chosen.learning_rate,
                linear=chosen.linear,
                weight_decay=chosen.weight_decay,
                clip=chosen.clip,
                patience=chosen.patience,
                label_step=chosen.label_step,
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
            exposure=self.exposure,
            relative=chosen.relative,
            start_scale=chosen.start_scale,
            start_norm=chosen.start_norm,
            lowest_id=chosen.lowest_id,
            aware=chosen.aware,
            next_tokens=chosen.next_tokens,
            bag=chosen.bag,
        )
