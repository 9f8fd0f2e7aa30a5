"""Holds the sums over a step's residual by which its conformance is judged.

The residual of a step is (observed update - expected update) / sigma for each entry, with the declared sigma. If the step did what it declares,
its entries are independent draws of a standard normal distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

SKETCH_ENTRIES = 256
"""First entries of each parameter that are kept to compare draws. Our choice: equal draws then have a correlation of 1, where independent ones
have a standard deviation of 0.06."""

NEAR_SIGMAS, FAR_SIGMAS = 0.01, 3.0
"""Entries nearer to zero and further from it than this, in units of sigma, are counted. Our choice: a normal distribution has 0.8 % of its values
below the one and 0.27 % beyond the other."""


NO_NOISE = 0.01
"""Share of the declared standard deviation below which a parameter is said to carry no noise. Our choice: rounding leaves 1e-6 to 1e-3."""


class Measured(BaseModel):
    """Frozen data that a process keeps for a later one."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ParameterNoise(Measured):
    """The residual of one parameter in one step."""

    name: str
    entries: int
    sigma: float
    """Declared standard deviation, in the units of the update."""
    squares: float
    """Sum of the squares of the residual."""
    rounding: float
    """Largest L2 norm of the residual that rounding alone explains."""
    along: float
    """Inner product of the residual with the expected update of this parameter, divided by that update's norm; 0 if the update is zero."""
    near: int
    """Entries whose absolute value is below `NEAR_SIGMAS`."""
    far: int
    """Entries whose absolute value is above `FAR_SIGMAS`."""
    positive: int
    """Entries above zero."""
    seen: float
    """Sum of the squares of the observed update, divided by sigma squared."""
    rules: tuple[tuple[float, float], ...]
    """For each of the step's rules the inner product of the observed update with it, and its squared norm, both divided by sigma squared."""

    sums: tuple[tuple[int, float], ...] = ()
    """For a matrix, its sums along the last axes and along the first: their number, and their squared norm divided by the entries of one sum.

    If the entries are independent, each is a projection of the residual on so many dimensions. Empty for vectors.
    """

    def squares_under(self, rule: int, factor: float) -> float:
        """Return the squared norm of the residual under a rule.

        It is that of the observed update minus `factor` times the update of the rule, divided by sigma.
        """
        product, norm = self.rules[rule]
        return max(0.0, self.seen - 2 * factor * product + factor**2 * norm)

    @property
    def ratio(self) -> float:
        """Estimated standard deviation, divided by the declared one."""
        return float((self.squares / self.entries) ** 0.5)


class Rule(Measured):
    """An update that a step would have sent without noise under one way of clipping."""

    name: str
    product: float
    """Inner product of the observed update with it, both divided by sigma."""
    squares: tuple[float, ...]
    """Its inner products with the updates of all rules of the step, in their order, divided by sigma squared."""
    sensitivity: float | None
    """Largest L2 norm by which one example of the batch changes the sum, divided by the declared bound; None if unknown."""


class StepMeasured(Measured):
    """Everything that is kept of one step."""

    step: str
    """Id of the step."""
    mechanism: str
    """The declared defences, with their numbers."""
    examples: int
    """Number of examples of the step."""
    expected_examples: float | None
    """The number by which the client divides its sum; None if no example is clipped by itself."""
    passes: int
    """Number of micro-batches."""
    processes: int
    bound: float | None
    """Declared clipping bound; None without one."""
    noise_multiplier: float | None
    """Declared standard deviation of the noise, divided by what one example can change; None if that is not bounded."""
    message_multiplier: float | None = None
    """Declared standard deviation of the noise, divided by the bound of the whole message; None if that is not bounded."""
    parameters: tuple[ParameterNoise, ...]
    rules: tuple[Rule, ...] = ()
    """The declared way of clipping comes first."""
    largest_along_example: float = 0.0
    """Largest absolute inner product of the residual with the direction of one example's gradient, in standard errors."""
    tested_examples: int = 0
    """Number of examples whose directions were compared."""
    rounding_along: float = 0.0
    """Largest inner product of the residual with a direction that rounding alone explains."""

    @property
    def squares(self) -> float:
        """Sum of the squares of the residual over all parameters."""
        return sum(one.squares for one in self.parameters)

    @property
    def entries(self) -> int:
        """Number of entries of all parameters."""
        return sum(one.entries for one in self.parameters)

    @property
    def rounding(self) -> float:
        """Largest L2 norm of the whole residual that rounding alone explains."""
        return float(sum(one.rounding**2 for one in self.parameters) ** 0.5)

    @property
    def ratio(self) -> float:
        """Estimated standard deviation over all parameters, divided by the declared one."""
        return float((self.squares / self.entries) ** 0.5)


