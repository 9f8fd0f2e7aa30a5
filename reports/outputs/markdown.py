"""Markdown: one screen for a step's summary, a merge request and a model card."""

from __future__ import annotations

from collections.abc import Sequence

from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.gate.way_out import effective
from leakaudit.gate.wording import allowed
from leakaudit.reports.escaping import markdown_text
from leakaudit.reports.wording import (
    age_in_words,
    by_waiver,
    confidence_level,
    date_and_time,
    meaning,
    next_step,
    rule_bounds,
    rule_seen,
    run_in_words,
    short_digest,
    worse_than_baseline,
)
from leakaudit.results.wording import counted

MOST_BYTES = 60_000
"""Most bytes of a summary. GitHub drops a summary of more than 1 MiB as a whole and comments of more than 65,536 characters; our choice leaves
room for the lines around it."""

MOST_RUNS = 50
"""Most runs that a summary lists. Our choice: they take a tenth of its size."""

NEXT = {
    Status.PASS: "Ship with this verdict, and audit the next release anew: a pass is about these updates and these attacks.",
    Status.FAIL: "Do not ship. Open the report for what came back, choose a defence that passes, and audit again.",
    Status.INCONCLUSIVE: "Do not ship on this. Audit more steps, or mend what the points below the table name, and judge again.",
    Status.ERROR: "Nothing was judged. Mend the problem below, and judge again.",
}
"""What to do next."""

WAIVED = "Ship only if the waivers below cover this release, repair before they end, and audit the next release anew."
"""What to do next where only waivers let the verdict pass."""

WORSE = "Do not ship. Find what changed since the baseline, and audit again."
"""What to do next after a regression."""

ALLOWED = (
    "Nothing is decided, and that is allowed here. Audit more steps: this is no evidence that the updates are safe."
)
"""What to do next where an undecided verdict is accepted."""


def summary(verdict: Verdict) -> str:
    """Return a verdict as Markdown of at most `MOST_BYTES`.

    First what was found and what to do, then a table of the rules, the reasons, and what the audit does not show.
    """
    by = " by waiver" if verdict.verdict is Status.PASS and by_waiver(verdict) else ""
    head = [
        f"### leakaudit: {verdict.verdict} (exit {verdict.exit_code}){by}, {markdown_text(verdict.policy)}",
        "",
        f"**{markdown_text(meaning(verdict))}**",
        markdown_text(verdict.sentence),
        "",
        f"**Next:** {' '.join(filter(None, [_next(verdict), _way_out(verdict)]))}",
        "",
    ]
    table = [
        f"| Rule | Verdict | Seen | Bounds ({confidence_level(verdict)}) | Limit |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = [_row(rule) for rule in verdict.rules]
    foot = _foot(verdict)
    kept = _that_fit(rows, MOST_BYTES - _size([*head, *table, *foot]) - 100)
    more = [f"and {counted(len(rows) - len(kept), 'more rule')}"] if len(kept) < len(rows) else []
    shown = [*table, *kept, *more, ""] if rows else []
    return "\n".join([*head, *shown, *foot]) + "\n"


def _next(verdict: Verdict) -> str:
    """Return what to do next, in a sentence or two."""
    if verdict.allowed:
        return ALLOWED
    if verdict.verdict is Status.PASS and by_waiver(verdict):
        return WAIVED
    return WORSE if worse_than_baseline(verdict) else NEXT[verdict.verdict]


def _way_out(verdict: Verdict) -> str:
    """Return the defence to ship, as a sentence; empty if there is none to name."""
    step = next_step(verdict)
    return markdown_text(step[:1].upper() + step[1:])[:1000]


def _row(rule: RuleVerdict) -> str:
    cells = (
        f"{rule.id} (severity {rule.severity})",
        rule.word,
        rule_seen(rule),
        rule_bounds(rule),
        allowed(rule.kind, rule.threshold),
    )
    return f"| {' | '.join(markdown_text(cell) for cell in cells)} |"


def _foot(verdict: Verdict) -> list[str]:
    """Return the lines below the table."""
    open_rules = [rule for rule in verdict.rules if rule.status is not Status.PASS and not rule.waived]
    reasons = dict.fromkeys(reason for rule in open_rules for reason in rule.reasons)
    said = [*verdict.problems, *list(reasons)[:5], *[waiver.sentence for waiver in verdict.waivers]]
    lines = [f"- {markdown_text(reason)[:1000]}" for reason in said[:20]]
    if lines:
        lines.append("")
    passing = [one.defense for one in effective(verdict.alternatives)]
    if passing and verdict.verdict is not Status.PASS:
        lines += [f"Passes in this audit: {markdown_text(', '.join(passing[:5]))}.", ""]
    age = "" if verdict.evidence_age_s is None else f" Evidence of {age_in_words(verdict.evidence_age_s)} ago"
    until = f", valid until {markdown_text(date_and_time(verdict.valid_until))}" if verdict.valid_until else ""
    digest = short_digest(verdict.results_digest or verdict.results_sha256 or "") or "none"
    used = verdict.baseline
    base = "" if used is None else f", baseline `{short_digest(used.digest or used.results_digest) or 'none'}`"
    return [
        *lines,
        *[f"- {markdown_text(run_in_words(run))}" for run in verdict.runs[:MOST_RUNS]],
        *([f"- and {counted(len(verdict.runs) - MOST_RUNS, 'more run')}"] if len(verdict.runs) > MOST_RUNS else []),
        *([""] if verdict.runs else []),
        f"{_runs(verdict)}{counted(verdict.steps, 'step')} audited.{age}{until}. Results `{digest}`, policy `{short_digest(verdict.policy_digest)}`{base}.",
        "Not shown by an audit: other attacks, servers that choose weights, sums over clients, the released model itself. No training text is in this summary.",
    ]


def _runs(verdict: Verdict) -> str:
    return f"{counted(len(verdict.runs), 'run')}, " if verdict.runs else ""


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def _that_fit(rows: Sequence[str], room: int) -> list[str]:
    """Return the first rows that take at most `room` bytes."""
    kept: list[str] = []
    for row in rows:
        room -= len(row.encode()) + 1
        if room < 0:
            break
        kept.append(row)
    return kept
