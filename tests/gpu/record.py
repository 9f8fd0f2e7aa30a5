"""Where tests on a GPU compute, and what they measured.

`LEAKAUDIT_GPU_TESTS_DEVICE=cpu` runs them on a CPU, which tries their logic out; `LEAKAUDIT_GPU_TESTS_STEPS` sets the number of steps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

DEVICE = os.environ.get("LEAKAUDIT_GPU_TESTS_DEVICE", "cuda")
STEPS = int(os.environ.get("LEAKAUDIT_GPU_TESTS_STEPS", "50"))
SEED = 0


@dataclass(frozen=True)
class FamilyRow:
    """What came of the steps of one family in one precision."""

    family: str
    precision: str
    n: int
    """Kept steps; each is compared with what its optimizer got."""
    verified: tuple[int, int]
    """Verified steps on the device, and on the CPU."""
    error: tuple[float, float]
    """Largest relative error of a recomputed update on the device, and on the CPU."""
    texts: int
    """Texts of the attacked steps; 0 if no attack on texts applies."""
    found: tuple[int, int]
    """Recovered texts of the attacks on the device, and on the CPU."""
    seconds: tuple[float, float]
    """Median seconds of an attack on the device, and on the CPU."""


@dataclass
class Measured:
    """What the tests of one run measured."""

    families: list[FamilyRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


MEASURED = Measured()
