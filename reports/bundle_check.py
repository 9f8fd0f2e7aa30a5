"""Checks of a bundle by somebody who does not trust where it comes from."""

from __future__ import annotations

import io
import stat
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from leakaudit import __version__
from leakaudit.errors import LeakAuditError
from leakaudit.files.strict_json import parse_json, read_bounded, short
from leakaudit.gate.imported import Imported
from leakaudit.gate.policy import parse_policy
from leakaudit.gate.policy_source import PolicySource
from leakaudit.gate.subject import Claim
from leakaudit.gate.verdict import Verdict, to_json
from leakaudit.gate.waivers import parse_waivers
from leakaudit.history.reference import read_earlier_in
from leakaudit.reports import bundle
from leakaudit.reports.bundle import Evidence
from leakaudit.results.binding import SUBJECT, parse_binding
from leakaudit.results.consistency import moment
from leakaudit.results.files import parse_results
from leakaudit.results.schema import TextMode
from leakaudit.results.wording import counted

MAX_BYTES = 512 * 1024 * 1024
"""Largest bundle, and most bytes of its members together. Our choice: twice the largest results."""

REQUIRED = {
    bundle.README, bundle.ANNEX, bundle.CARD, bundle.POLICY, bundle.RESULTS, bundle.SUMS, bundle.VERDICT, bundle.VERSIONS,
}  # fmt: skip
"""Members that every bundle has."""

CORE = (
    "verdict",
    "exit_code",
    "deciding_rule",
    "policy_digest",
    "results_digest",
    "results_sha256",
    "waivers_digest",
    "allowed",
)
"""Keys of a verdict that two versions of leakaudit must agree on."""

FACTS = (
    "run",
    "policy",
    "policy_of_run",
    "policy_changed",
    "about",
    "texts_back",
    "valid_until",
    "steps",
    "unverified_steps",
    "unverifiable_steps",
)
"""Keys of a verdict that must follow where they are there; an earlier version may lack one."""

CORE_OF_RULE = ("id", "status", "level", "k", "n", "lower", "upper", "threshold", "waived")
"""Keys of a rule of a verdict that two versions must agree on."""


@dataclass
class Checked:
    """What the checks of a bundle found."""

    problems: list[str] = field(default_factory=list)
    """Why the bundle cannot be trusted, each as a sentence; empty if it can."""
    notes: list[str] = field(default_factory=list)
    """What was checked, and what could not be."""
    verdict: Verdict | None = None
    """The verdict that follows from results, policy and waivers; None if it cannot be judged."""


class _BundleProblem(ValueError):
    """A bundle is wrong in a way that ends the checks."""


def check_bundle(path: Path) -> Checked:
    """Check a bundle and say what is wrong with it. Nothing is unpacked to the disk."""
    found = Checked()
    try:
        held = _members(path)
        found.problems += _about_sums(held)
        versions = _versions(held)
        evidence = _evidence(held)
        found.verdict = evidence.verdict
        found.problems += _about_verdict(held, evidence, versions)
        found.problems += _about_subject(evidence, versions)
        found.notes += _not_shown(evidence)
        _compare(found, held, evidence, versions)
    except _BundleProblem as problem:
        found.problems.append(str(problem))
    return found


def _members(path: Path) -> dict[str, bytes]:
    """Return the members of a zip: name -> bytes.

    Only the names of a bundle are read, each once, as stored regular files: so no name leaves a folder, and no member is larger than the zip.

    Raises:
        _BundleProblem: it is no such zip.
    """
    try:
        raw = read_bounded(path, MAX_BYTES)
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            entries = archive.infolist()
            _check_entries(entries)
            held = {entry.filename: archive.read(entry) for entry in entries}
    except OSError as error:
        raise _BundleProblem(f"The file cannot be read ({error.strerror or type(error).__name__}).") from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise _BundleProblem(f"The file is no zip that can be read ({type(error).__name__}).") from None
    except _BundleProblem:
        raise
    except ValueError as error:
        raise _BundleProblem(f"The file {error}.") from None
    if lacking := sorted(REQUIRED - {*held}):
        raise _BundleProblem(f"The bundle lacks {', '.join(lacking)}.")
    if (bundle.REPORT in held) == (bundle.FULL_REPORT in held):
        raise _BundleProblem(f"The bundle must hold one of {bundle.REPORT} and {bundle.FULL_REPORT}.")
    return held


