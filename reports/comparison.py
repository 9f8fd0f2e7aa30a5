"""The comparison of the same steps with a defence and without it.

The counts of leaks use only steps in which both searches were finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from leakaudit.gate.events import EVENTS
from leakaudit.gate.evidence import OUT_OF_TIME, gather
from leakaudit.gate.outcome import judge_numbers
from leakaudit.gate.policy import ANY, Rule, Scope
from leakaudit.results import bounds as stats
from leakaudit.results.schema import Attempt, AttemptStatus, Results


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of the steps under one defence.

    True: the step leaked. False: all searches finished without a leak. None: a search did not finish, and nothing leaked.
    """

    by_step: dict[str, bool | None]
    """The steps that the gate counts."""
    unjudged: int = 0
    """Steps that nobody could judge."""
    out_of_time: frozenset[str] = frozenset()
    """Those among them whose searches all ran out of time."""
    lower: float = 0.0
    """Lower bound of the leak rate, as the gate computes it."""
    upper: float = 1.0
    """Upper bound of the leak rate, as the gate computes it."""

    @property
    def leaked(self) -> int:
        """Steps that leaked."""
        return sum(outcome is True for outcome in self.by_step.values())

    @property
    def finished(self) -> int:
        """Steps that leaked, or whose searches all finished."""
        return sum(outcome is not None for outcome in self.by_step.values())

    @property
    def open(self) -> int:
        """Steps in which a search was not finished and nothing leaked."""
        return len(self.by_step) - self.finished


def outcomes(
    results: Results,
    defense: str,
    event: str,
    attacks: Sequence[str] = (),
    trusted: AbstractSet[str] | None = None,
    *,
    min_tokens: int | None = None,
    confidence: float = 0.95,
    max_unjudged: float | None = None,
) -> Outcomes:
    """Return the outcome of each step under `defense`.

    A step is not finished if an attack ran out of time without the event, or if a text was in reach of a search that gave up. More time
    or a better search might find the text, so the defence did not stop the leak. A step that cannot be verified counts only if it leaked.

    Args:
        results: the audit.
        defense: a defence of the battery; `none` is the update as the run sends it.
        event: the event to look for, by its name in a policy.
        attacks: attacks that count; empty for any.
        trusted: see `gather`.
        min_tokens: number of tokens from which a text counts; None if the rule does not say it.
        confidence: of each bound.
        max_unjudged: see `judge_numbers`.
    """
    scope = Scope(attack=tuple(attacks) or ANY)
    rule = Rule(id="compared", event=event, max_count=0, scope=scope, min_tokens=min_tokens)
    evidence = gather(results, rule, defense, trusted)
    found: dict[str, bool | None] = {}
    mine: dict[str, list[Attempt]] = {}
    for a in results.attempts:
        if a.defense == defense and a.finished and a.attack in evidence.attacks:
            mine.setdefault(a.step, []).append(a)
    for step, leaked in evidence.values.items():
        found[step] = True if leaked else _unfinished(mine.get(step, []), event)
    numbers = judge_numbers(rule, evidence, confidence, max_unjudged)
    lower, upper = numbers.lower or 0.0, 1.0 if numbers.upper is None else numbers.upper
    late = frozenset(step for step, why in evidence.unjudged_steps.items() if why == OUT_OF_TIME)
    return Outcomes(found, evidence.unjudged, late, lower, upper)


def compare(before: Outcomes, after: Outcomes) -> str:
    """Say how many leaks the second defence stopped on the same steps.

    The p-value is that of the exact sign test over the finished steps. It is given only if the outcome differs in enough of them.
    """
    tried = {*after.by_step} | after.out_of_time
    both = [step for step in (*before.by_step, *sorted(before.out_of_time)) if step in tried]
    if not both:
        return "no step was tested both ways"
    pairs = [(before.by_step.get(step), after.by_step.get(step)) for step in both]
    finished = [(old, new) for old, new in pairs if old is not None and new is not None]
    stopped, opened = finished.count((True, False)), finished.count((False, True))
    leaks = sum(old for old, _ in finished)
    words = f"stopped {stopped} of {_leaks(leaks)}" if leaks else "there was no leak to stop"
    if not finished:
        words = "nothing is known about what it stops"
    words += f", opened {opened}" if opened else ""
    if stopped + opened >= stats.MIN_STEPS_FOR_SIGN_TEST:
        words += f" (sign test p = {stats.sign_test(stopped, opened):.2g})"
    unfinished = len(pairs) - len(finished)
    if unfinished:
        words += f"; not finished on {unfinished} of {len(pairs)} {'step' if len(pairs) == 1 else 'steps'}"
    return words


def _unfinished(attempts: Sequence[Attempt], event: str) -> bool | None:
    """Return None if a search on a step without a leak was not finished, else False."""
    of_texts = {s.outcome for a in attempts for s in a.sequences if s.long_enough}
    late = any(a.status is AttemptStatus.BUDGET_EXHAUSTED for a in attempts)
    gave_up = EVENTS[event].of_texts and "search gave up" in of_texts
    return None if late or gave_up else False


def _leaks(n: int) -> str:
    return "1 leak" if n == 1 else f"{n} leaks"
