"""`leakaudit bind`."""

from __future__ import annotations

from pathlib import Path

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.errors import ResultsError


@click.command(short_help="Name the files that an audited run made.")
@click.argument("run_dir", type=EXISTING)
@click.argument("artifacts", metavar="FILE...", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@clear_errors
def bind(run_dir: Path, artifacts: tuple[Path, ...]) -> None:
    """Name each FILE that the run in RUN_DIR made, for `leakaudit gate --artifact`.

    FILE may be a folder: then each file in it is named. The command writes names and digests to subject.json beside the results, and replaces
    those of an earlier call. Run it where the files are made: whoever can write the files or subject.json decides which files are bound.
    """
    from datetime import UTC, datetime

    from leakaudit.results.artifacts import find_artifacts
    from leakaudit.results.binding import SUBJECT, Binding, write_binding
    from leakaudit.results.files import load_results
    from leakaudit.results.wording import counted

    folder = run_dir if run_dir.is_dir() else run_dir.parent
    results = load_results(run_dir)
    if results.digest is None:
        raise ResultsError(f"{run_dir}: has no digest, so nothing can be bound to it; audit with this version")
    found = find_artifacts(artifacts, without=folder)
    for name, why in found.not_named:
        raise ResultsError(f"{name}: {why}; nothing was bound")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        write_binding(folder, Binding(results_digest=results.digest, bound_at=now, artifacts=found.artifacts))
    except OSError as error:
        raise ResultsError(f"{folder / SUBJECT}: was not written ({error.strerror or type(error).__name__})") from None
    click.echo(
        f"{folder / SUBJECT}: {counted(len(found.artifacts), 'file')} bound to the results {results.digest[:19]}"
    )
