"""What each tested defence costs and what leaks under it, for panel and sentences."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from leakaudit.gate.events import could_show
from leakaudit.gate.policy import SHIPPED
from leakaudit.gate.verdict import Alternative, Figures, RuleVerdict, Status, Verdict
from leakaudit.gate.way_out import effective, figures_of, rate_rule
from leakaudit.reports.comparison import Outcomes, outcomes
from leakaudit.reports.frontier_chart import State
from leakaudit.results.as_sent import AS_SENT, PRODUCED, shipped_column
from leakaudit.results.recovery import in_words, recovered
from leakaudit.results.schema import Results
from leakaudit.results.utility import Loss, losses, why_unknown
from leakaudit.results.wording import counted


@dataclass(frozen=True)
class Compared:
    """One defence with its numbers; the first one is the training without a defence."""

    defense: str
    number: int
    """Row in the table, from 1; 0 for no defence."""
    figures: Figures | None
    """Numbers of the compared rule under it; None if it was not judged."""
    alternative: Alternative | None
    loss: Loss | None
    why_not: str
    """Why it is not in the chart, as a clause; empty if it is."""

    @property
    def state(self) -> State:
        """What the verdict under it would be, as the chart shows it."""
        if not self.number:
            return "none"
        if self.alternative is None or self.alternative.status in (Status.INCONCLUSIVE, Status.ERROR):
            return "open"
        if self.alternative.status is Status.FAIL:
            return "fails"
        return "passes" if effective([self.alternative]) else "open"


@dataclass(frozen=True)
class Best:
    """The attack that recovered most under a defence."""

    attacks: tuple[str, ...]
    """The attack, or all that could have recovered something if none did."""
    leaked: int
    """Steps in which it recovered what the rule asks about."""
    steps: int
    """Steps on which it finished."""
    knew: bool
    """Whether it knew the defence; of several, whether all did."""


def compared_rule(verdict: Verdict) -> RuleVerdict | None:
    """Return the rule whose leak rate the panel shows."""
    return rate_rule(verdict.rules, verdict.deciding_rule)


def compared_defences(results: Results, verdict: Verdict) -> list[Compared]:
    """Return the tested defences, after a first item for no defence.

    A defence is tested if it was attacked or if its utility was measured.
    Defences of one family stand together, in the order of their strengths.
    """
    rule = compared_rule(verdict)
    judged = {one.defense: one for one in (*_as_shipped(results, verdict, rule), *verdict.alternatives)}
    known = losses(results)
    names = dict.fromkeys([*judged, *(u.defense for u in results.utility)])
    names.pop(PRODUCED, None)
    rows = [Compared(PRODUCED, 0, _undefended(results, rule), None, None, "")]
    for number, name in enumerate(_by_strength(list(names)), start=1):
        alternative = judged.get(name)
        figures = None if alternative is None else figures_of(alternative, rule)
        why = _why_not_drawn(figures, None if name in known else why_unknown(results, name))
        rows.append(Compared(name, number, figures, alternative, known.get(name), why))
    return rows


def _as_shipped(results: Results, verdict: Verdict, rule: RuleVerdict | None) -> list[Alternative]:
    """Return the update as it is sent, if something changed it after training."""
    shipped = shipped_column(results)
    if shipped == PRODUCED or rule is None:
        return []
    still_open = tuple(r.id for r in verdict.rules if r.level == "error" and r.status is not Status.PASS)
    numbers = (_figures(rule),)
    return [Alternative(defense=shipped, status=verdict.verdict, open_rules=still_open, naive=False, rules=numbers)]


def _figures(rule: RuleVerdict) -> Figures:
    return Figures.model_validate({name: getattr(rule, name) for name in Figures.model_fields})


def _undefended(results: Results, rule: RuleVerdict | None) -> Figures | None:
    """Return the numbers of the rule for the update as the training produced it."""
    if rule is None:
        return None
    if shipped_column(results) == PRODUCED:
        return _figures(rule)
    seen = outcomes_of(results, PRODUCED, rule)
    n = len(seen.by_step)
    return Figures(
        id=rule.id,
        status=Status.INCONCLUSIVE,
        k=seen.leaked,
        n=n,
        observed=seen.leaked / n if n else None,
        lower=seen.lower if n else None,
        upper=seen.upper if n else None,
    )


def outcomes_of(results: Results, defense: str, rule: RuleVerdict) -> Outcomes:
    """Return the outcome of each step under a defence, as a rule counts it."""
    return outcomes(
        results,
        defense,
        rule.subject,
        rule.scope,
        frozenset(rule.trusted),
        min_tokens=rule.min_tokens,
        confidence=rule.confidence,
        max_unjudged=rule.max_unjudged,
    )


def _why_not_drawn(figures: Figures | None, unknown: str | None) -> str:
    """Return why a defence has no place in the chart; empty if it has one."""
    said = [] if unknown is None else [unknown]
    if figures is None:
        said.append("no rule of the policy was applied to it")
    elif figures.n < 2 or figures.upper is None:
        said.append("one step gives no bound" if figures.n == 1 else "no step shows what leaks under it")
    return "; ".join(said)


def family(defense: str) -> str:
    """Return the name of a defence without its knobs."""
    return defense.partition("(")[0]


def _by_strength(names: Sequence[str]) -> list[str]:
    """Return defences with those of one family together.

    Within a family they stand in the order of their knobs if all of these are numbers, and else as they were given.
    """
    ordered: list[str] = []
    for one in dict.fromkeys(map(family, names)):
        mine = [name for name in names if family(name) == one]
        knobs = [re.findall(r"=([^,)]*)", name) for name in mine]
        if all(_is_number(knob) for each in knobs for knob in each):
            mine = [name for _, name in sorted(zip(knobs, mine, strict=True), key=lambda pair: [*map(float, pair[0])])]
        ordered += mine
    return ordered


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", text) is not None


def best_attack(results: Results, defense: str, rule: RuleVerdict) -> Best | None:
    """Return the attack that recovered most of what a rule asks about.

    It is None if no attack could have recovered it.
    """
    mine = [
        a
        for a in results.attempts
        if a.defense == defense
        and a.finished
        and (not rule.scope or a.attack in rule.scope)
        and could_show(a, rule.subject)
    ]
    names = dict.fromkeys(a.attack for a in mine)
    if not names:
        return None
    found = {}
    for name in names:
        own = results.model_copy(update={"attempts": tuple(a for a in mine if a.attack == name)})
        found[name] = outcomes_of(own, defense, rule)
    most = max(found, key=lambda name: found[name].leaked)
    shown = (most,) if found[most].leaked else tuple(names)
    knew = all(any(a.adaptive for a in mine if a.attack == name) for name in shown)
    return Best(shown, found[most].leaked, len(found[most].by_step), knew)


def way_out(results: Results, verdict: Verdict) -> str:
    """Return the cheapest way to PASS, or what is missing, in sentences."""
    if verdict.verdict is Status.PASS:
        return _met(results, verdict)
    if verdict.verdict is Status.ERROR:
        return "Fix the problems with the evidence first."
    return "This verdict does not say it; judge again." if verdict.way_out is None else verdict.way_out.sentence


def _met(results: Results, verdict: Verdict) -> str:
    """Say under which defence a policy is met."""
    looked = dict.fromkeys(rule.defense for rule in verdict.rules if rule.level == "error")
    if {SHIPPED, shipped_column(results)} & {*looked}:
        return "The policy is met already."
    back = in_words(recovered(results, shipped_column(results)))
    return f"The policy is met under {', '.join(looked)}, which the run does not ship" + (
        f"; from the update that it ships, {back} came back." if back else "."
    )


def cost_in_words(results: Results, defense: str) -> str:
    """Return what a defence costs the model, or why that is not known."""
    loss = losses(results).get(defense)
    if loss is None:
        return (
            f"not measured: {why_unknown(results, defense)}"
            if any(u.defense == defense for u in results.utility)
            else "not measured"
        )
    seeds = f" ({counted(len(loss.utility.seeds), 'seed')})" if loss.utility.seeds else ""
    return loss.words + seeds


def command_for(results: Results) -> str:
    """Return the command that measures what the tested defences cost, to be copied."""
    names = dict.fromkeys([PRODUCED, *(a.defense for a in results.attempts)])
    names.pop(AS_SENT, None)
    return (
        "leakaudit frontier --model MODEL --data train.jsonl --eval eval.jsonl "
        f"--defenses {shlex.quote(','.join(names))} --out FOLDER"
    )
