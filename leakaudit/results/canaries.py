"""Says in words what recovered secrets show of a claimed epsilon."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.epsilon_bounds import Secrets, secret_epsilon
from leakaudit.results.privacy import SHIPPED
from leakaudit.results.schema import Canary, Results
from leakaudit.results.wording import counted


def bounds_on(results: Results, defense: str) -> tuple[Canary, ...]:
    """Return the bounds that count for one defence of the battery.

    What the run ships is also judged by what was sent.
    """
    columns = {SHIPPED, AS_SENT} if defense in (SHIPPED, AS_SENT) else {defense}
    return tuple(one for one in results.canaries if one.defense in columns)


def strongest(found: Sequence[Canary]) -> Canary | None:
    """Return the largest bound; a contradiction comes before all others."""
    return max(found, key=lambda one: (one.verdict == "contradicted", one.epsilon_lower), default=None)


def canary_epsilon(one: Canary) -> float:
    """Return the lower bound on epsilon that the counts of a bound give.

    The bounds of all attacks under a defence hold together with the confidence, because each has its share of the error (Bonferroni). Bounds under
    different defences do not share it. The bound is 0 if there were as many guesses as values.
    """
    if not one.k or not 1 <= one.guesses < one.values:
        return 0.0
    confidence = 1 - (1 - one.confidence) / one.attacks
    return round(secret_epsilon(Secrets(one.k, one.n, one.values, one.guesses), one.delta, confidence=confidence), 6)


def pooled(found: Iterable[Canary]) -> tuple[Canary, ...]:
    """Return the bounds of several runs, with the counts of equal ones added.

    Two are equal if they are about the same attack under the same defence, the same values and the same claim.
    """
    groups: dict[Canary, list[Canary]] = {}
    for one in found:
        same = one.model_copy(update={"k": 0, "n": 1, "guesses": 0, "epsilon_lower": 0.0, "notes": ()})
        groups.setdefault(same, []).append(one)
    return tuple(map(_added, groups.values()))


def _added(same: Sequence[Canary]) -> Canary:
    """Return one bound for all steps of equal bounds."""
    counts = {
        "k": sum(one.k for one in same),
        "n": sum(one.n for one in same),
        "guesses": max(one.guesses for one in same),
        "notes": tuple(dict.fromkeys(note for one in same for note in one.notes)),
    }
    bound = same[0].model_copy(update=counts)
    return bound.model_copy(update={"epsilon_lower": canary_epsilon(bound)})


def recovered(one: Canary) -> str:
    """Return how many secrets an attack recovered, as a clause."""
    guesses = "1 guess" if one.guesses == 1 else f"up to {one.guesses:,} guesses"
    return f"{one.attack} recovered the secret in {one.k} of {counted(one.n, 'step')}, of {one.values:,} values with {guesses} a step"


def bounded(one: Canary) -> str:
    """Return a bound and what it says of the claim, in two sentences."""
    found = f"{recovered(one)}."
    if one.epsilon_lower == 0:
        said = "This bounds no epsilon from below."
    else:
        said = (
            f"With {one.confidence:.0%} confidence epsilon of one step is at least {one.epsilon_lower:.3g} at delta = {one.delta:g}, without "
            "amplification by sampling."
        )
    return f"{found} {said} {against_claim(one)}"


def against_claim(one: Canary) -> str:
    """Return what a bound says of the claim of one step, in a sentence."""
    if one.claimed is None:
        return "Nobody claims an epsilon of one step."
    claim = f"epsilon = {one.claimed:.3g} for one step ({one.claimed_by})"
    if one.verdict == "contradicted":
        return f"This contradicts the claim of {claim}."
    return f"The claim of {claim} is not contradicted; that does not confirm it."
