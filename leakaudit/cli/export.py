"""`leakaudit export`: an audit in the forms of other tools."""

from __future__ import annotations

from pathlib import Path

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.cli.judging import Yardstick, judging, read_judged
from leakaudit.errors import ResultsError


@click.group(short_help="Write an audit for other tools.")
def export() -> None:
    """Write an audit in the forms of other tools. None holds training text.

    What pipelines read has options of its own at `leakaudit gate`.
    """


@export.command("model-card", short_help="Write a Markdown section for a model's card.")
@click.argument("run_dir", type=EXISTING)
@judging
@click.option("-o", "--output", type=EXISTING, help="The Markdown file; default: standard output.")
@clear_errors
def model_card(run_dir: Path, output: Path | None, by: Yardstick) -> None:
    """Write a section for a model's card from RUN_DIR, a folder with results.json.

    It says in ten lines what was attacked, what came back, the worst bound, and what was not tested. It judges anew by the policy, and never
    calls a model private.
    """
    from datetime import UTC, datetime

    from leakaudit.reports import outputs

    judged = read_judged(run_dir, by)
    text = outputs.model_card(judged.results, judged.verdict(datetime.now(UTC)))
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{output}: was not written ({error.strerror or type(error).__name__})") from None
    click.echo(str(output))
