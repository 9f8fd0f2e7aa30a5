"""What the secrets recovered in an audit say of a claimed epsilon."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from leakaudit.audit.accounting import epsilon_of
from leakaudit.config.audit import NONE
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.canaries import canary_epsilon
from leakaudit.results.epsilon_bounds import DELTA
from leakaudit.results.journal import JournalEntry
from leakaudit.results.schema import Canary, Catalogue, Privacy, StepRecord

CONFIDENCE = 0.95
"""With which the bounds of all attacks under one defence hold together. Our choice: that of the gate's bounds."""

CONDITIONS = (
    "Each secret was drawn uniformly and independently of everything else, and the values and the rule of guessing were fixed before.",
    "The record was in the batch for certain, so the bound is about one step without amplification by sampling, and is no bound of a whole run.",
    "No earlier step held the record, and the steps have independent noise.",
    "Where nothing is contradicted, nothing is confirmed: another attack may recover more.",
)
"""What must hold for a bound, in sentences for readers."""

TOO_MANY = "An attempt guessed as many texts as there are values, so that the count bounds nothing."


def canaries_of(
    entries: Sequence[JournalEntry],
    steps: Iterable[StepRecord],
    catalogue: Catalogue,
    privacy: Sequence[Privacy],
    delta: float | None,
) -> tuple[Canary, ...]:
    """Return the bounds of each attack under each defence.

    Attacks that guess no texts recover no secret and have none. The trials are the steps with a secret, whatever became of the attempt: an
    attack that was left out has recovered nothing. What ended an attempt may depend on the update, and leaving it out would bias the rate.

    Args:
        entries: all attempts of the audit.
        steps: records of the steps. Those after the first epoch do not count: an earlier step may have held the same record.
        catalogue: says what each attack recovers.
        privacy: what is stated on the defences, with their noise multipliers.
        delta: of the bounds; None for that of the statements, else 1e-5.
    """
    repeated = {step.id for step in steps if step.epoch is not None and step.epoch >= 1}
    repeated |= {one.attempt.step for one in entries if one.secret is not None and not one.secret.first}
    with_secret = {one.attempt.step for one in entries if one.secret is not None} - repeated
    readers = [name for name, entry in catalogue.attacks.items() if entry.goal == "text"]
    made: dict[tuple[str, str], list[JournalEntry]] = defaultdict(list)
    for one in entries:
        if one.attempt.step in with_secret and one.attempt.attack in readers:
            made[one.attempt.defense, one.attempt.attack].append(one)
    at = delta or next((one.delta for one in privacy if one.delta), DELTA)
    return tuple(
        _bound(defense, attack, own, len(readers), at, _claim(_column(privacy, defense), at))
        for (defense, attack), own in made.items()
        if any(one.attempt.finished for one in own)
    )


def _bound(
    defense: str, attack: str, entries: Sequence[JournalEntry], attacks: int, delta: float, claim: _Claim | None
) -> Canary:
    """Return the bound of one attack under one defence."""
    outcomes = [one.secret for one in entries if one.secret is not None]
    values = min(one.values for one in outcomes)
    guesses = max(one.guesses for one in outcomes)
    bound = Canary(
        defense=defense,
        attack=attack,
        k=sum(one.recovered for one in outcomes),
        n=len(entries),
        values=values,
        guesses=guesses,
        delta=delta,
        confidence=CONFIDENCE,
        attacks=attacks,
        epsilon_lower=0.0,
        claimed=None if claim is None else claim.epsilon,
        claimed_by="" if claim is None else claim.by,
        notes=CONDITIONS if guesses < values else (TOO_MANY, *CONDITIONS),
    )
    return bound.model_copy(update={"epsilon_lower": canary_epsilon(bound)})


@dataclass(frozen=True)
class _Claim:
    """What a mechanism claims of one step."""

    epsilon: float
    by: str


def _column(privacy: Iterable[Privacy], defense: str) -> list[Privacy]:
    """Return the statements on a defence; what is sent is what the run ships."""
    column = NONE.name if defense == AS_SENT else defense
    return [one for one in privacy if one.defense == column]


def _claim(statements: Iterable[Privacy], delta: float) -> _Claim | None:
    """Return the smallest epsilon of one step that is claimed; None without one."""
    return min(_claims(statements, delta), key=lambda one: one.epsilon, default=None)


def _claims(statements: Iterable[Privacy], delta: float) -> Iterator[_Claim]:
    """Yield what the statements say of one step without sampling.

    A noise multiplier gives the epsilon of one Gaussian release. A claim of one message is one of a step. An epsilon of the whole run bounds a
    step only if nothing was sampled. A claim at a larger delta says nothing at this one.
    """
    for one in statements:
        if one.noise_multiplier:
            found = epsilon_of(one.noise_multiplier, 1.0, 1, delta)
            if found.value is not None:
                yield _Claim(
                    found.value,
                    f"one step with noise multiplier {one.noise_multiplier:g}, without sampling ({found.accountant})",
                )
        if one.epsilon is None or one.delta is None or one.delta > delta:
            continue
        who = {"claim": "the owner of the run", "accountant": "the accountant of the run", "computed": "an accountant"}
        if one.covers == "message":
            yield _Claim(one.epsilon, f"{who[one.origin]}, for one message")
        elif one.sampling_rate == 1:
            yield _Claim(one.epsilon, f"{who[one.origin]}, for a run in which every step has all examples")
