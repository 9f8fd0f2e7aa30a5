"""Compares the measured steps of a run with what its accountant assumes.

The tests share one level (Bonferroni): a fifth of it for each of noise, clipping, distribution, independence and sampling. If the run does what it
declares, each p-value is exact or too large: rounding of the recomputation is allowed for. One approximation remains: directions that are added over steps are
taken for fixed, and a later step's direction depends a little on the noise of earlier ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from leakaudit.audit.conformance.causes import cause_of
from leakaudit.audit.conformance.draws import distribution, independence, repeated
from leakaudit.audit.conformance.measure import Measurement
from leakaudit.audit.conformance.measured import NO_NOISE, ParameterNoise, StepMeasured
from leakaudit.audit.conformance.signal import (
    AS_DECLARED,
    Signal,
    along_parameters,
    best_signal,
    directions,
    excess,
    in_words,
    unseen,
)
from leakaudit.results.conformance import ConformanceCheck
from leakaudit.results.wording import counted

DEFAULT_LEVEL = 0.01
"""Largest probability that the statistical tests contradict a correct run. Our choice."""

TEST_FAMILIES = 5
"""Kinds of statistical tests that share the level; the module names them."""

INTERVAL_CONFIDENCE = 0.95
"""Confidence of the intervals in the results. Our choice; no check is decided by them."""

MOST_NAMED = 4
"""Most parameters that a sentence names. Our choice."""


@dataclass(frozen=True)
class Pooled:
    """The noise of some parameters or steps together."""

    entries: int
    squares: float
    """Sum of the squared residuals, each divided by the declared standard deviation."""
    rounding: float
    """Largest L2 norm of the residual that rounding alone explains, in the same unit."""

    @property
    def ratio(self) -> float:
        """Measured standard deviation divided by the declared one."""
        return math.sqrt(self.squares / self.entries)

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the ratio."""
        tail = (1 - INTERVAL_CONFIDENCE) / 2
        above, below = stats.chi2.ppf(1 - tail, self.entries), stats.chi2.ppf(tail, self.entries)
        return math.sqrt(self.squares / above), math.sqrt(self.squares / below) if below else math.inf

    def p_value(self) -> float:
        """Return the two-sided p-value of a ratio of 1.

        Rounding may have made the norm larger or smaller; the p-value is the largest that this allows.
        """
        norm = math.sqrt(self.squares)
        most, least = (norm + self.rounding) ** 2, max(0.0, norm - self.rounding) ** 2
        return float(min(1.0, 2 * min(stats.chi2.cdf(most, self.entries), stats.chi2.sf(least, self.entries))))

    @property
    def error(self) -> float:
        """Relative error of the ratio: four standard errors, and rounding."""
        return 4 / math.sqrt(2 * self.entries) + self.rounding / math.sqrt(self.squares or 1.0)

    @classmethod
    def of(cls, parts: Iterable[ParameterNoise | StepMeasured | Pooled]) -> Pooled:
        """Add up the noise of parameters, of steps, or of both together."""
        found = list(parts)
        return cls(
            sum(one.entries for one in found),
            sum(one.squares for one in found),
            math.sqrt(sum(one.rounding**2 for one in found)),
        )


def judge(found: Sequence[Measurement], level: float = DEFAULT_LEVEL) -> tuple[ConformanceCheck, ...]:
    """Return the checks of each assumption of the accountant.

    Args:
        found: measured steps of one run, at least one.
        level: of all tests together.
    """
    share = level / TEST_FAMILIES
    sketches = [one.sketch for one in found]
    steps = [one.step for one in found]
    clipping = _clipping_of(steps, share)
    within = () if clipping.wrong else repeated(steps, share / 2)
    steps = _without(steps, {name for one in within for name in one.parameters})
    drawn = independence(sketches, [_under(step, clipping) for step in steps], share / 2, clipping.signal)
    apart = steps
    if drawn.outcome == "contradicted":  # equal draws are one sample
        apart = steps[:1]
        clipping = _clipping_of(apart, share)
        drawn = independence(sketches, [_under(step, clipping) for step in steps], share / 2, clipping.signal)
    declared, apart = apart, [_under(step, clipping) for step in apart]
    noise = list(_noise(apart, share, clipping.wrong and not clipping.signal.explains))
    wrong = any(one.outcome == "contradicted" for one in noise)
    return (
        *noise,
        *_clipping(declared, clipping),
        distribution(apart, share, level=not wrong, clipping=clipping.wrong),
        *within,
        drawn,
    )


