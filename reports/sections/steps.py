"""The section on the leaks at each training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from markupsafe import Markup

from leakaudit.gate.evidence import Index
from leakaudit.gate.wording import percent
from leakaudit.reports.cells import OBSERVED, attack_names, state_of, unjudged_by
from leakaudit.reports.charts import STATES, StepMark, step_chart
from leakaudit.reports.escaping import plain
from leakaudit.reports.panels import Places, panels
from leakaudit.reports.pictures import group_chart, groups_of
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import MOST_ROWS, Section
from leakaudit.reports.told_by import in_words, told_by, told_by_chart
from leakaudit.results.recovery import Severity, amount, is_silent, join, severity
from leakaudit.results.schema import Attempt, Results, Score, StepRecord
from leakaudit.results.wording import counted

_SEARCHED = ("no leak event", "out of time", "in reach, not found")
"""States of attacks that ran without a leak."""


@dataclass(frozen=True)
class _Step:
    """What the attacks recovered from one audited step."""

    number: int
    phase: str
    share: float | None
    """Share of the text, or of the labels, that the best attack recovered; None if there is no number."""
    loss: float | None
    """Loss of the batch; None if the results do not hold it."""
    rate: float | None
    """Learning rate; None if the results do not hold it."""
    states: tuple[str, ...]
    """State of each attack, in the order of the battery."""


def section(redacted: RedactedResult) -> Section:
    """Show the state of every attack at every step, and how much was recovered."""
    results = redacted.results
    attacks = attack_names(results)
    text = any(_text_share(a) is not None for a in results.attempts)
    measured = "share of the text" if text else "share of the labels"
    usable = [s for s in results.steps if s.verification.status.attacked]
    by_step = _attempts_by_step(results, usable)
    silent = {step.id for step in usable if is_silent(step, by_step[step.id])}
    unsaid = _unsaid(results, attacks, by_step)
    nobody = {step.id for step in usable if step.id in unsaid[""]} - silent
    share_of = _text_share if text else _label_share
    steps = [_step(step, by_step[step.id], attacks, share_of, step.id in silent, unsaid) for step in usable]
    aside = _aside(len(silent), len(nobody))
    lead = _lead([step for step in usable if step.id not in silent | nobody], by_step, aside)
    drawn = len(usable) > 1 and attacks
    gap = f"A dotted upright line is a step without a number for the {measured}, which is not the same as 0%."
    told, untold = told_by(results)
    source = in_words(told, untold) if told else ""
    return Section(
        "steps",
        "Step by step",
        {
            "attacks": attacks,
            "lead": lead,
            "chart": _chart(steps, attacks, plain(lead), measured) if drawn else None,
            "grouped": len(steps) > MOST_MARKS,
            "when": _when([s for s in usable if s.id not in silent | nobody], by_step),
            "with_loss": any(step.loss is not None for step in steps),
            "with_rate": any(step.rate is not None for step in steps),
            "rate": _constant_rate(steps),
            "told": source,
            "told_chart": told_by_chart(told, plain(source)) if told else None,
            "told_rows": [(one.attack, name, percent(share)) for one in told for name, share in one.shares],
            "table": [_row(step) for step in steps][:MOST_ROWS],
            "cut": f"The first {MOST_ROWS} of {len(steps):,} steps; results.json has all of them."
            if len(steps) > MOST_ROWS
            else "",
            "gap": gap if any(step.share is None for step in steps) and len(steps) <= MOST_MARKS else "",
            "states": [name for name in STATES if any(name in step.states for step in steps)],
            "share_name": f"{measured.capitalize()} that came back, by the best attack",
        },
        heading="What leaked, step by step",
    )


MOST_MARKS = 60
"""Most steps that are drawn one by one. Our choice: the marks of more steps would touch."""


def _chart(steps: Sequence[_Step], attacks: Sequence[str], title: str, measured: str) -> Markup:
    """Draw every step by itself, or columns of neighbouring steps if there are many."""
    names = [plain(name) for name in attacks]
    if len(steps) > MOST_MARKS:
        every = sorted(steps, key=lambda step: step.number)
        changes = not _constant_rate(steps)
        found = [
            (s.number, dict(zip(names, s.states, strict=True)), s.share, s.loss, s.rate if changes else None)
            for s in every
        ]
        return group_chart(groups_of(found), title, measured)
    marks = [StepMark(s.number, name, state) for s in steps for name, state in zip(names, s.states, strict=True)]

    def below(at: Callable[[int], float], width: float, y: float) -> tuple[str, float]:
        every = sorted(steps, key=lambda step: step.number)
        losses: Places = [None if s.loss is None else (at(s.number), s.loss, s.loss) for s in every]
        rates: Places = [None if s.rate is None else (at(s.number), s.rate, s.rate) for s in every]
        return panels([("loss", losses), ("learning rate", [] if _constant_rate(steps) else rates)], width, y)

    return step_chart(marks, [(s.number, s.share) for s in steps], title, measured, below)


def _constant_rate(steps: Sequence[_Step]) -> str:
    """Return a sentence on the learning rate that every step had.

    Empty if it changed, or if a step has none.
    """
    rates = {step.rate for step in steps}
    one = next(iter(rates)) if len(rates) == 1 else None
    return "" if one is None else f"The learning rate was {one:.3g} at every audited step."


def _when(steps: Sequence[StepRecord], by_step: Mapping[str, Sequence[Attempt]]) -> str:
    """Return a sentence on whether early or late steps leaked more.

    Empty for fewer than ten steps.
    """
    every = sorted(steps, key=lambda step: step.step)
    leaked = [bool(severity(by_step[step.id])) for step in every]
    if len(every) < 10 or not any(leaked):
        return ""
    half = len(leaked) // 2
    early, late = leaked[:half], leaked[half:]
    return (
        f"Early or late: {sum(early)} of the first {len(early)} audited steps leaked ({percent(sum(early) / len(early))}), "
        f"and {sum(late)} of the last {len(late)} ({percent(sum(late) / len(late))})."
    )


def _attempts_by_step(results: Results, steps: Sequence[StepRecord]) -> dict[str, list[Attempt]]:
    """Return the attempts on the update as it was sent, by step."""
    by_step: dict[str, list[Attempt]] = {step.id: [] for step in steps}
    for attempt in results.attempts:
        if attempt.defense == OBSERVED:
            by_step[attempt.step].append(attempt)
    return by_step


def _step(
    step: StepRecord,
    attempts: Sequence[Attempt],
    attacks: Sequence[str],
    share_of: Callable[[Attempt], float | None],
    silent: bool,
    unsaid: Mapping[str, AbstractSet[str]],
) -> _Step:
    shares = [share for a in attempts if (share := share_of(a)) is not None]
    states = [
        _state([a for a in attempts if a.attack == attack], unjudged=step.id in unsaid[attack]) for attack in attacks
    ]
    if silent:
        states = ["unverifiable" if state in _SEARCHED else state for state in states]
    share = max(shares) if shares and not silent else None
    return _Step(step.step, step.phase, share, step.loss, step.learning_rate, tuple(states))


def _state(attempts: Sequence[Attempt], *, unjudged: bool) -> str:
    """Return the state of one attack on one step.

    An attack that the gate does not trust there found nothing that counts.
    """
    state = state_of(attempts)
    return "not judged" if unjudged and state == "no leak event" else state


def _unsaid(
    results: Results, attacks: Sequence[str], by_step: Mapping[str, Sequence[Attempt]]
) -> dict[str, AbstractSet[str]]:
    """Return the steps about which each attack, and all together, say nothing."""
    every = [attempt for found in by_step.values() for attempt in found]
    tried = {name: [a for a in every if name in ("", a.attack)] for name in ("", *attacks)}
    index = Index(results)
    return {name: {*unjudged_by(results, mine, OBSERVED, index)[0]} for name, mine in tried.items()}


def _aside(silent: int, unjudged: int) -> str:
    """Return sentences on the steps that are not counted, with a blank before each."""
    said = f" {counted(silent, 'unverifiable step')} without a leak event {_be(silent)} not counted." if silent else ""
    return said + (f" {counted(unjudged, 'step')} could not be judged." if unjudged else "")


def _row(step: _Step) -> dict[str, Any]:
    shown = "no number" if step.share is None else percent(step.share)
    loss = "no number" if step.loss is None else f"{step.loss:.4g}"
    rate = "no number" if step.rate is None else f"{step.rate:.4g}"
    return {"step": step.number, "phase": step.phase, "share": shown, "loss": loss, "rate": rate, "states": step.states}


def _text_share(attempt: Attempt) -> float | None:
    """Return how much of the batch's text an attack recovered, 0 to 1.

    It is the mean of `amount` over the texts; None if the attack guesses no text.
    """
    found = [share for s in attempt.sequences if (share := amount(s)) is not None]
    return fmean(found) if found else None


def _label_share(attempt: Attempt) -> float | None:
    found = attempt.scores.get("label_accuracy")
    return found.value if isinstance(found, Score) else None


def _lead(steps: Sequence[StepRecord], by_step: Mapping[str, Sequence[Attempt]], aside: str) -> str:
    """Return sentences on how many steps leaked, by the worst leak of each step."""
    if not steps:
        return f"No step could be judged.{aside}"
    worst = {step.step: severity(by_step[step.id]) for step in steps}
    leaked = [number for number, found in worst.items() if found]
    kinds = [
        f"{what} in {sum(found is level for found in worst.values())}"
        for level, what in (
            (Severity.SENTENCE, "a sentence"),
            (Severity.WORDS, "words"),
            (Severity.LABELS, "only labels"),
        )
        if level in worst.values()
    ]
    if not leaked:
        gave_up = sum(
            any(s.outcome == "search gave up" for a in by_step[step.id] for s in a.sequences) for step in steps
        )
        reach = f" In {gave_up} of them a text was in reach of a search that gave up." if gave_up else ""
        return f"No leak event in {counted(len(steps), 'audited step')}.{reach}{aside}"
    if len(steps) == 1:
        what = {Severity.SENTENCE: "a sentence", Severity.WORDS: "words", Severity.LABELS: "labels"}[worst[leaked[0]]]
        return f"One step was audited, step {leaked[0]}, and it leaked {what}. One step does not tell how often.{aside}"
    when = (
        f"step {leaked[0]}" if len(leaked) == 1 else f"the first at step {min(leaked)}, the last at step {max(leaked)}"
    )
    return f"{len(leaked)} of {len(steps)} audited steps leaked, {when}: {join(kinds)}.{aside}"


def _be(n: int) -> str:
    return "is" if n == 1 else "are"
