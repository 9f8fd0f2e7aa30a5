"""Finds which way of clipping explains the update below the noise."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from leakaudit.audit.conformance.measure import (
    BY_LAYER,
    BY_PARAMETER,
    BY_PASS,
    BY_SHARE,
    DECLARED,
    MEAN_CLIPPED,
    UNCLIPPED,
)
from leakaudit.audit.conformance.measured import StepMeasured

COST_OF_A_FACTOR = 10.0
"""Gain in twice the log-likelihood that a fitted factor needs. Our choice: chance alone gives it in about one of 600 cases (chi-squared, one degree)."""

SAME_UPDATE_SHARE = 1e-8
"""Share of the declared update's squared norm below which another rule gives the same update. Our choice: rounding of float32."""


@dataclass(frozen=True)
class Signal:
    """The rule that explains the updates of all steps best."""

    rule: str
    factor: float = 1.0
    """Factor of its update."""
    error: float = 0.0
    """Standard error of that factor."""
    explains: bool = True
    """Whether nothing significant is left of the other rules' updates."""

    @property
    def is_another(self) -> bool:
        """Whether it differs from the declared one."""
        return self.rule != DECLARED or abs(self.factor - 1) > 4 * self.error

    def number(self, step: StepMeasured) -> int:
        """Return the place of the rule among those of a step."""
        return next(number for number, rule in enumerate(step.rules) if rule.name == self.rule)


AS_DECLARED = Signal(DECLARED)


def excess(steps: Sequence[StepMeasured]) -> float:
    """Return the noise's standard deviation over the declared one, at least 1.

    Distances are divided by it, so that noise that is only too large does not look like wrong clipping.
    """
    return max(1.0, math.sqrt(sum(s.squares for s in steps) / sum(s.entries for s in steps)))


def directions(steps: Sequence[StepMeasured]) -> Iterator[float]:
    """Yield the length of the residual along each rule's update, in standard errors.

    And along the difference of that update from the declared one. The steps are added up by the lengths of their directions, so that a step that
    shows more counts more. A later direction depends on earlier noise through the weights; apart from that the distribution is exact.
    """
    level = excess(steps)
    for name in _names(steps):
        for minus in (0.0, 1.0) if name != DECLARED else (0.0,):
            product = squares = rounding = 0.0
            for step in steps:
                if (found := _along(step, name, minus)) is not None:
                    product += found[0]
                    squares += found[1] ** 2
                    rounding += step.rounding_along * found[1]
            if squares > 0:
                yield max(0.0, abs(product) - rounding) / math.sqrt(squares) / level


def _along(step: StepMeasured, name: str, minus: float) -> tuple[float, float] | None:
    """Return the product of the residual with a direction, and the direction's norm.

    The direction is the update of a rule less `minus` times the declared one. None where it is too short.
    """
    number = next((n for n, rule in enumerate(step.rules) if rule.name == name), None)
    if number is None:
        return None
    rule, own = step.rules[number], step.rules[0]
    cross = own.squares[number]
    squares = rule.squares[number] - 2 * minus * cross + minus**2 * own.squares[0]
    if squares <= SAME_UPDATE_SHARE * own.squares[0] or squares <= 0:
        return None
    return (rule.product - cross) - minus * (own.product - own.squares[0]), math.sqrt(squares)


def unseen(steps: Sequence[StepMeasured], limit: float) -> list[str]:
    """Return the rules that cannot be told from the declared one under the noise.

    Their updates are too near to its update. A rule that gives the declared update itself hides nothing.

    Args:
        steps: the measured steps.
        limit: standard errors from which on a difference is significant; a real one of `limit` + 2 is seen with a probability of 97 %.
    """
    hidden = []
    for name in _names(steps)[1:]:
        lengths = [found[1] for step in steps if (found := _along(step, name, 1.0)) is not None]
        if lengths and math.hypot(*lengths) / excess(steps) < limit + 2:
            hidden.append(name)
    return hidden


def along_parameters(steps: Sequence[StepMeasured]) -> Iterator[float]:
    """Yield each parameter's residual along its update, in standard errors."""
    along: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step in steps:
        for one in step.parameters:
            along[one.name].append((one.along, one.rounding))
    level = excess(steps)
    for values in along.values():
        total, rounding = sum(value for value, _ in values), sum(room for _, room in values)
        yield max(0.0, abs(total) - rounding) / math.sqrt(len(values)) / level