def _without(steps: list[StepMeasured], names: set[str]) -> list[StepMeasured]:
    """Return the steps without some parameters, as long as others are left."""
    left = [tuple(one for one in step.parameters if one.name not in names) for step in steps]
    if not names or not all(left):
        return steps
    return [step.model_copy(update={"parameters": kept}) for step, kept in zip(steps, left, strict=True)]


def _under(step: StepMeasured, clipping: _Clipping) -> StepMeasured:
    """Return a step whose residuals are those under the rule that made its signal."""
    if not clipping.wrong:
        return step
    signal = clipping.signal
    number = signal.number(step)
    parts = [
        one.model_copy(
            update={
                "squares": one.squares_under(number, signal.factor),
                "rounding": one.rounding + signal.error * math.sqrt(one.rules[number][1]),
            }
        )
        for one in step.parameters
    ]
    return step.model_copy(update={"parameters": tuple(parts)})


# ------------------------------------------------------------------------------------------------------------ noise
def _noise(steps: Sequence[StepMeasured], share: float, unknown_signal: bool) -> Iterator[ConformanceCheck]:
    """Yield the checks of the noise level, by parameter and by step."""
    if unknown_signal:
        said = "The level of the noise is not tested, because the update below the noise is not known."
        yield ConformanceCheck(about="noise", outcome="not tested", sentence=said)
        return
    by_name = _by_parameter(steps)
    tests = len(by_name) + len(steps)
    wrong = {name: pool for name, pool in by_name.items() if pool.p_value() <= share / tests}
    wrong_steps = [step for step in steps if Pooled.of([step]).p_value() <= share / tests]
    whole = Pooled.of(steps)
    lower, upper = whole.interval()
    numbers: Any = {"expected": 1.0, "observed": whole.ratio, "lower": lower, "upper": upper, "tests": tests}
    if not wrong and not wrong_steps:
        yield ConformanceCheck(
            about="noise",
            outcome="not contradicted",
            sentence=f"The noise is {whole.ratio:.4f} times as large as declared, 95 % interval {lower:.4f} to {upper:.4f}.",
            **numbers,
        )
        yield _denominator(steps)
        return
    bare = {name: pool for name, pool in wrong.items() if pool.ratio < NO_NOISE}
    if bare:
        yield _about(
            bare,
            "No parameter carries noise." if len(bare) == len(by_name) else f"No noise is on {_named(bare)}.",
            tests,
        )
    others = {name: pool for name, pool in wrong.items() if name not in bare}
    rest = {name: pool for name, pool in by_name.items() if name not in bare}
    if others or (wrong_steps and not bare):
        yield from _wrong_level(steps, rest, others, tests)


