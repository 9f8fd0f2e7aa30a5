"""The wording of words and numbers that several parts of a report share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime

from leakaudit.gate.verdict import BaselineUsed, PooledRun, RuleVerdict, Status, Verdict
from leakaudit.gate.wording import at_least, at_most, number, percent
from leakaudit.results.schema import TextMode
from leakaudit.results.wording import counted

BANNERS = {
    TextMode.HASH: "HASHES ONLY: keyed hashes and numbers, no training text",
    TextMode.MASKED: "MASKED: no training text in this file; which parts of a text came back is real",
    TextMode.FULL: "CONTAINS REAL TRAINING TEXT: do not share",
}
"""Text mode -> how to handle a report, unless its texts were invented."""


INVENTED = "CONTAINS INVENTED TEXT: no real training text, as the configuration says"
"""How to handle a report with text if the owner of the data says that all texts were invented."""


def banner(mode: TextMode, invented: bool) -> str:
    """Return how to handle a report.

    Args:
        mode: how much text the report shows.
        invented: whether the owner of the data says that all texts were invented.
    """
    return INVENTED if invented and mode is TextMode.FULL else BANNERS[mode]


MEANINGS = {
    Status.PASS: "Within the policy, for the attacks that were run.",
    Status.FAIL: "Do not ship: what the policy protects can be read out of the updates.",
    Status.INCONCLUSIVE: "Undecided: not enough evidence to ship or to refuse.",
    Status.ERROR: "The evidence could not be judged.",
}


WAIVED = "It leaks more than the policy allows, and waivers accept that for a time."
"""The headline of a PASS that only waivers allow."""


WORSE = "Do not ship: more leaks than in the baseline."
"""The headline of a FAIL by a rule on the difference from the baseline."""


LEAKS = "Leaks; the rate is not yet bounded: do not ship."
"""The headline of an INCONCLUSIVE verdict on an update from which whole texts came back."""


NOT_BY_ATTACKS = "Do not ship: a number that others state is above what the policy allows."
"""The same of a FAIL that no attack of the audit brought about: an accountant's epsilon, or another auditor's results."""


def meaning(verdict: Verdict) -> str:
    """Return the verdict in a sentence, for a headline."""
    if verdict.verdict is Status.INCONCLUSIVE and verdict.texts_back:
        return LEAKS
    if verdict.verdict is Status.PASS and by_waiver(verdict):
        return WAIVED
    failed = [r for r in verdict.rules if r.level == "error" and r.status is Status.FAIL and not r.waived]
    if failed and all(rule.imported or rule.kind == "claimed_epsilon" for rule in failed):
        return NOT_BY_ATTACKS
    return WORSE if worse_than_baseline(verdict) else MEANINGS[verdict.verdict]


def by_waiver(verdict: Verdict) -> bool:
    """Return whether a rule at level error is waived."""
    return any(rule.waived and rule.level == "error" for rule in verdict.rules)


def worse_than_baseline(verdict: Verdict) -> bool:
    """Return whether a rule on the difference from the baseline decides a FAIL."""
    deciding = next((rule for rule in verdict.rules if rule.id == verdict.deciding_rule), None)
    return verdict.verdict is Status.FAIL and deciding is not None and deciding.kind == "versus_baseline"


OUTCOMES = {"search gave up": "in reach, but the search gave up", "out of reach": "not by these attacks"}
"""Outcome of a text that was not recovered -> its wording in the report."""


_COUNTS = re.compile(r"\d[\d,.]*(?:-\d+)?(?: to \d+(?:-\d+)?)?")


def without_repeats(reasons: Iterable[str]) -> list[str]:
    """Return reasons, and of those that differ in numbers only the first."""
    return list({_COUNTS.sub("#", reason): reason for reason in reversed(list(reasons))}.values())[::-1]


def rule_bounds(rule: RuleVerdict) -> str:
    """Return the bounds of what a rule observed, such as `4% to 21%`."""
    if rule.kind == "membership" and rule.lower is not None and rule.upper is not None:
        return f"{at_least(rule.lower, rule.threshold)} to {at_most(rule.upper, rule.threshold)}"
    if rule.n == 0:
        return "none"
    if rule.n == 1:
        return "none from 1 step"
    if rule.lower is None and rule.upper is None:
        return "none"
    if rule.kind == "versus_baseline":
        return f"{points(rule.lower or 0.0)} to {points(rule.upper or 0.0)} points"
    least, most = (at_least, at_most) if rule.k is not None else (number, number)
    beside = rule.threshold if rule.kind != "max_count" else None
    low = least(rule.lower, beside) if rule.lower is not None else "?"
    return f"{low} to {most(rule.upper, beside) if rule.upper is not None else '?'}"


def rule_seen(rule: RuleVerdict) -> str:
    """Return what a rule observed, such as `3 of 60 steps` or `p95 rougeL 0.31`."""
    if rule.versus is not None:
        return f"{rule.versus.k} of {counted(rule.versus.n, 'step')}, baseline {rule.versus.base_k} of {rule.versus.base_n}"
    if rule.k is not None:
        return f"{rule.k} of {counted(rule.n, 'step')}" if rule.n else "no evidence"
    return f"{rule.subject} {number(rule.observed)}" if rule.observed is not None else "no evidence"


def baseline_in_words(baseline: BaselineUsed) -> str:
    """Return the run of a baseline with the digest of its file, or of its results."""
    return f"run {baseline.run}, {baseline.digest or baseline.results_digest or 'no digest'}"


def points(difference: float) -> str:
    """Return the difference of two rates in points.

    >>> points(0.1), points(-0.0494)
    ('+10.0', '-4.9')
    """
    return f"{100 * difference:+.1f}"


def run_in_words(run: PooledRun) -> str:
    """Return what one of several runs adds, such as `run a: 10 steps, alone PASS`."""
    left_out = f", {run.repeated} counted elsewhere" if run.repeated else ""
    return f"run {run.run or 'without results'}: {counted(run.steps, 'step')}{left_out}, alone {run.verdict}"


def confidence_level(verdict: Verdict) -> str:
    """Return the confidence of the bounds, such as `95%`."""
    bounded = [rule for rule in verdict.rules if rule.kind != "claimed_epsilon"]
    return percent(bounded[0].confidence) if bounded else "95%"


def run_time(seconds: float) -> str:
    """Return a measured time with its unit, from `12 ms` to `3.5 h`."""
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def age_in_words(seconds: float) -> str:
    """Return an age in its largest unit, such as `2 hours` or `a day`."""
    import humanize

    return humanize.naturaldelta(max(0.0, seconds), months=False)


def rounded(n: int) -> str:
    """Return a large number with three digits and a unit, such as `22.7 M`."""
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if n >= size:
            return f"{n / size:.3g}{letter}"
    return str(n)


def date_and_time(text: str) -> str:
    """Return an ISO time as `2026-11-02 10:00 UTC`.

    Text that is not an ISO time is returned as it is.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text or "unknown"
    offset = moment.utcoffset()
    zone = "" if offset is None else " UTC" if not offset else moment.strftime(" %z")
    return moment.strftime("%Y-%m-%d %H:%M") + zone


def short_digest(digest: str) -> str:
    """Return the first twelve hex digits of a digest."""
    return digest.rpartition(":")[2][:12]


def policy_changed(verdict: Verdict) -> str:
    """Say in a word whether the run began with another policy."""
    if not verdict.policy_of_run:
        return "unknown"
    return "yes" if verdict.policy_changed else "no"


def listed(names: Sequence[str], most: int) -> str:
    """Return names, and how many more there are.

    >>> listed(["a", "b", "c"], 2), listed(["a", "b"], 2)
    ('a, b, 1 more', 'a, b')
    """
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def next_step(verdict: Verdict) -> str:
    """Return which defence to ship at what cost: `ship prune: ..., at a cost of ...`.

    It is empty if the verdict passes, or if it names no defence.
    """
    out = verdict.way_out
    if verdict.verdict is Status.PASS or out is None or not out.passing:
        return ""
    if not out.defense:
        return f"ship one of {', '.join(out.passing[:5])}, which pass; what they cost the model was not measured."
    cost = f"at a cost of {out.cost}" if out.cost else "at a cost to the model that was not measured"
    return f"ship {', '.join(filter(None, [f'{out.defense}: {out.seen}' if out.seen else out.defense, cost]))}."
