"""Cells of the matrix: one attack under one defence over all steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from leakaudit.gate.events import EVENTS
from leakaudit.gate.policy import EvidencePolicy
from leakaudit.gate.wording import number, percent
from leakaudit.reports.measures import found_in, means_of
from leakaudit.reports.wording import OUTCOMES
from leakaudit.results import bounds as stats
from leakaudit.results.as_sent import AS_SENT, seen_under, shipped_column
from leakaudit.results.recovery import FOUND, Severity, severity
from leakaudit.results.schema import Attempt, AttemptStatus, Catalogue, Missing, Results, Score
from leakaudit.results.summary import pooled
from leakaudit.results.wording import counted

OBSERVED = "none"
"""The defence under which the update is attacked as the run ships it."""


_LEAKS = {
    Severity.SENTENCE: "sentence leaked",
    Severity.WORDS: "words leaked",
    Severity.LABELS: "labels leaked",
}


_MOST_CENSORED = EvidencePolicy().max_censored
"""Largest share of attempts out of time in a cell that still counts as finished. It is the default of the policy."""


def state_of(attempts: Sequence[Attempt]) -> str:
    """Return the state of a cell: the worst outcome of its attempts."""
    worst = severity(attempts)
    if worst:
        return _LEAKS[worst]
    if any(s.outcome == "search gave up" for a in attempts for s in a.sequences):
        return "in reach, not found"
    finished = [a for a in attempts if a.finished]
    if finished:
        late = sum(a.status is AttemptStatus.BUDGET_EXHAUSTED for a in finished)
        return "out of time" if late > _MOST_CENSORED * len(finished) else "no leak event"
    states = {a.status for a in attempts}
    for status, word in ((AttemptStatus.ERROR, "error"), (AttemptStatus.NOT_APPLICABLE, "not applicable")):
        if status in states:
            return word
    return "not run"


@dataclass(frozen=True)
class Cell:
    """One attack under one defence."""

    state: str
    lines: tuple[str, ...]
    ships: bool

    @property
    def css(self) -> str:
        """The state as a CSS class name."""
        return self.state.replace(",", "").replace(" ", "-")


def cell_for(results: Results, attack: str, defense: str) -> Cell:
    """Return the cell of one attack under one defence."""
    return cell_of(results, [a for a in results.attempts if (a.attack, a.defense) == (attack, defense)], defense)


def cell_of(results: Results, attempts: Sequence[Attempt], defense: str, *, whole: bool = False) -> Cell:
    """Return the cell that sums up some attempts.

    Its rates use verified steps only. Unverifiable steps that leaked are counted separately; the others are not evidence.
    """
    steps = seen_under(results, defense).steps
    bounding = {step.id for step in steps if step.verification.status.bounds}
    firm = [a for a in attempts if a.step in bounding]
    others = [a for a in attempts if a.step not in bounding and a.finished]
    proof = {a.step for a in others if severity([a])}
    silent = {a.step for a in others} - proof
    state = state_of([*firm, *(a for a in others if a.step in proof)])
    if silent and not proof and not any(a.finished for a in firm):
        state = "unverifiable"
    lines = _rate_lines(firm, len(proof), state)
    finished = [a for a in firm if a.finished] or [a for a in others if a.step in proof]
    if not whole:
        lines += [*_measure_lines(finished, results.catalogue), *_reach_lines(finished)]
    if not finished and not silent:
        mine = [a.reason for a in attempts if a.reason and a.status.value.replace("_", " ") == state]
        skipped = [a.reason for a in attempts if a.reason and a.status is AttemptStatus.SKIPPED]
        lines += list(dict.fromkeys(mine or (skipped if state == "not run" else [])))[:2]
    if silent:
        lines.append(f"{counted(len(silent), 'unverifiable step')} without a leak: no evidence")
    if finished and not whole:
        lines += _lost_lines(attempts)
    return Cell(state, tuple(lines), ships=defense == shipped_column(results))


def _rate_lines(firm: Sequence[Attempt], proofs: int, state: str) -> list[str]:
    """Return lines on how many verified steps leaked, with the bound on the rate.

    Further lines say what leaked, and how many steps ran out of time.
    """
    finished = [a for a in firm if a.finished]
    steps, leaked = {a.step for a in finished}, {a.step for a in finished if severity([a])}
    late = {a.step for a in finished if a.status is AttemptStatus.BUDGET_EXHAUSTED} - leaked
    extra = f"{counted(proofs, 'unverifiable step')}" if proofs else ""
    lines = []
    if steps and (leaked or len(late) < len(steps)):
        lines.append(f"{len(leaked)} of {counted(len(steps), 'step')}" + (f" and {extra}" if extra else ""))
    elif extra:
        lines.append(extra)
    if len(steps) > 1 and not late and state != "in reach, not found":
        k, n = len(leaked), len(steps)
        least, most = percent(stats.lower_bound(k, n)), percent(stats.upper_bound(k, n))
        lines.append(f"rate at least {least}" if 2 * k >= n else f"rate at most {most}")
    events = dict.fromkeys(event for a in finished for event in a.events if event in EVENTS)
    if events:
        lines.append("leaked: " + ", ".join(EVENTS[event].noun for event in events))
    if late:
        lines.append(_late_line([a for a in finished if a.step in late], len(late), len(steps)))
    return lines


def _late_line(attempts: Sequence[Attempt], late: int, steps: int) -> str:
    """Return a line on the steps out of time, with the share recovered until then."""
    on = f"out of time on {late} of {counted(steps, 'step')}"
    stopped = [a for a in attempts if a.status is AttemptStatus.BUDGET_EXHAUSTED]
    recall, precision = (pooled(a.scores.get(name) for a in stopped) for name in ("token_recall", "token_precision"))
    if recall is None:
        return on
    right = "" if precision is None else f", and {percent(precision)} of the guess is right"
    return f"{on}; until then {percent(recall)} of the tokens came back{right}"


def _measure_lines(attempts: Sequence[Attempt], catalogue: Catalogue) -> list[str]:
    """Return lines with means, and a note if an attack cannot show word order."""
    means = means_of(attempts, catalogue)
    lines = ["mean " + ", ".join(means)] if means else []
    lines += [f"{found} (ROUGE-L above {number(FOUND)})"] if (found := found_in(attempts)) else []
    scored = {name for a in attempts for name, found in a.scores.items() if isinstance(found, Score)}
    unordered = all(s.exact is None for a in attempts for s in a.sequences)
    if "token_recall" in scored and "rougeL" not in scored and unordered:
        lines.append("names words without their order, so it cannot show a sentence")
    return lines


def _lost_lines(attempts: Sequence[Attempt]) -> list[str]:
    words = (
        (AttemptStatus.ERROR, "crashed"),
        (AttemptStatus.NOT_APPLICABLE, "not applicable"),
        (AttemptStatus.SKIPPED, "skipped"),
    )
    counts = [(sum(a.status is status for a in attempts), word) for status, word in words]
    return [f"{counted(n, 'attempt')} {word}" for n, word in counts if n]


def _reach_lines(attempts: Sequence[Attempt]) -> list[str]:
    """Return lines on how much was in reach, and why texts were not recovered.

    There is no line if what was in reach was not measured.
    """
    shares = [("tokens", pooled(a.reachable_tokens for a in attempts))]
    shares += [("texts", pooled(a.reachable_sequences for a in attempts))]
    words = [f"{percent(share)} of the {what}" for what, share in shares if share is not None]
    if not words:
        asked = any(isinstance(a.reachable_tokens, Missing) for a in attempts)
        lost = any(s.exact is False for a in attempts for s in a.sequences)
        return ["what was in reach is not known"] if asked and lost else []
    outcomes: Counter[str | None] = Counter(s.outcome for a in attempts for s in a.sequences)
    missed = [f"{outcomes[outcome]} {said}" for outcome, said in OUTCOMES.items() if outcomes[outcome]]
    return ["in reach: " + ", ".join(words), *(["did not come back: " + "; ".join(missed)] if missed else [])]


def attack_names(results: Results) -> list[str]:
    """Return the attacks of the battery, whether they ran or not."""
    return list(dict.fromkeys([*results.run.battery.attacks, *(a.attack for a in results.attempts)]))


def defense_names(results: Results) -> list[str]:
    """Return the defences of the battery; first the update as produced, then as sent."""
    found = dict.fromkeys([*results.run.battery.defenses, *(a.defense for a in results.attempts)])
    return sorted(found, key=lambda name: (name != OBSERVED, name != AS_SENT))


def shown_name(results: Results, defense: str) -> str:
    """Return the name of a defence in a table.

    If something changed updates after the training, the first two are the update as produced and as sent.
    """
    if shipped_column(results) == OBSERVED:
        return defense
    return {OBSERVED: "as produced", AS_SENT: "as sent"}.get(defense, defense)
