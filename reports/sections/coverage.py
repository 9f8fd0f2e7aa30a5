"""The section on what the audit did not test."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from leakaudit.gate.verdict import Verdict
from leakaudit.gate.wording import percent
from leakaudit.reports.cells import OBSERVED
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.section import Section
from leakaudit.reports.wording import listed, without_repeats
from leakaudit.results.recovery import severity
from leakaudit.results.regime import regime_in_words
from leakaudit.results.schema import AttemptStatus, NotTested, Results
from leakaudit.results.utility import UTILITY_OF
from leakaudit.results.wording import counted

MOST_ITEMS = 40
"""Most entries of a list. Our choice: `results.json` has all, and nobody reads more."""

_OF_STEPS = re.compile(r"step \d|\d+ steps? ")
"""How an entry on steps that were not kept begins."""


@dataclass(frozen=True)
class Group:
    """What an adversary could still do that the audit says nothing about."""

    sentence: str
    items: Sequence[dict[str, str]]
    more: int
    """Entries that the list leaves out."""

    @property
    def entries(self) -> str:
        """How many entries there are, as the heading of the list."""
        return counted(len(self.items) + self.more, "entry", "entries")


def section(redacted: RedactedResult) -> Section:
    """Say what an adversary could still do about which the audit says nothing."""
    results = redacted.results
    found = [_group(sentence, items) for sentence, items in _groups(results, redacted.verdict) if items]
    return Section(
        "coverage",
        "What was not tested",
        {"groups": found, "threat": _threat(results), "regime": regime_in_words(results)},
    )


def _group(sentence: str, items: Sequence[dict[str, str]]) -> Group:
    return Group(sentence, items[:MOST_ITEMS], max(0, len(items) - MOST_ITEMS))


def _groups(results: Results, verdict: Verdict) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Return what an adversary could still do.

    Each has a list of what was not tested.
    """
    coverage = results.coverage
    costs = [item for item in coverage.not_tested if item.what.startswith(UTILITY_OF)]
    unkept = [item for item in coverage.not_tested if _OF_STEPS.match(item.what)]
    others = [item for item in coverage.not_tested if item not in costs and item not in unkept]
    steps = [*_steps_left_out(results, verdict), *map(_item, unkept)]
    yield f"An adversary could read other steps than those of this audit{_unseen(results)}.", steps
    attacks = [{"what": f"attack {item.what}", "why": f"not run: {item.why}"} for item in coverage.not_run]
    yield f"An adversary could use {_attacks_in_words(len(attacks))} that this tool has and that did not run.", attacks
    yield "An adversary could act in another way than the one of this audit.", list(map(_item, others))
    blank = _untried(results)
    yield "An adversary could attack a defence against which no attack of this audit ran to its end.", blank
    late = _unfinished(results, {AttemptStatus.BUDGET_EXHAUSTED})
    yield f"With more time than {results.run.battery.budget_s:g} s an attempt, an adversary could find more.", late
    lost = _unfinished(results, {*AttemptStatus} - {AttemptStatus.RAN, AttemptStatus.BUDGET_EXHAUSTED})
    yield "An adversary could repair or adapt an attack that could not be used here, was left out or crashed.", lost
    yield "What these defences cost the model is not known.", list(map(_item, costs))


def _item(found: NotTested) -> dict[str, str]:
    return {"what": found.what, "why": found.why}


def _attacks_in_words(number: int) -> str:
    return "one more attack" if number == 1 else f"{number} more attacks"


def _unseen(results: Results) -> str:
    """Return how many steps of the run were not audited, in brackets."""
    total = results.coverage.total_steps
    if not total:
        return ""
    unseen = max(0, total - len(results.steps))
    return f" ({unseen} of {total}, {percent(unseen / total)}, were not audited)" if unseen else ""


def _untried(results: Results) -> list[dict[str, str]]:
    """Return the defences of the battery without a finished attempt."""
    tried = {attempt.defense for attempt in results.attempts if attempt.finished}
    names = dict.fromkeys([*results.run.battery.defenses, *(attempt.defense for attempt in results.attempts)])
    return [{"what": name, "why": "no attack ran to its end"} for name in names if name not in tried]


def _unfinished(results: Results, statuses: Collection[AttemptStatus]) -> list[dict[str, str]]:
    """Return attempts of some statuses by attack and reason, with their defences."""
    words = {AttemptStatus.ERROR: "crashed", AttemptStatus.BUDGET_EXHAUSTED: "out of time"}
    states: Counter[tuple[str, str]] = Counter()
    reasons: dict[tuple[str, str], list[str]] = {}
    defenses: dict[tuple[str, str], dict[str, None]] = {}
    for attempt in results.attempts:
        if attempt.status in statuses and not (attempt.finished and severity([attempt])):
            key = (attempt.attack, words.get(attempt.status, attempt.status.value.replace("_", " ")))
            states[key] += 1
            reasons.setdefault(key, []).append(attempt.reason)
            defenses.setdefault(key, {})[attempt.defense] = None
    found = []
    for key, n in states.items():
        why = "; ".join(without_repeats(filter(None, reasons[key])))
        under = [name for name in defenses[key] if name != OBSERVED]
        where = f" under {listed(under, _MOST_DEFENCES)}" if under else ""
        where = (
            where.replace(" under", " with no defence and under", 1) if under and OBSERVED in defenses[key] else where
        )
        said = f"{key[1]} in {counted(n, 'attempt')}{where}"
        found.append({"what": f"attack {key[0]}", "why": said + (f": {why}" if why else "")})
    return found


_MOST_DEFENCES = 3
"""Most defences that an entry names. Our choice: the heat map shows all of them."""


def _steps_left_out(results: Results, verdict: Verdict) -> list[dict[str, str]]:
    """Return the steps that were not audited or are not evidence, with the reason."""
    coverage, found = results.coverage, []
    if verdict.unverified_steps:
        why = "the observed update does not come from the kept batch, so no number is shown for them"
        found.append({"what": counted(verdict.unverified_steps, "step"), "why": why})
    if unseen := _unseen(results):
        found.append({"what": "other steps of the run", "why": unseen.strip(" ()")})
    if coverage.skipped_snapshots:
        why = "refused, and their steps are unknown"
        found.append({"what": counted(coverage.skipped_snapshots, "snapshot"), "why": why})
    if results.run.interrupted:
        found.append({"what": "the rest of this audit", "why": "it was interrupted"})
    return found


def _threat(results: Results) -> str:
    """Describe the adversary of the audit."""
    threat = results.threat_model
    granted = f" Granted beyond that, as papers do: {', '.join(threat.granted)}." if threat.granted else ""
    return (
        f"The adversary of this audit: {threat.adversary}, who sees {threat.sees} and knows {', '.join(threat.knows)}."
        f"{granted} Any other adversary is out of scope."
    )
