"""The evaluation of an audit by a policy.

The exit code, `verdict.json` and the report all use the verdict of `evaluate`, so they cannot disagree. It has about 400 lines, because all that
makes one verdict of rules, gaps and notes stands here.

Principles:

- The unit is one client step. A step leaks if any attack in the rule's scope had the event.
- Success proves, failure bounds. One recovered text is a fact. An audit that recovers nothing only bounds the leak rate.
- A step is evidence only if an attack that could have shown the event ran on it. An attack that was not applicable, crashed, was
  skipped or did not run is not evidence, so it never makes a rule pass. A step that fails verification is not evidence either.
- A step that cannot be verified is attacked like the others. A text that is recovered from it is proof.
- A step that nobody could judge counts as clean where a rule is to fail and as a leak where it is to pass.
- An attack that finds nothing is trusted only if it recovered its canary, in the kind that the rule is about.
- The verdict is the worst of the rules at level `error`: ERROR > FAIL > INCONCLUSIVE > PASS. Rules at level `warn` are shown and never
  change the verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from leakaudit.config.duration import length_of
from leakaudit.gate.controls import judge_age, judge_controls
from leakaudit.gate.coverage import uncovered
from leakaudit.gate.evidence import Index, usable
from leakaudit.gate.imported import Imported, imports, judge_imported
from leakaudit.gate.policy import OBSERVED, SHIPPED, Policy
from leakaudit.gate.regression import ABSENT, Reference, softened
from leakaudit.gate.requirements import other_runs, unmet
from leakaudit.gate.rules import Gaps, judge_rules
from leakaudit.gate.subject import NO_CLAIM, Claim, judge_subject
from leakaudit.gate.undecided import allowed_for_a_time
from leakaudit.gate.verdict import Alternative, BaselineUsed, ControlVerdict, Figures, RuleVerdict, Status, Verdict
from leakaudit.gate.waivers import Waivers, limits_of, waived
from leakaudit.gate.way_out import way_out
from leakaudit.gate.wording import ended
from leakaudit.results.as_sent import shipped_column
from leakaudit.results.consistency import CLOCK_SLACK, contradictions, lacking_steps, moment, unexplained_steps
from leakaudit.results.recovery import Recovery, in_words, recovered
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted

_BADNESS = {status: rank for rank, status in enumerate(Status)}
_SEVERITY = {"critical": 0, "high": 1, "medium": 2, "low": 3}


def evaluate(
    results: Results,
    policy: Policy,
    *,
    now: datetime,
    results_sha256: str | None = None,
    waivers: Waivers | None = None,
    reference: Reference = ABSENT,
    imported: Imported | None = None,
    claim: Claim = NO_CLAIM,
) -> Verdict:
    """Apply `policy` to `results`.

    A positive control that fails, or any other gap in the evidence, keeps every rule from passing. It does not change a FAIL: a
    recovered text is a fact, even if the audit misses others. A negative control that "leaks" makes every rule INCONCLUSIVE,
    because then the scores themselves are wrong.

    Args:
        results: the audit.
        policy: the rules.
        now: the time of judgement, with time zone.
        results_sha256: digest of the file that `results` were read from; the verdict records it.
        waivers: exceptions; None for none.
        reference: the baseline, for rules on the difference from it.
        imported: what another auditor found; None if nobody gave it.
        claim: what the caller says that the results are about.

    Returns:
        The verdict; ERROR if the results contradict themselves, or are about another artefact than the caller says.
    """
    problems = (*contradictions(results), *_from_the_future(results, now))
    bound = judge_subject(results, policy, claim)
    if problems or bound.problems:
        found = (*problems, *bound.problems)
        return bound.in_verdict(_error(policy, now, found, results, results_sha256=results_sha256))
    verdict = judge(
        results,
        policy,
        now=now,
        results_sha256=results_sha256,
        waivers=waivers,
        reference=reference,
        imported=imported,
        more=Gaps((*other_runs(policy, 1), *bound.gaps)),
        notes=bound.sentences,
    )
    return bound.in_verdict(verdict)


def judge(
    results: Results,
    policy: Policy,
    *,
    now: datetime,
    results_sha256: str | None = None,
    waivers: Waivers | None = None,
    reference: Reference = ABSENT,
    imported: Imported | None = None,
    more: Gaps,
    notes: Sequence[str] = (),
) -> Verdict:
    """Apply `policy` to results that do not contradict themselves.

    Args:
        results: one audit, or several that were joined (`leakaudit.gate.pooling`).
        policy: the rules.
        now: the time of judgement, with time zone.
        results_sha256: digest of the file that `results` were read from; None for several.
        waivers: exceptions; None for none.
        reference: the baseline, for rules on the difference from it.
        imported: what another auditor found; None if nobody gave it.
        more: problems that the results do not show themselves.
        notes: what a reader must know of them, in sentences.
    """
    origin = _origin(results, policy, now, results_sha256)
    policy = softened(policy, reference)
    controls = judge_controls(results, policy)
    age, age_gap = judge_age(results, policy, now)
    gaps = _gaps(controls, age_gap, results, policy)
    gaps = Gaps((*more.sentences, *gaps.sentences), more.broken or gaps.broken)
    of_others = judge_imported(policy, imported, now)
    index = Index(results)
    judged = [*judge_rules(results, policy, SHIPPED, gaps, reference, index), *of_others]
    warn = length_of(limits_of(policy).warn_before)
    rules, said = waived(judged, waivers or Waivers(), results.run.id, now, warn)
    overall, deciding = _overall(rules, gaps)
    alternatives = tuple(_alternatives(results, policy, gaps, reference, of_others, index))
    back = recovered(results, shipped_column(results))
    verdict = Verdict(
        **origin,
        verdict=overall,
        exit_code=overall.exit_code,
        sentence=" ".join(
            [
                *_waived_first(rules),
                deciding.sentence,
                *(gaps.sentences if overall is Status.INCONCLUSIVE is not deciding.status else ()),
                *_also_came_back(back, deciding, shipped_column(results)),
                *deciding.reasons,
                *_of_another_defence(results, policy),
                *_interruption(results),
                *notes,
            ]
        ),
        deciding_rule=deciding.id,
        texts_back=back.exact + back.all_words,
        evidence_age_s=age.total_seconds() if age is not None else None,
        valid_until=_valid_until(results, policy, imported),
        steps=len(results.steps),
        unverified_steps=sum(not usable(step) for step in results.steps),
        unverifiable_steps=sum(usable(step) and not step.verification.status.bounds for step in results.steps),
        rules=tuple(sorted(rules, key=_order)),
        controls=controls,
        alternatives=alternatives,
        way_out=way_out(results, rules, deciding.id, alternatives),
        waivers=said,
        waivers_digest="" if waivers is None else waivers.digest,
        imports=tuple(imports(imported)),
        baseline=_used(policy, reference),
        problems=(),
    )
    return allowed_for_a_time(verdict, policy.on_inconclusive, now)


def _valid_until(results: Results, policy: Policy, imported: Imported | None) -> str | None:
    """Return when the first part of the evidence becomes too old; None if unknown."""
    finished = moment(results.run.finished)
    of_others = moment(imported.created_at) if policy.imported and imported is not None else None
    if finished is None:
        return None
    return _stamp(min(finished, of_others or finished) + length_of(policy.evidence.max_age))


def _used(policy: Policy, reference: Reference) -> BaselineUsed | None:
    """Return the baseline as the verdict records it; None if no rule uses one."""
    if reference.problem or not policy.compares:
        return None
    return BaselineUsed(run=reference.run, results_digest=reference.results_digest, digest=reference.digest)


def _waived_first(rules: Sequence[RuleVerdict]) -> list[str]:
    """Return a sentence on the waived rules, with which the verdict begins."""
    names = [rule.id for rule in rules if rule.waived]
    if not names:
        return []
    noun, verb = ("Rule", "fails and is") if len(names) == 1 else ("Rules", "fail and are")
    return [f"{noun} {', '.join(names)} {verb} waived."]


def unreadable(problem: str, policy: Policy, *, now: datetime, run: str = "") -> Verdict:
    """Return the ERROR verdict for evidence that cannot be read.

    A program that reads the verdict thus gets one document in every case.
    """
    return _error(policy, now, (problem,), None, run=run)


def evaluate_step(results: Results, policy: Policy, step: str, *, now: datetime) -> tuple[Status, str]:
    """Apply `policy` to one step of an audit.

    The controls of the whole audit count: they show whether this audit finds what there is to find.

    Args:
        results: the audit so far.
        policy: the rules; with the default one, which asks for many steps, one step cannot pass.
        step: id of the step, such as `st-000040`.
        now: the time of judgement, with time zone.

    Returns:
        The status, and the sentence of the rule that decides with the reasons. ERROR if the results contradict themselves, INCONCLUSIVE
        if they do not hold the step.
    """
    if problems := (*contradictions(results), *_from_the_future(results, now)):
        return Status.ERROR, ended(f"The evidence cannot be judged: {problems[0]}")
    steps = tuple(found for found in results.steps if found.id == step)
    if not steps:
        return Status.INCONCLUSIVE, f"The results do not hold step {step}."
    attempts = tuple(attempt for attempt in results.attempts if attempt.step == step)
    one = results.model_copy(update={"steps": steps, "attempts": attempts})
    gaps = _gaps(judge_controls(results, policy), judge_age(results, policy, now)[1], one, policy)
    due = len(results.run.battery.attacks) * len(results.run.battery.defenses)
    if len(attempts) < due:
        gaps = Gaps(
            (*gaps.sentences, f"{due - len(attempts)} of {due} attempts on the step were not made."), gaps.broken
        )
    overall, deciding = _overall(judge_rules(one, policy, SHIPPED, gaps), gaps)
    return overall, " ".join([deciding.sentence, *deciding.reasons])


def _gaps(controls: Sequence[ControlVerdict], age_gap: str, results: Results, policy: Policy) -> Gaps:
    """Collect the problems with the evidence of the whole audit.

    The positive control is no such problem: each rule has its own.
    """
    found = [control.sentence for control in controls if control.name == "negative" and control.state != "ok"]
    broken = next((c.sentence for c in controls if c.name == "negative" and c.state == "failed"), "")
    unasked = [] if results.run.simulated or _asks_what_is_shipped(results, policy) else [_UNASKED]
    age = [age_gap] if age_gap else []
    lacking = (*unmet(results, policy.requires), *uncovered(results, policy))
    return Gaps((*found, *age, *_absent(results), *lacking, *unasked), broken)


_UNASKED = (
    "No rule at level error looks at the update that the run ships, so nothing here says whether it may be shipped; add one with `scope: "
    "{defense: shipped}`."
)


def _asks_what_is_shipped(results: Results, policy: Policy) -> bool:
    """Return whether attacks on the shipped update decide a rule at level error."""
    shipped = {SHIPPED, shipped_column(results)}
    return any(rule.level == "error" and rule.of_attacks and rule.scope.defense in shipped for rule in policy.rules)


def _of_another_defence(results: Results, policy: Policy) -> list[str]:
    """Return a sentence if only defences that a simulation does not ship are judged."""
    if not results.run.simulated or _asks_what_is_shipped(results, policy):
        return []
    return ["This judges a defence that the run does not ship."]


def _also_came_back(back: Recovery, deciding: RuleVerdict, shipped: str) -> list[str]:
    """Return a sentence on shipped texts that the deciding rule does not count."""
    asked = deciding.defense in (SHIPPED, shipped)
    found = in_words(back)
    if not found or (asked and deciding.k):
        return []
    word = "Besides," if deciding.status is Status.FAIL else "But"
    return [f"{word} {found} came back{'' if asked else ' from the update that the run ships'}."]


def _interruption(results: Results) -> list[str]:
    """Return a sentence on what an interrupted audit covers."""
    if not results.run.interrupted:
        return []
    lacking = lacking_steps(results)
    verb = "lacks" if lacking == 1 else "lack"
    gap = f"; {counted(lacking, 'step')} {verb} attempts that were due" if lacking else ""
    return [f"Training or audit was interrupted: this covers {counted(len(results.steps), 'step')}{gap}."]


def _overall(rules: Sequence[RuleVerdict], gaps: Gaps) -> tuple[Status, RuleVerdict]:
    """Return the verdict and the rule that decides it.

    That is the rule at level error with the worst status that is not waived. If several have it, the most severe one decides. The evidence as a whole
    cannot be waived: a gap in it keeps the verdict from passing, also where all rules that know of it are waived.
    """
    binding = [rule for rule in rules if rule.level == "error"]
    left = [rule for rule in binding if not rule.waived]
    deciding = min(left or binding, key=_order)
    status = deciding.status if left else Status.PASS
    return (Status.INCONCLUSIVE if status is Status.PASS and gaps.sentences else status), deciding


def _order(rule: RuleVerdict) -> tuple[int, int, int]:
    """Return the sort key of a rule: level, then status, then severity.

    Equal rules keep the order of the policy.
    """
    return rule.level != "error" or bool(rule.waived), -_BADNESS[rule.status], _SEVERITY[rule.severity]


def _alternatives(
    results: Results,
    policy: Policy,
    gaps: Gaps,
    reference: Reference,
    of_others: Sequence[RuleVerdict],
    index: Index,
) -> Iterable[Alternative]:
    """Judge the policy as if each other defence of the battery were shipped.

    A defence of the update changes nothing about the rules `of_others`.
    """
    if not any(rule.scope.defense == SHIPPED and rule.level == "error" and rule.of_attacks for rule in policy.rules):
        return
    for defense in index.of_defense:
        if defense in (OBSERVED, shipped_column(results)):
            continue
        rules = [*judge_rules(results, policy, defense, gaps, reference, index), *of_others]
        still_open = tuple(r.id for r in rules if r.level == "error" and r.status is not Status.PASS)
        figures = tuple(
            Figures.model_validate({name: getattr(r, name) for name in Figures.model_fields}) for r in rules
        )
        overall = _overall(rules, gaps)[0]
        naive = any(_only_naive(index, rule, defense) for rule in rules if rule.defense == defense)
        yield Alternative(defense=defense, status=overall, open_rules=still_open, naive=naive, rules=figures)


def _only_naive(index: Index, rule: RuleVerdict, defense: str) -> bool:
    """Return whether every attack that is evidence for a rule was naive.

    A naive attack does not know the defence. Only rules at level error count.
    """
    if rule.level != "error":
        return False
    mine = (a.adaptive for a in index.of_defense[defense] if a.attack in rule.attacks and a.finished)
    first = next(mine, None)
    return first is False and not any(mine)


def _from_the_future(results: Results, now: datetime) -> Iterable[str]:
    """Yield a problem if the audit finished after the time of judgement."""
    finished = moment(results.run.finished)
    if finished is not None and finished - now > CLOCK_SLACK:
        yield "the results are dated in the future"


def _absent(results: Results) -> list[str]:
    """Return a sentence on steps that lack attempts that were due.

    Steps whose gaps an interruption or a refused snapshot explains are not counted.
    """
    lacking = unexplained_steps(results)
    if not lacking:
        return []
    verb = "lacks" if lacking == 1 else "lack"
    return [f"{counted(lacking, 'step')} {verb} attempts that were due, and nothing in the results explains it."]


def _error(
    policy: Policy,
    now: datetime,
    problems: Sequence[str],
    results: Results | None,
    *,
    run: str = "",
    results_sha256: str | None = None,
) -> Verdict:
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    return Verdict(
        **_origin(results, policy, now, results_sha256, run),
        verdict=Status.ERROR,
        exit_code=Status.ERROR.exit_code,
        sentence=ended(f"The evidence cannot be judged: {problems[0]}{more}"),
        deciding_rule=None,
        evidence_age_s=None,
        valid_until=None,
        steps=0,
        unverified_steps=0,
        rules=(),
        controls=(),
        alternatives=(),
        problems=tuple(problems),
    )


def _origin(
    results: Results | None, policy: Policy, now: datetime, results_sha256: str | None, run: str = ""
) -> dict[str, Any]:
    """Return the keys of a verdict that name the results, the policy and the time."""
    return {
        "run": run if results is None else results.run.id,
        "policy": policy.name,
        "policy_owner": policy.owner,
        "policy_digest": policy.digest,
        "results_sha256": results_sha256,
        "results_digest": None if results is None else results.digest,
        "evaluated_at": _stamp(now),
    }


def _stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
