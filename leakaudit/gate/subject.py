"""What a verdict is about, compared with what the caller and the policy say.

That is the artefacts, the base model, the data, the code, and the policy with which the run began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeVar

from leakaudit.gate.policy import Policy, SubjectPolicy
from leakaudit.gate.policy_source import PolicySource
from leakaudit.gate.verdict import About, Verdict
from leakaudit.results.binding import Binding
from leakaudit.results.schema import Artifact, Results, Subject, TakenPolicy

Value = TypeVar("Value")

_SHORT = 12
"""Digits of a digest in a sentence, as elsewhere in reports."""

_MOST_NAMED = 3
"""Most artefacts of a run that a sentence names."""


@dataclass(frozen=True)
class Claim:
    """What the caller of the gate says that the results are about."""

    artifacts: tuple[Artifact, ...] = ()
    """Files that are to be released."""
    binding: Binding | None = None
    """What `leakaudit bind` wrote beside the results; None if it was not called."""
    source: PolicySource | None = None
    """Where the policy was read in git; None if it was read from a file."""


NO_CLAIM = Claim()


@dataclass(frozen=True)
class Bound:
    """What the results are bound to, compared with claim and policy."""

    about: About
    policy_of_run: str
    policy_changed: bool
    source: PolicySource | None
    problems: tuple[str, ...]
    """Reasons why the results are no evidence for this release."""
    gaps: tuple[str, ...]
    """Requirements of the policy that are not met."""
    sentences: tuple[str, ...]
    """What a reader must know, where the policy requires nothing."""

    def in_verdict(self, verdict: Verdict) -> Verdict:
        """Return a verdict that says what it is about."""
        more = {
            "about": self.about,
            "policy_of_run": self.policy_of_run,
            "policy_changed": self.policy_changed,
        }
        if self.problems:
            more["sentence"] = " ".join(self.problems)
        return judged_by(self.source, verdict.model_copy(update=more))


def judged_by(source: PolicySource | None, verdict: Verdict) -> Verdict:
    """Return a verdict that says where its policy was read in git."""
    if source is None:
        return verdict
    return verdict.model_copy(update={"policy_ref": source.ref, "policy_commit": source.commit})


def together(of_runs: Mapping[str, Bound]) -> Bound:
    """Return what several runs are bound to: what all of them say."""
    bounds = list(of_runs.values())
    about = [one.about for one in bounds]
    return Bound(
        about=About(
            artifacts=tuple(dict.fromkeys(artifact for one in about for artifact in one.artifacts)),
            compared=_common([one.compared for one in about], ()),
            base_model=_common([one.base_model for one in about], ""),
            data=_common([one.data for one in about], ""),
            code_commit=_common([one.code_commit for one in about], None),
            code_dirty=True
            if any(one.code_dirty for one in about)
            else _common([one.code_dirty for one in about], None),
        ),
        policy_of_run=_common([one.policy_of_run for one in bounds], ""),
        policy_changed=any(one.policy_changed for one in bounds),
        source=bounds[0].source,
        problems=tuple(dict.fromkeys(said for one in bounds for said in one.problems)),
        gaps=tuple(_of_runs({run: one.gaps for run, one in of_runs.items()})),
        sentences=tuple(_of_runs({run: one.sentences for run, one in of_runs.items()})),
    )


def _of_runs(said: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield each sentence once, with the name of its run unless it is true of all."""
    for sentence in dict.fromkeys(one for own in said.values() for one in own):
        runs = [run for run, own in said.items() if sentence in own]
        yield sentence if len(runs) == len(said) else f"Run {', '.join(runs)}: {sentence}"


def _common(values: Sequence[Value], unsaid: Value) -> Value:
    """Return the value that all have; else `unsaid`."""
    return values[0] if all(value == values[0] for value in values) else unsaid


