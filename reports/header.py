"""The first screen of a report: the deciding rule, facts and identity."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from leakaudit.gate.verdict import RuleVerdict, Status, Verdict, Versus
from leakaudit.gate.wording import allowed, number, percent, rate_between
from leakaudit.reports.charts import RateBar, rate_chart
from leakaudit.reports.escaping import plain
from leakaudit.reports.wording import age_in_words, date_and_time, rule_bounds, short_digest
from leakaudit.results.bounds import lower_bound, upper_bound
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted


@dataclass(frozen=True)
class Fact:
    """One figure of the first screen."""

    name: str
    value: str
    note: str = ""


def headline(verdict: Verdict) -> Markup | None:
    """Draw the deciding rule against its limit; None without evidence."""
    rule = next((rule for rule in verdict.rules if rule.id == verdict.deciding_rule), None)
    if rule is None or rule.n == 0 or rule.observed is None:
        return None
    if rule.versus is not None:
        return _against_baseline(rule, rule.versus)
    # a limit on a count does not fit an axis of rates, so the limit of a rule on the rate of the same event is drawn
    companions = (r for r in verdict.rules if r.kind == "max_rate" and r.subject == rule.subject)
    limiting = next(companions, None) if rule.kind == "max_count" else rule
    limit = limiting.threshold if limiting is not None else None
    if rule.k is None:
        rate, leaks = rule.observed, rule.observed > rule.threshold
        note = f"{rule.subject} {number(rule.observed, rule.threshold)}"
    else:
        rate, leaks = rule.k / rule.n, rule.k > 0
        note = f"{rule.k} of {counted(rule.n, 'step')}"
    if rule.upper is not None:
        one = rate_between(rule.lower or 0.0, rule.upper)  # the bar of one step is as long as what is not known
        note += f", {percent(rule.confidence)} bounds {one if rule.n == 1 else rule_bounds(rule)}"
    text = "" if limiting is None else f"{limiting.id} allows {percent(limiting.threshold)}"
    clean = (
        rule.status is Status.PASS and not rule.censored
    )  # a green dot would claim more than an undecided rule shows
    bar = RateBar("", rate, rule.lower, rule.upper, plain(note), "leak" if leaks else "clean" if clean else "open")
    return rate_chart([bar], limit, text, plain(f"{note}; {text}" if text else note))


def _against_baseline(rule: RuleVerdict, versus: Versus) -> Markup:
    """Draw the rates of the baseline and of this audit, each with its bounds."""
    bars = [
        RateBar(
            name,
            k / n,
            lower_bound(k, n, rule.confidence),
            upper_bound(k, n, rule.confidence),
            f"{k} of {counted(n, 'step')}",
            "leak" if k else "clean" if rule.status is Status.PASS and not rule.censored else "open",
        )
        for name, k, n in (("baseline", versus.base_k, versus.base_n), ("this audit", versus.k, versus.n))
    ]
    change = f"bounds of the difference {rule_bounds(rule)}, {rule.id} allows {allowed(rule.kind, rule.threshold)}"
    return rate_chart(bars, None, "", plain("; ".join([*(f"{bar.name} {bar.note}" for bar in bars), change])))


def facts(results: Results, verdict: Verdict) -> list[Fact]:
    """Return the figures below the verdict."""
    deciding = [rule for rule in verdict.rules if rule.level == "error"]
    warned = sum(rule.status is not Status.PASS for rule in verdict.rules if rule.level == "warn")
    words = {Status.ERROR: "in error", Status.FAIL: "failed", Status.INCONCLUSIVE: "undecided", Status.PASS: "passed"}
    counts = [(sum(rule.status is status for rule in deciding), word) for status, word in words.items()]
    total = results.coverage.total_steps
    of = f"of {total} in the run" if total else ""
    unverified = [f"{verdict.unverified_steps} left out, from another batch"] if verdict.unverified_steps else []
    unverified += [f"{verdict.unverifiable_steps} unverifiable"] if verdict.unverifiable_steps else []
    age = age_in_words(verdict.evidence_age_s) + " old" if verdict.evidence_age_s is not None else "of unknown age"
    controls = ", ".join(f"{c.kind or c.name} {c.k}/{c.n}" for c in verdict.controls) or "not judged"
    trouble = ", ".join(f"{c.kind or c.name} {c.state}" for c in verdict.controls if c.state != "ok")
    owner = f"owned by {verdict.policy_owner}" if verdict.policy_owner else ""
    return [
        Fact(
            "Rules",
            ", ".join(f"{n} {word}" for n, word in counts if n) or "none judged",
            f"and {counted(warned, 'warning')}" if warned else "",
        ),
        Fact("Audited steps", str(len(results.steps)), "; ".join(x for x in (of, *unverified) if x)),
        Fact("Controls", controls, trouble or ("as they should be" if verdict.controls else "")),
        Fact("Evidence", age, f"valid until {date_and_time(verdict.valid_until)}" if verdict.valid_until else ""),
        Fact("Policy", verdict.policy, ", ".join(filter(None, [owner, short_digest(verdict.policy_digest)]))),
        Fact("Sign-off", "on paper, at Provenance"),
    ]


def identity(results: Results) -> list[Fact]:
    """Return data and code; the first line of the page names run, model and date."""
    subject = results.subject
    dirty = {True: "with uncommitted changes", False: "clean", None: ""}[subject.code_dirty]
    return [
        Fact("Data set", subject.data or "no name given"),
        Fact("Git commit", (subject.code_commit or "not recorded")[:40], dirty),
    ]
