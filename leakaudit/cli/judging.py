"""What a command judges, and by what: its options and their reading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

from leakaudit.cli.common import EXISTING

if TYPE_CHECKING:
    from datetime import datetime

    from leakaudit.gate.imported import Imported
    from leakaudit.gate.policy import Policy
    from leakaudit.gate.verdict import Verdict
    from leakaudit.gate.waivers import Waivers
    from leakaudit.results.schema import Results

P = ParamSpec("P")
R = TypeVar("R")

UNASKED = "the policy has no rule under `imported:`, so nothing would judge the report of memaudit; add one, or leave out --memaudit"
"""Refusal of results that no rule judges."""


def judging(command: Callable[P, R]) -> Callable[P, R]:
    """Give a command the options of what it judges by."""
    for option in (
        click.option(
            "--memaudit", type=EXISTING, help="Report of memaudit, for the rules under `imported:` of the policy."
        ),
        click.option("--waivers", type=EXISTING, help="YAML file of exceptions from the policy, as for the gate."),
        click.option("--policy", type=EXISTING, help="YAML policy; default: the built-in one."),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class Judged:
    """What a command judges, and by what."""

    results: Results
    sha256: str
    """SHA-256 of the file of the results, in hex."""
    policy: Policy
    waivers: Waivers | None
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
            imported=self.imported,
        )


def read_judged(run_dir: Path, policy: Path | None, waivers: Path | None, memaudit: Path | None) -> Judged:
    """Read what is judged.

    Raises:
        ResultsError: the results, or the report of memaudit, cannot be read.
        ConfigError: the policy or the waivers are wrong.
        click.UsageError: no rule asks for the report of memaudit.
    """
    from leakaudit.gate.imported import load_imported
    from leakaudit.gate.policy import default_policy, load_policy
    from leakaudit.gate.waivers import load_waivers
    from leakaudit.plugins.names import names_for
    from leakaudit.results.files import read_results

    results, sha256 = read_results(run_dir)
    rules = load_policy(policy, names_for(results)) if policy else default_policy()
    if memaudit and not rules.imported:
        raise click.UsageError(UNASKED)
    return Judged(
        results,
        sha256,
        rules,
        load_waivers(waivers) if waivers else None,
        load_imported(memaudit) if memaudit else None,
    )
