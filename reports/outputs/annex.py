"""An annex for a privacy file: clause by clause, what was tested and what was not.

It names evidence. Whether a clause is fulfilled is for the reader to say.

Sources of the clauses: EDPB Opinion 28/2024, paragraph 55; Regulation (EU) 2024/1689, Article 15(5); NIST SP 800-226 (2025); NIST AI 100-2 E2025;
OWASP AISVS 1.0, chapter C11; OWASP AI Testing Guide, AITG-MOD-05.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from leakaudit.errors import ResultsError
from leakaudit.gate.events import EVENTS
from leakaudit.gate.policy import SHIPPED
from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.gate.wording import at_least, at_most, number, percent
from leakaudit.reports.escaping import markdown_text
from leakaudit.reports.outputs.model_card import LIMITS
from leakaudit.reports.redaction import redact
from leakaudit.reports.wording import date_and_time, meaning, rule_bounds, rule_seen
from leakaudit.results.as_sent import shipped_column
from leakaudit.results.conformance import in_words
from leakaudit.results.membership import in_words as members_in_words
from leakaudit.results.recovery import join
from leakaudit.results.schema import Results, TextMode
from leakaudit.results.wording import counted

NOT_TESTED = "not tested by this audit"
"""The word for a clause without evidence."""

SCOPE = (
    "The Opinion speaks of the trained model. This audit attacks updates on their way from a client to the server, so it is evidence for the security of "
    "processing (GDPR Art. 32) first. It says what somebody who sees an update reads out of it, and nothing about what the trained model remembers, "
    "unless results on the model are imported below."
)
"""What the audit is about, said before the table."""

STANCE = (
    "Each row is evidence for its clause. No row says that the clause is fulfilled. Tests with widely known attacks are evidence of resistance to these "
    "attacks only."
)
"""What a row means. The last sentence is that of paragraph 55 of the Opinion in other words."""


@dataclass(frozen=True)
class Row:
    """One clause of the annex."""

    clause: str
    tested: str
    result: str
    not_tested: str


def annex(results: Results, verdict: Verdict) -> str:
    """Return the annex in Markdown: a table with one row for each clause.

    Args:
        results: the audit.
        verdict: of the gate on these results.

    Raises:
        ResultsError: the verdict is ERROR; figures that cannot be judged are evidence for nothing.
    """
    if verdict.verdict is Status.ERROR:
        said = "; ".join(verdict.problems) or verdict.sentence
        raise ResultsError(f"no annex: the evidence cannot be judged: {said}")
    public = redact(results, [], verdict, TextMode.HASH).results
    lines = [
        "## Annex: evidence from the privacy audit of training updates",
        "",
        *(f"- {markdown_text(line)}" for line in _head(public, verdict)),
        "",
        SCOPE,
        "",
        STANCE,
        "",
        "| Clause | What was tested | Result with bound | What was not tested |",
        "| --- | --- | --- | --- |",
        *(_line(row) for row in _rows(public, verdict)),
        "",
        "Rules of the policy:",
        "",
        *(f"- {markdown_text(_said(rule))}; it looks at {markdown_text(_where(rule))}" for rule in verdict.rules),
        "",
        LIMITS,
    ]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    cells = (row.clause, row.tested, row.result, row.not_tested)
    return f"| {' | '.join(markdown_text(cell) for cell in cells)} |"


def _head(results: Results, verdict: Verdict) -> list[str]:
    until = f", valid until {date_and_time(verdict.valid_until)}" if verdict.valid_until else ""
    waived = [rule.id for rule in verdict.rules if rule.waived]
    found = [
        f"Model: {results.subject.model}, {results.subject.parameters} parameters.",
        f"Verdict: {verdict.verdict} by the policy {verdict.policy} ({verdict.policy_digest}). {meaning(verdict)}",
        f"Results: {verdict.results_digest or verdict.results_sha256 or 'no digest'}, of {date_and_time(results.run.finished)}{until}.",
        f"Adversary: {results.threat_model.adversary}, who sees {results.threat_model.sees} and knows {join(results.threat_model.knows)}.",
    ]
    found += [f"Waived: {join(waived)}."] if waived else []
    return found + [
        f"Imported: {one.tool} {one.tool_version} of {date_and_time(one.created_at)}, sha256 {one.sha256}."
        for one in verdict.imports
    ]


def _rows(results: Results, verdict: Verdict) -> Iterable[Row]:
    about = [rule for rule in verdict.rules if rule.defense in (SHIPPED, shipped_column(results))]
    claims = [rule for rule in about if rule.kind == "claimed_epsilon"]
    shipped = [rule for rule in about if rule.kind not in ("claimed_epsilon", "membership")]
    texts = [rule for rule in shipped if not _about_labels(rule)]
    labels = [rule for rule in shipped if _about_labels(rule)]
    every, on_texts = _attacks(results, shipped), _attacks(results, texts)
    open_ends = _open_ends(results)
    yield _with_membership(
        results,
        _imported(
            "EDPB Opinion 28/2024, para 55 (i) attribute and membership inference",
            verdict,
            "membership",
            "attribute inference; membership of real records",
        ),
    )
    yield Row(
        "EDPB Opinion 28/2024, para 55 (ii) exfiltration",
        NOT_TESTED,
        NOT_TESTED,
        "exfiltration of the model or its data",
    )
    yield _imported(
        "EDPB Opinion 28/2024, para 55 (iii) regurgitation",
        verdict,
        "regurgitation",
        "regurgitation of real records, and under other prompts",
    )
    yield Row(
        "EDPB Opinion 28/2024, para 55 (iv) model inversion",
        f"inversion of client updates by {every}",
        _result([*texts, *labels]),
        f"inversion of the trained model by queries; {open_ends}",
    )
    yield Row(
        "EDPB Opinion 28/2024, para 55 (v) reconstruction",
        f"reconstruction of training texts from client updates by {on_texts}",
        _result(texts),
        f"reconstruction from the trained model; {open_ends}",
    )
    yield Row(
        "EU AI Act (Regulation 2024/1689), Art. 15(5), confidentiality attacks",
        f"confidentiality of training data against somebody who sees updates: {every}",
        "; ".join([f"{verdict.verdict} by the policy. {_result(shipped)}", *map(_claimed, claims)]),
        f"data poisoning, model poisoning, adversarial examples, model flaws; {open_ends}",
    )
    yield Row(
        "NIST SP 800-226, evaluation of differential privacy guarantees",
        f"the update with its declared defence ({_declared(results)}), {_adaptive(results)}",
        "; ".join([_result(shipped), *map(_claimed, claims), *_measured(results)]),
        "the accounting of epsilon and delta, the unit of privacy, and attacks that are not named here; an attack can contradict a guarantee, never show it",
    )
    yield Row(
        "NIST AI 100-2 E2025, privacy attacks: data reconstruction",
        f"data reconstruction from updates by {every}",
        _result([*texts, *labels]),
        f"property inference, model extraction{'' if _has(verdict, 'membership') else ', membership inference'}; {open_ends}",
    )
    yield Row(
        "OWASP AISVS 1.0, C11 (C11.4 model-inversion resistance); AI Testing Guide AITG-MOD-05",
        f"gradient-based inversion by {every}",
        _result([*texts, *labels]),
        f"inversion by queries to a deployed model, limits on queries; {open_ends}",
    )


def _with_membership(results: Results, row: Row) -> Row:
    """Return a row on membership with what the updates of single steps say of it."""
    if results.membership is None:
        return row
    tested, result = "membership of texts in single client updates", members_in_words(results.membership)
    if row.tested != NOT_TESTED:
        tested, result = f"{row.tested}; {tested}", f"{row.result} {result}"
    return replace(row, tested=tested, result=result)


def _imported(clause: str, verdict: Verdict, subject: str, lacking: str) -> Row:
    """Return the row of a clause on the trained model, from imported results."""
    rules = [rule for rule in verdict.rules if rule.imported and rule.subject.startswith(subject) and rule.n]
    if not rules:
        return Row(clause, NOT_TESTED, NOT_TESTED, f"{subject} of the trained model; {lacking}")
    by = join(sorted({rule.imported for rule in rules}))
    what = f"{rules[0].subject} of {rules[0].n} canaries in the trained model, by {by}; nobody checked that it is the model of this run"
    return Row(clause, what, _result(rules), lacking)


def _has(verdict: Verdict, subject: str) -> bool:
    return any(rule.imported and rule.subject.startswith(subject) and rule.n for rule in verdict.rules)


def _about_labels(rule: RuleVerdict) -> bool:
    """Return whether a rule is about label counts, not about texts."""
    event = EVENTS.get(rule.subject)
    return event.kind == "labels" if event is not None else "label" in rule.subject


def _attacks(results: Results, rules: Sequence[RuleVerdict]) -> str:
    """Name the attacks that are evidence for rules, and on how many steps."""
    found = sorted({attack for rule in rules for attack in rule.attacks})
    if not found:
        return "no attack"
    return f"{join(found)} on {counted(len(results.steps), 'step')}"


def _result(rules: Sequence[RuleVerdict]) -> str:
    """Say what the worst of the rules saw, with its bounds, and how many there are."""
    if not rules:
        return NOT_TESTED
    judged = [rule for rule in rules if rule.n]
    silent = [rule.id for rule in rules if not rule.n]
    lacking = [f"no evidence for {join(silent)}"] if silent else []
    failed = [rule.id for rule in judged if rule.status is Status.FAIL]
    also = [f"failed: {join(failed)}"] if len(failed) > 1 else []
    if not judged:
        return "; ".join(lacking)
    of = f"the worst of {counted(len(judged), 'rule')} is " if len(judged) > 1 else ""
    return "; ".join([f"{of}{_said(max(judged, key=_badness))}", *also, *lacking])


def _badness(rule: RuleVerdict) -> tuple[int, float]:
    """Return the sort key of a rule: status, then upper bound; unknown is worst."""
    return list(Status).index(rule.status), 1.0 if rule.upper is None else rule.upper


def _claimed(rule: RuleVerdict) -> str:
    """Say what a rule on a claimed epsilon saw."""
    found = rule_seen(rule) if rule.observed is None else f"{rule_seen(rule)}, which no attack confirms"
    return f"{rule.id}: {rule.word}, {found}"


def _said(rule: RuleVerdict) -> str:
    if not rule.n:
        return f"{rule.id}: {rule.word}, no evidence"
    if rule.versus is not None:
        return f"{rule.id}: {rule.word}, {rule_seen(rule)}, a change of {rule_bounds(rule)} ({percent(rule.confidence)} bounds)"
    share = rule.k is not None or bool(rule.imported)
    bounds = [] if rule.lower is None else [f"at least {at_least(rule.lower) if share else number(rule.lower)}"]
    bounds += [] if rule.upper is None else [f"at most {at_most(rule.upper) if share else number(rule.upper)}"]
    sure = f", {join(bounds)} ({percent(rule.confidence)} bounds)" if bounds else ", no bound"
    unjudged = f", {counted(rule.unjudged, 'step')} not judged" if rule.unjudged else ""
    return f"{rule.id}: {rule.word}, {rule_seen(rule)}{sure}{unjudged}"


def _where(rule: RuleVerdict) -> str:
    """Say what a rule looks at."""
    if rule.imported:
        return f"the trained model, by {rule.imported}"
    return "the update that is sent" if rule.defense == SHIPPED else f"the update under {rule.defense}"


def _open_ends(results: Results) -> str:
    """Name what the audit says nothing about."""
    names = [one.what for one in results.coverage.not_tested]
    names += [f"attack {one.what}" for one in results.coverage.not_run]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return join([*names[:MOST_NAMES], *more, "attacks that are not named here"])


MOST_NAMES = 6
"""Most names in a list of what was not tested. Our choice: a cell of a table stays readable."""


def _declared(results: Results) -> str:
    return join(list(results.regime.declared or results.regime.declared_defenses or ())) or "none"


def _adaptive(results: Results) -> str:
    """Say whether the attacks knew the defence."""
    made = [attempt for attempt in results.attempts if attempt.defense == shipped_column(results)]
    if made and all(attempt.adaptive for attempt in made):
        return "by attacks that know it"
    return (
        "by attacks of which some do not know it" if any(a.adaptive for a in made) else "by attacks that do not know it"
    )


def _measured(results: Results) -> list[str]:
    """Return what the updates show of the accountant's assumptions."""
    return [] if results.conformance is None else [in_words(results.conformance).rstrip(".")]