def _check_entries(entries: list[zipfile.ZipInfo]) -> None:
    names = [entry.orig_filename for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _BundleProblem(f"The zip holds {short(twice[0])} twice.")
    for entry in entries:
        name, mode = entry.orig_filename, entry.external_attr >> 16
        if name not in bundle.MEMBERS and name != bundle.SUMS:
            raise _BundleProblem(f"The zip holds {short(name)}, which no bundle holds.")
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG) or entry.is_dir():
            raise _BundleProblem(f"{name} is a link or no regular file.")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
            raise _BundleProblem(f"{name} is compressed or encrypted; a bundle stores its files as they are.")
    if sum(entry.file_size for entry in entries) > MAX_BYTES:
        raise _BundleProblem(f"The files of the zip are larger than {MAX_BYTES // 1024**2} MiB.")


def _about_sums(held: Mapping[str, bytes]) -> Iterator[str]:
    """Yield a sentence for each file that its sum does not fit."""
    told = {
        name: digest
        for digest, _, name in (
            line.partition("  ") for line in held[bundle.SUMS].decode("utf-8", "replace").splitlines()
        )
    }
    real = {line.partition("  ")[2]: line.partition("  ")[0] for line in bundle.sums(held).splitlines()}
    for name in sorted({*told, *real}):
        if name not in real:
            yield f"{bundle.SUMS} names {short(name)}, which the bundle does not hold."
        elif told.get(name) != real[name]:
            yield f"{name} was changed: {bundle.SUMS} has {'no' if name not in told else 'another'} sum for it."


def _versions(held: Mapping[str, bytes]) -> Mapping[str, Any]:
    try:
        found = parse_json(held[bundle.VERSIONS])
    except ValueError as error:
        raise _BundleProblem(f"{bundle.VERSIONS} {error}.") from None
    if not isinstance(found, dict) or found.get("schema") != bundle.SCHEMA:
        raise _BundleProblem(
            f"{bundle.VERSIONS} has another schema than {bundle.SCHEMA}; a newer leakaudit may read it."
        )
    return found


def _evidence(held: Mapping[str, bytes]) -> Evidence:
    """Read what the verdict follows from.

    Raises:
        _BundleProblem: a part of it cannot be read.
    """
    name = bundle.RESULTS
    try:
        results = parse_results(held[name])
        name = bundle.POLICY
        policy = parse_policy(held[name].decode(), name)
        name = bundle.WAIVERS
        waivers = parse_waivers(held[name].decode(), name, policy) if name in held else None
        name = bundle.IMPORTED
        imported = Imported.model_validate_json(held[name]) if name in held else None
        name = bundle.BASELINE
        reference = read_earlier_in(held.get(name), name, policy).beside(results, policy)
        name = SUBJECT
        binding = parse_binding(held[name], name) if name in held else None
        name = bundle.VERDICT
        recorded = Verdict.model_validate(parse_json(held[name]))
    except ValidationError:
        raise _BundleProblem(f"{name} does not fit its schema.") from None
    except (LeakAuditError, ValueError) as error:
        said = str(error) if str(error).startswith(name) else f"{name} {error}"
        raise _BundleProblem(said if said.endswith(".") else f"{said}.") from None
    if recorded.schema_ != Verdict.model_fields["schema_"].default:
        raise _BundleProblem(
            f"{bundle.VERDICT} has the schema {short(recorded.schema_)}, which this version does not read."
        )
    now = moment(recorded.evaluated_at)
    if now is None:
        raise _BundleProblem(f"{bundle.VERDICT} does not say when it was judged.")
    return Evidence(
        results=results,
        raw=held[bundle.RESULTS],
        policy=policy,
        policy_text=held[bundle.POLICY],
        now=_aware(now),
        allowed=recorded.allowed,
        waivers=waivers,
        waivers_text=held.get(bundle.WAIVERS),
        imported=imported,
        reference=reference,
        baseline_text=held.get(bundle.BASELINE),
        claim=Claim(binding=binding, source=_source(recorded)),
        subject_text=held.get(SUBJECT),
    )


def _source(recorded: Verdict) -> PolicySource | None:
    """Return the commit that the policy is said to come from, unchecked."""
    return PolicySource(recorded.policy_ref, recorded.policy_commit) if recorded.policy_ref else None