def _wrong_level(
    steps: Sequence[StepMeasured], rest: dict[str, Pooled], wrong: dict[str, Pooled], tests: int
) -> Iterator[ConformanceCheck]:
    """Yield what is known of noise with another standard deviation."""
    if cause := _by_batch_size(steps, set(rest)):
        ratio = Pooled.of(rest.values()).ratio
        yield ConformanceCheck(
            about="denominator", outcome="contradicted", sentence=cause, observed=ratio, expected=1.0
        )
        return
    most = sum(pool.entries for pool in wrong.values()) > sum(pool.entries for pool in rest.values()) / 2
    bare = [step for step in steps if step.ratio < NO_NOISE]
    if bare and len(bare) < len(steps):
        noisy = Pooled.of(step for step in steps if step not in bare)
        said = f"No noise is on {counted(len(bare), 'step')} of {len(steps)}, such as {bare[0].step}"
        said += (
            ""
            if noisy.p_value() > _SAME_LEVEL
            else f"; that of the others is {noisy.ratio:.3g} times as large as declared"
        )
        yield _about(rest, f"{said}.", tests, Pooled.of(bare))
        return
    if most or not wrong:
        pool = Pooled.of(rest.values())
        yield _about(rest, _level_in_words("The noise", pool, steps, rest), tests, pool)
        return
    groups: dict[float, dict[str, Pooled]] = {}
    for name, one in sorted(wrong.items(), key=lambda item: -item[1].entries):
        like = next((ratio for ratio in groups if abs(one.ratio / ratio - 1) <= one.error + _SAME_RATIO), None)
        groups.setdefault(one.ratio if like is None else like, {})[name] = one
    for group in groups.values():
        pool = Pooled.of(group.values())
        yield _about(group, _level_in_words(f"The noise of {_named(group)}", pool, steps, group), tests, pool)


def _level_in_words(whose: str, pool: Pooled, steps: Sequence[StepMeasured], group: dict[str, Pooled]) -> str:
    cause = cause_of(pool.ratio, pool.error, steps) if pool.error <= _CLEAR_RATIO_ERROR else ""
    said = f"{whose} is {pool.ratio:.3g} times as large as declared"
    certain = [one.ratio for one in group.values() if one.error <= _CLEAR_RATIO_ERROR]
    if certain and max(certain) > (1 + 2 * _CLEAR_RATIO_ERROR) * min(certain):
        said += f", {min(certain):.3g} to {max(certain):.3g} times by parameter"
    return f"{said}: {cause}." if cause else f"{said}; no usual mistake explains the factor."


_SAME_LEVEL = 1e-4
"""P-value above which the noise of the other steps is said to have the declared level. Our choice; it decides only this clause."""

_SAME_RATIO = 0.01
"""Relative difference of two ratios that are named together, besides their errors. Our choice."""

_CLEAR_RATIO_ERROR = 0.05
"""Largest relative error of a ratio for which a cause is looked for. Our choice: several mistakes explain a ratio that is less exact."""


def _by_batch_size(steps: Sequence[StepMeasured], names: set[str]) -> str:
    """Return the sentence that each step is divided by its real batch size.

    Empty if the noise does not fit this.
    """
    if not _of_another_size(steps):
        return ""
    for step in steps:
        pool = Pooled.of(one for one in step.parameters if one.name in names)
        per = (step.expected_examples or 1) / step.examples
        if abs(pool.ratio / per - 1) > pool.error:
            return ""
    return (
        "The sum is divided by the real number of examples of each batch and not by the expected one, which reveals that number and "
        "changes how far one example can move the update (arXiv 2605.15648)."
    )


def _of_another_size(steps: Sequence[StepMeasured]) -> list[StepMeasured]:
    """Return the steps whose batch has another size than the expected one."""
    return [s for s in steps if s.expected_examples and not math.isclose(s.examples, s.expected_examples)]


def _denominator(steps: Sequence[StepMeasured]) -> ConformanceCheck:
    """Return what an unchanged noise level says of the divisor."""
    differ = _of_another_size(steps)
    if not differ:
        return ConformanceCheck(
            about="denominator",
            outcome="not tested",
            sentence="Every measured batch had the expected size, so a division by the real size could not be seen.",
        )
    return ConformanceCheck(
        about="denominator",
        outcome="not contradicted",
        sentence=f"The noise fits a division by the expected batch size, also in {counted(len(differ), 'step')} with another size.",
    )


