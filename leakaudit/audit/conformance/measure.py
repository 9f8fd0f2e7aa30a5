"""The measurement of one step: its residual against the noise that it declares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leakaudit.audit.accuracy import Accuracy, loses_dropout
from leakaudit.audit.comparison import Update
from leakaudit.audit.conformance.measured import (
    Rule,
    Sketch,
    StepMeasured,
    noise_of,
    products_of,
    residuals,
    sketch_of,
)
from leakaudit.audit.declared_noise import noise_is_changed
from leakaudit.audit.expected_update import expected_update, noise_added
from leakaudit.client.noise_level import NoiseLevel
from leakaudit.client.per_example import ExampleClipping, clipping_factor
from leakaudit.client.step import ClientStep
from leakaudit.errors import SnapshotError

DECLARED, UNCLIPPED, BY_PARAMETER, BY_LAYER, BY_SHARE, BY_PASS, MEAN_CLIPPED = (
    "as declared",
    "without clipping",
    "each parameter by itself",
    "each layer by itself",
    "each share of the mean loss",
    "each micro-batch as a whole",
    "the mean as a whole",
)
"""Ways to clip, as the results name them."""

MOST_ENTRIES = 200_000_000
"""Largest number of trained entries for which other ways to clip are compared. Our choice: six sums in float32 then take 5 GB."""

MOST_EXAMPLES = 64
"""Largest number of examples whose directions are compared; each costs a second backward pass. Our choice."""


@dataclass(frozen=True)
class Measurement:
    """What was found of one step."""

    step: StepMeasured
    sketch: Sketch


def measure(step_id: str, step: ClientStep, observed: Update, *, repeated: Update | None = None) -> Measurement | None:
    """Compute a step again and return the sums by which its noise is judged.

    Args:
        step_id: id of the step.
        step: the step, with the defences that the protocol declares.
        observed: parameter name -> update that was sent.
        repeated: the update before the declared defences, if it is known; None computes the step.

    Returns:
        The sums; None if no declared defence adds noise.

    Raises:
        SnapshotError: a declared defence changes the noise, or the step cannot be computed again. The message is a clause.
        ModelError: as for `ClientStep.update`.
    """
    plugins = _noisy_plugins(step)
    if not plugins:
        return None
    if loses_dropout(step) and repeated is None:
        raise SnapshotError("the random numbers of its dropout were not kept, so it cannot be computed again")
    accuracy = Accuracy.of(step)
    clipping = _clipping(step, plugins, observed) if repeated is None else None
    if clipping is None:
        bare = step.update() if repeated is None else repeated
        expected, levels = expected_update(step, plugins, bare, observed, accuracy.largest)
        rules = (
            {DECLARED: expected, UNCLIPPED: bare} if any(p.clipping_bound for p in plugins) else {DECLARED: expected}
        )
        sums = Sums(rules)
    else:
        sums = Sums.of(step, clipping, alone=not accuracy.is_coarse)
        expected = sums.updates[DECLARED]
        levels = NoiseLevel(dict.fromkeys(expected, 0.0) | noise_added(step, plugins[0], expected))
    sigma = dict(levels.by_parameter)
    if not any(sigma.values()):
        return None
    found = residuals(observed, expected, sigma)
    error = {name: accuracy.largest * float(expected[name].norm()) for name in found}
    updates = [{name: observed[name] for name in sigma}, *sums.updates.values()]
    products = products_of(updates, sigma)
    whole = torch.stack(list(products.values())).sum(0)
    examples = _along_examples(step, clipping, found, sigma, sums) if clipping is not None else _Examples()
    return Measurement(
        StepMeasured(
            step=step_id,
            mechanism=" + ".join(plugin.declared().with_numbers() for plugin in plugins),
            examples=step.truth.examples(),
            expected_examples=None if clipping is None else clipping.divisor,
            passes=len(step.truth.micro_batches),
            processes=step.recipe.processes,
            bound=next((p.clipping_bound for p in plugins if p.clipping_bound), None),
            noise_multiplier=next((p.gaussian_multiplier for p in plugins if p.gaussian_multiplier is not None), None),
            message_multiplier=next((p.message_multiplier for p in plugins if p.message_multiplier is not None), None),
            parameters=tuple(
                noise_of(name, residual, expected[name], sigma[name], error[name], products[name])
                for name, residual in found.items()
            ),
            rules=tuple(
                Rule(
                    name=name,
                    product=float(whole[0, number]),
                    squares=tuple(whole[number, 1:].tolist()),
                    sensitivity=(examples.moved_mean or None) if name == MEAN_CLIPPED else sums.largest.get(name),
                )
                for number, name in enumerate(sums.updates, 1)
            ),
            largest_along_example=examples.largest,
            tested_examples=examples.tested,
            rounding_along=math.sqrt(sum((error[name] / sigma[name]) ** 2 for name in found)),
        ),
        sketch_of(step_id, updates, sigma),
    )


def _noisy_plugins(step: ClientStep) -> list[Any]:
    """Return the declared defences that do something.

    Returns:
        The plugins; empty if none of them adds noise.

    Raises:
        SnapshotError: the noise cannot be judged.
    """
    if any(plugin is None for plugin in step.facts.known_defenses):
        raise SnapshotError("it declares a defence that is not known here")
    plugins = [plugin for plugin in step.facts.known_defenses if plugin is not None and not plugin.is_identity()]
    noisy = [plugin.without_noise() != plugin for plugin in plugins]
    if not any(noisy):
        return []
    if noise_is_changed(noisy):
        raise SnapshotError("a declared defence changes the noise after it was added")
    if sum(noisy) > 1:
        raise SnapshotError("two declared defences add noise")
    if any(adds and not plugin.gaussian for plugin, adds in zip(plugins, noisy, strict=True)):
        raise SnapshotError("the declared noise is not Gaussian")
    return plugins


def _clipping(step: ClientStep, plugins: list[Any], observed: Update) -> ExampleClipping | None:
    """Return how each example is clipped.

    None if something else happens before the noise.
    """
    found: ExampleClipping | None = plugins[0].example_clipping(step, observed)
    return found if found is None or len(plugins) == 1 else None


@dataclass(frozen=True)
class Sums:
    """The updates without noise that different ways to clip give."""

    updates: Mapping[str, Update]
    """Way to clip -> update."""
    largest: dict[str, float] = field(default_factory=dict)
    """Way to clip -> largest L2 norm of what one example adds, divided by the bound."""

    @classmethod
    def of(cls, step: ClientStep, clipping: ExampleClipping, *, alone: bool) -> Sums:
        """Go through the examples once and add them up in each way.

        Raises:
            SnapshotError: the gradients of the examples cannot be computed.
        """
        factors: dict[str, Factors] = {DECLARED: lambda norms: clipping.factors(list(norms.values()))}
        if sum(p.numel() for p in step.model.parameters()) <= MOST_ENTRIES:
            factors |= {
                UNCLIPPED: lambda norms: [1.0] * len(norms),
                BY_PARAMETER: lambda norms: _factors_of_groups(norms, clipping.bound, _alone),
                BY_LAYER: lambda norms: _factors_of_groups(norms, clipping.bound, _layer),
            }
            share = len(step.truth.micro_batches) / max(1, step.truth.examples())
            if not clipping.summed and share < 1:
                factors[BY_SHARE] = lambda norms: _factors_of_groups(norms, clipping.bound / share, _whole)
        totals: dict[str, dict[str, Tensor]] = {name: {} for name in factors}
        largest = dict.fromkeys(factors, 0.0)
        by_pass: dict[int, dict[str, Tensor]] = {}
        sizes: dict[int, int] = {}
        for number, example in step.example_gradients(summed=clipping.summed, alone=alone):
            sizes[number] = sizes.get(number, 0) + 1
            norms = {name: gradient.norm() for name, gradient in example.items()}
            for name, rule in factors.items():
                own = rule(norms)
                length = math.hypot(*(f * float(norm) for f, norm in zip(own, norms.values(), strict=True)))
                largest[name] = max(largest[name], length / clipping.bound)
                _add(totals[name], example, own)
            if len(factors) > 1 and len(step.truth.micro_batches) > 1:
                _add(by_pass.setdefault(number, {}), example, [1.0] * len(example))
        if not totals[DECLARED]:
            raise SnapshotError("its batch is empty")
        divided = {
            name: {key: gradient / clipping.divisor for key, gradient in total.items()}
            for name, total in totals.items()
        }
        if UNCLIPPED in totals:
            divided[MEAN_CLIPPED] = _clipped_mean(totals[UNCLIPPED], sum(sizes.values()), clipping.bound)
        for number, total in by_pass.items():
            _add(
                divided.setdefault(BY_PASS, {}),
                _clipped_mean(total, sizes[number] * len(by_pass), clipping.bound, len(by_pass)),
                [1.0] * len(total),
            )
        return cls(divided, largest)


def _clipped_mean(total: Mapping[str, Tensor], examples: int, bound: float, shares: int = 1) -> dict[str, Tensor]:
    """Return one of `shares` equal shares of a mean, the mean clipped as a whole."""
    norm = torch.tensor(_norm(total) / examples)
    factor = clipping_factor(bound / shares, norm) / examples
    return {name: gradient * factor for name, gradient in total.items()}


Factors = Callable[[Mapping[str, Tensor]], Sequence[float]]
"""Parameter name -> norm of one example's gradient; gives the factor of each parameter."""


