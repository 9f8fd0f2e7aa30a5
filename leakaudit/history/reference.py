"""The baseline as the gate needs it: read from its file or from another audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from leakaudit.errors import ResultsError
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.gate.controls import trusted
from leakaudit.gate.evidence import gather_own
from leakaudit.gate.policy import Policy
from leakaudit.gate.regression import ABSENT, NO_BASELINE, Counted, Reference, Seen, counted_of, series_of
from leakaudit.history.baseline import SEEN, Outcomes, SavedBaseline, load, parse
from leakaudit.history.keys import changed, differences_in_words, keys_of
from leakaudit.results.files import load_results
from leakaudit.results.schema import Results

NOT_COMPARED = frozenset({"policy"})
"""Comparability keys that the gate leaves out. `policy`: what a rule counts must be in the baseline, and its other rules do not matter."""


@dataclass(frozen=True)
class Earlier:
    """A baseline that was read, before an audit is compared with it."""

    reference: Reference
    keys: Mapping[str, str] | None = None
    """Its comparability keys; None if there is no baseline."""

    def beside(self, results: Results, policy: Policy) -> Reference:
        """Return the baseline by which an audit is judged."""
        if self.keys is None:
            return self.reference
        return replace(self.reference, differs=_differs(self.keys, results, policy))


NO_EARLIER = Earlier(ABSENT)


def read_earlier(policy: Policy, policy_file: Path | None, given: Path | None = None) -> Earlier:
    """Read the baseline of a policy.

    Args:
        policy: the policy.
        policy_file: file of the policy, from whose folder `baseline.file` counts; None to count from the working folder.
        given: the baseline's file, or another audit (its folder or results.json); None for the file that the policy names.

    Raises:
        ResultsError: the baseline cannot be read or was changed, or `given` does not exist.
    """
    if not policy.compares:
        return NO_EARLIER
    place = baseline_file(policy, policy_file, given)
    if given is not None and not given.exists():
        raise ResultsError(f"{given}: no such file or folder; name the baseline's file, or an audit")
    if place.is_dir() or _holds_results(place):
        return _of_results(load_results(place), policy)
    return _of_file(load(place), place)


def read_earlier_in(raw: bytes | None, source: str, policy: Policy) -> Earlier:
    """Read the baseline in the bytes of its file.

    Args:
        raw: the bytes; None if there is no such file.
        source: the file's name in messages.
        policy: the policy.

    Raises:
        ResultsError: it is no baseline, or was changed after it was written.
    """
    if not policy.compares:
        return NO_EARLIER
    return _of_file(None if raw is None else parse(raw, source), policy.baseline.file)


def reference_for(results: Results, policy: Policy, policy_file: Path | None, given: Path | None = None) -> Reference:
    """Return the baseline by which an audit is judged; see `read_earlier`."""
    return read_earlier(policy, policy_file, given).beside(results, policy)


def reference_of(base: Results, results: Results, policy: Policy) -> Reference:
    """Return an audit as the baseline of another one."""
    return _of_results(base, policy).beside(results, policy)


def baseline_file(policy: Policy, policy_file: Path | None, given: Path | None = None) -> Path:
    """Return where the baseline of a policy is, as for `reference_for`."""
    return given or (policy_file.parent if policy_file else Path()) / policy.baseline.file


def _holds_results(place: Path) -> bool:
    """Return whether a file says that it holds results."""
    try:
        data = parse_json(read_bounded(place))
    except (OSError, ValueError):
        return False  # whoever reads it says what is wrong
    return isinstance(data, dict) and str(data.get("schema", "")).startswith("leakaudit.results/")


def _of_results(base: Results, policy: Policy) -> Earlier:
    series = {
        series_of(rule): counted_of(base, gather_own(base, rule, trusted(base, policy, rule)))
        for rule in policy.rules
        if rule.versus_baseline is not None
    }
    found = Reference(run=base.run.id, results_digest=base.digest or "", pairing=base.run.pairing, series=series)
    return Earlier(found, keys_of(base, policy, base.subject.data))


def _of_file(saved: SavedBaseline | None, place: Path) -> Earlier:
    if saved is None:
        return Earlier(Reference(problem=f"{place.name}: {NO_BASELINE}"))
    if not saved.digest:
        return Earlier(
            Reference(
                problem="the baseline has no digest, which earlier versions did not write; set it again with `leakaudit baseline set RUN`"
            )
        )
    found = Reference(
        run=saved.run,
        results_digest=saved.results_digest,
        digest=saved.digest,
        pairing=saved.pairing,
        series={one.series: _counted(saved, one) for one in saved.outcomes},
    )
    return Earlier(found, saved.keys)


def _counted(saved: SavedBaseline, found: Outcomes) -> Counted:
    values = {letter: seen for seen, letter in SEEN.items()}
    steps: list[tuple[str, Seen]] = [
        (mark, values[letter]) for mark, letter in zip(saved.batches, found.steps, strict=True) if letter in values
    ]
    often = Counter(saved.batches)
    once = {mark: seen for mark, seen in steps if mark and often[mark] == 1}
    return Counted(tuple(seen for _, seen in steps), once)


def _differs(base: Mapping[str, str], results: Results, policy: Policy) -> str:
    """Return the keys that differ, in words with both values; empty if none does.

    Data sets are compared only where both have a name: one without a name may be the same.
    """
    new = keys_of(results, policy, results.subject.data)
    named = base.get("data") and new["data"]
    names = [name for name in changed(base, new) if name not in NOT_COMPARED and (name != "data" or named)]
    return f"they differ in {differences_in_words(names, base, new)}" if names else ""


def before_setting(results: Results, policy: Policy, place: Path) -> tuple[Reference, Policy]:
    """Return by what an audit is judged before it becomes the baseline.

    It is compared with the baseline that it replaces. If there is none, or if it is the same audit, the rules that need one are left out, as far as
    others remain.

    Args:
        results: the audit that is to be the baseline.
        policy: its policy.
        place: the baseline's file.
    """
    try:
        found = reference_for(results, policy, None, place) if place.exists() else ABSENT
    except ResultsError:
        found = ABSENT  # it is written anew
    alone = tuple(rule for rule in policy.rules if rule.versus_baseline is None)
    first = bool(found.problem) or found.run == results.run.id
    if first and any(rule.level == "error" for rule in alone):
        return ABSENT, policy.model_copy(update={"rules": alone})
    return found, policy
