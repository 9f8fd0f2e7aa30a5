"""The verdict on several runs together, for jobs that afford a few steps each.

Each run is judged alone first. Runs that can be compared are then joined, and the policy judges their steps as those of one audit.
`docs/decisions/pooled_runs.md` says why.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from leakaudit.gate.controls import judge_age, judge_controls
from leakaudit.gate.coverage import another_adversary
from leakaudit.gate.evaluate import evaluate, judge, unreadable
from leakaudit.gate.imported import Imported
from leakaudit.gate.policy import Policy
from leakaudit.gate.pooling import Pool, pool
from leakaudit.gate.regression import Reference
from leakaudit.gate.requirements import other_runs
from leakaudit.gate.rules import Gaps, unclaimed
from leakaudit.gate.subject import NO_CLAIM, Claim, judge_subject, judged_by, together
from leakaudit.gate.verdict import PooledRun, Status, Verdict
from leakaudit.gate.waivers import Waivers
from leakaudit.history.keys import NAMES, changed, in_words, keys_of
from leakaudit.history.reference import NO_EARLIER, Earlier
from leakaudit.results.binding import Binding
from leakaudit.results.schema import Catalogue, Results
from leakaudit.results.wording import counted


@dataclass(frozen=True)
class Given:
    """One run as the caller gave it."""

    results: Results | None
    """None if they cannot be read."""
    sha256: str | None = None
    """Of results.json."""
    binding: Binding | None = None
    """What `leakaudit bind` wrote beside them."""
    problem: str = ""
    """Why they cannot be read."""


def judge_together(
    given: Sequence[Given],
    policy: Policy,
    *,
    now: datetime,
    waivers: Waivers | None = None,
    earlier: Earlier = NO_EARLIER,
    imported: Imported | None = None,
    claim: Claim = NO_CLAIM,
    despite: Collection[str] = (),
) -> Verdict:
    """Judge several runs as one audit.

    The same run given again is left out. The bounds are those for one look, so the number of runs must be fixed before the first look
    (`evidence: {runs: N}` of the policy).

    Args:
        given: the runs.
        policy: the rules.
        now: the time of judgement, with time zone.
        waivers: exceptions; None for none.
        earlier: the baseline, for rules on the difference from it.
        imported: what another auditor found; None if nobody gave it.
        claim: what the caller says that each of the runs is about.
        despite: comparability keys that may differ.

    Returns:
        The verdict. ERROR if a run cannot be read, contradicts itself, or was given twice with different results; INCONCLUSIVE if the runs
        cannot be pooled. `Verdict.runs` holds each run with its own verdict.
    """
    alone = [
        unreadable(one.problem, policy, now=now)
        if one.results is None
        else evaluate(
            one.results,
            policy,
            now=now,
            results_sha256=one.sha256,
            waivers=waivers,
            reference=earlier.beside(one.results, policy),
            imported=imported,
            claim=replace(claim, binding=one.binding),
        )
        for one in given
    ]
    first = _first_of_each(given)
    found = [one.results for number, one in enumerate(given) if number in first and one.results is not None]
    problems = [*_problems(alone), *_given_differently(given)]
    if problems:
        verdict = unreadable(problems[0], policy, now=now).model_copy(update={"problems": tuple(problems)})
        return _about(judged_by(claim.source, verdict), given, alone, first, {})
    if refusal := _not_poolable(found, policy, despite):
        verdict = unreadable(refusal, policy, now=now).model_copy(
            update={
                "verdict": Status.INCONCLUSIVE,
                "exit_code": Status.INCONCLUSIVE.exit_code,
                "sentence": refusal,
                "problems": (),
                "texts_back": sum(alone[number].texts_back for number in first),
            }
        )
        return _about(judged_by(claim.source, verdict), given, alone, first, {})
    joined = pool(found)
    bound = together(
        {
            one.results.run.id: judge_subject(one.results, policy, replace(claim, binding=one.binding))
            for number, one in enumerate(given)
            if number in first and one.results is not None
        }
    )
    gaps = _gaps(found, policy, joined, now)
    verdict = judge(
        joined.results,
        policy,
        now=now,
        waivers=waivers,
        reference=_none_of(earlier.beside(joined.results, policy), found),
        imported=imported,
        more=Gaps((*gaps.sentences, *bound.gaps), gaps.broken),
        notes=bound.sentences,
    )
    notes = [*_said(joined, found, policy, len(given)), *_leaks(verdict)]
    verdict = verdict.model_copy(update={"sentence": " ".join([verdict.sentence, *notes])})
    return _about(bound.in_verdict(verdict), given, alone, first, joined.repeated)


def _none_of(reference: Reference, runs: Sequence[Results]) -> Reference:
    """Return the baseline, or the problem that it is one of the runs that are judged."""
    if reference.run not in {run.run.id for run in runs}:
        return reference
    return Reference(problem=f"the baseline {reference.run} is one of these runs; name an earlier one")


def _about(
    verdict: Verdict,
    given: Sequence[Given],
    alone: Sequence[Verdict],
    first: Collection[int],
    repeated: Mapping[str, int],
) -> Verdict:
    """Return a verdict with the runs that it is about."""
    runs = tuple(
        PooledRun(
            run=own.run,
            results_sha256=own.results_sha256 if one.results is None else one.sha256,
            results_digest=own.results_digest,
            steps=own.steps if one.results is None else len(one.results.steps),
            repeated=repeated.get(own.run, 0) if number in first else own.steps,
            counted=number in first and one.results is not None,
            verdict=own.verdict,
            sentence=own.sentence,
        )
        for number, (one, own) in enumerate(zip(given, alone, strict=True))
    )
    digests = sorted(run.results_digest or run.results_sha256 or "" for run in runs if run.counted)
    digest = f"sha256:{hashlib.sha256(chr(10).join(digests).encode()).hexdigest()}"
    return verdict.model_copy(
        update={"runs": runs, "run": counted(len(first), "run"), "results_digest": digest if digests else None}
    )


def _first_of_each(given: Sequence[Given]) -> set[int]:
    """Return the places of the runs without those that were given before."""
    seen: set[str] = set()
    found = set()
    for number, one in enumerate(given):
        if one.results is None or one.results.run.id not in seen:
            found.add(number)
        if one.results is not None:
            seen.add(one.results.run.id)
    return found


def _problems(alone: Sequence[Verdict]) -> Iterator[str]:
    """Yield the problems of runs that cannot be judged, with the names of the runs."""
    for own in alone:
        yield from (f"run {own.run}: {problem}" if own.run else problem for problem in own.problems)


def _given_differently(given: Sequence[Given]) -> Iterator[str]:
    """Yield a problem for each id that two different results have."""
    known: dict[str, Results] = {}
    for one in given:
        if one.results is not None and known.setdefault(one.results.run.id, one.results) != one.results:
            yield f"two different results are those of the run {one.results.run.id}; give the one that counts"


def _not_poolable(runs: Sequence[Results], policy: Policy, despite: Collection[str]) -> str:
    """Return why runs cannot be pooled, with the values that differ; else empty."""
    keys = _keys_of(runs, policy)
    start = keys[runs[0].run.id]
    names = {name for own in keys.values() for name in changed(start, own)} - {*despite}
    said = [
        _differing(NAMES[name], {run: own.get(name, "") for run, own in keys.items()})
        for name in NAMES
        if name in names
    ]
    hint = " ".join(f"--despite {name}" for name in NAMES if name in names)
    always = [*_never_alike(runs)]
    if not said and not always:
        return ""
    if said and not always:
        always = [f"If they are to count together all the same, add {hint}."]
    return " ".join(["These runs cannot be pooled.", *said, *always])


def _keys_of(runs: Sequence[Results], policy: Policy) -> dict[str, dict[str, str]]:
    """Return run -> comparability keys.

    A run that does not name its data set may have that of the others, so the names are compared only where two are given.
    """
    named = len({run.subject.data for run in runs if run.subject.data}) > 1
    return {run.run.id: keys_of(run, policy, run.subject.data if named else "") for run in runs}


def _never_alike(runs: Sequence[Results]) -> Iterator[str]:
    """Yield a sentence for each difference that no option allows.

    The joint audit can have only one such value.
    """
    facts = {
        "the tokens from which a text counts (`min_tokens`)": {run.run.id: f"{run.min_tokens}" for run in runs},
        "where the steps come from": {
            run.run.id: "simulated" if run.run.simulated else "a training run" for run in runs
        },
    }
    for what, values in facts.items():
        if len({*values.values()}) > 1:
            yield _differing(what, values)
    if name := _described_differently([run.catalogue for run in runs]):
        yield f"They describe {name!r} differently."


def _described_differently(found: Sequence[Catalogue]) -> str:
    """Return the name of an attack or a metric of which runs say different things."""
    known: dict[str, object] = {}
    for one in found:
        said = {name: (entry.goal, entry.token_limit) for name, entry in one.attacks.items()}
        measured = {name: (entry.level, entry.higher_is_better) for name, entry in one.metrics.items()}
        for name, facts in (*said.items(), *measured.items()):
            if known.setdefault(name, facts) != facts:
                return name
    return ""


def _differing(what: str, values: Mapping[str, str]) -> str:
    """Return a sentence on the runs that have another value than most of them."""
    usual = Counter(values.values()).most_common(1)[0][0]
    others = {run: value for run, value in values.items() if value != usual}
    run, value = next(iter(others.items()))
    more = f" ({len(others) - 1} more runs differ)" if len(others) > 1 else ""
    return f"They differ in {what}: run {run} has {value or 'none'!r}, the others {usual or 'none'!r}{more}."


def _gaps(runs: Sequence[Results], policy: Policy, joined: Pool, now: datetime) -> Gaps:
    """Return the problems of single runs that keep the joint audit from passing."""
    found: list[str] = [*other_runs(policy, len(runs))]
    old = [run.run.id for run in runs if judge_age(run, policy, now)[1]]
    if old:
        found.append(f"The age of {_named(old)} is more than the policy allows, or unknown.")
    for run in runs:
        own = (*another_adversary(run, policy.requires.threat_model), *unclaimed(run, policy))
        found += [f"Run {run.run.id}: {sentence}" for sentence in own]
    broken = []
    seeing = {kind for kind, own in joined.results.controls.kinds.items() if own.k}
    for run in runs:
        for control in judge_controls(run, policy):
            if control.name == "negative" and control.state == "failed":
                broken.append(f"Run {run.run.id}: {control.sentence}")
            lacks = control.name == "negative" or control.kind in seeing
            if (control.state == "not run" and lacks and not control.n) or (
                control.kind in seeing and control.n and not control.k
            ):
                found.append(f"Run {run.run.id}: {control.sentence}")
    return Gaps(tuple(found), broken[0] if broken else "")


def _said(joined: Pool, runs: Sequence[Results], policy: Policy, given: int) -> Iterator[str]:
    """Yield sentences on what was pooled, and on what was not counted."""
    keys = _keys_of(runs, policy)
    start = keys[runs[0].run.id]
    differ = [name for name in NAMES if any(name in changed(start, own) for own in keys.values())]
    of = counted(len(runs), "run")
    yield f"{of} judged together: {counted(len(joined.results.steps), 'step')}."
    if again := given - len(runs):
        yield f"{counted(again, 'run')} given twice {'was' if again == 1 else 'were'} left out."
    if repeats := sum(joined.repeated.values()):
        verb = "repeats another one and does" if repeats == 1 else "repeat others and do"
        yield f"{counted(repeats, 'step')} {verb} not count again."
    if differ:
        yield f"They were pooled although they differ in {in_words(differ)}."
    if len(runs) > 1 and not all(run.subject.data for run in runs):
        yield "Not every run names its data set; these are pooled as if it were the same."
    if (commits := len({run.subject.code_commit for run in runs} - {None})) > 1:
        yield f"They are of {commits} commits of the code."
    if not joined.paired and len(runs) > 1:
        yield "The runs have no marks of one key, so a step that two of them share is found only if all its figures agree."
    if policy.evidence.runs is None and len(runs) > 1:
        yield "The bounds hold if these runs, and their number, were chosen before the first result (`evidence: {runs: N}`)."


def _leaks(verdict: Verdict) -> Iterator[str]:
    """Yield the run and step of the worst leak that the deciding rule counts."""
    rule = next((rule for rule in verdict.rules if rule.id == verdict.deciding_rule), None)
    if rule is not None and rule.worst is not None and (rule.k or rule.status is Status.FAIL):
        run, _, step = rule.worst.step.rpartition("/")
        yield f"The worst was step {step} of run {run}, by {rule.worst.attack}."


def _named(runs: Sequence[str]) -> str:
    """Return the names of at most three runs.

    >>> _named(["a"]), _named(["a", "b", "c", "d"])
    ('run a', 'runs a, b, c and 1 more')
    """
    more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
    return f"run{'s' if len(runs) > 1 else ''} {', '.join(runs[:3])}{more}"
