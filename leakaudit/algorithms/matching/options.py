"""The options that all attacks by matching share, and checks of options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from leakaudit.algorithms.matching.descent import Keep
from leakaudit.plugins.attack_protocol import FALSE_EVENTS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")


@dataclass(frozen=True)
class SharedSettings:
    """The settings of every attack by matching that a preset decides."""

    steps: int
    learning_rate: float
    linear: bool
    weight_decay: float
    relative: bool
    start_scale: float
    start_norm: float
    n_init: int
    n_permutations: int
    restarts: int
    squared: bool
    patience: int
    keep: Keep
    lowest_id: int


@dataclass(frozen=True)
class SharedOptions:
    """The options of every attack by matching.

    An option that is None has the preset's value.
    """

    preset: str = ""
    """The attack as a paper describes it, or with our settings."""
    steps: int | None = None
    """Adam steps in total; of one round in GRAB (n_c)."""
    learning_rate: float | None = None
    """Adam's step at the start; with `relative`, in units of the root mean square of the word embedding's entries. LAMP and GRAB take
    0.01."""
    linear: bool | None = None
    """Let the step fall linearly to zero; in GRAB, in each round. It then replaces `decay`."""
    weight_decay: float | None = None
    """Weight decay of AdamW, on embeddings."""
    relative: bool | None = None
    """Take steps in units of the root mean square of the word embedding's entries. False in the papers."""
    start_scale: float | None = None
    """Standard deviation of the entries of normal starts: 1 in the papers, N(0, I). 0 makes rows as long as the word embedding's on
    average."""
    start_norm: float | None = None
    """Norm of every row of the chosen start, to which LAMP's regulariser also pulls; starts are then compared by their gradients alone. 0
    leaves the rows as drawn, and pulls to the mean norm of the word embedding's rows. 0 in the papers; LAMP's published code takes 1.4."""
    n_init: int | None = None
    """Number of normal samples that are scored before the start (n_e in GRAB); 1 for DLG and TAG in the paper."""
    n_permutations: int | None = None
    """Number of random orders of the best sample that are scored before the steps; in GRAB (n_p), before the steps and before the beam search
    of each round."""
    restarts: int | None = None
    """Number of best samples that take `trial_steps` steps at once at the start. The search continues with the one that then has the
    lowest loss. 1 in the papers."""
    squared: bool | None = None
    """Square L2 distances, as DLG does (Zhu et al. 2019). False in the papers as printed (LAMP, L_tag; GRAB, Eq. 1)."""
    patience: int | None = None
    """The search stops as converged after more than this many steps without a lower loss; 0 for never, as in the papers."""
    keep: Keep | None = None
    """Return the `last` candidate, as the papers do; that of the `best-step`, whose loss was the lowest without the prior; or the `best`: in LAMP
    the lowest loss after a discrete round, with the prior, in GRAB the best guess of all rounds."""
    lowest_id: int | None = None
    """Lowest token id that may stand in a text, special tokens aside; 0 for any. LAMP's published code takes 999, because the lower ids of BERT's
    uncased vocabulary are special or unused. The attack does not apply where the ids below it stand in texts."""
    exposure: str = "*"
    """Parameters whose update is matched: patterns of names, joined by `+`, such as `*.layer.0.*`."""

    goal: ClassVar[Literal["text", "words", "labels"]] = "text"
    slow: ClassVar[bool] = True
    false_event_rate: ClassVar[float] = FALSE_EVENTS


def check_knobs(
    attack: object, *, at_least_one: Sequence[str] = (), not_negative: Sequence[str] = (), positive: Sequence[str] = ()
) -> None:
    """Refuse options that are out of range; None is always allowed.

    Raises:
        ValueError: an option is out of range. The message names it.
    """
    rules: tuple[tuple[Sequence[str], str, Callable[[float], bool]], ...] = (
        (at_least_one, "be at least 1", lambda value: value < 1),
        (not_negative, "not be below 0", lambda value: value < 0),
        (positive, "be above 0", lambda value: value <= 0),
    )
    for knobs, rule, broken in rules:
        for knob in knobs:
            value = getattr(attack, knob)
            if value is not None and broken(value):
                raise ValueError(f"{knob} must {rule}, got {value}")


def with_knobs(preset: Settings, attack: object) -> Settings:
    """Return a preset with the options that are set in an attack.

    The preset is a dataclass. An option that is None keeps the preset's value.
    """
    given = {field.name: getattr(attack, field.name) for field in fields(preset)}
    return replace(preset, **{name: value for name, value in given.items() if value is not None})
