"""`leakaudit gate`."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from leakaudit.cli.common import EXISTING, REF_HELP, clear_errors
from leakaudit.cli.gate_outputs import Outputs, read_artifacts, with_outputs, write_outputs
from leakaudit.errors import ResultsError
from leakaudit.exit_codes import ExitCode

if TYPE_CHECKING:
    from datetime import datetime

    from leakaudit.gate.policy_source import PolicyFiles
    from leakaudit.gate.verdict import Verdict
    from leakaudit.results.schema import Artifact


@click.command(short_help="Judge a run by a policy; the exit code is the verdict.")
@click.argument("run_dir", type=EXISTING)
@click.option("--policy", type=EXISTING, help="YAML policy; default: the built-in one.")
@click.option("--policy-ref", metavar="REF", help=REF_HELP)
@click.option("--waivers", type=EXISTING, help="YAML file of exceptions from the policy, each with an end.")
@click.option("--at", metavar="TIME", help="Judge as at this ISO date or time, to rehearse what expires.")
@click.option(
    "--allow",
    type=click.Choice(["inconclusive"]),
    help="Exit 0 if nothing is decided and nothing came back; said in the verdict.",
)
@click.option("--soft-fail", is_flag=True, help="Exit 0 whatever the verdict; the verdict itself stays.")
@click.option("-q", "--quiet", is_flag=True, help="Print the verdict line only.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON document.")
@with_outputs
@clear_errors
def gate(
    run_dir: Path,
    policy: Path | None,
    policy_ref: str | None,
    waivers: Path | None,
    at: str | None,
    allow: str | None,
    soft_fail: bool,
    quiet: bool,
    as_json: bool,
    outputs: Outputs,
) -> None:
    """Judge RUN_DIR (a folder with results.json, or the file) by a policy.

    Exit codes: 0 PASS, 2 wrong policy or usage, 3 FAIL, 4 INCONCLUSIVE, 5 ERROR (the evidence cannot be judged, or an output cannot be
    written).
    """
    if as_json and outputs.github:
        raise click.UsageError("--json prints one document and --github prints lines: choose one")
    if at and outputs.attestation:
        raise click.UsageError("--at rehearses a judgement, and --attestation records one: choose one")
    from datetime import UTC, datetime

    from leakaudit.gate.policy_source import PolicyFiles

    file = run_dir / "results.json" if run_dir.is_dir() else run_dir
    document = file.parent / "verdict.json"
    now = _time(at) if at else datetime.now(UTC)
    files = PolicyFiles.of(policy, waivers, policy_ref)
    released = read_artifacts(outputs, file.parent)
    verdict = _judged(file, document, files, released, now)
    if allow:
        verdict = verdict.allowing_inconclusive()
    _write_verdict(verdict, document)
    _print_verdict(verdict, quiet=quiet, as_json=as_json)
    written = write_outputs(verdict, files, released, outputs)
    code = ExitCode.PASS if soft_fail else ExitCode(verdict.exit_code)
    sys.exit(code if written or code is not ExitCode.PASS else ExitCode.ERROR)


def _judged(file: Path, document: Path, files: PolicyFiles, released: tuple[Artifact, ...], now: datetime) -> Verdict:
    """Return the verdict on results; ERROR if they cannot be read.

    The verdict of an earlier call is removed first: it is not that of this one, whatever happens.

    Raises:
        ConfigError: the policy or the waivers cannot be read.
    """
    from leakaudit.gate.evaluate import evaluate, unreadable
    from leakaudit.gate.subject import Claim
    from leakaudit.plugins.names import names_for
    from leakaudit.results.binding import read_binding
    from leakaudit.results.files import read_results

    exceptions = files.load_waivers()
    with suppress(OSError):
        document.unlink()
    try:
        results, sha256 = read_results(file)
        claim = Claim(released, read_binding(file.parent, results), files.source)
    except ResultsError as error:
        return unreadable(str(error), files.load_policy(), now=now)
    rules = files.load_policy(names_for(results))
    return evaluate(results, rules, now=now, results_sha256=sha256, waivers=exceptions, claim=claim)


def _write_verdict(verdict: Verdict, document: Path) -> None:
    """Write `verdict.json`; say so if that is impossible."""
    from leakaudit.files.private_files import write_atomic
    from leakaudit.gate.verdict import to_json

    try:
        if document.parent.is_dir():
            write_atomic(document, json.dumps(to_json(verdict), indent=1))
    except OSError as error:
        stale = "; the one that is there is of an earlier call" if document.is_file() else ""
        click.echo(f"verdict.json was not written ({error.strerror or type(error).__name__}){stale}", err=True)


def _print_verdict(verdict: Verdict, *, quiet: bool, as_json: bool) -> None:
    if as_json:
        from leakaudit.gate.verdict import to_json

        click.echo(json.dumps(to_json(verdict), indent=1))
        return
    from leakaudit.reports.terminal import print_verdict

    print_verdict(verdict, quiet=quiet)


def _time(text: str) -> datetime:
    """Return an ISO date or time; without a zone it is in UTC.

    Raises:
        click.UsageError: it is neither.
    """
    from datetime import UTC, datetime

    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(
            f"--at {text!r} is no ISO date or time, such as 2026-12-16 or 2026-12-16T08:00"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
