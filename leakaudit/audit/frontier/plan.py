"""Which trainings a frontier needs, and which strengths it can drop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leakaudit.audit.frontier.statistics import Values, is_above
from leakaudit.config.audit import PluginSpec
from leakaudit.config.frontier import Trainings
from leakaudit.plugins.defense_protocol import Defense
from leakaudit.results.schema import Results

SHORT = 3
"""Short trainings take one of so many steps: they choose the learning rate and drop strengths. Our choice, as in successive halving with a
factor of three (Jamieson and Talwalkar 2016)."""


@dataclass(frozen=True)
class Candidate:
    """A defence of a frontier."""

    label: str
    """Label of the defence in the results."""
    defense: Defense | None
    """None for the training without a defence."""
    family: int
    """Candidates with the same number are strengths of one defence."""
    spec: str = "none"
    """Name and knobs of the defence, as a configuration states them."""


def strengths(specs: Sequence[PluginSpec]) -> tuple[tuple[PluginSpec, int], ...]:
    """Return each defence at each strength, with the number of its family.

    >>> specs = [PluginSpec.parse("none"), PluginSpec.parse("prune(share=0.9|0.99)")]
    >>> [(spec.label, family) for spec, family in strengths(specs)]
    [('none', 0), ('prune(share=0.9)', 1), ('prune(share=0.99)', 1)]
    """
    found: dict[PluginSpec, int] = {}
    for family, spec in enumerate(specs):
        values = [str(value).split("|") if isinstance(value, str) else [value] for value in spec.options.values()]
        for combination in itertools.product(*values):
            options = {
                knob: value.strip() if isinstance(value, str) else value
                for knob, value in zip(spec.options, combination, strict=True)
            }
            found.setdefault(spec.model_copy(update={"options": options}), family)
    return tuple(found.items())


@dataclass(frozen=True)
class Need:
    """The trainings that a frontier needs at most."""

    short: int
    """Trainings of a third of the steps."""
    whole: int

    def steps(self, of_each: int) -> int:
        """Return the optimizer steps of all of them."""
        return self.short * short_steps(of_each) + self.whole * of_each


def need_of(
    candidate: Candidate, candidates: Sequence[Candidate], trainings: Trainings, seeds: int, drop: bool
) -> Need:
    """Return the trainings that one candidate needs, if it is not dropped."""
    if candidate.defense is None:
        return Need(0, seeds)
    has_choice = trainings.retune > 1 or (drop and has_rivals(candidate, candidates))
    return Need(trainings.retune if has_choice else 0, seeds)


def has_rivals(candidate: Candidate, candidates: Sequence[Candidate]) -> bool:
    """Return whether there are other strengths of the same defence."""
    return sum(other.family == candidate.family for other in candidates) > 1


def short_steps(steps: int) -> int:
    """Return the steps of a short training."""
    return math.ceil(steps / SHORT)


@dataclass(frozen=True)
class Trial:
    """The short training of a candidate."""

    candidate: Candidate
    losses: Values | None
    """Loss of each row that is held out for choices; None if the training diverged."""


def dropped(trials: Sequence[Trial], results: Results) -> dict[str, str]:
    """Return which strengths are dominated, and why: label -> reason.

    A strength is dominated if another one of its family leaks no more by any attack and metric, and has a lower loss beyond the noise of the
    examples. A training that diverged is dominated by every one that leaks no more and did not.
    """
    found: dict[str, str] = {}
    for trial in trials:
        for other in trials:
            if other is trial or other.candidate.family != trial.candidate.family or other.candidate.label in found:
                continue
            if _is_worse(trial, other) and leaks_no_more(results, other.candidate.label, trial.candidate.label):
                ended = "diverged" if trial.losses is None else f"has a loss of {trial.losses.mean():.4g}"
                found[trial.candidate.label] = (
                    f"dropped after a third of the steps: it {ended}, and {other.candidate.label} leaks no more and has "
                    f"{0.0 if other.losses is None else other.losses.mean():.4g}"
                )
                break
    return found


def _is_worse(trial: Trial, other: Trial) -> bool:
    if other.losses is None:
        return False
    return trial.losses is None or is_above(np.asarray(trial.losses), np.asarray(other.losses))


def leaks_no_more(results: Results, one: str, other: str) -> bool:
    """Return whether a defence leaks no more than another by any attack and metric.

    It is False if a metric was measured for only one of them, because nothing can then be compared.
    """
    mine, its = _leak(results, one), _leak(results, other)
    return mine.keys() == its.keys() and bool(mine) and all(mine[key] <= its[key] for key in mine)


def _leak(results: Results, defense: str) -> dict[tuple[str, str], float]:
    """Return attack and metric -> mean score, signed so that more is more leak."""
    metrics = results.catalogue.metrics
    return {
        (summary.attack, name): score if name not in metrics or metrics[name].higher_is_better else -score
        for summary in results.summaries
        if summary.defense == defense
        for name, score in summary.scores.items()
    }
