"""The declared noise of an update, for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class NoiseLevel:
    """Standard deviation of the declared noise on the entries of each parameter.

    A defence may add noise to some parameters only. An attack asks for the level of the entries that it reads.
    """

    by_parameter: Mapping[str, float]
    """Parameter name -> standard deviation, in the units of the update; 0 without noise."""

    def of(self, *parameters: str | None) -> float:
        """Return the largest level of some parameters, 0 without noise.

        Args:
            parameters: names. None, and a name for which nothing was sent, count as no noise.
        """
        return max((self.by_parameter.get(name, 0.0) for name in parameters if name is not None), default=0.0)

    @property
    def largest(self) -> float:
        """The largest level of all parameters."""
        return max(self.by_parameter.values(), default=0.0)

    @property
    def is_even(self) -> bool:
        """Whether all parameters have the same level."""
        return len(set(self.by_parameter.values())) <= 1