def best_signal(steps: Sequence[StepMeasured], limit: float) -> Signal:
    """Return the rule that explains the updates best.

    The declared rule may have any factor, as another bound or divisor gives, and a rule that acts on means the number of the things that are
    averaged. A factor counts as one more number to be fitted.

    Args:
        steps: the measured steps.
        limit: standard errors along another rule from which on something is left to explain.
    """
    best, most = AS_DECLARED, -math.inf
    for name in _names(steps):
        rules = [(rule, number) for step in steps for number, rule in enumerate(step.rules) if rule.name == name]
        product = sum(rule.product for rule, _ in rules)
        squares = sum(rule.squares[number] for rule, number in rules)
        if len(rules) < len(steps) or squares <= 0:
            continue
        for factor in _factors(name, steps[0], product / squares):
            gain = 2 * factor * product - factor**2 * squares - COST_OF_A_FACTOR * (factor != 1.0)
            if gain > most:
                best, most = Signal(name, factor, 1 / math.sqrt(squares)), gain
    explains = best.is_another and _left(steps, best) <= limit
    return Signal(best.rule, best.factor, best.error, explains)


def _factors(name: str, step: StepMeasured, fitted: float) -> Iterator[float]:
    """Yield the factors that a rule's update may have."""
    yield 1.0
    if name == DECLARED:
        yield fitted
    if name in (MEAN_CLIPPED, BY_PASS):
        for number in {float(step.examples), float(step.passes), step.expected_examples or 1.0} - {1.0}:
            yield from (number, 1 / number)


def _left(steps: Sequence[StepMeasured], signal: Signal) -> float:
    """Return the most standard errors that are left along any rule.

    And along the part of a rule's update that is perpendicular to that of the signal.
    """
    level, most = excess(steps), 0.0
    for name in _names(steps):
        product = squares = shared = own_product = own = rounding = 0.0
        for step in steps:
            numbers = {rule.name: number for number, rule in enumerate(step.rules)}
            if name in numbers:
                rule, made = step.rules[numbers[name]], step.rules[numbers[signal.rule]]
                cross, length = rule.squares[numbers[signal.rule]], made.squares[numbers[signal.rule]]
                product += rule.product - signal.factor * cross
                squares += rule.squares[numbers[name]]
                shared += cross
                own_product += made.product - signal.factor * length
                own += length
                rounding += step.rounding_along
        for part in (0.0, shared / own if own else 0.0):
            length = squares - 2 * part * shared + part**2 * own
            if length > SAME_UPDATE_SHARE * squares:
                found = max(0.0, abs(product - part * own_product) / math.sqrt(length) - rounding)
                most = max(most, found / level)
    return most


def _names(steps: Sequence[StepMeasured]) -> list[str]:
    return list(dict.fromkeys(rule.name for step in steps for rule in step.rules))


def in_words(signal: Signal, steps: Sequence[StepMeasured], far: float) -> str:
    """Return how the steps clip, in a sentence."""
    distance = f" ({far:.3g} standard errors from the declared clipping)"
    factor = "" if abs(signal.factor - 1) <= 4 * signal.error else f", {signal.factor:.3g} times"
    known = {
        UNCLIPPED: f"The gradients of the examples are not clipped{distance}.",
        BY_PARAMETER: f"Each of {len(steps[0].parameters)} parameters is clipped to the whole bound by itself, and not each example as a whole{distance}.",
        BY_LAYER: f"Each layer is clipped to the whole bound by itself, and not each example as a whole{distance}.",
        BY_SHARE: f"The bound is applied to each example's share of the mean loss, before the gradient is multiplied by the number of examples{distance}.",
        BY_PASS: f"The bound is applied to the mean of each micro-batch and not to each example{factor}{distance}.",
        MEAN_CLIPPED: f"The bound is applied after the gradients are averaged and not to each example{factor}{distance}.",
    }
    if signal.is_another:
        known[DECLARED] = (
            f"The update below the noise is {signal.factor:.3g} times the one that the declared clipping gives{distance}: the bound, or the divisor "
            "of the sum, is another one than declared."
        )
    unknown = f"The update below the noise is not the one that the declared clipping gives{distance}; no usual mistake explains it."
    return known.get(signal.rule, unknown) if signal.explains else unknown
