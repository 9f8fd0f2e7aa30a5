"""The report: one HTML file that opens offline, asks for nothing and is read without scripts.

`render_html` turns a `RedactedResult` into the page. Everything below it shapes data for `templates/report.html.j2`;
nothing here decides what may be shown (redaction.py) or what it means (gate.py).
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from leakaudit.errors import RedactionError
from leakaudit.files.private_files import write_atomic
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.events import EVENTS
from leakaudit.gate.policy import EvidencePolicy, Policy, default_policy
from leakaudit.gate.verdict import Alternative, RuleVerdict, Status, Verdict
from leakaudit.gate.wording import number, percent
from leakaudit.reports.charts import STATES, RateBar, StepMark, rate_chart, step_chart
from leakaudit.reports.comparison import compare, outcomes
from leakaudit.reports.labels import label_section
from leakaudit.reports.redaction import Recovered, RedactedResult, SequenceView, redact
from leakaudit.results import bounds as stats
from leakaudit.results.files import load_results
from leakaudit.results.journal import load_journal
from leakaudit.results.recovery import Severity, amount, is_silent, join, severity
from leakaudit.results.schema import (
    LENGTHS,
    Attempt,
    AttemptStatus,
    Missing,
    Results,
    Score,
    StepRecord,
    TextMode,
    Verification,
    VerificationStatus,
)
from leakaudit.results.summary import pooled
from leakaudit.results.wording import counted

BANNERS = {
    TextMode.HASH: "HASHES ONLY: keyed hashes and numbers, no training text",
    TextMode.MASKED: "MASKED: no training text in this file; which parts of a text came back is real",
    TextMode.FULL: "CONTAINS REAL TRAINING TEXT: do not share",
}
MEANINGS = {
    Status.PASS: "Within the policy, for the attacks that were run.",
    Status.FAIL: "Do not ship: what the policy protects can be read out of the updates.",
    Status.INCONCLUSIVE: "Undecided: the evidence is enough neither to ship nor to stop.",
    Status.ERROR: "The evidence could not be judged.",
}
_OBSERVED = "none"
_SEARCHED = ("no leak event", "out of time", "in reach, not found")
"""States of attacks that ran and found nothing that counts."""
_SHARES = (("rougeL", "ROUGE-L"), ("token_recall", "token recall"), ("label_accuracy", "label accuracy"))
_FATES = {"search gave up": "in reach, but the search gave up", "out of reach": "not by these attacks"}
_LEAKS = {
    Severity.SENTENCE: "sentence leaked",
    Severity.WORDS: "words leaked",
    Severity.LABELS: "labels leaked",
}
_MOST_CENSORED = EvidencePolicy().max_censored
"""Share of the attempts that may run out of time before a cell counts as not finished: the policy's own default."""
_MOST_ROWS = 200

GLOSSARY = (
    ("Client step", "One optimizer step of one client: the batch and the update that was sent for it. The unit of all rates."),
    ("Leak", "Something fixed before the audit came back. From the least to the worst: the exact label counts, every word of the batch or most words of a text, a whole text word for word."),
    ("No leak event", "None of these came back, and no search was cut off. The numbers beside it say how much did come back."),
    ("Bounds", "The lowest and highest leak rate that the counts are compatible with: one-sided Clopper-Pearson."),
    ("Out of time", "The attack was stopped at its time limit. More time might find more, so such a step says nothing of what a defence stops."),
    ("Not applicable", "The attack says that it cannot work here, and why. It is no evidence that nothing leaks."),
    ("Unverifiable", "A step that cannot be computed again, so nobody knows whether its update comes from the kept batch. What comes back from it is proof of a leak; where nothing comes back, it is no evidence."),
    ("Positive control", "An undefended step with known text that must be recovered. If it is not, the audit is blind."),
    ("Negative control", "An update of another batch. If the text is \"recovered\" from that, the scores are wrong."),
    ("ROUGE-1, -2, -L", "Overlap of recovered and true text in words, in pairs of words, and in the longest common order; 1 is all."),
    ("Token recall", "Share of the true tokens that were recovered, in whatever order."),
    ("Token precision", "Share of the recovered tokens that are right. A guess of every word has full recall and no precision."),
    ("In reach", "Tokens that were among an attack's candidates; sequences that would have passed its own test, had it tried them."),
    ("Search gave up", "The text was in reach, and the attack did not find it. More time or a better search might: no protection."),
    ("Not by these attacks", "The attacks that were run could not have found the text, however long they searched. Another attack may."),
    ("Lengths", LENGTHS),
    ("embedding-rows", "Reads which words were in the batch from which rows of the embedding received a gradient."),
    ("span", "Tests which sentences lie in the space that a layer's gradient spans. Where it applies it is exact."),
    ("tag", "Searches for inputs whose gradient looks like the observed one."),
    ("idlg, llg...", "Read the labels of the batch from the gradient of the classification head; random-labels is the floor under them."),
    ("feature-labels", "Finds every sequence's features in the update and reads its label from them. Where it applies it is exact."),
)  # fmt: skip


def render_html(redacted: RedactedResult) -> str:
    """Return the report as one HTML document.

    The same input gives the same text: no clock, no random id, no locale.
    """
    css = style(redacted.mode)
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    csp = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    return _templates().get_template("report.html.j2").render(page=_page(redacted) | {"css": Markup(css), "csp": csp})


