"""The section on how certain the evidence is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.gate.wording import at_most, percent, rate_between
from leakaudit.reports.escaping import plain
from leakaudit.reports.pictures import Limited, limits_chart
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.results import bounds as stats
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted


# ------------------------------------------------------------------------------------- confidence, coverage, cost, origin
def section(redacted: RedactedResult) -> Section:
    """Say what the number of verified steps can show, and what the controls found."""
    results, verdict = redacted.results, redacted.verdict
    n = sum(step.verification.status.bounds for step in results.steps)
    if n == 0:
        text = "No client step could be verified, so nothing is known about how often text leaks. "
    elif n == 1:
        text = "1 step was verified: what leaked in it is a fact, and what did not leak in it bounds nothing. "
        text += "The leak rate may be anything up to 95%."
    else:
        clean = at_most(stats.upper_bound(0, n))
        text = f"{n} client steps were verified and audited. Had none of them leaked, the leak rate could still be up to {clean}. "
    if n != 1:
        text += "It takes 59 steps without a leak to bound the rate by 5%, and 299 to bound it by 1%."
    lines = [line for line in [_unverifiable_line(results)] if line]
    lines += [control.sentence for control in verdict.controls]
    lines += [f"Note on the {name} control: {c.note}" for name, c in _notes(results)]
    rows, said = _limits(verdict), _to_green(verdict)
    picture = {
        "chart": limits_chart(rows, plain(said)) if rows else None,
        "said": said,
        "rows": [_row(row) for row in rows],
    }
    return Section("confidence", "How sure is this?", {"confidence": text, "controls": lines} | picture)


def _rated(verdict: Verdict) -> list[RuleVerdict]:
    """Return the rules on a rate that have evidence."""
    return [r for r in verdict.rules if r.kind == "max_rate" and r.k is not None and r.n and r.upper is not None]


def _limits(verdict: Verdict) -> list[Limited]:
    rows = []
    for rule in _rated(verdict):
        k, upper, lower = rule.k or 0, rule.upper or 0.0, rule.lower or 0.0
        clean = rule.status is Status.PASS and not rule.censored and not k
        found: Literal["leak", "clean", "open"] = "leak" if k else "clean" if clean else "open"
        rows.append(
            Limited(
                plain(rule.id), k / rule.n, lower, upper, rule.threshold, f"{k} of {rule.n}, {_needed(rule)}", found
            )
        )
    return rows


def _needed(rule: RuleVerdict) -> str:
    if rule.status is Status.PASS:
        return "passes"
    if rule.more_clean_steps is None:
        return "above its limit" if (rule.lower or 0.0) > rule.threshold else "not decided"
    return f"passes after {counted(rule.more_clean_steps, 'more clean step')}"


def _to_green(verdict: Verdict) -> str:
    """Return the answer of the picture.

    Which rules are decided, and how many steps the others need.
    """
    rules = _rated(verdict)
    over = sum((r.lower or 0.0) > r.threshold for r in rules)
    needed = [r.more_clean_steps for r in rules if r.more_clean_steps is not None and r.status is not Status.PASS]
    said = [
        f"{sum(r.status is Status.PASS for r in rules)} of {counted(len(rules), 'rule')} on rates {_is(len(rules))} met"
    ]
    if over:
        said.append(f"the whole interval of {over} lies above the limit")
    if needed:
        said.append(f"to meet the others takes at least {counted(max(needed), 'more step')} without a leak")
    return "; ".join(said) + "."


def _is(n: int) -> str:
    return "is" if n == 1 else "are"


def _row(one: Limited) -> dict[str, str]:
    bounds = rate_between(one.lower, one.upper)
    return {
        "rule": one.name,
        "rate": percent(one.rate),
        "bounds": bounds,
        "limit": percent(one.limit),
        "note": one.note,
    }


def _unverifiable_line(results: Results) -> str:
    """Return sentences on the steps that cannot be verified, with the reasons.

    They also say how these steps change the bounds. The text is empty if every step can be verified.
    """
    found = [
        step for step in results.steps if step.verification.status.attacked and not step.verification.status.bounds
    ]
    if not found:
        return ""
    reasons = Counter(step.verification.note or "no reason was recorded" for step in found)
    why = "; ".join(f"{reason} ({counted(n, 'step')})" for reason, n in reasons.items())
    n = len(found)
    return (
        f"{n} of {counted(len(results.steps), 'step')} cannot be verified: {why}. What came back from {_them(n)} is in the batch and "
        f"counts as a leak. Where there was no leak event, {_them(n, subject=True)} {'is' if n == 1 else 'are'} not counted: the bounds, the "
        "evidence that the policy asks for and the tests of defences use only the other steps."
    )


def _them(n: int, *, subject: bool = False) -> str:
    return "it" if n == 1 else "they" if subject else "them"


def _notes(results: Results) -> Iterable[tuple[str, Any]]:
    pairs = (("positive", results.controls.positive), ("negative", results.controls.negative))
    return [(name, control) for name, control in pairs if control.note]
