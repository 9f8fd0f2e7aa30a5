"""`leakaudit report` and `leakaudit gate`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.cli.judging import UNASKED
from leakaudit.errors import RedactionError, ResultsError
from leakaudit.exit_codes import ExitCode

if TYPE_CHECKING:
    from datetime import datetime

    from leakaudit.gate.verdict import Verdict

FILE = click.Path(dir_okay=False, path_type=Path)
ARTIFACT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Render the HTML report of a run again.")
@click.argument("run_dir", type=EXISTING)
@click.option("--text", "text", type=click.Choice(["hash", "masked", "full"]), default="masked", show_default=True)
@click.option("--policy", type=EXISTING, help="YAML policy; default: the built-in one.")
@click.option("--waivers", type=EXISTING, help="YAML file of exceptions from the policy, as for the gate.")
@click.option("--memaudit", type=EXISTING, help="Report of memaudit, as for the gate.")
@click.option("-o", "--output", type=EXISTING, help="The HTML file; default: report.html in RUN_DIR.")
@click.option("--allow-full-in-ci", is_flag=True, help="Allow --text full if the variable CI is set.")
@clear_errors
def report(
    run_dir: Path,
    text: str,
    policy: Path | None,
    waivers: Path | None,
    memaudit: Path | None,
    output: Path | None,
    allow_full_in_ci: bool,
) -> None:
    """Render the HTML report of RUN_DIR (a folder with results.json)."""
    from datetime import UTC, datetime

    from leakaudit.gate.imported import load_imported
    from leakaudit.gate.policy import default_policy, load_policy
    from leakaudit.gate.waivers import load_waivers
    from leakaudit.plugins.names import names_for
    from leakaudit.reports.page import write_report
    from leakaudit.results.files import load_results
    from leakaudit.results.schema import TextMode

    if not run_dir.is_dir():
        raise ResultsError(f"{run_dir}: no such folder; give the folder that holds results.json")
    mode = TextMode(text)
    rules = load_policy(policy, names_for(load_results(run_dir))) if policy else default_policy()
    if mode is TextMode.FULL and policy is not None and not rules.report.allow_full:
        raise RedactionError(f"{policy}: does not allow text mode full (report.allow_full: true)")
    if memaudit and not rules.imported:
        raise click.UsageError(UNASKED)
    path = write_report(
        run_dir,
        mode,
        now=datetime.now(UTC),
        policy=rules,
        waivers=load_waivers(waivers) if waivers else None,
        imported=load_imported(memaudit) if memaudit else None,
        output=output,
        allow_full=mode
        is TextMode.FULL,  # the explicit option is the permission; a policy that forbids it was refused above
        allow_full_in_ci=allow_full_in_ci,
    )
    click.echo(str(path))


@click.command(short_help="Judge a run by a policy; the exit code is the verdict.")
@click.argument("run_dir", type=EXISTING)
@click.option("--policy", type=EXISTING, help="YAML policy; default: the built-in one.")
@click.option("--waivers", type=EXISTING, help="YAML file of exceptions from the policy, each with an end.")
@click.option("--memaudit", type=EXISTING, help="Report of memaudit, for the rules under `imported:` of the policy.")
@click.option("--at", metavar="TIME", help="Judge as at this ISO date or time, to rehearse what expires.")
@click.option(
    "--allow",
    type=click.Choice(["inconclusive"]),
    help="Exit 0 if nothing is decided and nothing came back; said in the verdict.",
)
@click.option("--soft-fail", is_flag=True, help="Exit 0 whatever the verdict; the verdict itself stays.")
@click.option("-q", "--quiet", is_flag=True, help="Print the verdict line only.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON document.")
@click.option("--junit", type=FILE, help="Write JUnit XML: each rule is a test.")
@click.option("--summary", type=FILE, help="Append Markdown, as to $GITHUB_STEP_SUMMARY.")
@click.option("--badge", type=FILE, help="Write the JSON of a badge of shields.io.")
@click.option("--sarif", type=FILE, help="Write SARIF: each open rule at its line of the policy.")
@click.option("--attestation", type=FILE, help="Write an unsigned in-toto Statement on the artefacts.")
@click.option("--svr", type=FILE, help="On PASS, write an unsigned in-toto Statement of what was shown.")
@click.option("--cyclonedx", type=FILE, help="Write a CycloneDX bill with the verdict in the artefacts' model cards.")
@click.option(
    "--artifact", "artifacts", type=ARTIFACT, multiple=True, help="A released file, for the three above; repeatable."
)
@click.option("--github", is_flag=True, help="Print annotations, and write to $GITHUB_OUTPUT.")
@clear_errors
def gate(
    run_dir: Path,
    policy: Path | None,
    waivers: Path | None,
    memaudit: Path | None,
    at: str | None,
    allow: str | None,
    soft_fail: bool,
    quiet: bool,
    as_json: bool,
    junit: Path | None,
    summary: Path | None,
    badge: Path | None,
    sarif: Path | None,
    attestation: Path | None,
    svr: Path | None,
    cyclonedx: Path | None,
    artifacts: tuple[Path, ...],
    github: bool,
) -> None:
    """Judge RUN_DIR (a folder with results.json, or the file) by a policy.

    Exit codes: 0 PASS, 2 wrong policy or usage, 3 FAIL, 4 INCONCLUSIVE, 5 ERROR (the evidence cannot be judged, or an output cannot be
    written).
    """
    _check_choices(as_json and github, at, {"--attestation": attestation, "--svr": svr})
    _check_artifacts(artifacts, {"--attestation": attestation, "--svr": svr, "--cyclonedx": cyclonedx})
    from datetime import UTC, datetime

    from leakaudit.files.private_files import write_atomic
    from leakaudit.gate.evaluate import evaluate, unreadable
    from leakaudit.gate.imported import load_imported
    from leakaudit.gate.policy import default_policy, load_policy
    from leakaudit.gate.verdict import to_json
    from leakaudit.gate.waivers import load_waivers
    from leakaudit.plugins.names import names_for
    from leakaudit.results.files import read_results

    exceptions = load_waivers(waivers) if waivers else None
    file = run_dir / "results.json" if run_dir.is_dir() else run_dir
    now = _time(at) if at else datetime.now(UTC)
    document = file.parent / "verdict.json"
    with suppress(OSError):  # the verdict of an earlier call is not that of this one, whatever happens below
        document.unlink()
    try:
        results, sha256 = read_results(file)
        imported = load_imported(memaudit) if memaudit else None
    except ResultsError as error:
        verdict = unreadable(str(error), load_policy(policy) if policy else default_policy(), now=now)
    else:
        rules = load_policy(policy, names_for(results)) if policy else default_policy()
        if imported and not rules.imported:
            raise click.UsageError(UNASKED)
        verdict = evaluate(results, rules, now=now, results_sha256=sha256, waivers=exceptions, imported=imported)
    if allow:
        verdict = verdict.allowing_inconclusive()
    try:
        if file.parent.is_dir():
            write_atomic(document, json.dumps(to_json(verdict), indent=1))
    except OSError as error:
        stale = "; the one that is there is of an earlier call" if document.is_file() else ""
        click.echo(f"verdict.json was not written ({error.strerror or type(error).__name__}){stale}", err=True)
    if as_json:
        click.echo(json.dumps(to_json(verdict), indent=1))
    else:
        from leakaudit.reports.terminal import print_verdict

        print_verdict(verdict, quiet=quiet)
    written = _write_outputs(
        verdict,
        policy,
        junit=junit,
        summary=summary,
        badge=badge,
        sarif=sarif,
        attestation=attestation,
        svr=svr,
        cyclonedx=cyclonedx,
        artifacts=artifacts,
        github=github,
    )
    code = ExitCode.PASS if soft_fail else ExitCode(verdict.exit_code)
    sys.exit(code if written or code is not ExitCode.PASS else ExitCode.ERROR)


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


def _check_choices(two_answers: bool, at: str | None, recorded: Mapping[str, Path | None]) -> None:
    """Refuse two answers on standard output, and a rehearsal that is recorded.

    Raises:
        click.UsageError: options exclude each other.
    """
    if two_answers:
        raise click.UsageError("--json prints one document and --github prints lines: choose one")
    for option, file in recorded.items():
        if at and file:
            raise click.UsageError(f"--at rehearses a judgement, and {option} records one: choose one")


def _check_artifacts(artifacts: Sequence[Path], outputs: Mapping[str, Path | None]) -> None:
    """Refuse outputs about artefacts without one, and two artefacts of one name.

    Raises:
        click.UsageError: an option lacks another one, or two files could not be told apart.
    """
    asked = [option for option, file in outputs.items() if file is not None]
    if not asked and not artifacts:
        return
    if asked and not artifacts:
        raise click.UsageError(f"{asked[0]} says what was found about files; name each with --artifact FILE")
    if artifacts and not asked:
        raise click.UsageError(f"--artifact names files for {' and '.join(outputs)}; give one of them")
    from leakaudit.reports.outputs.artifacts import artifact_name

    names = [artifact_name(path) for path in artifacts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise click.UsageError(f"two artefacts are called {twice[0]}; name them from a folder above both")


def _write_outputs(
    verdict: Verdict,
    policy: Path | None,
    *,
    junit: Path | None,
    summary: Path | None,
    badge: Path | None,
    sarif: Path | None,
    attestation: Path | None,
    svr: Path | None,
    cyclonedx: Path | None,
    artifacts: tuple[Path, ...],
    github: bool,
) -> bool:
    """Write what was asked for; return whether all of it could be written."""
    if not github and not any((junit, summary, badge, sarif, attestation, svr, cyclonedx)):
        return True
    from leakaudit.gate.policy import rule_lines
    from leakaudit.reports import outputs

    lines = rule_lines(policy) if policy and (sarif or github) else None
    released = cache(lambda: [outputs.artifact_of(path) for path in artifacts])  # read once, and only if asked for
    made: list[tuple[Path | None, str, Callable[[], str]]] = [
        (junit, "w", lambda: outputs.junit_xml(verdict)),
        (summary, "a", lambda: outputs.summary(verdict)),
        (badge, "w", lambda: outputs.badge(verdict)),
        (sarif, "w", lambda: outputs.sarif(verdict, policy, lines)),
        (attestation, "w", lambda: outputs.attestation(verdict, released())),
        (_only_on_pass(svr, verdict), "w", lambda: outputs.svr(verdict, released())),
        (cyclonedx, "w", lambda: outputs.cyclonedx(verdict, released())),
    ]
    if github:
        for line in outputs.workflow_commands(verdict, policy, lines):
            click.echo(line)
        if told := os.environ.get("GITHUB_OUTPUT"):
            made.append((Path(told), "a", lambda: outputs.job_outputs(verdict)))
    written = True
    for path, mode, make in made:
        if path is None:
            continue
        try:
            text = make()  # before the file is emptied
            with path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            click.echo(f"{path}: was not written ({error.strerror or type(error).__name__})", err=True)
            written = False
    return written


def _only_on_pass(file: Path | None, verdict: Verdict) -> Path | None:
    """Return the file if the verdict is PASS; else remove the one of an earlier PASS."""
    from leakaudit.gate.verdict import Status

    if file is None or verdict.verdict is Status.PASS:
        return file
    with suppress(OSError):
        file.unlink()
    stale = "; the one that is there is of an earlier call" if file.exists() else ""
    click.echo(f"{file}: was not written, because the verdict is {verdict.verdict}{stale}", err=True)
    return None
