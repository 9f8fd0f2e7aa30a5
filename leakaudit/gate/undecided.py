"""A policy that allows an undecided verdict for some weeks."""

from __future__ import annotations

from datetime import UTC, datetime

from leakaudit.gate.policy_parts import WARN_DAYS, AllowedUndecided
from leakaudit.gate.verdict import Status, Verdict
from leakaudit.gate.wording import ended
from leakaudit.results.wording import counted


def allowed_for_a_time(verdict: Verdict, allowed: AllowedUndecided | None, now: datetime) -> Verdict:
    """Return a verdict with what its policy says of an undecided one.

    Args:
        verdict: of any status; only INCONCLUSIVE without recovered texts is allowed.
        allowed: the time in which it is; None if the policy allows it never.
        now: the time of judgement, with time zone.
    """
    if allowed is None or verdict.verdict is not Status.INCONCLUSIVE:
        return verdict
    today = now.astimezone(UTC).date()
    if today > allowed.until:
        return _with(verdict, f"The policy allowed an undecided verdict until {allowed.until}; it counts again.")
    if today < allowed.since:
        return _with(verdict, f"The policy allows an undecided verdict from {allowed.since} on, and not yet.")
    if verdict.texts_back:
        return _with(verdict, "The policy allows an undecided verdict only where no text comes back.")
    left = (allowed.until - today).days
    soon = f" (it ends in {counted(left, 'day')})" if left <= WARN_DAYS else ""
    said = f"The policy allows an undecided verdict until {allowed.until}{soon}, by {allowed.owner}: {allowed.reason}"
    return verdict.allowing_inconclusive(ended(said))


def _with(verdict: Verdict, sentence: str) -> Verdict:
    return verdict.model_copy(update={"sentence": f"{verdict.sentence} {sentence}"})
