"""The result of an audit, as the last lines of a training log say it.

One line has the verdict; another line counts the kept steps that could not be checked.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from leakaudit.errors import ResultsError
from leakaudit.files.strict_json import read_bounded
from leakaudit.gate.events import EVENTS
from leakaudit.gate.policy import SHIPPED
from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.gate.wording import number
from leakaudit.results.as_sent import shipped_column
from leakaudit.results.files import load_results
from leakaudit.results.recovery import in_words, recovered
from leakaudit.results.schema import Results, StepRecord, VerificationStatus
from leakaudit.results.wording import counted

MAX_VERDICT_BYTES = 16 * 2**20
"""Largest `verdict.json` that is read, in bytes. Our choice: the verdict on a policy of a thousand rules takes a tenth of it."""


def outcome(folder: Path) -> tuple[str, ...]:
    """Return the result of an audit as a list of clauses.

    Args:
        folder: of the audit.

    Returns:
        A clause on the verdict. If kept steps could not be checked, a second clause counts them. The result is empty if the verdict or
        the results cannot be read.
    """
    try:
        verdict = Verdict.model_validate_json(read_bounded(folder / "verdict.json", MAX_VERDICT_BYTES))
        results = load_results(folder)
    except (OSError, ValueError, ValidationError, ResultsError):
        return ()
    unchecked = unchecked_steps(results)
    return (f"{verdict.verdict}: {headline(verdict, results)}", *([unchecked] if unchecked else []))


def outcome_lines(log: Path, *, detached: bool) -> list[str]:
    """Return lines with the verdict, the place of the report, and unchecked steps.

    Args:
        log: of the side process, beside the report.
        detached: whether the side process continues, and the report is still to come.
    """
    report = log.with_name("report.html")
    if detached:
        return [f"report to come: {report}"]
    if report.is_file():
        verdict, *unchecked = outcome(report.parent) or ("no verdict",)
        return [f"{verdict}; report: {report}", *unchecked]
    return [f"no report: see {log}" if log.exists() else "no report yet"]


def headline(verdict: Verdict, results: Results) -> str:
    """Return the numbers of the rule that decides.

    If the rule counts no step but something was recovered, the clause says so. If the rule is INCONCLUSIVE, the first reason follows.
    """
    rule = next((rule for rule in verdict.rules if rule.id == verdict.deciding_rule), None)
    if rule is None or not rule.n:
        return verdict.sentence.rstrip(".")
    clauses = [_numbers(rule)]
    if rule.defense == SHIPPED and not rule.k and (found := in_words(recovered(results, shipped_column(results)))):
        clauses[0] += f", but {found} came back"
    if rule.status is Status.INCONCLUSIVE and rule.reasons:
        first = rule.reasons[0].rstrip(".")
        clauses.append(first[0].lower() + first[1:])
    if results.run.interrupted:
        clauses.append("training or audit was interrupted")
    return "; ".join(clauses)


def _numbers(rule: RuleVerdict) -> str:
    if rule.k is None and rule.observed is None:
        return rule.sentence.rstrip(".")
    if rule.k is None:
        return f"{rule.subject} is {number(rule.observed or 0.0, rule.threshold)}, the policy allows {number(rule.threshold)}"
    event = EVENTS.get(rule.subject)
    if rule.versus is not None and event is not None:
        now, before = (rule.versus.k, rule.versus.n), (rule.versus.base_k, rule.versus.base_n)
        return f"{now[0]} of {counted(now[1], 'step')} {event.verb}, in the baseline {before[0]} of {before[1]}"
    return f"{rule.k} of {counted(rule.n, 'step')} {event.verb if event else f'had the event {rule.subject}'}"


def unchecked_steps(results: Results) -> str:
    """Return how many kept steps could not be checked, and why.

    The reason given is that of the first such step. The text is empty if all steps could be checked.
    """
    unchecked = [step for step in results.steps if not step.verification.status.bounds]
    if not unchecked:
        return ""
    said = (
        f"{len(unchecked)} of {counted(len(results.steps), 'kept step')} could not be checked, so {_worth(unchecked)}"
    )
    return f"{said}: {_why(unchecked[0])}"


def _worth(unchecked: list[StepRecord]) -> str:
    """Return what unchecked steps mean for the result, in a clause."""
    if all(step.verification.status is VerificationStatus.MISMATCH for step in unchecked):
        return "no attack ran on it" if len(unchecked) == 1 else "no attack ran on them"
    return "nothing that did not come back counts as safe"


def _why(step: StepRecord) -> str:
    return step.verification.note.strip().rstrip(".") or f"its update is stamped {step.verification.status}"
