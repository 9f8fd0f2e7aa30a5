"""What a defence costs the model, as measured by trainings with and without it.

A difference counts only if all trainings under the defence ended with a finite loss: the mean of the others would hide those that diverged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from leakaudit.results.schema import Results, Utility
from leakaudit.results.wording import counted

UTILITY_OF = "utility under "
"""How an entry of `Coverage.not_tested` begins that says why the utility of a defence was not measured; the label of the defence follows."""


@dataclass(frozen=True)
class Loss:
    """How much worse a model is after training under a defence, in one metric."""

    utility: Utility
    difference: float
    """Value under the defence minus value without it, in the metric's own units."""
    points: bool
    """Whether words give the metric in points, which are hundredths of its unit."""

    @property
    def lost(self) -> float:
        """How much worse the model is, in the metric's units; negative if better."""
        return -self.difference if self.utility.higher_is_better else self.difference

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of `lost`; None if there were too few seeds for one."""
        lower, upper = self.utility.lower, self.utility.upper
        if lower is None or upper is None:
            return None
        return (-upper, -lower) if self.utility.higher_is_better else (lower, upper)

    @property
    def unit(self) -> float:
        """The size of a point, or 1 if words give the metric in its own units."""
        return 0.01 if self.points else 1.0

    @property
    def words(self) -> str:
        """The difference with its interval: `accuracy -0.3 points [-0.9, +0.2]`."""
        ends = (self.utility.lower, self.utility.upper)
        numbers = [end / self.unit for end in (self.difference, *ends) if end is not None]
        within = [] if self.interval is None else [f"[{', '.join(signed(end, numbers) for end in numbers[1:])}]"]
        points = ["points"] if self.points else []
        return " ".join([self.utility.metric, signed(numbers[0], numbers), *points, *within])


def losses(results: Results) -> dict[str, Loss]:
    """Return what each defence costs, by the label of the defence.

    All are in one metric, because costs in different metrics cannot be compared: the one in which most defences were measured, and of
    several such the first. A defence without a usable difference is absent.
    """
    metric = main_metric(results)
    mine = [u for u in results.utility if u.metric == metric]
    points = all(u.higher_is_better and abs(u.value) <= 1 and abs(u.baseline or 0.0) <= 1 for u in mine)
    found: dict[str, Loss] = {}
    for utility in mine:
        if _usable(utility) and (difference := _difference(utility)) is not None:
            found.setdefault(utility.defense, Loss(utility, difference, points))
    return found


def main_metric(results: Results) -> str | None:
    """Return the metric in which defences are compared; None without a difference."""
    counts = Counter(u.metric for u in results.utility if _usable(u))
    return max(counts, key=counts.__getitem__, default=None)


def why_unknown(results: Results, defense: str) -> str:
    """Return why `losses` has no number for a defence, as a clause."""
    mine = [u for u in results.utility if u.defense == defense]
    if not mine:
        said = (one.why for one in results.coverage.not_tested if one.what == f"{UTILITY_OF}{defense}")
        return next(said, "its utility was not measured").rstrip(".")
    if worst := max(u.diverged for u in mine):
        return f"{counted(worst, 'training')} under it diverged"
    if not any(_usable(u) for u in mine):
        return "there is no training without the defence to compare with"
    return f"its utility was measured in {', '.join(dict.fromkeys(u.metric for u in mine))} only"


def signed(value: float, beside: Sequence[float] = ()) -> str:
    """Return a difference with its sign.

    It has as many digits as the largest number beside it needs.

    >>> signed(-0.3), signed(0.002, [0.017]), signed(0.0), signed(1234.5)
    ('-0.3', '+0.002', '0.0', '+1,234')
    """
    largest = max(abs(number) for number in (value, *beside))
    digits = 0 if largest >= 1000 else 1
    while 0 < largest < 2 * 10**-digits and digits < 6:
        digits += 1
    text = f"{value:+,.{digits}f}"
    return text if any(digit in text for digit in "123456789") else f"{0:.{digits}f}"


def _usable(utility: Utility) -> bool:
    return utility.defense != "none" and not utility.diverged and _difference(utility) is not None


def _difference(utility: Utility) -> float | None:
    """Return the paired difference, or that of the means if nothing was paired."""
    if utility.difference is not None or utility.baseline is None:
        return utility.difference
    return utility.value - utility.baseline
