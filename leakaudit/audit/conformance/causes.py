"""Usual mistakes that explain noise of a wrong standard deviation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from leakaudit.audit.conformance.measured import StepMeasured

MOST_CAUSES = 2
"""Most mistakes that a sentence names. Our choice."""


@dataclass(frozen=True)
class Cause:
    """A mistake that gives the noise another standard deviation."""

    ratio: float
    """Standard deviation after the mistake, divided by the declared one."""
    words: str
    """What may have happened, as a clause."""


def cause_of(ratio: float, error: float, steps: Sequence[StepMeasured]) -> str:
    """Return the mistakes that explain a ratio, joined by `; or`; empty if none does.

    Args:
        ratio: measured standard deviation divided by the declared one.
        error: relative error of the ratio within which a mistake fits.
        steps: the measured steps.
    """
    found = [cause.words for cause in _causes(steps[0]) if abs(cause.ratio / ratio - 1) <= error]
    return "; or ".join(list(dict.fromkeys(found))[:MOST_CAUSES])


def _causes(step: StepMeasured) -> Iterator[Cause]:
    """Yield the mistakes that the numbers of a step make possible."""
    kinds = (
        (step.processes, "process", "processes"),
        (step.passes, "micro-batch", "micro-batches"),
        (step.expected_examples or 1, "example", "examples"),
    )
    for number, one, many in kinds:
        if number > 1:
            yield Cause(
                math.sqrt(number),
                f"each {one} adds all of the noise, or {number:g} {many} draw the same numbers for their share",
            )
            yield Cause(
                1 / math.sqrt(number),
                f"each {one} adds 1/{number:g} of the noise, drawn by itself, so that the sum has too little",
            )
            yield Cause(1 / number, f"the noise is divided by the number of {many} ({number:g}) once too often")
            yield Cause(number, f"the noise is not divided by the number of {many} ({number:g})")
    if step.bound and step.bound != 1:
        yield Cause(1 / step.bound, "the noise is not multiplied by the clipping bound")
        yield Cause(step.bound, "the noise is multiplied by the clipping bound twice")
