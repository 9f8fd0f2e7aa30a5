"""`leakaudit bundle`: one zip for an auditor, and its checks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from leakaudit.cli.common import EXISTING, clear_errors, time_of
from leakaudit.cli.judging import TEXT, Judged, Yardstick, judging, read_judged, text_mode
from leakaudit.errors import ConfigError, RedactionError, ResultsError
from leakaudit.exit_codes import ExitCode

if TYPE_CHECKING:
    from datetime import datetime


NAME = "leakaudit-evidence"
"""Name of the zip without its end, if the caller gives none."""


class _WithDefault(click.Group):
    """A group whose first word may be a folder: `bundle RUN` is `bundle write RUN`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["write", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_WithDefault, short_help="Write or check one zip with all evidence.")
def bundle() -> None:
    """Write one zip with the evidence of an audit, or check one.

    `leakaudit bundle RUN` is short for `leakaudit bundle write RUN`.
    """


@bundle.command(short_help="Write the zip.")
@click.argument("run_dir", type=EXISTING)
@judging
@TEXT
@click.option(
    "--at", metavar="TIME", help="Judge as if it were this ISO date or time; default: the time of verdict.json."
)
@click.option("-o", "--output", type=EXISTING, help=f"The zip; default: {NAME}.zip in RUN_DIR.")
@click.option("--allow-full-in-ci", is_flag=True, help="Allow --text full where the environment variable CI is set.")
@clear_errors
def write(
    run_dir: Path,
    text: str | None,
    at: str | None,
    output: Path | None,
    allow_full_in_ci: bool,
    by: Yardstick,
) -> None:
    """Write one zip from RUN_DIR, a folder with results.json.

    The zip has the verdict, the report, the results, policy and waivers, an annex on regulations, the section for a model's card, versions,
    checksums, and a README for the auditor. The verdict is that of the last `leakaudit gate` with the same policy; without one, give --at. The
    same inputs give the same bytes.
    """
    from leakaudit.files.private_files import write_atomic
    from leakaudit.files.regular_files import read_regular
    from leakaudit.reports import bundle as evidence
    from leakaudit.results.binding import SUBJECT
    from leakaudit.results.journal import load_journal
    from leakaudit.results.schema import TextMode

    judged = read_judged(run_dir, by)
    mode = text_mode(text, judged.policy)
    folder = run_dir if run_dir.is_dir() else run_dir.parent
    target = output or folder / f"{NAME}{'-' + evidence.FULL_TEXT if mode is TextMode.FULL else ''}.zip"
    if mode is TextMode.FULL:
        _check_full(judged, by.files.policy, target)
    now, allowed = (time_of(at).replace(microsecond=0), False) if at else _judged_at(folder, judged)
    results, raw = evidence.shareable(judged.results, read_regular(folder / "results.json"), mode)
    given = evidence.Evidence(
        results=results,
        raw=raw,
        policy=judged.policy,
        policy_text=_bytes(by.files.policy_text()) or evidence.built_in_text(judged.policy),
        now=now,
        allowed=allowed,
        waivers=judged.waivers,
        waivers_text=_bytes(by.files.waivers_text(judged.policy)),
        reference=judged.reference,
        baseline_text=_baseline(judged, by),
        claim=judged.claim,
        subject_text=(folder / SUBJECT).read_bytes() if judged.claim.binding else None,
        imported=judged.imported,
    )
    members = evidence.members(
        given,
        mode,
        origin={"sha256": judged.sha256, "digest": judged.results.digest or ""},
        journal=load_journal(folder / "journal.jsonl") if mode is TextMode.FULL else (),
        allow_full_in_ci=allow_full_in_ci,
    )
    try:
        write_atomic(target, evidence.zipped(members, now))
    except OSError as error:
        raise ResultsError(f"{target}: was not written ({error.strerror or type(error).__name__})") from None
    click.echo(str(target))


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _baseline(judged: Judged, by: Yardstick) -> bytes | None:
    """Return the bytes of the baseline's file; None without it or a rule on it.

    Raises:
        ResultsError: the baseline is another audit, which a bundle does not hold.
    """
    if not judged.policy.compares:
        return None
    if not judged.reference.problem and not judged.reference.digest:
        raise ResultsError(
            "a bundle holds the file of a baseline, and --baseline names an audit; make the file with `leakaudit baseline set`"
        )
    return by.baseline_text(judged.policy)


def _check_full(judged: Judged, policy: Path | None, target: Path) -> None:
    """Refuse training text that the policy forbids, or in a file whose name hides it.

    Raises:
        RedactionError: the policy does not allow it, or the folder can be written to by everybody.
        ConfigError: the name of the file does not say it.
    """
    from leakaudit.reports.bundle import FULL_TEXT
    from leakaudit.reports.page import refuse_open_folder

    if policy is not None and not judged.policy.report.allow_full:
        raise RedactionError(f"{policy}: does not allow text mode full (report.allow_full: true)")
    if FULL_TEXT not in target.name:
        raise ConfigError(f"{target.name}: a bundle with training text needs {FULL_TEXT} in its name")
    refuse_open_folder(target)


def _judged_at(folder: Path, judged: Judged) -> tuple[datetime, bool]:
    """Return when the gate judged the same, and whether it allowed no decision.

    Raises:
        ResultsError: `verdict.json` is missing, or is about other results or rules.
    """
    from leakaudit.files.strict_json import parse_json, read_bounded
    from leakaudit.gate.verdict import Verdict
    from leakaudit.results.consistency import moment

    todo = "run `leakaudit gate` on it with the same options, or give --at TIME"
    try:
        found = Verdict.model_validate(parse_json(read_bounded(folder / "verdict.json")))
    except (OSError, ValueError):
        raise ResultsError(f"{folder}: has no verdict.json that can be read; {todo}") from None
    now = moment(found.evaluated_at)
    told = (found.results_sha256, found.policy_digest, found.waivers_digest, [one.digest for one in found.imports])
    waivers = judged.waivers.digest if judged.waivers else ""
    imports = [judged.imported.digest] if judged.imported else []
    baseline = found.baseline.digest if found.baseline else ""
    if now is None or (*told, baseline) != (
        judged.sha256,
        judged.policy.digest,
        waivers,
        imports,
        judged.reference.digest,
    ):
        raise ResultsError(
            f"{folder}: its verdict.json is about other results, policy, waivers, imports or baseline; {todo}"
        )
    return now, found.allowed


@bundle.command(short_help="Check a zip, and judge its results anew.")
@click.argument("file", type=EXISTING)
@clear_errors
def verify(file: Path) -> None:
    """Check FILE, a zip of `leakaudit bundle`. Nothing is unpacked to the disk.

    It checks sums and digests, judges the results anew at the recorded time, and makes report, annex and card anew. Each problem is a sentence, and the
    exit code is then 5; else it is 0, whatever the verdict is.
    """
    from leakaudit.reports.bundle_check import check_bundle
    from leakaudit.reports.escaping import plain

    found = check_bundle(file)
    for problem in found.problems:
        click.echo(f"problem: {plain(problem)}")
    for note in found.notes:
        click.echo(f"note: {plain(note)}")
    if found.problems:
        sys.exit(ExitCode.ERROR)
    if found.verdict is not None:
        click.echo(f"ok: {found.verdict.verdict} follows from what the bundle holds, at {found.verdict.evaluated_at}")
