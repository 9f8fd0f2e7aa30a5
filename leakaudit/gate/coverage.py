"""What an audit covered, compared with what a policy requires of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from leakaudit.gate.policy import SHIPPED, Policy
from leakaudit.gate.policy_parts import ACTIVE, RequiredThreatModel
from leakaudit.gate.wording import percent, where
from leakaudit.plugins.names import is_the_one
from leakaudit.results.as_sent import shipped_column
from leakaudit.results.schema import Attempt, AttemptStatus, Results

_SERVED = (AttemptStatus.RAN, AttemptStatus.NOT_NEEDED)
"""How an attempt ended that nobody has to make again."""

Asked = tuple[str, Callable[[Attempt], bool]]
"""What must have run, in words, and whether an attempt is one of it."""


def uncovered(results: Results, policy: Policy) -> Iterator[str]:
    """Yield a sentence for each thing that an audit did not cover as required."""
    required = policy.requires
    ran = [attempt for attempt in results.attempts if attempt.status is AttemptStatus.RAN]
    lacking = [name for name in required.defenses if not any(is_the_one(a.defense, name) for a in ran)]
    if lacking:
        yield f"The policy requires the defences {', '.join(lacking)}; no attack ran to its end under them."
    for kind in required.kinds:
        if not any(_looks_for(results, attempt, kind) for attempt in ran):
            yield f"The policy requires an attack on {kind}; none ran to its end on any step."
    if required.attacks_share is not None:
        yield from _too_few_steps(results, policy, required.attacks_share)
    yield from another_adversary(results, required.threat_model)


def _too_few_steps(results: Results, policy: Policy, share: float) -> Iterator[str]:
    """Yield a sentence for what did not run on enough steps under a judged defence."""
    asked: list[Asked] = [(f"the attack {name}", _named(name)) for name in policy.requires.attacks]
    asked += [(f"an attack on {kind}", _of_kind(results, kind)) for kind in policy.requires.kinds]
    of = len(results.steps)
    for defense in dict.fromkeys(rule.scope.defense for rule in policy.rules if rule.level == "error"):
        column = shipped_column(results) if defense == SHIPPED else defense
        served = [a for a in results.attempts if a.defense == column and a.status in _SERVED]
        for what, fits in asked:
            n = len({attempt.step for attempt in served if fits(attempt)})
            if of and n < share * of - 1e-9:  # 0.07 * 100 is above 7
                yield (
                    f"The policy requires that {what} runs to its end on {percent(share)} of the steps; {where(results, defense)} it did on "
                    f"{n} of {of} ({percent(n / of, share)})."
                )


def _named(name: str) -> Callable[[Attempt], bool]:
    return lambda attempt: is_the_one(attempt.attack, name)


def _of_kind(results: Results, kind: str) -> Callable[[Attempt], bool]:
    return lambda attempt: _looks_for(results, attempt, kind)


def _looks_for(results: Results, attempt: Attempt, kind: str) -> bool:
    entry = results.catalogue.attacks.get(attempt.attack)
    return entry is not None and entry.goal == kind


def another_adversary(results: Results, asked: RequiredThreatModel) -> Iterator[str]:
    """Yield a sentence for each way in which the audit's adversary is another one."""
    found = results.threat_model
    if asked.adversary is not None and not _is_adversary(found.adversary, asked.adversary):
        yield f"The policy is about the adversary {asked.adversary!r}; that of the audit is {found.adversary!r}."
    if asked.sees is not None and found.sees != asked.sees:
        yield f"The policy is about an adversary that sees {asked.sees!r}; that of the audit sees {found.sees!r}."
    if asked.granted_at_most is None:
        return
    given = {*found.granted, *(name for attempt in results.attempts for name in attempt.granted)}
    if more := sorted(given - {*asked.granted_at_most}):
        most = ", ".join(asked.granted_at_most) or "nothing"
        yield f"The policy is about attacks that are given {most} at most; the audit gave them {', '.join(more)}."


def _is_adversary(found: str, asked: str) -> bool:
    """Return whether an audit's adversary is the one of a policy.

    An audit says of an active server also how it changed the model.
    """
    return found == asked or (asked == ACTIVE and found.startswith(f"an {ACTIVE}"))
