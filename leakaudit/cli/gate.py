"""`leakaudit gate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from leakaudit.cli.common import clear_errors, time_of
from leakaudit.cli.gate_outputs import Outputs, read_artifacts, with_outputs, write_outputs
from leakaudit.cli.gate_runs import Runs, judged_together, with_runs
from leakaudit.cli.judging import Yardstick, judging, read_judged
from leakaudit.errors import ResultsError
from leakaudit.exit_codes import ExitCode
from leakaudit.files.collector import collector_paused

if TYPE_CHECKING:
    from datetime import datetime

    from leakaudit.gate.verdict import Verdict
    from leakaudit.results.schema import Artifact


@click.command(short_help="Judge a run by a policy; the exit code is the verdict.")
@with_runs
@judging
@click.option("--at", metavar="TIME", help="Judge as if it were this ISO date or time, to see what expires until then.")
@click.option(
    "--allow",
    type=click.Choice(["inconclusive"]),
    help="Exit 0 instead of 4 if nothing is decided and no text came back; the verdict says so.",
)
@click.option("--soft-fail", is_flag=True, help="Exit 0 whatever the verdict is; the verdict itself stays.")
@click.option("-q", "--quiet", is_flag=True, help="Print the verdict line only.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON document.")
@with_outputs
@clear_errors
def gate(
    runs: Runs,
    at: str | None,
    allow: str | None,
    soft_fail: bool,
    quiet: bool,
    as_json: bool,
    by: Yardstick,
    outputs: Outputs,
) -> None:
    """Judge each RUN (a folder with results.json, or the file) by a policy.

    The verdict is written to verdict.json beside the results. The steps of several runs count together, if the runs can be compared; each step
    counts once. Fix the number of runs before the first one.

    Exit codes: 0 PASS, 2 wrong policy or usage, 3 FAIL, 4 INCONCLUSIVE, 5 ERROR (the evidence cannot be judged, or an output cannot be
    written).
    """
    document = runs.document
    _refuse_to_overwrite({"--out": runs.out, **outputs.files}, (*by.named, *runs.files, *outputs.artifacts))
    for earlier in filter(None, (document, outputs.svr)):
        with suppress(OSError):  # what an earlier call found is not what this one finds, whatever happens below
            earlier.unlink()
    if as_json and outputs.github:
        raise click.UsageError("--json prints one document and --github prints lines: choose one")
    for option, file in outputs.recorded.items():
        if at and file:
            raise click.UsageError(f"--at rehearses a judgement, and {option} records one: choose one")
    from datetime import UTC, datetime

    now = time_of(at) if at else datetime.now(UTC)
    released = read_artifacts(outputs, runs.files[0].parent)
    verdict = _judged(runs, by, released, now)
    if allow:
        verdict = verdict.allowing_inconclusive()
    kept = _write_verdict(verdict, document) if runs.several or document.parent.is_dir() else True
    _print_verdict(verdict, quiet=quiet, as_json=as_json)
    written = write_outputs(verdict, by.files, released, outputs) and (kept or runs.out is None)
    code = ExitCode.PASS if soft_fail else ExitCode(verdict.exit_code)
    sys.exit(code if written or code is not ExitCode.PASS else ExitCode.ERROR)


def _refuse_to_overwrite(written: Mapping[str, Path | None], read: Iterable[Path]) -> None:
    """Refuse to write a file that is read.

    Raises:
        click.UsageError: there is one.
    """
    taken = {path.resolve() for path in read}
    for option, file in written.items():
        if file is not None and file.resolve() in taken:
            raise click.UsageError(f"{option} {file}: this file is read here; name another one to write")


def _judged(runs: Runs, by: Yardstick, released: tuple[Artifact, ...], now: datetime) -> Verdict:
    """Return the verdict; ERROR if results, baseline or imports cannot be read.

    Raises:
        ConfigError: the policy or the waivers are wrong.
    """
    try:
        with collector_paused():
            if runs.several:
                return judged_together(runs, by, released, now)
            return read_judged(runs.files[0], by, released).verdict(now)
    except ResultsError as error:
        from leakaudit.gate.evaluate import unreadable
        from leakaudit.gate.subject import judged_by

        return judged_by(by.files.source, unreadable(str(error), by.files.load_policy(), now=now))


def _write_verdict(verdict: Verdict, document: Path) -> bool:
    """Write the verdict, and return whether that was possible; say so if not."""
    from leakaudit.files.private_files import write_atomic
    from leakaudit.gate.verdict import to_json

    try:
        write_atomic(document, json.dumps(to_json(verdict), indent=1))
    except OSError as error:
        stale = "; the one that is there is of an earlier call" if document.is_file() else ""
        click.echo(f"{document.name} was not written ({error.strerror or type(error).__name__}){stale}", err=True)
        return False
    return True


def _print_verdict(verdict: Verdict, *, quiet: bool, as_json: bool) -> None:
    if as_json:
        from leakaudit.gate.verdict import to_json

        click.echo(json.dumps(to_json(verdict), indent=1))
        return
    from leakaudit.reports.verdict_screen import print_verdict

    print_verdict(verdict, quiet=quiet)
