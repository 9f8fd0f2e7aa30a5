"""What the updates of a run say of the assumptions of its accountant.

A check without a finding does not confirm an epsilon: it says that a statistical test of a stated level found no contradiction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from leakaudit.results.wording import counted

Outcome = Literal["not contradicted", "contradicted", "not tested"]
"""What a check found. It never confirms."""

Subject = Literal[
    "noise", "clipping", "denominator", "distribution", "independence", "sampling", "composition", "sensitivity"
]
"""What a check is about."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class ConformanceCheck(_Model):
    """One assumption of the accountant, and what the kept steps say of it."""

    about: Subject
    """The assumption."""
    outcome: Outcome
    """What was found; nothing is ever confirmed."""
    sentence: str
    """What was found, with the cause where one is known."""
    parameters: tuple[str, ...] = ()
    """Parameters that the finding is about; empty for all."""
    expected: FiniteFloat | None = None
    """The number that the mechanism declares, such as 1 for measured over declared standard deviation of the noise."""
    observed: FiniteFloat | None = None
    """The same number, measured from the updates."""
    lower: FiniteFloat | None = None
    """Lower end of its 95 % interval; None without one."""
    upper: FiniteFloat | None = None
    """Upper end of that interval."""
    tests: Annotated[int, Field(ge=0)] = 0
    """Number of statistical tests of this check."""


class Conformance(_Model):
    """The comparison of a run's updates with its declared mechanism."""

    mechanism: str
    """The declared defences, with their numbers."""
    steps: tuple[str, ...]
    """Ids of the steps that were measured."""
    level: Annotated[FiniteFloat, Field(gt=0.0, lt=1.0)]
    """Largest probability that any of the statistical tests contradicts a run that does what it declares."""
    checks: tuple[ConformanceCheck, ...]
    """One entry or more for each assumption."""
    left_out: tuple[str, ...] = ()
    """Why other kept steps were not measured, each as a clause."""

    @property
    def contradicted(self) -> tuple[ConformanceCheck, ...]:
        """The checks that found a contradiction."""
        return tuple(one for one in self.checks if one.outcome == "contradicted")


CONTRADICTED = "This run does not implement what its accountant assumes"
"""How a sentence on a contradiction begins."""


def in_words(found: Conformance) -> str:
    """Return the whole comparison in a sentence or two."""
    if found.contradicted:
        said = " ".join(one.sentence for one in found.contradicted)
        return f"{CONTRADICTED}: {said} A correct run is contradicted with a probability of at most {found.level:.2g}."
    tested = [one.about for one in found.checks if one.outcome == "not contradicted"]
    if not tested:
        return "Nothing was tested of what the accountant assumes."
    return f"Not contradicted by {counted(len(found.steps), 'measured step')} ({', '.join(dict.fromkeys(tested))}); this does not confirm an epsilon."


def joined(found: Iterable[Conformance | None]) -> Conformance | None:
    """Return the conformance of several runs together; None if none has one.

    It has every check of every run, so what one run contradicts stays contradicted. Their levels add up.
    """
    each = [one for one in found if one is not None]
    if not each:
        return None
    return Conformance(
        mechanism=" or ".join(dict.fromkeys(one.mechanism for one in each)),
        steps=tuple(step for one in each for step in one.steps),
        level=min(_MOST_LEVEL, sum(one.level for one in each)),
        checks=tuple(dict.fromkeys(check for one in each for check in one.checks)),
        left_out=tuple(dict.fromkeys(why for one in each for why in one.left_out)),
    )


_MOST_LEVEL = 0.99
"""Largest level that several runs together are said to have, because a level is below 1."""
