"""DLG's and TAG's settings, presets and attack.

Letters: B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from leakaudit.algorithms.matching.descent import Descent, Keep
from leakaudit.algorithms.matching.guessed_labels import NextTokenLabels
from leakaudit.algorithms.matching.objective import Objective
from leakaudit.algorithms.matching.run import Recipe, can_match, check_knobs, with_knobs
from leakaudit.algorithms.matching.starts import Start
from leakaudit.client.observation import Observation
from leakaudit.plugins.attack_protocol import FALSE_EVENTS, Applicability

PlainPreset = Literal["improved", "paper", "large"]


@dataclass(frozen=True)
class PlainSettings:
    """The settings that a preset of DLG or TAG decides."""

    steps: int
    learning_rate: float
    linear: bool
    weight_decay: float
    clip: float
    relative: bool
    start_scale: float
    n_init: int
    restarts: int
    trial_steps: int
    patience: int
    label_step: float | None
    squared: bool
    keep: Keep
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
    n_init=1,
    restarts=1,
    trial_steps=50,
    patience=0,
    label_step=0.1,
    squared=False,
    keep="last",
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
    "large": replace(PLAIN_PAPER, steps=10_000, linear=True, weight_decay=0.01, clip=1.0),
}
"""`paper`: DLG and TAG as LAMP runs them on BERT-base (Sec. 5, App. D). `large`: on BERT-large, with PyTorch's weight
decay of AdamW, because the paper names none. `improved`: as many steps, with our settings. Chosen on training sentences; see
docs/decisions/matching.md."""


@dataclass(frozen=True)
class PlainMatching:
    """DLG and TAG: normal starts, Adam, nearest tokens at the end.

    An option that is None has the preset's value.
    """

    preset: PlainPreset = "improved"
    """`paper` is the attack as LAMP compares with it on BERT-base, `large` on BERT-large; `improved` has our
    settings."""
    steps: int | None = None
    """Adam steps."""
    learning_rate: float | None = None
    """Adam's step without decay; with `relative`, in units of the root mean square of the word embedding's entries."""
    linear: bool | None = None
    """Let the step fall linearly to zero."""
    weight_decay: float | None = None
    """Weight decay of AdamW."""
    clip: float | None = None
    """Norm to which the derivative by the embeddings is clipped; 0 for no clipping."""
    relative: bool | None = None
    """Take steps in units of the root mean square of the word embedding's entries. False in the paper."""
    start_scale: float | None = None
    """Standard deviation of the entries of normal starts: 1 in the paper, N(0, I); 0 makes rows as long as the word
    embedding's on average."""
    n_init: int | None = None
    """Number of normal samples that are scored before the start. 1 in the paper."""
    restarts: int | None = None
    """Number of best samples that take `trial_steps` steps at once. The search continues with the one that then has the lowest
    loss. 1 in the paper."""
    trial_steps: int | None = None
    """Steps after which restarts are compared."""
    patience: int | None = None
    """The attack stops as converged after more than this many steps without a lower loss; 0 for never, as in the paper."""
    label_step: float | None = None
    """Adam's step for labels that are optimised, in absolute units; it falls with that of the embeddings. In the paper both
    steps are equal."""
    squared: bool | None = None
    """Square L2 distances. False in the paper as printed (LAMP, L_tag)."""
    keep: Keep | None = None
    """Return the candidate with the `best` loss, or the `last`, as the paper does."""
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
    exposure: str = "*"
    """Parameters whose update is matched: patterns of names, joined by `+`, such as `*.layer.0.*`."""

    presets: ClassVar[Mapping[PlainPreset, PlainSettings]] = PLAIN_PRESETS
    goal: ClassVar[Literal["text", "words", "labels"]] = "text"
    false_event_rate: ClassVar[float] = FALSE_EVENTS
    threat_model: ClassVar[str] = (
        "Sees one client's update and knows the weights; the client takes gradient steps without dropout on few sequences."
    )

    def __post_init__(self) -> None:
        """Refuse options that are out of range."""
        check_knobs(
            self,
            at_least_one=("steps", "n_init", "restarts", "trial_steps"),
            not_negative=("patience", "clip", "weight_decay", "start_scale"),
            positive=("learning_rate", "label_step"),
        )

    def settings(self) -> PlainSettings:
        """Return the preset with the options that were set."""
        return with_knobs(self.presets[self.preset], self)

    def applies(self, seen: Observation) -> Applicability:
        """Return whether gradient matching applies to an observation."""
        return can_match(seen, self.exposure)

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
            start=Start(chosen.n_init, restarts=chosen.restarts, trial_steps=chosen.trial_steps, labels=self.labels),
            exposure=self.exposure,
            relative=chosen.relative,
            start_scale=chosen.start_scale,
            aware=chosen.aware,
            next_tokens=chosen.next_tokens,
            bag=chosen.bag,
        )
