"""`leakaudit report`."""

from __future__ import annotations

from pathlib import Path

import click

from leakaudit.cli.common import EXISTING, REF_HELP, clear_errors
from leakaudit.errors import RedactionError, ResultsError


@click.command(short_help="Render the HTML report of a run again.")
@click.argument("run_dir", type=EXISTING)
@click.option("--text", "text", type=click.Choice(["hash", "masked", "full"]), default="masked", show_default=True)
@click.option("--policy", type=EXISTING, help="YAML policy; default: the built-in one.")
@click.option("--policy-ref", metavar="REF", help=REF_HELP)
@click.option("--waivers", type=EXISTING, help="YAML file of exceptions from the policy, as for the gate.")
@click.option("-o", "--output", type=EXISTING, help="The HTML file; default: report.html in RUN_DIR.")
@click.option("--allow-full-in-ci", is_flag=True, help="Allow --text full if the variable CI is set.")
@clear_errors
def report(
    run_dir: Path,
    text: str,
    policy: Path | None,
    policy_ref: str | None,
    waivers: Path | None,
    output: Path | None,
    allow_full_in_ci: bool,
) -> None:
    """Render the HTML report of RUN_DIR (a folder with results.json)."""
    from datetime import UTC, datetime

    from leakaudit.gate.policy_source import PolicyFiles
    from leakaudit.plugins.names import names_for
    from leakaudit.reports.page import write_report
    from leakaudit.results.files import load_results
    from leakaudit.results.schema import TextMode

    if not run_dir.is_dir():
        raise ResultsError(f"{run_dir}: no such folder; give the folder that holds results.json")
    mode = TextMode(text)
    files = PolicyFiles.of(policy, waivers, policy_ref)
    rules = files.load_policy(names_for(load_results(run_dir)))
    if mode is TextMode.FULL and files.policy is not None and not rules.report.allow_full:
        raise RedactionError(f"{files.policy}: does not allow text mode full (report.allow_full: true)")
    path = write_report(
        run_dir,
        mode,
        now=datetime.now(UTC),
        policy=rules,
        waivers=files.load_waivers(),
        source=files.source,
        output=output,
        allow_full=mode
        is TextMode.FULL,  # the explicit option is the permission; a policy that forbids it was refused above
        allow_full_in_ci=allow_full_in_ci,
    )
    click.echo(str(path))
