"""How often each event of a policy happened in one audit, as the gate counts it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from leakaudit.gate.controls import trusted
from leakaudit.gate.evidence import gather_own
from leakaudit.gate.policy import Policy, Rule, Scope
from leakaudit.history.record import Rate
from leakaudit.results.schema import Results


def rates_of(results: Results, policy: Policy, known: Collection[str] = ()) -> tuple[Rate, ...]:
    """Return the rate of every event that the policy limits.

    There is one rate for all attacks, and one for each.

    Args:
        results: the audit.
        policy: its rules on events; rules with the same event, texts, defence and attacks are one rate, with the lowest limit.
        known: marks of the steps that earlier nights had. Those steps are no new evidence.
    """
    marks = {step.id: step.unit for step in results.steps}
    seen: set[str] = set(known)
    fresh = set()
    for name, mark in marks.items():
        if not mark or mark not in seen:
            fresh.add(name)
        seen.add(mark)
    found: dict[tuple[str, int | None, str, str], Rate] = {}
    for rule in policy.rules:
        if rule.event is None:
            continue
        whole = _rate(
            results, rule, "any" if rule.scope.attacks is None else ", ".join(rule.scope.attacks), fresh, policy
        )
        for rate in (whole, *_by_attack(results, rule, fresh, policy)):
            other = found.get(rate.series)
            limits = [one.limit for one in (rate, other) if one is not None and one.limit is not None]
            found[rate.series] = rate.model_copy(update={"limit": min(limits, default=None)})
    return tuple(found.values())


def repeated_steps(results: Results, known: Collection[str]) -> int:
    """Return how many steps an earlier night, or an earlier step of this one, had."""
    marks = [step.unit for step in results.steps if step.unit]
    return len(marks) - len({*marks} - {*known})


def _rate(results: Results, rule: Rule, attack: str, fresh: Collection[str], policy: Policy) -> Rate:
    evidence = gather_own(results, rule, trusted(results, policy, rule))
    leaked = {name for name, value in evidence.values.items() if value > 0}
    return Rate(
        event=rule.event or "",
        min_tokens=rule.min_tokens,
        defense=rule.scope.defense,
        attack=attack,
        limit=0.0 if rule.max_count == 0 else rule.max_rate,
        k=len(leaked),
        n=len(evidence.values),
        unjudged=evidence.unjudged,
        fresh_k=len(leaked & set(fresh)),
        fresh_n=len(evidence.values.keys() & set(fresh)),
    )


def _by_attack(results: Results, rule: Rule, fresh: Collection[str], policy: Policy) -> Iterator[Rate]:
    """Yield the rate of each attack that is evidence; none for a single one."""
    attacks = gather_own(results, rule, trusted(results, policy, rule)).attacks
    if len(attacks) < 2:
        return
    for attack in attacks:
        scope = Scope(defense=rule.scope.defense, attack=attack)
        yield _rate(results, rule.model_copy(update={"scope": scope}), attack, fresh, policy).model_copy(
            update={"limit": None}
        )
