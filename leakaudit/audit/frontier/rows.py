"""The rows of a frontier in the results: utility and prices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from leakaudit.audit.frontier.evaluation import HIGHER_IS_BETTER
from leakaudit.audit.frontier.statistics import Mean, mean_over_seeds
from leakaudit.audit.frontier.store import KeptPrice, KeptTraining
from leakaudit.results.files import with_digest
from leakaudit.results.schema import NotTested, Price, Results, Utility
from leakaudit.results.utility import UTILITY_OF
from leakaudit.results.wording import counted


@dataclass(frozen=True)
class Found:
    """All that a frontier measured."""

    trainings: Mapping[str, Sequence[KeptTraining]]
    """Label of a defence -> its trainings of all steps, one a seed; the training without a defence comes first, as `none`."""
    prices: Mapping[str, KeptPrice]
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Label of a defence -> why its utility was not measured."""


def with_frontier(results: Results, found: Found, baseline: str) -> Results:
    """Return results with the utility and the prices of their defences.

    Args:
        results: of the audit of the same defences; earlier rows of a frontier are replaced.
        found: what was measured.
        baseline: label of the training without a defence.
    """
    plain = found.trainings.get(baseline, ())
    rows = [row for label, own in found.trainings.items() for row in _rows(label, own, plain, label == baseline)]
    reasons = dict(found.reasons)
    for label, own in found.trainings.items():
        if not any(one.has_ended_well for one in own):
            reasons.setdefault(label, _why_none(own))
    earlier = [one for one in results.coverage.not_tested if not one.what.startswith(UTILITY_OF)]
    missing = [NotTested(what=f"{UTILITY_OF}{label}", why=why) for label, why in reasons.items()]
    coverage = results.coverage.model_copy(update={"not_tested": (*earlier, *missing)})
    prices = tuple(_price(label, price) for label, price in found.prices.items() if not price.unfit)
    return with_digest(results.model_copy(update={"utility": tuple(rows), "prices": prices, "coverage": coverage}))


def _why_none(own: Sequence[KeptTraining]) -> str:
    unfit = next((one.unfit for one in own if one.unfit), "")
    if unfit:
        return f"utility not measured: {unfit}"
    steps = [one.diverged_at for one in own if one.diverged_at is not None]
    first = f", the first at step {min(steps)}" if steps else ""
    return (
        f"utility not measured: {counted(sum(one.diverged for one in own), 'training')} of {len(own)} diverged{first}"
    )


def _rows(
    label: str, own: Sequence[KeptTraining], plain: Sequence[KeptTraining], is_baseline: bool
) -> Iterable[Utility]:
    """Yield a row for each metric of a defence."""
    ended = [one for one in own if one.has_ended_well]
    names = [name for name in HIGHER_IS_BETTER if ended and all(name in one.metrics for one in ended)]
    for name in names:
        pairs = [] if is_baseline else _pairs(ended, plain, name)
        difference = _difference(pairs, name)
        yield Utility(
            defense=label,
            metric=name,
            value=float(np.mean([one.metrics[name].value for one in ended])),
            baseline=float(np.mean([other.metrics[name].value for _, other in pairs])) if pairs else None,
            higher_is_better=HIGHER_IS_BETTER[name],
            difference=None if difference is None else difference.value,
            lower=None if difference is None else difference.lower,
            upper=None if difference is None else difference.upper,
            seeds=tuple(one.seed for one in ended),
            steps=ended[0].steps,
            examples=_examples(ended[0], name),
            learning_rate=ended[0].learning_rate,
            diverged=sum(one.diverged for one in own),
        )


def _examples(training: KeptTraining, metric: str) -> int | None:
    """Return the number of evaluated examples; None if only the whole is known."""
    count = len(training.metrics[metric].by_example)
    return count if count > 1 else None


def _pairs(
    ended: Sequence[KeptTraining], plain: Sequence[KeptTraining], metric: str
) -> list[tuple[KeptTraining, KeptTraining]]:
    """Return the trainings with and without the defence that have the same seed."""
    of_seed = {one.seed: one for one in plain if one.has_ended_well and metric in one.metrics}
    return [(one, of_seed[one.seed]) for one in ended if one.seed in of_seed]


def _difference(pairs: Sequence[tuple[KeptTraining, KeptTraining]], metric: str) -> Mean | None:
    """Return the mean difference, paired by seed and example; None without pairs."""
    if not pairs:
        return None
    both = [(one.metrics[metric].measured(), other.metrics[metric].measured()) for one, other in pairs]
    mean = float(np.mean([one.value - other.value for one, other in both]))
    found = mean_over_seeds(np.array([one.by_example - other.by_example for one, other in both]))
    if found.lower is None or found.upper is None:
        return Mean(mean, None, None)
    moved = mean - found.value  # the mean of pseudo-values differs from the metric by the jackknife's bias
    return Mean(mean, found.lower + moved, found.upper + moved)


def _price(label: str, price: KeptPrice) -> Price:
    return Price(
        defense=label,
        seconds=price.step_s / price.plain_s if price.plain_s else None,
        traffic=price.sent / price.plain if price.plain else None,
    )
