"""A section for the card of a model: what was attacked, and what came back."""

from __future__ import annotations

from collections.abc import Sequence

from leakaudit.errors import ResultsError
from leakaudit.gate.policy import OBSERVED, SHIPPED
from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.gate.wording import at_most, percent
from leakaudit.reports.escaping import markdown_text
from leakaudit.reports.redaction import redact
from leakaudit.reports.wording import date_and_time, meaning, short_digest
from leakaudit.results.as_sent import shipped_column
from leakaudit.results.canaries import bounded, bounds_on, strongest
from leakaudit.results.membership import in_words as members_in_words
from leakaudit.results.privacy import SHIPPED as SHIPPED_LABEL
from leakaudit.results.privacy import shipped_in_words
from leakaudit.results.recovery import in_words, join, recovered
from leakaudit.results.schema import Results, TextMode
from leakaudit.results.wording import counted

MOST_NAMES = 6
"""Most names in a list of what was not tested. Our choice: a card is read in a minute."""


def model_card(results: Results, verdict: Verdict) -> str:
    """Return a Markdown section of at most twelve lines for the card of a model.

    It never says that a model is private: an audit bounds the attacks that it made, on the updates that it saw.

    Args:
        results: the audit.
        verdict: of the gate on these results.

    Raises:
        ResultsError: the verdict is ERROR. A card with figures that cannot be judged would mislead.
    """
    if verdict.verdict is Status.ERROR:
        raise ResultsError(f"no card: the evidence cannot be judged: {'; '.join(verdict.problems) or verdict.sentence}")
    public = redact(results, [], verdict, TextMode.HASH).results
    said = {
        "Attacked": _attacked(public),
        "Came back": _came_back(public),
        "Worst bound": _worst_bound(public, verdict),
        "For contrast": _contrast(public),
        "Adversary": _adversary(public),
        "Differential privacy": _privacy(public),
        **({} if public.membership is None else {"Membership": members_in_words(public.membership)}),
        "Not tested": _not_tested(public),
        "Verdict": f"{verdict.verdict} by the policy {verdict.policy} ({short_digest(verdict.policy_digest)}). {meaning(verdict)}{_waived(verdict)}{_changed(verdict)}",
        "Dated": _dated(public, verdict),
    }
    lines = [f"- **{name}:** {markdown_text(text)}" for name, text in said.items()]
    return "\n".join(["### Privacy audit of the training updates", "", *lines, f"- {LIMITS}"]) + "\n"


LIMITS = "An audit bounds these attacks on these updates. It proves no privacy, and says nothing about what the released weights remember."
"""The last line of every card."""


def _privacy(results: Results) -> str:
    """Repeat what is claimed, and say what recovered secrets show of it."""
    worst = strongest(bounds_on(results, SHIPPED_LABEL))
    return shipped_in_words(results) + ("" if worst is None else f" {bounded(worst)} {' '.join(worst.notes)}")


def _waived(verdict: Verdict) -> str:
    """Name the rules that may fail by a waiver."""
    found = [rule.id for rule in verdict.rules if rule.waived]
    return f" Waived: {join(found)}." if found else ""


def _changed(verdict: Verdict) -> str:
    """Say that the policy is not the one with which the run began."""
    return " The policy was changed after the run began." if verdict.policy_changed else ""


def _attacked(results: Results) -> str:
    """Say what was attacked, and how often."""
    run = results.run
    made = "simulated client step" if run.simulated else "client step"
    total = results.coverage.total_steps
    of = f" of {total}" if total and not run.simulated else ""
    return (
        f"{counted(len(results.steps), made)}{of} of {results.subject.model}, with {join(run.battery.attacks) or 'no attack'}; "
        f"{counted(len(results.attempts), 'attempt')}, each of at most {run.battery.budget_s:g} s."
    )


def _came_back(results: Results) -> str:
    """Say what was recovered from the update that is sent."""
    return f"{_recovered(results, shipped_column(results))}, from the update that is sent ({_shipped(results)})."


def _recovered(results: Results, defense: str) -> str:
    found = recovered(results, defense)
    return in_words(found) or (f"nothing of {counted(found.texts, 'text')}" if found.texts else "no text was judged")


def _shipped(results: Results) -> str:
    """Name the defences of the update that is sent."""
    if results.regime.declared or results.regime.declared_defenses:
        return ", ".join(results.regime.declared or results.regime.declared_defenses or ())
    changed = shipped_column(results) != OBSERVED
    return "as something changed it before sending" if changed else "no defence"


def _worst_bound(results: Results, verdict: Verdict) -> str:
    """Return the sentence of the rule with the highest upper bound on a rate."""
    asked = _about_shipped(results, verdict)
    if not asked:
        return "none, because no rule of the policy limits how often a leak may happen."
    judged = [rule for rule in asked if rule.n]
    silent = [rule.id for rule in asked if not rule.n]
    lacking = f" No evidence for {join(silent)}." if silent else ""
    if not judged:
        return f"none, because there is no evidence.{lacking}"
    worst = max(judged, key=_height)
    sure = percent(worst.confidence)
    most = (
        "no upper bound" if worst.upper is None else f"up to {at_most(worst.upper)} of the steps ({sure} upper bound)"
    )
    return f"{most}, by rule {worst.id}. {worst.sentence}{lacking}"


def _height(rule: RuleVerdict) -> tuple[float, float]:
    """Return the bounds of a rule, as far as they are known: unknown is highest."""
    return (1.0 if rule.upper is None else rule.upper, rule.lower or 0.0)


def _about_shipped(results: Results, verdict: Verdict) -> Sequence[RuleVerdict]:
    """Return the rules on rates of the sent update: those that decide, if any."""
    shipped = {SHIPPED, shipped_column(results)}
    found = [rule for rule in verdict.rules if rule.defense in shipped and rule.kind in ("max_rate", "max_count")]
    return [rule for rule in found if rule.level == "error"] or found


def _contrast(results: Results) -> str:
    """Say what came back from the update before anything protected it."""
    if shipped_column(results) != OBSERVED:
        return f"before it was changed for sending, {_recovered(results, OBSERVED)}."
    if results.regime.declared or results.regime.declared_defenses:
        return "without its defence the update was not attacked."
    return "no defence is shipped, so these are the undefended figures."


def _adversary(results: Results) -> str:
    threat = results.threat_model
    granted = f"; granted beyond that: {', '.join(threat.granted)}" if threat.granted else ""
    return f"{threat.adversary}, who sees {threat.sees} and knows {', '.join(threat.knows)}{granted}."


def _not_tested(results: Results) -> str:
    """Name what the audit says nothing about."""
    names = [one.what for one in results.coverage.not_tested]
    names += [f"attack {one.what}" for one in results.coverage.not_run]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    listed = [*names[:MOST_NAMES], *more, "attacks that are not named here"]
    return f"{join(listed)}."


def _dated(results: Results, verdict: Verdict) -> str:
    until = f", valid until {date_and_time(verdict.valid_until)}" if verdict.valid_until else ""
    digest = verdict.results_digest or verdict.results_sha256 or "none"
    return f"{date_and_time(results.run.finished)}{until}; results {digest}; leakaudit {results.run.tool}."
