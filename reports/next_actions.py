"""The box "Do next" of the first screen: what to do about the verdict."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.reports.escaping import plain
from leakaudit.reports.frontier import command_for, way_out
from leakaudit.reports.wording import date_and_time, listed
from leakaudit.results.conformance import CONTRADICTED
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted

_MOST_NAMES = 2
"""Most defences that a sentence of the box names. Our choice: the table of all is further down."""

_MOST = 4
"""Most actions in the box. Our choice: more do not fit beside the heat map, and nobody does them at once."""


@dataclass(frozen=True)
class Action:
    """One thing to do."""

    head: str
    text: str
    command: str = ""
    """A command line to copy; empty if there is none."""


def next_actions(results: Results, verdict: Verdict) -> list[Action]:
    """Return what to do next, the most useful first."""
    return list(_actions(results, verdict))[:_MOST]


def _actions(results: Results, verdict: Verdict) -> Iterator[Action]:
    if verdict.verdict is Status.ERROR:
        yield Action("Repair the evidence", verdict.problems[0] if verdict.problems else verdict.sentence)
        yield Action("Judge again", "After the repair, run the gate on the same folder.", "leakaudit gate RUN")
        return
    yield from _claim(results)
    is_open = verdict.verdict is Status.INCONCLUSIVE
    if not is_open:
        yield _ship(results, verdict)
    yield from _more_steps(results, verdict)
    yield from _blind(verdict)
    if is_open:
        yield from _unanswered(verdict)
        if verdict.alternatives:
            yield _ship(results, verdict)
    if verdict.verdict is not Status.PASS and verdict.alternatives and not results.utility:
        text = "What the tested defences cost the model was not measured. This measures it:"
        yield Action("Measure the price", text, plain(command_for(results)))


def _claim(results: Results) -> Iterator[Action]:
    """Return that the claimed epsilon does not hold for what the run does."""
    wrong = results.conformance.contradicted if results.conformance else ()
    if wrong:
        text = f"{CONTRADICTED}: {wrong[0].sentence}"
        more = f" {counted(len(wrong) - 1, 'more contradiction')} in the section on epsilon." if wrong[1:] else ""
        yield Action("Mend the privacy mechanism, then train again", text + more)


def _ship(results: Results, verdict: Verdict) -> Action:
    """Return what to ship, with its price if that was measured."""
    out = verdict.way_out
    if verdict.verdict is Status.PASS:
        until = f" The evidence is valid until {date_and_time(verdict.valid_until)}." if verdict.valid_until else ""
        return Action("Keep what you ship", way_out(results, verdict) + until)
    if out is not None and out.defense:
        return Action("Train with this defence, then audit again", way_out(results, verdict))
    if out is not None and out.passing:
        return Action("Train with one of these defences, then audit again", way_out(results, verdict))
    return Action("Find a defence that passes", _tested(verdict) or way_out(results, verdict))


def _tested(verdict: Verdict) -> str:
    """Say in short what became of the tested defences if none passes.

    Empty if none was tested.
    """
    words = {
        Status.FAIL: ("fails", "fail", "too"),
        Status.INCONCLUSIVE: ("is", "are", "undecided for lack of evidence"),
        Status.PASS: ("stops", "stop", "only attacks that did not know the defence"),
        Status.ERROR: ("is", "are", "in error"),
    }
    said = []
    for status, (one, several, rest) in words.items():
        names = [other.defense for other in verdict.alternatives if other.status is status]
        if names:
            said.append(f"{len(names)} {one if len(names) == 1 else several} {rest} ({listed(names, _MOST_NAMES)})")
    return f"Of {counted(len(verdict.alternatives), 'other tested defence')}, {'; '.join(said)}." if said else ""


def _more_steps(results: Results, verdict: Verdict) -> Iterator[Action]:
    """Return how many further steps without a leak would decide."""
    undecided = [r for r in verdict.rules if r.level == "error" and r.status is Status.INCONCLUSIVE]
    asked = [rule.more_clean_steps for rule in undecided if rule.more_clean_steps]
    if not asked:
        return
    more = max(asked)
    command = second_run(results.run.command, more, results.run.seed)
    where = "in a second run with another seed" if command else "in a second training run with another seed"
    text = f"Without a leak, they settle what is undecided. Audit them {where}, and judge both runs together:"
    judge = "leakaudit gate RUN-1 RUN-2"
    yield Action(f"Audit {counted(more, 'more step', 'more steps')}", text, f"{command}\n{judge}" if command else judge)


def second_run(command: str, steps: int, seed: int) -> str:
    """Return the command of a run with other steps and another seed, to be copied.

    Paths and texts, which results do not keep, are words in capital letters. It is empty if the command cannot make steps.

    >>> second_run("leakaudit simulate --data <path> --steps 6 --defenses sign,clip(norm=1) --out <path>", 53, 0)
    "leakaudit simulate --data PATH --defenses 'sign,clip(norm=1)' --steps 53 --seed 1 --out RUN-2"
    """
    given = dict(re.findall(r" --(steps|seeds?|out) (\S+)", command))
    if "steps" not in given:
        return ""
    used = [int(number) for number in re.findall(r"\d+", given.get("seeds", str(seed)))]
    kept = re.sub(r" --(steps|seeds?|out) \S+", "", command).split()
    new = ["--steps", str(steps), "--seed", str(max(used) + 1), "--out", "RUN-2"]
    return shlex.join([word.strip("<>").upper() if word.startswith("<") else word for word in [*kept, *new]])


def _blind(verdict: Verdict) -> Iterator[Action]:
    """Return what the audit could not see, and what makes it see."""
    for control in verdict.controls:
        if control.state == "ok":
            continue
        what = f"{control.name} control" + (f" of {control.kind}" if control.kind else "")
        cure = {
            "not run": "Run the audit with its control steps.",
            "failed": "Check attack and budget on a step whose text is known, then audit again.",
            "unproven": "Run more control steps.",
        }[control.state]
        yield Action(f"Open its eyes: {what} {control.state}", f"{control.sentence} {cure}")
    unseen = max((rule for rule in verdict.rules if rule.unjudged), key=_unjudged, default=None)
    if unseen is not None:
        why = f" {unseen.reasons[0]}" if unseen.reasons else ""
        text = f"No attack could judge them for rule {unseen.id}.{why} Give the attacks more time, or add one that reads this kind of step."
        yield Action(f"Open its eyes: {counted(unseen.unjudged, 'step')} not judged", text)


def _unanswered(verdict: Verdict) -> Iterator[Action]:
    """Return the undecided rules that no attack gave evidence for."""
    for rule in verdict.rules:
        if rule.level == "error" and rule.status is Status.INCONCLUSIVE and not (rule.n or rule.unjudged):
            yield Action(f"Give rule {rule.id} evidence", " ".join(rule.reasons[:1]) or rule.sentence)


def _unjudged(rule: RuleVerdict) -> int:
    return rule.unjudged