def write_report(
    run_dir: Path,
    mode: TextMode | None = None,
    *,
    now: datetime,
    policy: Policy | None = None,
    verdict: Verdict | None = None,
    output: Path | None = None,
    allow_full: bool = False,
    allow_full_in_ci: bool = False,
) -> Path:
    """Render the run in `run_dir` and write the report, readable by its owner only.

    Args:
        run_dir: folder with `results.json` and, for mode full, `journal.jsonl`.
        mode: how much text to show; the policy's choice if None.
        now: the time of judgement, with time zone; used only if no verdict is given.
        policy: the rules; the built-in policy if None.
        verdict: the verdict where one was reached already.
        output: the file; `run_dir/report.html` if None.
        allow_full: leave for mode full where the policy gives none.
        allow_full_in_ci: also in CI.

    Returns:
        Path of the report.

    Raises:
        ResultsError: the results or the journal cannot be read.
        RedactionError: mode full without leave or text, in CI, or into a folder that everybody may write to.
    """
    policy = policy or default_policy()
    mode = mode or policy.report.text
    target = output or run_dir / "report.html"
    results = load_results(run_dir / "results.json")
    if verdict is None:
        digest = hashlib.sha256((run_dir / "results.json").read_bytes()).hexdigest()
        verdict = evaluate(results, policy, now=now, results_sha256=digest)
    redacted = redact(
        results,
        load_journal(run_dir / "journal.jsonl") if mode is TextMode.FULL else [],
        verdict,
        mode,
        allow_full=allow_full or policy.report.allow_full,
        allow_full_in_ci=allow_full_in_ci,
        top_samples=policy.report.top_samples,
    )
    if mode is TextMode.FULL and target.parent.stat().st_mode & stat.S_IWOTH and os.name == "posix":
        raise RedactionError(f"{target.parent} can be written to by everybody; write a full report somewhere private")
    write_atomic(target, render_html(redacted))
    return target


# ---------------------------------------------------------------------------------------------------------- hostile text


def visible(text: str) -> Markup:
    """Return `text` for HTML, with every character that could act instead of being read shown as its code.

    Controls (escape sequences too), directions, zero-width characters, lone surrogates and private-use characters: they
    reverse a verdict, hide a word or break the writer.
    """
    chip = Markup('<span class="chip">{}</span>')
    return Markup("").join(chip.format(_code(char)) if _acts(char) else escape(char) for char in str(text))


def plain(text: str) -> str:
    """Return `text` for attributes, titles and charts: the same codes, without markup."""
    return "".join(f"[{_code(char)}]" if _acts(char) else char for char in str(text))