def _aware(now: datetime) -> datetime:
    if now.tzinfo is None:
        raise _BundleProblem(f"{bundle.VERDICT} does not say in which time zone it was judged.")
    return now


def _about_verdict(held: Mapping[str, bytes], evidence: Evidence, versions: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each part of the verdict that does not follow."""
    told, real = parse_json(held[bundle.VERDICT]), to_json(evidence.verdict)
    for key in CORE:
        if told.get(key) != real[key]:
            yield f"The verdict does not follow: judged anew, {key} is {short(real[key])}; {bundle.VERDICT} has {short(told.get(key))}."
    for key in FACTS:
        if key in told and told[key] != real[key]:
            yield f"The verdict does not follow: judged anew, {key} is not what {bundle.VERDICT} has."
    rules = {rule.get("id"): rule for rule in told.get("rules", [])}
    for rule in real["rules"]:
        other = rules.pop(rule["id"], {})
        for key in CORE_OF_RULE:
            if not _equal(rule[key], other.get(key)):
                yield f"The verdict does not follow: judged anew, {key} of rule {rule['id']} is {short(rule[key])}; {bundle.VERDICT} has {short(other.get(key))}."
    if rules:
        yield f"The verdict has {counted(len(rules), 'rule')} that the policy does not have."
    if versions.get("judged_at") != real["evaluated_at"]:
        yield f"{bundle.VERSIONS} and {bundle.VERDICT} name different times of judgement."


def _about_subject(evidence: Evidence, versions: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence if the files of the run were bound to other results."""
    binding = evidence.claim.binding
    if binding is not None and binding.results_digest not in (evidence.results.digest, _origin(versions).get("digest")):
        yield f"{SUBJECT} is about other results than {bundle.RESULTS}."


def _not_shown(evidence: Evidence) -> Iterator[str]:
    """Yield a sentence for each statement that nothing in the bundle shows."""
    source = evidence.claim.source
    if evidence.verdict.allowed and not replace(evidence, allowed=False).verdict.allowed:
        yield "Whoever called the gate allowed an undecided verdict (exit code 0), says the verdict; the policy does not, and nothing here shows who did."
    if source is not None:
        yield (
            f"The policy was read from {short(source.ref)[1:-1]} at the commit {short(source.commit)[1:-1]}, says the verdict; nothing here shows "
            f"it. In the repository, compare {bundle.POLICY} with `git show COMMIT:PATH`."
        )


def _equal(a: Any, b: Any) -> bool:
    """Compare two values; numbers may differ in the last digits of another library."""
    if isinstance(a, float) and isinstance(b, float | int) and not isinstance(b, bool):
        return abs(a - b) <= 1e-9
    return bool(a == b)


def _compare(found: Checked, held: Mapping[str, bytes], evidence: Evidence, versions: Mapping[str, Any]) -> None:
    """Make the bundle anew and compare each file, if this version made it."""
    if versions.get("leakaudit") != __version__:
        found.notes.append(
            f"leakaudit {short(versions.get('leakaudit'))[1:-1]} made it, and this is {__version__}: report, annex and card were not made anew."
        )
        return
    full = bundle.FULL_REPORT in held
    if full:
        found.notes.append("The report holds text of the private journal, so it was not made anew.")
    mode = TextMode.HASH if versions.get("text") == TextMode.HASH else TextMode.MASKED
    origin = _origin(versions)
    try:
        made = bundle.members(evidence, mode, origin=origin)
    except LeakAuditError as error:
        found.problems.append(f"The bundle cannot be made anew: {error}.")
        return
    by_mode = {bundle.REPORT, bundle.README, bundle.VERSIONS, bundle.SUMS} if full else {bundle.SUMS}
    for name in sorted({*made} - by_mode):
        if held.get(name) != made[name]:
            found.problems.append(f"{name} is not what leakaudit {__version__} makes from results, policy and waivers.")
    found.notes.append(f"{len({*made} - by_mode)} files were made anew and compared.")


def _origin(versions: Mapping[str, Any]) -> Mapping[str, str]:
    results = versions.get("results")
    before = results.get("before") if isinstance(results, dict) else None
    return {key: value for key, value in before.items() if isinstance(value, str)} if isinstance(before, dict) else {}
