"""Audits that leak or decide nothing, each with its policy.

Edits must not make them pass.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from leakaudit.gate.policy import Policy
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.files import with_digest
from leakaudit.results.schema import (
    AttackEntry,
    Attempt,
    AttemptStatus,
    Results,
    StepRecord,
    Verification,
    VerificationStatus,
)
from tests.support.factories import NOW, attempt, policy, results, step
from tests.support.leaking import CASES, POLICY

Case = tuple[Results, Policy]
STEPS = 6
OLD = timedelta(days=30)
RED_LINE = {"id": "red-line", "event": "exact_sentence", "max_count": 0}


def _audit(
    *, steps: int = STEPS, last: dict[str, Any] | None = None, stamp: dict[str, Any] | None = None, **extra: Any
) -> Results:
    """Build a clean audit whose last attempt and last step may differ."""
    records = [step(i) for i in range(steps)]
    records[-1] = records[-1].model_copy(update=stamp or {})
    attempts = [attempt(i) for i in range(steps - 1)] + [attempt(steps - 1, **(last or {}))]
    return results(records, attempts, **({"positive": (3, 3), "negative": (0, 3)} | extra))


def _sent(i: int) -> StepRecord:
    stamp = Verification(status=VerificationStatus.VERIFIED, relative_error=1e-6)
    return step(i).model_copy(update={"sent": stamp})


def _as_sent(i: int) -> list[Attempt]:
    return [attempt(i, leaks=True), attempt(i, defense=AS_SENT, leaks=i == 3)]


def _defended(i: int) -> list[Attempt]:
    return [attempt(i, defense=name, leaks=name == "none" and i == 3) for name in ("none", "prune(share=0.9)", "sign")]


def _limited() -> dict[str, AttackEntry]:
    about = {"label": "SPAN", "meaning": "reads", "source": "", "threat_model": "sees the update"}
    return {"span": AttackEntry(goal="text", token_limit=True, **about)}


def _beyond() -> Results:
    found = _audit(stamp={"beyond_hidden": True})
    described = found.catalogue.model_copy(update={"attacks": _limited()})
    return _audit(stamp={"beyond_hidden": True}, catalogue=described)


def _old() -> Results:
    found = _audit(finished=(NOW - OLD).isoformat())
    run = found.run.model_copy(update={"started": (NOW - OLD - timedelta(hours=1)).isoformat()})
    return with_digest(found.model_copy(update={"run": run}))


_UNVERIFIABLE = {"verification": Verification(status=VerificationStatus.UNVERIFIABLE, note="its code changed")}
_STRICT = policy(RED_LINE, evidence={"min_steps": 6, "max_error_share": 0.0, "max_censored": 0.0})

FAILING: dict[str, Case] = {
    **CASES,
    "as-sent": (
        results(
            [_sent(i) for i in range(STEPS)],
            [done for i in range(STEPS) for done in _as_sent(i)],
            positive=(3, 3),
            negative=(0, 3),
        ),
        policy(RED_LINE, **POLICY),
    ),
    "defences": (
        results(
            [step(i) for i in range(STEPS)],
            [done for i in range(STEPS) for done in _defended(i)],
            positive=(3, 3),
            negative=(0, 3),
        ),
        policy(RED_LINE, **POLICY),
    ),
}
"""Name -> honest results and a policy that they fail."""

UNDECIDED: dict[str, Case] = {
    "few steps": (_audit(steps=4), _STRICT),
    "blind": (_audit(positive=(0, 3)), _STRICT),
    "wrong scores": (_audit(negative=(3, 3)), _STRICT),
    "old": (_old(), _STRICT),
    "unverifiable": (_audit(stamp=_UNVERIFIABLE), _STRICT),
    "words not kept": (_audit(stamp={"words_not_kept": True}), _STRICT),
    "crashed": (_audit(last={"status": AttemptStatus.ERROR}), _STRICT),
    "out of time": (_audit(last={"status": AttemptStatus.BUDGET_EXHAUSTED}), _STRICT),
    "not applicable": (_audit(last={"status": AttemptStatus.NOT_APPLICABLE}), _STRICT),
    "beyond": (_beyond(), _STRICT),
}
"""Name -> honest results and a policy that they neither pass nor fail, because one fact is missing."""
