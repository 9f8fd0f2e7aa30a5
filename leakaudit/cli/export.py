"""`leakaudit export`: an audit in the forms of other tools."""

from __future__ import annotations

import json
from pathlib import Path

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.cli.judging import Yardstick, judging, read_judged
from leakaudit.errors import ResultsError

OUTPUT = click.option("-o", "--output", type=EXISTING, help="The file; default: standard output.")


@click.group(short_help="Write an audit for other tools.")
def export() -> None:
    """Write an audit in the forms of other tools. None holds training text.

    Each command judges the results anew by the policy. Outputs for pipelines, such as JUnit and SARIF, are options of `leakaudit gate`.
    """


@export.command("model-card", short_help="Write a Markdown section for a model's card.")
@click.argument("run_dir", type=EXISTING)
@judging
@OUTPUT
@clear_errors
def model_card(run_dir: Path, output: Path | None, by: Yardstick) -> None:
    """Write a section for a model's card from RUN_DIR, a folder with results.json.

    It says in ten lines what was attacked, what came back, the worst bound, and what was not tested. It never calls a model private.
    """
    from datetime import UTC, datetime

    from leakaudit.reports import outputs

    judged = read_judged(run_dir, by)
    _write(outputs.model_card(judged.results, judged.verdict(datetime.now(UTC))), output)


@export.command(short_help="Write an annex: clause, test, result, gap.")
@click.argument("run_dir", type=EXISTING)
@judging
@OUTPUT
@clear_errors
def annex(run_dir: Path, output: Path | None, by: Yardstick) -> None:
    """Write an annex for a privacy file from RUN_DIR, a folder with results.json.

    A Markdown table: for each clause of regulations and standards what was tested, the result with its bound, and what was not tested. It is
    evidence for the clauses and says of none that it is fulfilled.
    """
    from datetime import UTC, datetime

    from leakaudit.reports import outputs

    judged = read_judged(run_dir, by)
    _write(outputs.annex(judged.results, judged.verdict(datetime.now(UTC))), output)


@export.command(short_help="Print tags for a model's version in a registry.")
@click.argument("run_dir", type=EXISTING)
@judging
@click.option(
    "--format",
    "form",
    type=click.Choice(["mlflow", "json"]),
    default="json",
    show_default=True,
    help="json: one object. mlflow: one `key=value` a line.",
)
@OUTPUT
@clear_errors
def tags(run_dir: Path, form: str, output: Path | None, by: Yardstick) -> None:
    """Print tags from RUN_DIR, a folder with results.json.

    The tags are the verdict, its digests and its dates, as pairs of a key and a value.
    """
    from datetime import UTC, datetime

    from leakaudit.reports import outputs

    judged = read_judged(run_dir, by)
    found = outputs.tags(judged.verdict(datetime.now(UTC)))
    lines = "".join(f"{key}={value}\n" for key, value in found.items())
    _write(lines if form == "mlflow" else json.dumps(found, indent=1) + "\n", output)


def _write(text: str, output: Path | None) -> None:
    """Print a text, or write it and print the file's name.

    Raises:
        ResultsError: it cannot be written.
    """
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{output}: was not written ({error.strerror or type(error).__name__})") from None
    click.echo(str(output))
