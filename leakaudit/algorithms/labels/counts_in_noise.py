"""Test whether class counts can be told from noise.

Every attack that counts labels uses this test. There are few possible count vectors, so counts of pure noise are often right by chance:
with two classes and one label, in half of the steps. The test is passed if the output layer's update has more energy than noise, and if
further noise does not change the counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from leakaudit.algorithms.above_noise import energy_cut, heavy_tailed
from leakaudit.algorithms.labels.output_layer import OutputLayer, noise_in
from leakaudit.client.observation import Observation
from leakaudit.plugins.attack_protocol import FALSE_EVENTS, Reconstruction

FURTHER_NOISE = 2.0
"""Standard deviation of the further noise, in units of the present noise. Our choice: if two classes differ by noise alone, they differ
by three standard deviations in one of 100 updates (Laplace noise). In nearly nine of ten such cases, further draws of this size exchange
the two classes."""

DRAWS = 30
"""Number of updates with further noise in which the counts must stay the same. Our choice. In 20,000 draws of noise alone, the smallest
of two entries stayed the smallest in all these updates in 0.5 % (Laplace) and 0.2 % (Gaussian) of the draws; the smallest of three or
more entries in at most 0.1 %."""


def count_in_noise(
    seen: Observation, layer: OutputLayer, rng: torch.Generator, count: Callable[[Observation], Reconstruction]
) -> Reconstruction:
    """Count labels, and test whether the counts differ from noise.

    `counts_told` of the result holds the answer; without noise it is not changed. The draws are a parametric bootstrap: FURTHER_NOISE
    times the present noise is added to the output layer's update, and the labels are counted again.

    Args:
        seen: the observation.
        layer: its output layer.
        rng: draws the further noise; a CPU generator.
        count: the attack, from an observation to counts. It is called only once if there is no noise.
    """
    found = count(seen)
    shared = layer.weight in seen.update
    sigma = noise_in(seen, layer.weight, layer.bias) if shared else seen.noise_level.of(layer.bias)
    if sigma == 0.0:
        return found
    told = _is_signal(seen, layer, sigma) and all(
        count(_noisier(seen, layer, FURTHER_NOISE * sigma, rng)).label_counts == found.label_counts
        for _ in range(DRAWS)
    )
    return replace(found, counts_told=told, diagnostics={**found.diagnostics, "counts_told": float(told)})


def _parts(seen: Observation, layer: OutputLayer) -> dict[str, Tensor]:
    """Return the update of the layer's weight and shared bias, by name."""
    return {name: seen.update[name] for name in (layer.weight, layer.bias) if name and name in seen.update}


def _is_signal(seen: Observation, layer: OutputLayer, sigma: float) -> bool:
    """Return whether the layer's update has more energy than noise alone."""
    parts = _parts(seen, layer)
    entries = torch.cat([part.double().flatten() for part in parts.values()])
    cut = energy_cut(len(entries), heavy_tailed(entries))
    return float(entries.square().sum()) > cut(FALSE_EVENTS / 2) * sigma**2


def _noisier(seen: Observation, layer: OutputLayer, sigma: float, rng: torch.Generator) -> Observation:
    more = {
        name: part + sigma * torch.randn(part.shape, generator=rng).to(part)
        for name, part in _parts(seen, layer).items()
    }
    return replace(seen, update={**seen.update, **more})
