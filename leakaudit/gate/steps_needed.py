"""How many clean steps each rule of a policy needs before it can pass."""

from __future__ import annotations

from leakaudit.gate.policy import Policy, Rule
from leakaudit.results.bounds import MIN_STEPS_FOR_BOOTSTRAP, steps_needed

TAIL = 0.05
"""Share of the steps above a 95th percentile."""


def steps_of_rule(rule: Rule, policy: Policy) -> int | None:
    """Return the fewest clean steps with which a rule can pass.

    It is the larger one of `min_steps` and what the rule's own bound takes: the steps that bound a rate by `max_rate`, those that bound a
    95th percentile, or those of a bootstrap of a mean.

    Returns:
        Number of steps, or None if no number is enough.
    """
    if not rule.of_attacks:  # what an accountant says needs no step, and membership counts texts
        return 0
    own = _own_steps(rule, policy.statistics.confidence)
    return None if own is None else max(own, policy.evidence.min_steps)


def _own_steps(rule: Rule, confidence: float) -> int | None:
    """Return the steps that the bound of a rule takes, whatever `min_steps` is."""
    if rule.max_rate is not None:
        return steps_needed(0, rule.max_rate, confidence)
    if rule.versus_baseline is not None:  # what clean pairs need; with a baseline on other batches it may take more
        return steps_needed(0, rule.versus_baseline.margin, confidence)
    if rule.statistic == "p95":
        found = steps_needed(0, TAIL, confidence)
        return None if found is None else max(found, MIN_STEPS_FOR_BOOTSTRAP)
    if rule.statistic == "mean":
        return MIN_STEPS_FOR_BOOTSTRAP if rule.threshold > 0 else None
    return 1


def steps_of_policy(policy: Policy) -> int | None:
    """Return the fewest clean steps with which a policy can pass.

    It is None if no number is enough.

    >>> from leakaudit.gate.policy import default_policy
    >>> steps_of_policy(default_policy())
    59
    """
    needed = [steps_of_rule(rule, policy) for rule in policy.rules if rule.level == "error"]
    counts = [steps for steps in needed if steps is not None]
    return max([*counts, policy.evidence.min_steps_per_phase.spread]) if len(counts) == len(needed) else None