@dataclass(frozen=True)
class Sketch:
    """The first entries of a step's update and of the updates of its rules.

    Only parameters with declared noise are in it.
    """

    step: str
    rows: Mapping[str, Tensor]
    """Parameter name -> (1 + rules, n) float32, the observed update first, divided by sigma; n at most `SKETCH_ENTRIES`."""


def residuals(
    observed: Mapping[str, Tensor], expected: Mapping[str, Tensor], sigma: Mapping[str, float]
) -> dict[str, Tensor]:
    """Return the residual of every parameter with declared noise, flat, float32."""
    return {
        name: ((observed[name] - expected[name]).float() / sigma[name]).flatten()
        for name in expected
        if sigma.get(name, 0.0) > 0
    }


def noise_of(
    name: str, residual: Tensor, expected: Tensor, sigma: float, tolerance: float, products: Tensor
) -> ParameterNoise:
    """Return the sums of one parameter.

    Args:
        name: of the parameter.
        residual: (n,) of it.
        expected: its expected update.
        sigma: declared standard deviation.
        tolerance: largest error of the recomputation, as an L2 norm in the units of the update.
        products: (1 + rules, 1 + rules) float64, of the observed update and those of the rules, divided by sigma squared.
    """
    direction = expected.float().flatten()
    norm = float(direction.norm())
    size = residual.abs()
    return ParameterNoise(
        name=name,
        entries=residual.numel(),
        sigma=sigma,
        squares=sum(float(part.double() @ part.double()) for part in residual.split(_DOUBLE_ENTRIES)),
        rounding=tolerance / sigma,
        along=float(residual @ direction) / norm if norm else 0.0,
        near=int((size < NEAR_SIGMAS).sum()),
        far=int((size > FAR_SIGMAS).sum()),
        positive=int((residual > 0).sum()),
        seen=float(products[0, 0]),
        rules=tuple(
            (float(products[0, number]), float(products[number, number])) for number in range(1, len(products))
        ),
        sums=_sums(residual, expected.shape),
    )


def _sums(residual: Tensor, shape: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Return number and squared norm of the sums of rows and of columns."""
    rows = shape[0] if len(shape) > 1 else 1
    if rows == 1 or residual.numel() == rows:
        return ()
    matrix = residual.view(rows, -1)
    found = []
    for axis in (1, 0):
        added = matrix.sum(axis, dtype=torch.float64)
        found.append((len(added), float(added @ added) / matrix.shape[axis]))
    return tuple(found)


_DOUBLE_ENTRIES = 1 << 22
"""Entries of which a copy in float64 is made at a time. Our choice: 32 MB."""


def sketch_of(step: str, updates: Sequence[Mapping[str, Tensor]], sigma: Mapping[str, float]) -> Sketch:
    """Return the first entries of the observed update and of those of the rules."""
    rows = {
        name: torch.stack([update[name].flatten()[:SKETCH_ENTRIES].float() / level for update in updates]).cpu()
        for name, level in sigma.items()
        if level > 0
    }
    return Sketch(step, rows)


def products_of(updates: Sequence[Mapping[str, Tensor]], sigma: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the inner products of updates with each other, over sigma squared.

    Parameter name -> (n, n) float64 for n updates.
    """
    found = {}
    for name, level in sigma.items():
        if level > 0:
            rows = torch.stack([update[name].float().flatten() for update in updates])
            parts = rows.split(_DOUBLE_ENTRIES // len(updates) + 1, dim=1)
            found[name] = sum((part.double() @ part.double().T for part in parts), torch.zeros(())) / level**2
    return found
