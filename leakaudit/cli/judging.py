"""What a command judges, and by what: its options and their reading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.common import EXISTING

if TYPE_CHECKING:
    from datetime import datetime

    from leakaudit.gate.imported import Imported
    from leakaudit.gate.policy import Policy
    from leakaudit.gate.regression import Reference
    from leakaudit.gate.verdict import Verdict
    from leakaudit.gate.waivers import Waivers
    from leakaudit.results.schema import Results


@dataclass(frozen=True)
class Yardstick:
    """The files that a command judges by; None for one that was not named."""

    policy: Path | None = None
    waivers: Path | None = None
    baseline: Path | None = None
    memaudit: Path | None = None
    """Report of memaudit, which the rules under `imported:` of the policy judge."""


_OPTIONS = (
    click.option("--policy", type=EXISTING, help="YAML policy; default: the built-in one."),
    click.option(
        "--waivers", type=EXISTING, help="YAML file of exceptions, each with an end; default: what the policy names."
    ),
    click.option(
        "--baseline", type=EXISTING, help="The baseline's file, or another audit; default: what the policy names."
    ),
    click.option(
        "--memaudit", type=EXISTING, help="Report of memaudit, for the rules under `imported:` of the policy."
    ),
)


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
    waivers_file: Path | None
    reference: Reference
    baseline_file: Path
    imported: Imported | None

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
        )


def read_judged(run: Path, by: Yardstick) -> Judged:
    """Read what is judged.

    Raises:
        ResultsError: the results, the baseline or the report of memaudit cannot be read, or were changed.
        ConfigError: the policy or the waivers are wrong.
        click.UsageError: a file was named, and no rule asks for it.
    """
    from leakaudit.gate.imported import load_imported
    from leakaudit.gate.policy import default_policy, load_policy
    from leakaudit.gate.waivers import waivers_file, waivers_for
    from leakaudit.history.reference import baseline_file, reference_for
    from leakaudit.plugins.names import names_for
    from leakaudit.results.files import read_results

    results, sha256 = read_results(run)
    policy = load_policy(by.policy, names_for(results)) if by.policy else default_policy()
    refuse_unasked(policy, by)
    return Judged(
        results,
        sha256,
        policy,
        waivers_for(policy, by.policy, by.waivers),
        waivers_file(policy, by.policy, by.waivers),
        reference_for(results, policy, by.policy, by.baseline),
        baseline_file(policy, by.policy, by.baseline),
        load_imported(by.memaudit) if by.memaudit else None,
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
