"""What a policy requires of an audit as a whole, compared with what it tried."""

from __future__ import annotations

from collections.abc import Iterator

from leakaudit.gate.policy import OBSERVED, Policy, Requirements
from leakaudit.gate.wording import percent
from leakaudit.plugins.names import is_the_one
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.schema import AttemptStatus, Results
from leakaudit.results.wording import counted


def unmet(results: Results, required: Requirements) -> Iterator[str]:
    """Yield a sentence for each requirement that an audit does not meet."""
    ran = {attempt.attack for attempt in results.attempts if attempt.status is AttemptStatus.RAN}
    if missing := [name for name in required.attacks if not any(is_the_one(label, name) for label in ran)]:
        yield f"The policy requires the attacks {', '.join(missing)}, which did not run to their end on any step."
    budget = results.run.battery.budget_s
    if required.budget_s is not None and budget < required.budget_s:
        yield f"The policy requires {required.budget_s:g} s for each attempt; the audit gave {budget:g} s."
    naive = {
        a.attack for a in results.attempts if a.finished and not a.adaptive and a.defense not in (OBSERVED, AS_SENT)
    }
    if required.adaptive and naive:
        yield f"The policy requires attacks that know the defence; {', '.join(sorted(naive))} did not."
    if lacking := [name for name in required.granted if name not in results.threat_model.granted]:
        yield f"The policy requires that attacks are given {', '.join(lacking)}; the audit did not give it."
    verified = sum(step.verification.status.bounds for step in results.steps)
    if results.steps and verified < required.verified * len(results.steps):
        share = percent(verified / len(results.steps), required.verified)
        yield f"The policy requires {percent(required.verified)} verified steps; {verified} of {len(results.steps)} ({share}) are."


def other_runs(policy: Policy, given: int) -> tuple[str, ...]:
    """Return a sentence if the policy fixes another number of runs than is judged.

    A bound for one look holds only if the number of runs was fixed before the first look.
    """
    asked = policy.evidence.runs
    if asked is None or asked == given:
        return ()
    there = "this is one" if given == 1 else f"these are {given}"
    return (f"The policy judges {counted(asked, 'run')} together (`runs`); {there}.",)
