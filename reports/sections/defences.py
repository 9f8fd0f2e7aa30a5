"""The section that compares the tested defences with what the run ships."""

from __future__ import annotations

from typing import Literal

from leakaudit.gate.events import EVENTS
from leakaudit.gate.wording import percent, rate_between
from leakaudit.reports.cells import OBSERVED, shown_name
from leakaudit.reports.charts import RateBar, rate_chart
from leakaudit.reports.comparison import compare
from leakaudit.reports.escaping import plain
from leakaudit.reports.frontier import outcomes_of
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.reports.wording import confidence_level
from leakaudit.results import bounds as stats
from leakaudit.results.as_sent import shipped_column
from leakaudit.results.privacy import stated


def section(redacted: RedactedResult) -> Section | None:
    """Compare the defences by the rule that matters most, with the gate's own numbers."""
    results, verdict = redacted.results, redacted.verdict
    rule = next((r for r in verdict.rules if r.kind == "max_rate" and r.level == "error"), None)
    rule = rule or next((r for r in verdict.rules if r.k is not None), None)
    shipped = shipped_column(results)
    if rule is None or (not verdict.alternatives and shipped == OBSERVED):
        return None
    figures = dict.fromkeys([OBSERVED, shipped, *(a.defense for a in verdict.alternatives)])
    found = {defense: outcomes_of(results, defense, rule) for defense in figures}
    rows, bars = [], []
    for defense, seen in found.items():
        k, n, late = seen.leaked, len(seen.by_step), seen.open + len(seen.out_of_time)
        lower, upper = seen.lower, seen.upper
        others = seen.unjudged - len(seen.out_of_time)
        note = (f"{k} of {n}" if n else "none judged") + (f", {late} not finished" if late else "")
        note += f", {others} not judged" if others else ""
        rows.append(
            {
                "name": shown_name(results, defense),
                "seen": note if n or late else "no evidence",
                "bounds": rate_between(lower, upper) if seen.finished > 1 else "none",
                "paired": _paired(defense, shipped, compare(found[OBSERVED], seen)),
                "attacker": _attacker(defense, shipped),
            }
        )
        if n + late > 1:
            state = _bar_state(k, seen.finished, late + others)
            bars.append(RateBar(plain(shown_name(results, defense)), k / max(1, n), lower, upper, note, state))
    limit = rule.threshold if rule.kind == "max_rate" else None
    text = f"{rule.id} allows {percent(limit)}" if limit is not None else ""
    what = EVENTS[rule.subject].short if rule.subject in EVENTS else f"{rule.subject} came back"
    lead = f"Share of steps in which {what} (rule {rule.id})."
    if any(seen.open or seen.out_of_time for seen in found.values()):
        lead += " A step that was not finished takes no part in the sign test."
    if any(bar.found == "open" for bar in bars):
        lead += f" A hollow dot shows no protection: it has unfinished steps, or fewer than {stats.MIN_STEPS_FOR_SIGN_TEST} steps."
    chart = rate_chart(bars, limit, text, plain(lead)) if len(bars) > 1 else None
    sure = confidence_level(verdict)
    privacy = [f"{shown_name(results, one.defense)}: {stated(one)}" for one in results.privacy]
    return Section(
        "defences",
        "Do the defences help?",
        {"rows": rows, "chart": chart, "lead": lead, "sure": sure, "privacy": privacy},
    )


def _paired(defense: str, shipped: str, stopped: str) -> str:
    """Return what a row says beside the produced update, which the first row shows."""
    if defense != OBSERVED:
        return f"this is what is shipped; {stopped}" if defense == shipped else stopped
    return "this is what is shipped" if shipped == OBSERVED else "before anything changed it"


def _attacker(defense: str, shipped: str) -> str:
    if defense == shipped:
        return "sees the update as sent"
    return "would see the update of the training" if defense == OBSERVED else "knows the defence"


def _bar_state(leaked: int, finished: int, unfinished: int) -> Literal["leak", "clean", "open"]:
    if leaked:
        return "leak"
    return "open" if unfinished or finished < stats.MIN_STEPS_FOR_SIGN_TEST else "clean"
