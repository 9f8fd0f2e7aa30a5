"""Share of a noisy update's signal that a simulated sentence explains.

For the observed update G = S + N, with signal S and noise N of known size, and the simulated gradient g of a sentence,
the explained share is

    cos^2(g, G) * |G|^2 / |S|^2,        |S|^2 = |G|^2 - E|N|^2.

It is 1 for the true sentence up to chance, and smaller for every other one. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from leakaudit.algorithms.span.hypothesis_search import Hypothesis, Layer, SearchResult, Simulation
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.subspace import PRUNED_SHARE, SoftSpan
from leakaudit.client.noise_level import NoiseLevel

UNEXPLAINED = 0.004
"""Share of the first block's signal that a complete sentence may leave unexplained, in addition to chance.
Chosen on training sentences; see docs/decisions/span_constants.md."""

LEAST_SIGNAL = 1e-3
"""Smallest share of |G|^2 that counts as signal.
Our choice: below it the estimate of E|N|^2 has errors as large as the signal."""

CLEAR = 100.0
"""Signal of the first block, in noise deviations, above which sentences are compared on that block alone.
Chosen on training sentences; see docs/decisions/span_constants.md."""

MOST_MARGIN = 1e6
"""Cap of the reported margin. Our choice: without noise the margin has no unit."""


class ExplainedSignal:
    """The observed update, its noise, and the simulation to compare sentences with it."""

    def __init__(self, problem: SpanProblem, span: SoftSpan, declared: NoiseLevel | None) -> None:
        """Prepare the simulation.

        Args:
            problem: the observation with its parts.
            span: weighted directions of the noisy span, with the measured noise of each projection.
            declared: noise of each parameter, in the update's units; None if none is declared.
        """
        self.simulation = Simulation(problem.seen)
        self._declared = declared
        self._update = problem.seen.update
        self._anatomy = problem.anatomy
        self._span = span

    @property
    def directions(self) -> int:
        """Number of directions of the span that are above the noise."""
        return len(self._span.weights)

    @cached_property
    def projections(self) -> tuple[Layer, ...]:
        """The first block's projections; empty if one of them is not a plain linear layer."""
        by_name = {layer.weight: layer for layer in self.simulation.layers}
        names = [p.weight for p in self._anatomy.projections if p.weight in self._span.sigma]
        return tuple(by_name[name] for name in names) if all(name in by_name for name in names) else ()

    @cached_property
    def projection_noise(self) -> tuple[float, ...]:
        """Standard deviation of the noise on each of the projections' updates."""
        return tuple(self._span.sigma[layer.weight] for layer in self.projections)

    @cached_property
    def update_in_noise(self) -> Tensor:
        """(F, D) float64: the projections' updates, each divided by its noise."""
        parts = zip(self.projections, self.projection_noise, strict=True)
        return torch.cat([self._span.update[layer.weight] / sigma for layer, sigma in parts])

    @cached_property
    def first_block(self) -> tuple[Layer, ...]:
        """Linear layers from the first block's projections up to the second block's."""
        layers = self.simulation.layers
        names = {p.weight for p in self._anatomy.projections}
        start = next((i for i, layer in enumerate(layers) if layer.weight in names), 0)
        kind = layers[start].weight.rsplit(".", 2)[-2:] if layers else []
        end = next(
            (i for i in range(start + 1, len(layers)) if layers[i].weight.rsplit(".", 2)[-2:] == kind), len(layers)
        )
        return layers[start:end]

    @cached_property
    def compared(self) -> tuple[Layer, ...]:
        """Layers on which sentences are compared.

        These are the layers of the first block if its signal is clear or no noise is declared, because their gradients
        depend most on single words; otherwise all layers.
        """
        first = self.first_block
        if self._declared is None:
            return first
        power, noise = self._energy(first)
        level = self._declared.of(*(layer.weight for layer in first))
        return first if (max(0.0, power - noise) ** 0.5) > CLEAR * level else self.simulation.layers

    def _energy(self, layers: Sequence[Layer]) -> tuple[float, float]:
        """Return |G|^2 over some layers, and the expected E|N|^2."""
        update, measured = self._update, self._span.sigma
        power = sum(float(update[layer.weight].double().square().sum()) for layer in layers)
        if (declared := self._declared) is not None:
            return power, sum(update[layer.weight].numel() * declared.of(layer.weight) ** 2 for layer in layers)
        noise = sum(
            update[layer.weight].numel() * measured[layer.weight] ** 2 for layer in layers if layer.weight in measured
        )
        return power, noise

    def share(self, sentence: Hypothesis) -> float:
        """Return the share of the first block's signal that a sentence explains, 0 to 1.

        If no noise is declared, only the projections count, because only their noise is measured. What the observed
        update lost is removed from the simulated gradient, too: pruned entries, and sizes if only signs were sent.
        """
        layers = self.first_block if self._declared is not None else self.projections or self.first_block
        inner = own = 0.0
        pruned = False
        for layer, (x, d) in zip(layers, self.simulation.activations([sentence], layers), strict=True):
            gradient = torch.einsum("nto,nti->oi", d, x).double()
            seen = self._update[layer.weight]
            seen = (seen.T if layer.input_first else seen).double()
            if float((seen == 0).double().mean()) > PRUNED_SHARE:
                gradient, pruned = gradient * (seen != 0), True
            if self.simulation.signs:
                gradient = gradient.sign()
            inner += float((gradient * seen).sum())
            own += float(gradient.square().sum())
        power, noise = self._energy(layers)
        exact = self._declared is None and (pruned or self.simulation.signs)
        signal = power if exact else max(power - noise, LEAST_SIGNAL * power)
        return 0.0 if inner <= 0 or own == 0 else min(1.0, inner**2 / (own * signal))

    def is_explained(self, sentence: Hypothesis) -> bool:
        """Return whether a sentence explains the first block's signal.

        `UNEXPLAINED` and three standard deviations of |N|^2 may be missing.
        """
        power, noise = self._energy(self.first_block)
        entries = sum(self._update[layer.weight].numel() for layer in self.first_block)
        # |N|^2 has a relative standard deviation of sqrt(2 / entries).
        chance = noise * (2 / entries) ** 0.5 / max(power - noise, LEAST_SIGNAL * power)
        return bool(self.share(sentence) >= 1.0 - UNEXPLAINED - 3 * chance)

    def margin(self, found: SearchResult) -> float:
        """Return the lead of a search's best sentence, in noise deviations.

        Scores are <g, G> / |g|, so the difference of two scores has a standard deviation of at most sqrt(2) sigma.
        """
        declared = 0.0 if self._declared is None else self._declared.of(*(layer.weight for layer in self.compared))
        sigma = declared or max(self._span.sigma.values())
        lead = found.score - found.runner_up
        return min(MOST_MARGIN, lead / (2**0.5 * sigma)) if lead > 0 else 0.0
