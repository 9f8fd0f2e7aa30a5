"""`leakaudit report`."""

from __future__ import annotations

from pathlib import Path

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.cli.judging import TEXT, Yardstick, judging, read_judged, text_mode
from leakaudit.errors import RedactionError, ResultsError


@click.command(short_help="Render the HTML report of a run again.")
@click.argument("run_dir", type=EXISTING)
@TEXT
@judging
@click.option("-o", "--output", type=EXISTING, help="The HTML file; default: report.html in RUN_DIR.")
@click.option("--allow-full-in-ci", is_flag=True, help="Allow --text full where the environment variable CI is set.")
@clear_errors
def report(run_dir: Path, text: str | None, output: Path | None, allow_full_in_ci: bool, by: Yardstick) -> None:
    """Render the HTML report of RUN_DIR (a folder with results.json)."""
    from datetime import UTC, datetime

    from leakaudit.reports.page import write_report
    from leakaudit.results.schema import TextMode

    if not run_dir.is_dir():
        raise ResultsError(f"{run_dir}: no such folder; give the folder that holds results.json")
    now = datetime.now(UTC)
    judged = read_judged(run_dir, by)
    mode = text_mode(text, judged.policy)
    if mode is TextMode.FULL and by.files.policy is not None and not judged.policy.report.allow_full:
        raise RedactionError(f"{by.files.policy}: does not allow text mode full (report.allow_full: true)")
    target = output or run_dir / "report.html"
    try:
        write_report(
            run_dir,
            mode,
            now=now,
            policy=judged.policy,
            verdict=judged.verdict(now),
            output=target,
            # the explicit option is the permission; a policy that forbids it was refused above
            allow_full=mode is TextMode.FULL,
            allow_full_in_ci=allow_full_in_ci,
        )
    except OSError as error:
        raise ResultsError(f"{target}: was not written ({error.strerror or type(error).__name__})") from None
    click.echo(str(target))
