"""What a command judges, and by what: its options and their reading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.common import EXISTING, REF_HELP

if TYPE_CHECKING:
    from datetime import datetime

    from leakaudit.gate.imported import Imported
    from leakaudit.gate.policy import Policy
    from leakaudit.gate.policy_source import PolicyFiles
    from leakaudit.gate.regression import Reference
    from leakaudit.gate.subject import Claim
    from leakaudit.gate.verdict import Verdict
    from leakaudit.gate.waivers import Waivers
    from leakaudit.history.reference import Earlier
    from leakaudit.results.schema import Artifact, Results, TextMode


@dataclass(frozen=True)
class Yardstick:
    """The files that a command judges by; None for one that was not named."""

    policy: Path | None = None
    policy_ref: str | None = None
    """Commit of git from which policy, waivers and baseline are read."""
    waivers: Path | None = None
    baseline: Path | None = None
    memaudit: Path | None = None
    """Report of memaudit, which the rules under `imported:` of the policy judge."""

    @property
    def named(self) -> tuple[Path, ...]:
        """The files that the caller names."""
        return tuple(filter(None, (self.policy, self.waivers, self.baseline, self.memaudit)))

    @cached_property
    def files(self) -> PolicyFiles:
        """Policy and waivers, in the working folder or in the commit.

        Raises:
            ConfigError: `policy_ref` names no commit.
        """
        from leakaudit.gate.policy_source import PolicyFiles

        return PolicyFiles.of(self.policy, self.waivers, self.policy_ref)

    def earlier(self, policy: Policy) -> Earlier:
        """Read the baseline.

        Raises:
            ConfigError: the commit holds no text of a usual size in its place.
            ResultsError: it cannot be read, or was changed.
        """
        from leakaudit.history.reference import baseline_file, read_earlier, read_earlier_in

        source = self.files.source
        if source is None or self.baseline is not None or not policy.compares:
            return read_earlier(policy, self.files.policy, self.baseline)
        label = source.label(baseline_file(policy, self.files.policy))
        return read_earlier_in(self.baseline_text(policy), label, policy)

    def baseline_text(self, policy: Policy) -> bytes | None:
        """Return the bytes of the baseline's file; None if there is none."""
        from leakaudit.history.reference import baseline_file

        file, source = baseline_file(policy, self.files.policy, self.baseline), self.files.source
        if source is not None and self.baseline is None:
            return source.read(file).encode() if source.holds(file) else None
        return file.read_bytes() if file.exists() else None


_OPTIONS = (
    click.option("--policy", type=EXISTING, help="YAML policy; default: the built-in one."),
    click.option("--policy-ref", metavar="REF", help=REF_HELP),
    click.option(
        "--waivers",
        type=EXISTING,
        help="YAML file of exceptions from rules, each with a last day; default: the file that the policy names.",
    ),
    click.option(
        "--baseline",
        type=EXISTING,
        help="Baseline for rules with `versus_baseline`: its file, or another audit; default: the file that the policy names.",
    ),
    click.option(
        "--memaudit", type=EXISTING, help="Report of memaudit, for the rules under `imported:` of the policy."
    ),
)


TEXT = click.option(
    "--text",
    type=click.Choice(["hash", "masked", "full"]),
    help="How much text to show; default: that of the policy (`report.text`), but full only if it is asked for here.",
)


def text_mode(asked: str | None, policy: Policy) -> TextMode:
    """Return the text mode that is asked for, else the policy's, but not full."""
    from leakaudit.results.schema import TextMode

    if asked is not None:
        return TextMode(asked)
    return TextMode.MASKED if policy.report.text is TextMode.FULL else policy.report.text


def judging(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `Yardstick` to a command, which gets them as `by`."""
    names = [field.name for field in fields(Yardstick)]

    @wraps(command)
    def wrapped(**given: Any) -> None:
        by = Yardstick(**{name: given.pop(name) for name in names})
        command(by=by, **given)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


@dataclass(frozen=True)
class Judged:
    """What a command judges, and by what."""

    results: Results
    sha256: str
    """SHA-256 of the file of the results, in hex."""
    policy: Policy
    waivers: Waivers | None
    reference: Reference
    imported: Imported | None
    claim: Claim

    def verdict(self, now: datetime) -> Verdict:
        """Return the answer of the gate at a time, which has a time zone."""
        from leakaudit.gate.evaluate import evaluate

        return evaluate(
            self.results,
            self.policy,
            now=now,
            results_sha256=self.sha256,
            waivers=self.waivers,
            reference=self.reference,
            imported=self.imported,
            claim=self.claim,
        )


def read_judged(run: Path, by: Yardstick, released: tuple[Artifact, ...] = ()) -> Judged:
    """Read what is judged.

    Args:
        run: folder of the audit, or its results.json.
        by: the files to judge by.
        released: the files that are to be released.

    Raises:
        ResultsError: the results, the baseline or the report of memaudit cannot be read, or were changed.
        ConfigError: the policy or the waivers are wrong.
        click.UsageError: a file was named, and no rule asks for it.
    """
    from leakaudit.gate.imported import load_imported
    from leakaudit.gate.regression import ABSENT
    from leakaudit.gate.subject import Claim
    from leakaudit.plugins.names import names_for
    from leakaudit.results.binding import read_binding
    from leakaudit.results.files import read_results

    results, sha256 = read_results(run)
    binding = read_binding(run if run.is_dir() else run.parent, results)
    policy = by.files.load_policy(names_for(results))
    refuse_unasked(policy, by)
    return Judged(
        results,
        sha256,
        policy,
        by.files.load_waivers(policy),
        by.earlier(policy).beside(results, policy) if policy.compares else ABSENT,
        load_imported(by.memaudit) if by.memaudit else None,
        Claim(released, binding, by.files.source),
    )


def refuse_unasked(policy: Policy, by: Yardstick) -> None:
    """Refuse a file that no rule of the policy judges by.

    Raises:
        click.UsageError: there is one.
    """
    if by.baseline is not None and not policy.compares:
        raise click.UsageError(f"--baseline: no rule of the policy {policy.name!r} has versus_baseline")
    if by.memaudit is not None and not policy.imported:
        raise click.UsageError(
            f"--memaudit: the policy {policy.name!r} has no rule under `imported:`, so nothing would judge it"
        )
