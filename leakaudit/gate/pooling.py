"""One audit made of several, whose steps count together.

`leakaudit.history.pooled` decides which audits may be joined and judges the joint one. This module joins them: each step counts once, and
what the gate reads of the whole audit (controls, age, gaps) is that of all runs, or of the worst.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from leakaudit.gate.evidence import usable
from leakaudit.results.canaries import pooled as pooled_canaries
from leakaudit.results.conformance import joined as joined_conformance
from leakaudit.results.consistency import lacking_steps, moment, unexplained_steps
from leakaudit.results.membership import pooled
from leakaudit.results.schema import (
    Attempt,
    Catalogue,
    Control,
    Controls,
    KindControl,
    Results,
    RunInfo,
    StepRecord,
    Tally,
)


@dataclass(frozen=True)
class Pool:
    """Several runs as one audit."""

    results: Results
    """Steps are called `<run>/<step>`. Its summaries are empty, and it has no digest of a file."""
    repeated: Mapping[str, int]
    """Run -> its steps that another step repeats, which do not count again. A run without one is absent."""
    paired: bool
    """Whether all runs have marks under one key, so that a step that two of them share is found for certain."""


def pool(runs: Sequence[Results]) -> Pool:
    """Join the steps, attempts and controls of several runs.

    A step that two runs hold counts once, with the attempts of both: if one of them leaked, the step leaked. Two steps are the same if they
    have the same update, or the same mark (`unit`) under one key. Where two runs have no key in common, steps without a leak are also the same
    if their number and every figure of them agree to the last digit; leaks always count, because one leak too few could make a rule pass. A run of which every step is repeated adds no control steps.

    Args:
        runs: at least one; each has a different id.
    """
    longest_first = sorted(runs, key=lambda run: -len(run.steps))  # so that a shard repeats the whole audit
    steps = _Steps()
    joined = {run.run.id: steps.add(run) for run in longest_first}
    counted = [run for run in runs if not run.steps or len(joined[run.run.id].repeated) < len(run.steps)]
    own = [run for run in runs if not joined[run.run.id].repeated]  # counts of texts cannot leave out single steps
    attempts = tuple(attempt for run in runs for attempt in joined[run.run.id].attempts)
    found = runs[0].model_copy(
        update={
            "run": _run(runs),
            "threat_model": runs[0].threat_model.model_copy(update={"granted": _granted(runs)}),
            "regime": runs[0].regime.model_copy(update={"hidden": _least(run.regime.hidden for run in runs)}),
            "steps": tuple(steps.records.values()),
            "attempts": attempts,
            "summaries": (),
            "controls": _controls(counted),
            "catalogue": _catalogue(runs),
            "conformance": joined_conformance(run.conformance for run in runs),
            "canaries": pooled_canaries(one for run in runs for one in run.canaries),
            "membership": pooled([run.membership for run in own], [run.run.id for run in own]),
            "privacy": tuple(dict.fromkeys(one for run in runs for one in run.privacy)),
            "digest": None,
        }
    )
    unexplained = sum(map(unexplained_steps, runs))
    explained = max(0, lacking_steps(found) - unexplained - found.run.interrupted)
    coverage = runs[0].coverage.model_copy(
        update={"audited_steps": len(found.steps), "skipped_snapshots": explained, "total_steps": None}
    )
    keys = {run.run.pairing if all(step.unit for step in run.steps) else "" for run in runs}
    repeated = {run.run.id: len(joined[run.run.id].repeated) for run in runs if joined[run.run.id].repeated}
    return Pool(found.model_copy(update={"coverage": coverage}), repeated, paired=len(keys) == 1 and "" not in keys)


def step_name(run: str, step: str) -> str:
    """Return what a step of one run is called in the joint audit."""
    return f"{run}/{step}"


@dataclass(frozen=True)
class _Joined:
    """What one run brings."""

    attempts: tuple[Attempt, ...]
    repeated: frozenset[str]
    """Ids of its steps that an earlier step of the pool repeats."""


@dataclass(frozen=True)
class _Steps:
    """The steps so far, and how the same one is found again."""

    records: dict[str, StepRecord] = field(default_factory=dict)
    """Name -> record."""
    certain: dict[Hashable, str] = field(default_factory=dict)
    """Update or mark -> name of the step that had it first."""
    figures: dict[Hashable, tuple[str, str, str]] = field(default_factory=dict)
    """Figures -> name, run and key of the marks of the step that had them first."""

    def add(self, run: Results) -> _Joined:
        """Add the steps of a run, and return its attempts under their new names."""
        by_step: dict[str, list[Attempt]] = {step.id: [] for step in run.steps}
        for attempt in run.attempts:
            by_step[attempt.step].append(attempt)
        attempts: list[Attempt] = []
        repeated = set()
        for step in run.steps:
            name = self._name(run.run, step, by_step[step.id])
            if name in self.records:
                repeated.add(step.id)
                if usable(step) and not usable(self.records[name]):
                    self.records[name] = step.model_copy(update={"id": name})
            else:
                self.records[name] = step.model_copy(update={"id": name})
            attempts += [attempt.model_copy(update={"step": name}) for attempt in by_step[step.id]]
        return _Joined(tuple(attempts), frozenset(repeated))

    def _name(self, run: RunInfo, step: StepRecord, attempts: Sequence[Attempt]) -> str:
        """Return the name of the same step of the pool, or a new name."""
        marks: list[Hashable] = [step.snapshot, *([(run.pairing, step.unit)] if step.unit and run.pairing else [])]
        figures = _figures(step, attempts)
        known = next((self.certain[mark] for mark in marks if mark in self.certain), None)
        if known is None and figures in self.figures and not any(attempt.leaked for attempt in attempts):
            name, other, key = self.figures[figures]
            told_apart = other == run.id or (key and key == run.pairing)
            known = None if told_apart else name
        found = known or step_name(run.id, step.id)
        for mark in marks:
            self.certain.setdefault(mark, found)
        self.figures.setdefault(figures, (found, run.id, run.pairing if step.unit else ""))
        return found


def _figures(step: StepRecord, attempts: Iterable[Attempt]) -> Hashable:
    """Return every figure of a step that neither a key nor the clock decides."""
    return (
        step.step,
        step.loss,
        step.n_sequences,
        step.n_tokens_bucket,
        step.verification.relative_error,
        step.verification.scale,
        frozenset(
            (
                one.attack,
                one.defense,
                one.status,
                one.events,
                frozenset(one.facts.items()),
                frozenset((name, getattr(score, "value", None)) for name, score in one.scores.items()),
            )
            for one in attempts
        ),
    )


def _run(runs: Sequence[Results]) -> RunInfo:
    """Return the joint run: as old as its oldest one, with the least time limit."""
    infos = [run.run for run in runs]
    ends = [(moment(info.finished), info) for info in infos]
    known = [(end, info) for end, info in ends if end is not None]
    oldest = min(known, key=lambda one: one[0])[1] if len(known) == len(ends) else infos[0]
    finished = oldest.finished if len(known) == len(ends) else ""
    attacks = tuple(dict.fromkeys(name for info in infos for name in info.battery.attacks))
    defenses = tuple(dict.fromkeys(name for info in infos for name in info.battery.defenses))
    battery = infos[0].battery.model_copy(
        update={
            "attacks": attacks,
            "defenses": defenses,
            "budget_s": min(info.battery.budget_s for info in infos),
        }
    )
    return infos[0].model_copy(
        update={
            "id": f"{len(runs)} runs",
            "started": oldest.started,
            "finished": finished,
            "battery": battery,
            "interrupted": any(info.interrupted for info in infos),
        }
    )


def _granted(runs: Sequence[Results]) -> tuple[str, ...]:
    """Return what every run granted the attacks."""
    return tuple(name for name in runs[0].threat_model.granted if all(name in run.threat_model.granted for run in runs))


def _least(numbers: Iterable[int | None]) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _controls(runs: Sequence[Results]) -> Controls:
    """Add up the control steps of all runs, for each kind and attack."""
    controls = [run.controls for run in runs]
    kinds = dict.fromkeys(kind for one in controls for kind in one.kinds)
    return Controls(
        positive=_control([one.positive for one in controls]),
        negative=_control([one.negative for one in controls]),
        kinds={kind: _kind([one.kinds.get(kind, KindControl()) for one in controls]) for kind in kinds},
    )


def _control(found: Sequence[Control]) -> Control:
    notes = dict.fromkeys(one.note for one in found if one.note and not one.n)
    return Control(k=sum(one.k for one in found), n=sum(one.n for one in found), note="; ".join(notes))


def _kind(found: Sequence[KindControl]) -> KindControl:
    attacks = dict.fromkeys(name for one in found for name in one.by)
    return KindControl(
        **_tally(found), by={name: Tally(**_tally([one.by.get(name, Tally()) for one in found])) for name in attacks}
    )


def _tally(found: Sequence[Tally]) -> dict[str, int]:
    return {"k": sum(one.k for one in found), "n": sum(one.n for one in found)}


def _catalogue(runs: Sequence[Results]) -> Catalogue:
    """Return the entries of all runs; runs that are pooled describe a name alike."""
    found = [run.catalogue for run in runs]
    return Catalogue(
        attacks={name: entry for one in found for name, entry in one.attacks.items()},
        defenses={name: entry for one in found for name, entry in one.defenses.items()},
        metrics={name: entry for one in found for name, entry in one.metrics.items()},
    )
