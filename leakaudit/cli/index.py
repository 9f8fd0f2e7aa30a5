"""`leakaudit index`: one page over many audits."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.results.wording import counted


@click.command(short_help="Write one page over many audits.")
@click.argument("folder", type=EXISTING)
@click.option("--out", type=EXISTING, help="The HTML file; default: index.html in FOLDER.")
@clear_errors
def index(folder: Path, out: Path | None) -> None:
    """Write one HTML page over all audits in and below FOLDER, worst first.

    A row has the verdict, the date, the model, the steps, what the deciding rule observed, and a link to the report. The page holds numbers
    and names of folders and models, no text. A folder of nights is such a FOLDER.
    """
    from leakaudit.reports.audit_index import write_index

    target = out or folder / "index.html"
    rows = write_index(folder, target, now=datetime.now(UTC))
    click.echo(f"{target}: {counted(len(rows), 'audit')}, the worst is {rows[0].status.value}")
