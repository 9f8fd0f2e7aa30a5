"""Cells of the matrix: one attack under one defence over all steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leakaudit.gate.controls import trusted
from leakaudit.gate.events import EVENTS, could_show
from leakaudit.gate.evidence import OUT_OF_TIME, Index, gather
from leakaudit.gate.policy import EvidencePolicy, Rule, Scope, default_policy
from leakaudit.gate.wording import at_least, at_most, number, percent
from leakaudit.reports.measures import found_in, means_of
from leakaudit.reports.wording import OUTCOMES, without_repeats
from leakaudit.results import bounds as stats
from leakaudit.results.as_sent import AS_SENT, seen_under, shipped_column
from leakaudit.results.recovery import FOUND, Severity, severity
from leakaudit.results.schema import Attempt, AttemptStatus, Missing, Results, Score
from leakaudit.results.summary import pooled
from leakaudit.results.wording import counted

OBSERVED = "none"
"""The defence under which the update is attacked as the run ships it."""


_LEAKS = {
    Severity.SENTENCE: "text leaked",
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
    for status in (AttemptStatus.ERROR, AttemptStatus.NOT_NEEDED, AttemptStatus.NOT_APPLICABLE):
        if status in states:
            return status.value.replace("_", " ")
    return "not run"


SHORT = {
    "text leaked": "text",
    "words leaked": "words",
    "labels leaked": "labels",
    "in reach, not found": "in reach",
    "no leak event": "nothing",
    "out of time": "open",
    "unverifiable": "unproved",
    "not judged": "unjudged",
    "error": "error",
    "not applicable": "n/a",
    "not needed": "spared",
    "not run": "not run",
}
"""State of a cell -> its word in the heat map."""


@dataclass(frozen=True)
class Cell:
    """One attack under one defence."""

    state: str
    lines: tuple[str, ...]
    ships: bool
    steps: tuple[str, ...] = ()
    """Those of `lines` that count steps: how many leaked, were not judged, or are no evidence."""
    count: str = ""
    """Steps with the leak that the state names, of those that show it: `3/60`; empty without evidence."""
    bound: str = ""
    """Bound of the rate, such as `≥ 1.4%`; empty if there is none."""

    @property
    def word(self) -> str:
        """The state in a word, for a narrow cell."""
        return SHORT[self.state]

    @property
    def css(self) -> str:
        """The state as a CSS class name."""
        return self.state.replace(",", "").replace(" ", "-")


def cell_for(results: Results, attack: str, defense: str, index: Index | None = None) -> Cell:
    """Return the cell of one attack under one defence.

    Args:
        results: the audit.
        attack: its label.
        defense: its label.
        index: the attempts of `results`, grouped once for all cells; None to group them here.
    """
    index = index or Index(results)
    mine = [attempt for attempt in index.of_defense.get(defense, ()) if attempt.attack == attack]
    return cell_of(results, mine, defense, index)


def cell_of(
    results: Results, attempts: Sequence[Attempt], defense: str, index: Index | None = None, *, whole: bool = False
) -> Cell:
    """Return the cell that sums up some attempts.

    Its rates use verified steps only. Unverifiable steps that leaked are counted separately; the others are not evidence.
    """
    index = index or Index(results)
    bounding = {step.id for step in seen_under(results, defense).steps if step.verification.status.bounds}
    firm = [a for a in attempts if a.step in bounding]
    others = [a for a in attempts if a.step not in bounding and a.finished]
    proof = {a.step for a in others if severity([a])}
    silent = {a.step for a in others} - proof
    state = state_of([*firm, *(a for a in others if a.step in proof)])
    if silent and not proof and not any(a.finished for a in firm):
        state = "unverifiable"
    found, blind = unjudged_by(results, firm, defense, index)
    unjudged = {name: why for name, why in found.items() if name in bounding}
    named = sum(why != OUT_OF_TIME for why in unjudged.values())
    judged = [a for a in firm if a.step not in unjudged]
    if state == "no leak event" and unjudged and not any(a.finished for a in judged):
        state = "not judged"
    said = _step_lines(judged, len(proof), named, blind)
    rate = _rate(judged, state, len(unjudged))
    rates = [] if rate is None else [f"rate at {'least' if rate.is_lower else 'most'} {rate.percent}"]
    lines = [*said, *rates, *_late_lines(firm), *_leak_lines(results, judged, defense, index)]
    finished = [a for a in firm if a.finished] or [a for a in others if a.step in proof]
    if not whole:
        lines += [*_measure_lines(finished, results), *_reach_lines(finished)]
    if not finished and not silent:
        mine = [a.reason for a in attempts if a.reason and a.status.value.replace("_", " ") == state]
        skipped = [a.reason for a in attempts if a.reason and a.status is AttemptStatus.SKIPPED]
        lines += without_repeats(mine or (skipped if state == "not run" else []))[:2]
    if silent:
        said.append(f"{counted(len(silent), 'unverifiable step')} without a leak: no evidence")
        lines.append(said[-1])
    if finished and not whole:
        lines += _lost_lines(attempts)
    short = _count(judged) if state in _COUNTED else ""
    bound = "" if rate is None or not short else f"{'≥' if rate.is_lower else '≤'} {rate.percent}"
    ships = defense == shipped_column(results)
    return Cell(state, tuple(lines), ships=ships, steps=tuple(said), count=short, bound=bound)


_COUNTED = (*_LEAKS.values(), "no leak event", "in reach, not found", "out of time")
"""States of a cell that says in how many steps something leaked."""


def _count(judged: Sequence[Attempt]) -> str:
    """Return how many judged steps had the worst leak, such as `3/60`."""
    finished = [a for a in judged if a.finished]
    steps = {a.step for a in finished}
    return f"{len(_worst_of(finished))}/{len(steps)}" if steps else ""


def unjudged_by(
    results: Results, attempts: Sequence[Attempt], defense: str, index: Index
) -> tuple[dict[str, str], bool]:
    """Return the steps about which the attacks of a cell can say nothing -> why.

    Return as well whether that is because none read its canary.

    The gate's own count decides, for the first event that one of them can show.
    """
    event = next((name for name in EVENTS_OF_CELLS if any(a.finished and could_show(a, name) for a in attempts)), None)
    if event is None:
        return {}, False
    attacks = tuple(dict.fromkeys(a.attack for a in attempts))
    rule = Rule(id="cell", event=event, max_count=0, scope=Scope(attack=attacks))
    readers = trusted(results, default_policy(), rule) if results.controls.kinds else frozenset(attacks)
    evidence = gather(results, rule, defense, readers, index)
    leaked = {a.step for a in attempts if severity([a])}
    blind = not readers & {*evidence.attacks}
    nothing = {**evidence.unjudged_steps, **(dict.fromkeys(evidence.values, "") if blind else {})}
    return {name: why for name, why in nothing.items() if name not in leaked}, blind and bool(evidence.values)


EVENTS_OF_CELLS = ("exact_sequence", "all_words", "label_counts")
"""The event of each kind that texts of any length can have."""


def _step_lines(judged: Sequence[Attempt], proofs: int, unjudged: int, blind: bool) -> list[str]:
    """Return lines on how many steps leaked, and how many were not judged."""
    finished = [a for a in judged if a.finished]
    steps, leaked, late = _steps_of(finished)
    extra = f"{counted(proofs, 'unverifiable step')}" if proofs else ""
    lines = []
    if steps and (leaked or len(late) < len(steps)):
        worst = _worst_of(finished)
        lines.append(f"{len(worst)} of {counted(len(steps), 'step')}" + (f" and {extra}" if extra else ""))
        if len(worst) < len(leaked):
            lines.append(f"in {counted(len(leaked - worst), 'other step')} less came back")
    elif extra:
        lines.append(extra)
    if unjudged:
        lines.append(f"{counted(unjudged, 'step')} not judged" + (": it did not read its canary" if blind else ""))
    return lines


def _steps_of(finished: Sequence[Attempt]) -> tuple[set[str], set[str], set[str]]:
    """Return the steps, those that leaked, and those out of time without a leak."""
    leaked = {a.step for a in finished if severity([a])}
    return (
        {a.step for a in finished},
        leaked,
        {a.step for a in finished if a.status is AttemptStatus.BUDGET_EXHAUSTED} - leaked,
    )


def _worst_of(finished: Sequence[Attempt]) -> set[str]:
    """Return the steps with the worst leak, which is the one that a cell names."""
    worst = severity(finished)
    return {a.step for a in finished if severity([a]) is worst} if worst else set()


class _Bound(NamedTuple):
    is_lower: bool
    percent: str


def _rate(judged: Sequence[Attempt], state: str, unjudged: int) -> _Bound | None:
    """Return the bound on the rate of the worst leak; None without one.

    Of a leak it is what is proved, and without a leak the most that there may be.
    """
    finished = [a for a in judged if a.finished]
    steps, _, late = _steps_of(finished)
    if len(steps) < 2 or late or state == "in reach, not found":
        return None
    k, n = len(_worst_of(finished)), len(steps) + unjudged
    if k:
        return _Bound(True, at_least(stats.lower_bound(k, n)))
    return _Bound(False, at_most(stats.upper_bound(unjudged, n)))


def _late_lines(attempts: Sequence[Attempt]) -> list[str]:
    """Return the line on the steps out of time."""
    finished = [a for a in attempts if a.finished]
    steps, _, late = _steps_of(finished)
    return [_late_line([a for a in finished if a.step in late], len(late), len(steps))] if late else []


def _leak_lines(results: Results, judged: Sequence[Attempt], defense: str, index: Index) -> list[str]:
    """Return a line on each event that happened, with the counts of a rule on it."""
    attacks = tuple(dict.fromkeys(a.attack for a in judged))
    said = []
    for event in dict.fromkeys(event for a in judged if a.finished for event in a.events if event in EVENTS):
        rule = Rule(id="cell", event=event, max_count=0, scope=Scope(attack=attacks))
        values = gather(results, rule, defense, index=index).values.values()
        said.append(f"{EVENTS[event].noun} in {sum(value > 0 for value in values)} of {len(values)}")
    return [f"leaked: {', '.join(said)}"] if said else []


def _late_line(attempts: Sequence[Attempt], late: int, steps: int) -> str:
    """Return a line on the steps out of time, with the share recovered until then."""
    on = f"out of time on {late} of {counted(steps, 'step')}"
    stopped = [a for a in attempts if a.status is AttemptStatus.BUDGET_EXHAUSTED]
    recall, precision = (pooled(a.scores.get(name) for a in stopped) for name in ("token_recall", "token_precision"))
    if recall is None:
        return on
    right = "" if precision is None else f", and {percent(precision)} of the guess is right"
    return f"{on}; until then {percent(recall)} of the tokens came back{right}"


def _measure_lines(attempts: Sequence[Attempt], results: Results) -> list[str]:
    """Return lines with means, and a note if an attack cannot show word order."""
    means = means_of(attempts, results)
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
        (AttemptStatus.NOT_NEEDED, "not needed"),
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