def _acts(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def _code(char: str) -> str:
    return {"\n": "↵", "\t": "⇥"}.get(char, f"U+{ord(char):04X}")


def _finalize(value: Any) -> Any:
    """Pass every value that a template prints through `visible`; a forgotten None is a mistake, not a word."""
    if value is None:
        raise TypeError("the report was about to print None: say in words what is missing")
    return value if isinstance(value, Markup) or not isinstance(value, str) else visible(value)


def strip_in_words(strip: str) -> str:
    """Say what a strip shows, for a reader who hears it."""
    whole, none = sum(cell in "4d" for cell in strip), strip.count("0")
    order = sum(cell in "1234" for cell in strip)
    return (
        f"of {len(strip)} equal parts of the text {whole} came back, {len(strip) - whole - none} in part, {none} not; "
        f"{order} of them in order"
    )


_BARS = "▁▂▄▆█"


def strip_runs(strip: str) -> list[tuple[str, str]]:
    """Return a strip as (kind, bars): `b` came back in order, `u` without order, `.` did not come back."""
    return [(kind, "".join(map(_bar, cells))) for kind, cells in groupby(strip, key=_kind)]


def _kind(cell: str) -> str:
    return "." if cell == "0" else "b" if cell.isdigit() else "u"


def _bar(cell: str) -> str:
    return _BARS[int(cell) if cell.isdigit() else " abcd".index(cell)]


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": plain, "strip_in_words": strip_in_words, "strip_runs": strip_runs}
    return environment


@cache
def style(mode: TextMode) -> str:
    """Return the style sheet; the handling banner is repeated in the margin of every printed page."""
    margin = BANNERS[mode].partition(":")[0]
    pages = f'@page {{ margin: 18mm 16mm; @top-center {{ content: "{margin}"; font: 600 8pt sans-serif }} '
    pages += '@bottom-right { content: counter(page) " / " counter(pages); font: 8pt sans-serif } }\n'
    return (Path(__file__).parent / "templates" / "style.css").read_text(encoding="utf-8") + pages


# -------------------------------------------------------------------------------------------------------------- the page


def _page(redacted: RedactedResult) -> dict[str, Any]:
    """Return what the template prints, section by section."""
    results, verdict = redacted.results, redacted.verdict
    anchors = {(view.step, view.sequence): f"s-{i:04d}" for i, view in enumerate(redacted.sequences, start=1)}
    page: dict[str, Any] = {
        "mode": redacted.mode.value,
        "full": redacted.mode is TextMode.FULL,
        "hash": redacted.mode is TextMode.HASH,
        "banner": BANNERS[redacted.mode],
        "run": results.run,
        "verdict": verdict,
        "subject": f"{results.subject.model}, {_amount(results.subject.parameters)} parameters",
        "when": f", finished {_date(results.run.finished)}" if results.run.finished else "",
        "meaning": MEANINGS[verdict.verdict],
        "headline": _headline(verdict),
        "facts": _facts(results, verdict),
        "sure": percent(verdict.rules[0].confidence) if verdict.rules else "95%",
        "rules_lead": _rules_lead(verdict),
        "rules": [_rule_row(rule, anchors) for rule in verdict.rules],
        "risk": _risk(results, verdict),
        "risk_anchor": _risk_anchor(verdict, anchors),
        "way_out": _way_out(results, verdict),
        "alternatives": [
            {
                "defense": alternative.defense,
                "status": alternative.status,
                "open": ", ".join(alternative.open_rules) or "none",
                "cost": _utility(results, alternative.defense) or "not measured",
            }
            for alternative in verdict.alternatives
        ],
    }
    page |= _step_section(results) | _sample_section(redacted, anchors) | label_section(redacted)
    page |= _matrix_section(results) | _defense_section(results, verdict) | _confidence_section(results, verdict)
    page |= _coverage_section(results, verdict) | _cost_section(results) | _provenance_section(redacted)
    page["glossary"] = GLOSSARY
    page["sources"] = "results.json and the private journal" if page["full"] else "results.json alone"
    page["lengths"] = LENGTHS
    page["contents"] = [
        ("rules", "Rules"),
        ("risk", "Top risk"),
        ("steps", "Step by step"),
        ("samples", "Recovered against true"),
        *([("labels", "Labels")] if page["labels"] else []),
        ("matrix", "Attacks against defences"),
        *([("defences", "Do the defences help?")] if page["defense_rows"] else []),
        ("confidence", "How sure is this?"),
        ("coverage", "What was not tested"),
        ("cost", "Cost"),
        ("provenance", "Provenance"),
        ("glossary", "Glossary"),
    ]
    return page


@dataclass(frozen=True)
class Fact:
    """One figure of the first screen."""

    name: str
    value: str
    note: str = ""


def _headline(verdict: Verdict) -> Markup | None:
    """Draw the deciding rule against its limit, where there is more than one step to speak of."""
    rule = next((rule for rule in verdict.rules if rule.id == verdict.deciding_rule), None)
    if rule is None or rule.n < 2 or rule.observed is None:
        return None
    # a count has no place on an axis of rates; the rule on the rate of the same event has
    companions = (r for r in verdict.rules if r.kind == "max_rate" and r.subject == rule.subject)
    limiting = next(companions, None) if rule.kind == "max_count" else rule
    limit = limiting.threshold if limiting is not None else None
    if rule.k is None:
        rate, leaks = rule.observed, rule.observed > rule.threshold
        note = f"{rule.subject} {number(rule.observed, rule.threshold)}"
    else:
        rate, leaks = rule.k / rule.n, rule.k > 0
        note = f"{rule.k} of {rule.n} steps"
    note += f", {percent(rule.confidence)} bounds {_bounds(rule)}" if rule.upper is not None else ""
    text = "" if limiting is None else f"{limiting.id} allows {percent(limiting.threshold)}"
    clean = rule.status is Status.PASS and not rule.censored  # a green dot on what nothing decided would say more
    bar = RateBar("", rate, rule.lower, rule.upper, plain(note), "leak" if leaks else "clean" if clean else "open")
    return rate_chart([bar], limit, text, plain(f"{note}; {text}" if text else note))


def _facts(results: Results, verdict: Verdict) -> list[Fact]:
    deciding = [rule for rule in verdict.rules if rule.level == "error"]
    warned = sum(rule.status is not Status.PASS for rule in verdict.rules if rule.level == "warn")
    words = {Status.ERROR: "in error", Status.FAIL: "failed", Status.INCONCLUSIVE: "undecided", Status.PASS: "passed"}
    counts = [(sum(rule.status is status for rule in deciding), word) for status, word in words.items()]
    total = results.coverage.total_steps
    of = f"of {total} in the run" if total else ""
    unverified = [f"{verdict.unverified_steps} left out, from another batch"] if verdict.unverified_steps else []
    unverified += [f"{verdict.unverifiable_steps} unverifiable"] if verdict.unverifiable_steps else []
    age = _age(verdict.evidence_age_s) + " old" if verdict.evidence_age_s is not None else "of unknown age"
    controls = ", ".join(f"{c.name} {c.k}/{c.n}" for c in verdict.controls) or "not judged"
    trouble = ", ".join(f"{c.name} {c.state}" for c in verdict.controls if c.state != "ok")
    return [
        Fact(
            "Rules",
            ", ".join(f"{n} {word}" for n, word in counts if n) or "none judged",
            f"and {counted(warned, 'warning')}" if warned else "",
        ),
        Fact("Client steps audited", str(len(results.steps)), "; ".join(x for x in (of, *unverified) if x)),
        Fact("Controls", controls, trouble or ("both as they should be" if verdict.controls else "")),
        Fact("Evidence", age, f"valid until {_date(verdict.valid_until)}" if verdict.valid_until else ""),
        Fact("Policy", verdict.policy, _short(verdict.policy_digest)),
    ]


def _rules_lead(verdict: Verdict) -> str:
    owner = f", owned by {verdict.policy_owner}" if verdict.policy_owner else ""
    return f"Policy {verdict.policy}{owner}. What failed comes first."


@dataclass(frozen=True)
class RuleRow:
    """One rule as the table shows it."""

    verdict: RuleVerdict
    seen: str
    bounds: str
    limit: str
    evidence: str
    """Anchor of what speaks most against the rule, or nothing."""


def _rule_row(rule: RuleVerdict, anchors: dict[tuple[str, str], str]) -> RuleRow:
    if rule.k is not None:
        seen = f"{rule.k} of {rule.n}" if rule.n else "no evidence"
        limit = percent(rule.threshold) if rule.kind == "max_rate" else counted(int(rule.threshold), "step")
        limit = "none" if rule.threshold == 0 else limit
    else:
        seen = number(rule.observed, rule.threshold) if rule.observed is not None else "no evidence"
        limit = number(rule.threshold)
    return RuleRow(rule, seen, _bounds(rule), limit, _evidence(rule, anchors))


def _evidence(rule: RuleVerdict, anchors: dict[tuple[str, str], str]) -> str:
    """Return the anchor of the sample at the worst step, or of the matrix where none is shown."""
    if rule.worst is None:
        return ""
    return next((anchor for (step, _), anchor in anchors.items() if step == rule.worst.step), "matrix")


def _bounds(rule: RuleVerdict) -> str:
    if rule.n == 0:
        return "none"
    if rule.n == 1:
        return "none from 1 step"
    if rule.lower is None and rule.upper is None:
        return "none"
    write = percent if rule.k is not None else number
    beside = rule.threshold if rule.kind != "max_count" else None
    low = write(rule.lower, beside) if rule.lower is not None else "?"
    return f"{low} to {write(rule.upper, beside) if rule.upper is not None else '?'}"


def _worst_rule(verdict: Verdict) -> RuleVerdict | None:
    return next((rule for rule in verdict.rules if rule.worst is not None), None)


def _risk(results: Results, verdict: Verdict) -> str:
    rule = _worst_rule(verdict)
    if rule is None or rule.worst is None:
        if any(rule.n for rule in verdict.rules):
            return "No attack recovered anything that a rule of this policy asks about."
        return "Nothing was measured that a rule of this policy asks about."
    worst = rule.worst
    step = next((s.step for s in results.steps if s.id == worst.step), worst.step)
    value = f", with {_metric_name(rule)} {number(worst.value)}" if worst.value is not None else ""
    return (
        f"The worst case of rule {rule.id} ({rule.severity}) is training step {step}: "
        f"the attack {worst.attack} needed {_seconds(worst.wall_s)}{value}."
    )


def _risk_anchor(verdict: Verdict, anchors: dict[tuple[str, str], str]) -> str:
    rule = _worst_rule(verdict)
    return _evidence(rule, anchors) if rule is not None else ""


def _metric_name(rule: RuleVerdict) -> str:
    metric = rule.subject.split()[-1]
    return dict(_SHARES).get(metric, metric)


def _way_out(results: Results, verdict: Verdict) -> str:
    if verdict.verdict is Status.PASS:
        return "The policy is met already."
    if verdict.verdict is Status.ERROR:
        return "Mend the evidence first."
    if not verdict.alternatives:
        return "No defence was tested beside what the run ships."
    passing = [a for a in verdict.alternatives if a.status is Status.PASS]
    if passing:
        best = min(passing, key=lambda a: _loss(results, a))
        cost = _utility(results, best.defense)
        naive = "; it was attacked only by attacks that do not know it" if best.naive else ""
        return f"Shipping {best.defense} would pass ({cost or 'cost to the model not measured'}{naive})."
    undecided = [a.defense for a in verdict.alternatives if a.status is Status.INCONCLUSIVE]
    if undecided and verdict.verdict is Status.FAIL:
        return f"No tested defence passes yet. Undecided for want of evidence: {', '.join(undecided)}."
    return "No tested defence passes."


def _loss(results: Results, alternative: Alternative) -> float:
    """How much a defence costs the model; what was not measured comes last."""
    for utility in results.utility:
        if utility.defense == alternative.defense and utility.baseline is not None:
            return utility.baseline - utility.value
    return float("inf")


def _utility(results: Results, defense: str) -> str:
    found = [u for u in results.utility if u.defense == defense]
    return "; ".join(
        f"{u.metric} {u.value:.3g}" + (f", {u.baseline:.3g} without" if u.baseline is not None else "") for u in found
    )


# ------------------------------------------------------------------------------------------------------ step by step


def _step_section(results: Results) -> dict[str, Any]:
    usable = [s for s in results.steps if s.verification.status.attacked]
    attacks = attack_names(results)
    by_step: dict[str, list[Attempt]] = {step.id: [] for step in usable}
    for attempt in results.attempts:
        if attempt.defense == _OBSERVED:
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
        states = [_state([a for a in attempts if a.attack == attack]) for attack in attacks]
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
    return {
        "attacks": attacks,
        "steps_lead": lead,
        "steps_chart": chart,
        "steps_table": table[:_MOST_ROWS],
        "steps_gap": f"A dotted upright line is a step without a number for the {name}, which is not the same as 0%."
        * gap,
        "states": [name for name in STATES if any(mark.state == name for mark in marks)],
        "share_name": f"{name.capitalize()} that came back, by the best attack",
    }


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
        gave_up = sum(any(s.fate == "search gave up" for a in by_step[step.id] for s in a.sequences) for step in steps)
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


def _state(attempts: Sequence[Attempt]) -> str:
    """Return the cell state that says most of these attempts."""
    worst = severity(attempts)
    if worst:
        return _LEAKS[worst]
    if any(s.fate == "search gave up" for a in attempts for s in a.sequences):
        return "in reach, not found"
    finished = [a for a in attempts if a.finished]
    if finished:
        late = sum(a.status is AttemptStatus.BUDGET_EXHAUSTED for a in finished)
        return "out of time" if late > _MOST_CENSORED * len(finished) else "no leak event"
    states = {a.status for a in attempts}
    for status, word in ((AttemptStatus.ERROR, "error"), (AttemptStatus.NOT_APPLICABLE, "not applicable")):
        if status in states:
            return word
    return "not run"


# --------------------------------------------------------------------------------------------------------------- samples


def _sample_section(redacted: RedactedResult, anchors: dict[tuple[str, str], str]) -> dict[str, Any]:
    steps = {step.id: step.step for step in redacted.results.steps}
    exact = sum(view.recovered[0].scores.exact or False for view in redacted.sequences)
    shown = len(redacted.sequences)
    if not shown:
        lead = "No attack that guesses text finished, so there is nothing to compare."
    else:
        lead = {
            TextMode.HASH: f"Keyed hashes stand for the texts. {LENGTHS}",
            TextMode.MASKED: f"A strip is one text in sixteen equal parts; the words are not here. {LENGTHS}",
            TextMode.FULL: "This is the text of the training batch. Treat it as the data it is.",
        }[redacted.mode]
        lead += f" {exact} of {shown} below came back word for word. For each, the attack that got most of it is shown."
    more = redacted.hidden_sequences
    return {
        "samples": [_sample(view, steps, anchors) for view in redacted.sequences],
        "samples_lead": lead,
        "samples_more": f"{counted(more, 'further text')} came back to a lesser part; results.json has the numbers."
        if more
        else "",
    }


def _sample(view: SequenceView, steps: dict[str, int], anchors: dict[tuple[str, str], str]) -> dict[str, Any]:
    return {
        "anchor": anchors[view.step, view.sequence],
        "step": steps[view.step],
        "name": view.sequence,
        "hmac": view.hmac,
        "length": view.length,
        "true": next((item.true for item in view.recovered if item.true is not None), None),
        "words": "word for word" if view.recovered[0].scores.exact else "",
        "recovered": [
            {
                "ships": item.defense == _OBSERVED,
                "defense": item.defense,
                "guess": item.guess,
                "strip": item.strip,
                "scores": item.scores,
                "caption": _sample_caption(item),
            }
            for item in view.recovered
        ],
    }


def _sample_caption(item: Recovered) -> str:
    found = item.scores
    shares = (("token recall", found.token_recall), ("precision", found.token_precision))
    words = ["word for word"] if found.exact else []
    words += [f"{name} {percent(value)}" for name, value in shares if value is not None]
    if "longest_run" in found.scores and not found.exact:
        words.append(f"longest run {percent(found.scores['longest_run'])} of the text")
    rouge = (("ROUGE-1", "rouge1"), ("ROUGE-2", "rouge2"), ("ROUGE-L", "rougeL"))
    words += [f"{name} {found.scores[metric]:.2f}" for name, metric in rouge if metric in found.scores]
    words += ["words without order"] if found.exact is None and found.token_recall is not None else []
    words += [_FATES[found.fate]] if found.fate in _FATES else []
    late = ", out of time" if item.status is AttemptStatus.BUDGET_EXHAUSTED else ""
    proved = ", proved by re-simulation" if found.proved else ""
    return f"{item.attack}, {_seconds(item.wall_s)}{late}: " + ", ".join(words) + proved


# ---------------------------------------------------------------------------------------------------------- the matrix


@dataclass(frozen=True)
class Cell:
    """One attack under one defence."""

    state: str
    lines: tuple[str, ...]
    ships: bool

    @property
    def css(self) -> str:
        """The state as a class name."""
        return self.state.replace(",", "").replace(" ", "-")


def _matrix_section(results: Results) -> dict[str, Any]:
    attacks, defenses = attack_names(results), defense_names(results)
    table = []
    for attack in attacks:
        cells = [cell_for(results, attack, d) for d in defenses]
        table.append({"name": attack, "cells": cells, "worst": False})
    if len(attacks) > 1:
        cells = [_cell(results, [a for a in results.attempts if a.defense == d], d, whole=True) for d in defenses]
        table.append({"name": "any of them", "cells": cells, "worst": True})
    shipped = sorted({step.shipped_defense for step in results.steps} - {_OBSERVED})
    note = f"as the run ships it: {', '.join(shipped)}" if shipped else "as the run ships it"
    lead = (
        "One cell is one attack under one defence over all steps that are evidence. Every cell says what came back. The outlined "
        "column is what the run ships."
    )
    if not table:
        lead = "No attack was run."
    return {
        "matrix_lead": lead,
        "columns": [
            {"name": d, "ships": d == _OBSERVED, "note": note if d == _OBSERVED else _grants(results, d)}
            for d in defenses
        ],
        "matrix": table,
    }


def _grants(results: Results, defense: str) -> str:
    """Say where a defence was faced only by attacks that were not told of it."""
    found = [a for a in results.attempts if a.defense == defense and a.finished]
    return "attacks were not told of it" if found and not any(a.adaptive for a in found) else ""


def cell_for(results: Results, attack: str, defense: str) -> Cell:
    """Return what `attack` came to under `defense` over all steps."""
    return _cell(results, [a for a in results.attempts if (a.attack, a.defense) == (attack, defense)], defense)


def _cell(results: Results, attempts: Sequence[Attempt], defense: str, *, whole: bool = False) -> Cell:
    """Sum up attempts.

    Unverifiable steps are in no number: those that leaked are named apart, the others are no evidence.
    """
    bounding = {step.id for step in results.steps if step.verification.status.bounds}
    firm = [a for a in attempts if a.step in bounding]
    others = [a for a in attempts if a.step not in bounding and a.finished]
    proof = {a.step for a in others if severity([a])}
    silent = {a.step for a in others} - proof
    state = _state([*firm, *(a for a in others if a.step in proof)])
    if silent and not proof and not any(a.finished for a in firm):
        state = "unverifiable"
    lines = _rate_lines(firm, len(proof), state)
    finished = [a for a in firm if a.finished] or [a for a in others if a.step in proof]
    if not whole:
        lines += [*_measure_lines(finished), *_reach_lines(finished)]
    if not finished and not silent:
        mine = [a.reason for a in attempts if a.reason and a.status.value.replace("_", " ") == state]
        skipped = [a.reason for a in attempts if a.reason and a.status is AttemptStatus.SKIPPED]
        lines += list(dict.fromkeys(mine or (skipped if state == "not run" else [])))[:2]
    if silent:
        lines.append(f"{counted(len(silent), 'unverifiable step')} without a leak: no evidence")
    if finished and not whole:
        lines += _lost_lines(attempts)
    return Cell(state, tuple(lines), ships=defense == _OBSERVED)


def _rate_lines(firm: Sequence[Attempt], proofs: int, state: str) -> list[str]:
    """Say on how many verified steps an attack leaked, and what.

    The bound that this gives follows, and how much was not finished.
    """
    finished = [a for a in firm if a.finished]
    steps, leaked = {a.step for a in finished}, {a.step for a in finished if severity([a])}
    late = {a.step for a in finished if a.status is AttemptStatus.BUDGET_EXHAUSTED} - leaked
    extra = f"{counted(proofs, 'unverifiable step')}" if proofs else ""
    lines = []
    if steps and (leaked or len(late) < len(steps)):
        lines.append(f"{len(leaked)} of {counted(len(steps), 'step')}" + (f" and {extra}" if extra else ""))
    elif extra:
        lines.append(extra)
    if len(steps) > 1 and not late and state != "in reach, not found":
        k, n = len(leaked), len(steps)
        least, most = percent(stats.lower_bound(k, n)), percent(stats.upper_bound(k, n))
        lines.append(f"rate at least {least}" if 2 * k >= n else f"rate at most {most}")
    events = dict.fromkeys(event for a in finished for event in a.events if event in EVENTS)
    if events:
        lines.append("leaked: " + ", ".join(EVENTS[event].noun for event in events))
    if late:
        lines.append(_late_line([a for a in finished if a.step in late], len(late), len(steps)))
    return lines


def _late_line(attempts: Sequence[Attempt], late: int, steps: int) -> str:
    """Say how many steps ran out of time, and what came back by then."""
    on = f"out of time on {late} of {counted(steps, 'step')}"
    recall = pooled(a.scores.get("token_recall") for a in attempts if a.status is AttemptStatus.BUDGET_EXHAUSTED)
    return on if recall is None else f"{on}; until then {percent(recall)} of the tokens came back"


def _measure_lines(attempts: Sequence[Attempt]) -> list[str]:
    """Return the means that say how much came back.

    They are of text in order and in any order, or of labels.
    """
    rouge = pooled(a.scores.get("rougeL") for a in attempts)
    recall = pooled(a.scores.get("token_recall") for a in attempts)
    precise = [s.token_precision for a in attempts for s in a.sequences if s.token_precision is not None]
    labels = pooled(a.scores.get("label_accuracy") for a in attempts)
    masked = pooled(a.scores.get("masked_token_recall") for a in attempts)
    words = [f"ROUGE-L {number(rouge)}"] if rouge is not None else []
    words += [f"token recall {percent(recall)}"] if recall is not None else []
    words += [f"precision {percent(fmean(precise))}"] if precise else []
    lines = ["mean " + ", ".join(words)] if words else []
    lines += [f"mean recall of masked words {percent(masked)}"] if masked is not None else []
    lines += [f"mean label accuracy {number(labels)}"] if labels is not None else []
    if recall is not None and rouge is None and all(s.exact is None for a in attempts for s in a.sequences):
        lines.append("names words without their order, so it cannot show a sentence")
    return lines


def _lost_lines(attempts: Sequence[Attempt]) -> list[str]:
    words = (
        (AttemptStatus.ERROR, "crashed"),
        (AttemptStatus.NOT_APPLICABLE, "not applicable"),
        (AttemptStatus.SKIPPED, "skipped"),
    )
    counts = [(sum(a.status is status for a in attempts), word) for status, word in words]
    return [f"{counted(n, 'attempt')} {word}" for n, word in counts if n]


def _reach_lines(attempts: Sequence[Attempt]) -> list[str]:
    """Say what was in reach, and of what did not come back whether the search gave up; nothing where nobody asked."""
    shares = [("tokens", pooled(a.reachable_tokens for a in attempts))]
    shares += [("texts", pooled(a.reachable_sequences for a in attempts))]
    words = [f"{percent(share)} of the {what}" for what, share in shares if share is not None]
    if not words:
        asked = any(isinstance(a.reachable_tokens, Missing) for a in attempts)
        lost = any(s.exact is False for a in attempts for s in a.sequences)
        return ["what was in reach is not known"] if asked and lost else []
    fates: Counter[str | None] = Counter(s.fate for a in attempts for s in a.sequences)
    missed = [f"{fates[fate]} {said}" for fate, said in _FATES.items() if fates[fate]]
    return ["in reach: " + ", ".join(words), *(["did not come back: " + "; ".join(missed)] if missed else [])]


# ---------------------------------------------------------------------------------------------------------- defences


def _defense_section(results: Results, verdict: Verdict) -> dict[str, Any]:
    """Compare the defences by the rule that matters most, with the gate's own numbers."""
    rule = next((r for r in verdict.rules if r.kind == "max_rate" and r.level == "error"), None)
    rule = rule or next((r for r in verdict.rules if r.k is not None), None)
    if rule is None or not verdict.alternatives:
        return {"defense_rows": [], "defense_chart": None, "defense_lead": ""}
    figures = [_OBSERVED, *(a.defense for a in verdict.alternatives)]
    found = {defense: outcomes(results, defense, rule.subject, rule.attacks) for defense in figures}
    rows, bars = [], []
    for defense, seen in found.items():
        ships = defense == _OBSERVED
        k, n, late = seen.leaked, seen.finished, seen.open
        lower, upper = stats.lower_bound(k, n + late), stats.upper_bound(k, n)  # what is not finished may be either
        note = f"{k} of {n + late}" + (f", {late} not finished" if late else "")
        rows.append(
            {
                "name": defense,
                "seen": note if n + late else "no evidence",
                "bounds": f"{percent(lower)} to {percent(upper)}" if n > 1 else "none",
                "paired": "this is what is shipped" if ships else compare(found[_OBSERVED], seen),
                "attacker": "sees the update as sent" if ships else _grants(results, defense) or "knows the defence",
            }
        )
        if n + late > 1:
            state = _bar_state(k, n, late)
            bars.append(RateBar(plain(defense), k / (n + late), lower, upper, note, state))
    limit = rule.threshold if rule.kind == "max_rate" else None
    text = f"{rule.id} allows {percent(limit)}" if limit is not None else ""
    what = EVENTS[rule.subject].short if rule.subject in EVENTS else f"{rule.subject} came back"
    lead = f"Share of steps in which {what} (rule {rule.id})."
    if any(seen.open for seen in found.values()):
        lead += " A step that was not finished takes no part in the sign test."
    if any(bar.found == "open" for bar in bars):
        lead += f" A hollow dot shows no protection: it has unfinished steps, or fewer than {stats.MIN_STEPS_FOR_SIGN_TEST} steps."
    chart = rate_chart(bars, limit, text, plain(lead)) if len(bars) > 1 else None
    return {"defense_rows": rows, "defense_chart": chart, "defense_lead": lead}


def _bar_state(leaked: int, finished: int, unfinished: int) -> Literal["leak", "clean", "open"]:
    if leaked:
        return "leak"
    return "open" if unfinished or finished < stats.MIN_STEPS_FOR_SIGN_TEST else "clean"


# ------------------------------------------------------------------------------------- confidence, coverage, cost, origin


def _confidence_section(results: Results, verdict: Verdict) -> dict[str, Any]:
    n = sum(step.verification.status.bounds for step in results.steps)
    if n == 0:
        text = "No client step could be verified, so nothing can be said of how often text leaks. "
    elif n == 1:
        text = "1 step was verified: what leaked in it is a fact, and what did not leak in it bounds nothing. "
        text += "The leak rate may be anything up to 95%."
    else:
        clean = percent(stats.upper_bound(0, n))
        text = f"{n} client steps were verified and audited. Had none of them leaked, the leak rate could still be up to {clean}. "
    if n != 1:
        text += "It takes 59 steps without a leak to bound the rate by 5%, and 299 to bound it by 1%."
    lines = [line for line in [_unverifiable_line(results)] if line]
    lines += [control.sentence for control in verdict.controls]
    lines += [f"Note on the {name} control: {c.note}" for name, c in _notes(results)]
    return {"confidence": text, "controls": lines}


def _unverifiable_line(results: Results) -> str:
    """Say how many steps cannot be verified, and why.

    It says what that does to the bounds, and is empty where all can be verified.
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
        f"{n} of {counted(len(results.steps), 'step')} cannot be verified: {why}. What came back from {_them(n)} stands in the batch and "
        f"counts as a leak. Where there was no leak event, {_them(n, subject=True)} {'counts' if n == 1 else 'count'} as nothing: the bounds, the "
        "evidence that the policy asks for and the tests of defences rest on the other steps."
    )


def _them(n: int, *, subject: bool = False) -> str:
    return "it" if n == 1 else "they" if subject else "them"


def _be(n: int) -> str:
    return "is" if n == 1 else "are"


def _notes(results: Results) -> Iterable[tuple[str, Any]]:
    pairs = (("positive", results.controls.positive), ("negative", results.controls.negative))
    return [(name, control) for name, control in pairs if control.note]


def _coverage_section(results: Results, verdict: Verdict) -> dict[str, Any]:
    coverage, found = results.coverage, []
    found += [{"what": item.what, "why": item.why} for item in coverage.not_tested]
    found += [{"what": f"attack {item.what}", "why": f"not run: {item.why}"} for item in coverage.not_run]
    states: dict[tuple[str, str, str], int] = {}
    for attempt in results.attempts:
        if not attempt.finished:
            where = "" if attempt.defense == _OBSERVED else f" under {attempt.defense}"
            word = {AttemptStatus.ERROR: "crashed", AttemptStatus.SKIPPED: "skipped"}.get(
                attempt.status, "not applicable"
            )
            key = (f"attack {attempt.attack}{where}", word, attempt.reason)
            states[key] = states.get(key, 0) + 1
    found += [
        {"what": what, "why": f"{word} in {counted(n, 'attempt')}" + (f": {reason}" if reason else "")}
        for (what, word, reason), n in states.items()
    ]
    if verdict.unverified_steps:
        why = "the observed update does not come from the batch that was kept, so no number is shown for them"
        found.append({"what": counted(verdict.unverified_steps, "step"), "why": why})
    if coverage.total_steps:
        unseen = coverage.total_steps - len(results.steps)
        share = percent(max(0, unseen) / coverage.total_steps)
        found.append(
            {"what": "other steps of the run", "why": f"{unseen} of {coverage.total_steps} ({share}) were not audited"}
        )
    if coverage.skipped_snapshots:
        why = "refused, and nobody knows of which step they were"
        found.append({"what": counted(coverage.skipped_snapshots, "snapshot"), "why": why})
    if results.run.interrupted:
        found.append({"what": "the rest of this audit", "why": "it was interrupted"})
    threat = results.threat_model
    granted = ", ".join(threat.granted)
    text = (
        f"The adversary of this audit: {threat.adversary}, who sees {threat.sees} and knows {', '.join(threat.knows)}"
    )
    text += f". Granted beyond that, as papers do: {granted}." if granted else "."
    return {"coverage": found, "threat": text + " Any other adversary is out of scope."}


def _cost_section(results: Results) -> dict[str, Any]:
    rows = []
    for attack in attack_names(results):
        mine = [a for a in results.attempts if a.attack == attack]
        seconds = sorted(a.wall_s for a in mine if a.finished)
        first = min((a.wall_s for a in mine if a.leaked), default=None)
        counts: dict[str, int] = {}
        for attempt in mine:
            word = attempt.status.value.replace("_", " ")
            counts[word] = counts.get(word, 0) + 1
        gpu = sum(a.gpu_s for a in mine)
        rows.append(
            {
                "attack": attack,
                "attempts": ", ".join(f"{n} {word}" for word, n in counts.items()) or "none",
                "median": _seconds(seconds[len(seconds) // 2]) if seconds else "none",
                "total": _seconds(sum(a.wall_s for a in mine)),
                "gpu": _seconds(gpu) if gpu else "none",
                "first": _seconds(first) if first is not None else "none",
            }
        )
    lead = f"Each attempt was allowed {_seconds(results.run.battery.budget_s)}."
    overhead = results.overhead
    if overhead.training_s:
        share = percent(overhead.blocked_s / overhead.training_s)
        lead += f" The audit held up training for {_seconds(overhead.blocked_s)} of {_seconds(overhead.training_s)} ({share})."
    elif overhead.blocked_s:
        lead += f" The audit held up training for {_seconds(overhead.blocked_s)}."
    if overhead.disk_mb:
        lead += (
            f" A thread beside training wrote {overhead.disk_mb:.0f} MB in {_seconds(overhead.writer_s or 0.0)}, from copies of "
            f"{overhead.memory_mb or 0.0:.0f} MB in the trainer's memory."
        )
    return {"costs": rows, "cost_lead": lead}


def _provenance_section(redacted: RedactedResult) -> dict[str, Any]:
    results, verdict = redacted.results, redacted.verdict
    run, subject, regime = results.run, results.subject, results.regime
    commit = subject.code_commit or "not recorded"
    dirty = {True: ", with uncommitted changes", False: ", clean", None: ""}[subject.code_dirty]
    frozen = "all parameters trained" if regime.trainable == "all" else regime.trainable
    mode = "training mode" if regime.training_mode else "evaluation mode"
    clip = f", gradients clipped at {regime.max_grad_norm:g}" if regime.max_grad_norm is not None else ""
    batch = f"batch {regime.batch_size}" if regime.batch_size is not None else "batch size not recorded"
    hidden = f", hidden size {regime.hidden}" if regime.hidden is not None else ""
    environment = ", ".join(f"{key} {value}" for key, value in run.environment.items()) or "not recorded"
    left = redacted.hidden_environment
    pairs = [
        ("Run", f"{run.id}, {_date(run.started)} to {_date(run.finished)}"),
        ("Judged", _date(verdict.evaluated_at)),
        ("Tool", f"leakaudit {run.tool}"),
        ("Command", run.command or "not recorded"),
        ("Seed", str(run.seed)),
        ("results.json", f"sha256:{verdict.results_sha256}" if verdict.results_sha256 else "digest not recorded"),
        ("Content", verdict.results_digest or "no digest"),
        ("Policy", f"{verdict.policy}, {verdict.policy_digest}"),
        ("Battery", f"{run.battery.name} {run.battery.version}, {run.battery.digest}"),
        ("Model", f"{subject.model}, {subject.parameters} parameters, configuration {subject.config_digest}"),
        ("Artefacts", ", ".join(a["sha256"] for a in subject.artifacts) or "none named"),
        ("Code", commit + dirty),
        ("Regime", f"{regime.dtype}, {mode}, dropout {regime.dropout:g}{hidden}, {frozen}"),
        ("Batch", f"{batch}, accumulation {regime.accumulation}{clip}"),
        ("Environment", environment + (f" ({counted(left, 'entry', 'entries')} not shown)" if left else "")),
    ]
    stamps = [
        {
            "id": step.id,
            "verification": _stamp(step.verification),
            "error": f"{step.verification.relative_error:.1e}"
            if step.verification.relative_error is not None
            else "not measured",
            "sequences": step.n_sequences,
            "tokens": step.n_tokens_bucket,
            "snapshot": _short(step.snapshot),
        }
        for step in results.steps
    ]
    return {"provenance": pairs, "stamps": stamps[:_MOST_ROWS]}


def _stamp(found: Verification) -> str:
    """Return a step's stamp as one reads it: `scaled(0.25): as if clipped to a norm of 1`, `noised(0.00025): as declared`."""
    value = {VerificationStatus.SCALED: found.scale, VerificationStatus.NOISED: found.sigma}.get(found.status)
    stamp = found.status.value if value is None else f"{found.status.value}({value:.4g})"
    return f"{stamp}: {found.note}" if found.note else stamp


# -------------------------------------------------------------------------------------------------------- small words


def attack_names(results: Results) -> list[str]:
    """Return the rows: every attack of the battery, whether it ran or not."""
    return list(dict.fromkeys([*results.run.battery.attacks, *(a.attack for a in results.attempts)]))


def defense_names(results: Results) -> list[str]:
    """Return the columns, what the run ships first."""
    found = dict.fromkeys([*results.run.battery.defenses, *(a.defense for a in results.attempts)])
    return sorted(found, key=lambda name: name != _OBSERVED)


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _age(seconds: float) -> str:
    if seconds < 5400:
        return counted(max(0, round(seconds / 60)), "minute")
    return counted(round(seconds / 3600), "hour") if seconds < 172_800 else counted(round(seconds / 86_400), "day")


def _amount(n: int) -> str:
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if n >= size:
            return f"{n / size:.3g}{letter}"
    return str(n)


def _date(text: str) -> str:
    """Write an ISO time as `2026-11-02 10:00 UTC`; whatever is no time is left as it is."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text or "unknown"
    offset = moment.utcoffset()
    zone = "" if offset is None else " UTC" if not offset else moment.strftime(" %z")
    return moment.strftime("%Y-%m-%d %H:%M") + zone


def _short(digest: str) -> str:
    """Return the first twelve hex digits of a digest."""
    return digest.rpartition(":")[2][:12]
