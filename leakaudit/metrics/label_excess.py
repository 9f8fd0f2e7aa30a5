"""`label_excess`: label accuracy beyond that of random guesses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import LabelCounts, Level, label_success_rate, metric


@metric("label_excess")
@dataclass(frozen=True)
class LabelExcess:
    """(R - E) / (1 - E), with R the label accuracy and E that of random guesses.

    E is the mean accuracy on this batch if each label is drawn with equal probability from all classes. E can be high: in large batches
    with equally frequent classes, random guesses get most labels right (LLG, Sec. 6.1, Baselines). A guess that is no better than E
    scores 0, a perfect guess 1.
    """

    label: ClassVar[str] = "labels above chance"
    meaning: ClassVar[str] = "How far label accuracy lies above that of random labels: 0 is chance, 1 is all labels."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "step"
    source: ClassVar[str] = "ours, on the random guess of LLG (Wainakh et al. 2022, Sec. 6.1)"

    def __call__(self, counts: LabelCounts) -> float | None:
        """Return the excess; None without labels, or if there is only one class."""
        rate = label_success_rate(counts)
        if rate is None:
            return None
        expected = chance(counts.true)
        if expected >= 1.0:
            return None
        return max(0.0, (rate - expected) / (1.0 - expected))


def chance(true: tuple[int, ...]) -> float:
    """Return the mean label accuracy of random labels, all classes equally likely.

    The number X of random labels of one class is Binomial(B, 1 / C), and the mean of min(n, X) is the sum of P(X >= k) over k from 1 to n.

    Args:
        true: (C,) class counts, not all 0.

    >>> round(chance((1, 1)), 6)
    0.75
    """
    size, share = sum(true), 1 / len(true)
    if len(true) == 1:
        return 1.0
    mass = [
        math.exp(
            math.lgamma(size + 1)
            - math.lgamma(k + 1)
            - math.lgamma(size - k + 1)
            + k * math.log(share)
            + (size - k) * math.log1p(-share)
        )
        for k in range(size + 1)
    ]
    beyond = [sum(mass[k:]) for k in range(size + 1)]  # P(X >= k)
    return sum(sum(beyond[1 : count + 1]) for count in true) / size
