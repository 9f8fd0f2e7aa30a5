"""The section on what leaked at which training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from leakaudit.gate.wording import percent
from leakaudit.reports.cells import OBSERVED, attack_names, state_of
from leakaudit.reports.charts import STATES, StepMark, step_chart
from leakaudit.reports.escaping import plain
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import MOST_ROWS, Section
from leakaudit.results.recovery import Severity, amount, is_silent, join, severity
from leakaudit.results.schema import Attempt, Score, StepRecord
from leakaudit.results.wording import counted

_SEARCHED = ("no leak event", "out of time", "in reach, not found")
"""States of attacks that ran and found nothing that counts."""


def section(redacted: RedactedResult) -> Section:
    """Show the state of every attack at every step, and how much came back."""
    results = redacted.results
    usable = [s for s in results.steps if s.verification.status.attacked]
    attacks = attack_names(results)
    by_step: dict[str, list[Attempt]] = {step.id: [] for step in usable}
    for attempt in results.attempts:
        if attempt.defense == OBSERVED:
            by_step[attempt.step].append(attempt)
    silent = {step.id for step in usable if is_silent(step, by_step[step.id])}
    measure, name = (
        (_text_share, "share of the text")
        if any(_text_share(a) is not None for a in results.attempts)
        else (
            _label_share,
            "share of the labels",
        )
    )
    marks, shares, table = [], [], []
    for step in usable:
        attempts = by_step[step.id]
        found = [share for a in attempts if (share := measure(a)) is not None]
        share = max(found) if found and step.id not in silent else None
        states = [state_of([a for a in attempts if a.attack == attack]) for attack in attacks]
        if step.id in silent:
            states = ["unverifiable" if state in _SEARCHED else state for state in states]
        marks += [StepMark(step.step, plain(attack), state) for attack, state in zip(attacks, states, strict=True)]
        shares.append((step.step, share))
        shown = "no number" if share is None else percent(share)
        table.append({"step": step.step, "phase": step.phase, "share": shown, "states": states})
    lead = _steps_lead([step for step in usable if step.id not in silent], by_step, len(silent))
    chart = None
    if len(usable) > 1 and attacks:
        chart = step_chart(marks, shares, plain(lead), name)
    gap = any(share is None for _, share in shares)
    gap_note = f"A dotted upright line is a step without a number for the {name}, which is not the same as 0%."
    return Section(
        "steps",
        "Step by step",
        {
            "attacks": attacks,
            "lead": lead,
            "chart": chart,
            "table": table[:MOST_ROWS],
            "gap": gap_note * gap,
            "states": [name for name in STATES if any(mark.state == name for mark in marks)],
            "share_name": f"{name.capitalize()} that came back, by the best attack",
        },
        heading="What leaked, step by step",
    )


def _text_share(attempt: Attempt) -> float | None:
    """Return how much of the batch's text an attack got.

    The measure that shows most of it counts. None where it guesses no text.
    """
    found = [share for s in attempt.sequences if (share := amount(s)) is not None]
    return fmean(found) if found else None


def _label_share(attempt: Attempt) -> float | None:
    found = attempt.scores.get("label_accuracy")
    return found.value if isinstance(found, Score) else None


def _steps_lead(steps: Sequence[StepRecord], by_step: Mapping[str, Sequence[Attempt]], silent: int) -> str:
    """Say in how many steps what leaked, each step by the worst of it."""
    aside = f" {counted(silent, 'unverifiable step')} without a leak event {_be(silent)} not counted." if silent else ""
    if not steps:
        return f"No step could be audited.{aside}"
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
        return (
            f"One step was audited, step {leaked[0]}, and it leaked {what}. One step says nothing of how often.{aside}"
        )
    when = (
        f"step {leaked[0]}" if len(leaked) == 1 else f"the first at step {min(leaked)}, the last at step {max(leaked)}"
    )
    return f"{len(leaked)} of {len(steps)} audited steps leaked, {when}: {join(kinds)}.{aside}"


def _be(n: int) -> str:
    return "is" if n == 1 else "are"
