"""The section on the worst case, and on defences that would pass."""

from __future__ import annotations

from typing import Any

from leakaudit.gate.policy import SHIPPED
from leakaudit.gate.verdict import Alternative, RuleVerdict, Status, Verdict
from leakaudit.gate.wording import number
from leakaudit.reports.evidence import evidence_anchor
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.reports.wording import run_time
from leakaudit.results.as_sent import shipped_column
from leakaudit.results.recovery import in_words, recovered
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted


def section(redacted: RedactedResult) -> Section:
    """Name the worst case, and judge the policy as if another defence were shipped."""
    results, verdict = redacted.results, redacted.verdict
    worst = _worst_rule(verdict)
    return Section(
        "risk",
        "Top risk",
        {
            "risk": _risk(results, verdict),
            "anchor": "" if worst is None else evidence_anchor(worst, redacted),
            "way_out": _way_out(results, verdict),
            "alternatives": [_alternative(results, alternative) for alternative in verdict.alternatives],
        },
    )


def _alternative(results: Results, alternative: Alternative) -> dict[str, Any]:
    return {
        "defense": alternative.defense,
        "status": alternative.status,
        "open": ", ".join(alternative.open_rules) or "none",
        "cost": _utility(results, alternative.defense) or "not measured",
    }


def _worst_rule(verdict: Verdict) -> RuleVerdict | None:
    return next((rule for rule in verdict.rules if rule.worst is not None), None)


def _risk(results: Results, verdict: Verdict) -> str:
    rule = _worst_rule(verdict)
    if rule is None or rule.worst is None:
        if any(rule.n for rule in verdict.rules):
            few = max(rule.unjudged for rule in verdict.rules)
            more = f" Up to {counted(few, 'step')} could not be judged." if few else ""
            return f"No attack recovered anything that a rule of this policy asks about.{more}"
        return "Nothing was measured that a rule of this policy asks about."
    worst = rule.worst
    step = next((s.step for s in results.steps if s.id == worst.step), worst.step)
    metric = results.catalogue.metric_label(rule.subject.split()[-1])
    value = f", with {metric} {number(worst.value)}" if worst.value is not None else ""
    return (
        f"The worst case of rule {rule.id} ({rule.severity}) is training step {step}: "
        f"the attack {worst.attack} needed {run_time(worst.wall_s)}{value}."
    )


def _way_out(results: Results, verdict: Verdict) -> str:
    if verdict.verdict is Status.PASS:
        return _met(results, verdict)
    if verdict.verdict is Status.ERROR:
        return "Fix the problems with the evidence first."
    if not verdict.alternatives:
        return "No other defence than the one that the run ships was tested."
    passing = [a for a in verdict.alternatives if a.status is Status.PASS]
    if passing:
        best = min(passing, key=lambda a: _loss(results, a))
        cost = _utility(results, best.defense)
        return f"Shipping {best.defense} would pass ({cost or 'cost to the model not measured'})."
    undecided = [a.defense for a in verdict.alternatives if a.status is Status.INCONCLUSIVE]
    if undecided and verdict.verdict is Status.FAIL:
        return f"No tested defence passes yet. Undecided for lack of evidence: {', '.join(undecided)}."
    return "No tested defence passes."


def _met(results: Results, verdict: Verdict) -> str:
    """Say under which defence a policy is met."""
    looked = dict.fromkeys(rule.defense for rule in verdict.rules if rule.level == "error")
    if {SHIPPED, shipped_column(results)} & {*looked}:
        return "The policy is met already."
    back = in_words(recovered(results, shipped_column(results)))
    return f"The policy is met under {', '.join(looked)}, which the run does not ship" + (
        f"; from the update that it ships, {back} came back." if back else "."
    )


def _loss(results: Results, alternative: Alternative) -> float:
    """Return the loss of utility under a defence; infinity if it was not measured."""
    for utility in results.utility:
        if utility.defense == alternative.defense and utility.baseline is not None:
            return utility.baseline - utility.value
    return float("inf")


def _utility(results: Results, defense: str) -> str:
    found = [u for u in results.utility if u.defense == defense]
    return "; ".join(
        f"{u.metric} {u.value:.3g}" + (f", {u.baseline:.3g} without" if u.baseline is not None else "") for u in found
    )