def _by_parameter(steps: Sequence[StepMeasured]) -> dict[str, Pooled]:
    parts: dict[str, list[ParameterNoise]] = defaultdict(list)
    for step in steps:
        for one in step.parameters:
            parts[one.name].append(one)
    return {name: Pooled.of(found) for name, found in parts.items()}


def _about(group: dict[str, Pooled], sentence: str, tests: int, pool: Pooled | None = None) -> ConformanceCheck:
    pool = pool or Pooled.of(group.values())
    lower, upper = pool.interval()
    return ConformanceCheck(
        about="noise",
        outcome="contradicted",
        sentence=sentence,
        parameters=tuple(group),
        expected=1.0,
        observed=pool.ratio,
        lower=lower,
        upper=upper,
        tests=tests,
    )


def _named(group: dict[str, Pooled]) -> str:
    names = list(group)
    shown = ", ".join(names[:MOST_NAMED])
    return f"{shown} and {len(names) - MOST_NAMED} more parameters" if len(names) > MOST_NAMED else shown


# --------------------------------------------------------------------------------------------------------- clipping
@dataclass(frozen=True)
class _Clipping:
    """What the signal below the noise shows."""

    signal: Signal
    """The rule that made it; the declared one if nothing contradicts it."""
    far: float
    """Largest distance from the declared one, in standard errors."""
    tests: int
    wrong: bool
    hidden: tuple[str, ...] = ()
    """Other rules that these steps cannot tell from the declared one."""


def _clipping_of(steps: Sequence[StepMeasured], share: float) -> _Clipping:
    along = [*directions(steps), *along_parameters(steps)]
    tests = len(along) + sum(step.tested_examples for step in steps)
    limit = float(stats.norm.isf(share / max(1, tests) / 2))
    level = excess(steps)
    far = max([*along, *((s.largest_along_example - s.rounding_along) / level for s in steps)], default=0.0)
    wrong = far > limit
    signal = best_signal(steps, limit) if wrong else AS_DECLARED
    return _Clipping(signal, far, tests, wrong, () if wrong else tuple(unseen(steps, limit)))


def _clipping(steps: Sequence[StepMeasured], found: _Clipping) -> Iterator[ConformanceCheck]:
    """Yield the checks of the signal below the noise and of its sensitivity."""
    if not found.wrong:
        said = (
            f"The update below the noise does not contradict the declared clipping: at most {found.far:.1f} standard errors from it in "
            f"{counted(found.tests, 'direction')}."
        )
        if found.hidden:
            said += f" The noise hides whether the gradients are clipped in another way: {', '.join(found.hidden)}."
        yield ConformanceCheck(about="clipping", outcome="not contradicted", sentence=said, tests=found.tests)
    else:
        yield ConformanceCheck(
            about="clipping",
            outcome="contradicted",
            sentence=in_words(found.signal, steps, found.far),
            expected=0.0,
            observed=found.far,
            tests=found.tests,
        )
    changes = [
        rule.sensitivity * abs(found.signal.factor)
        for step in steps
        for rule in step.rules
        if rule.name == found.signal.rule and rule.sensitivity
    ]
    if not changes or not found.signal.explains:
        return
    over = max(changes) > 1 + _BOUND_TOLERANCE
    if found.signal.factor != 1 and not over:
        return  # a fitted factor may have another cause than another bound
    said = (
        f"One example of the measured batches can change the sum by {max(changes):.3g} times the bound, where the accountant assumes 1."
        if over
        else f"Leaving out one example of the measured batches changes the sum by at most {max(changes):.3g} times the bound."
    )
    yield ConformanceCheck(
        about="sensitivity",
        outcome="contradicted" if over else "not contradicted",
        sentence=said,
        expected=1.0,
        observed=max(changes),
    )


_BOUND_TOLERANCE = 1e-3
"""Share of the bound by which rounding may exceed it. Our choice."""