def _add(total: dict[str, Tensor], more: Mapping[str, Tensor], factors: Sequence[float]) -> None:
    """Add gradients times their factors."""
    for (name, gradient), factor in zip(more.items(), factors, strict=True):
        if name in total:
            total[name].add_(gradient, alpha=factor)
        else:
            total[name] = gradient.float() * factor


def _factors_of_groups(norms: Mapping[str, Tensor], bound: float, group: Callable[[str], str]) -> list[float]:
    """Return the factors that clip the parameters of each group to one bound."""
    members: dict[str, list[Tensor]] = {}
    for name, norm in norms.items():
        members.setdefault(group(name), []).append(norm)
    factors = {name: clipping_factor(bound, torch.stack(found).norm()) for name, found in members.items()}
    return [factors[group(name)] for name in norms]


def _norm(update: Mapping[str, Tensor]) -> float:
    return float(torch.stack([gradient.norm() for gradient in update.values()]).norm())


def _whole(_name: str) -> str:
    return ""


def _alone(name: str) -> str:
    return name


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


@dataclass
class _Examples:
    """What the directions of single examples show."""

    largest: float = 0.0
    tested: int = 0
    moved_mean: float = 0.0


def _along_examples(
    step: ClientStep, clipping: ExampleClipping, found: Mapping[str, Tensor], sigma: Mapping[str, float], sums: Sums
) -> _Examples:
    """Return the largest inner product of the residual with an example's direction.

    And how far one example moves the mean of the batch, if the mean is clipped as a whole.
    """
    seen, examples = _Examples(), step.truth.examples()
    if examples > MOST_EXAMPLES or UNCLIPPED not in sums.updates:
        return seen
    whole = {name: gradient.flatten() for name, gradient in sums.updates[UNCLIPPED].items()}
    length = clipping.divisor * _norm(whole)
    for _, example in step.example_gradients(summed=clipping.summed, alone=True):
        product = squares = shared = own = 0.0
        for name, gradient in example.items():
            direction = gradient.float().flatten()
            size = float(direction @ direction)
            own += size
            shared += clipping.divisor * float(direction @ whole[name])
            if name in found:
                product += float(found[name] @ direction) / sigma[name]
                squares += size / sigma[name] ** 2
        if squares > 0:
            seen.largest = max(seen.largest, abs(product) / math.sqrt(squares))
            seen.tested += 1
        if examples > 1:
            moved = _change_of_clipped_mean(length, own, shared, examples, clipping.bound)
            seen.moved_mean = max(seen.moved_mean, moved * clipping.divisor / clipping.bound)
    return seen


def _change_of_clipped_mean(length: float, own: float, shared: float, examples: int, bound: float) -> float:
    """Return how far the clipped mean of a batch moves if one example is left out.

    Args:
        length: L2 norm of the sum of all gradients.
        own: squared norm of the example's gradient.
        shared: product of the two.
        examples: number of examples.
        bound: to which the mean is clipped.
    """
    rest = math.sqrt(max(0.0, length**2 - 2 * shared + own))
    one = clipping_factor(bound, torch.tensor(length / examples)) / examples
    other = clipping_factor(bound, torch.tensor(rest / (examples - 1))) / (examples - 1)
    squared = (one - other) ** 2 * length**2 + 2 * (one - other) * other * shared + other**2 * own
    return math.sqrt(max(0.0, squared))
