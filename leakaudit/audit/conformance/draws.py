"""Whether the noise is Gaussian, and whether two draws of it are independent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from scipy import stats

from leakaudit.audit.conformance.measured import FAR_SIGMAS, NEAR_SIGMAS, NO_NOISE, Sketch, StepMeasured
from leakaudit.audit.conformance.signal import Signal
from leakaudit.results.conformance import ConformanceCheck
from leakaudit.results.wording import counted

FEWEST_COMPARED = 64
"""Fewest entries of two parameters that are compared. Our choice."""

FREQUENCY_TOLERANCE = 0.05
"""Smallest relative difference from the expected frequency that is reported if the standard deviation was estimated. Our choice."""


def distribution(steps: Sequence[StepMeasured], share: float, *, level: bool, clipping: bool) -> ConformanceCheck:
    """Compare the frequencies of entries with those of a normal distribution.

    Args:
        steps: the measured steps.
        share: level of these tests.
        level: whether the noise has the declared standard deviation. If not, the measured one is taken.
        clipping: whether the clipping is contradicted; nothing is tested then.
    """
    parts = [part for step in steps for part in step.parameters if level or part.ratio > NO_NOISE]
    n = sum(part.entries for part in parts)
    if clipping or not n:
        why = "what the signal is" if clipping else "where there is noise"
        return ConformanceCheck(
            about="distribution",
            outcome="not tested",
            sentence=f"The shape of the noise is not tested, because it is not known {why}.",
        )
    sizes = [1.0 if level else part.ratio for part in parts]
    bounds = (
        (
            f"within {NEAR_SIGMAS:g} sigma of zero",
            [part.near for part in parts],
            [1 - 2 * stats.norm.sf(NEAR_SIGMAS / one) for one in sizes],
        ),
        (
            f"beyond {FAR_SIGMAS:g} sigma",
            [part.far for part in parts],
            [2 * stats.norm.sf(FAR_SIGMAS / one) for one in sizes],
        ),
        ("above zero", [part.positive for part in parts], [0.5 for _ in sizes]),
    )
    wrong = []
    for what, seen, chances in bounds:
        k, p = sum(seen), sum(part.entries * float(chance) for part, chance in zip(parts, chances, strict=True)) / n
        tail = 2 * min(float(stats.binom.cdf(k, n, p)), float(stats.binom.sf(k - 1, n, p)))
        if tail <= (share / len(bounds) if level else _ESTIMATED_LEVEL) and (
            level or abs(k / (n * p) - 1) > FREQUENCY_TOLERANCE
        ):
            wrong.append((what, k, p))
    if not wrong:
        return ConformanceCheck(
            about="distribution",
            outcome="not contradicted",
            sentence=f"The tails, the middle and the signs of {n:,} entries do not contradict a normal distribution.",
            tests=len(bounds),
        )
    said = "; ".join(
        f"{k / n:.3%} of the entries are {what}, where a normal distribution has {p:.3%}" for what, k, p in wrong
    )
    rounded = wrong[0][0] == bounds[0][0] and wrong[0][1] > _ROUNDED * wrong[0][2] * n
    hint = ". Small draws may have been rounded to zero, as in float16" if rounded else ""
    return ConformanceCheck(
        about="distribution",
        outcome="contradicted",
        sentence=f"The noise is not Gaussian: {said}{hint}.",
        tests=len(bounds),
    )


_ROUNDED = 5.0
"""Times as many entries near zero from which on rounding to zero is named. Our choice: a Laplace distribution has 1.8 times as many, and noise
whose standard deviation is the smallest number of its type has 20 times as many."""

_ESTIMATED_LEVEL = 1e-6
"""Level of the same tests where the standard deviation was estimated; they neglect its error. Our choice."""


def independence(
    sketches: Sequence[Sketch], steps: Sequence[StepMeasured], share: float, signal: Signal
) -> ConformanceCheck:
    """Return whether two draws of noise are correlated.

    A draw is the first entries of one parameter in one step. Every pair of draws is tested, with Bonferroni's correction.
    """
    by_id = {step.step: step for step in steps}
    noisy = {(s.step, p.name) for s in steps for p in s.parameters if p.ratio > NO_NOISE}
    rows = [
        (sketch.step, name, row[0] - signal.factor * row[1 + signal.number(by_id[sketch.step])])
        for sketch in sketches
        for name, row in sketch.rows.items()
        if row.shape[1] >= FEWEST_COMPARED and (sketch.step, name) in noisy
    ]
    tests = len(rows) * (len(rows) - 1) // 2
    if not tests or not signal.explains:
        return ConformanceCheck(
            about="independence", outcome="not tested", sentence="There are too few entries that are known to be noise."
        )
    width = max(len(row) for *_, row in rows)
    matrix = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for *_, row in rows]).double()
    present = torch.stack([torch.arange(width) < len(row) for *_, row in rows]).double()
    both = present @ present.T
    squares = (matrix**2) @ present.T
    cosine = (matrix @ matrix.T) / (squares * squares.T).clamp(min=1e-30).sqrt()
    upper = torch.triu(torch.ones_like(cosine, dtype=torch.bool), 1)
    which = [(int(a), int(b)) for a, b in (upper & (cosine.abs() > _SUSPECT_CORRELATION)).nonzero().tolist()]
    zeros = [_share_of_zeros(row) for *_, row in rows]
    same = [
        (a, b)
        for a, b in which
        if _p_of_cosine(float(cosine[a, b]), int(both[a, b])) <= share / tests
        and max(zeros[a], zeros[b]) < _SPARSE_SHARE
    ]
    if not same:
        return ConformanceCheck(
            about="independence",
            outcome="not contradicted",
            sentence=f"No two of {counted(len(rows), 'draw')} of noise (one for each parameter and step) are significantly correlated.",
            tests=tests,
        )
    across = [(a, b) for a, b in same if rows[a][0] != rows[b][0]]
    kind = "steps" if across else "parameters of one step"
    a, b = max(across or same, key=lambda pair: abs(float(cosine[pair])))
    one, other = (rows[a][0], rows[b][0]) if across else (rows[a][1], rows[b][1])
    correlation = float(cosine[a, b])
    if correlation > _EQUAL:
        said = f"Different {kind} have the same noise: {one} and {other}, correlation {correlation:.3f}, as if the random generator had started from the same seed."
    else:
        said = f"The noise of different {kind} is not independent: {one} and {other}, correlation {correlation:.3f}."
    return ConformanceCheck(
        about="independence",
        outcome="contradicted",
        sentence=said,
        parameters=tuple(dict.fromkeys(rows[n][1] for pair in same for n in pair)),
        observed=float(cosine[a, b]),
        expected=0.0,
        tests=tests,
    )


def repeated(steps: Sequence[StepMeasured], share: float) -> tuple[ConformanceCheck, ...]:
    """Return a finding if the noise of a matrix repeats in its rows or in its columns.

    The share of the sums of rows or columns in the squared norm has a beta distribution where the entries are independent normal draws of one
    level; the test is exact at any level.

    Args:
        steps: the measured steps, whose signal is the declared one.
        share: level of these tests.
    """
    named: list[str] = []
    parts = [(one, axis) for step in steps for one in step.parameters for axis in range(len(one.sums))]
    for one, axis in parts:
        number, squares = one.sums[axis]
        most = max(0.0, math.sqrt(squares) - one.rounding) ** 2 / max(one.squares, 1e-300)
        if one.ratio > NO_NOISE:
            p = float(stats.beta.sf(min(1.0, most), number / 2, (one.entries - number) / 2))
            if p <= share / len(parts):
                named.append(one.name)
    if not named:
        return ()
    name, *others = names = tuple(dict.fromkeys(named))
    more = f" and within {counted(len(others), 'more parameter')}" if others else ""
    said = f"The noise within {name}{more} is not independent, as if one draw were used for several entries of a row or column."
    return (
        ConformanceCheck(
            about="independence", outcome="contradicted", sentence=said, parameters=names, tests=len(parts)
        ),
    )


def _share_of_zeros(row: torch.Tensor) -> float:
    return float((row.abs() < NEAR_SIGMAS).double().mean())


_EQUAL = 0.9
"""Correlation above which two draws are called the same. Our choice: rounding and a small error of the signal leave more."""

_SPARSE_SHARE = 0.5
"""Share of entries near zero from which on a draw is not compared, because the test assumes a normal distribution. Our choice."""

_SUSPECT_CORRELATION = 0.1
"""Least correlation for which a p-value is computed, to save time. Our choice: 256 entries or fewer (`SKETCH_ENTRIES`) then have a p-value above 0.1,
which is above the level of a pair unless the run's level is above 0.5."""


def _p_of_cosine(cosine: float, n: int) -> float:
    """Return the two-sided p-value of the cosine of two normal vectors.

    It is exact for two independent vectors of n normal entries with mean 0: Student's t with n - 1 degrees of freedom.
    """
    t = cosine * math.sqrt((n - 1) / max(1e-300, 1 - cosine**2))
    return float(2 * stats.t.sf(abs(t), n - 1))
