"""Checks what an accountant assumes besides the noise: sampling and steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scipy import stats

from leakaudit.audit.accounting import Epsilon, least_epsilon
from leakaudit.audit.conformance.measured import StepMeasured
from leakaudit.results.conformance import ConformanceCheck
from leakaudit.results.schema import Privacy
from leakaudit.results.wording import counted

ROUNDED_CLAIM = 0.99
"""Share of the least possible epsilon below which a claim is contradicted. Our choice: a claim may have been rounded down."""


def sampling(steps: Sequence[StepMeasured], stated: Sequence[Privacy], share: float) -> ConformanceCheck:
    """Return whether the batches are Poisson samples, as accountants of DP-SGD assume.

    The sizes of Poisson samples are binomial. The p-value is the probability that all of them are as near to the expected size as the measured ones or
    nearer. It is exact if the statement's sampling rate is. A small one shows that the sizes vary too little, as those of shuffled batches do; it does not show how
    the batches were drawn.

    Args:
        steps: the measured steps.
        stated: what is stated on the run's epsilon.
        share: level of the test.
    """
    known = next((one for one in stated if one.sampling != "unknown" and one.origin == "accountant"), None)
    known = known or next((one for one in stated if one.sampling != "unknown"), None)
    counted_on = any(
        one.epsilon is not None and one.sampling_rate is not None and one.sampling_rate < 1 for one in stated
    )
    if known is not None and known.sampling == "shuffled" and counted_on:
        return ConformanceCheck(
            about="sampling",
            outcome="contradicted",
            sentence="The run shuffles its batches, and the accountant assumes Poisson samples.",
        )
    rate = next((one.sampling_rate for one in stated if one.sampling_rate), None)
    sizes = [(step.examples, step.expected_examples) for step in steps if step.expected_examples]
    if rate is None or rate >= 1 or not sizes:
        why = "the sampling rate is not known" if rate is None else "every step draws all examples"
        return ConformanceCheck(about="sampling", outcome="not tested", sentence=f"Sampling is not tested: {why}.")
    mean = float(sizes[0][1] or 0)
    examples = round(mean / rate)
    far = max(abs(size - mean) for size, _ in sizes)
    draws = stats.binom(examples, rate)
    near = float(draws.cdf(int(mean + far)) - draws.cdf(_below(mean - far)))
    chance = near ** len(sizes)
    if chance <= share:
        return ConformanceCheck(
            about="sampling",
            outcome="contradicted",
            sentence=(
                f"All {len(sizes)} measured batches have {mean - far:g} to {mean + far:g} examples, which Poisson samples of {examples:,} examples at "
                f"a rate of {rate:g} have with a probability of {chance:.2g}. Sizes of shuffled batches vary so little; the accountant assumes Poisson samples."
                if far
                else f"All {len(sizes)} measured batches have {mean:g} examples, which Poisson samples of {examples:,} examples at a rate of {rate:g} have "
                f"with a probability of {chance:.2g}. Shuffled batches have one size; the accountant assumes Poisson samples."
            ),
            tests=1,
        )
    return ConformanceCheck(
        about="sampling",
        outcome="not contradicted",
        sentence=f"The sizes of {counted(len(sizes), 'batch', 'batches')} do not contradict Poisson samples (p-value {chance:.2g}).",
        tests=1,
    )


def _below(number: float) -> int:
    """Return the largest integer below a number."""
    whole = int(number) if number >= 0 else int(number) - 1
    return whole - 1 if whole == number or whole > number else whole


def composition(
    stated: Sequence[Privacy],
    taken: int | None,
    noise_multiplier: float | None,
    message_multiplier: float | None = None,
) -> Iterator[ConformanceCheck]:
    """Yield whether the stated epsilons fit the steps and the noise of the run.

    The least epsilon is that of Poisson-sampled Gaussian steps whose updates are all seen, for data sets that differ by one example more or less. An epsilon
    of the last model only, or of another way to sample, may be smaller.

    Args:
        stated: what is stated on the run's epsilon.
        taken: optimizer steps of the run; None if they are not known.
        noise_multiplier: that of the declared mechanism; None without one.
        message_multiplier: standard deviation of the noise divided by the bound of one message; None without one.
    """
    numbers = [one for one in stated if one.epsilon is not None]
    for one in numbers:
        yield _composed(one, taken, noise_multiplier) if one.covers == "run" else _of_message(one, message_multiplier)
    if not numbers:
        yield _untested("Nobody states an epsilon, so there is no number to compare.")


def _of_message(one: Privacy, multiplier: float | None) -> ConformanceCheck:
    """Compare the epsilon of one message with the least one that its noise allows."""
    claim = one.epsilon or 0.0
    again = f"The epsilon of {claim:.3g} for one message is not computed again"
    if not multiplier or not one.delta:
        return _untested(f"{again}: the bound and the noise of a message are not declared.")
    least = least_epsilon(multiplier, 1.0, 1, one.delta)
    what = f"one message with noise of {multiplier:g} times the bound"
    return _compared(
        claim,
        least,
        again,
        f"The claim of epsilon = {claim:.3g} for one message is too small: {what} cannot have less than",
        one.delta,
        f"An epsilon of {claim:.3g} is possible for {what} ({least.accountant}). The epsilons of several messages are not added up.",
    )


def _composed(one: Privacy, taken: int | None, noise_multiplier: float | None) -> ConformanceCheck:
    whose = "The accountant" if one.origin == "accountant" else "The owner of the run"
    claim = one.epsilon or 0.0
    if taken is not None and one.steps is not None and one.steps < taken:
        return ConformanceCheck(
            about="composition",
            outcome="contradicted",
            sentence=f"{whose} says epsilon = {claim:.3g} for {counted(one.steps, 'step')}, and the run took {taken:,}.",
            expected=float(one.steps),
            observed=float(taken),
        )
    noise, steps = one.noise_multiplier or noise_multiplier, taken or one.steps
    if (
        noise_multiplier is not None
        and one.noise_multiplier
        and one.noise_multiplier > noise_multiplier * (1 + _SAME_MULTIPLIER)
    ):
        return ConformanceCheck(
            about="composition",
            outcome="contradicted",
            sentence=(
                f"{whose} assumes a noise multiplier of {one.noise_multiplier:g}, and the run declares {noise_multiplier:g}."
            ),
            expected=one.noise_multiplier,
            observed=noise_multiplier,
        )
    if not noise or not one.sampling_rate or not steps or not one.delta:
        return _untested(
            f"The epsilon of {claim:.3g} cannot be computed again: the noise multiplier, the sampling rate, the number of steps and delta have "
            "to be known."
        )
    least = least_epsilon(float(noise), float(one.sampling_rate), int(steps), float(one.delta))
    what = counted(int(steps), "step")
    return _compared(
        claim,
        least,
        f"The epsilon of {claim:.3g} is not computed again",
        f"{whose} says epsilon = {claim:.3g}, but {what} with noise multiplier {noise:g} and Poisson samples at a rate of "
        f"{one.sampling_rate:g} cannot have less than",
        one.delta,
        f"An epsilon of {claim:.3g} is possible for {what} with the stated noise and Poisson samples at the stated rate ({least.accountant}).",
    )


def _untested(sentence: str) -> ConformanceCheck:
    return ConformanceCheck(about="composition", outcome="not tested", sentence=sentence)


def _compared(
    claim: float, least: Epsilon, again: str, too_small: str, delta: float, possible: str
) -> ConformanceCheck:
    """Compare a stated epsilon with the least possible one.

    Args:
        claim: the stated epsilon.
        least: the answer of an accountant.
        again: how the sentence begins if that accountant has none.
        too_small: how it begins if the claim is below.
        delta: at which both hold.
        possible: the sentence if the claim is not below.
    """
    if least.value is None:
        return _untested(f"{again}: {least.why_not}.")
    below = claim < ROUNDED_CLAIM * least.value
    return ConformanceCheck(
        about="composition",
        outcome="contradicted" if below else "not contradicted",
        sentence=f"{too_small} {least.value:.3g} at delta = {delta:g} ({least.accountant})." if below else possible,
        expected=claim,
        observed=least.value,
    )


_SAME_MULTIPLIER = 1e-3
"""Relative difference of two noise multipliers that counts as rounding. Our choice."""