def judge_subject(results: Results, policy: Policy, claim: Claim) -> Bound:
    """Compare what results say of their origin with the claim and the policy."""
    subject, taken = results.subject, results.run.policy
    named = (*subject.artifacts, *(() if claim.binding is None else claim.binding.artifacts))
    wrong = tuple(_wrong_artifacts(named, claim.artifacts))
    changed = taken is not None and taken.digest != policy.digest
    gaps, sentences = [*_unmet(subject, policy.subject)], [*_told(named, claim.artifacts, policy.subject)]
    if policy.subject.require_artifact_digest and not named:
        gaps.append(
            "The policy requires an artefact with its digest, and the run names none (`artifacts`, `leakaudit bind`)."
        )
    if said := _on_policy(taken, policy):
        (gaps if policy.subject.require_policy_of_run else sentences).append(said)
    return Bound(
        about=About(
            artifacts=tuple(dict.fromkeys(named)),
            compared=() if wrong or not named else claim.artifacts,
            base_model=subject.base_model,
            data=subject.data,
            code_commit=subject.code_commit,
            code_dirty=subject.code_dirty,
        ),
        policy_of_run="" if taken is None else taken.digest,
        policy_changed=changed,
        source=claim.source,
        problems=wrong,
        gaps=tuple(gaps),
        sentences=tuple(sentences),
    )


def _wrong_artifacts(named: Sequence[Artifact], given: Sequence[Artifact]) -> Iterator[str]:
    """Yield a sentence for each given file that is none of those that the run names."""
    digests = {one.sha256 for one in named}
    for one in given if named else ():
        if one.sha256 in digests:
            continue
        same = [other for other in named if _last(other.name) == _last(one.name)] or named
        more = f" and {len(same) - _MOST_NAMED} more" if len(same) > _MOST_NAMED else ""
        of_run = ", ".join(f"{other.name} sha256 {_short(other.sha256)}" for other in same[:_MOST_NAMED])
        yield (
            f"The evidence is not about this artefact: {one.name} has sha256 {_short(one.sha256)}, the run names {of_run}{more}."
        )


def _told(named: Sequence[Artifact], given: Sequence[Artifact], required: SubjectPolicy) -> Iterator[str]:
    """Yield what a reader must know of the artefacts."""
    if given and not named:
        names = ", ".join(one.name for one in given)
        yield f"This audit is not tied to {names}: the run names no artefact (`leakaudit bind RUN FILE` adds one)."
    if named and not given and required.require_artifact_digest:
        yield "No file was compared with the artefacts of the run (`--artifact`)."


def _on_policy(taken: TakenPolicy | None, policy: Policy) -> str:
    """Return a sentence on the policy of the run; empty if it is the one that judges."""
    if taken is None:
        lacking = "The policy must be the one that the run began with, and the results do not say which that was."
        return lacking if policy.subject.require_policy_of_run else ""
    if taken.digest == policy.digest:
        return ""
    return f"The policy was changed after the run began (taken sha256:{_short(taken.digest)}, judged by sha256:{_short(policy.digest)})."


def _unmet(subject: Subject, required: SubjectPolicy) -> Iterator[str]:
    """Yield a sentence for each unmet requirement on code, data and base model."""
    if required.require_clean_tree and subject.code_dirty is not False:
        found = (
            "the commit of this run's code is not known"
            if subject.code_dirty is None
            else "this run's code had changes"
        )
        yield f"The policy requires code without changes that are not committed; {found}."
    if required.data and subject.data != required.data:
        found = f"are called {subject.data}" if subject.data else "have no name (`data_name`)"
        yield f"The policy is about the data {required.data}; those of this run {found}."
    if required.base_model and subject.base_model != required.base_model:
        found = f"began with {subject.base_model}" if subject.base_model else "does not say what it began with"
        yield f"The policy is about the base model {required.base_model}; this run {found}."


def _last(name: str) -> str:
    return PurePosixPath(name).name


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:_SHORT]
